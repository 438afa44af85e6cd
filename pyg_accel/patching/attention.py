"""Softmax weights that are not computed until something needs them.

Attention layers compute weights in one place and use them in another: GATConv in ``edge_updater``
and ``propagate``, others within one message. Between the two the weights are :class:`Weights`: a
tensor [E] or [E, H] that holds the formula of its scores. A weighted sum of messages becomes one
call of :func:`pyg_accel.ops.attention` on the scores; any other use materialises the weights.
Weights that leave the layer (:mod:`.escaping_tensors`) are ordinary tensors from the beginning.

Dropout of the weights draws its mask at once, by the function of torch and of the same shape, so
that it agrees with PyG.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel import ops
from pyg_accel.formula import Binary, Const, Formula, Operand, Unary, map_operands, operands_of
from pyg_accel.formula.computation import Computation
from pyg_accel.graph import Graph
from pyg_accel.ops.layout import Layout, broadcast, per_target
from pyg_accel.ops.messages import messages
from pyg_accel.patching.edge_type_matmul import with_pairs_as_sources
from pyg_accel.record.edge_tensors import DeferredOperand, materialize, plain_shape
from pyg_accel.record.recorder import perform, quiet
from pyg_accel.runtime.cache import Snapshot, version_of

__all__ = ["Source", "Weights", "Where", "attend"]

_NARROW = 32  # numbers per edge up to which the kernel for features of edges is slow


class Where(NamedTuple):
    """The graph of a call.

    Attributes:
        edge_index: of the call.
        target: row of edge_index with the targets.
        num_rows: number of targets.
        num_cols: number of sources.
    """

    edge_index: Tensor
    target: int
    num_rows: int
    num_cols: int


@dataclass
class Source:
    """The scores of weights.

    Attributes:
        edge_index: of the call.
        version: its version counter.
        target: row of edge_index with the targets.
        graph: its CSR form.
        score: formula of the scores.
        leaves: the operands of the formula, as the layer has them.
        operands: [rows, H | 1, F | 1].
        repeated: which of them have one row for all targets.
        dtype: of the weights.
        shape: [E] or [E, H].
    """

    edge_index: Tensor
    target: int
    graph: Graph
    score: Formula
    leaves: list[Tensor]
    operands: list[Tensor]
    repeated: list[bool]
    dtype: torch.dtype
    shape: tuple[int, ...]
    version: int = field(init=False)
    grad: bool = field(init=False)

    def __post_init__(self) -> None:
        """Take a snapshot, to detect changes."""
        self.version = version_of(self.edge_index)
        self.grad = torch.is_grad_enabled()
        self._unchanged = Snapshot(self.operands)
        self._written: Tensor | None = None

    def expanded(self) -> list[Tensor]:
        """The unchanged operands, with repeated rows expanded."""
        if not self._unchanged.fits(self.operands):
            raise RuntimeError(
                "attention weights are asked for after the features they are made of were changed "
                "in place; look at them before, or copy them then"
            )
        return [
            perform(per_target, self.graph, t) if repeats else t
            for t, repeats in zip(self.operands, self.repeated, strict=True)
        ]

    def fits(self, where: Where) -> bool:
        """Whether a call goes over the same graph."""
        return (
            self.edge_index is where.edge_index
            and self.target == where.target
            and self.version == version_of(where.edge_index)
            and (self.graph.num_rows, self.graph.num_cols) == (where.num_rows, where.num_cols)
        )

    def written(self) -> Tensor:
        """The weights without dropout, [E] or [E, H]."""
        if self._written is None:
            self._written = perform(
                _softmax, self.graph, self.score, self.expanded(), self.dtype, self.shape[1:],
                grad=self.grad,
            )  # fmt: skip
        return self._written


def _softmax(
    graph: Graph,
    score: Formula,
    operands: list[Tensor],
    dtype: torch.dtype,
    trailing: tuple[int, ...],
    *,
    grad: bool,
) -> Tensor:
    """Write softmax weights out, [E, ...]."""
    with torch.set_grad_enabled(grad):
        scores = messages(graph, score, operands, edge_order=True)
        scores = scores.expand(-1, prod(trailing), 1).squeeze(-1)
        weights = ops.edge_softmax(graph, scores.to(dtype), edge_order=True)
        return weights.view(-1, *trailing)


def _masked(weights: Tensor, mask: Tensor | None, shape: tuple[int, ...], *, grad: bool) -> Tensor:
    with torch.set_grad_enabled(grad):
        return (weights if mask is None else weights * mask).view(-1, *shape)


class Weights(DeferredOperand):
    """Softmax weights [E], [E, H] or a view of them; see the module.

    Attributes:
        source: their scores.
        mask: factor of dropout, of the shape of the scores.
    """

    source: Source
    mask: Tensor | None
    _real: Tensor | None = None

    @classmethod
    def of(
        cls, source: Source, shape: Sequence[int] | None = None, mask: Tensor | None = None
    ) -> "Weights":
        """Return weights, by default of the shape of the scores."""
        shape = source.shape if shape is None else shape
        return cls(shape, source.dtype, source.graph.device, source=source, mask=mask)

    def edges(self) -> tuple[int, int]:
        """See :meth:`EdgeTensor.edges`."""
        return 0, self.source.shape[0]

    def ordinary(self) -> Tensor:
        """Return the materialised weights."""
        if self._real is None:
            shape = tuple(plain_shape(self)[1:])
            self._real = perform(
                _masked, self.source.written(), self.mask, shape, grad=self.source.grad
            )
        return self._real

    def differentiable(self) -> bool:
        """See :meth:`DeferredOperand.differentiable`."""
        tensors = [*self.source.operands, *([] if self.mask is None else [self.mask])]
        return self.source.grad and any(t.requires_grad for t in tensors)

    def after(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Defer views and dropout of weights."""
        weights = None
        if name in _VIEWS and (shape := _viewed(self, name, args, kwargs)) is not None:
            weights = Weights.of(self.source, shape, self.mask)
        elif name == "dropout" and not kwargs.get("inplace") and len(args) < 3:
            weights = _dropped(func, self, args, kwargs)
        return weights


