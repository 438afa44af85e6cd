"""What the MaxK layers have in common: features through MaxK, then their sum or mean.

MaxK sits at the entrance of a layer, on the features that are about to be aggregated. The linear
map that the MaxK-GNN paper has in front of it (``maxk(X W)``, its equation 1) is therefore that of
the layer before, and MaxK stands where PyG's models have ReLU.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch_geometric import EdgeIndex
from torch_geometric.nn import Linear, MessagePassing
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from pyg_accel import ops
from pyg_accel.cbsr import CBSR
from pyg_accel.checks import shown
from pyg_accel.graph import Graph
from pyg_accel.hooks import has_hooks, hook_reasons
from pyg_accel.layers.activation import dense_maxk, maxk
from pyg_accel.matrices import graph_of_matrix, is_sparse_matrix, num_edges, values_of
from pyg_accel.ops.csr import CompiledGraph, graph_of
from pyg_accel.patching.gate import Call, enter
from pyg_accel.patching.reasons import device_of, forced
from pyg_accel.record.recorder import perform, running_recorder

__all__ = [
    "BEYOND",
    "Features",
    "Halos",
    "adds_or_averages",
    "aggregate",
    "compress",
    "compress_both",
    "dtype_of",
    "is_plain",
    "is_recorded",
    "linear_map",
    "multiplies_first",
    "num_nodes",
    "pyg_reasons",
    "transformed",
    "written_out",
]

Features = Tensor | CBSR


class Halos(Protocol):
    """The rows of other processes that edges read: see :mod:`pyg_accel.distributed`."""

    @property
    def rows(self) -> int:
        """Number of source nodes in all."""

    @property
    def targets(self) -> int:
        """Number of target nodes of this process."""

    def whole(self, data: Any) -> Any:
        """Return features of this process with those of other processes behind them."""


# Return the halos of an edge_index: one look-up per distributed model.
BEYOND: list[Callable[[Any], Halos | None]] = []


def _halos_of(edge_index: Any) -> Halos | None:
    return next((found for look in BEYOND if (found := look(edge_index)) is not None), None)


# By the module that aggregates: it may be another than a layer's ``aggr`` was set to.
_REDUCES: dict[type, str] = {SumAggregation: "sum", MeanAggregation: "mean"}
# To aggregate k stored entries a row takes about as long as this many times k columns with zeros:
# on a CPU 8 was measured where all features fit into the last cache; out of it, bytes say 1.25. On
# a GPU 1.5 to 2.4, the more the larger k.
_COLUMNS_AN_ENTRY = {"cpu": 4.0, "cuda": 2.5}
# What one multiplication of a dense product on a CPU takes, as measured: to add up one column of an
# edge this many times as long, and an entry in a compressed product (gradients included).
_PRODUCTS_A_COLUMN = 4
_PRODUCTS_AN_ENTRY = 2


def compress(x: Features, k: int) -> Features:
    """Put features [N, F] through MaxK; a CBSR has been there and stays what it is.

    Where k is a large share of F the result keeps its zeros: it is aggregated faster so.
    """
    if isinstance(x, CBSR):
        return x
    if not isinstance(x, Tensor):
        raise ValueError(f"expected 'x' to be features [N, F] or a CBSR (got {shown(x)})")
    if is_recorded():
        return perform(dense_maxk, x, k)
    pays = x.dim() == 2 and k * _columns_an_entry(x) <= x.size(1)
    return maxk(x, k) if pays else dense_maxk(x, k)


def _columns_an_entry(x: Tensor) -> float:
    return _COLUMNS_AN_ENTRY.get(x.device.type, _COLUMNS_AN_ENTRY["cpu"])


def multiplies_first(conv: MessagePassing, features: Features, edge_index: Any, width: int) -> bool:
    """Return whether ``A (h W)``, with h the features, costs less than ``(A h) W``.

    The second aggregates compressed features and multiplies dense ones, the first the other way
    round, if there is a compressed product; else their products cost the same.

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
    if _halos_of(edge_index) is not None:  # alike in all processes
        return width <= features.k
    more = width - features.k * _columns_an_entry(features.values)  # columns that an edge adds up
    if more <= 0 or not ops.multiplies_compressed(features, width):
        return more <= 0
    fewer = (features.width - features.k * _PRODUCTS_AN_ENTRY) * width  # multiplications a node
    edges = num_edges(edge_index) * more * _PRODUCTS_A_COLUMN
    return edges <= num_nodes(features) * fewer


