"""Shared code of the MaxK layers: MaxK, then the sum or mean of compressed features.

MaxK is the first operation of a layer, on the features to aggregate. The linear map before it in
the MaxK-GNN paper (``maxk(X W)``, equation 1) belongs to the previous layer, so MaxK replaces the
ReLU in models of PyG.
"""

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import Linear, MessagePassing
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from pyg_accel import ops
from pyg_accel.costs import figures_of
from pyg_accel.formula import Computation, parse
from pyg_accel.graph import CBSR, Graph
from pyg_accel.graph.matrices import graph_of_matrix, is_sparse_matrix, values_of
from pyg_accel.layers.activation import dense_maxk, maxk
from pyg_accel.ops.csr import CompiledGraph, graph_of
from pyg_accel.patching.api import installed
from pyg_accel.patching.gate import Call, enter
from pyg_accel.patching.reasons import device_of
from pyg_accel.record.recorder import perform
from pyg_accel.runtime.checks import shown
from pyg_accel.runtime.hooks import has_hooks, hook_reasons
from pyg_accel.runtime.state import running

__all__ = [
    "Features",
    "adds_or_averages",
    "aggregate",
    "compress",
    "compress_both",
    "dtype_of",
    "is_plain",
    "is_recorded",
    "multiplies_first",
    "num_nodes",
    "pyg_reasons",
    "written_out",
]

Features = Tensor | CBSR
_FEATURES, _WEIGHTED = parse("u0"), parse("mul(u0,e1)")


# By the class of ``aggr_module``, which users may replace without changing ``aggr``.
_REDUCES: dict[type, str] = {SumAggregation: "sum", MeanAggregation: "mean"}


def compress(x: Features, k: int) -> Features:
    """Apply MaxK to features [N, F]; a CBSR is returned as it is.

    If k is a large share of F, the result is dense, as dense features are aggregated faster.
    """
    if isinstance(x, CBSR):
        return x
    if not isinstance(x, Tensor):
        raise ValueError(f"expected 'x' to be features [N, F] or a CBSR (got {shown(x)})")
    if is_recorded():
        return perform(dense_maxk, x, k)
    pays = x.dim() == 2 and k * figures_of(x.device.type).entry <= x.size(1)
    return maxk(x, k) if pays else dense_maxk(x, k)


def multiplies_first(conv: MessagePassing, features: Features, edge_index: Any, width: int) -> bool:
    """Return whether ``A (h W)``, with h the features, costs less than ``(A h) W``.

    The second aggregates compressed features, the first dense ones.

    Args:
        conv: the layer.
        features: h.
        edge_index: A.
        width: columns of ``h W``.
    """
    if pyg_reasons(conv, features, edge_index):
        return False
    if not isinstance(features, CBSR):
        return width <= features.size(1)
    if running.wire is not None:  # the same in all processes, whatever their edges
        return width <= features.k
    return width <= features.k * figures_of(features.values.device.type).entry


def is_plain(lin: Linear) -> bool:
    """Return whether a linear layer has only its weight and bias."""
    return type(lin) is Linear and lin.in_channels > 0 and not has_hooks(lin)


def compress_both(x: Any, k: int) -> Any:
    """Apply MaxK to the features of both sides, once if they are the same object."""
    pair = (x, x) if isinstance(x, (Tensor, CBSR)) else x
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"expected 'x' to be features [N, F], a CBSR or a pair of them (got "
                         f"{shown(x)})")  # fmt: skip
    source, target = pair
    first = None if source is None else compress(source, k)
    if target is source:
        return first, first
    return first, None if target is None else compress(target, k)


def is_recorded() -> bool:
    """Return whether ``optimize()`` records this call."""
    return running.unconditional and running.recorder is not None


def written_out(x: Features) -> Tensor:
    """Return dense features."""
    return x.dense() if isinstance(x, CBSR) else x


def num_nodes(x: Features) -> int:
    """Return the number of nodes of features."""
    return _stored(x).size(-2)


def dtype_of(x: Features) -> torch.dtype:
    """Return the dtype of features."""
    return _stored(x).dtype


def _stored(x: Features) -> Tensor:
    return x.values if isinstance(x, CBSR) else x


def aggregate(
    conv: MessagePassing, x: Any, edge_index: Any, size: Any = None, **kwargs: Any
) -> Tensor:
    """Sum or average features over the edges of every target node.

    Args:
        conv: the layer.
        x: features, or a pair of them for source and target nodes, the second possibly None.
        edge_index: the adjacency.
        size: numbers of source and target nodes, or None.
        **kwargs: further arguments of ``propagate``. A layer without ``edge_weight`` ignores the
            values of a SparseTensor, as in PyG.

    Returns:
        [number of target nodes, F].

    Raises:
        Exception: as PyG, for sizes, features or an adjacency that do not fit.
    """
    features = x if isinstance(x, (Tensor, CBSR)) else x[0]  # for both flows, as in PyG
    reasons = pyg_reasons(conv, features, edge_index)
    call = Call(_by_pyg, conv, (edge_index,), {"x": x, "size": size, **kwargs})
    if torch.compiler.is_compiling():
        return call.stock() if reasons else _by_kernels(call)[0]
    out: Tensor = enter(call, reasons, _by_kernels, device_of(edge_index), counts=not is_recorded())
    return out


