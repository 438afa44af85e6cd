"""What is derived of tensors: returned while they live and stay as they are, and gone with them."""

import gc
import os
import threading
import weakref

import pytest
import torch
from torch.nn import Parameter

from pyg_accel.backends import schedule
from pyg_accel.backends.cuda import cbsr, plan, spmm
from pyg_accel.graph import CSR, Graph, column_reuse, tiles
from pyg_accel.graph.derived import GraphHistory, derived, find, forget, holding, keep, values
from pyg_accel.ops.csr import graph_of
from pyg_accel.runtime.cache import Snapshot, arrays_of, version_of
from pyg_accel.settings import settings


class Value:
    """A value that can be told apart."""


@pytest.fixture(autouse=True)
def nothing_is_stored() -> None:
    forget()


def numbers() -> list[int]:
    """What these tests have stored: graphs of others live for as long as those do."""
    return [value for value in values() if type(value) is int]


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


def test_a_value_is_found_by_its_owners_and_key_only():
    a, b = torch.zeros(3), torch.zeros(3)
    assert derived((a, b), "key", lambda: 1) == derived((a, b), "key", lambda: 2) == 1
    for owners, key in (((b, a), "key"), ((a,), "key"), ((a, b), "other"), ((a, b[1:]), "key")):
        assert find(owners, key) is None
    keep((a, b), "key", 5)
    assert find((a, b), "key") == 5
    assert 5 in numbers()
    forget()
    assert find((a, b), "key") is None


def test_views_of_the_same_part_are_the_same_owner():
    edges = torch.randint(0, 9, (2, 30))
    value = derived((edges[0],), "key", Value)
    assert (
        derived((edges[0],), "key", Value) is derived((edges.detach()[0],), "key", Value) is value
    )
    parts = edges[1], edges[0, :1], edges[0].view(5, 6), edges[0].view(torch.int32), edges[0, ::2]
    assert all(find((part,), "key") is None for part in parts)
    edges[1] = 0  # a change of any part may be one of this
    assert find((edges[0],), "key") is None


def test_other_data_is_another_owner():
    """To assign to ``Tensor.data`` counts as no change."""
    edges = torch.randint(0, 9, (2, 30))
    keep((edges,), "key", 1)
    held, edges.data = edges.detach(), torch.randint(0, 9, (2, 30))
    assert find((edges,), "key") is None
    assert find((held,), "key") == 1


@pytest.mark.parametrize("which", [0, 1])
def test_a_change_of_any_owner_in_place_is_noticed(which):
    owners = torch.zeros(3), torch.zeros(3)
    keep(owners, (), 1)
    owners[which].add_(0)
    assert find(owners, ()) is None
    keep(owners, (), 2)  # in place of the one before
    assert numbers().count(1) == 0


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "a graph", "an object"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_value_goes_with_the_first_of_its_owners(which, kind, lasting):
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]))
    first = {"tensors": torch.zeros(3), "a graph": graph, "an object": Value()}[kind]
    owners, value = [first, torch.zeros(3), Value()], Value()
    del first, graph
    keep(owners, (), value, lasting=lasting)
    assert find(owners, ()) is value
    dead = weakref.ref(value)
    del owners[which], value
    assert dead() is None


def test_the_least_recently_used_owner_goes_first():
    settings.graph_cache = 2
    a, b, c = (torch.zeros(2) for _ in range(3))
    keep((a,), (), "a")
    keep((b,), (), "b")
    find((a,), ())
    keep((c,), (), "c")
    assert [find((owner,), ()) for owner in (a, b, c)] == ["a", None, "c"]


def test_what_lasts_is_not_counted():
    settings.graph_cache = 1
    tensors = [torch.zeros(2) for _ in range(5)]
    keep((tensors[0],), "other", "before")
    for tensor in tensors:
        keep((tensor,), (), True, lasting=True)
    assert all(find((tensor,), (), lasting=True) for tensor in tensors)
    forget()
    assert find((tensors[0],), "other") == "before"


def test_nothing_is_remembered_of_what_is_or_was_trained():
    weight, edges = torch.rand(3, requires_grad=True), torch.zeros(3, dtype=torch.int64)
    with torch.inference_mode():
        inference = torch.zeros(3)
    frozen = Parameter(torch.rand(3), requires_grad=False)
    for owner in (weight, weight.detach(), frozen, inference):
        for owners in ((owner,), (edges, owner)):
            assert not keep(owners, (), 1)
            assert find(owners, ()) is None
            assert keep(owners, (), 1, lasting=True)
            assert find(owners, (), lasting=True) == 1


def test_a_tensor_that_will_be_trained_is_not_found():
    weight = torch.rand(3)
    keep((weight,), (), 1)
    weight.requires_grad_()
    assert find((weight,), ()) is None
    weight.requires_grad_(False)
    assert find((weight,), ()) is None  # an optimizer may have changed it uncounted


def test_owners_can_be_swapped():
    """``torch.utils.swap_tensors`` refuses tensors with weak references."""
    a, b = torch.zeros(3), torch.ones(3)
    keep((a,), (), "a")
    keep((b,), (), "b")
    torch.utils.swap_tensors(a, b)
    assert (find((a,), ()), find((b,), ())) == ("b", "a")


