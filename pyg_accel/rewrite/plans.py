"""The decisions for a model, layer by layer, as data and as text."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Any

import torch

from pyg_accel.rewrite.ir import Leaf, is_ones, leaves_of
from pyg_accel.rewrite.layer import Reassociation
from pyg_accel.rewrite.model import optimize
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers
from pyg_accel.rewrite.select import Decision
from pyg_accel.rewrite.tree import Tree, composition_of, leaves_in

__all__ = ["HEAD", "LayerPlan", "ModelPlan", "TreePlan", "facts", "legend", "plan", "row", "title"]

WIDTH = 100  # of text
MOST = 24  # associations of a layer in a table of text
COLUMNS = (36, 32, 10, 16)  # of a table in it
# Terms that the legend of a plan explains.
WORDS = {
    "dynamic": "rows of features are scaled in every call",
    "precompute": "the edges are scaled, once per graph",
    "reuse": "attention sums the product that its scores read",
    "recompute": "attention sums the features, before that product",
    "roofline": "times from counts of operations and bytes, over the machine's peaks",
}
HEAD = ("association", "primitives", "predicted", "verdict")


@dataclass(frozen=True)
class TreePlan:
    """One association of a layer.

    Attributes:
        tree: its text.
        forward: primitives of the forward pass.
        backward: of the backward pass.
        once: primitives that are computed once per graph.
        seconds: predicted time of a call; None if no cost model was used.
        bytes_kept: size in float32 of the activations that the backward pass needs.
        verdict: chosen, a candidate, or by which rule it was pruned.
        chosen: whether it is the one that runs.
        root: the tree itself.
    """

    tree: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    once: tuple[str, ...]
    seconds: float | None
    bytes_kept: int
    verdict: str
    chosen: bool
    root: Tree

    @property
    def composition(self) -> str:
        """Its name in the paper: dynamic or precompute, reuse or recompute."""
        return composition_of(self.root)


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a model.

    Attributes:
        path: its name in the model.
        layer: its class.
        algebra: its expression; empty if it was not lifted.
        sizes: by symbol.
        trees: all associations, the chosen one first.
        by: how the tree was chosen.
        source: the cost model, if it was used.
        reasons: why calls ran the original layer.
        calls: the lines of code that call it.
    """

    path: str
    layer: str
    algebra: str
    sizes: Mapping[str, int]
    trees: tuple[TreePlan, ...]
    by: str
    source: str
    reasons: tuple[str, ...]
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelPlan:
    """The decisions for a model.

    Attributes:
        model: its class.
        train: whether forward and backward were optimized together.
        layers: its message passing layers.
    """

    model: str
    train: bool
    layers: tuple[LayerPlan, ...]

    def __str__(self) -> str:
        """Return text, with a table for each layer."""
        lines = _wrapped([title(self)])
        for layer in self.layers:
            name = f"{layer.path or 'the layer'}: {layer.layer}"
            lines += ["", *_wrapped([name, *facts(layer), *legend(layer)])]
            if layer.trees:
                lines.append(_table(map(row, layer.trees[:MOST])))
                if len(layer.trees) > MOST:
                    lines.append(f"and {len(layer.trees) - MOST} more, which format='md' lists")
        return "\n".join(lines)


