"""Attention in a recorded graph: the features from which scores and values are computed.

No product moves past the softmax, but products move into and out of the values that it weighs.
Scores that are linear in ``X W`` are computed from ``X (W a)`` if nothing else reads the product
(paper, section 5.2).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from pyg_accel.formula import Binary, Formula, Operand, map_operands, operands_of, parse
from pyg_accel.record.metadata import FACTS
from pyg_accel.rewrite.nodes import called

__all__ = ["Attention", "ScoreOperand", "read_attention"]

# Functions of features [N, heads, F] that are linear in each row.
_LINEAR = frozenset(("mul", "__mul__", "__rmul__", "sum", "unsqueeze", "view", "reshape"))


@dataclass(frozen=True)
class ScoreOperand:
    """An operand of the formulas of attention, except the features in the values.

    Attributes:
        index: in the formulas.
        node: the operand.
        origin: the features [N, heads, F] in which it is linear, or None.
        chain: the nodes that compute it from these features, in order.
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
        value: formula of the values.
        features_index: the index of the features in the values.
        features: [N, heads, F].
        operands: all other operands.
    """

    score: str
    value: Formula
    features_index: int
    features: fx.Node
    operands: tuple[ScoreOperand, ...]

    @property
    def origins(self) -> tuple[fx.Node, ...]:
        """The features in which scores are linear."""
        return tuple(dict.fromkeys(o.origin for o in self.operands if o.origin is not None))

    @property
    def sources(self) -> tuple[int, ...]:
        """The indices of the operands of scores at the source nodes."""
        return tuple(o.index for o in operands_of(parse(self.score)) if o.side == "u")

    def values_of(self, index: int) -> str:
        """The formula of the values, with another index for the features."""
        old = self.features_index
        return str(map_operands(self.value, lambda o: Operand("u", index) if o.index == old else o))


def read_attention(
    node: fx.Node, score: Any, value: Any, operands: Sequence[fx.Node], split: Collection[fx.Node]
) -> Attention | None:
    """Return how a call of attention reads its features; None if its values are not linear in them.

    Args:
        node: the call.
        score: formula of the scores.
        value: formula of the values.
        operands: of the formulas.
        split: nodes of features [N, heads, F].
    """
    value = parse(str(value))
    features = _features_in(value)
    if features is None or operands[features] not in split:
        return None
    in_score = {o.index for o in operands_of(parse(str(score)))}
    others = {o.index for o in operands_of(value)} - {features}
    read = [
        _operand(n, operands[n], node, split if n in in_score else ())
        for n in sorted(in_score | others)
    ]
    return Attention(str(score), value, features, operands[features], tuple(read))


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
    """Follow an operand back to the features in which it is linear."""
    chain: list[fx.Node] = []
    inner = node
    while inner not in split:
        source = _linear_in(inner)
        if source is None or {*inner.users} != {chain[-1] if chain else user}:
            return ScoreOperand(index, node, None, ())
        if source.meta[FACTS].shape != inner.meta[FACTS].shape or called(inner) == "mul":
            chain.append(inner)
        inner = source
    return ScoreOperand(index, node, inner, tuple(reversed(chain)))


def _linear_in(node: fx.Node) -> fx.Node | None:
    """Return the input in which a node is linear row by row, or None."""
    if node.op != "call_function" or called(node) not in _LINEAR:
        return None
    source, *others = node.all_input_nodes
    if not node.args or source is not node.args[0] or FACTS not in source.meta:
        return None
    if source in node.args[1:] or source in node.kwargs.values():
        return None  # a square
    rows, shape = source.meta[FACTS].shape[:1], node.meta[FACTS].shape
    if shape[:1] != rows or len(shape) < 2:
        return None
    if called(node) in ("view", "reshape") and shape != source.meta[FACTS].shape:
        return None
    same = all(o.op == "get_attr" and _is_one_row(o.meta[FACTS].shape, shape) for o in others)
    return source if same else None


def _is_one_row(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether a factor is the same for all rows of a result, by their shapes."""
    return len(shape) < len(result) or (len(shape) == len(result) and shape[0] == 1)
