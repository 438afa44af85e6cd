"""What is timed computes what its name says, and is what rewritten models call."""

import pytest
import torch

from pyg_accel.graph import Graph
from pyg_accel.rewrite.cost import GraphFeatures, Primitive
from pyg_accel.rewrite.cost.workload import DENSE, SPARSE, operand_bytes, workload

CPU = torch.device("cpu")


def graph_of(rows: int = 7, cols: int = 5, entries: int = 30) -> Graph:
    edges = torch.stack([torch.randint(cols, (entries,)), torch.randint(rows, (entries,))])
    return Graph.from_edge_index(edges, size=(cols, rows))


def made(monkeypatch, primitive: Primitive, graph: Graph | None = None) -> list[torch.Tensor]:
    """The operands in the order in which they were drawn, then the result."""
    drawn: list[torch.Tensor] = []
    randn = torch.randn

    def recorded(*args, **kwargs):
        drawn.append(randn(*args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr(torch, "randn", recorded)
    call = workload(primitive, CPU, graph)
    return [*drawn, call()]


def test_products_have_the_sizes_that_their_primitive_says(monkeypatch):
    x, w, out = made(monkeypatch, Primitive("gemm", 6, 4, 3))
    torch.testing.assert_close(out, x @ w.t())
    x, y, out = made(monkeypatch, Primitive("gemm_tn", 6, 4, 3))
    assert x.shape == (4, 6) and out.shape == (6, 3)
    torch.testing.assert_close(out, x.t() @ y)


def test_weighted_sums_read_their_weights_in_order_or_permuted(monkeypatch):
    graph = graph_of()
    for permuted in (False, True):
        like = Primitive("spmm_weighted", 7, 0, 6, 2, GraphFeatures.of(graph), permuted)
        x, w, out = made(monkeypatch, like, graph)
        dense = torch.zeros(7, 5, 2)
        rows = torch.arange(7).repeat_interleave(graph.degree.long())
        order = graph.perm.long() if permuted else torch.arange(30)
        dense.index_put_((rows, graph.col.long()), w[order], accumulate=True)
        torch.testing.assert_close(out, torch.einsum("rch,chf->rhf", dense, x))


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_every_primitive_runs_and_its_bytes_are_known(name):
    graph = graph_of()
    features = GraphFeatures.of(graph) if name in SPARSE else None
    like = Primitive(name, 7, 4, 6, 2, features)
    assert torch.isfinite(workload(like, CPU, graph if features else None)()).all()
    assert operand_bytes(like) > 0


def test_a_primitive_that_cannot_be_run_is_an_error():
    with pytest.raises(ValueError, match="how to run 'cholesky'"):
        workload(Primitive("cholesky", 3, 3, 3), CPU)
