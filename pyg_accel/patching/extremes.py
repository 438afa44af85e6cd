"""``torch_geometric.utils.scatter`` of extremes with gradients on a GPU, as of ``global_max_pool``.

The gradient of ``torch.scatter_reduce`` compares all features with their maximum. Here one kernel
reads the rows in order, and another one sends the gradient to a row of each maximum. Sums and means
are left to torch, which is as fast up to a hundred million numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.nn import Parameter

from pyg_accel import ops
from pyg_accel.graph import Graph
from pyg_accel.patching.reasons import is_active, torch_records, transform_reasons

__all__ = ["scatter"]


def scatter(
    function: Callable[..., Tensor],
    src: Any,
    index: Any,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """Replace ``scatter``; leave other reductions, devices and tensors to PyG."""
    if reduce not in ("max", "min") or torch_records() or not _has_kernel(src, index, dim):
        return function(src, index, dim, dim_size, reduce)
    rows = (int(index.max()) + 1 if index.numel() else 0) if dim_size is None else dim_size
    graph = Graph.of_edges(index.expand(2, -1), 1, rows, rows)
    out: Tensor = ops.gspmm(graph, "e0", [src.flatten(1)], reduce=reduce, edge_order=True)
    return out.view(rows, *src.shape[1:])


def _has_kernel(src: Any, index: Any, dim: int) -> bool:
    """Whether a kernel applies: to plain tensors, unless something records the call."""
    return (
        type(src) in (Tensor, Parameter)
        and type(index) is Tensor
        and _is_on_gpu(src, index)
        and src.requires_grad
        and torch.is_grad_enabled()
        and src.is_floating_point()
        and dim in (0, -src.dim())
        and src.dim() > 1
        and index.shape == src.shape[:1]
        and index.dtype in (torch.int32, torch.int64)
        and is_active()
        and not _len_torch_function_stack()
        and not transform_reasons()
    )


def _is_on_gpu(src: Tensor, index: Tensor) -> bool:
    return src.is_cuda and index.device == src.device
