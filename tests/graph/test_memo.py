"""Results of functions of tensors are remembered while these live and are as they were."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_accel.graph import derived
from pyg_accel.graph.memo import _Remembered, copied, remembered
from pyg_accel.runtime.cache import memory_of
from pyg_accel.runtime.state import during, running
from pyg_accel.settings import settings


class Counter:
    """A function that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, t: Tensor, *more: object, **named: object) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return t + 1, t * 2


def results() -> list[Any]:
    """The results that are stored."""
    return [value for value in derived.values() if isinstance(value, _Remembered)]


@pytest.fixture(autouse=True)
def nothing_is_stored() -> None:
    derived.forget()


@pytest.fixture
def counted() -> Counter:
    return Counter()


def test_the_same_arguments_give_the_very_same_tensors(counted):
    t = torch.arange(4)
    first, second = remembered(counted, t, 3, fill=1.0), remembered(counted, t, 3, fill=1.0)
    assert counted.calls == 1
    assert first[0] is second[0]


ANEW = {
    "another tensor": lambda f, t: remembered(f, t.clone(), 3),
    "another number": lambda f, t: remembered(f, t, 4),
    "a keyword": lambda f, t: remembered(f, t, n=3),
    "one more": lambda f, t: remembered(f, t, 3, t.clone()),
    "changed in place": lambda f, t: remembered(f, t.add_(1), 3),
    "a result changed in place": lambda f, t: (
        remembered(f, t, 3)[1].zero_(), remembered(f, t, 3)),
    "a result that requires gradients by now": lambda f, t: (
        remembered(f, t, 3)[1].requires_grad_(), remembered(f, t, 3)),
}  # fmt: skip


@pytest.mark.parametrize("change", ANEW)
def test_anything_else_is_computed_anew(change, counted):
    t = torch.arange(4.0)
    first = [out.clone() for out in remembered(counted, t, 3)]
    ANEW[change](counted, t)
    assert counted.calls == 2
    actual = remembered(counted, t, 3)
    assert not any(out.requires_grad for out in actual)
    if change != "changed in place":
        torch.testing.assert_close(list(actual), first)


def test_numbers_that_are_equal_are_not_the_same_argument():
    t = torch.arange(4)

    def times(t: Tensor, n: float) -> Tensor:
        return t * n

    assert [remembered(times, t, n).dtype for n in (1, 1.0)] == [torch.int64, torch.float32]
    assert [remembered(times, t, n).signbit().any() for n in (0.0, -0.0)] == [False, True]
    assert remembered(times, t, 1) is not remembered(times, t, True)


def norm(t: Tensor) -> tuple[Tensor, Tensor]:
    return t + 0, torch.ones(t.size(1))


def test_a_result_in_the_memory_of_an_argument_is_not_kept():
    edges = torch.randint(0, 9, (2, 20))
    remembered(lambda inputs: inputs.detach(), edges)
    assert not results()


def test_results_depend_on_the_default_dtype():
    edges = torch.randint(0, 9, (2, 30))
    assert remembered(norm, edges)[1].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert remembered(norm, edges)[1].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_results_of_inference_mode_and_of_training_are_the_same_tensors():
    edges = torch.randint(0, 9, (2, 30))
    with torch.inference_mode():
        first = remembered(norm, edges)
    again = remembered(norm, edges)
    assert again[0] is first[0] and again[1] is first[1]
    assert not again[1].is_inference()


def test_a_layer_borrows_and_gets_a_copy_of_what_it_has_already():
    edges = torch.randint(0, 9, (2, 30))
    with during(lent=[]):
        index, weight = remembered(norm, edges)
        assert len(running.lent) == 2
        again, more = remembered(norm, edges)
        assert torch.equal(again, index)
        assert again is not index
        assert more is not weight
        assert len(running.lent) == 2
    with during(lent=[]):
        assert remembered(norm, edges)[0] is index
        assert running.lent == [index, weight]
    assert running.lent is None


def test_what_a_layer_leaves_behind_is_a_copy():
    shared = [torch.arange(4).view(2, 2), torch.ones(2)]
    mine = torch.zeros(3)
    row = shared[0][1]
    kept = copied({"a": (shared[0], [row, mine, None]), "b": 3}, shared)
    assert torch.equal(kept["a"][0], shared[0])
    assert kept["a"][0] is not shared[0]
    assert not set(map(memory_of, kept["a"][1][:1])) & set(map(memory_of, shared))
    assert kept["a"][1][1] is mine
    nothing = {"a": (mine,)}
    assert copied(nothing, shared) is nothing


def test_a_dead_argument_takes_its_entry_along(counted):
    t = torch.arange(4)
    result = weakref.ref(remembered(counted, t)[0])
    assert len(results()) == 1
    del t
    gc.collect()
    assert not results()
    assert result() is None


def test_a_result_that_is_an_argument_is_not_kept():
    t = torch.arange(4)
    remembered(lambda t: t, t)
    remembered(lambda t: (t, t + 1), t)
    remembered(lambda t: t.view(2, 2), t)
    alive = weakref.ref(t)
    del t
    gc.collect()
    assert alive() is None
    assert not results()


def test_what_comes_with_an_argument_is_kept_without_it():
    t = torch.arange(3)
    calls = []

    def with_weights(edges: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        calls.append(fill)
        return edges, torch.full((3,), fill)

    first, second = remembered(with_weights, t, 2.0), remembered(with_weights, t, 2.0)
    assert len(calls) == 1 and len(results()) == 1
    assert first[0] is second[0] is t and first[1] is second[1]
    gone = weakref.ref(t)
    del t, first, second
    gc.collect()
    assert gone() is None and not results()


def test_no_more_results_are_kept_than_the_setting_allows(counted):
    settings.graph_cache = 3
    ts = [torch.arange(4) for _ in range(5)]
    for t in ts:
        remembered(counted, t)
    assert len(results()) == 3
    remembered(counted, ts[4])
    assert counted.calls == 5
    remembered(counted, ts[0])
    assert counted.calls == 6


def test_arguments_with_gradients_or_without_versions_are_never_remembered(counted):
    for t in (torch.ones(3, requires_grad=True), torch.inference_mode()(torch.ones)(3)):
        remembered(counted, t)
        remembered(counted, t)
    assert counted.calls == 4
    assert not results()


def test_arguments_that_cannot_be_hashed_are_passed_on(counted):
    t = torch.arange(4)
    remembered(counted, t, [1, 2])
    remembered(counted, t, [1, 2])
    assert counted.calls == 2


def test_learned_weights_are_new_in_each_call_and_the_edges_are_not():
    edges, weight = torch.randint(0, 9, (2, 30)), torch.rand(30, requires_grad=True)

    def scaled(t: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return t + 0, w * 2

    first, before = remembered(scaled, edges, weight)
    weight.data.mul_(3)
    again, after = remembered(scaled, edges, weight)
    assert again is first
    assert torch.equal(after, 2 * weight)
    assert before.grad_fn is not after.grad_fn
    expected = first.clone()
    first.zero_()
    assert torch.equal(remembered(scaled, edges, weight)[0], expected)
    edges.add_(1)
    assert torch.equal(remembered(scaled, edges, weight)[0], edges)


def test_edges_beside_learned_weights_go_with_their_parent():
    edges, weight = torch.randint(0, 9, (2, 30)), torch.rand(30, requires_grad=True)
    alive = weakref.ref(remembered(lambda t, w: (t + 0, w * 2), edges, weight)[0])
    assert alive() is not None
    del edges
    gc.collect()
    assert alive() is None