def _by_pyg(conv: MessagePassing, edge_index: Any, x: Any, **kwargs: Any) -> Any:
    """Aggregate dense features with PyG's code."""
    if isinstance(x, (Tensor, CBSR)):
        dense: Any = written_out(x)
    else:
        dense = tuple(None if each is None else written_out(each) for each in x)
    return conv.propagate(edge_index, x=dense, **kwargs)


def _by_kernels(call: Call) -> tuple[Tensor, list[Computation]]:
    """Aggregate dense or compressed features; return the result and the computations."""
    conv: Any = call.owner
    (edge_index,), kwargs = call.args, dict(call.kwargs)
    x, size = kwargs.pop("x"), kwargs.pop("size")
    pair = (x, x) if isinstance(x, (Tensor, CBSR)) else tuple(x)
    if "halos" in installed:
        pair, size = installed["halos"](edge_index, pair, size)
    features = pair[0]
    graph, values = _graph_of(edge_index, pair, size, conv.flow)
    weight: Tensor | None = kwargs.get("edge_weight")
    if is_sparse_matrix(edge_index):
        weight = values if "edge_weight" in kwargs or isinstance(edge_index, Tensor) else None
    if weight is not None:
        if weight.dim() != 1:  # no view of [E]: caches would take it for a new tensor
            weight = weight.view(-1)
        if is_sparse_matrix(edge_index):  # with an edge_index, dtypes are promoted as in PyG
            weight = weight.to(dtype_of(features))
    reduce = _REDUCES[type(conv.aggr_module)]
    product = ops.cbsr_spmm if isinstance(features, CBSR) else ops.spmm
    out: Tensor = product(graph, features, weight, reduce=reduce, edge_order=True)
    columns = features.k if isinstance(features, CBSR) else 0
    formula = _FEATURES if weight is None else _WEIGHTED
    return out, [Computation(formula, (reduce,), columns=columns)]


def _graph_of(
    edge_index: Any, pair: tuple[Features | None, ...], size: Any, flow: str
) -> tuple[Graph, Tensor | None]:
    """Return the graph of an adjacency, and the values of a matrix in the order of its edges."""
    forward = flow == "source_to_target"
    if isinstance(edge_index, EdgeIndex):
        size, edge_index = (edge_index.num_rows, edge_index.num_cols), edge_index.as_tensor()
    source, target = _sizes(pair, size, flow)
    if is_sparse_matrix(edge_index):
        if not forward or edge_index.size(1) != source:
            raise ValueError("a sparse matrix in the other flow, or of another size")
        if isinstance(edge_index, Tensor) and edge_index.layout is torch.sparse_coo:
            edge_index = edge_index.coalesce()
        return graph_of_matrix(edge_index), values_of(edge_index)
    make = CompiledGraph if torch.compiler.is_compiling() else graph_of
    return make(edge_index, target, source, int(forward)), None


def adds_or_averages(conv: torch.nn.Module) -> bool:
    """Return whether a layer sums or averages: MaxK has kernels for both."""
    return type(conv.aggr_module) in _REDUCES


def pyg_reasons(conv: MessagePassing, features: Features, edge_index: Any) -> list[str]:
    """Return the reasons why PyG has to aggregate, with dense features."""
    reasons = []
    if not adds_or_averages(conv):
        reasons.append(f"aggr={conv.aggr_module!r}: the kernels of MaxK add up and average")
    if isinstance(features, Tensor) and features.dim() != 2:
        reasons.append(f"features of {features.dim()} dimensions")
    if torch.compiler.is_compiling():  # PyG ignores the following then, too
        return reasons
    if is_recorded():
        reasons.append("optimize() writes the products in an order of its own")
    reasons += hook_reasons(conv)
    if isinstance(edge_index, Tensor) and edge_index.requires_grad:
        reasons.append("a sparse matrix that requires gradients")
    return reasons


def _sizes(pair: tuple[Features | None, ...], size: Any, flow: str) -> tuple[int, int]:
    """Return the numbers of source and target nodes, as PyG determines them."""
    counts: list[int | None] = [None, None] if size is None else list(size)
    for side, features in enumerate(pair):
        if features is not None:
            count = num_nodes(features)
            if counts[side] not in (None, count):
                raise ValueError(f"expected features of {counts[side]} nodes (got {count})")
            counts[side] = count
    source, target = counts if flow == "source_to_target" else (counts[0], counts[0])
    if source is None:
        raise ValueError("expected features of the nodes that messages come from (got None)")
    return source, source if target is None else target
