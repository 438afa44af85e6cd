"""Sampled aggregation on a GPU: the same subsets and sums as the reference, compiled."""

import pytest
import torch

from pyg_accel import Graph, ops, use_backend
from pyg_accel.testing import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SCALINGS = ({}, {"reduce": "mean"}, {"rescale": "row"})


def both(graph, x, weight, **how):
    """Results of the Triton backend and of the reference, on the device."""
    outs = []
    for name in ("triton", "reference"):
        with use_backend(name):
            outs.append(ops.sampled_spmm(graph, x, weight, **how))
    return outs


def random_graph(nodes=3000, edges=400_000, hub=5000, index_dtype=torch.int32) -> Graph:
    generator = torch.Generator().manual_seed(0)
    edge_index = (torch.rand(2, edges, generator=generator) ** 1.5 * nodes).long()
    star = torch.stack([torch.arange(hub) % nodes, torch.full((hub,), 7)])
    lengths = torch.tensor([577, 1154, 587, 65]).repeat_interleave(
        torch.tensor([577, 1154, 587, 65])
    )
    ends = torch.tensor([0, 1, 2, 3]).repeat_interleave(torch.tensor([577, 1154, 587, 65])) + nodes
    more = torch.stack([torch.arange(lengths.numel()) % nodes, ends])
    size = (nodes + 4, nodes + 4)
    graph = Graph.from_edge_index(torch.cat([edge_index, star, more], 1).cuda(), size)
    return Graph.from_csr(graph.rowptr.to(index_dtype), graph.col.to(index_dtype),
                          num_cols=nodes + 4)  # fmt: skip


@pytest.mark.parametrize("width", [1, 7, 64, 1000])
@pytest.mark.parametrize("strategy", ["bucket", "fastrand"])
def test_it_equals_the_reference(strategy, width):
    graph = random_graph()
    x, weight = torch.randn(3004, 33).cuda(), torch.rand(graph.num_edges).cuda()
    for scaling in SCALINGS:
        for w in (None, weight):
            actual, expected = both(graph, x, w, width=width, strategy=strategy, **scaling)
            scale = both(graph, x.abs(), w, width=width, strategy=strategy, **scaling)[1]
            assert bool(((actual - expected).abs() <= 2e-5 * scale + 1e-6).all())


@pytest.mark.parametrize("features", [1, 7, 33, 128, 257, (2, 16), (3, 5)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_features_of_any_shape_and_dtype(dtype, features):
    shape = (features,) if isinstance(features, int) else features
    graph = random_graph()
    x = torch.randn(3004, *shape).cuda().to(dtype)
    weight = torch.rand(graph.num_edges, *shape[:-1]).cuda().to(dtype)
    actual, expected = both(graph, x, weight, width=20)
    scale = both(graph, x.abs(), weight, width=20)[1].double()
    relative = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 2e-2)
    assert actual.dtype == dtype
    assert bool(((actual.double() - expected.double()).abs() <= relative * scale + 1e-6).all())


@pytest.mark.parametrize("per", ["column", "row"])
@pytest.mark.parametrize("shape", [(128,), (7,), (2, 16)], ids=str)
def test_8_bit_features(shape, per):
    graph = random_graph()
    x = ops.quantize(torch.randn(3004, *shape).cuda(), per=per)
    weight = torch.rand(graph.num_edges, *shape[:-1]).cuda()
    for w in (None, weight):
        actual, expected = both(graph, x, w, width=20)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_hard_graphs_and_index_types(index_dtype):
    for case in zoo(hub=3000, index_dtype=index_dtype):
        csr = Graph.from_edge_index(case.edge_index.cuda(), (case.num_sources, case.num_targets))
        graph = Graph.from_csr(csr.rowptr.to(index_dtype), csr.col.to(index_dtype),
                               num_cols=case.num_sources)  # fmt: skip
        x = torch.randn(case.num_sources, 5).cuda()
        for strategy in ("bucket", "fastrand"):
            actual, expected = both(graph, x, None, width=4, strategy=strategy)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_it_compiles_to_a_whole_graph():
    graph, x = random_graph(), torch.randn(3004, 16).cuda()
    run = lambda x: ops.sampled_spmm(graph, x.relu(), width=20).relu()  # noqa: E731
    actual = torch.compile(run, fullgraph=True)(x)
    torch.testing.assert_close(actual, run(x))
