"""What is kept of tensors: found while they live and stay as they are, and gone with them."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from pyg_accel import Graph, column_reuse, tiles
from pyg_accel.backends import schedule
from pyg_accel.backends.cuda import cbsr, plan, spmm
from pyg_accel.cache import Snapshot, TensorCache, holding, version_of
from pyg_accel.graph import CSR
from pyg_accel.ops.csr import GRAPHS, graph_of
from pyg_accel.settings import settings


def test_a_snapshot_fits_the_same_unchanged_tensors():
    a, b = torch.zeros(3), torch.zeros(3)
    seen = Snapshot([a, b])
    assert seen.fits([a, b])
    assert not seen.fits([b, a])
    assert not seen.fits([a])
    assert not seen.fits([a, b.clone()])
    b.add_(0)
    assert not seen.fits([a, b])
    with torch.inference_mode():
        assert version_of(torch.zeros(1)) == -1


def test_caches_that_empty_each_other_do_not_wait_for_each_other():
    first, second, both = TensorCache(), TensorCache(), threading.Barrier(2)

    class Held:
        """Goes while one cache is emptied, and with it what the other keeps."""

        def __init__(self, other: TensorCache) -> None:
            self.other = other

        def __del__(self) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # for the other thread to be as far
            self.other.clear()

    owner = torch.zeros(1)
    first.put((owner,), "key", Held(second))
    second.put((owner,), "key", Held(first))
    threads = [threading.Thread(target=c.clear, daemon=True) for c in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_value_is_found_by_its_owners_and_key_only():
    kept, a, b = TensorCache(), torch.zeros(3), torch.zeros(3)
    assert kept.get((a, b), "key", lambda: 1) == kept.get((a, b), "key", lambda: 2) == 1
    for owners, key in (((b, a), "key"), ((a,), "key"), ((a, b), "other"), ((a, b[:]), "key")):
        assert kept.find(owners, key) is None
    kept.put((a, b), "key", 5)
    assert kept.find((a, b), "key") == 5
    assert kept.values() == [5]
    kept.clear()
    assert len(kept) == 0


@pytest.mark.parametrize("which", [0, 1])
def test_a_change_of_any_owner_in_place_is_noticed(which):
    kept, owners = TensorCache(), (torch.zeros(3), torch.zeros(3))
    kept.put(owners, (), 1)
    owners[which].add_(0)
    assert kept.find(owners, ()) is None
    assert len(kept) == 0


@pytest.mark.parametrize("which", [0, 1])
def test_a_value_goes_with_the_first_of_its_owners(which):
    kept, owners, value = TensorCache(), [torch.zeros(3), torch.zeros(3)], torch.ones(2)
    kept.put(owners, (), value)
    dead = weakref.ref(value)
    del owners[which], value
    assert dead() is None
    assert len(kept) == 0


def test_the_least_recently_used_value_goes_first():
    kept, (a, b, c) = TensorCache(lambda: 2), torch.zeros(3, 2).unbind()
    kept.put((a,), (), "a")
    kept.put((b,), (), "b")
    kept.find((a,), ())
    kept.put((c,), (), "c")
    assert [kept.find((owner,), ()) for owner in (a, b, c)] == ["a", None, "c"]


@pytest.mark.parametrize("trusting", [True, False])
def test_tensors_of_inference_mode_are_a_matter_of_trust(trusting):
    kept = TensorCache(trusting=trusting)
    with torch.inference_mode():
        owner = torch.zeros(3)
    kept.put((owner,), (), 1)
    assert kept.find((owner,), ()) == (1 if trusting else None)


def test_no_more_graphs_are_kept_than_the_setting_allows():
    settings.graph_cache = 2
    edges = [torch.tensor([[0, 5], [1, 2]]) for _ in range(3)]
    graphs = [graph_of(t, 6, 6, 1) for t in edges]
    assert len(GRAPHS) == 2
    assert graph_of(edges[2], 6, 6, 1) is graphs[2]
    assert graph_of(edges[0], 6, 6, 1) is not graphs[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_a_graph_goes_with_its_edge_index(dtype, order):
    edges = torch.tensor([[0, 1, 2], [0, 1, 2] if order == "sorted" else [2, 0, 1]], dtype=dtype)
    owner, graph = weakref.ref(edges), weakref.ref(graph_of(edges, 3, 3, 1))
    assert graph() is not None
    del edges
    gc.collect()
    assert owner() is None
    assert graph() is None


MAKERS = {
    "plan": lambda csr: plan.plan_of(csr, 16).masks,
    "plan, divided": lambda csr: plan.plan_of(csr, 16, 2).rest,
    "32 bits": plan.in_32_bits,
    "cbsr": cbsr.plan_of,
    "tiles": lambda csr: tiles.tiles_of(csr, 16, 8),
    "sharing": column_reuse.reuse_of,
    "usual sharing": column_reuse.typical_column_reuse,
    "schedule": lambda csr: schedule.schedule_of(csr, 8, 4, ordered=True),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_made_of_a_graph_does_not_keep_it_alive(maker, dtype):
    edges = torch.randint(0, 50, (2, 300))
    edges[1, :100] = 3  # a hub: rows are cut
    graph = Graph.from_edge_index(edges, (50, 50))
    arrays = [graph.rowptr.to(dtype), graph.col.to(dtype)]
    del graph
    dead = [weakref.ref(t) for t in arrays]
    MAKERS[maker](CSR(*arrays, None, 50, True))
    arrays.clear()
    assert [ref() for ref in dead] == [None, None]


def test_what_was_made_of_other_rows_is_not_taken_for_these():
    """The address may be that of an array which is gone, and the columns the same."""
    col = torch.arange(6000) % 50
    hubs = []
    for hub in range(20):
        rowptr = torch.zeros(51, dtype=torch.int64)
        rowptr[hub + 1 :] = 6000
        hubs.append(cbsr.plan_of(CSR(rowptr, col, None, 50, False)).long.item())
    assert hubs == list(range(20))


def test_weights_brought_in_order_go_with_the_order(monkeypatch):
    taken = []
    monkeypatch.setattr(spmm, "_taken", lambda w, order, eid: taken.append(1) or w[order.long()])
    weight, order = torch.rand(5), torch.arange(4, -1, -1, dtype=torch.int32)
    for _ in range(4):  # the first time it may be one that is never seen again
        assert torch.equal(spmm.reordered(weight, order, None), weight.flip(0))
    assert len(taken) == 2
    dead = weakref.ref(spmm.reordered(weight, order, None))
    del order
    assert dead() is None


def test_whoever_holds_gets_what_was_found_and_what_was_put_away():
    kept, a, b = TensorCache(), torch.zeros(3), torch.zeros(3)
    kept.put((a,), "key", "before")
    with holding() as one, holding() as two:
        kept.get((a,), "key", lambda: "other")
        kept.get((b,), "key", lambda: "new")
    kept.get((b,), "key", lambda: "late")
    assert one == two == ["before", "new"]
    assert one is not two
