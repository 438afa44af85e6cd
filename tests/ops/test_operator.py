"""Operators with torch's dispatcher and without: the same results and gradients."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends.notes import record_choices
from pyg_accel.runtime.native import cpu_unavailable_reasons


def run(graph: Graph, x: Tensor, weight: Tensor, reduce: str) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = ops.spmm(graph, x, weight, reduce=reduce)
    grads = torch.autograd.grad(out.square().sum(), [x, weight], create_graph=True)
    twice = torch.autograd.grad(sum(g.square().sum() for g in grads), [x, weight])
    return [out.detach(), *(g.detach() for g in grads), *twice]


@pytest.fixture
def inputs() -> tuple[Graph, Tensor, Tensor]:
    graph = Graph.from_edge_index(torch.randint(0, 12, (2, 60)), size=(12, 12))
    return graph, torch.randn(12, 5).double(), torch.randn(60).double()


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_both_roads_agree_to_the_second_derivative(reduce, inputs, dispatched):
    direct = run(*inputs, reduce)
    with dispatched() as seen:
        dispatched = run(*inputs, reduce)
    assert "pyg_accel::gspmm" in seen.names
    for one, other in zip(direct, dispatched, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_profiler_sees_the_path_that_users_run(inputs):
    graph, x, _ = inputs
    x.requires_grad_()
    plain = ops.spmm(graph, x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        observed = ops.spmm(graph, x)
        observed.sum().backward()
    names = {event.key for event in seen.key_averages()}
    assert {"_Operation", "_OperationBackward"} <= names
    if not cpu_unavailable_reasons():
        assert "pyg_accel_cpu::spmm" in names
    assert "pyg_accel::gspmm" not in names
    assert type(observed.grad_fn) is type(plain.grad_fn)


def test_of_several_results_some_may_be_unused(inputs):
    graph, x, _ = inputs
    leaf = x.clone().requires_grad_()
    mean, most = ops.spmm(graph, leaf, reduce=["mean", "max"])
    (both,) = torch.autograd.grad(mean.sum(), leaf, retain_graph=True)
    (alone,) = torch.autograd.grad(ops.spmm(graph, leaf, reduce="mean").sum(), leaf)
    torch.testing.assert_close(both, alone)
    (winners,) = torch.autograd.grad(most.sum(), leaf)
    (alone,) = torch.autograd.grad(ops.spmm(graph, leaf, reduce="max").sum(), leaf)
    torch.testing.assert_close(winners, alone)


def test_nothing_is_recorded_where_no_gradient_is_wanted(inputs):
    graph, x, weight = inputs
    assert ops.spmm(graph, x, weight).grad_fn is None
    with torch.no_grad():
        assert ops.spmm(graph, x.clone().requires_grad_(), weight).grad_fn is None


def test_a_backward_pass_runs_on_the_backend_of_its_forward_pass():
    """Also in another thread, as autograd runs those of a GPU."""
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
    x = torch.randn(3, 4, requires_grad=True)
    with use_backend("reference"):
        out = ops.spmm(graph, x)

    def backward() -> list[str]:
        with record_choices() as names:
            out.sum().backward()
        return list(names)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(backward).result() == ["reference"]


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_a_backward_pass_keeps_what_the_wanted_gradients_read(wanted):
    given = {"x": torch.randn(5, 3), "weight": torch.randn(2, 3, 4)}
    given[wanted].requires_grad_()
    ptr = torch.tensor([0, 2, 5])
    out = ops.segment_matmul(given["x"], ptr, given["weight"])
    (other,) = (t for name, t in given.items() if name != wanted)
    kept = {t.data_ptr() for t in out.grad_fn.saved_tensors}
    assert kept == {other.data_ptr(), ptr.data_ptr()}
