"""Neighbour sampling for PyG's ``NeighborSampler``, by the native libraries."""

import time
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.sampler.base import SubgraphType

from pyg_accel.loader.devices import device_of, may_have_changed, readable, why_on_cpu
from pyg_accel.loader.stream import beside
from pyg_accel.runtime.native import cpu_library, cuda_library
from pyg_accel.runtime.report import record_batch

__all__ = ["ONE", "Draw", "Edges", "draw", "sample"]

ONE = ""  # the only type of nodes, and of edges, of a homogeneous graph


class Edges(NamedTuple):
    """The arguments of a sampler, by type of nodes or of edges."""

    ends: dict[Any, tuple[Any, Any]]  # the types of source and target of each type of edges
    colptr: Mapping[Any, Tensor]
    row: Mapping[Any, Tensor]
    num_nodes: Mapping[Any, int]
    num_neighbors: Mapping[Any, Sequence[int]]
    node_time: Mapping[Any, Tensor]
    edge_time: Mapping[Any, Tensor]
    edge_weight: Mapping[Any, Tensor]

    @classmethod
    def of_one_type(
        cls, colptr: Tensor, row: Tensor, num_nodes: int, num_neighbors: Sequence[int],
        *values: Tensor | None,
    ) -> "Edges":  # fmt: skip
        """Return the edges of a homogeneous graph; ``values`` are times and weights, in order."""
        by_type = [{} if value is None else {ONE: value} for value in values] or [{}, {}, {}]
        return cls({ONE: (ONE, ONE)}, {ONE: colptr}, {ONE: row}, {ONE: num_nodes},
                   {ONE: num_neighbors}, *by_type)  # fmt: skip


class Draw(NamedTuple):
    """How edges are sampled.

    Attributes:
        device: the device.
        replace: with replacement.
        induced: all edges between the sampled nodes.
        disjoint: a separate subgraph for every seed.
        temporal_strategy: ``"uniform"`` or ``"last"``.
        backward: along edges, not against them.
    """

    device: torch.device
    replace: bool = False
    induced: bool = False
    disjoint: bool = False
    temporal_strategy: str = "uniform"
    backward: bool = False


def sample(
    sampler: Any,
    seed: Tensor | dict[str, Tensor],
    seed_time: Tensor | dict[str, Tensor] | None = None,
) -> SamplerOutput | HeteroSamplerOutput:
    """Sample a subgraph around seeds, as PyG's ``NeighborSampler`` does with pyg-lib.

    Seeds are numbered first, then other nodes in the order of their first appearance; edges are
    ordered by hop and target. Random numbers follow ``torch.manual_seed`` and do not depend on the
    number of threads: the same distribution as pyg-lib's, not the same batches. Batches of a GPU
    may differ from the CPU's.

    Args:
        sampler: a ``torch_geometric.sampler.NeighborSampler``.
        seed: ids of nodes, ``[num_seeds]``; by type of nodes where the graph has several.
        seed_time: int64, in the form of ``seed``. No edge or node is sampled that is later; by
            default the time of the seed node.

    Returns:
        The result of ``NeighborSampler`` before it makes edges bidirectional, on the device of the
        sampler. Induced subgraphs have no numbers per hop.

    Raises:
        ValueError: names the argument, or what is wrong with the graph.
    """
    began = time.perf_counter()
    typed = isinstance(seed, dict)
    seeds = seed if isinstance(seed, dict) else {ONE: seed}
    times = seed_time if isinstance(seed_time, dict) or seed_time is None else {ONE: seed_time}
    graph = _typed(sampler) if typed else _homogeneous(sampler)
    how = Draw(
        device_of(sampler), sampler.replace, sampler.subgraph_type == SubgraphType.induced,
        sampler.disjoint, sampler.temporal_strategy, sampler.sample_direction == "backward",
    )  # fmt: skip
    waits = _must_wait(sampler, graph, seeds, times)
    typed_out: Any = draw(graph, how, seeds, times, after=waits)
    out: SamplerOutput | HeteroSamplerOutput = typed_out
    if not typed:
        names = ("node", "row", "col", "edge", "batch", "num_sampled_nodes", "num_sampled_edges")
        by_type = {name: getattr(typed_out, name) for name in names}
        out = SamplerOutput(**{name: each and each[ONE] for name, each in by_type.items()})
    what = f"neighbors {sampler.num_neighbors.values}"
    seconds = time.perf_counter() - began
    where, reason = device_of(sampler).type, why_on_cpu(sampler)
    record_batch(type(sampler).__name__, what, where, reason, seconds)
    return out


def _homogeneous(sampler: Any) -> Edges:
    num_neighbors = sampler.num_neighbors.get_mapped_values()
    if isinstance(num_neighbors, dict):
        raise ValueError(
            f"expected 'num_neighbors' to be a list for a graph with one type of edges "
            f"(got {num_neighbors!r})"
        )
    return Edges.of_one_type(
        sampler.colptr, sampler.row, sampler.num_nodes, num_neighbors, sampler.node_time,
        sampler.edge_time, sampler.edge_weight,
    )  # fmt: skip


