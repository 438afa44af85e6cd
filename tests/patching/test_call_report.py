"""The report: what ran, how often, how long, and why not."""

import io
import re
import threading
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import DNAConv, FastRGCNConv, MessagePassing, SAGEConv, SumAggregation
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.utils import scatter, softmax

import pyg_accel
from pyg_accel.patching import recording
from pyg_accel.runtime.report import Report, Row, record, row_of
from pyg_accel.settings import settings

pytestmark = pytest.mark.usefixtures("always")


def calls() -> None:
    x, edges = torch.randn(9, 20), torch.arange(30).view(2, 15) % 9
    fast, slow = SAGEConv(20, 4), DNAConv(20, groups=2)
    with pyg_accel.patched():
        for _ in range(3):
            fast(x, edges)
        slow(torch.randn(9, 2, 20), edges)


def test_calls_are_counted_by_layer_with_their_formula_or_reason():
    calls()
    rows = {row.layer: row for row in pyg_accel.report(io.StringIO()).rows}
    assert rows.keys() == {"SAGEConv", "DNAConv"}
    fast, slow = rows["SAGEConv"], rows["DNAConv"]
    assert (fast.formula, fast.backend, fast.reason, fast.calls) == ("mean_j u0", "cpu", "", 3)
    assert (slow.formula, slow.backend, slow.calls) == ("", "PyG", 1)
    assert "on messages of [E, " in slow.reason
    assert fast.seconds > 0
    assert slow.seconds > 0


def test_calls_without_a_fused_reduction_are_not_recorded_again(report_of, monkeypatch):
    layer, edges = FastRGCNConv(9, 4, 3), torch.arange(30).view(2, 15) % 9
    kinds = torch.arange(15) % 3
    expected = layer(None, edges, kinds)
    with pyg_accel.patched():
        for _ in range(2):
            torch.testing.assert_close(layer(None, edges, kinds), expected)
        monkeypatch.setattr(recording, "attempt", lambda *_, **__: pytest.fail("recorded"))
        torch.testing.assert_close(layer(None, edges, kinds), expected)
    (row,) = report_of()
    assert (row.backend, row.reason) == ("PyG", "no reduction that could be fused")
    assert row.calls == 3


def test_a_call_that_gains_a_reduction_is_accelerated(x, report_of):
    layer, edges = SAGEConv(6, 4, aggr="median"), torch.arange(30).view(2, 15) % 9
    with pyg_accel.patched():
        for aggregation in (layer.aggr_module, SumAggregation(), SumAggregation()):
            layer.aggr_module = aggregation
            layer(x[:9], edges)
    assert {row.formula for row in report_of()} == {"", "sum_j u0"}


class Normalised(MessagePassing):
    """Medians over a graph with self-loops, which are added once."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, weight = gcn_conv.gcn_norm(edge_index, None, x.size(0))
        return self.propagate(edge_index, x=x) * weight[: x.size(0), None]


def test_calls_without_a_fused_reduction_use_stored_results(x, monkeypatch):
    counted = Mock(wraps=gcn_conv.scatter)
    monkeypatch.setattr(gcn_conv, "scatter", counted)
    layer, edges = Normalised(aggr="median"), torch.arange(30).view(2, 15) % 9
    with pyg_accel.patched():
        outs = [layer(x[:9], edges) for _ in range(4)]
    assert counted.call_count == 1
    for out in outs:
        torch.testing.assert_close(out, layer(x[:9], edges))


class ByMode(MessagePassing):
    """A sum that is written in another way under autocast."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            return inputs.new_zeros(dim_size, 6).index_add(0, index, inputs)
        return scatter(inputs, index, 0, dim_size, reduce="sum")


def test_a_mode_in_which_nothing_is_fused_keeps_no_other_from_it(x, report_of):
    layer, edges = ByMode(), torch.arange(30).view(2, 15) % 9
    with pyg_accel.patched(), torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            layer(x[:9], edges)
        layer(x[:9], edges)
    assert {row.formula for row in report_of()} == {"", "sum_j u0"}


class Untyped(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j, index, ptr, size_i):  # type: ignore[no-untyped-def]
        return x_j * softmax(x_j.sum(-1), index, ptr, size_i).unsqueeze(-1)


