"""Small graphs stay with PyG; how small is read from a file."""

import io
import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    AGNNConv,
    ARMAConv,
    EdgeConv,
    FiLMConv,
    GATConv,
    GCNConv,
    GENConv,
    GINConv,
    GINEConv,
    GMMConv,
    HEATConv,
    HeteroConv,
    PDNConv,
    PointTransformerConv,
    PPFConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
)

import pyg_accel
from pyg_accel import derived
from pyg_accel.patching import propagate
from pyg_accel.patching.reasons import width_of
from pyg_accel.patching.thresholds import Thresholds, thresholds
from pyg_accel.settings import settings

E, F = 100, 10


@pytest.fixture
def limit(tmp_path):
    def write(edges: int) -> None:
        file = tmp_path / f"{edges}.json"
        file.write_text(json.dumps({"cpu": {"thresholds": {"min_edges": edges}}}))
        settings.tuning = str(file)

    return write


@pytest.fixture
def outcomes(report_of):
    """Run SAGEConv some times on one graph; return the formula or reason of every call."""

    def run(times: int = 1) -> list[str]:
        layer, x, edges = SAGEConv(F, 3), torch.randn(20, F), torch.randint(0, 20, (2, E))
        found = []
        with pyg_accel.patched():
            for _ in range(times):
                pyg_accel.reset_report()
                layer(x, edges)
                found += [row.formula or row.reason for row in report_of()]
        return found

    return run


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_shipped_file_holds_a_sensible_size(device):
    assert 0 < thresholds(device).min_edges < 10**7


def test_devices_left_out_have_the_shipped_limits_and_unknown_ones_none(limit):
    shipped = thresholds("cuda")
    limit(5)
    assert thresholds("cpu") == Thresholds(5)
    assert thresholds("cuda") == shipped
    assert thresholds("abacus") == Thresholds(0)


def test_a_compiler_has_a_limit_of_its_own_or_that_of_all_calls(limit, tmp_path):
    limit(5)
    assert thresholds("cpu").fewest_compiled == 5
    file = tmp_path / "compiled.json"
    file.write_text(json.dumps({"cpu": {"thresholds": {"min_edges": 5, "compiled": 7}}}))
    settings.tuning = str(file)
    assert thresholds("cpu").fewest_compiled == 7


def test_by_default_a_tiny_graph_stays_with_pyg(outcomes):
    assert all("edges" in why and "mean_j" not in why for why in outcomes(3))


def test_a_graph_at_the_limit_is_accelerated_and_below_it_is_not(limit, outcomes):
    limit(E)
    assert outcomes(2) == ["mean_j u0"] * 2
    limit(E + 1)
    assert not any("mean_j" in why for why in outcomes(2))


@pytest.mark.parametrize(("elements", "accelerated"), [(E * F, True), (E * F + 1, False)])
def test_wide_features_make_up_for_few_edges(elements, accelerated, tmp_path, outcomes):
    file = tmp_path / "wide.json"
    limits = {"min_edges": 10**6, "min_elements": elements}
    file.write_text(json.dumps({"cpu": {"thresholds": limits}}))
    settings.tuning = str(file)
    (found,) = outcomes()
    assert found == "mean_j u0" if accelerated else found.startswith("small: ")


def test_nodes_in_another_dimension_are_no_features(tmp_path, report_of):
    file = tmp_path / "wide.json"
    limits = {"min_edges": 10**6, "min_elements": 2 * E * F + 1}
    file.write_text(json.dumps({"cpu": {"thresholds": limits}}))
    settings.tuning = str(file)
    layer = ARMAConv(F, F, num_stacks=2)  # [2, nodes, F]
    with pyg_accel.patched():
        layer(torch.randn(20, F), torch.randint(0, 20, (2, E)))
    assert [row.backend for row in report_of()] == ["PyG"]


@pytest.mark.parametrize(
    ("shape", "node_dim", "width"),
    [((30, 2, 5), -2, 10), ((2, 30, 5), -2, 10), ((30, 2, 5), 0, 10), ((30, 2, 5), 3, 10),
     ((30, 5), -2, 5), ((30,), -2, 1), ((), -2, 1), ((0, 2, 5), 0, 0)],
)  # fmt: skip
def test_the_width_of_a_call_is_that_of_a_node_or_an_edge(shape, node_dim, width):
    assert width_of({"x": torch.zeros(shape)}, node_dim) == width


def test_always_ignores_the_limit(limit, outcomes):
    limit(10**9)
    settings.always = True
    assert outcomes() == ["mean_j u0"]


def test_the_self_loops_of_a_normalised_graph_count_as_edges(limit, report_of):
    limit(E + 1)
    with pyg_accel.patched():
        edges = torch.stack([torch.arange(E), torch.arange(E).flip(0)])
        GCNConv(F, 3)(torch.randn(E, F), edges)
    assert [row.formula for row in report_of()] == ["sum_j mul(e0,u1)"]


