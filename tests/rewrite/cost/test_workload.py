"""What is timed computes what its name says, and is what rewritten models call."""

from dataclasses import replace

import pytest
import torch

from pyg_accel.graph import CBSR, Graph
from pyg_accel.rewrite.cost import GraphFeatures, Primitive, cases
from pyg_accel.rewrite.cost.base import DENSE, SPARSE
from pyg_accel.rewrite.cost.workload import operand_bytes, workload

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
        dense.index_put_((rows, graph.col.long()), w[order].squeeze(-1), accumulate=True)
        torch.testing.assert_close(out, torch.einsum("rch,chf->rhf", dense, x))


def test_heads_that_share_their_features_read_them_once(monkeypatch):
    graph = graph_of()
    like = Primitive("spmm_weighted", 7, 0, 6, 2, GraphFeatures.of(graph), shared=True)
    x, w, out = made(monkeypatch, like, graph)
    assert (x.shape, w.shape, out.shape) == ((5, 1, 3), (30, 2, 1), (7, 2, 3))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_call_that_profiling_makes_runs(kind):
    """Each kind of call: heads or none, permuted, shared, with the sizes cut down."""
    graph = graph_of(7, 7)
    turned = Graph(graph.rowptr, graph.col, graph.transposed().eid, 7, sorted=True)
    like, kinds = GraphFeatures.of(graph), set()
    for case in cases.graph_cases(kind):
        for p in cases.calls(kind, case):
            if (made_of := (p.name, p.heads, p.permuted, p.shared)) in kinds:
                continue
            kinds.add(made_of)
            small = {n: min(getattr(p, n), 70) for n in ("rows", "inner")}
            small |= {"cols": min(p.cols // p.heads, 70) * p.heads}
            if p.graph:
                small |= {"graph": like, "rows": 7}
            out = workload(replace(p, **small), CPU, turned if p.permuted else graph)()
            assert torch.isfinite(out.values if isinstance(out, CBSR) else out).all()
    assert {name for name, *_ in kinds} == {*DENSE, *SPARSE}
    assert ("spmm_weighted", 4, False, True) in kinds


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_every_primitive_runs_and_its_bytes_are_known(name):
    graph = graph_of()
    features = GraphFeatures.of(graph) if name in SPARSE else None
    like = Primitive(name, 7, 4, 6, 2, features)
    out = workload(like, CPU, graph if features else None)()
    assert torch.isfinite(out.values if isinstance(out, CBSR) else out).all()
    assert operand_bytes(like) > 0


def test_a_primitive_that_cannot_be_run_is_an_error():
    with pytest.raises(ValueError, match="no benchmark of the primitive 'cholesky'"):
        workload(Primitive("cholesky", 3, 3, 3), CPU)
