"""Aggregation over a sample of each target's edges, chosen inside the kernel.

:mod:`pyg_accel.backends.sampling` defines the sample. For inference only: there are no gradients
(ES-SpMM paper, section VI-B).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.backends.sampling import Sampling
from pyg_accel.graph import CSR, Graph, check_graph
from pyg_accel.ops.arrays import ROW_ARRAYS
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.ops.operator import call, define
from pyg_accel.ops.quantized import Quantized
from pyg_accel.runtime.checks import whole
from pyg_accel.runtime.state import during, running

__all__ = ["sampled_spmm", "sampling_rates"]


def sampled_spmm(
    graph: Graph,
    x: Tensor | Quantized,
    weight: Tensor | None = None,
    *,
    width: int,
    strategy: str = "fastrand",
    reduce: str = "sum",
    rescale: str = "none",
    edge_order: bool = False,
) -> Tensor:
    """Aggregate at most ``width`` source nodes of every target: ES-SpMM.

    Cache-first edge sampling (ES-SpMM paper, sections IV and VI-A). Rows not longer than ``width``
    are taken whole; so with ``width`` at or above the largest degree this is :func:`spmm`.

    Args:
        graph: the graph.
        x: [num_cols, F] or [num_cols, H, F], or features from :func:`quantize`, which the kernel
            takes back to floating point as it reads them.
        weight: [E], one per edge, or [E, H] with x [num_cols, H, F].
        width: most edges of a target; the shared memory width S of the paper.
        strategy: ``"bucket"``, the first edges as stored (ascending source ids); ``"fastrand"``,
            edge ``i * 577 mod degree`` for each i below ``width`` (587, then 593, where the prime
            divides the degree). See :mod:`pyg_accel.backends.sampling`.
        reduce: ``"sum"``, or ``"mean"``: over the sampled edges.
        rescale: what a sum is multiplied by; a mean takes ``"none"`` alone.
            ``"none"``: nothing, as in the paper's algorithm 1.
            ``"row"``: degree / sampled degree of the target, so that sums keep their size.
        edge_order: weights are in the order of the edge list; by default in CSR order.

    Returns:
        [num_rows, F] or [num_rows, H, F]; targets without edges get 0. Features from
        :func:`quantize` give float32.

    Raises:
        ValueError: for arguments that do not fit, ``reduce="mean"`` with a ``rescale`` among them.
        BackendNotSupported: if no backend can run it.
        RuntimeError: from a backward pass through the result.
    """
    check_graph(graph)
    if isinstance(x, Quantized):
        x.check()
    values, scale = (x.values, x.scale) if isinstance(x, Quantized) else (x, None)
    if scale is None and isinstance(values, Tensor) and not values.is_floating_point():
        raise ValueError(f"expected 'x' to be floating-point, or quantized (got {values.dtype})")
    if torch.autograd.forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        raise NotImplementedError("pyg_accel operators have no forward-mode derivatives")
    rescale = _check(graph, values, weight, reduce, rescale)
    width = min(Sampling(width, strategy, rescale).width, _EVERYTHING)  # or raises
    if weight is not None and scale is not None:
        weight = weight.to(scale.dtype)
    elif weight is not None:
        dtype = torch.promote_types(values.dtype, weight.dtype)
        values, weight = values.to(dtype), weight.to(dtype)
    heads = values.size(1) if values.dim() == 3 else 1
    if weight is None or weight.shape[1:].numel() == 1:
        heads = 1  # one weight for all heads
    features = values.shape[1:].numel()
    folded = contiguous_rows(values.reshape(values.size(0), heads, features // max(heads, 1)))
    if scale is not None:
        scale = scale.reshape(scale.size(0), scale.shape[1:].numel())
    if weight is not None:
        weight = weight.reshape(weight.size(0), heads)
    arrays = graph.csr(edge_order=edge_order)[:4]
    out: Tensor = call("sampled_sum", *arrays, folded, scale, weight, int(width), strategy, rescale)
    return out.reshape(graph.num_rows, *values.shape[1:])


def sampling_rates(
    graph: Graph | Tensor, widths: Sequence[int] = (16, 32, 64, 128, 256, 512)
) -> dict[int, float]:
    """Return the share of all edges that each width keeps (ES-SpMM paper, table IV).

    Args:
        graph: a graph, or the degrees [N] of its targets.
        widths: most edges of a target.

    Returns:
        A share in [0, 1] by width; 1 for a graph without edges.

    Raises:
        ValueError: for something else than a graph or degrees, or widths below 1.
    """
    degree = graph.degree if isinstance(graph, Graph) else graph
    if not isinstance(degree, Tensor) or degree.dim() != 1:
        got = list(degree.shape) if isinstance(degree, Tensor) else type(degree).__name__
        raise ValueError(
            f"expected a Graph or the degrees [N] of its targets (got {got}); of an edge_index, "
            "Graph.from_edge_index(edge_index) makes a graph"
        )
    if not isinstance(graph, Graph) and (degree.is_floating_point() or degree.is_complex()):
        raise ValueError(f"expected degrees in whole numbers (got {degree.dtype})")
    widths = _checked(widths)
    sums = torch.stack([degree.clamp(max=w).sum() for w in (*widths, _EVERYTHING)]).tolist()
    return {w: n / sums[-1] if sums[-1] else 1.0 for w, n in zip(widths, sums, strict=False)}


_EVERYTHING = 2**31 - 1


@contextmanager
def note_samples() -> Iterator[list[int]]:
    """Collect the width of each sampled aggregation that runs inside the block, compiled or not."""
    widths: list[int] = []
    with during(sampled_widths=widths):
        yield widths


def _checked(widths: Iterable[int]) -> list[int]:
    """Return widths; ValueError unless there is one, and each is a whole number of at least 1."""
    values = list(widths) if isinstance(widths, Iterable) else []
    if not values:
        raise ValueError(f"expected 'widths' to be one or more whole numbers (got {widths!r})")
    return [whole("widths", width) for width in values]


def _check(graph: Graph, values: Tensor, weight: Tensor | None, reduce: str, rescale: str) -> str:
    """Raise for arguments that do not fit; return the factor of reduction and rescaling."""
    if not isinstance(values, Tensor) or values.dim() not in (2, 3):
        raise ValueError("expected 'x' to be a tensor [N, F] or [N, H, F]")
    if values.layout != torch.strided:
        raise ValueError(f"expected 'x' to be strided (got {values.layout})")
    if values.size(0) != graph.num_cols or values.device != graph.device:
        raise ValueError(
            f"expected 'x' to have {graph.num_cols} rows on {graph.device} "
            f"(got {list(values.shape)} on {values.device})"
        )
    if reduce not in ("sum", "mean"):
        raise ValueError(f"expected 'reduce' to be 'sum' or 'mean' (got '{reduce}')")
    if rescale not in ("none", "row"):
        raise ValueError(f"expected 'rescale' to be none or row (got '{rescale}')")
    if reduce == "mean" and rescale != "none":
        raise ValueError("a mean is over the sampled edges already: it takes no 'rescale'")
    if weight is not None:
        shapes = [(graph.num_edges,), (graph.num_edges, 1)]
        shapes += [(graph.num_edges, values.size(1)), (graph.num_edges, values.size(1), 1)] * (
            values.dim() == 3
        )
        if not isinstance(weight, Tensor) or tuple(weight.shape) not in shapes:
            raise ValueError(f"expected 'weight' to be [{graph.num_edges}], or [E, H] with x "
                             "[N, H, F]")  # fmt: skip
        if weight.device != graph.device or not weight.is_floating_point():
            raise ValueError(f"expected 'weight' to be floating-point on {graph.device}")
    return "mean" if reduce == "mean" else rescale


def _forward(
    rowptr: Tensor, col: Tensor, eid: Tensor | None, num_cols: int, x: Tensor,
    scale: Tensor | None, weight: Tensor | None, width: int, strategy: str, rescale: str,
) -> Any:  # fmt: skip
    csr = CSR(rowptr, col, eid, num_cols, False)
    spec = OpSpec.on("sampled_spmm", csr, x, x.size(1), x.size(2), k=width)
    weight = None if weight is None else weight.contiguous()
    if running.sampled_widths is not None:
        running.sampled_widths.append(width)
    return choose(spec).kernel.run(csr, x, scale, weight, Sampling(width, strategy, rescale))


def _forward_fake(rowptr: Tensor, *args: Any) -> Any:
    x, scale = args[3:5]
    dtype = x.dtype if scale is None else scale.dtype
    return x.new_empty(rowptr.size(0) - 1, x.size(1), x.size(2), dtype=dtype)


def _no_gradient(grad: Tensor) -> Tensor:
    raise RuntimeError(
        "sums over sampled edges have no gradient, they are for inference: call the model under "
        "torch.no_grad(), or train outside of sampled()"
    )


define(
    f"sampled_sum({ROW_ARRAYS}, Tensor x, Tensor? scale, Tensor? weight, SymInt width, "
    "str strategy, str rescale) -> Tensor",
    _forward,
    _forward_fake,
    {"x": _no_gradient, "weight": _no_gradient},
)
