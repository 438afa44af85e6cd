"""The hooks that pass the halos of operands to layers and functions of PyG.

A call with edges of this rank becomes a bipartite one: every operand that the message reads at the
source becomes a pair, the rows with halo and the rows of this rank. The call itself is local, with
the kernels of ``patch()`` or with PyG's code. The collectives come first, so that all ranks take
part in them.

``gcn_norm`` and ``get_laplacian`` read the degrees of both ends of an edge. PyG's code runs with
the degrees of halo nodes from the ranks that own them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, RGCNConv

from pyg_accel.distributed import norms, tracking
from pyg_accel.distributed.halo import Halo, collect, exchange
from pyg_accel.distributed.tracking import adopt, exchanged, halo_of, refuse, stays
from pyg_accel.errors import NotDistributable
from pyg_accel.graph.derived import find, keep
from pyg_accel.graph.memo import remembered, tensors_in
from pyg_accel.patching import gate, layers, propagate, relations
from pyg_accel.record.recorder import perform
from pyg_accel.runtime.cache import Snapshot
from pyg_accel.runtime.state import during, running

__all__ = ["HOOKS", "features_with_halo", "names_read"]

# Arguments of a message that contain node ids, which differ between ranks.
_UNKNOWN = frozenset({"edge_index", "edge_index_j", "size_j"})
_FORMULAS = frozenset({"gcn_norm", "get_laplacian"})


def names_read(module: MessagePassing, function: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the arguments that a call reads at the source of an edge, and all its arguments.

    Args:
        module: the layer.
        function: ``"propagate"`` or ``"edge_updater"``.
    """
    propagates = function == "propagate"
    parts: list[Any] = ["message", "aggregate", "update"] if propagates else ["edge_update"]
    names = frozenset(module.inspector.get_flat_param_names(parts))
    return frozenset(n[:-2] for n in names if n.endswith("_j") and n not in _UNKNOWN), names


