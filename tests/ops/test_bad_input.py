"""What operators are given wrongly is refused by name, and never read or written out of bounds."""

import io

import pytest
import torch

import pyg_accel
from pyg_accel import CBSR, Graph, MaxKGCNConv, MaxKSAGEConv, ops
from pyg_accel.backends import backends, use_backend

EDGES = torch.tensor([[0, 1, 2, 2], [1, 0, 1, 2]])
GRAPH = Graph.from_edge_index(EDGES, (3, 3))
X = torch.arange(48.0).view(3, 16)
CPU = [name for name in ("reference", "cpu") if not backends()[name].unavailable_reasons()]

OF_A_GRAPH = {
    "spmm": lambda g: ops.spmm(g, X),
    "spmm-weighted": lambda g: ops.spmm(g, X, torch.ones(4)),
    "gspmm": lambda g: ops.gspmm(g, "u0", [X]),
    "sddmm": lambda g: ops.sddmm(g, X, X),
    "edge_softmax": lambda g: ops.edge_softmax(g, torch.ones(4)),
    "attention": lambda g: ops.attention(g, "u0", "u1", [X[:, :1], X]),
    "cbsr_spmm": lambda g: ops.cbsr_spmm(g, ops.maxk(X, 4)),
    "sampled_spmm": lambda g: ops.sampled_spmm(g, X, width=2),
    "sgt": lambda g: ops.sgt(g),
}


@pytest.mark.parametrize("name", OF_A_GRAPH)
@pytest.mark.parametrize(
    "inputs", [EDGES, None, "graph", EDGES.tolist()], ids=lambda g: type(g).__name__
)
def test_what_is_no_graph_is_refused_with_the_way_to_make_one(name, inputs):
    OF_A_GRAPH[name](GRAPH)
    with pytest.raises(ValueError, match=r"'graph' to be a Graph .* Graph\.from_edge_index"):
        OF_A_GRAPH[name](inputs)


def columns(k, width, *numbers):
    dtype = torch.uint8 if width <= 256 else torch.uint16
    return torch.tensor([list(numbers)] * 3).to(dtype)


BAD_COLUMNS = {
    "beyond": (columns(2, 16, 0, 200), 16),
    "just-beyond": (columns(2, 16, 0, 16), 16),
    "first-beyond": (columns(1, 16, 255), 16),
    "wide": (columns(2, 300, 0, 65_535), 300),
    "falling": (columns(2, 16, 5, 4), 16),
    "twice": (columns(2, 16, 4, 4), 16),
}


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_columns_of_a_cbsr_are_checked_wherever_it_goes(name, backend):
    indices, width = BAD_COLUMNS[name]
    cbsr = CBSR(torch.ones(indices.shape), indices, width)
    with use_backend(backend):
        for call in (
            lambda: ops.cbsr_spmm(GRAPH, cbsr),
            cbsr.dense,
            lambda: MaxKSAGEConv(width, 2, k=2)(cbsr, EDGES),
            lambda: MaxKSAGEConv(width, 400, k=2, aggr="max")(cbsr, EDGES),
            lambda: MaxKGCNConv(width, 400, k=2)(cbsr, EDGES),
        ):
            with pytest.raises(ValueError, match=rf"ascend within \[0, {width}\)"):
                call()


def test_columns_are_checked_again_when_they_change():
    cbsr = ops.maxk(X, 4)
    ops.cbsr_spmm(GRAPH, cbsr)
    cbsr.indices.fill_(200)
    with pytest.raises(ValueError, match="ascend within"):
        ops.cbsr_spmm(GRAPH, cbsr)
    narrower = ops.maxk(X, 4)
    with pytest.raises(ValueError, match="ascend within"):
        ops.cbsr_spmm(GRAPH, narrower._replace(width=12))


def test_columns_are_looked_at_once_and_those_of_maxk_never():
    """What numpy writes is not counted, so that only another look would see it."""
    ours = ops.maxk(X, 4)
    theirs = CBSR(ours.values, ours.indices.clone(), 16)
    ops.cbsr_spmm(GRAPH, theirs)
    for cbsr in (ours, theirs):
        columns = cbsr.indices.numpy()
        columns[:] = columns[:, ::-1].copy()
        ops.cbsr_spmm(GRAPH, cbsr)
        cbsr.dense()
    with pytest.raises(ValueError, match="ascend within"):
        ops.cbsr_spmm(GRAPH, CBSR(theirs.values, theirs.indices.clone(), 16))