@pytest.mark.parametrize(
    "limits",
    ["5", "{}", *(f'{{"min_edges": {n}}}' for n in ("-1", "1.5", "true"))],
    ids=["a-number", "no-key", "negative", "a-fraction", "a-bool"],
)
def test_malformed_limits_are_named(limits, tmp_path):
    file = tmp_path / "limits.json"
    file.write_text(f'{{"cpu": {{"thresholds": {limits}}}}}')
    settings.tuning = str(file)
    with pytest.raises(ValueError, match=r"expected thresholds in '.*limits\.json'"):
        thresholds("cpu")


@pytest.fixture
def kinds(tmp_path):
    def write(**limits: dict[str, int]) -> None:
        file = tmp_path / "kinds.json"
        named = {name.replace("_", " "): numbers for name, numbers in limits.items()}
        file.write_text(json.dumps({"cpu": {"thresholds": {"min_edges": 10, "kinds": named}}}))
        settings.tuning = str(file)

    return write


def test_a_kind_that_loses_in_training_is_accelerated_in_inference_alone(kinds, report_of):
    kinds(edge_features={"inference": 10, "training": E + 1, "new": 10})
    layer, x = GINEConv(torch.nn.Linear(F, 3)), torch.randn(20, F)
    edges, attributes = torch.randint(0, 20, (2, E)), torch.randn(E, F)
    with pyg_accel.patched():
        layer(x, edges, attributes)  # shows its kind
        pyg_accel.reset_report()
        layer(x, edges, attributes)
        (row,) = report_of()
        assert row.reason == f"small: fewer than {E + 1} edges (edge features)"
        pyg_accel.reset_report()
        with torch.no_grad():
            layer(x, edges, attributes)
        (row,) = report_of()
        assert row.formula == "sum_j relu(add(u0,e1))"


def test_a_new_graph_stays_with_pyg_and_is_accelerated_when_it_comes_again(kinds, outcomes):
    kinds(sums={"inference": 10, "training": 10, "new": E + 1})
    layer, x, edges = SAGEConv(F, 3), torch.randn(20, F), torch.randint(0, 20, (2, E))
    assert outcomes(2) == ["mean_j u0"] * 2  # the first call shows the kind
    with pyg_accel.patched():
        layer(x, edges)
        for again in (edges.clone(), edges.clone()):
            pyg_accel.reset_report()
            layer(x, again)
            assert "a new graph" in pyg_accel.report(io.StringIO()).rows[0].reason
            pyg_accel.reset_report()
            layer(x, again)
            assert pyg_accel.report(io.StringIO()).rows[0].formula == "mean_j u0"
            again[0, 0] = 0  # a change in place makes it another graph
            pyg_accel.reset_report()
            layer(x, again)
            assert "a new graph" in pyg_accel.report(io.StringIO()).rows[0].reason


@pytest.mark.parametrize(("elements", "accelerated"), [(E * F, True), (E * F + 1, False)])
def test_wide_features_make_up_for_the_few_edges_of_a_kind(elements, accelerated, kinds, report_of):
    kinds(sums={"inference": E + 1, "training": E + 1, "new": E + 1, "elements": elements})
    layer, x = SAGEConv(F, 3), torch.randn(20, F)
    with pyg_accel.patched():
        layer(x, torch.randint(0, 20, (2, E)))  # shows its kind
        pyg_accel.reset_report()
        layer(x, torch.randint(0, 20, (2, E)))
    (row,) = report_of()
    assert row.formula == "mean_j u0" if accelerated else row.reason.startswith("small: ")


@pytest.mark.parametrize("layer", [SAGEConv, GINConv], ids=["SAGE", "GIN"])
def test_a_graph_of_the_size_of_cora_is_accelerated_at_default_settings(layer, report_of):
    """2,708 nodes with 1,433 features: each of the few edges moves much."""
    layer = layer(1433, 8) if layer is SAGEConv else layer(torch.nn.Linear(1433, 8))
    x, edges = torch.randn(2708, 1433), torch.randint(2708, (2, 10_556))
    with pyg_accel.patched():
        for _ in range(3):
            layer(x, edges)
    assert {row.backend for row in report_of()} == {"cpu"}


def _many_edges() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(4_000, 16), torch.randint(4_000, (2, 45_000)), torch.randn(45_000, 8)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["HEAT", "Transformer"])
def test_attention_to_narrow_features_of_edges_stays_with_pyg(name, train, report_of):
    x, edges, attributes = _many_edges()
    if name == "HEAT":
        layer, types = HEATConv(16, 4, 1, 3, 8, 8, 8, heads=4), torch.randint(3, (45_000,))
        args = (x, edges, torch.zeros(4_000).long(), types, attributes)
    else:
        layer, args = TransformerConv(16, 4, heads=4, edge_dim=8), (x, edges, attributes)
    with pyg_accel.patched(), torch.set_grad_enabled(train):
        layer(*args)
        pyg_accel.reset_report()
        layer(*args)
    (row,) = report_of()
    assert row.backend == "PyG" and row.reason.endswith("(edge attention)")