def call(
    original: Callable[..., Any], self: MessagePassing, edge_index: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace ``propagate`` and ``edge_updater``."""
    halo = halo_of(edge_index)
    if args and halo is not None:
        bound = inspect.signature(original).bind(self, edge_index, *args, **kwargs)
        args, kwargs = (), dict(list(bound.arguments.items())[2:])
    if halo is not None:
        perform(halo_of, edge_index, borrows=True)  # makes the halo an input of a recording
        kwargs = _with_halos(self, original.__name__, halo, kwargs)
    elif running.wire is not None:
        refuse(type(self).__name__, edge_index)
    return propagate.call(original, self, edge_index, *args, **kwargs)


def _with_halos(
    self: MessagePassing, function: str, halo: Halo, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call, with halos for operands that are read at the source."""
    dim = self.node_dim
    at_source, all_names = names_read(self, function)
    pairs: dict[str, list[Any]] = {}
    for name in sorted(at_source & kwargs.keys()):
        value = kwargs[name]
        pair = list(value) if isinstance(value, (tuple, list)) else [value, value]
        if isinstance(pair[0], Tensor):
            pairs[name] = pair
    if reads := _UNKNOWN & all_names:
        floats = any(p[0].is_floating_point() for p in pairs.values())
        if reads != {"edge_index_j"} or not floats:
            raise NotDistributable(f"{type(self).__name__} reads {', '.join(sorted(reads))}, which "
                                   "names other nodes on every rank")  # fmt: skip
    changed: dict[str, Any] = {}
    for name, (source, *target) in pairs.items():
        whole = perform(exchanged, halo, name, _rows_first(source, dim))
        changed[name] = (_rows_first(whole, dim, back=True), *target)
    return kwargs | changed | {"size": (halo.rows, halo.targets)}


def _rows_first(tensor: Tensor, dim: int, *, back: bool = False) -> Tensor:
    """Move the node dimension of a tensor to the front, or back."""
    dim = dim % tensor.dim() if tensor.dim() > 1 else 0
    if dim == 0:
        return tensor
    return tensor.movedim(0, dim) if back else tensor.movedim(dim, 0).contiguous()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def layer(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Replace ``_call_impl``, which runs the forward of a layer and its hooks.

    Edges that the layer derives from others get their halo. A rewritten layer exchanges rows right
    before its products: its programs decide whether X or X W is sent, so all ranks must run the
    same. They are those of a halo, which identifies a call on all ranks, while sizes differ. No
    other layer has a program, as the size of the graph may not decide: all ranks have to take part
    in collectives.
    """
    transformed = running.transformed.get(self)
    if running.wire is None or (transformed is None and running.halo_rows is not None):
        hook = layers.layer if running.wire is None else layers.hooked
        return hook(self, *args, **kwargs)
    if transformed is None:
        return _following(self, args, kwargs)
    leaves = tensors_in((args, kwargs))
    stored = [tensor for tensor in leaves if stays(tensor)]
    halos = [halo for halo in map(halo_of, stored) if halo is not None]
    if len(halos) != 1:
        reason = "on several ranks a rewritten layer takes the edges that distribute() returned"
        return layers.untransformed(self, transformed, reason, args, kwargs)
    with (
        during(static=(*running.static, *stored)),
        during(transformed={self: transformed.of_halo(halos[0], leaves)}),
    ):
        out = gate.by_program(self, "call", layers.forward_of, args, kwargs)
        return _following(self, args, kwargs) if out is gate.NOTHING else out


def _following(self: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer with halos for operands of ``propagate`` and for derived edges."""
    with during(halo_rows={}), tracking.Following():
        return layers.hooked(self, *args, **kwargs)


def features_with_halo(
    edge_index: Any, pair: tuple[Any, Any], size: Any
) -> tuple[tuple[Any, Any], Any]:
    """Return the features and sizes of a MaxK layer, with a halo if its edges have one.

    Raises:
        NotDistributable: for edges without a halo in a distributed model.
    """
    if (halo := halo_of(edge_index)) is not None:
        return (exchanged(halo, "x", pair[0]), pair[1]), (halo.rows, halo.targets)
    if running.wire is not None:
        refuse("a MaxK layer", edge_index)
    return pair, size


def derive(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace a function that derives an edge_index from another."""
    halo = halo_of(args[0]) if args else None
    formula = function.__name__ in _FORMULAS
    if halo is None:
        if formula and running.wire is not None:
            refuse(function.__name__, args[0])
        return layers.memoise(function, *args, **kwargs)
    if formula:
        return perform(_formula, function, *args, borrows=True, **kwargs)
    if running.recorder is None:
        return adopt(layers.memoise(function, *args, **kwargs), halo)
    return perform(_derived, function, *args, borrows=True, **kwargs)


def _derived(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    halo = halo_of(args[0])
    assert halo is not None
    return adopt(remembered(function, *args, **kwargs), halo)


def _formula(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function in :data:`_FORMULAS`, cached for tensors of ``distribute()``.

    Results for other tensors are not cached: the caches of the ranks may differ.
    """
    halo = halo_of(args[0])
    assert halo is not None
    bound = inspect.signature(function).bind(*args, **kwargs)
    arguments = bound.arguments | {"num_nodes": halo.own}
    tensors = [v for v in arguments.values() if isinstance(v, Tensor)]
    if not all(map(tracking.stays, tensors)):
        return _computed(halo, function, arguments)
    others = tuple((n, v) for n, v in arguments.items() if not isinstance(v, Tensor))
    modes = torch.get_default_dtype(), torch.is_inference_mode_enabled()
    owners, key = (*tensors, halo), (function.__name__, others, modes)
    entry = find(owners, key, lasting=True)
    if entry is None or not entry[1].fits(entry[0]):
        # An entry must not refer to its key, which may be the edges.
        new = tuple(t for t in _computed(halo, function, arguments) if t is not tensors[0])
        entry = new, Snapshot(new)
        keep(owners, key, entry, lasting=True)
    return (tensors[0], *entry[0])[-2:]


def _computed(halo: Halo, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    of_sources = function.__name__ == "get_laplacian"
    only_own = of_sources and arguments.get("normalization") is None

    def degrees(reduce: str, weights: Tensor, nodes: Tensor, size: int | None) -> Tensor:
        sums = weights.new_zeros(halo.rows if of_sources else halo.own).index_add(0, nodes, weights)
        if of_sources:  # the edges that leave a node are spread over ranks
            sums = collect(halo, sums)
        return sums if only_own else exchange(halo, sums)

    with during(scatter=degrees):
        return adopt(function(**arguments), halo)


def rgcn(
    original: Callable[..., Any], self: RGCNConv, x: Any, edge_index: Any, edge_type: Any = None
) -> Any:
    """Replace ``RGCNConv.forward``: one exchange for all relations."""
    halo = halo_of(edge_index)
    if halo is None or type(x) is not Tensor or not x.is_floating_point():
        return relations.forward(original, self, x, edge_index, edge_type)
    whole = perform(exchanged, perform(halo_of, edge_index, borrows=True), "x", x)

    def stock(self: RGCNConv, _: Any, *edges: Any) -> Any:
        return original(self, x, *edges)  # it calls propagate, which exchanges the rows of x

    return relations.forward(stock, self, (whole, x), edge_index, edge_type)


HOOKS = norms.HOOKS | {
    "call": call, "layer": layer, "memoise": derive, "relations": rgcn,
}  # fmt: skip
