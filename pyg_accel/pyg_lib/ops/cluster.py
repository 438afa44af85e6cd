"""Clusters and samples of points and nodes: ``grid_cluster``, ``graclus_cluster``, ``fps``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.graph.csr import entries_of_rows
from pyg_accel.pyg_lib import kernels
from pyg_accel.pyg_lib.ops.points import pointers, real
from pyg_accel.runtime.checks import require
from pyg_accel.runtime.native import cpu_library, library_of

__all__ = ["edge_sample", "fps", "graclus_cluster", "grid_cluster", "native", "sampler_of"]


def grid_cluster(
    pos: Tensor, size: Tensor, start: Tensor | None = None, end: Tensor | None = None
) -> Tensor:
    """Return the voxel of each point; the first dimension varies fastest.

    Args:
        pos: [N, D].
        size: [D], of a voxel.
        start: [D], where the grid begins; by default at the smallest coordinates.
        end: [D], where it ends; by default at the largest.

    Returns:
        [N] int64.

    Raises:
        ValueError: on the CPU, for a size that is not positive, or coordinates that are not finite.
    """
    if pos.size(0) == 0:
        return torch.empty(0, dtype=torch.int64, device=pos.device)
    if not pos.is_cuda:
        require((size > 0).all(), "expected 'size' to be positive")
        require(pos.isfinite().all(), "expected 'pos' to hold finite numbers")
    start = pos.min(0).values if start is None else start
    end = pos.max(0).values if end is None else end
    voxels = torch.div(end - start, size, rounding_mode="trunc").long() + 1
    strides = torch.cat([voxels.new_ones(1), voxels.cumprod(0)[:-1]])
    return (torch.div(pos - start, size, rounding_mode="trunc").long() * strides).sum(1)


def fps(src: Tensor, ptr: Tensor, ratio: float = 0.5, random_start: bool = True) -> Tensor:
    """Sample points of every example, each the farthest from the sampled ones; ties by index.

    Args:
        src: [N, D].
        ptr: [B + 1] int64, where the points of each example begin.
        ratio: of the points of an example, rounded up.
        random_start: begin with a random point; else with the first.

    Returns:
        Ids of points, example by example, in the order in which they were chosen.

    Raises:
        ValueError: for shapes or pointers that do not fit, a ratio outside of (0, 1], or, on the
            CPU, coordinates that are not finite.
    """
    if src.dim() != 2:
        raise ValueError(f"expected 'src' [N, D] (got {list(src.shape)})")
    if not 0 < ratio <= 1:
        raise ValueError(f"expected 'ratio' to be above 0 and at most 1 (got {ratio})")
    src = real("src", src.detach()).contiguous()
    if not src.is_cuda:
        require(src.isfinite().all(), "expected 'src' to hold finite numbers")
    ptr = pointers("ptr", ptr, src)
    count = ptr.diff()
    chosen = (count.float() * ratio).ceil().long()
    ptr_out = torch.cat([chosen.new_zeros(1), chosen.cumsum(0)])
    first = torch.zeros_like(count)
    if random_start:
        first = (torch.rand(count.numel(), device=src.device) * count).long().minimum(count - 1)
    first.clamp_(min=0)
    kernel = sampler_of(src)
    if kernel == "triton":
        return kernels.farthest_points(src, ptr, ptr_out, first)
    if kernel == "cpu":
        sample = library_of(src.device).farthest_points
        points: Tensor = sample(src, ptr, ptr_out, first)
        return points
    return farthest_points(src, ptr, chosen, first)


def native(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a function in C++; raise its error as a ValueError without the C++ location.

    Raises:
        ValueError: names the argument.
    """
    try:
        return function(*args)
    except RuntimeError as error:
        _, expected, what = str(error).partition("expected '")
        if not expected:
            raise
        raise ValueError(expected + what.splitlines()[0]) from None


def sampler_of(src: Tensor) -> str:
    """Return the implementation of :func:`fps`: ``cpu``, ``triton``, or ``torch``."""
    if src.is_cuda:
        return "triton" if src.dtype != torch.float64 and kernels.samples(src) else "torch"
    return "torch" if library_of(src.device) is None else "cpu"


def farthest_points(src: Tensor, ptr: Tensor, chosen: Tensor, first: Tensor) -> Tensor:
    """Sample by torch's operators, all examples at once: the reference of the kernels.

    Args:
        src: [N, D].
        ptr: [B + 1].
        chosen: [B], how many points of each example.
        first: [B], the place of the first in the example.
    """
    count = ptr.diff()
    width = int(count.max()) if count.numel() else 0
    place = ptr[:-1, None] + torch.arange(width, device=src.device)
    inside = place < ptr[1:, None]
    points = src[place.clamp(max=max(src.size(0) - 1, 0))]  # [B, width, D]
    distance = torch.full_like(points[..., 0], torch.inf).where(inside, -1)
    steps = int(chosen.max()) if chosen.numel() else 0
    order = torch.empty(count.numel(), steps, dtype=torch.int64, device=src.device)
    each = torch.arange(count.numel(), device=src.device)
    for step in range(steps):
        order[:, step] = ptr[:-1] + first
        gap = (points - points[each, first].unsqueeze(1)).square().sum(-1)
        distance = torch.minimum(distance, gap).where(inside, -1)
        first = (distance == distance.amax(1, keepdim=True)).int().argmax(1)
    return order[torch.arange(steps, device=src.device) < chosen[:, None]]


def graclus_cluster(rowptr: Tensor, col: Tensor, weight: Tensor | None = None) -> Tensor:
    """Match nodes with a neighbour each, in a random order, as Graclus coarsens graphs.

    The order comes from torch's generator of the CPU. Graphs of a GPU are matched on the CPU.

    Args:
        rowptr: [N + 1].
        col: [E].
        weight: [E]; the heaviest edge to a free neighbour is taken. By default the first.

    Returns:
        [N], the smaller id for both nodes of a pair, the node itself for others.

    Raises:
        ValueError: for ids of nodes that do not exist.
        ExtensionNotBuilt: without the CPU library.
    """
    size = rowptr.numel() - 1
    order = torch.randperm(size)
    graph = rowptr.cpu().long().contiguous(), col.cpu().long().contiguous()
    heavy = None if weight is None else weight.detach().cpu().double().contiguous()
    return native(cpu_library().graclus, *graph, heavy, order).to(rowptr)


def edge_sample(start: Tensor, rowptr: Tensor, count: int = 0, factor: float = 1.0) -> Tensor:
    """Sample edges of nodes, without replacement.

    Args:
        start: [S] nodes.
        rowptr: [N + 1].
        count: edges of each node; below 1, ``factor`` counts.
        factor: of the edges of a node, rounded up.

    Returns:
        Ids of edges, node by node.
    """
    node, edge = entries_of_rows(rowptr, start)
    begin, degree = rowptr[start], rowptr[start + 1] - rowptr[start]
    key = torch.rand(node.numel(), device=node.device, dtype=torch.float64)
    order = (node + key).argsort()  # shuffled within each node
    size = (degree * factor).ceil().long() if count < 1 else torch.full_like(degree, count)
    return edge[order][edge - begin[node] < size[node]]