def test_attention_to_wide_features_of_edges_is_accelerated(report_of):
    x, edges, attributes = _many_edges()
    layer = TransformerConv(16, 16, heads=4, edge_dim=8)
    with pyg_accel.patched(), torch.no_grad():
        layer(x, edges, attributes)
        layer(x, edges, attributes)
    assert {row.backend for row in report_of()} == {"cpu"}


@pytest.mark.parametrize("name", ["GIN", "GCN", "RGCN"])
def test_sums_over_a_known_graph_are_accelerated_from_ten_thousand_edges_on(name, report_of):
    x, edges = torch.randn(1_000, 16), torch.randint(1_000, (2, 10_000))
    layer, rest = {
        "GIN": (GINConv(torch.nn.Linear(16, 16)), ()),
        "GCN": (GCNConv(16, 16), ()),
        "RGCN": (RGCNConv(16, 16, 4), (torch.randint(4, (10_000,)),)),
    }[name]
    right = layer(x, edges, *rest)
    with pyg_accel.patched():
        for _ in range(4):
            layer(x, edges, *rest)
        pyg_accel.reset_report()
        out = layer(x, edges, *rest)
    assert {row.backend.partition("+")[0] for row in report_of()} == {"cpu"}
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)


def test_sums_whose_weights_a_network_makes_pay_later(report_of):
    """Their graph is normalised anew in each call, with or without acceleration."""
    x, edges, attributes = (
        torch.randn(1_000, 16),
        torch.randint(1_000, (2, 12_000)),
        torch.randn(12_000, 8),
    )
    layer = PDNConv(16, 16, 8, 8)
    right = layer(x, edges, attributes)
    with pyg_accel.patched():
        for _ in range(6):
            out = layer(x, edges, attributes)
            torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
        pyg_accel.reset_report()
        layer(x, edges, attributes)
    (row,) = report_of()
    assert row.reason.endswith("(other sums)")


def test_messages_that_nothing_reduces_stay_with_pyg(report_of):
    """A narrow network on every edge is not run in blocks: its input would be written out."""
    x, edges, _ = _many_edges()
    linear, position = torch.nn.Linear, torch.randn(4_000, 3)
    layer = PPFConv(torch.nn.Sequential(linear(20, 16), torch.nn.ReLU(), linear(16, 16)))
    with pyg_accel.patched(), torch.no_grad():
        layer(x, position, position, edges)
        pyg_accel.reset_report()
        layer(x, position, position, edges)
    (row,) = report_of()
    assert row.backend == "PyG" and row.reason.endswith("(edge networks)")


def test_attention_that_a_network_makes_of_every_edge_stays_with_pyg(report_of):
    """Each step of a softmax in blocks runs the network again, its gradient as well."""
    x, edges = torch.randn(1_000, 256), torch.randint(1_000, (2, 20_000))
    layer, position = PointTransformerConv(256, 256), torch.randn(1_000, 3)
    with pyg_accel.patched():
        layer(x, position, edges)
        pyg_accel.reset_report()
        layer(x, position, edges)
    (row,) = report_of()
    assert row.backend == "PyG" and row.reason.endswith("(edge attention)")


def test_layers_tell_by_themselves_whether_a_graph_is_new(kinds):
    kinds(sums={"inference": 10, "training": 10, "new": E + 1})
    first, second, x = SAGEConv(F, F), SAGEConv(F, F), torch.randn(20, F)
    with pyg_accel.patched():
        for layer in (first, second):
            layer(x, torch.randint(0, 20, (2, E)))
        pyg_accel.reset_report()
        edges = torch.randint(0, 20, (2, E))
        second(first(x, edges), edges)
        rows = pyg_accel.report(io.StringIO()).rows
    assert all("a new graph" in row.reason for row in rows)


