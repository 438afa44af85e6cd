"""Where a call of a layer gets the halos of its operands: the hooks of :mod:`pyg_accel.patching`.

A call with edges of this rank is made as a bipartite one: every operand that the message reads at
the source becomes the pair of its rows with halo, and its own rows. All that follows is local, in
the kernels of ``patch()`` and on PyG's own path alike. Collectives come before, so no rank can
decline one.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, RGCNConv

from pyg_accel.cbsr import CBSR
from pyg_accel.distributed import pools
from pyg_accel.distributed.formulas import FORMULAS, formula
from pyg_accel.distributed.halo import Halo
from pyg_accel.distributed.known import RUNNING, Following, adopt, halo_of, running, with_halo
from pyg_accel.distributed.products import compressed
from pyg_accel.errors import NotDistributable
from pyg_accel.matrices import is_sparse_matrix
from pyg_accel.patching import hetero, layers, propagate, relations

__all__ = ["HOOKS", "CompressedHalos", "names_read"]

# What a message may ask for that names nodes: other ones on every rank.
_UNKNOWN = frozenset({"edge_index", "edge_index_j", "size_j"})


def names_read(module: MessagePassing, function: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return what the functions of a call read at the source of an edge, and all that they read.

    Args:
        module: the layer.
        function: ``"propagate"`` or ``"edge_updater"``.
    """
    parts: list[Any] = ["edge_update"]
    if function == "propagate":
        parts = ["message", "aggregate", "update"]
    names = frozenset(module.inspector.get_flat_param_names(parts))
    return frozenset(n[:-2] for n in names if n.endswith("_j") and n not in _UNKNOWN), names


