"""Association trees as a graph for Graphviz: leaves below, the chosen tree in colour."""

from itertools import count
from json import dumps as quoted

from pyg_accel.rewrite.plans import ModelPlan, title
from pyg_accel.rewrite.tree import Node, Tree

__all__ = ["as_dot"]

MOST = 4  # trees of a layer that are drawn: the chosen one and the best of the others
COLOURS = {"chosen": "#1a7f37", "candidate": "#0969da", "pruned": "#8c959f"}


def as_dot(model_plan: ModelPlan) -> str:
    """Return a plan in Graphviz's DOT language; equal parts of a tree are one node."""
    numbers = count()
    lines = [f"digraph {{ label={quoted(title(model_plan))}; node [shape=plaintext];"]
    for layer in model_plan.layers:
        what = f" = {layer.algebra}" if layer.algebra else f": {'; '.join(layer.reasons)}"
        more = len(layer.trees) - MOST
        omitted = f" (and {more} more, which format='md' lists)" if more > 0 else ""
        label = quoted(f"{layer.path or 'the layer'}: {layer.layer}{what}{omitted}")
        lines.append(f"subgraph cluster_{next(numbers)} {{ label={label};")
        for tree in layer.trees[:MOST]:
            verdict = "chosen" if tree.chosen else tree.verdict.partition(":")[0]
            time = "" if tree.seconds is None else f"{1e3 * tree.seconds:.3g} ms"
            label = quoted(", ".join(filter(None, (verdict, tree.composition, time))))
            colour = COLOURS[verdict.split()[0]]
            lines.append(f"subgraph cluster_{next(numbers)} {{ label={label}; "
                         f'color="{colour}"; edge [dir=none, color="{colour}"];')  # fmt: skip
            _draw(tree.root, numbers, {}, lines)
            lines.append("}")
        lines.append("}")
    return "\n".join([*lines, "}"])


def _draw(tree: Tree, numbers: "count[int]", drawn: dict[Tree, int], lines: list[str]) -> int:
    """Append the nodes and edges of a tree; return the number of its root."""
    if tree in drawn:
        return drawn[tree]
    number, name, args = next(numbers), str(tree), tuple[Tree | None, ...]()
    if isinstance(tree, Node):
        drawn[tree], args, name = number, tree.args, tree.name or "mean " * tree.mean + tree.op
    lines.append(f"n{number} [label={quoted(name)}];")
    parts = [_draw(arg, numbers, drawn, lines) for arg in args if arg is not None]
    lines += [f"n{number} -> n{part};" for part in parts]
    return number
