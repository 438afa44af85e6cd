"""How large a call must be: three numbers a device, and what the call does."""

import io
import json
from unittest.mock import Mock

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import scatter

import pyg_accel
from benchmarks.layers.modes import traces
from pyg_accel.costs import NEVER, SHIPPED, Costs, Work, costs, fewest_edges, work_of
from pyg_accel.formula import NETWORK, Computation, parse
from pyg_accel.graph import derived
from pyg_accel.graph.memo import _Remembered
from pyg_accel.patching import recording
from pyg_accel.patching.reasons import row_bytes
from pyg_accel.runtime.state import running
from pyg_accel.settings import settings

E, F = 100, 10
DEAR = {"launch_us": 1e6, "gigabytes": 1.0, "edge_ns": 1.0}  # every call is too small
NEW = {"launch_us": 1e-6, "gigabytes": 1.0, "edge_ns": 1e6}  # every call on a new graph is


def of(reduce: str, formula: str, score: str = "", **how: int) -> Computation:
    """A reduction of messages."""
    return Computation(parse(formula), (reduce,), parse(score) if score else None, **how)


PLAIN = of("sum", "u0"), of("mean", "u0"), of("sum", "mul(e0,u1)")


@pytest.fixture
def numbers(tmp_path):
    def write(part: object) -> None:
        file = tmp_path / "size.json"
        file.write_text(json.dumps({"cpu": {"size": part}}))
        settings.tuning = str(file)

    return write


def outcomes(layer: torch.nn.Module, *calls: tuple) -> list[str]:
    """The formulas or reasons of calls, one each."""
    actual = []
    for args in calls:
        pyg_accel.reset_report()
        layer(*args)
        rows = pyg_accel.report(io.StringIO()).rows
        actual.append("; ".join(row.formula or row.reason for row in rows))
    return actual


def graph(edges: int = E, nodes: int = 20) -> torch.Tensor:
    return torch.randint(nodes, (2, edges))


def test_numbers_come_from_the_file_and_else_from_the_package(numbers):
    numbers({"launch_us": 1.0, "gigabytes": 2.0, "edge_ns": 3.0})
    assert costs("cpu") == Costs(1.0, 2.0, 3.0)
    assert costs("cuda") == SHIPPED["cuda"]
    assert costs("abacus") is None
    assert fewest_edges("abacus", Work(), 64, new=True, gradient=True) == 0


@pytest.mark.parametrize(
    "part", [5, {}, {"launch_us": 1.0}, {**DEAR, "edge_ns": -1.0}, {**DEAR, "edge_ns": "x"}]
)
def test_malformed_numbers_are_named(part, numbers):
    numbers(part)
    with pytest.raises(ValueError, match=r"in '.*size\.json'"):
        costs("cpu")


@pytest.mark.parametrize(
    ("computed", "text", "functions", "tensors"),
    [(of("sum", "u0"), "sum_j u0", 3, 1), (of("mean", "u0"), "mean_j u0", 6.5, 1),
     (of("sum", "mul(e0,u1)"), "sum_j mul(e0,u1)", 4, 2),
     (of("mean", "mul(relu(sub(v0,u1)),2.0)"), "mean_j mul(relu(sub(v0,u1)),2.0)", 10.5, 2),
     (of("mean", "u0", relations=4), "mean_j u0, 4 relations", 26, 1),
     (of("sum", "u0", columns=8), "sum_j maxk(u0,8)", 4, 2),
     (of("sum", "u2", "leaky_relu(add(u0,v1),0.2)"),
      "sum_j mul(softmax_j(leaky_relu(add(u0,v1),0.2)),u2)", 17, 3)],
)  # fmt: skip
def test_reports_and_costs_read_the_same_computation(computed, text, functions, tensors):
    assert str(computed) == text
    assert work_of([computed])[:2] == (functions, tensors)


def test_what_formulas_have_in_common_counts_once_and_each_has_a_kernel():
    message = "mul(relu(u0),2.0)"
    alone = work_of([of("max", message)])
    both = work_of([of("max", message), of("sum", f"exp(sub({message},v1))")])
    assert (alone.functions, both.functions) == (5, 10)  # a sum, a gather, exp and sub
    assert (alone.generated, both.generated) == (1, 2)
    assert alone.overhead < both.overhead


def test_attention_on_new_graphs_of_a_thousand_edges_stays_with_pyg_on_a_cpu():
    """They take 1.4 to 1.9 times PyG's time at 500 to 2,000 edges of 16 features."""
    work = work_of([of("sum", "u2", "div(sum(mul(v0,u1)),4.0)")])
    for gradient in (False, True):
        assert 2_000 < fewest_edges("cpu", work, 64, new=True, gradient=gradient) < 20_000
        assert fewest_edges("cpu", work, 64, new=False, gradient=gradient) == 0