class Forwarding(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor, **kwargs: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, **kwargs)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def without_source() -> type:
    names = {"MessagePassing": MessagePassing, "__name__": __name__}
    exec(
        "class Hidden(MessagePassing):\n"
        "    def forward(self, x, edge_index):\n"
        "        return self.propagate(edge_index, x=x)\n",
        names,
    )
    return names["Hidden"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Untyped, "Found inconsistent types for argument 'ptr'.*annotate.*ptr: OptTensor"),
        (lambda: Forwarding, r"Could not parse keyword argument '\*\*kwargs'.*name=variable"),
        (without_source, "cannot render this layer: .*; define the class in a file"),
    ],
)
def test_what_pyg_cannot_render_says_what_to_change(make, says, always, report_of):
    layer = make()()
    with pyg_accel.patched():
        for _ in range(2):
            layer(torch.randn(20, 4), torch.randint(20, (2, 90)))
    (row,) = report_of()
    assert row.calls == 2
    assert re.search(says, row.reason), row.reason


def test_what_rendering_raises_is_logged_once_with_its_traceback(always, report_of, caplog):
    """PyG reads a user's class, whose code may raise anything."""

    class Strange(Exception):
        pass

    class Raises(MessagePassing):
        def _get_propagate_signature(self) -> None:
            raise Strange("of the user")

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    layer = Raises()
    with caplog.at_level("INFO", "pyg_accel"), pyg_accel.patched():
        for _ in range(2):
            layer(torch.randn(20, 4), torch.randint(20, (2, 90)))
    assert any("cannot render this layer: of the user" in row.reason for row in report_of())
    (entry,) = [record for record in caplog.records if "Raises" in record.getMessage()]
    assert entry.exc_info is not None and entry.exc_info[0] is Strange


def test_a_call_of_the_base_says_so(always, report_of):
    with pyg_accel.patched():
        x = torch.randn(20, 4)
        MessagePassing.propagate(SAGEConv(4, 4), torch.randint(20, (2, 90)), x=(x, x))
    reasons = [row.reason for row in report_of() if row.layer == "SAGEConv"]
    assert reasons == ["MessagePassing.propagate itself was called"]


def test_the_slowest_comes_first():
    calls()
    seconds = [row.seconds for row in pyg_accel.report(io.StringIO()).rows]
    assert seconds == sorted(seconds, reverse=True)


def test_the_report_prints_a_table_to_the_given_file_or_standard_output(capsys):
    calls()
    file = io.StringIO()
    actual = pyg_accel.report(file)
    assert capsys.readouterr().out == ""
    assert file.getvalue() == f"{actual}\n"
    pyg_accel.report()
    assert capsys.readouterr().out == file.getvalue()
    first, head, *_ = file.getvalue().splitlines()
    assert first == "pyg_accel: 3 of 4 forward calls accelerated"
    assert head.split()[:4] == ["layer", "formula", "or", "reason"]
    assert "mean_j u0" in file.getvalue()
    assert "on messages of [E, " in file.getvalue()


def test_an_empty_report_asks_whether_patch_is_on():
    assert "is patch() on?" in str(pyg_accel.report(io.StringIO()))


def test_a_report_is_a_snapshot_and_can_be_reset():
    calls()
    before = pyg_accel.report(io.StringIO())
    calls()
    assert sum(row.calls for row in before.rows) == 4
    assert sum(row.calls for row in pyg_accel.report(io.StringIO()).rows) == 8
    pyg_accel.reset_report()
    assert pyg_accel.report(io.StringIO()).rows == []


def test_the_report_names_the_backend_that_ran(capsys):
    layer, x = SAGEConv(4, 4), torch.randn(9, 4)
    edge_index = torch.randint(9, (2, 40))
    with pyg_accel.patched():
        layer(x, edge_index)
        with pyg_accel.use_backend("reference"):
            layer(x, edge_index)
    assert {row.backend for row in pyg_accel.report().rows} == {"cpu", "reference"}


def test_without_a_fast_backend_pyg_runs_and_the_report_says_why(monkeypatch, capsys):
    monkeypatch.setenv("PYG_ACCEL_DISABLE", "cpu")
    layer, x = SAGEConv(4, 4), torch.randn(9, 4)
    with pyg_accel.patched():
        layer(x, torch.randint(9, (2, 40)))
    (row,) = pyg_accel.report().rows
    assert (row.backend, row.formula) == ("PyG", "")
    assert "disabled by PYG_ACCEL_DISABLE" in row.reason


