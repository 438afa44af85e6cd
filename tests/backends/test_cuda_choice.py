"""When the Tensor-Core backend is chosen, and how: policy, so no GPU is needed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph
from pyg_accel.backends import OpSpec, choose, get_backend
from pyg_accel.backends.cuda import cbsr, plan, remainder, spmm
from pyg_accel.backends.cuda.choice import Launch, choose_launch
from pyg_accel.backends.cuda.match import Product, product_of
from pyg_accel.backends.dispatch import forget_decisions
from pyg_accel.backends.notes import record_choices
from pyg_accel.formula import parse
from pyg_accel.graph.column_reuse import Shared
from pyg_accel.graph.tiles import build_tiles
from pyg_accel.testing import truth, zoo

# As measured of mycielskian17, reddit-like/ordered and a graph whose nodes come in no order.
SHARED = (
    Shared(16, 1, 1.0, 0.332), Shared(16, 2, 0.87, 0.204), Shared(16, 3, 0.77, 0.155),
    Shared(32, 1, 1.0, 0.227), Shared(32, 2, 0.92, 0.151), Shared(32, 3, 0.87, 0.122),
    Shared(64, 1, 1.0, 0.153), Shared(64, 2, 0.95, 0.104), Shared(64, 3, 0.91, 0.083),
)  # fmt: skip
LITTLE = (
    Shared(16, 1, 1.0, 0.717), Shared(16, 2, 0.45, 0.165), Shared(16, 3, 0.24, 0.062),
    Shared(64, 1, 1.0, 0.476), Shared(64, 2, 0.68, 0.153), Shared(64, 3, 0.58, 0.104),
)  # fmt: skip
SHUFFLED = (
    Shared(16, 1, 1.0, 0.97), Shared(16, 2, 0.06, 0.03), Shared(16, 3, 0.0, 0.0),
    Shared(64, 1, 1.0, 0.89), Shared(64, 2, 0.2, 0.1), Shared(64, 3, 0.02, 0.01),
)  # fmt: skip
FULL, NUMBER, HEAD, FEATURE = (2, 16), (1, 1), (2, 1), (1, 16)


def spec(**changes: Any) -> OpSpec:
    facts = {
        "op": "gspmm", "device": "cuda", "dtype": torch.float32,
        "num_rows": 100_000, "num_cols": 100_000, "num_edges": 10**8, "heads": 1, "width": 256,
        "formula": "mul(u0,e1)", "reduces": ("sum",), "shapes": ((1, 256), (1, 1)),
    }  # fmt: skip
    return OpSpec(**(facts | changes))


@pytest.fixture
def both(monkeypatch):
    """As on a machine with a GPU."""
    for name in ("cuda", "triton"):
        monkeypatch.setattr(get_backend(name), "unavailable_reasons", list)
    monkeypatch.setattr("pyg_accel.backends.triton._interpreted", lambda: False)
    forget_decisions()
    yield
    forget_decisions()


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"sharing": SHARED, "rounded": True}, "cuda"),
        ({"sharing": SHARED}, "cuda"),
        ({"sharing": SHARED, "dtype": torch.bfloat16}, "cuda"),
        ({"sharing": SHUFFLED, "rounded": True}, "triton"),
        ({"sharing": (), "rounded": True}, "triton"),
        ({"sharing": SHARED, "reduces": ("max",)}, "triton"),
        ({"sharing": SHARED, "dtype": torch.float64}, "triton"),
        ({"sharing": SHARED, "shapes": ((1, 256), (1, 256))}, "triton"),
        ({"sharing": SHARED, "num_edges": 2**31}, "triton"),
        ({"sharing": SHARED, "width": 8, "shapes": ((1, 8), (1, 1))}, "triton"),
    ],
    ids=["tf32", "fp32", "bf16", "shuffled", "new", "max", "fp64", "wide-weight", "huge", "narrow"],
)
def test_it_is_chosen_where_rows_share_and_it_can(both, facts, expected):
    decision = choose(spec(**facts))
    assert decision.backend.name == expected
    assert ("6.5 edges a column" in str(decision)) == (facts["sharing"] is SHARED)


@pytest.mark.parametrize(
    ("text", "shapes", "reduces", "expected"),
    [
        ("u0", (FULL,), ("sum",), Product(0)),
        ("u0", (FULL,), ("mean",), Product(0)),
        ("mul(u0,e1)", (FULL, NUMBER), ("sum",), Product(0, 1)),
        ("mul(e0,u1)", (HEAD, FULL), ("mean",), Product(1, 0)),
        ("sum(mul(u0,v1))", (FULL, FULL), ("none",), Product(0, target=1, dot=True)),
        ("sum(mul(v0,u1))", (FULL, FULL), ("none",), Product(1, target=0, dot=True)),
        ("u0", (FULL,), ("sum", "mean"), None),
        ("u0", (FULL,), ("none",), None),
        ("v0", (FULL,), ("sum",), None),
        ("e0", (FULL,), ("sum",), None),
        ("mul(u0,e1)", (FULL, FEATURE), ("sum",), None),
        ("mul(u0,e1)", (NUMBER, FULL), ("sum",), None),
        ("mul(u0,v1)", (FULL, FULL), ("sum",), None),
        ("mul(u0,u1)", (FULL, FULL), ("sum",), None),
        ("sum(mul(u0,v1))", (FULL, FEATURE), ("none",), None),
        ("sum(mul(u0,u1))", (FULL, FULL), ("none",), None),
        ("sum(mul(u0,e1))", (FULL, FULL), ("none",), None),
        ("add(u0,e1)", (FULL, NUMBER), ("sum",), None),
    ],
)
def test_products_are_recognised_and_nothing_else(text, shapes, reduces, expected):
    assert product_of(parse(text), shapes, reduces) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 32, 64, 100, 257, 602, 5000])
def test_launches_are_what_the_kernels_accept(width, dtype):
    for sharing in ((), SHARED, SHUFFLED):
        for rounded in (True, False):
            launch = choose_launch(dtype, width, 1000, sharing, mean=50.0, rounded=rounded)
            assert launch.window in (16, 32, 64)
            assert 1 <= launch.warps <= 4
            dot = choose_launch(dtype, width, 1000, sharing, mean=50.0, rounded=rounded, dot=True)
            assert dot.slice * dtype.itemsize % 64 == 0
            assert 64 <= dot.slice * dtype.itemsize <= 1024
            assert (launch.ratio == float("inf")) == (sharing == ())


def test_few_columns_go_to_tensor_cores_where_few_are_shared():
    def launch(sharing: tuple[Shared, ...], mean: float, **changes: bool) -> Launch:
        return choose_launch(torch.float32, 256, 1000, sharing, mean=mean, rounded=True, **changes)

    assert launch(LITTLE, 500.0).least > 1
    assert launch(LITTLE, 500.0).ratio < launch(LITTLE, 500.0, alone=True).ratio
    assert launch(LITTLE, 500.0, alone=True).least == 1
    # The output is read and written once more, which rows of few entries do not pay for.
    assert launch(LITTLE, 500.0).ratio < launch(LITTLE, 50.0).ratio < launch(LITTLE, 5.0).ratio
    assert launch(LITTLE, 5.0).ratio > 1


def test_a_graph_without_edges_has_no_remainder():
    csr = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.long), (3, 3)).csr()
    assert plan.plan_of(csr, 16, 2).remainder is None


@pytest.mark.parametrize("name", ["directed", "duplicates", "hub", "bipartite"])
def test_what_is_in_no_tile_is_the_remainder_of_the_graph(name):
    case = next(case for case in zoo(hub=600) if case.name == name)
    sizes = (case.num_sources, case.num_targets)
    csr = Graph.from_edge_index(case.edge_index, sizes).csr(edge_order=True)
    whole = plan.plan_of(csr, 16)
    assert (whole.remainder, whole.remainder_entry) == (None, None)
    part = plan.plan_of(csr, 16, 2)
    assert plan.plan_of(csr, 16, 2) is part
    both = torch.cat([part.entry, part.remainder_entry]).sort().values
    assert torch.equal(both, torch.arange(csr.col.numel(), dtype=torch.int32))
    row = torch.repeat_interleave(torch.arange(csr.num_rows), csr.rowptr.diff().long())
    remainder_row = torch.repeat_interleave(
        torch.arange(csr.num_rows), part.remainder.rowptr.diff().long()
    )
    assert torch.equal(remainder_row, row[part.remainder_entry.long()])
    assert torch.equal(part.remainder.col, csr.col[part.remainder_entry.long()])
    assert part.remainder.rowptr.dtype == csr.rowptr.dtype


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", ["directed", "duplicates", "hub", "bipartite", "empty-rows"])
def test_tiles_and_the_remainder_add_up_to_the_whole(name):
    """As on a GPU, with the tiles multiplied by their definition."""
    case = next(case for case in zoo(hub=600) if case.name == name)
    sizes = (case.num_sources, case.num_targets)
    csr = Graph.from_edge_index(case.edge_index, sizes).csr(edge_order=True)
    x = torch.randn(case.num_sources, 5, dtype=torch.double)
    y = torch.randn(case.num_targets, 5, dtype=torch.double)
    weight = torch.randn(case.edge_index.size(1), dtype=torch.double)
    right = truth(case, "mul(u0,e1)", [x.unsqueeze(1), weight.view(-1, 1, 1)], "sum").squeeze(1)
    dots = truth(case, "sum(mul(u0,v1))", [x.unsqueeze(1), y.unsqueeze(1)], "none").flatten()
    for window in (16, 64):
        part, tiles = plan.plan_of(csr, window, 2), build_tiles(csr, window, plan.TILE, 2)
        row = tiles.window_of_tile[tiles.tile_of_entry] * window + tiles.slot.long() // plan.TILE
        column = tiles.tile_of_entry * plan.TILE + tiles.slot.long() % plan.TILE
        edge, other = (csr.eid[entry.long()] for entry in (part.entry, part.remainder_entry))
        source = tiles.col.long()[column]
        with record_choices() as names:
            sums = remainder.spmm_remainder(part.remainder, x, weight[other])
            others = remainder.sddmm_remainder(part.remainder, y, x)
        assert list(names) == ["triton"]
        sums.index_add_(0, row, x[source] * weight[edge].unsqueeze(1))
        torch.testing.assert_close(sums, right)
        actual = torch.empty_like(dots).index_copy_(0, other.long(), others)
        actual[edge.long()] = (x[source] * y[row]).sum(1)
        torch.testing.assert_close(actual, dots)
        assert remainder.spmm_remainder(part.remainder, x, None).shape == right.shape


def test_weights_that_are_used_again_are_brought_in_order_once(monkeypatch):
    taken = []

    class Library:
        def take(self, values: Tensor, order: Tensor, eid: Tensor | None) -> Tensor:
            taken.append(values)
            return values[order]

    monkeypatch.setattr(spmm, "cuda_library", Library)
    weight, order = torch.arange(6.0), torch.tensor([5, 0, 3, 1, 2, 4])
    for number in (1, 2, 2, 2):  # what a single step used is not worth keeping
        view = weight.view(-1, 1, 1).flatten()  # as it comes from the operator
        assert torch.equal(spmm.reordered(view, order, None), weight[order])
        assert len(taken) == number
    assert torch.equal(spmm.reordered(weight[:5], order[1:], None), weight[order[1:]])
    assert len(taken) == 3
    weight.mul_(2.0)
    assert torch.equal(spmm.reordered(weight, order, None), weight[order])
    assert len(taken) == 4
    other = weight.view(torch.int32)
    assert torch.equal(spmm.reordered(other, order, None), other[order])


@pytest.mark.parametrize("shortest", [1, 4, 64])
def test_long_windows_are_divided_evenly_and_nothing_is_lost(shortest):
    counts = torch.tensor([0, 3, 100, 0, 9, 1, 64, 65])
    window_ptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    items, splits, partials = plan.divide(window_ptr, shortest, 16)
    tiles = torch.cat([torch.arange(b, e) for _, b, e, _ in items.tolist()])
    assert torch.equal(tiles, torch.arange(int(counts.sum())))
    assert items[:, 0].unique().tolist() == list(range(8))  # empty windows are written too
    most = max(shortest, -(-int(counts.sum()) // 16))
    assert int((items[:, 2] - items[:, 1]).max()) <= most
    places = items[:, 3]
    assert places[places >= 0].tolist() == list(range(partials))
    for window, first, count in splits.tolist():
        assert places[items[:, 0] == window].tolist() == list(range(first, first + count))
        assert count == -(-int(counts[window]) // most)
    alone = [w for w in range(8) if w not in splits[:, 0].tolist()]
    assert all(places[items[:, 0] == w].tolist() == [-1] for w in alone)


def of_cbsr(op: str, k: int, **changes: Any) -> OpSpec:
    return spec(op=op, k=k, formula="", reduces=(), shapes=(), **changes)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (of_cbsr("cbsr_spmm", 32), "cuda"),
        (of_cbsr("cbsr_spmm", 32, dtype=torch.float64), "triton"),
        (of_cbsr("cbsr_spmm", 200), "triton"),  # dense rows are read faster
        (of_cbsr("sspmm", 64, atomics=True), "cuda"),
        (of_cbsr("sspmm", 16, atomics=True, num_rows=10**6, num_edges=10**7), "triton"),
        (of_cbsr("sspmm", 32), "cuda"),
        (of_cbsr("sspmm", 128), "triton"),
        (of_cbsr("cbsr_dot", 32), "triton"),
        (of_cbsr("maxk", 32), "cuda"),
        (of_cbsr("maxk", 32, width=2000), "triton"),
        (of_cbsr("maxk", 32, dtype=torch.float64), "triton"),
    ],
    ids=lambda case: case if isinstance(case, str) else f"{case.op}-{case.k}",
)
def test_what_runs_maxk_and_its_products(both, asked, name):
    assert choose(asked).backend.name == name


@pytest.mark.parametrize(
    ("k", "width", "mean", "lanes", "columns"),
    [(16, 256, 500, 4, 256), (16, 256, 50, 8, 256), (32, 256, 500, 8, 256), (5, 20, 9, 8, 128),
     (64, 256, 500, 16, 256),
     (40, 257, 9, 16, 512), (64, 1000, 9, 32, 1024), (300, 60_000, 9, 32, 4096)],
)  # fmt: skip
def test_a_row_in_shared_memory_has_room_for_its_columns(k, width, mean, lanes, columns):
    layout = cbsr.layout_of(k, width, mean)
    assert (layout.lanes, layout.lanes << layout.shift) == (lanes, columns)
    assert columns >= min(width, 4096)


def cycles(banks: torch.Tensor) -> float:
    """What an access takes on average, given the bank that each of 32 lanes [N, 32] asks for."""
    counts = torch.zeros(banks.size(0), 32, dtype=torch.long)
    return float(counts.scatter_add_(1, banks, torch.ones_like(banks)).amax(1).double().mean())


def test_slots_that_are_dealt_out_meet_in_fewer_banks_than_neighbouring_ones():
    columns = torch.rand(4000, 256).argsort(1)[:, :32].sort(1).values
    assert cycles(columns % 32) > 3.2
    layout = cbsr.layout_of(32, 256, 50)
    edges = columns.view(-1, 32 // layout.lanes, layout.lanes, 4)  # of a warp, by lane and step
    first = torch.arange(0, 32, layout.lanes)[:, None, None]  # bank of a group of lanes
    banks = (edges >> layout.shift) + first
    assert cycles(banks.permute(0, 3, 1, 2).reshape(-1, 32)) < 2.15


@pytest.mark.parametrize(
    ("rows", "k", "mean", "passes"),
    [(233_000, 32, 492, 1), (233_000, 64, 492, 2), (233_000, 128, 492, 4), (233_000, 66, 492, 1),
     (2_450_000, 64, 492, 1), (233_000, 64, 12, 1)],
)  # fmt: skip
def test_gradients_are_pushed_in_passes_where_each_then_fits_the_cache(rows, k, mean, passes):
    assert cbsr.passes_of(rows, k, mean, 40 << 20) == passes
    parts = cbsr.apart(torch.arange(k).expand(2, -1), passes)
    assert torch.equal(torch.stack(parts, 2).flatten(1)[0], torch.arange(k))