@pytest.mark.parametrize(("columns", "accelerated"), [(4, False), (64, True)])
def test_products_with_matrices_of_relations_count_as_kernels(columns, accelerated):
    """A step of FastRGCN from 16 to 4 features, 58,000 edges, took 1.5 times PyG's on an H200."""
    computed = of("sum", "mul(e0,u1)", linear_bytes=64 * columns, products=1)
    fewest = fewest_edges("cuda", work_of([computed]), 64, new=False, gradient=True)
    assert (fewest < 58_000) is accelerated


def test_linear_layers_of_concatenations_count_by_their_parts(monkeypatch):
    """A step of PNA on 6,400 new edges took 1.2 times PyG's on an H200."""
    works = Mock(wraps=work_of)
    monkeypatch.setattr(recording, "work_of", works)
    options = ["mean", "min", "max", "std"], ["identity", "amplification"], torch.ones(9)
    layer = pyg.PNAConv(F, F, *options, edge_dim=3, towers=2)
    with pyg_accel.patched():
        layer(torch.randn(20, F), graph(), torch.randn(E, 3))
    (computed,) = works.call_args.args[0]
    assert (computed.linear_terms, computed.linear_bytes) == (2 * (3 - 1), 2 * 4 * F)
    work = work_of([of("max", "add(add(v0,u1),e2)", linear_bytes=1500, linear_terms=10)], 2)
    assert 6_400 < fewest_edges("cuda", work, 300, new=True, gradient=True) < 10**6
    assert fewest_edges("cpu", work, 300, new=True, gradient=True) < 1_000


def test_a_gradient_of_several_networks_in_blocks_stays_with_pyg_on_a_cpu():
    network = {"operator": NETWORK, "in_blocks": True}
    one, other = (Computation(reduces=(name,), **network) for name in ("max", "sum"))

    def fewest(*computed: Computation, device: str = "cpu", gradient: bool = True) -> int:
        return fewest_edges(device, work_of(computed), 256, new=False, gradient=gradient)

    assert fewest(one, other) == NEVER
    assert fewest(one) < 20_000 and fewest(one, other, gradient=False) < 20_000
    assert fewest(one, other, device="cuda") < NEVER  # there they run in blocks for want of memory


class Several(pyg.MessagePassing):
    """A linear layer of both ends, and three reductions of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(2 * F, F)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], dim=-1))

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        outs = [scatter(inputs, index, 0, dim_size, reduce=name) for name in ("sum", "max", "mean")]
        return torch.cat(outs, dim=-1)


def test_linear_layers_of_one_message_count_once_in_several_reductions(monkeypatch):
    works = Mock(side_effect=work_of)
    monkeypatch.setattr(recording, "work_of", works)
    layer = Several()
    with pyg_accel.patched():
        for _ in range(3):  # the first may import modules
            layer(torch.randn(20, F), graph())
    assert work_of(*works.call_args.args).terms == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("computed", PLAIN, ids=str)
def test_limits_are_in_order(computed, device):
    work = work_of([computed])
    for gradient in (False, True):
        known, new = (
            fewest_edges(device, work, 256, new=new, gradient=gradient) for new in (False, True)
        )
        assert known <= new < 10**8
        wide = fewest_edges(device, work, 2560, new=True, gradient=gradient)
        assert wide < new or new == 0
        remembered = work_of([computed], 1)
        assert fewest_edges(device, remembered, 256, new=False, gradient=gradient) == 0
    assert fewest_edges("cpu", work, 4, new=True, gradient=False) == NEVER


def test_new_graphs_of_narrow_features_are_taken_on_a_cpu():
    """They take two thirds of PyG's time at 30,000 edges of 16 features, and more of it with 4."""
    for computed in PLAIN:
        for gradient in (False, True):
            work, how = work_of([computed]), {"new": True, "gradient": gradient}
            assert 4_000 < fewest_edges("cpu", work, 64, **how) < 30_000
            assert fewest_edges("cpu", work, 16, **how) > 200_000


@pytest.mark.parametrize(
    ("shape", "node_dim", "width"),
    [((30, 2, 5), -2, 10), ((2, 30, 5), -2, 10), ((30, 2, 5), 0, 10), ((30, 2, 5), 3, 10),
     ((30, 5), -2, 5), ((30,), -2, 1), ((), -2, 1), ((0, 2, 5), 0, 0)],
)  # fmt: skip
def test_the_bytes_of_a_call_are_those_of_a_node_or_an_edge(shape, node_dim, width):
    assert row_bytes({"x": torch.zeros(shape)}, node_dim) == 4 * width


