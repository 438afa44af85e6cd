"""``calibrate_sampling()``: the fewest sampled edges for a required accuracy."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from pyg_accel.graph.matrices import is_sparse_matrix
from pyg_accel.ops import sampling_rates
from pyg_accel.ops.sampled import note_samples
from pyg_accel.patching.api import patched
from pyg_accel.patching.sampling import sampled
from pyg_accel.runtime.checks import shown
from pyg_accel.runtime.module_state import evaluating

__all__ = ["calibrate_sampling"]


def calibrate_sampling(
    model: torch.nn.Module,
    data: Any,
    mask: Tensor,
    max_drop: float = 0.01,
    *,
    strategy: str = "fastrand",
    rescale: str = "row",
    widths: Sequence[int] | None = None,
    forward: Callable[[torch.nn.Module, Any], Tensor] | None = None,
    metric: Callable[[Tensor, Tensor], float] | None = None,
) -> int | None:
    """Find the smallest width whose accuracy on a mask stays within ``max_drop``.

    Runs the model in evaluation mode over all edges, then inside :func:`sampled` with one width
    after the other, the smallest first. The model is patched meanwhile, and restored afterwards.

    Args:
        model: a trained model.
        data: with ``x``, ``edge_index`` (or a sparse matrix ``adj_t``) and ``y``.
        mask: [N] bool, a validation mask.
        max_drop: largest loss of accuracy.
        strategy: as for :func:`sampled`.
        rescale: as for :func:`sampled`.
        widths: to try; by default powers of two from 4 to the first that takes every edge.
        forward: takes model and data, and returns the outputs [N, C]; by default
            ``model(data.x, data.edge_index)``, with ``edge_weight`` where both have it.
        metric: takes outputs and targets of the masked nodes; by default the accuracy.

    Returns:
        The smallest width, most edges of a node, or None if no width is good enough.

    Raises:
        ValueError: for an empty mask or one of another size, data without classes (or other
            targets and no metric), a negative drop, no widths or widths below 1, and for a model
            without sampled aggregations.
    """
    y = getattr(data, "y", None)
    if not isinstance(y, Tensor) or y.dim() == 0:
        raise ValueError("expected 'data' to have the classes of its nodes, 'y'")
    if metric is None and (y.is_floating_point() or y.is_complex() or y.numel() != y.size(0)):
        raise ValueError(
            f"expected 'data.y' to have one class a node (got {shown(y)} {y.dtype}); for other "
            "targets pass 'metric', of outputs and targets, larger where better"
        )
    graph, nodes = getattr(data, "edge_index", None), y.size(0)
    graph = getattr(data, "adj_t", None) if graph is None else graph
    if graph is None:
        raise ValueError("expected 'data' to have an 'edge_index', or a sparse matrix 'adj_t'")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (nodes,):
        raise ValueError(f"expected 'mask' to be bool [{nodes}], one per node (got {shown(mask)})")
    if not (mask.any() and max_drop >= 0):
        raise ValueError(f"expected 'mask' to select a node, and 'max_drop' >= 0 (got {max_drop})")
    degree = _degrees(graph)
    if widths is None:
        widths = [4 << i for i in range(int(degree.max() - 1).bit_length() - 1)] or [4]
    widths = sorted(sampling_rates(degree, widths))

    weights = {}
    if hasattr(data, "edge_weight") and "edge_weight" in signature(model.forward).parameters:
        weights = {"edge_weight": data.edge_weight}

    def score() -> float:
        out = forward(model, data) if forward else model(data.x, graph, **weights)
        if not isinstance(out, Tensor) or out.shape[:1] != mask.shape:
            raise ValueError(f"expected outputs of {nodes} rows, one per node (got {shown(out)})")
        return float((metric or _accuracy)(out[mask], y[mask]))

    with evaluating(model), patched(model), torch.no_grad():
        least = score() - max_drop - 1e-9  # a drop of max_drop must not fail by rounding
        for width in widths:
            with sampled(width, strategy, rescale=rescale), note_samples() as samples:
                good = score() >= least
            if not samples:
                raise ValueError(
                    f"nothing of {type(model).__name__} is sampled: only sums and means of "
                    "patched layers are, which pyg_accel.report() lists"
                )
            if good:
                return width
    return None


def _degrees(graph: Any) -> Tensor:
    if not is_sparse_matrix(graph):
        return torch.bincount(graph[1], minlength=1)
    coo = graph.to_sparse_coo().indices() if isinstance(graph, Tensor) else graph.coo()
    return torch.bincount(coo[0], minlength=1)


def _accuracy(out: Tensor, y: Tensor) -> float:
    if out.dim() != 2:
        raise ValueError(f"expected outputs [N, C], one per node and class (got {shown(out)})")
    return float((out.argmax(-1) == y.view(-1)).double().mean())
