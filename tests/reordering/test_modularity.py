"""The passes of the community ordering, against the definition of modularity."""

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph
from pyg_accel.graph.column_reuse import per_column, reuse_of
from pyg_accel.reordering.community import community_order
from pyg_accel.reordering.modularity import Level, best_labels, merge
from pyg_accel.reordering.orders import _undirected
from pyg_accel.runtime.native import cpu_unavailable_reasons

pytestmark = pytest.mark.skipif(bool(cpu_unavailable_reasons()), reason="needs the CPU library")


def random_level(nodes: int = 30, edges: int = 80, *, weighted: bool = True) -> Level:
    graph = Graph.from_edge_index(torch.randint(nodes, (2, edges)), (nodes, nodes))
    rowptr, col = _undirected(graph)
    level = Level.of(rowptr, col)
    if not weighted:
        return level
    row = torch.repeat_interleave(torch.arange(nodes), level.rowptr.diff())
    weight = 1 + (row + col) % 3 * (row * col % 5)  # the same in both directions
    inside = torch.randint(4, (nodes,))
    strength = torch.zeros(nodes, dtype=torch.int64).index_add_(0, row, weight) + 2 * inside
    return Level(level.rowptr, level.col, weight, strength)


def dense(level: Level) -> Tensor:
    """Edges between nodes, and on the diagonal those inside of one (both ends count)."""
    size = level.num_nodes
    matrix = torch.zeros(size, size, dtype=torch.float64)
    row = torch.repeat_interleave(torch.arange(size), level.rowptr.diff())
    weight = torch.ones(row.numel()) if level.weight is None else level.weight
    matrix.index_put_((row, level.col.long()), weight.double(), accumulate=True)
    matrix += torch.diag(level.strength - matrix.sum(1))
    return matrix


def modularity(matrix: Tensor, labels: Tensor) -> float:
    total, strength = matrix.sum(), matrix.sum(1)
    same = labels[:, None] == labels[None, :]
    return float(((matrix - strength[:, None] * strength / total) * same).sum() / total)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_node_moves_to_the_neighbouring_community_of_largest_modularity(weighted):
    level = random_level(weighted=weighted)
    matrix = dense(level)
    labels = torch.randint(6, (30,))
    sizes = torch.bincount(labels, minlength=30)
    nodes = torch.arange(0, 30, 2)
    actual = best_labels(level, labels, sizes, nodes)
    for node, label in zip(nodes.tolist(), actual.tolist(), strict=True):
        options = {}
        near = {int(labels[v]) for v in matrix[node].nonzero().flatten().tolist() if v != node}
        for other in {int(labels[node]), *near}:
            moved = labels.clone()
            moved[node] = other
            options[other] = modularity(matrix, moved)
        assert options[label] == pytest.approx(max(options.values()), abs=1e-12)


def test_of_two_nodes_that_want_to_join_each_other_one_stays():
    level = Level.of(torch.tensor([0, 1, 2]), torch.tensor([1, 0]))
    labels = torch.tensor([0, 1])
    assert best_labels(level, labels, torch.ones(2).long(), labels).tolist() == [0, 0]


def test_merging_keeps_the_edges_between_communities_and_the_modularity():
    level = random_level()
    labels = torch.randint(7, (30,)).unique(return_inverse=True)[1]
    count = int(labels.max()) + 1
    above = merge(level, labels, count)
    members = torch.nn.functional.one_hot(labels, count).double()
    torch.testing.assert_close(dense(above), members.T @ dense(level) @ members)
    assert above.modularity == pytest.approx(modularity(dense(level), labels), abs=1e-12)
    assert bool(above.col.diff()[above.col.diff() <= 0].numel() or 1), "rows ascend"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_order_of_a_graph_is_the_same_on_the_gpu():
    edges, _ = planted(20_000, 100, 20, 0.8)
    rowptr, col = _undirected(Graph.from_edge_index(edges, (20_000, 20_000)))
    order = community_order(rowptr.cuda(), col.cuda())
    assert torch.equal(order.cpu(), community_order(rowptr, col))


def planted(nodes: int, groups: int, degree: int, inside: float) -> tuple[Tensor, Tensor]:
    """Edges [2, E] of communities whose members are spread over all ids, and the communities."""
    group = torch.randint(groups, (nodes,))
    by_group = torch.argsort(group)
    first = torch.searchsorted(group[by_group], torch.arange(groups + 1))
    source = torch.randint(nodes, (nodes * degree // 2,))
    size = (first[1:] - first[:-1])[group[source]]
    offset = (torch.rand(source.numel()) * size).long()
    near = by_group[first[group[source]] + offset]
    stays = torch.rand(source.numel()) < inside
    target = torch.where(stays, near, torch.randint(nodes, (source.numel(),)))
    edges = torch.stack([source, target])
    return torch.cat([edges, edges.flip(0)], 1), group


def entries_per_column(edges: Tensor, nodes: int) -> float:
    """Entries per distinct column in windows of 16 rows."""
    return per_column(reuse_of(Graph.from_edge_index(edges, (nodes, nodes)).csr()))[0]


def test_planted_communities_are_found_again():
    nodes = 4000
    edges, group = planted(nodes, 40, 30, 0.8)
    graph = Graph.from_edge_index(edges, (nodes, nodes))
    shuffled = entries_per_column(edges, nodes)
    known = torch.argsort(torch.argsort(group, stable=True))  # new numbers
    best = entries_per_column(known[edges], nodes)
    order = community_order(*_undirected(graph))
    actual = entries_per_column(torch.argsort(order)[edges], nodes)
    assert best > 1.2 * shuffled
    assert actual > 0.98 * best
    # Nearly all pairs of neighbours in the new order were planted together.
    together = (group[order][1:] == group[order][:-1]).double().mean()
    assert float(together) > 0.95