def _typed(sampler: Any) -> Edges:
    names = dict(sampler.to_edge_type)
    if sampler.sample_direction == "backward":
        names = {k: sampler.to_restored_edge_type[name] for k, name in names.items()}

    def named(by_relation: Mapping[Any, Any] | None) -> dict[Any, Any]:
        return {names[k]: value for k, value in (by_relation or {}).items()}

    relations = {sampler.to_rel_type[kind]: (kind[0], kind[-1]) for kind in sampler.edge_types}
    return Edges(
        named(relations), named(sampler.colptr_dict), named(sampler.row_dict),
        _counted(sampler, relations),
        named(sampler.num_neighbors.get_mapped_values(sampler.edge_types)),
        sampler.node_time or {}, named(sampler.edge_time), named(sampler.edge_weight),
    )  # fmt: skip


def _by_edges(graph: Edges) -> dict[Any, int]:
    """Return the number of nodes of each type, including nodes that only edges refer to."""
    counts = dict(graph.num_nodes)
    for relation, (source, _) in graph.ends.items():
        row = graph.row[relation]
        counts[source] = max(counts[source], int(row.max()) + 1 if row.numel() else 0)
    return counts


def _counted(sampler: Any, relations: Mapping[Any, tuple[Any, Any]]) -> dict[Any, int]:
    """Return the number of nodes of each type; from its edges if PyG does not have it."""
    counts = dict(sampler.num_nodes)
    for kind in (kind for kind, count in counts.items() if count is None):
        as_target = [
            sampler.colptr_dict[k].numel() - 1 for k, e in relations.items() if e[1] == kind
        ]
        rows = [sampler.row_dict[k] for k, e in relations.items() if e[0] == kind]
        as_source = [int(row.max()) + 1 for row in rows if row.numel()]
        counts[kind] = max([0, *as_target, *as_source])
    return counts


def draw(
    graph: Edges,
    how: Draw,
    seeds: Mapping[Any, Tensor],
    seed_time: Mapping[Any, Tensor] | None = None,
    *,
    after: bool = True,
) -> HeteroSamplerOutput:
    """Sample a subgraph.

    Args:
        graph: the edges.
        how: the method.
        seeds: ids of nodes by type.
        seed_time: their times.
        after: wait for pending writes of the current stream of a GPU.

    Raises:
        ValueError: names the argument, or what is wrong with the graph.
    """
    induced = how.induced
    if unknown := seeds.keys() - graph.num_nodes.keys():
        raise ValueError(f"expected 'seed' to name types of nodes (got {sorted(unknown)})")
    types = [*seeds, *(kind for kind in graph.num_nodes if kind not in seeds)]
    relations = list(graph.ends)
    if len({graph.colptr[k].dtype for k in relations}) > 1:
        raise ValueError("expected 'edge_index' to have one dtype in all types of edges")
    if how.temporal_strategy not in ("uniform", "last"):
        raise ValueError(f"expected 'temporal_strategy' to be 'uniform' or 'last' "
                         f"(got {how.temporal_strategy!r})")  # fmt: skip
    for kind, values in graph.node_time.items():
        _check_times("time_attr", values, graph.num_nodes[kind])
    for kind, values in graph.edge_time.items():
        _check_times("time_attr", values, graph.row[kind].numel())
    for kind, values in graph.edge_weight.items():
        if values.shape != graph.row[kind].shape or values.dtype not in _WEIGHTS:
            raise ValueError(f"expected 'weight_attr' to be a float32 or float64 number of every "
                             f"edge (got {_shown(values)})")  # fmt: skip
    with beside(how.device, after=after) as created:
        tensors, counts, fault = _draw(graph, how, types, seeds, seed_time)
        created += tensors
    if fault:
        raise ValueError(fault)
    each = iter(tensors)
    edges = {k: (next(each), next(each), next(each)) for k in relations}
    nodes = {kind: (next(each), next(each)) for kind in types}
    first, *hops = _hops(counts, len(types), len(relations))
    if induced and hops:  # the nodes of the last hop are outside of the subgraph
        for kind, new in zip(types, hops[-1][1], strict=True):
            node, batch = nodes[kind]
            nodes[kind] = node[: node.numel() - new], batch[: max(batch.numel() - new, 0)]
        for k, (source, _) in graph.ends.items():
            row, col, edge = edges[k]
            inside = row < nodes[source][0].numel()
            edges[k] = row[inside], col[inside], edge[inside]
    if how.backward:
        edges = {k: (col, row, edge) for k, (row, col, edge) in edges.items()}
    return HeteroSamplerOutput(
        node={kind: nodes[kind][0] for kind in graph.num_nodes},
        row={k: row for k, (row, _, _) in edges.items()},
        col={k: col for k, (_, col, _) in edges.items()},
        edge={k: edge for k, (_, _, edge) in edges.items()},
        batch={kind: nodes[kind][1] for kind in graph.num_nodes} if how.disjoint else None,
        num_sampled_nodes=None if induced else {
            kind: [counted[i] for _, counted in (first, *hops)] for i, kind in enumerate(types)
        },
        num_sampled_edges=None if induced else {
            k: [counted[i] for counted, _ in hops] for i, k in enumerate(relations)
        },
    )  # fmt: skip