@pytest.mark.parametrize("name", ["SAGE", "GCN"])
def test_a_new_graph_stays_with_pyg_and_is_accelerated_when_it_comes_again(name, numbers):
    numbers(NEW)
    layer = {"SAGE": pyg.SAGEConv, "GCN": pyg.GCNConv}[name](F, F).double()
    x, right = torch.randn(20, F, dtype=torch.float64), []
    with pyg_accel.patched():
        for _ in range(2):  # recorded
            layer(x, graph())
        edges = graph()
        for _ in range(3):
            right.append(layer(x, edges))
        changed = graph()
        actual = outcomes(layer, (x, changed), (x, changed), (x, changed))
        assert actual[0].startswith("small: a new graph")
        assert "_j" in actual[1] and "_j" in actual[2]
        changed[0, 0] = (changed[0, 0] + 1) % 20  # another graph, after a change in place
        assert outcomes(layer, (x, changed))[0].startswith("small: a new graph")
    for out in right:
        torch.testing.assert_close(out, layer(x, edges))


def test_layers_tell_by_themselves_whether_a_graph_is_new(numbers):
    numbers(NEW)
    first, second, x = pyg.SAGEConv(F, F), pyg.SAGEConv(F, F), torch.randn(20, F)
    with pyg_accel.patched(), torch.no_grad():
        for layer in (first, second):
            for _ in range(2):
                layer(x, graph())
        edges = graph()
        assert all("a new graph" in outcomes(layer, (x, edges))[0] for layer in (first, second))


def test_of_a_new_graph_that_is_left_to_pyg_nothing_is_remembered(numbers):
    numbers(NEW)

    def stored():
        return sum(isinstance(value, _Remembered) for value in derived.values())

    layer, x = pyg.GCNConv(F, F), torch.randn(20, F)
    with pyg_accel.patched():
        for _ in range(2):
            layer(x, graph())
        assert outcomes(layer, (x, graph()))[0].startswith("small: a new graph")
        kept = stored()
        for _ in range(5):
            layer(x, graph())
        assert stored() <= kept


def test_always_ignores_sizes(numbers):
    numbers(DEAR)
    layer = pyg.GINEConv(torch.nn.Linear(F, 3))
    args = torch.randn(20, F), graph(), torch.randn(E, F)
    with pyg_accel.patched():
        layer(*args)
        assert outcomes(layer, args)[0].startswith("small: fewer than")
        settings.always = True
        assert outcomes(layer, args, args) == ["sum_j relu(add(u0,e1))"] * 2