def test_what_a_call_computes_is_its_kind(kinds, report_of):
    limits = {"inference": 10**6, "training": 10**6, "new": 10**6}
    kinds(sums=limits, other_sums=limits, messages=limits, other_messages=limits, attention=limits,
          other_attention=limits, edge_features=limits, other_edge_features=limits,
          edge_attention=limits, relations=limits)  # fmt: skip
    x, edges = torch.randn(20, F), torch.randint(0, 20, (2, E))
    calls = {
        "sums": (GCNConv(F, F), (x, edges)),
        "messages": (FiLMConv(F, F), (x, edges)),
        "messages of edges": (GMMConv(F, F, 3, 2), (x, edges, torch.randn(E, 3))),
        "attention": (GATConv(F, F), (x, edges)),
        "attention of normalised features": (AGNNConv(), (x, edges)),
        "other edge features": (GENConv(F, F, edge_dim=3), (x, edges, torch.randn(E, 3))),
        "edge features": (GINEConv(torch.nn.Linear(F, F)), (x, edges, torch.randn(E, F))),
        "edge attention": (TransformerConv(F, F, edge_dim=3), (x, edges, torch.randn(E, 3))),
        "relations": (RGCNConv(F, F, 2), (x, edges, torch.arange(E) % 2)),
    }
    for kind, (layer, args) in calls.items():
        with pyg_accel.patched():
            layer(*args)
            pyg_accel.reset_report()
            layer(*args)
        # Without its own kernels each relation is a call of its own; two layers may be of a kind.
        expected = "other sums" if kind == "relations" else kind.partition(" of ")[0]
        assert {row.reason for row in report_of()} == {
            f"small: fewer than {10**6} edges ({expected})"
        }


def test_a_fallback_is_found_once_even_where_patch_goes_on_and_off(kinds, monkeypatch):
    kinds()
    linear = torch.nn.Linear
    network = torch.nn.Sequential(linear(4 * F, 32), torch.nn.BatchNorm1d(32), linear(32, 3))
    layer, x, edges = EdgeConv(network), torch.randn(20, 2 * F), torch.randint(0, 20, (2, E))
    tried = []
    attempt = propagate._attempt
    monkeypatch.setattr(propagate, "_attempt", lambda *a: tried.append(1) or attempt(*a))
    for _ in range(3):
        with pyg_accel.patched():
            layer(x, edges)
    assert len(tried) == 1


@pytest.mark.parametrize("kinds", ['{"sum": {}}', '{"sums": {"training": 3}}'])
def test_malformed_kinds_are_named(kinds, tmp_path):
    file = tmp_path / "limits.json"
    file.write_text(f'{{"cpu": {{"thresholds": {{"min_edges": 5, "kinds": {kinds}}}}}}}')
    settings.tuning = str(file)
    with pytest.raises(ValueError, match=r"expected thresholds in '.*limits\.json'"):
        thresholds("cpu")


class _TwoRelations(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = HeteroConv({("n", r, "n"): SAGEConv(F, F) for r in "ab"})

    def forward(self, x, edge_index):
        return self.convs({"n": x}, {("n", r, "n"): edge_index for r in "ab"})["n"]


@pytest.mark.parametrize("edges", [12_000, 50_000, 90_000])
@pytest.mark.parametrize("name", ["SAGE", "GCN", "GINE", "GAT", "Transformer", "RGCN", "Hetero"])
def test_a_checkpoint_runs_a_call_twice_alike(name, edges):
    """At default settings: what the first call showed must not change the choice of the second."""
    torch.manual_seed(0)
    attributes = [torch.randn(edges, 4)] if name in ("GINE", "Transformer") else []
    attributes = [torch.randint(3, (edges,))] if name == "RGCN" else attributes
    layer = {
        "SAGE": lambda: SAGEConv(F, F),
        "GCN": lambda: GCNConv(F, F),
        "GINE": lambda: GINEConv(torch.nn.Linear(F, F), edge_dim=4),
        "GAT": lambda: GATConv(F, 5, heads=2),
        "Transformer": lambda: TransformerConv(F, 5, heads=2, edge_dim=4),
        "RGCN": lambda: RGCNConv(F, F, 3),
        "Hetero": _TwoRelations,
    }[name]()
    x = torch.randn(edges // 8, F, requires_grad=True)
    edge_index = torch.randint(edges // 8, (2, edges))
    (expected,) = torch.autograd.grad(layer(x, edge_index, *attributes).square().sum(), x)
    with pyg_accel.patched():
        for _ in range(3):
            out = checkpoint(layer, x, edge_index, *attributes, use_reentrant=False)
            (found,) = torch.autograd.grad(out.square().sum(), x)
            scale = float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("layer", [GCNConv, GATConv])
def test_of_a_graph_that_is_left_to_pyg_nothing_is_remembered_before_it_comes_again(layer):
    torch.manual_seed(0)
    conv, x = layer(F, F), torch.randn(2_000, F)
    graphs = [torch.randint(2_000, (2, 12_000)) for _ in range(3)]
    with pyg_accel.patched():
        kept = []
        for edge_index in (*graphs, *[graphs[-1]] * 4):
            conv(x, edge_index).sum().backward()
            kept.append(sum(isinstance(v, tuple) for v in derived.values()))
    # The first call shows the kind of the layer, and is accelerated; the second is left to PyG.
    assert kept[2] == kept[1]
    assert kept[-1] > kept[2]
    assert kept[-1] == kept[-2]
