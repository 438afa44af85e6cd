"""Association trees as a drawing: leaves below, primitives above, the chosen tree in colour."""

from html import escape
from textwrap import wrap

from pyg_accel.rewrite.plans import LayerPlan, ModelPlan, TreePlan
from pyg_accel.rewrite.tree import Node, Tree

__all__ = ["as_svg"]

LEVEL, MARGIN, CHARACTER, GAP = 52, 24, 8, 14
MOST = 4  # trees of a layer that are drawn: the chosen one and the best of the others
WIDTH = 1200  # of a row of trees; a single tree may be wider
COLOURS = {"chosen": "#1a7f37", "promoted": "#0969da", "pruned": "#8c959f"}


def as_svg(found: ModelPlan) -> str:
    """Return a plan as an SVG document."""
    parts: list[str] = []
    top, width = MARGIN, 400
    for layer in found.layers:
        what = layer.algebra or "; ".join(layer.reasons)
        title = f"{layer.path or 'the layer'}: {layer.layer}   {what}"
        for line in wrap(title, (WIDTH - 2 * MARGIN) // CHARACTER):
            parts.append(_text(MARGIN, top + 12, line, "#1f2328", weight="bold", anchor="start"))
            width = max(width, 2 * MARGIN + CHARACTER * len(line))
            top += 18
        top += 16
        height, used = _layer(layer, top, parts)
        top += height + MARGIN
        width = max(width, used)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'font-family="ui-monospace, monospace" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>"
    )


def _layer(layer: LayerPlan, top: int, parts: list[str]) -> tuple[int, int]:
    """Draw the trees of a layer in rows; return the height and width taken."""
    left, start, lowest, width = MARGIN, top, 0, 0
    for tree in layer.trees[:MOST]:
        colour = COLOURS["chosen" if tree.chosen else tree.verdict.partition(":")[0].split()[0]]
        span = _span(tree.root)
        label = _label(tree)
        wide = max(span, CHARACTER * len(label) + GAP)
        if left > MARGIN and left + wide + MARGIN > WIDTH:
            left, top, lowest = MARGIN, top + lowest + MARGIN, 0
        parts.append(_text(left + wide // 2, top, label, colour, weight="bold"))
        _draw(tree.root, left + (wide - span) // 2, top + 26, colour, parts)
        left += wide + MARGIN
        width = max(width, left)
        lowest = max(lowest, 26 + LEVEL * _depth(tree.root) + 16)
    top += lowest
    if len(layer.trees) > MOST:
        rest = f"and {len(layer.trees) - MOST} more, which format='md' lists"
        parts.append(_text(MARGIN, top, rest, COLOURS["pruned"], anchor="start"))
        top += 20
    return top - start, width


def _label(tree: TreePlan) -> str:
    time = "" if tree.seconds is None else f" {1e3 * tree.seconds:.3g} ms"
    verdict = "chosen" if tree.chosen else tree.verdict.partition(":")[0]
    return ", ".join(filter(None, (verdict, tree.composition))) + time


def _args(tree: Tree) -> list[Tree]:
    return [a for a in tree.args if a is not None] if isinstance(tree, Node) else []


def _span(tree: Tree) -> int:
    """The width of a drawing, in which no name touches the next."""
    return max(sum(map(_span, _args(tree))), CHARACTER * len(_name(tree)) + GAP)


def _name(tree: Tree) -> str:
    if isinstance(tree, Node):
        return tree.name or ("mean " if tree.mean else "") + tree.op
    return str(tree)


def _depth(tree: Tree) -> int:
    return 1 + max(map(_depth, _args(tree)), default=-1)


def _draw(tree: Tree, left: int, top: int, colour: str, parts: list[str]) -> int:
    """Draw a tree and return where its middle is."""
    middle = left + _span(tree) // 2
    at = left + (_span(tree) - sum(map(_span, _args(tree)))) // 2
    for arg in _args(tree):
        below = _draw(arg, at, top + LEVEL, colour, parts)
        parts.append(
            f'<line x1="{middle}" y1="{top + 6}" x2="{below}" y2="{top + LEVEL - 14}" '
            f'stroke="{colour}"/>'
        )
        at += _span(arg)
    parts.append(_text(middle, top, _name(tree), colour if _args(tree) else "#1f2328"))
    return middle


def _text(
    x: int, y: int, text: str, colour: str, *, weight: str = "normal", anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
