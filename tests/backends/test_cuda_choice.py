"""When the Tensor-Core backend is chosen, and how: policy, so no GPU is needed."""

from typing import Any

import pytest
import torch

from pyg_accel.backends import OpSpec, choose, get_backend
from pyg_accel.backends.cuda import plan
from pyg_accel.backends.cuda.choice import choose_launch
from pyg_accel.backends.cuda.match import Product, product_of
from pyg_accel.backends.dispatch import forget_decisions
from pyg_accel.formula import parse

SHARED, SHUFFLED = (3.03, 4.45, 6.68), (1.03, 1.06, 1.12)
FULL, NUMBER, HEAD, FEATURE = (2, 16), (1, 1), (2, 1), (1, 16)


def spec(**changes: Any) -> OpSpec:
    facts = {
        "op": "gspmm", "device": "cuda", "dtype": torch.float32, "index_dtype": torch.int32,
        "num_rows": 100_000, "num_cols": 100_000, "num_edges": 10**8, "heads": 1, "width": 256,
        "formula": "mul(u0,e1)", "reduces": ("sum",), "shapes": ((1, 256), (1, 1)),
    }  # fmt: skip
    return OpSpec(**(facts | changes))


@pytest.fixture
def both(monkeypatch):
    """As on a machine with a GPU."""
    for name in ("cuda", "triton"):
        backend = get_backend(name)
        monkeypatch.setattr(type(backend), "unavailable_reasons", lambda self: [])
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
    assert (f"{facts['sharing'][-1]} edges a column" in str(decision)) if facts["sharing"] else True


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
            launch = choose_launch(dtype, width, 1000, sharing, rounded=rounded)
            assert launch.window in (16, 32, 64)
            assert 1 <= launch.warps <= 4
            dot = choose_launch(dtype, width, 1000, sharing, rounded=rounded, dot=True)
            assert dot.slice * dtype.itemsize % 64 == 0
            assert 64 <= dot.slice * dtype.itemsize <= 1024
            assert (launch.ratio == float("inf")) == (sharing == ())


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