def linear_map(features: Features, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear map, without writing compressed features out where that pays."""
    if isinstance(features, CBSR):
        return ops.cbsr_linear(features, weight, bias)
    return linear(features, weight, bias)


def transformed(lin: Linear, features: Features) -> Tensor:
    """Apply a linear layer to features."""
    if is_plain(lin):
        return linear_map(features, lin.weight, lin.bias)
    out: Tensor = lin(written_out(features))
    return out


def is_plain(lin: Linear) -> bool:
    """Return whether a linear layer is its weight and bias, and nothing else."""
    return type(lin) is Linear and lin.in_channels > 0 and not has_hooks(lin)


def compress_both(x: Any, k: int) -> Any:
    """Put the features of both sides through MaxK, once if they are the same."""
    _check_pair(x)
    if isinstance(x, (Tensor, CBSR)) or x[1] is x[0]:
        return (compress(x if isinstance(x, (Tensor, CBSR)) else x[0], k),) * 2
    return tuple(None if each is None else compress(each, k) for each in x)


def _check_pair(x: Any) -> None:
    if not isinstance(x, (Tensor, CBSR)) and (not isinstance(x, (tuple, list)) or len(x) != 2):
        raise ValueError(f"expected 'x' to be features [N, F], a CBSR or a pair of them (got "
                         f"{shown(x)})")  # fmt: skip


def is_recorded() -> bool:
    """Return whether ``optimize()`` records the call that is made."""
    return forced.on and running_recorder.recorder is not None


def written_out(x: Features) -> Tensor:
    """Return features with their zeros."""
    return x.dense() if isinstance(x, CBSR) else x


def num_nodes(x: Features) -> int:
    """Return how many nodes features belong to."""
    return _stored(x).size(-2)


def dtype_of(x: Features) -> torch.dtype:
    """Return the dtype of features."""
    return _stored(x).dtype


def _stored(x: Features) -> Tensor:
    return x.values if isinstance(x, CBSR) else x


def aggregate(
    conv: MessagePassing, x: Any, edge_index: Any, size: Any = None, **given: Any
) -> Tensor:
    """Sum up or average features over the edges of every target node.

    Args:
        conv: the layer: its aggregation and flow, and its ``propagate`` where PyG is to do it.
        x: features, or a pair of them for source and target nodes, the second possibly None.
        edge_index: the adjacency.
        size: numbers of source and target nodes, or None.
        **given: further arguments of ``propagate``. Without ``edge_weight`` among them the layer
            takes no weights, and the values of a SparseTensor are left out of account as in PyG.

    Returns:
        [number of target nodes, F].

    Raises:
        Exception: PyG's, for sizes, features or an adjacency that contradict one another.
    """
    features = x if isinstance(x, (Tensor, CBSR)) else x[0]  # whatever the flow, as in PyG
    reasons = pyg_reasons(conv, features, edge_index)
    call = Call(_by_pyg, conv, (edge_index,), {"x": x, "size": size, **given})
    if torch.compiler.is_compiling():
        return call.stock() if reasons else _by_kernels(call)[0]
    out: Tensor = enter(
        call, type(conv).__name__, reasons, _by_kernels, device_of(edge_index),
        counts=not is_recorded(),
    )  # fmt: skip
    return out


def _by_pyg(conv: MessagePassing, edge_index: Any, x: Any, **given: Any) -> Any:
    """Aggregate features with their zeros."""
    if isinstance(x, (Tensor, CBSR)):
        dense: Any = written_out(x)
    else:
        dense = tuple(None if each is None else written_out(each) for each in x)
    return conv.propagate(edge_index, x=dense, **given)


def _by_kernels(call: Call) -> tuple[Tensor, list[str]]:
    """Aggregate features as they are stored; return the result and its formula."""
    conv: Any = call.owner
    (edge_index,), given = call.args, dict(call.kwargs)
    x, size = given.pop("x"), given.pop("size")
    pair = (x, x) if isinstance(x, (Tensor, CBSR)) else tuple(x)
    halos = _halos_of(edge_index)
    if halos is not None:
        pair, size = (halos.whole(pair[0]), pair[1]), (halos.rows, halos.targets)
    features = pair[0]
    graph, values = _graph_of(edge_index, pair, size, conv.flow)
    weight: Tensor | None = given.get("edge_weight")
    if is_sparse_matrix(edge_index):
        weight = values if "edge_weight" in given or isinstance(edge_index, Tensor) else None
    if weight is not None:
        if weight.dim() != 1:  # a view of it would be another tensor each time to those that keep
            weight = weight.view(-1)
        if is_sparse_matrix(edge_index):  # of an edge_index, weights promote as in PyG
            weight = weight.to(dtype_of(features))
    reduce = _REDUCES[type(conv.aggr_module)]
    product = ops.cbsr_spmm if isinstance(features, CBSR) else ops.spmm
    out: Tensor = product(graph, features, weight, reduce=reduce, edge_order=True)
    message = f"maxk(u0,{features.k})" if isinstance(features, CBSR) else "u0"
    message = message if weight is None else f"mul({message},e1)"
    return out, [f"{reduce}_j {message}"]


def _graph_of(
    edge_index: Any, pair: tuple[Features | None, ...], size: Any, flow: str
) -> tuple[Graph, Tensor | None]:
    """The graph of an adjacency, and the values of a matrix in the order of its edges."""
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
    """Return whether a layer's aggregation is one that the kernels of MaxK have."""
    return type(conv.aggr_module) in _REDUCES


def pyg_reasons(conv: MessagePassing, features: Features, edge_index: Any) -> list[str]:
    """Return why PyG has to aggregate; it is given the features with their zeros."""
    reasons = []
    if not adds_or_averages(conv):
        reasons.append(f"aggr={conv.aggr_module!r}: the kernels of MaxK add up and average")
    if isinstance(features, Tensor) and features.dim() != 2:
        reasons.append(f"features of {features.dim()} dimensions")
    if torch.compiler.is_compiling():  # then PyG too passes over all that follows
        return reasons
    if is_recorded():
        reasons.append("optimize() writes the products in an order of its own")
    reasons += hook_reasons(conv)
    if isinstance(edge_index, Tensor) and edge_index.requires_grad:
        reasons.append("a sparse matrix that requires gradients")
    return reasons


def _sizes(pair: tuple[Features | None, ...], size: Any, flow: str) -> tuple[int, int]:
    """Number of source and of target nodes, found as PyG finds them."""
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