def test_compiled_code_refuses_columns_out_of_range():
    compiled = torch.compile(
        lambda values, indices: ops.cbsr_spmm(GRAPH, CBSR(values, indices, 16)),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    good = ops.maxk(X, 2)
    torch.testing.assert_close(compiled(*good[:2]), ops.cbsr_spmm(GRAPH, good))
    with pytest.raises(ValueError, match="ascend within"):
        compiled(good.values, columns(2, 16, 0, 200))


ROWPTR, COL, PERM = (
    torch.tensor([0, 1, 3, 4]),
    torch.tensor([1, 0, 2, 2]),
    torch.tensor([1, 0, 2, 3]),
)
BAD_GRAPHS = {
    "col": ((ROWPTR, COL + 1, None, 3), {}, r"'col' within \[0, 3\)"),
    "negative": ((ROWPTR, COL - 1, None, 3), {}, r"'col' within \[0, 3\)"),
    "rowptr": ((ROWPTR + 1, COL, None, 3), {}, "'rowptr' to run from 0"),
    "falling": ((torch.tensor([0, 5, 1, 4]), COL, None, 3), {}, "'rowptr' to ascend"),
    "unsorted": ((ROWPTR, COL[[0, 2, 1, 3]], None, 3), {}, "'col' to ascend within each row"),
    "perm-beyond": ((ROWPTR, COL, PERM + 1, 3), {}, "'perm' to have every number"),
    "perm-negative": ((ROWPTR, COL, PERM - 1, 3), {}, "'perm' to have every number"),
    "perm-twice": ((ROWPTR, COL, PERM * 0, 3), {}, "'perm' to have every number"),
    "perm-short": ((ROWPTR, COL, PERM[:2], 3), {}, "'perm' to be a tensor"),
    "perm-dtype": ((ROWPTR, COL, PERM.int(), 3), {}, "'perm' to share dtype"),
    "num_cols": ((ROWPTR, COL, None, "3"), {}, "'num_cols' to be a whole number"),
}


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_arrays_of_a_graph_are_checked(name):
    args, inputs, message = BAD_GRAPHS[name]
    with pytest.raises(ValueError, match=message):
        Graph(*args, sorted=True, **inputs)
    fine = Graph(ROWPTR, COL, PERM, 3, sorted=True)
    assert torch.equal(ops.spmm(fine, X), ops.spmm(Graph.from_csr(ROWPTR, COL), X))


def quantized(values, scale):
    return ops.Quantized(values, scale)


EIGHT = torch.ones(3, 16, dtype=torch.int8)
NAMED = {
    "size": (lambda: Graph.from_edge_index(EDGES, size=50), "'size' to be two numbers"),
    "size-text": (lambda: Graph.from_edge_index(EDGES, size=("3", 3)), "'size' to be a whole"),
    "size-bool": (lambda: Graph.from_edge_index(EDGES, size=(True, 3)), "'size' to be a whole"),
    "tile": (lambda: ops.sgt(GRAPH, tile="a"), "'tile' to be a whole number"),
    "window": (lambda: ops.sgt(GRAPH, window=1.5), "'window' to be a whole number"),
    "width-bool": (lambda: ops.sampled_spmm(GRAPH, X, width=True), "'width' to be a whole"),
    "width-part": (lambda: ops.sampled_spmm(GRAPH, X, width=2.5), "'width' to be a whole"),
    "widths": (lambda: pyg_accel.sampling_rates(GRAPH, ()), "'widths' to be one or more"),
    "widths-bool": (lambda: pyg_accel.sampling_rates(GRAPH, (True,)), "'widths' to be a whole"),
    "widths-number": (lambda: pyg_accel.sampling_rates(GRAPH, 4), "'widths' to be one or more"),
    "degrees": (lambda: pyg_accel.sampling_rates(torch.ones(3)), "degrees in whole numbers"),
    "report": (lambda: pyg_accel.report("x.txt"), "'file' to be open for writing"),
    "nan": (lambda: ops.quantize(torch.tensor([[1.0, torch.nan]])), "'x' of finite numbers"),
    "inf": (lambda: ops.quantize(torch.tensor([[1.0, torch.inf]])), "'x' of finite numbers"),
    "scale": (
        lambda: ops.sampled_spmm(GRAPH, quantized(EIGHT, torch.ones(1, 2)), width=2),
        r"'scale' to be \[3, 1\] or \[1, 16\]",
    ),
    "scale-dtype": (
        lambda: ops.sampled_spmm(GRAPH, quantized(EIGHT, torch.ones(3, 1).half()), width=2),
        "'scale' in float32",
    ),
    "int32": (
        lambda: ops.sampled_spmm(GRAPH, quantized(EIGHT.int(), torch.ones(3, 1)), width=2),
        "of int8",
    ),
    "rows": (lambda: ops.spmm(GRAPH, X[:2]), "3 rows"),
    "operands": (lambda: ops.gspmm(GRAPH, "u0", X), "'operands' to be a list"),
    "reduce": (lambda: ops.gspmm(GRAPH, "u0", [X], reduce=None), "'reduce' of sum"),
    "sddmm": (lambda: ops.sddmm(GRAPH, X, None), r"'x_source' to be \[N, F\]"),
    "segments": (lambda: ops.segment_matmul(X, None, X), "'ptr' to be a tensor"),
    "ptr": (
        lambda: ops.segment_matmul(X, torch.tensor([0, 9]), torch.ones(1, 16, 2)),
        "'ptr' to ascend from 0 to 3",
    ),
    "ptr-negative": (
        lambda: ops.segment_matmul(X, torch.tensor([0, -5, 3]), torch.ones(2, 16, 2)),
        "'ptr' to ascend from 0 to 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_the_argument_that_does_not_fit_is_named(name):
    call, message = NAMED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_report_goes_where_something_can_be_written():
    text = io.StringIO()
    pyg_accel.report(text)
    assert text.getvalue()
