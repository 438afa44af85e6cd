"""The neighbour sampler against a slow reference, and its laws by chi-square."""

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NeighborSampler

from tests.loader.graphs import E, N, random_data, star, typed_data

pytestmark = pytest.mark.usefixtures("patched_without_other_samplers", "each_library")
DRAWS = 100_000
TORCH_SPARSE = torch.ops.torch_sparse  # patch() replaces it where PyG has none, as here


def reference(
    colptr: list[int], row: list[int], seeds: list[int], counts: list[int],
    times: tuple[list[int], list[int]] | None = None, *, disjoint: bool = False, last: bool = False,
) -> dict[str, list[Any]]:  # fmt: skip
    """All neighbours, or of those in time the last ones, as pyg-lib orders them."""
    nodes = [(i if disjoint else 0, seed) for i, seed in enumerate(seeds)]
    places: dict[tuple[int, int], int] = {}
    for i, node in enumerate(nodes):
        places.setdefault(node, i)
    out: dict[str, list[Any]] = {"row": [], "col": [], "edge": [], "nodes": [len(seeds)]}
    out["edges"], begin = [], 0
    for count in counts:
        end, before = len(nodes), len(out["edge"])
        for i in range(begin, end):
            batch, node = nodes[i]
            edges = list(range(colptr[node], colptr[node + 1]))
            if times is not None:
                edges = [e for e in edges if times[0][e] <= times[1][batch]]
            if last and count >= 0:
                edges = edges[max(0, len(edges) - count) :]
            assert count < 0 or len(edges) <= count
            for e in edges:
                key = (batch, row[e])
                if key not in places:
                    places[key] = len(nodes)
                    nodes.append(key)
                out["row"].append(places[key])
                out["col"].append(i)
                out["edge"].append(e)
        out["nodes"].append(len(nodes) - end)
        out["edges"].append(len(out["edge"]) - before)
        begin = end
    out["batch"], out["node"] = [list(part) for part in zip(*nodes, strict=True)]
    return out


def assert_is(out: Any, expected: dict[str, list[Any]]) -> None:
    for name in ("row", "col", "edge", "node"):
        assert getattr(out, name).tolist() == expected[name], name
    assert out.num_sampled_nodes == expected["nodes"]
    assert out.num_sampled_edges == expected["edges"]


@pytest.mark.each
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("counts", [[-1, -1], [E, E, E], [-1], []])
def test_all_neighbours_are_those_of_the_reference(counts: list[int], disjoint: bool):
    sampler = NeighborSampler(random_data(), counts, disjoint=disjoint)
    seeds = torch.randperm(N)[:7]
    out = sampler._sample(seeds)
    expected = reference(
        sampler.colptr.tolist(), sampler.row.tolist(), seeds.tolist(), counts, disjoint=disjoint
    )
    assert_is(out, expected)
    assert (out.batch.tolist() == expected["batch"]) if disjoint else out.batch is None


def test_int32_graphs_give_int32_results():
    data = random_data()
    data.edge_index = data.edge_index.int()
    sampler = NeighborSampler(data, [-1, -1])
    assert sampler.colptr.dtype == torch.int32
    out = sampler._sample(torch.arange(5))
    assert {t.dtype for t in (out.row, out.col, out.edge, out.node)} == {torch.int32}
    assert_is(out, reference(sampler.colptr.tolist(), sampler.row.tolist(), [*range(5)], [-1, -1]))


def test_all_neighbours_are_those_of_torch_sparse():
    pytest.importorskip("torch_sparse")
    data, seeds = random_data(), torch.randperm(N)[:9]
    for induced in (False, True):
        kind = "induced" if induced else "directional"
        sampler = NeighborSampler(data, [-1, -1], subgraph_type=kind)
        out = sampler._sample(seeds)
        node, row, col, edge = TORCH_SPARSE.neighbor_sample(
            sampler.colptr, sampler.row, seeds, [-1, -1], False, not induced
        )
        for ours, theirs in zip((out.node, out.row, out.col, out.edge), (node, row, col, edge),
                                strict=True):  # fmt: skip
            assert ours.tolist() == theirs.tolist()
    assert out.num_sampled_nodes is None


