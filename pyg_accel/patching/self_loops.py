"""Self-loops of PyG on a CPU, by a few calls in place of up to twenty operators."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch_geometric.utils.num_nodes import maybe_num_nodes

from pyg_accel.graph.matrices import is_edge_index
from pyg_accel.runtime.native import library_of

__all__ = ["native"]

_functions, _operators = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


@lru_cache(maxsize=64)
def native(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the native version of a function of PyG; others unchanged."""
    ours = _NATIVE.get(function.__qualname__)
    if ours is None:
        return function

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        out = ours(*args, **kwargs)
        return function(*args, **kwargs) if out is None else out

    return run


def _is_plain(edge_index: Any) -> bool:
    observed = _functions() or _operators()  # a mode must see PyG's operators
    return not observed and is_edge_index(edge_index) and edge_index.dtype == torch.int64


def _library(edge_index: Any) -> Any:
    """The library for an edge_index; None if PyG's operators must run."""
    on_cpu = _is_plain(edge_index) and not edge_index.is_cuda
    return library_of(edge_index.device) if on_cpu else None


def _remove_self_loops(edge_index: Any, edge_attr: Any = None) -> Any:
    library = _library(edge_index) if edge_attr is None else None
    return None if library is None else (library.remove_self_loops(edge_index), None)


def _add_self_loops(
    edge_index: Any, edge_attr: Any = None, fill_value: Any = None, num_nodes: Any = None
) -> Any:
    if edge_attr is not None or isinstance(num_nodes, (tuple, list)) or not _is_plain(edge_index):
        return None
    nodes = torch.arange(maybe_num_nodes(edge_index, num_nodes), device=edge_index.device)
    return torch.cat([edge_index, nodes.expand(2, -1)], dim=1), None


def _gcn_norm(
    edge_index: Any,
    edge_weight: Any = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> Any:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    plain = edge_weight is None and add_self_loops and dtype in (torch.float32, torch.float64)
    library = _library(edge_index) if plain else None
    if library is None or flow not in ("source_to_target", "target_to_source"):
        return None
    # In PyG `improved` changes weights from arguments, but not weights of one.
    size = maybe_num_nodes(edge_index, num_nodes)
    by_col = flow == "source_to_target"
    try:
        return library.gcn_norm(edge_index, size, by_col, dtype == torch.float64)
    except RuntimeError as error:
        if "outside of" not in str(error):
            raise
        return None  # PyG's operators raise for the id


_NATIVE: dict[str, Callable[..., Any]] = {
    "add_self_loops": _add_self_loops,
    "remove_self_loops": _remove_self_loops,
    "gcn_norm": _gcn_norm,
}