def test_calls_of_several_threads_and_of_a_row_kept_from_before_a_reset_are_all_counted():
    kept = row_of("Layer", "", "PyG", "small")
    kept.add(1.0)
    pyg_accel.reset_report()
    record("Layer", "", "PyG", "small", 1.0)  # a row of its own, which the kept one joins

    def add() -> None:
        for _ in range(1000):
            kept.add(1.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (row,) = pyg_accel.report(io.StringIO()).rows
    assert (row.calls, row.seconds) == (4001, 4001.0)


def text_of(*rows: Row) -> list[str]:
    return str(Report([*rows])).splitlines()


def test_words_of_the_table_are_explained_where_they_occur():
    plain = Row("SAGEConv", "mean_j u0", "cpu", "", 1, 0.1)
    left = Row("GATConv", "", "PyG", "small: fewer than 9 edges", 1, 0.1)
    deferred = Row("GATConv", "softmax_j add(u0,v1)", "deferred", "", 1, 0.1)
    both = Row("RGCNConv", "mean_j u0", "cpu+reference", "", 1, 0.1)
    legends = {"u0, v1, e2:": [plain, deferred, both], "deferred:": [deferred],
               "cpu+reference:": [both], "What that gains:": [plain, deferred, both]}  # fmt: skip
    for row in (plain, left, deferred, both):
        lines = text_of(row)
        for start, rows in legends.items():
            assert any(line.startswith(start) for line in lines) == (row in rows), (start, lines)


def test_what_was_accelerated_is_counted_by_layer_where_not_all_was():
    rows = [Row("GCNConv", "sum_j mul(e0,u1)", "cpu", "", 440, 4.0),
            Row("scatter", "", "PyG", "no", 110)]  # fmt: skip
    lines = text_of(*rows)
    assert lines[0] == "pyg_accel: 440 of 550 forward calls accelerated"
    assert "accelerated: GCNConv 440 of 440, scatter 0 of 110" in lines
    assert not any(line.startswith("accelerated:") for line in text_of(rows[0]))
    assert not any(line.startswith("accelerated:") for line in text_of(rows[1]))


def test_loaders_have_a_table_of_their_own():
    rows = [Row("NeighborLoader", "neighbors [4]", "this process", "", 5, 1.0, is_forward=False),
            Row("GCNConv", "sum_j mul(e0,u1)", "cpu", "", 2, 0.5)]  # fmt: skip
    lines = text_of(*rows)
    heads = [i for i, line in enumerate(lines) if line.split()[:1] in (["layer"], ["loader"])]
    assert lines[heads[0] + 2].startswith("GCNConv") and lines[heads[1] - 1] == ""
    assert lines[heads[1]].endswith("ms a batch") and lines[heads[1] + 2].startswith("Neighbor")


def test_rows_of_a_layer_are_side_by_side():
    x, few, many = torch.randn(9, 4), torch.arange(20).view(2, 10) % 9, torch.randint(9, (2, 90))
    first, second = SAGEConv(4, 4), DNAConv(20, groups=2)
    with pyg_accel.patched():
        for edges in (few, many):
            first(x, edges)
            second(torch.randn(9, 2, 20), edges)
        with pyg_accel.use_backend("reference"):
            first(x, many)
    layers = [row.layer for row in pyg_accel.report(io.StringIO()).rows]
    assert [name for i, name in enumerate(layers) if i == 0 or layers[i - 1] != name] in (
        ["SAGEConv", "DNAConv"], ["DNAConv", "SAGEConv"],
    )  # fmt: skip


def test_calls_that_are_too_small_are_timed(tmp_path):
    file = tmp_path / "new.json"  # every call on a new graph is too small
    file.write_text('{"cpu": {"size": {"launch_us": 1e-6, "gigabytes": 1.0, "edge_ns": 1e6}}}')
    settings.always, settings.tuning = False, str(file)
    layer, x, edges = SAGEConv(4, 4), torch.randn(9, 4), torch.randint(9, (2, 30))
    with pyg_accel.patched():
        for _ in range(5):
            layer(x, edges.clone())
    rows = pyg_accel.report(io.StringIO()).rows
    left = [row for row in rows if row.reason.startswith("small")]
    assert sum(row.calls for row in left) >= 4
    assert all(row.seconds > 0 for row in rows)


def test_times_that_were_not_taken_are_a_dash():
    lines = text_of(Row("GCNConv", "sum_j mul(e0,u1)", "torch.compile", "", 1))
    assert lines[3].split()[-2:] == ["-", "-"]