class Pool(pyg.GCNConv):
    """A layer on a small graph whose forward calls another one on a large graph."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.inner = pyg.SimpleConv("sum")

    def forward(self, x, edge_index, fine):
        return super().forward(self.inner(x.relu(), fine), edge_index)


def test_a_layer_inside_of_a_small_one_is_judged_by_its_own_graph():
    x, few, many = torch.randn(300, 8), graph(200, 300), graph(120_000, 300)
    pool = Pool()
    right = pool(x, few, many)
    with pyg_accel.patched(), torch.no_grad():
        for _ in range(3):
            pool(x, graph(200, 300), many)
        actual = pool(x, few, many)
        pyg_accel.reset_report()
        pool(x, graph(200, 300), many)
        assert any(row.formula for row in pyg_accel.report(io.StringIO()).rows)
    torch.testing.assert_close(actual, right, rtol=1e-3, atol=1e-3 * float(right.abs().max()))


@pytest.mark.parametrize("between", [False, True])
def test_a_checkpoint_runs_a_call_alike_whatever_is_known_by_then(between):
    x, few, many = torch.randn(300, 8, requires_grad=True), graph(200, 300), graph(120_000, 300)
    pool = Pool()
    right = torch.autograd.grad(pool(x, few, many).square().sum(), x)[0]
    with pyg_accel.patched():
        for _ in range(3):
            pool(x, graph(200, 300), many)
        out = checkpoint(pool, x, few, many, use_reentrant=False)
        if between:
            pool(x, many, many)
        actual = torch.autograd.grad(out.square().sum(), x)[0]
    torch.testing.assert_close(actual, right, rtol=1e-3, atol=1e-3 * float(right.abs().max()))


def test_a_checkpoint_of_a_new_graph_runs_a_call_alike(numbers):
    numbers(NEW)
    layer, x, edges = pyg.SAGEConv(F, F), torch.randn(20, F, requires_grad=True), graph()
    right = torch.autograd.grad(layer(x, edges).square().sum(), x)[0]
    with pyg_accel.patched():
        for _ in range(3):
            layer(x, graph())
        out = checkpoint(layer, x, edges, use_reentrant=False)
        layer(x, graph())
        actual = torch.autograd.grad(out.square().sum(), x)[0]
    torch.testing.assert_close(actual, right)


class _TwoRelations(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = pyg.HeteroConv({("n", r, "n"): pyg.SAGEConv(F, F) for r in "ab"})

    def forward(self, x, edge_index):
        return self.convs({"n": x}, {("n", r, "n"): edge_index for r in "ab"})["n"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("edges", [1_000, 12_000, 90_000])
@pytest.mark.parametrize("name", ["SAGE", "GCN", "GINE", "GAT", "Transformer", "RGCN", "Hetero"])
def test_a_checkpoint_runs_a_call_twice_alike(name, edges):
    """At default settings: what the first call showed must not change the choice of the second."""
    attributes = [torch.randn(edges, 4)] if name in ("GINE", "Transformer") else []
    attributes = [torch.randint(3, (edges,))] if name == "RGCN" else attributes
    layer = {
        "SAGE": lambda: pyg.SAGEConv(F, F),
        "GCN": lambda: pyg.GCNConv(F, F),
        "GINE": lambda: pyg.GINEConv(torch.nn.Linear(F, F), edge_dim=4),
        "GAT": lambda: pyg.GATConv(F, 5, heads=2),
        "Transformer": lambda: pyg.TransformerConv(F, 5, heads=2, edge_dim=4),
        "RGCN": lambda: pyg.RGCNConv(F, F, 3),
        "Hetero": _TwoRelations,
    }[name]()
    x = torch.randn(edges // 8, F, requires_grad=True)
    edge_index = torch.randint(edges // 8, (2, edges))
    (expected,) = torch.autograd.grad(layer(x, edge_index, *attributes).square().sum(), x)
    with pyg_accel.patched():
        for _ in range(3):
            out = checkpoint(layer, x, edge_index, *attributes, use_reentrant=False)
            (actual,) = torch.autograd.grad(out.square().sum(), x)
            scale = float(expected.abs().max())
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * scale)


def test_nothing_is_left_behind_by_a_small_call_that_raises(numbers):
    numbers(DEAR)
    layer, x = pyg.SAGEConv(F, F), torch.randn(20, F)
    with pyg_accel.patched():
        for _ in range(3):
            layer(x, graph())
        with pytest.raises((IndexError, RuntimeError)):
            layer(x, graph() + 1000)
        assert not running.stock


def test_a_fallback_is_found_once_even_where_patch_goes_on_and_off():
    linear = torch.nn.Linear
    network = torch.nn.Sequential(linear(4 * F, 32), torch.nn.BatchNorm1d(32), linear(32, 3))
    layer, x, edges = pyg.EdgeConv(network), torch.randn(20, 2 * F), graph()
    with traces() as entered:
        for _ in range(4):
            with pyg_accel.patched():
                layer(x, edges)
    assert len(entered) == 2  # in a call of the layer, and alone


@pytest.mark.parametrize("name", ["GIN", "GCN", "RGCN", "Cora"])
def test_sums_over_a_known_graph_are_accelerated_at_default_settings(name):
    x, edges = torch.randn(1_000, 16), graph(10_000, 1_000)
    layer, rest = {
        "GIN": (pyg.GINConv(torch.nn.Linear(16, 16)), ()),
        "GCN": (pyg.GCNConv(16, 16), ()),
        "RGCN": (pyg.RGCNConv(16, 16, 4), (torch.randint(4, (10_000,)),)),
        "Cora": (pyg.SAGEConv(1433, 8), ()),
    }[name]
    if name == "Cora":
        x, edges = torch.randn(2708, 1433), graph(10_556, 2708)
    right = layer(x, edges, *rest)
    with pyg_accel.patched():
        for _ in range(4):
            layer(x, edges, *rest)
        pyg_accel.reset_report()
        out = layer(x, edges, *rest)
        rows = pyg_accel.report(io.StringIO()).rows
    assert {row.backend.partition("+")[0] for row in rows} == {"cpu"}
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("edges", [12, 3000])
@pytest.mark.parametrize("make", [
    lambda: pyg.GATConv(F, 4, heads=2, dropout=0.5), lambda: pyg.GCNConv(F, 4),
    lambda: pyg.SAGEConv(F, 4),
    lambda: pyg.TransformerConv(F, 4), lambda: pyg.EdgeConv(torch.nn.Linear(2 * F, 4)),
], ids=["gat", "gcn", "sage", "transformer", "edge"])  # fmt: skip
@pytest.mark.parametrize("gradient", [False, True])
def test_calls_of_one_kind_on_one_graph_are_made_in_one_way(make, edges, gradient):
    """Ours or PyG's from the first call on, with the same bits and random numbers."""
    layer, args = make(), (torch.randn(20, F), graph(edges))
    with pyg_accel.patched(), torch.set_grad_enabled(gradient):
        results, seen = [], []
        for _ in range(4):
            torch.manual_seed(0)
            seen += outcomes(layer, args)
            torch.manual_seed(0)
            results.append(layer(*args))
    assert len(set(seen)) == 1
    assert all(torch.equal(results[0], result) for result in results)