@pytest.mark.each
@pytest.mark.parametrize("attribute", ["time", "when"])
@pytest.mark.parametrize("counts", [[3, 2], [-1, -1], [1, 4, 2]])
def test_the_last_neighbours_in_time_are_those_of_the_reference(attribute: str, counts: list[int]):
    sampler = NeighborSampler(random_data(), counts, time_attr=attribute, temporal_strategy="last")
    seeds, now = torch.randint(N, (8,)), torch.randint(50, (8,))
    out = sampler._sample(seeds, now)
    row = sampler.row.tolist()
    if attribute == "time":
        times = [sampler.node_time.tolist()[source] for source in row]
    else:
        times = sampler.edge_time.tolist()
    expected = reference(sampler.colptr.tolist(), row, seeds.tolist(), counts,
                         (times, now.tolist()), disjoint=True, last=True)  # fmt: skip
    assert_is(out, expected)
    assert out.batch.tolist() == expected["batch"]


@pytest.mark.parametrize("attribute", ["time", "when"])
def test_nothing_later_than_its_seed_is_sampled(attribute: str):
    sampler = NeighborSampler(random_data(), [4, 4], time_attr=attribute)
    now = torch.randint(50, (30,))
    out = sampler._sample(torch.randint(N, (30,)), now)
    times = sampler.edge_time if attribute == "when" else sampler.node_time[sampler.row]
    assert out.edge.numel() > 0
    assert (times[out.edge] <= now[out.batch[out.col]]).all()


def test_the_time_of_a_seed_is_its_nodes_by_default():
    sampler = NeighborSampler(random_data(), [4, 4], time_attr="time")
    seeds = torch.arange(20)
    torch.manual_seed(1)
    by_default = sampler._sample(seeds)
    torch.manual_seed(1)
    inputs = sampler._sample(seeds, sampler.node_time[seeds])
    assert by_default.node.tolist() == inputs.node.tolist()
    assert by_default.edge.tolist() == inputs.edge.tolist()


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "weight"},
                                     {"weight_attr": "weight", "replace": True},
                                     {"disjoint": True}, {"time_attr": "time"},
                                     {"time_attr": "when", "temporal_strategy": "last"},
                                     ])  # fmt: skip
def test_edges_exist_and_are_ordered_by_hop_and_target(options: dict[str, Any]):
    data, counts = random_data(), [4, 3, 2]
    sampler = NeighborSampler(data, counts, **options)
    seeds = torch.randperm(N)[:10]
    out = sampler._sample(seeds, torch.full((10,), 40) if "time_attr" in options else None)
    source, target = data.edge_index[:, sampler.perm[out.edge]]
    assert (out.node[out.row] == source).all()
    assert (out.node[out.col] == target).all()
    assert out.node[:10].tolist() == seeds.tolist()
    assert sum(out.num_sampled_nodes) == out.node.numel()
    assert sum(out.num_sampled_edges) == out.edge.numel()
    assert (out.col.diff() >= 0).all()
    fresh = [i for i in out.row.tolist() if i >= 10]
    assert list(dict.fromkeys(fresh)) == list(range(10, out.node.numel()))
    begin = 0
    for hop, (edges, count) in enumerate(zip(out.num_sampled_edges, counts, strict=True)):
        cols = out.col[begin : begin + edges]
        first = sum(out.num_sampled_nodes[:hop])
        assert ((cols >= first) & (cols < first + out.num_sampled_nodes[hop])).all()
        assert cols.bincount().max() <= count
        if not options.get("replace"):
            assert (
                out.edge[begin : begin + edges].unique().numel() == edges or out.batch is not None
            )
        begin += edges
    if out.batch is not None:
        assert (out.batch[out.row] == out.batch[out.col]).all()
        assert len(set(zip(out.batch.tolist(), out.node.tolist(), strict=True))) == len(out.node)
    else:
        assert out.node.unique().numel() == out.node.numel()


def drawn(data: Data, k: int, **options: Any) -> Tensor:
    """Return the edges of node 0 in many draws of k neighbours, [DRAWS, k]."""
    sampler = NeighborSampler(data, [k], disjoint=True, **options)
    out = sampler._sample(torch.zeros(DRAWS, dtype=torch.long))
    return sampler.perm[out.edge].view(DRAWS, k)