def test_sparse_tensors_are_known_by_their_arrays():
    dense = torch.eye(3)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        seen = GraphHistory()
        assert [seen.is_new(sparse) for _ in range(2)] == [True, False]
        assert not keep((sparse,), (), 1, lasting=True)
        assert find((sparse,), (), lasting=True) is None
        keep(arrays_of(sparse), (), 1)
        assert find(arrays_of(sparse), ()) == 1
        sparse.mul_(2)
        assert find(arrays_of(sparse), ()) is None
        torch.utils.swap_tensors(sparse, sparse.clone())


def test_tensors_get_no_attributes():
    edges = torch.randint(0, 9, (2, 30))
    graph = graph_of(edges, 9, 9, 1)
    schedule.schedule_of(graph.csr(), 8, 4, ordered=True)
    assert not any(vars(t) for t in (edges, graph.rowptr, graph.col))


def test_a_tensor_is_new_to_each_once_and_after_a_change():
    edges, first, second = torch.arange(4), GraphHistory(), GraphHistory()
    assert [seen.is_new(edges) for seen in (first, second, first, second)] == [1, 1, 0, 0]
    edges.add_(1)
    assert [first.is_new(t) for t in (edges, edges, edges[1:], edges)] == [1, 0, 1, 0]
    assert first.is_new(edges.clone())


def test_a_tensor_of_which_something_was_derived_is_not_new():
    edges = torch.arange(4)
    keep((edges,), (), 1)
    assert [GraphHistory().is_new(t) for t in (edges, edges[1:])] == [False, True]
    edges.add_(1)
    assert GraphHistory().is_new(edges)


def test_of_a_tensor_that_died_nothing_was_seen():
    seen = GraphHistory()
    for _ in range(5):
        assert seen.is_new(torch.arange(4))
    assert not seen._parts


def test_owners_may_die_while_it_is_asked_whether_a_tensor_is_new():
    """Garbage is collected when objects are made, so at every count of new objects once."""
    settings.graph_cache, filled = 99, []
    gc.collect()
    threshold = gc.get_threshold()
    try:
        for new in range(1, 60):
            gc.disable()
            edges = torch.arange(5)
            for n in range(20):
                other = torch.arange(n + 1)
                keep((edges, other), n, 1)
                cycle = [other]
                cycle.append(cycle)
            filled += [(n, new) for n in range(3000)]  # pairs that died are no more at hand
            gc.set_threshold(gc.get_count()[0] + new, 1, 1)
            gc.enable()
            GraphHistory().is_new(edges)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()


def test_threads_store_and_drop_at_the_same_time():
    settings.graph_cache = 3
    failures, shared = [], [torch.zeros(2) for _ in range(5)]

    def work() -> None:
        try:
            for n in range(300):
                own = torch.zeros(2)
                for owner in (own, shared[n % 5]):
                    assert derived((owner, shared[0]), n % 7, lambda n=n: n % 7) == n % 7
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_values_that_store_and_drop_others_when_they_go_are_no_problem():
    settings.graph_cache = 1

    class Cascade:
        def __del__(self) -> None:
            keep((torch.zeros(1),), (), 1)
            forget()

    owners = [torch.zeros(1) for _ in range(4)]
    for owner in owners:
        keep((owner,), (), Cascade())
    del owner, owners
    forget()
    assert not any(isinstance(value, Cascade) for value in values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_finds_what_was_stored():
    tensor, other = torch.zeros(1), torch.zeros(1)
    keep((tensor,), (), 1)
    child = os.fork()
    if not child:
        os._exit(not (find((tensor,), ()) == 1 and derived((other,), (), lambda: 2) == 2))
    assert os.waitpid(child, 0)[1] == 0


def test_no_more_graphs_are_kept_than_the_setting_allows(stored_graphs):
    settings.graph_cache = 2
    edges = [torch.tensor([[0, 5], [1, 2]]) for _ in range(3)]
    graphs = [graph_of(t, 6, 6, 1) for t in edges]
    assert stored_graphs() == 2
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
    "plan": lambda csr: plan.plan_of(csr, 16),
    "plan, divided": lambda csr: plan.plan_of(csr, 16, 2).remainder,
    "32 bits": plan.in_32_bits,
    "cbsr": cbsr.plan_of,
    "tiles": lambda csr: tiles.tiles_of(csr, 16, 8),
    "sharing": column_reuse.reuse_of,
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
    a, b = torch.zeros(3), torch.zeros(3)
    keep((a,), "key", "before")
    with holding() as one, holding() as two:
        derived((a,), "key", lambda: "other")
        derived((b,), "key", lambda: "new")
    derived((b,), "key", lambda: "late")
    assert one == two == ["before", "new"]
    assert one is not two


def test_an_edge_list_that_was_read_is_held_though_its_graph_is_built():
    graph = Graph.of_edges(torch.tensor([[0, 1], [1, 0]]), 1, 2, 2)
    with holding() as held:
        edges = weakref.ref(graph.edge_list().edge_index)
    graph.build()
    assert edges() is held[0]
    del held
    assert edges() is None
