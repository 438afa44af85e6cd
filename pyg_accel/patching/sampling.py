"""``sampled()``: sums and means of patched layers over a sample of each node's edges (ES-SpMM)."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from pyg_accel import ops
from pyg_accel.backends.sampling import Sampling
from pyg_accel.formula import Formula, weighted_source
from pyg_accel.graph import Graph
from pyg_accel.ops.layout import broadcast
from pyg_accel.patching import overrides
from pyg_accel.record.recorder import perform

__all__ = ["aggregate", "in_force", "refuse_training", "sampled", "state"]

# A context variable, as a user may await something in the block, and other tasks must not see it.
_in_force: ContextVar[Sampling | None] = ContextVar("pyg_accel_sampled", default=None)


class _State:
    """The sample as an attribute: Dynamo guards attributes, and cannot read a ContextVar.

    Attributes:
        key: the sample of the last entered block; empty outside of all blocks.
        entered: the keys of all open blocks, which threads may leave in any order.
    """

    def __init__(self) -> None:
        self.key = ""
        self.entered: list[str] = []
        self._lock = threading.Lock()

    def enter(self, key: str) -> None:
        """Begin a block."""
        with self._lock:
            self.entered.append(key)
            self.key = key

    def leave(self, key: str) -> None:
        """End a block."""
        with self._lock:
            self.entered.remove(key)
            self.key = self.entered[-1] if self.entered else ""


state = _State()


@contextmanager
def sampled(width: int = 64, strategy: str = "fastrand", *, rescale: str = "row") -> Iterator[None]:
    """Let patched layers sum over at most ``width`` edges of every node inside a ``with`` block.

    Sums and means, with or without one weight per edge (and head), go over a sample of the edges
    that is chosen inside the kernel; other aggregations stay exact, and :func:`report` lists both.
    Graphs of any size are sampled. For inference: there are no gradients. Use
    :func:`calibrate_sampling` to find a width for a model.

    Args:
        width: most edges of a node.
        strategy: ``"bucket"`` or ``"fastrand"``; see :func:`pyg_accel.ops.sampled_spmm`.
        rescale: factor of sums, which lack terms; means need none. ``"row"``: all edges / sampled
            edges of the node. ``"none"``.

    Raises:
        ValueError: for arguments that do not fit.
        RuntimeError: if nothing is patched; inside, for a call of a layer in training mode or a
            backward pass through one.
    """
    if rescale not in ("none", "row"):
        raise ValueError(f"expected 'rescale' to be none or row (got '{rescale}')")
    sampling = Sampling(width, strategy, rescale)
    if not overrides.installed():
        raise RuntimeError("sampled() acts on patched models: call pyg_accel.patch() first")
    token, key = _in_force.set(sampling), f"{width} {strategy} {rescale}"
    state.enter(key)
    try:
        yield
    finally:
        _in_force.reset(token)
        state.leave(key)


in_force = _in_force.get  # returns the current sampling, or None


def refuse_training(layer: torch.nn.Module) -> None:
    """Raise if a layer would train on a sample that is always the same.

    Raises:
        RuntimeError: with what to do instead.
    """
    if in_force() is not None and layer.training:
        raise RuntimeError(
            f"{type(layer).__name__} is in training mode inside sampled(), which takes the same "
            "edges in each step: training on them costs accuracy (ES-SpMM paper, section VI-B). "
            "Call model.eval(), or train outside of sampled()"
        )


def aggregate(
    graph: Graph, formula: Formula, operands: Sequence[Tensor], reduces: Sequence[str]
) -> tuple[list[Tensor], str]:
    """Reduce messages over their target nodes, over a sample inside of :func:`sampled`.

    Args:
        graph: the graph.
        formula: the message.
        operands: by operand index.
        reduces: the reductions.

    Returns:
        One tensor per reduction, and a note on the sample for the report.
    """
    sampling = in_force()
    read = "" if sampling is None else _read_by_sample(formula, operands, reduces)
    if sampling is None or isinstance(read, str):
        wanted: Any = reduces[0] if len(reduces) == 1 else list(reduces)
        result: Any = perform(ops.gspmm, graph, formula, operands, reduce=wanted, edge_order=True)
        outs: list[Tensor] = [result] if len(reduces) == 1 else list(result)
        return outs, f" (exact: {read})" if read else ""
    x, weight, shape = read
    how: dict[str, Any] = {"width": sampling.width, "strategy": sampling.strategy}
    outs = []
    for reduce in reduces:
        rescale = sampling.rescale if reduce == "sum" else "none"
        out = perform(
            ops.sampled_spmm, graph, x, weight, reduce=reduce, rescale=rescale, edge_order=True,
            **how,
        )  # fmt: skip
        outs.append(out.reshape(out.size(0), *shape))
    return outs, f" over {sampling.width} edges by {sampling.strategy}"


def _read_by_sample(
    formula: Formula, operands: Sequence[Tensor], reduces: Sequence[str]
) -> tuple[Tensor, Tensor | None, tuple[int, ...]] | str:
    """Features and weights for the operator, and the shape of a row of the result.

    Or the reason why the reduction is not sampled.
    """
    if not set(reduces) <= {"sum", "mean"}:
        return "only sums and means are sampled"
    sides = weighted_source(formula)
    if sides is None:
        return "only features, or features times a weight, are sampled"
    x, weight = operands[sides[0]], None if sides[1] is None else operands[sides[1]]
    shape = tuple(x.shape[1:])
    if weight is not None:
        if weight.shape[1:].numel() == 1 and weight.dim() <= max(x.dim(), 2):
            shape = broadcast(shape, weight.shape[1:])
            weight = weight.reshape(weight.size(0))
        elif x.dim() == 3 and weight.shape[1:] == (x.size(1), 1):
            return x, weight.squeeze(-1), shape
        else:
            return "weights of each feature are not sampled"
    return x.reshape(x.size(0), x.shape[1:].numel()), weight, shape