@pytest.mark.heavy("cuda on cpu")
@pytest.mark.parametrize(("degree", "k"), [(7, 3), (20, 19), (70, 5)])
def test_edges_and_pairs_are_drawn_uniformly(degree: int, k: int):
    sets = drawn(star(degree), k).sort(dim=1).values
    assert (sets.diff(dim=1) > 0).all()  # no edge twice
    # Inclusions of a draw depend on one another: the sum of squares is smaller by a factor.
    counts = sets.view(-1).bincount(minlength=degree).double()
    expected = DRAWS * k / degree
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - k / degree))
    scaled = float(statistic) * (degree - 1) / degree
    assert scaled < chi_square_limit(degree - 1)
    if k == 3:
        triples = Counter(map(tuple, sets.tolist()))
        actual = [triples[triple] for triple in combinations(range(degree), k)]
        assert p_value(actual) > 0.001
        pairs = Counter(pair for triple in sets.tolist() for pair in combinations(triple, 2))
        each = DRAWS * k * (k - 1) / (degree * (degree - 1))
        assert all(
            abs(pairs[pair] - each) < 5 * each**0.5 for pair in combinations(range(degree), 2)
        )


def chi_square_limit(freedom: int) -> float:
    from scipy.stats import chi2

    return float(chi2.ppf(0.999, freedom))


def p_value(actual: Any, expected: Any = None) -> float:
    from scipy.stats import chisquare  # takes a second to import

    return float(chisquare(actual, expected).pvalue)


@pytest.mark.heavy("cuda on cpu")
def test_draws_with_replacement_are_independent():
    pairs = drawn(star(5), 2, replace=True)
    assert p_value((pairs[:, 0] * 5 + pairs[:, 1]).bincount(minlength=25)) > 0.001


@pytest.mark.heavy("cuda on cpu")
def test_more_draws_with_replacement_than_neighbours():
    assert drawn(star(2), 6, replace=True).unique().tolist() == [0, 1]


@pytest.mark.heavy("cuda on cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_draws_with_replacement_follow_the_weights(dtype: torch.dtype):
    weight = torch.tensor([1.0, 0.0, 2.0, 5.0], dtype=dtype)
    counts = drawn(star(4, weight=weight), 3, replace=True, weight_attr="weight").view(-1)
    actual = counts.bincount(minlength=4)
    assert actual[1] == 0
    expected = (weight.double() / 8 * 3 * DRAWS)[[0, 2, 3]]
    assert p_value(actual[[0, 2, 3]], expected) > 0.001


@pytest.mark.heavy("cuda on cpu")
def test_weighted_draws_without_replacement_follow_successive_sampling():
    weight = torch.tensor([1.0, 2.0, 3.0, 6.0])
    pairs = drawn(star(4, weight=weight), 2, weight_attr="weight").sort(dim=1).values
    actual = Counter(map(tuple, pairs.tolist()))
    share = {}
    for a, b in combinations(range(4), 2):
        wa, wb = float(weight[a]), float(weight[b])
        share[a, b] = wa / 12 * wb / (12 - wa) + wb / 12 * wa / (12 - wb)
    expected = [DRAWS * p for p in share.values()]
    assert p_value([actual[pair] for pair in share], expected) > 0.001


def test_edges_without_weight_are_drawn_only_where_all_are():
    weight = torch.tensor([0.0, 1.0, 0.0, 2.0])
    data = star(4, weight=weight)
    for k, expected in ((3, [1, 3]), (4, [0, 1, 2, 3]), (-1, [0, 1, 2, 3])):
        sampler = NeighborSampler(data, [k], weight_attr="weight")
        out = sampler._sample(torch.tensor([0]))
        assert sampler.perm[out.edge].sort().values.tolist() == expected


@pytest.mark.heavy("cuda on cpu")
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "weight"},
                                     {"time_attr": "time"}])  # fmt: skip
def test_a_batch_is_a_function_of_the_seed_and_not_of_threads(options: dict[str, Any]):
    sampler = NeighborSampler(random_data(20_000, 200_000), [5, 5], **options)
    seeds = torch.randperm(20_000)[:3000]
    threads, batches = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            torch.manual_seed(7)
            batches.append(sampler._sample(seeds))
    finally:
        torch.set_num_threads(threads)
    for name in ("row", "col", "node", "edge"):
        first, *others = [getattr(batch, name) for batch in batches]
        assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(batches[0].edge, sampler._sample(seeds).edge)  # the stream moves on


