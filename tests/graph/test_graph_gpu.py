"""Graphs that a GPU builds, in one operator call, are those that the processor builds."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph
from pyg_accel.graph import csr as csr_module
from pyg_accel.runtime.native import cuda_library, cuda_unavailable_reasons
from pyg_accel.testing import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@pytest.fixture(params=["native", "torch"])
def builder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Build with the native library, or as where it was not compiled."""
    if request.param == "torch":
        monkeypatch.setattr(csr_module, "library_of", lambda device: None)
    elif reasons := cuda_unavailable_reasons():
        pytest.skip("; ".join(reasons))
    return request.param


@pytest.fixture
def native() -> None:
    if reasons := cuda_unavailable_reasons():
        pytest.skip("; ".join(reasons))


def arrays_of(graph: Graph) -> dict[str, Tensor]:
    back, edges = graph.transposed(), graph.transposed(edge_order=True)
    arrays = {"rowptr": graph.rowptr, "col": graph.col, "perm": graph.perm}
    arrays |= {"colptr": back.rowptr, "row": back.col, "back": back.eid, "edges": edges.eid}
    return {name: array for name, array in arrays.items() if array is not None}


def check_same(actual: Graph, expected: Graph) -> None:
    ours, theirs = arrays_of(actual), arrays_of(expected)
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        assert array.is_cuda
        assert array.dtype == theirs[name].dtype, name
        assert torch.equal(array.cpu(), theirs[name]), name


def check(edges: Tensor, size: tuple[int, int], flow: str = "source_to_target") -> None:
    actual = Graph.from_edge_index(edges.cuda(), size, flow)
    check_same(actual, Graph.from_edge_index(edges, size, flow))


def random(rows: int, cols: int, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    ids = [torch.randint(max(n, 1), (count,), dtype=dtype) for n in (cols, rows)]
    return torch.stack(ids)


@DTYPES
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("case", list(zoo()), ids=lambda case: case.name)
def test_every_graph_of_the_zoo_is_that_of_the_processor(case, flow, dtype, builder):
    check(case.edge_index.to(dtype), (case.num_sources, case.num_targets), flow)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "cols", "count"),
    [
        (0, 5, 0),
        (5, 0, 0),
        (1, 1, 40),  # keys of no bits
        (1, 1, 20_000),
        (1, 3000, 9000),
        (3000, 1, 9000),
        (3000, 2000, 8192),  # what one block sorts,
        (3000, 2000, 8193),  # and more
        (2**15, 2**17, 8000),  # keys of 32 bits
        (2**16, 2**16, 50_000),
        (2**16 + 1, 2**16, 50_000),  # and of 33
        (3_000_000, 7, 100),  # rows that are empty in long sequences
        (300_000, 200_000, 2_000_000),
    ],
)
def test_sizes_of_all_kinds_are_sorted_right(rows, cols, count, dtype, native):
    check(random(rows, cols, count, dtype), (cols, rows))


@DTYPES
def test_columns_may_have_31_bits(dtype, native):
    edges = torch.stack([2**31 - 3 - torch.randint(9, (5000,)), torch.randint(2**10, (5000,))])
    edges = edges.to(dtype).cuda()
    graph = Graph.from_edge_index(edges, (2**31 - 2, 2**10))
    order = torch.argsort(edges[1].long() * 2**31 + edges[0], stable=True)
    assert torch.equal(graph.perm.long(), order)
    assert torch.equal(graph.col, edges[0, order].int())
    counts = torch.bincount(edges[1], minlength=2**10)
    assert torch.equal(graph.rowptr[1:].long(), counts.cumsum(0))


@DTYPES
def test_a_matrix_keeps_its_dtype_when_it_is_transposed(dtype, native):
    graph = Graph.from_edge_index(random(700, 90, 9000), (90, 700))
    rowptr, col = graph.rowptr.to(dtype), graph.col.to(dtype)
    check_same(
        Graph.from_csr(rowptr.cuda(), col.cuda(), num_cols=90),
        Graph.from_csr(rowptr, col, num_cols=90),
    )


@DTYPES
@pytest.mark.parametrize(
    "lay",
    [
        lambda edges: edges.t().contiguous().t(),
        lambda edges: edges[:, 1::3],
        lambda edges: edges[:, :1].expand(2, 77),
    ],
    ids=["pairs", "every-third", "one-again-and-again"],
)
def test_edge_lists_may_lie_in_any_way(lay, dtype, native):
    edges = random(500, 400, 20_000, dtype)
    actual = Graph.from_edge_index(lay(edges.cuda()), (400, 500))
    check_same(actual, Graph.from_edge_index(lay(edges), (400, 500)))


@pytest.mark.parametrize("count", [7000, 90_000])
def test_a_recorded_graph_is_that_of_the_edges_at_its_replay(count, native):
    first, then = random(4000, 3000, count), random(4000, 3000, count)
    edges, recording = first.cuda(), torch.cuda.CUDAGraph()
    check_same(
        Graph.from_edge_index(edges, (3000, 4000)), Graph.from_edge_index(first, (3000, 4000))
    )
    with torch.cuda.graph(recording):
        graph = Graph.from_edge_index(edges, (3000, 4000))
        graph.transposed(edge_order=True)
    edges.copy_(then)
    recording.replay()
    check_same(graph, Graph.from_edge_index(then, (3000, 4000)))


@pytest.mark.parametrize("count", [7000, 90_000])
def test_it_is_built_on_the_current_stream(count, native):
    right = random(4000, 3000, count)
    edges, source = torch.zeros_like(right, device="cuda"), right.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        edges.copy_(source)
        graph = Graph.from_edge_index(edges, (3000, 4000))
        graph.transposed(edge_order=True)
    stream.synchronize()
    check_same(graph, Graph.from_edge_index(right, (3000, 4000)))


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ("torch.tensor([[0, 1], [2, 3]])", "found target ids"),
        ("torch.tensor([[0, -1], [2, 2]]).repeat(1, 9000)", "found source ids"),
    ],
    ids=["target", "source"],
)
def test_ids_out_of_range_fail_at_the_next_synchronization(edges, message, native):
    script = (
        "import torch\n"
        "from pyg_accel import Graph\n"
        f"edges = {edges}.cuda()\n"
        "Graph.from_edge_index(edges, (3, 3)).build()\n"  # on a GPU it waits until it is asked for
        "print('built', flush=True)\n"
        "torch.cuda.synchronize()\n"
        "print('survived')\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode != 0
    assert ran.stdout == "built\n"
    assert message in ran.stderr
    assert "device-side assert" in ran.stderr


def test_the_operators_refuse_what_they_cannot_read(native):
    library, ids = cuda_library(), torch.zeros(4, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match="vector like 'row'"):
        library.csr_from_coo(ids, ids[:3], 4, 4)
    with pytest.raises(RuntimeError, match="vector like 'row'"):
        library.csr_from_coo(ids, ids.long(), 4, 4)
    with pytest.raises(RuntimeError, match=r"fewer than 2\*\*31 - 1"):
        library.csr_from_coo(ids, ids, 2**31, 4)
    with pytest.raises(RuntimeError, match="of one dtype"):
        library.csr_transpose(ids, ids.long(), 4)