def _wrapped(texts: Iterable[str]) -> list[str]:
    lines = (wrap(t, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for t in texts)
    return [line for wrapped in lines for line in wrapped]


def plan(
    model: torch.nn.Module, *example_inputs: Any, train: bool = False, **options: Any
) -> ModelPlan:
    """Return the decisions of :func:`~pyg_accel.optimize` as data; ``print`` shows them.

    Args:
        model: as for ``optimize``, or its result, to see the decisions of its calls.
        example_inputs: arguments of a call; none for the result of ``optimize``.
        train: as for ``optimize``.
        options: the other arguments of ``optimize``; ``price_all`` is True by default here.

    Returns:
        For each layer its associations with predicted times, and the choice.

    Raises:
        ValueError: as ``optimize`` does.
    """
    if not isinstance(model, OptimizedModel):
        fast = optimize(model, *example_inputs, train=train, **{"price_all": True, **options})
    elif example_inputs or options or train:
        raise ValueError(
            "expected no examples and no options with a model that is rewritten: its plan is "
            "what it decided so far (give the original for another)"
        )
    else:
        fast = model
    layers = tuple(_layer(path, layer) for path, layer in rewritten_layers(fast).items())
    return ModelPlan(type(fast._original).__name__, fast._opt_options.train, layers)


def _layer(path: str, layer: Reassociation) -> LayerPlan:
    calls = tuple(layer.calls) if path else ()  # the model itself is called by the wrapper
    reasons = tuple(layer.reasons) or (() if layer.decisions else ("it was not called",))
    name = type(layer.layer).__name__
    if not layer.decisions:
        return LayerPlan(path, name, "", {}, (), "", "", reasons, calls)
    decision = layer.decisions[-1]
    trees = sorted(
        (_tree(decision, tree) for tree in decision.pruned.all),
        key=lambda t: (not t.chosen, t.verdict.startswith("pruned"), t.seconds or 0.0),
    )
    return LayerPlan(path, name, str(decision.form), _sizes(decision), tuple(trees),
                     decision.choice.by, decision.choice.source, reasons, calls)  # fmt: skip


def _sizes(decision: Decision) -> dict[str, int]:
    """Return the sizes of the symbols of the expression."""
    leaves = list(leaves_of(decision.form))
    used = {s for leaf in leaves for s in (leaf.rows, leaf.cols)} - {"1"} | {"h", "E"}
    return {s: n for s, n in decision.sizes.items() if s in used}


def _tree(decision: Decision, tree: Tree) -> TreePlan:
    bill = decision.pruned.bills[tree]
    chosen = tree == decision.choice.tree
    if tree in decision.pruned.scenarios:
        scenarios = decision.pruned.scenarios[tree]
        verdict = "candidate" + (f" where {scenarios[0]}" if len(scenarios) == 1 else "")
    else:
        reasons = decision.pruned.reasons[tree]
        texts = list(dict.fromkeys(reasons.values()))
        if len(texts) > 1:
            texts = [f"{scenario}: {reason}" for scenario, reason in reasons.items()]
        verdict = "pruned: " + "; ".join(texts)
    return TreePlan(
        str(tree),
        tuple(str(w) for w in bill.forward if not w.once),
        tuple(str(w) for w in bill.backward),
        tuple(str(w) for w in bill.forward if w.once),
        decision.choice.seconds.get(tree),
        bill.saved_bytes(decision.sizes),
        f"chosen by {decision.choice.by}" if chosen else verdict,
        chosen,
        tree,
    )


def title(model_plan: ModelPlan) -> str:
    """Return the summary of a plan, in a line."""
    purpose = "training" if model_plan.train else "inference"
    layers = model_plan.layers
    lifted = sum(bool(layer.trees) for layer in layers)
    return f"{model_plan.model}: {lifted} of {len(layers)} layers rewritten for {purpose}"


def facts(layer: LayerPlan) -> Iterator[str]:
    """Yield the description of a layer, line by line."""
    for call in layer.calls:
        yield f"called as {call}"
    if layer.algebra:
        sizes = ", ".join(f"{k} = {v:,}" for k, v in layer.sizes.items())
        yield f"{layer.algebra}   with {sizes}"
        pruned = sum(t.verdict.startswith("pruned") for t in layer.trees)
        source = f", {layer.source}" if layer.source else ""
        yield f"{len(layer.trees)} associations, {pruned} pruned; decided by {layer.by}{source}"
    for reason in layer.reasons:
        yield f"not rewritten: {reason}"


def legend(layer: LayerPlan) -> Iterator[str]:
    """Yield a line that explains the symbols of a layer's associations."""
    if not layer.trees:
        return
    leaves = dict.fromkeys(leaf for tree in layer.trees for leaf in leaves_in(tree.root))
    kinds: dict[str, set[str]] = {}
    for leaf in leaves:
        kinds.setdefault(_meaning(leaf), set()).add(leaf.name)
    entries = [f"{', '.join(sorted(names))}: {meaning}" for meaning, names in kinds.items()]
    powers = [leaf for leaf in leaves if leaf.power > 1]
    entries += [f"{leaf} = {' '.join([leaf.name] * leaf.power)}" for leaf in powers]
    works = " ".join(w for t in layer.trees for w in (*t.forward, *t.backward, *t.once))
    if "ᵀ" in works:
        entries.append("ᵀ: transposed")
    if heads := re.search(r"([A-Z1])·(\d+)", works):
        entries.append(f"{heads[0]}: {heads[2]} heads of {heads[1]} columns each")
    if size := re.search(r"gemm (\w+)x(\w+)x(\w+)", works):
        a, b, c = size.groups()
        entries.append(f"{size[0]}: a matrix product [{a}, {b}] times [{b}, {c}]")
    words = " ".join([layer.source, *(t.composition for t in layer.trees)])
    entries += [f"{word}: {meaning}" for word, meaning in WORDS.items() if word in words]
    yield "symbols: " + "; ".join(entries)


def _meaning(leaf: Leaf) -> str:
    if leaf.number:
        return "a number"
    if is_ones(leaf):
        return f"a column of {leaf.rows} ones"
    return {
        "data": "features", "weight": "trainable weights", "bias": "a bias",
        "diagonal": "a diagonal, one number per node", "sparse": "the edges, as a matrix",
        "weighted": "the edges with their weights, as a matrix",
    }[leaf.kind]  # fmt: skip


def row(tree: TreePlan) -> tuple[str, ...]:
    """Return an association as the cells of a table under :data:`HEAD`."""
    parts = ["; ".join(_counted(tree.forward))]
    if tree.backward:
        parts.append("backward: " + "; ".join(_counted(tree.backward)))
    if tree.once:
        parts.append("once per graph: " + "; ".join(_counted(tree.once)))
    if tree.bytes_kept:
        parts.append(f"saves {tree.bytes_kept / 2**20:,.1f} MiB for the backward pass")
    time = "" if tree.seconds is None else f"{1e3 * tree.seconds:.3f} ms"
    verdict = "; ".join(filter(None, (tree.composition, tree.verdict)))
    return (("▶ " if tree.chosen else "") + tree.tree, " · ".join(parts), time, verdict)


def _counted(works: tuple[str, ...]) -> Iterator[str]:
    for work, times in Counter(works).items():
        yield work if times == 1 else f"{times} x {work}"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines: list[str] = []
    for row in (HEAD, *rows):
        cells = [wrap(cell, width) or [""] for cell, width in zip(row, COLUMNS, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            lines.append(
                "  ".join(p.ljust(w) for p, w in zip(parts, COLUMNS, strict=True)).rstrip()
            )
    return "\n".join(lines)
