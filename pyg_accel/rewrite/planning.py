"""Looks into rewritten models: what was decided for each layer."""

from dataclasses import replace
from typing import Any

import torch

from pyg_accel.rewrite.decision import Decision
from pyg_accel.rewrite.ir import leaves_of
from pyg_accel.rewrite.layer import RewrittenLayer
from pyg_accel.rewrite.model import optimize
from pyg_accel.rewrite.module import RewrittenModule
from pyg_accel.rewrite.plans import LayerPlan, ModelPlan, TreePlan
from pyg_accel.rewrite.tree import Tree

__all__ = ["plan"]


def plan(
    model: torch.nn.Module, *example_inputs: Any, train: bool = False, **options: Any
) -> ModelPlan:
    """Return what :func:`~pyg_accel.optimize` would do, as data; ``print`` shows it.

    Args:
        model: as for ``optimize``; or what that returned, to see what it has decided so far.
        example_inputs: arguments of a call; none for what ``optimize`` returned.
        train: as for ``optimize``.
        options: the other arguments of ``optimize``.

    Returns:
        For each layer its associations with predicted times, and what was chosen.

    Raises:
        ValueError: what ``optimize`` raises.
    """
    if isinstance(model, RewrittenModule):
        if example_inputs or options or train:
            raise ValueError(
                "expected no examples and no options with a model that is rewritten: its plan is "
                "what it decided so far (give the original for another)"
            )
        return plan_of(model)
    fast = optimize(model, *example_inputs, train=train, price_all=True, **options)
    assert isinstance(fast, RewrittenModule)
    return plan_of(fast)


def plan_of(fast: RewrittenModule) -> ModelPlan:
    """Return what a rewritten model has decided so far."""
    found = []
    for path, module in fast.named_modules():
        if isinstance(module, RewrittenLayer):
            found.append(_layer(path, module))
    train = any(m.options.train for m in fast.modules() if isinstance(m, RewrittenLayer))
    return ModelPlan(type(fast).__name__, train, tuple(found),
                     dict(fast.unread))  # fmt: skip


def _layer(path: str, layer: RewrittenLayer) -> LayerPlan:
    empty = LayerPlan(path, type(layer.conv).__name__, "", {}, (), "", "", tuple(layer.reasons))
    if not layer.decisions:
        return empty
    decision = layer.decisions[-1]
    trees = sorted(
        (_tree(decision, tree) for tree in decision.pruned.all),
        key=lambda t: (not t.chosen, t.verdict != "promoted", t.seconds or 0.0),
    )
    return replace(
        empty, algebra=str(decision.form), sizes=_sizes(decision), trees=tuple(trees),
        by=decision.choice.by, source=decision.choice.source,
    )  # fmt: skip


def _sizes(decision: Decision) -> dict[str, int]:
    """The sizes whose symbols the expression has."""
    leaves = list(leaves_of(decision.form))
    used = {s for leaf in leaves for s in (leaf.rows, leaf.cols)} - {"1"} | {"h"}
    return {s: n for s, n in decision.sizes.items() if s in used} | {"E": decision.entries}


def _tree(decision: Decision, tree: Tree) -> TreePlan:
    bill = decision.pruned.bills[tree]
    chosen = tree == decision.choice.tree
    if tree in decision.pruned.scenarios:
        scenarios = decision.pruned.scenarios[tree]
        verdict = "promoted" + (f" ({scenarios[0]})" if len(scenarios) == 1 else "")
    else:
        reasons = decision.pruned.reasons[tree]
        different = len(set(reasons.values())) > 1
        verdict = "pruned: " + "; ".join(
            [f"{scenario}: {reason}" for scenario, reason in reasons.items()]
            if different
            else set(reasons.values())
        )
    return TreePlan(
        str(tree),
        tuple(str(w) for w in bill.forward if not w.once),
        tuple(str(w) for w in bill.backward),
        tuple(str(w) for w in bill.forward if w.once),
        decision.choice.seconds.get(tree),
        bill.bytes_kept(decision.sizes),
        f"chosen by {decision.choice.by}" if chosen else verdict,
        chosen,
        tree,
    )
