"""The halo of each edge_index, and the features that are the same in every call.

Tensors are recognised by identity and version. Tensors that a layer derives from edges of a halo
with the functions below belong to the same halo.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_accel.distributed.halo import Halo, exchange, reverse
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable
from pyg_accel.graph.cbsr import CBSR, trust
from pyg_accel.graph.derived import derived, find, keep
from pyg_accel.graph.matrices import is_sparse_matrix
from pyg_accel.runtime.cache import changes_unseen, version_of
from pyg_accel.runtime.state import running

__all__ = [
    "Following", "adopt", "exchanged", "halo_of", "refuse", "stays", "will_stay",
]  # fmt: skip

_IDS = (torch.int32, torch.int64)
# Functions of an edge_index that return the same edges.
_FOLLOWED = frozenset({"clone", "contiguous", "detach", "to", "long", "int"})


def will_stay(tensor: Tensor) -> None:
    """Note a tensor that distribute() returns."""
    keep((tensor,), "static", True, lasting=True)


def stays(tensor: Tensor) -> bool:
    """Return whether distribute() returned a tensor, and its version counter shows changes."""
    return bool(find((tensor,), "static", lasting=True)) and not changes_unseen(tensor)


def halo_of(edges: Any) -> Halo | None:
    """Return the halo of an edge_index of this rank; None for all other values."""
    return find((edges,), "halo", lasting=True) if type(edges) is Tensor else None


def adopt(value: Any, halo: Halo) -> Any:
    """Register an edge_index derived from edges of a halo, or an (edge_index, weights) pair."""
    edges, *others = value if isinstance(value, tuple) and value else (value,)
    if type(edges) is Tensor and edges.dim() == 2 == edges.size(0) and edges.dtype in _IDS:
        keep((edges,), "halo", halo, lasting=True)
        if len(others) == 1 and type(others[0]) is Tensor:
            keep((others[0],), "wire", halo.wire, lasting=True)
    return value


def refuse(caller: str, edge_index: Any) -> None:
    """Raise the error for edges that do not belong to a halo."""
    if is_sparse_matrix(edge_index):
        raise NotDistributable(
            f"{caller} was called with a sparse matrix: a distributed model takes the "
            "edge_index that distribute() returned"
        )
    raise NotDistributable(
        f"{caller} was called with an edge_index that distribute() did not return, nor a layer "
        "derived from it: the rows of other ranks that its edges read are unknown"
    )


def exchanged(halo: Halo, name: str, data: Any) -> Any:
    """Return features [own, ...] with the rows of halo nodes; CBSR rows are sent compressed.

    Features that are the same in every call are sent once, and tensors once per layer.

    Args:
        halo: the halo.
        name: name of the features, for the error.
        data: features.

    Raises:
        NotDistributable: for tensors without a row per source node of this rank.
    """
    if isinstance(data, CBSR):
        columns = data.indices.view(torch.uint8)
        values, columns = (exchange(halo, t) for t in (data.values, columns))
        return CBSR(values, trust(columns.view(data.indices.dtype), data.width), data.width)
    if data.size(0) != halo.own:
        raise NotDistributable(
            f"a layer was called with {data.size(0)} rows of '{name}', but this rank owns "
            f"{halo.own} source nodes: features of all nodes, or of some, cannot be exchanged"
        )
    if stays(data):
        key = "whole", torch.is_inference_mode_enabled()
        whole: Tensor = derived([data, halo], key, lambda: exchange(halo, data), lasting=True)
        return whole
    cache = {} if running.halo_rows is None else running.halo_rows
    identity = id(halo), id(data), version_of(data), torch.is_grad_enabled()
    if identity not in cache:
        cache[identity] = data, exchange(halo, data)
    return cache[identity][1]


def _reversed(halo: Halo, edges: Tensor) -> Tensor:
    """Return the edges that leave the nodes of this rank, reversed."""

    def make() -> Any:
        other, result = reverse(halo, edges)
        return adopt(result, other)

    result: Tensor = derived([edges, halo], "reversed", make, lasting=True)
    return result


class Following(TorchFunctionMode):
    """Registers edges that torch functions in a layer derive from edges of a halo."""

    only_outside_propagate = True  # the operands of propagate are exchanged before it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_tensor = bool(args) and type(args[0]) is Tensor
        if is_tensor and not kwargs:
            if name == "max" and len(args) == 1:
                wire = find(args, "wire", lasting=True)  # of edge weights
                if wire is not None:
                    return _largest(wire, args[0])
            elif name == "flip" and args[1:] in ((0,), ((0,),), ([0],)):
                halo = halo_of(args[0])
                if halo is not None:
                    _end_record()
                    return _reversed(halo, args[0])
        result = func(*args, **(kwargs or {}))
        halo = halo_of(args[0]) if is_tensor and _selects_edges(name, args) else None
        if halo is None or result is args[0]:
            return result
        _end_record()
        return adopt(result, halo)


def _end_record() -> None:
    """End a record of the layer: a program would not register the edges that it derives."""
    if running.recorder is not None:
        running.recorder.stop("on several ranks, edges that it derives in each call")


def _largest(wire: Wire, weights: Tensor) -> Tensor:
    if weights.requires_grad:
        raise NotDistributable("the largest of all edge weights has no gradient across ranks: pass "
                               "'lambda_max'")  # fmt: skip
    return wire.largest(torch.cat([weights, weights.new_full((1,), -torch.inf)]).max())


def _selects_edges(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function of an edge_index returns its edges, or a subset of them."""
    if name == "__getitem__":  # edge_index[:, mask]
        return isinstance(args[1], tuple) and len(args[1]) == 2 and args[1][0] == slice(None)
    return name in _FOLLOWED or (name == "index_select" and args[1:2] in ((1,), (-1,)))
