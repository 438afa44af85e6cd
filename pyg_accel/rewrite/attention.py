"""Attention in a recorded graph: which features its scores and its values are computed from.

The softmax of scores is a barrier, what it weighs is not. Scores that are linear in ``X W`` are
read from ``X (W a)`` where nothing else needs the product (paper, section 5.2).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from pyg_accel.formula import Binary, Formula, Operand, map_operands, operands_of, parse
from pyg_accel.record.about import ABOUT
from pyg_accel.rewrite.nodes import called

__all__ = ["Attention", "ScoreOperand", "read_attention"]

# Functions of features in heads that leave their rows apart, and are linear in them.
_LINEAR = frozenset(("mul", "__mul__", "__rmul__", "sum", "unsqueeze", "view", "reshape"))


@dataclass(frozen=True)
class ScoreOperand:
    """An operand of the scores, or of what is multiplied with the values.

    Attributes:
        index: in the formulas.
        node: the operand.
        origin: the features [N, heads, F] that it is made of; None if it is made of others.
        chain: the nodes that make it of these, in order.
    """

    index: int
    node: fx.Node
    origin: fx.Node | None
    chain: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Attention:
    """A call of :func:`pyg_accel.ops.attention`.

    Attributes:
        score: formula of the scores.
        value: formula of what is weighed.
        place: the index of the features in it.
        features: [N, heads, F], the features themselves.
        operands: all the others.
    """

    score: str
    value: Formula
    place: int
    features: fx.Node
    operands: tuple[ScoreOperand, ...]

    @property
    def origins(self) -> tuple[fx.Node, ...]:
        """The features that scores are made of."""
        return tuple(dict.fromkeys(o.origin for o in self.operands if o.origin is not None))

    @property
    def sources(self) -> tuple[int, ...]:
        """The indices of the operands of scores at the source nodes."""
        return tuple(o.index for o in operands_of(parse(self.score)) if o.side == "u")

    def values_of(self, index: int) -> str:
        """The formula of the values, with another index for the features."""
        own = self.place
        return str(map_operands(self.value, lambda o: Operand("u", index) if o.index == own else o))


def read_attention(
    node: fx.Node, score: Any, value: Any, operands: Sequence[fx.Node], split: Collection[fx.Node]
) -> Attention | None:
    """Return what a call of attention does with features in heads; None if it is not linear.

    Args:
        node: the call.
        score: formula of the scores.
        value: formula of what is weighed.
        operands: of the formulas.
        split: features in heads.
    """
    value = parse(str(value))
    place = _features_in(value)
    if place is None or operands[place] not in split:
        return None
    in_score = {o.index for o in operands_of(parse(str(score)))}
    others = {o.index for o in operands_of(value)} - {place}
    read = [
        _operand(n, operands[n], node, split if n in in_score else ())
        for n in sorted(in_score | others)
    ]
    return Attention(str(score), value, place, operands[place], tuple(read))


def _features_in(value: Formula) -> int | None:
    """The index of the features of the sources in the formula of values, which is a product."""
    match value:
        case Operand(side="u", index=index):
            return index
        case Binary(op="mul", left=left, right=Operand(side="e")):
            return _features_in(left)
    return None


def _operand(
    index: int, node: fx.Node, user: fx.Node, split: Collection[fx.Node]
) -> ScoreOperand:  # fmt: skip
    """Look for the features that an operand is linear in."""
    chain: list[fx.Node] = []
    inner = node
    while inner not in split:
        source = _linear_in(inner)
        if source is None or {*inner.users} != {chain[-1] if chain else user}:
            return ScoreOperand(index, node, None, ())
        if source.meta[ABOUT].shape != inner.meta[ABOUT].shape or called(inner) == "mul":
            chain.append(inner)
        inner = source
    return ScoreOperand(index, node, inner, tuple(reversed(chain)))


def _linear_in(node: fx.Node) -> fx.Node | None:
    """The node that another is linear in, row by row; None if it may be anything else."""
    if node.op != "call_function" or called(node) not in _LINEAR:
        return None
    source, *others = node.all_input_nodes
    if not node.args or source is not node.args[0] or ABOUT not in source.meta:
        return None
    if source in node.args[1:] or source in node.kwargs.values():
        return None  # a square
    rows, shape = source.meta[ABOUT].shape[:1], node.meta[ABOUT].shape
    if shape[:1] != rows or len(shape) < 2:
        return None
    if called(node) in ("view", "reshape") and shape != source.meta[ABOUT].shape:
        return None
    alike = all(o.op == "get_attr" and _is_one_row(o.meta[ABOUT].shape, shape) for o in others)
    return source if alike else None


def _is_one_row(shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Whether a factor is the same for all rows of what it is multiplied with."""
    return len(shape) < len(of) or (len(shape) == len(of) and shape[0] == 1)