def call(
    original: Callable[..., Any], self: MessagePassing, edge_index: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for ``propagate`` and ``edge_updater``."""
    halo = halo_of(edge_index)
    if halo is None:
        if RUNNING.wire is not None and not RUNNING.exchanged:
            _refuse(type(self).__name__, edge_index)
        return propagate.call(original, self, edge_index, *args, **kwargs)
    if args:
        bound = inspect.signature(original).bind(self, edge_index, *args, **kwargs)
        kwargs = dict(list(bound.arguments.items())[2:])
    if not RUNNING.exchanged:
        kwargs = _with_halos(self, original.__name__, halo, kwargs)
    return propagate.call(original, self, edge_index, **kwargs)


def _refuse(caller: str, edge_index: Any) -> None:
    if is_sparse_matrix(edge_index):
        raise NotDistributable(
            f"{caller} was called with a sparse matrix: a distributed model takes the "
            "edge_index that distribute() returned"
        )
    raise NotDistributable(
        f"{caller} was called with an edge_index that distribute() did not return, nor a layer "
        "derived from it: which rows of other ranks its edges read is not known"
    )


def _with_halos(
    self: MessagePassing, function: str, halo: Halo, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call with halos where the message reads the source of an edge."""
    layer = type(self).__name__
    at_source, all_names = names_read(self, function)
    pairs: dict[str, list[Any]] = {}
    for name in sorted(at_source & kwargs.keys()):
        value = kwargs[name]
        pair = list(value) if isinstance(value, (tuple, list)) else [value, value]
        if not isinstance(pair[0], Tensor):
            continue
        if name in all_names:
            raise NotDistributable(f"{layer} reads '{name}' both as a whole and at the ends of "
                                   "edges: a call with halos cannot give it both")  # fmt: skip
        rows = pair[0].size(self.node_dim)
        if rows != halo.own:
            raise NotDistributable(
                f"{layer} was called with {rows} rows of '{name}', but this rank owns {halo.own} "
                "source nodes: features of all nodes, or of some, cannot be exchanged"
            )
        pairs[name] = pair
    if reads := _UNKNOWN & all_names:
        floats = any(p[0].is_floating_point() for p in pairs.values())
        if reads != {"edge_index_j"} or not floats:
            raise NotDistributable(f"{layer} reads {', '.join(sorted(reads))}, which names other "
                                   "nodes on every rank")  # fmt: skip
    first = [_rows_first(pair[0], self.node_dim) for pair in pairs.values()]
    given = dict(kwargs)
    for (name, pair), whole in zip(pairs.items(), with_halo(halo, first), strict=True):
        pair[0] = _rows_first(whole, self.node_dim, back=True)
        given[name] = tuple(pair)
    given["size"] = (halo.rows, halo.targets)
    return given


def _rows_first(tensor: Tensor, dim: int, *, back: bool = False) -> Tensor:
    """Return a tensor with its nodes in the first dimension; itself if they are there."""
    dim = dim % tensor.dim() if tensor.dim() > 1 else 0
    if dim == 0:
        return tensor
    return tensor.movedim(0, dim) if back else tensor.movedim(dim, 0).contiguous()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def layer(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Stand in for what runs the forward of a layer: what it derives from edges is followed.

    The hooks inside of a distributed model exchange halos, so they run however small its graph.
    """
    if RUNNING.wire is None:
        return layers.layer(self, *args, **kwargs)
    if RUNNING.layer is not None:
        return layers.hooked(self, *args, **kwargs)
    with running(layer={}), Following():
        return layers.hooked(self, *args, **kwargs)


def derive(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for a function that derives an edge_index from another."""
    halo = halo_of(args[0]) if args else None
    if halo is None:
        if RUNNING.wire is not None and function.__name__ in FORMULAS:
            _refuse(function.__name__, args[0])
        return layers.memoise(function, *args, **kwargs)
    if function.__name__ in FORMULAS:
        return formula(halo, function.__name__, *args, **kwargs)
    return adopt(layers.memoise(function, *args, **kwargs), halo)


def rgcn(
    original: Callable[..., Any], self: RGCNConv, x: Any, edge_index: Any, edge_type: Any = None
) -> Any:
    """Stand in for ``RGCNConv.forward``: one exchange for all relations."""
    halo = halo_of(edge_index)
    if halo is None or type(x) is not Tensor or not x.is_floating_point():
        return relations.forward(original, self, x, edge_index, edge_type)
    if x.size(0) != halo.own:  # propagate will say so
        return original(self, x, edge_index, edge_type)
    (whole,) = with_halo(halo, [x])
    with running(exchanged=True):
        return relations.forward(original, self, (whole, x), edge_index, edge_type)


def by_relation(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``HeteroConv.forward``: each relation has halos of its own."""
    if RUNNING.wire is not None:
        return original(self, *args, **kwargs)
    return hetero.forward(original, self, *args, **kwargs)


class CompressedHalos:
    """The halos of MaxK layers: k values and k columns of a row travel, not its zeros."""

    def takes(self, edge_index: Any) -> bool:
        """Return whether edges lead from nodes of other ranks."""
        return halo_of(edge_index) is not None

    def whole(
        self, edge_index: Any, pair: tuple[Any, ...], size: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Return features with those of halo nodes at the source, and the numbers of nodes."""
        halo = halo_of(edge_index)
        if halo is None:
            if RUNNING.wire is not None:
                _refuse("a MaxK layer", edge_index)
            return pair, size
        features = pair[0]
        rows = (features.values if isinstance(features, CBSR) else features).size(0)
        if rows != halo.own:
            raise NotDistributable(f"a MaxK layer was called with {rows} rows, but this rank owns "
                                   f"{halo.own} source nodes")  # fmt: skip
        if isinstance(features, CBSR):
            source: Any = compressed(halo, features)
        else:
            (source,) = with_halo(halo, [features])
        return (source, pair[1]), (halo.rows, halo.targets)


HOOKS = {
    "call": call,
    "layer": layer,
    "memoise": derive,
    "relations": rgcn,
    "hetero": by_relation,
    "aggregate": pools.aggregate,
}