@pytest.mark.parametrize("disjoint", [False, True])
def test_typed_graphs_give_all_neighbours_of_every_type(disjoint: bool):
    data = typed_data()
    sampler = NeighborSampler(data, [-1, -1], disjoint=disjoint)
    seeds = torch.tensor([3, 4, 9])
    out = sampler._sample({"a": seeds})
    nodes = {kind: [] for kind in data.node_types}
    nodes["a"] = [(i if disjoint else 0, int(seed)) for i, seed in enumerate(seeds)]
    done, edges = dict.fromkeys(data.node_types, 0), {kind: [] for kind in data.edge_types}
    for _ in range(2):
        end = {kind: len(actual) for kind, actual in nodes.items()}
        for kind in data.edge_types:
            rel = "__".join(kind)
            colptr, row = sampler.colptr_dict[rel].tolist(), sampler.row_dict[rel].tolist()
            for i in range(done[kind[2]], end[kind[2]]):
                batch, node = nodes[kind[2]][i]
                for e in range(colptr[node], colptr[node + 1]):
                    if (batch, row[e]) not in nodes[kind[0]]:
                        nodes[kind[0]].append((batch, row[e]))
                    edges[kind].append((nodes[kind[0]].index((batch, row[e])), i, e))
        done = end
    for kind, actual in nodes.items():
        assert out.node[kind].tolist() == [node for _, node in actual]
        assert sum(out.num_sampled_nodes[kind]) == len(actual)
        if disjoint:
            assert out.batch[kind].tolist() == [batch for batch, _ in actual]
    for kind, actual in edges.items():
        sampled = zip(out.row[kind].tolist(), out.col[kind].tolist(), out.edge[kind].tolist(),
                      strict=True)  # fmt: skip
        assert list(sampled) == actual
        assert sum(out.num_sampled_edges[kind]) == len(actual)


def test_typed_induced_subgraphs_are_those_of_torch_sparse():
    pytest.importorskip("torch_sparse")
    sampler = NeighborSampler(typed_data(), [-1], subgraph_type="induced")
    seeds = {"a": torch.tensor([3, 4, 9])}
    out = sampler._sample(seeds)
    node, row, col, edge = TORCH_SPARSE.hetero_neighbor_sample(
        sampler.node_types, sampler.edge_types, sampler.colptr_dict, sampler.row_dict, seeds,
        sampler.num_neighbors.get_mapped_values(sampler.edge_types), 1, False, False,
    )  # fmt: skip
    assert {k: v.tolist() for k, v in out.node.items()} == {k: v.tolist() for k, v in node.items()}
    for ours, theirs in ((out.row, row), (out.col, col), (out.edge, edge)):
        assert {"__".join(k): v.tolist() for k, v in ours.items()} == {
            k: v.tolist() for k, v in theirs.items()
        }


def test_num_neighbors_may_differ_by_type_of_edges():
    data = typed_data()
    counts = {kind: [2, 0] for kind in data.edge_types}
    counts["b", "to", "b"] = [0, 3]
    out = NeighborSampler(data, counts)._sample({"a": torch.arange(10)})
    assert out.num_sampled_edges["b", "to", "a"][1] == 0
    assert out.num_sampled_edges["b", "to", "b"][0] == 0 < out.num_sampled_edges["b", "to", "b"][1]


def test_disjoint_induced_subgraphs_have_the_edges_of_each_seed_alone():
    data = random_data()
    sampler = NeighborSampler(data, [2], disjoint=True, subgraph_type="induced")
    out = sampler._sample(torch.arange(6))
    assert (out.batch[out.row] == out.batch[out.col]).all()
    members = {(int(b), int(v)) for b, v in zip(out.batch, out.node, strict=True)}
    expected = sum(
        (b, int(s)) in members and (b, int(t)) in members
        for s, t in data.edge_index.t()
        for b in range(6)
    )
    assert out.edge.numel() == expected


def test_a_seed_may_come_twice():
    sampler = NeighborSampler(random_data(), [-1])
    out = sampler._sample(torch.tensor([5, 5, 8]))
    assert out.node[:3].tolist() == [5, 5, 8]
    degree = (out.col == 0).sum()
    assert degree > 0
    assert (out.col == 1).sum() == degree
    assert_is(out, reference(sampler.colptr.tolist(), sampler.row.tolist(), [5, 5, 8], [-1]))


@pytest.mark.parametrize("counts", [[0], [3, 0], [0, 3], [5, 5]])
def test_there_may_be_no_edges_and_no_seeds(counts: list[int]):
    for data in (random_data(), random_data(9, 0)):
        sampler = NeighborSampler(data, counts)
        for seeds in (torch.arange(0), torch.arange(4)):
            out = sampler._sample(seeds)
            assert out.node[: len(seeds)].tolist() == seeds.tolist()
            assert len(out.num_sampled_edges) == len(counts) == len(out.num_sampled_nodes) - 1
            if counts[0] == 0 or data.num_edges == 0:
                assert out.edge.numel() == 0
