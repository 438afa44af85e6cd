"""PyG's functions on self-loops by native calls: its edges, their order, weights and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import DeviceContext
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops

import pyg_accel
from pyg_accel.patching import self_loops
from pyg_accel.runtime.native import cpu_library, cpu_unavailable_reasons
from pyg_accel.settings import settings

EDGES = {
    "no edges": torch.empty(2, 0, dtype=torch.int64),
    "loops alone": torch.tensor([[0, 2, 2], [0, 2, 2]]),
    "no loops": torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1]]),
    "some of both": torch.randint(40, (2, 500), generator=torch.Generator().manual_seed(0)),
    "columns": torch.randint(40, (300, 2), generator=torch.Generator().manual_seed(1)).t(),
    "every other": torch.randint(40, (2, 300), generator=torch.Generator().manual_seed(2))[:, ::2],
}
needs_library = pytest.mark.skipif(
    bool(cpu_unavailable_reasons()), reason="the CPU library is not built"
)


@pytest.fixture
def library() -> Any:
    if reasons := cpu_unavailable_reasons():
        pytest.skip(reasons[0])
    return cpu_library()


@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
def test_edges_without_loops_are_those_of_pyg(library, edges):
    assert torch.equal(library.remove_self_loops(edges), remove_self_loops(edges)[0])


@pytest.mark.each
@pytest.mark.parametrize("weight", [None, "ones"])
@pytest.mark.parametrize("num_nodes", [None, 50, (60, 50)], ids=str)
@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
def test_edges_with_loops_are_those_of_pyg(edges, num_nodes, weight):
    weight = None if weight is None else torch.ones(edges.size(1))
    actual = self_loops.native(add_self_loops)(edges, weight, num_nodes=num_nodes)
    right = add_self_loops(edges, weight, num_nodes=num_nodes)
    assert torch.equal(actual[0], right[0])
    assert (actual[1] is None) if weight is None else torch.equal(actual[1], right[1])


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
def test_normalised_edges_are_those_of_pyg(library, edges, flow, dtype):
    right, weight = gcn_norm(edges, None, 41, flow=flow, dtype=dtype)
    double = dtype == torch.float64
    actual = library.gcn_norm(edges, 41, flow == "source_to_target", double)
    assert torch.equal(actual[0], right)
    assert actual[1].dtype == dtype
    torch.testing.assert_close(actual[1], weight, rtol=1e-14 if double else 1e-6, atol=0)


@needs_library
@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("weights", [None, "ones"])
@pytest.mark.parametrize("loops", [False, True])
def test_options_are_those_of_pyg(improved, weights, loops):
    edges = EDGES["some of both"]
    weight = None if weights is None else torch.rand(edges.size(1))
    args = (edges, weight, None, improved, loops)
    run = self_loops.native(gcn_norm)
    torch.testing.assert_close(run(*args), gcn_norm(*args))


@needs_library
def test_what_is_not_a_plain_edge_index_is_pygs():
    edges = EDGES["no loops"]
    for other in (edges.int(), EdgeIndex(edges), edges.to_sparse_coo(), edges.to("meta")):
        assert self_loops._remove_self_loops(other) is None
    assert self_loops._remove_self_loops(edges, torch.rand(4)) is None
    assert self_loops._gcn_norm(edges, dtype=torch.bfloat16) is None
    assert self_loops.native(len) is len


@needs_library
@pytest.mark.parametrize("bad", [-1, 3])
def test_ids_out_of_range_raise_what_pyg_raises(bad):
    edges = torch.tensor([[0, 1], [1, bad]])
    messages = []
    for run in (gcn_norm, self_loops.native(gcn_norm)):
        with pytest.raises((RuntimeError, IndexError)) as error:
            run(edges, None, 3)
        messages.append((error.type, str(error.value)))
    assert messages[0] == messages[1]


@needs_library
def test_modes_see_the_operators_of_pyg():
    edges = EDGES["some of both"]
    with DeviceContext(torch.device("cpu")):
        assert self_loops._remove_self_loops(edges) is None
    assert self_loops._remove_self_loops(edges) is not None


@needs_library
def test_layers_run_them(monkeypatch):
    calls = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            calls.append(out is not None)
            return out

        return run

    monkeypatch.setitem(self_loops._NATIVE, "gcn_norm", counted(self_loops._gcn_norm))
    self_loops.native.cache_clear()
    conv, x = GCNConv(4, 3), torch.randn(40, 4)
    right: list[Tensor] = [conv(x, EDGES["some of both"])]
    settings.always = True
    with pyg_accel.patched():
        conv(x, EDGES["some of both"])  # a mode records this call
        right.append(conv(x, EDGES["some of both"].clone()))
    self_loops.native.cache_clear()
    assert calls[-1]
    torch.testing.assert_close(*right)
