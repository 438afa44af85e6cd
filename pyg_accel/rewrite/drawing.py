"""Association trees as a drawing: leaves below, primitives above, the chosen tree in colour."""

from html import escape
from textwrap import wrap
from typing import NamedTuple

from pyg_accel.rewrite.plans import LayerPlan, ModelPlan, TreePlan, title
from pyg_accel.rewrite.tree import Node, Tree

__all__ = ["as_svg"]

LEVEL, MARGIN, CHARACTER, GAP = 52, 24, 8, 14
MOST = 4  # trees of a layer that are drawn: the chosen one and the best of the others
WIDTH = 1200  # of a row of trees; a single tree may be wider
COLOURS = {"chosen": "#1a7f37", "candidate": "#0969da", "pruned": "#8c959f"}


def as_svg(model_plan: ModelPlan) -> str:
    """Return a plan as an SVG document."""
    parts: list[str] = []
    top, width = MARGIN, 400

    def write(text: str, *, weight: str = "normal") -> None:
        nonlocal top, width
        for line in wrap(text, (WIDTH - 2 * MARGIN) // CHARACTER):
            parts.append(_text(MARGIN, top + 12, line, "#1f2328", weight=weight, anchor="start"))
            width = max(width, 2 * MARGIN + CHARACTER * len(line))
            top += 18

    write(title(model_plan))
    write("(in parentheses): computed once, further to the left")
    for layer in model_plan.layers:
        top += MARGIN
        what = f" = {layer.algebra}" if layer.algebra else f": {'; '.join(layer.reasons)}"
        write(f"{layer.path or 'the layer'}: {layer.layer}{what}", weight="bold")
        top += 16
        height, used = _layer(layer, top, parts)
        top += height
        width = max(width, used)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + MARGIN}" '
        f'font-family="ui-monospace, monospace" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>"
    )


def _layer(layer: LayerPlan, top: int, parts: list[str]) -> tuple[int, int]:
    """Draw the trees of a layer in rows; return the height and width taken."""
    left, start, lowest, width = MARGIN, top, 0, 0
    for tree in layer.trees[:MOST]:
        colour = COLOURS["chosen" if tree.chosen else tree.verdict.partition(":")[0].split()[0]]
        shape = _shape(tree.root, set())
        span = _span(shape)
        label = _label(tree)
        wide = max(span, CHARACTER * len(label) + GAP)
        if left > MARGIN and left + wide + MARGIN > WIDTH:
            left, top, lowest = MARGIN, top + lowest + MARGIN, 0
        parts.append(_text(left + wide // 2, top, label, colour, weight="bold"))
        _draw(shape, left + (wide - span) // 2, top + 26, colour, parts)
        left += wide + MARGIN
        width = max(width, left)
        lowest = max(lowest, 26 + LEVEL * _depth(shape) + MARGIN)
    top += lowest
    if len(layer.trees) > MOST:
        rest = f"and {len(layer.trees) - MOST} more, which format='md' lists"
        parts.append(_text(MARGIN, top, rest, COLOURS["pruned"], anchor="start"))
        top += 20
    return top - start, width


def _label(tree: TreePlan) -> str:
    time = "" if tree.seconds is None else f"{1e3 * tree.seconds:.3g} ms"
    verdict = "chosen" if tree.chosen else tree.verdict.partition(":")[0]
    return ", ".join(filter(None, (verdict, tree.composition, time)))


class _Shape(NamedTuple):
    """A tree as it is drawn: with its repeated parts drawn once, and named after that."""

    name: str
    is_leaf: bool
    args: "list[_Shape]"


def _shape(tree: Tree, seen: set[Node]) -> _Shape:
    if not isinstance(tree, Node):
        return _Shape(str(tree), True, [])
    name = tree.name or ("mean " if tree.mean else "") + tree.op
    if tree in seen:
        return _Shape(f"({name})", False, [])
    seen.add(tree)
    return _Shape(name, False, [_shape(a, seen) for a in tree.args if a is not None])


def _span(shape: _Shape) -> int:
    """Return the width of a drawing in which names do not touch."""
    return max(sum(map(_span, shape.args)), CHARACTER * len(shape.name) + GAP)


def _depth(shape: _Shape) -> int:
    return 1 + max(map(_depth, shape.args), default=-1)


def _draw(shape: _Shape, left: int, top: int, colour: str, parts: list[str]) -> int:
    """Draw a tree and return where its middle is."""
    middle = left + _span(shape) // 2
    at = left + (_span(shape) - sum(map(_span, shape.args))) // 2
    for arg in shape.args:
        below = _draw(arg, at, top + LEVEL, colour, parts)
        parts.append(
            f'<line x1="{middle}" y1="{top + 6}" x2="{below}" y2="{top + LEVEL - 14}" '
            f'stroke="{colour}"/>'
        )
        at += _span(arg)
    parts.append(_text(middle, top, shape.name, "#1f2328" if shape.is_leaf else colour))
    return middle


def _text(
    x: int, y: int, text: str, colour: str, *, weight: str = "normal", anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
