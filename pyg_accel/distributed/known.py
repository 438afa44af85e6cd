"""Which tensors are this rank's part of something: edges, features that stay as they are.

Tensors are known by identity and version. What a layer derives from the edges it was given, by the
functions below, are edges of the same halo.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_accel.cache import changes_unseen, version_of
from pyg_accel.derived import find, keep
from pyg_accel.distributed.halo import Halo, exchange, turn
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable

__all__ = [
    "RUNNING", "Following", "adopt", "backward_begins", "backward_ends", "halo_of", "running",
    "stays", "will_stay", "with_halo",
]  # fmt: skip

# Functions of a layer whose result has the edges that its argument has.
_FOLLOWED = frozenset({"clone", "contiguous", "detach", "to", "long", "int"})


class _Running(threading.local):
    """State of a thread.

    Attributes:
        forward: the wire of the distributed model that runs; None outside of one.
        layer: tensors of the layer that runs, with halo; None outside of layers.
        exchanged: a layer was given its halos before it calls propagate.
    """

    forward: Wire | None = None
    layer: dict[tuple[int, int, int], tuple[Tensor, Tensor, bool]] | None = None
    exchanged = False

    @property
    def wire(self) -> Wire | None:
        """The wire of the distributed model that runs, or is gone through backwards.

        A checkpoint runs parts of a model again in the backward pass, in any thread.
        """
        return self.forward or (_backward[-1] if _backward else None)


_backward: list[Wire] = []
RUNNING = _Running()


def backward_begins(wire: Wire) -> None:
    """Take a note that gradients of a distributed model are being computed."""
    _backward[:] = [wire]


def backward_ends() -> None:
    """Take a note that they have been."""
    _backward.clear()


@contextmanager
def running(**changes: Any) -> Iterator[None]:
    """Change the state of the thread inside a block."""
    before = {name: getattr(RUNNING, name) for name in changes}
    for name, value in changes.items():
        setattr(RUNNING, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(RUNNING, name, value)


def will_stay(tensor: Tensor) -> None:
    """Take a note of a tensor that distribute() returns."""
    keep((tensor,), "static", True, lasting=True)


def stays(tensor: Tensor) -> bool:
    """Return whether a tensor is one that distribute() returned, whose changes are noticed."""
    return bool(find((tensor,), "static", lasting=True)) and not changes_unseen(tensor)


def halo_of(edges: Any) -> Halo | None:
    """Return the plan for the edges of this rank; None if they are none that it knows."""
    return find((edges,), "halo", lasting=True) if type(edges) is Tensor else None


def adopt(value: Any, halo: Halo) -> Any:
    """Know what was derived from edges of a halo as such: a tensor, or the first of a tuple."""
    first = value[0] if isinstance(value, tuple) and value else value
    if (
        type(first) is Tensor
        and first.dim() == 2
        and first.size(0) == 2
        and first.dtype in (torch.int32, torch.int64)
    ):
        keep((first,), "halo", halo, lasting=True)
        if isinstance(value, tuple) and len(value) == 2 and type(value[1]) is Tensor:
            keep((value[1],), "per edge", halo.wire, lasting=True)
    return value


def with_halo(halo: Halo, tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors [own, ...] with the rows of halo nodes; those that are known come for free.

    Known are features that stay as they are, and what the layer that runs has exchanged before.
    """
    results: list[Tensor | None] = [_found(halo, t) for t in tensors]
    distinct = {id(t): t for t, r in zip(tensors, results, strict=True) if r is None}
    if distinct:
        made = exchange(halo, list(distinct.values()))
        new = dict(zip(distinct, made, strict=True))
        for key, whole in new.items():
            _keep(halo, distinct[key], whole)
        results = [new[id(t)] if r is None else r for t, r in zip(tensors, results, strict=True)]
    return [r for r in results if r is not None]


def _found(halo: Halo, tensor: Tensor) -> Tensor | None:
    if stays(tensor):
        key = "whole", torch.is_inference_mode_enabled()
        known: Tensor | None = find((tensor, halo), key, lasting=True)
        return known
    entry = (RUNNING.layer or {}).get((id(halo), id(tensor), version_of(tensor)))
    return entry[1] if entry is not None and torch.is_grad_enabled() == entry[2] else None


def _keep(halo: Halo, tensor: Tensor, whole: Tensor) -> None:
    if stays(tensor):
        key = "whole", torch.is_inference_mode_enabled()
        keep((tensor, halo), key, whole, lasting=True)
    elif RUNNING.layer is not None:
        place = (id(halo), id(tensor), version_of(tensor))
        RUNNING.layer[place] = (tensor, whole, torch.is_grad_enabled())


def turned(halo: Halo, edges: Tensor) -> Tensor:
    """Return the edges that leave this rank's nodes, turned round; kept with those that reach them.

    Args:
        halo: of edges of this rank.
        edges: [2, E], that lead to nodes of this rank.
    """
    known: Tensor | None = find((edges, halo), "turned", lasting=True)
    if known is None:
        other, known = turn(halo, edges)
        keep((known,), "halo", other, lasting=True)
        keep((edges, halo), "turned", known, lasting=True)
    return known


class Following(TorchFunctionMode):
    """Sees the torch functions of a layer, and knows edges that they pick from known ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and len(args) == 1 and getattr(func, "__name__", "") == "max":
            wire = find(args, "per edge", lasting=True) if type(args[0]) is Tensor else None
            if wire is not None:
                return _largest(wire, args[0])
        if func is Tensor.flip and not kwargs and type(args[0]) is Tensor:
            halo = halo_of(args[0])
            if halo is not None and args[1:] in ((0,), ((0,),), ([0],)):
                return turned(halo, args[0])
        result = func(*args, **(kwargs or {}))
        if args and type(args[0]) is Tensor and _keeps_edges(func, args):
            halo = halo_of(args[0])
            if halo is not None and result is not args[0]:
                adopt(result, halo)
        return result


def _largest(wire: Wire, weights: Tensor) -> Tensor:
    """The largest weight of an edge on any rank."""
    if weights.requires_grad:
        raise NotDistributable("the largest of all edge weights has no gradient across ranks: pass "
                               "'lambda_max'")  # fmt: skip
    return wire.largest(torch.cat([weights, weights.new_full((1,), -torch.inf)]).max())


def _keeps_edges(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function of an edge_index returns its edges, or some of them as they are."""
    name = getattr(func, "__name__", "")
    if name == "__getitem__":  # edge_index[:, mask]
        return isinstance(args[1], tuple) and len(args[1]) == 2 and args[1][0] == slice(None)
    return name in _FOLLOWED or (name == "index_select" and args[1] in (1, -1))