_VIEWS = {"view", "reshape", "unsqueeze", "squeeze", "view_as", "reshape_as"}


def _viewed(
    weights: Weights, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Size | None:
    """The shape of a view, if it only adds or removes dimensions of size 1 after the first."""
    old = plain_shape(weights)
    like = {"view_as": "view", "reshape_as": "reshape"}.get(name, name)
    sizes = tuple(a.shape if isinstance(a, Tensor) else a for a in args)
    new: torch.Size = getattr(torch.empty(old, device="meta"), like)(*sizes, **kwargs).shape
    same = [n for n in new if n != 1] == [n for n in old if n != 1]
    return new if same and len(new) > 0 and new[0] == old[0] else None


def _dropped(
    func: Callable[..., Any], weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Weights:
    source = weights.source
    ones = perform(_ones, source.edge_index, tuple(plain_shape(weights)[1:]), source.dtype)
    mask = func(ones, *args, **kwargs)
    if mask is ones:
        return weights
    mask = mask.view(weights.source.shape)
    if weights.mask is not None:
        mask = mask * weights.mask
    return Weights.of(weights.source, plain_shape(weights), mask)


def _ones(edge_index: Tensor, trailing: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ones((edge_index.size(1), *trailing), dtype=dtype, device=edge_index.device)


def attend(
    formula: Formula, operands: list[Tensor], repeated: Sequence[bool], where: Where
) -> tuple[Tensor, Computation] | None:
    """Compute a sum of weighted messages as attention.

    Args:
        formula: of the messages.
        operands: of the formula, by index.
        repeated: which of them have one row for all targets.
        where: the graph.

    Returns:
        [num_rows, ...], and its computation; None for other messages.
    """
    num_rows = where.num_rows
    indices = [i for i, t in enumerate(operands) if isinstance(t, Weights)]
    if len(indices) != 1:
        return None
    weights = operands[indices[0]]
    assert isinstance(weights, Weights)
    value, source = _without(formula, indices[0]), weights.source
    if value is None or not source.fits(where) or not (read := _operands_of(value)):
        return None
    layout = _layout(weights, [t for i, t in enumerate(operands) if i != indices[0]])
    if layout is None:
        return None
    graph, score, names, tensors = source.graph, source.score, [*source.leaves], source.expanded()
    scored = _operands_of(score)
    if all(o.side != "u" for o in scored):
        paired = with_pairs_as_sources(value, operands, where.target, num_rows)
        if paired is not None:
            graph, value, operands = paired
            read = _operands_of(value)
    sides = {o.index: o.side for o in scored}
    places: dict[int, int] = {}
    for o in read:
        t = materialize(operands[o.index])
        same = [k for k, s in enumerate(names)
                if s is t and sides.get(k) == o.side and tuple(tensors[k].shape[1:]) ==
                (layout.heads, layout.width)]  # fmt: skip
        if same:
            places[o.index] = same[0]
            continue
        places[o.index] = len(tensors)
        sides[len(tensors)] = o.side
        names.append(t)
        with quiet():
            if repeated[o.index]:
                t = t.expand(num_rows, *t.shape[1:])
            tensors.append(layout.fold(t))
    factor = -1
    if weights.mask is not None:
        factor = len(tensors)
        with quiet():
            tensors.append(weights.mask.reshape(weights.mask.size(0), -1, 1))
    computed, texts = _computed(score, value, tuple(places.items()), factor)
    with quiet():
        out = perform(ops.attention, graph, *texts, tensors, edge_order=True)
        out = out.reshape(out.size(0), *layout.trailing)
    return out, computed


@lru_cache(maxsize=1024)
def _operands_of(formula: Formula) -> tuple[Operand, ...]:
    return tuple(dict.fromkeys(operands_of(formula)))


@lru_cache(maxsize=1024)
def _computed(
    score: Formula, value: Formula, places: tuple[tuple[int, int], ...], factor: int
) -> tuple[Computation, tuple[str, str]]:
    """The computation, and the scores and values for the operator."""
    where = dict(places)
    value = map_operands(value, lambda o: Operand(o.side, where[o.index]))
    computed = Computation(value, ("sum",), score)
    if factor >= 0:
        value = Binary("mul", value, Operand("e", factor))
    return computed, (str(score), str(value))


def _layout(weights: Tensor, operands: list[Tensor]) -> Layout | None:
    """The layout of messages [E, ...] with one weight per head."""
    trailing = tuple(weights.shape[1:])
    try:
        full = broadcast(trailing, *(t.shape[1:] for t in operands))
    except RuntimeError:
        return None
    trailing = (1,) * (len(full) - len(trailing)) + trailing
    split = max((d + 1 for d, n in enumerate(trailing) if n != 1), default=0)
    return Layout(full, split) if trailing[:split] == full[:split] else None


@lru_cache(maxsize=1024)
def _without(formula: Formula, index: int) -> Formula | None:
    """The cofactor of an operand; None if the formula is not a product with it."""
    match formula:
        case Operand(index=number) if number == index:
            return Const(1.0)
        case Unary(op="neg", arg=arg):
            inner = _without(arg, index)
            return None if inner is None else Unary("neg", inner)
        case Binary(op=("mul" | "div") as op, left=left, right=right):
            in_left, in_right = (any(o.index == index for o in operands_of(side))
                                 for side in (left, right))  # fmt: skip
            if in_left == in_right or (in_right and op == "div"):
                return None
            with_it, other = (left, right) if in_left else (right, left)
            inner = _without(with_it, index)
            return other if inner == Const(1.0) and op == "mul" else (
                None if inner is None else Binary(op, inner, other)
            )  # fmt: skip
    return None