def _must_wait(
    sampler: Any, graph: Edges, seeds: Mapping[Any, Tensor], seed_time: Mapping[Any, Tensor] | None
) -> bool:
    """Return whether a sampler reads tensors that the current stream may still write."""
    if device_of(sampler).type == "cpu":
        return False
    held = (graph.colptr, graph.row, graph.node_time, graph.edge_time, graph.edge_weight)
    changed = may_have_changed(sampler, [t for each in held for t in each.values()])
    return changed or any(t.is_cuda for each in (seeds, seed_time or {}) for t in each.values())


def _draw(
    graph: Edges,
    how: Draw,
    types: Sequence[Any],
    seeds: Mapping[Any, Tensor],
    seed_time: Mapping[Any, Tensor] | None,
) -> tuple[list[Tensor], list[int], str]:
    """Call the library; return the sample, the numbers per hop, and the error, if any."""
    device, relations = how.device, list(graph.ends)
    library = cuda_library() if device.type == "cuda" else cpu_library()
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    no_weight = torch.empty(0, device=device)
    seeds = {kind: _checked_seed(ids, device) for kind, ids in seeds.items()}
    now = nothing
    if graph.node_time or graph.edge_time:
        now = torch.cat([nothing, *_times_of(seeds, seed_time, graph, device)])
    try:
        by_relation = [[*graph.num_neighbors[k], *[-1] * how.induced] for k in relations]
        numbers = [index(count) for each in by_relation for count in each]
    except TypeError as error:
        raise ValueError(f"expected 'num_neighbors' to be integers ({error})") from error
    random_seed = int(torch.empty((), dtype=torch.int64).random_())

    def ready(values: Tensor) -> Tensor:
        return readable(values, device).contiguous()

    def attempt(num_nodes: Mapping[Any, int]) -> tuple[list[Tensor], list[int], str]:
        out: tuple[list[Tensor], list[int], str] = library.neighbor_sample(
            [ready(graph.colptr[k]) for k in relations],
            [ready(graph.row[k]) for k in relations],
            [types.index(end) for k in relations for end in graph.ends[k]],
            [num_nodes[kind] for kind in types], [seeds.get(kind, nothing) for kind in types],
            numbers,
            [ready(graph.node_time.get(kind, nothing)) for kind in types],
            [ready(graph.edge_time.get(k, nothing)) for k in relations],
            [ready(graph.edge_weight.get(k, no_weight)) for k in relations],
            now, how.replace, how.induced, how.disjoint, how.temporal_strategy == "last",
            random_seed,
        )  # fmt: skip
        return out

    tensors, counts, fault = attempt(graph.num_nodes)
    if "ids of nodes" in fault and "edge_index" in fault:
        # Like PyG, accept nodes beyond `num_nodes`, which have no neighbours.
        tensors, counts, again = attempt(_by_edges(graph))
        fault = again and fault
    return tensors, counts, fault


def _hops(counts: list[int], types: int, relations: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the numbers of edges of each relation and nodes of each type that every hop added."""
    yield [], counts[:types]
    for at in range(types, len(counts), types + relations):
        yield counts[at : at + relations], counts[at + relations : at + relations + types]


_WEIGHTS = (torch.float32, torch.float64)


def _checked_seed(ids: Tensor, device: torch.device) -> Tensor:
    integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not (integers or ids.numel() == 0):
        raise ValueError(f"expected 'seed' to hold integers (got {_shown(ids)})")
    return ids.to(device, torch.int64).reshape(-1).contiguous()


def _times_of(
    seeds: Mapping[Any, Tensor],
    seed_time: Mapping[Any, Tensor] | None,
    graph: Edges,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield the times of all seeds; by default the times of the nodes."""
    for kind, ids in seeds.items():
        if seed_time is not None and kind in seed_time:
            _check_times("seed_time", seed_time[kind], ids.numel())
            yield seed_time[kind].to(device)
        elif kind in graph.node_time:
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < graph.num_nodes[kind]:
                raise ValueError("expected 'seed' to hold ids of nodes that exist")
            yield readable(graph.node_time[kind], device)[ids]
        else:
            raise ValueError("expected 'seed_time': there are times of edges, and none of seeds")


def _check_times(name: str, values: Tensor, size: int) -> None:
    if values.dtype != torch.int64 or values.shape != (size,):
        raise ValueError(f"expected '{name}' to be a vector of {size} int64 times "
                         f"(got {_shown(values)})")  # fmt: skip


def _shown(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
