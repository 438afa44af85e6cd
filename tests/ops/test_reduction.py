"""The short way of gspmm in eager mode, and what is known of the graphs it runs on."""

import copy
import gc
import io
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends import backends
from pyg_accel.backends.notes import record_choices
from pyg_accel.graph import column_reuse, facts
from pyg_accel.graph.facts import facts_of, rounded
from pyg_accel.ops import launch, passes
from pyg_accel.settings import settings

N, E = 40, 300


@pytest.fixture
def graph():
    return Graph.from_edge_index(torch.randint(N, (2, E)), (N, N))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_a_reduction_is_one_node_of_autograd_from_features_to_features(graph, reduce):
    x = torch.randn(N, 8, requires_grad=True)
    out = ops.spmm(graph, x, reduce=reduce)
    assert type(out.grad_fn).__name__ == "_OperationBackward"
    assert out.grad_fn.next_functions[0][0].variable is x


def test_results_may_be_changed_in_place(graph):
    x = torch.randn(N, 8, dtype=torch.float64, requires_grad=True)
    out = ops.spmm(graph, x)
    out += 1
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    matrix = torch.zeros(N, N, dtype=torch.float64)
    rows = torch.repeat_interleave(graph.degree)
    matrix.index_put_((rows, graph.col.long()), torch.ones(E, dtype=torch.float64), accumulate=True)
    torch.testing.assert_close(grad, matrix.T @ (2 * (matrix @ x.detach() + 1)))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("formula", ["u0", "mul(u0,e1)", "relu(add(u0,v1))"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_can_be_differentiated_and_batched(graph, formula, reduce):
    rows = {"u": N, "v": N, "e": E}
    sides = {"u0": "u", "mul(u0,e1)": "ue", "relu(add(u0,v1))": "uv"}[formula]
    operands = [torch.randn(rows[s], 3, dtype=torch.float64, requires_grad=True) for s in sides]

    def run(*inputs):
        return ops.gspmm(graph, formula, list(inputs), reduce=reduce)

    assert torch.autograd.gradcheck(run, operands, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, operands)


def test_a_gradient_that_nobody_wants_is_none(graph):
    x = torch.randn(N, 4, requires_grad=True)
    together = ops.spmm(graph, x, reduce=["sum", "max"])
    (grad,) = torch.autograd.grad(together[0].sum(), x)
    (alone,) = torch.autograd.grad(ops.spmm(graph, x).sum(), x)
    torch.testing.assert_close(grad, alone)


@pytest.mark.parametrize("size", [*range(20), 1000, 1025, 2**31 + 1])
def test_sizes_are_rounded_up_to_three_bits(size):
    actual = rounded(size)
    assert size <= actual <= size * 1.25
    assert rounded(actual) == actual
    assert actual == 0 or (actual // (actual & -actual)) < 8


def test_facts_go_with_the_graph(graph):
    facts = facts_of(graph.csr())
    assert facts_of(graph.csr(edge_order=True)) is facts
    assert facts_of(graph.transposed()) is facts_of(graph.transposed(edge_order=True)) is not facts
    assert facts_of(copy.deepcopy(graph).csr()) is not facts


def test_facts_of_arrays_go_with_the_arrays(graph):
    csr = graph.csr()._replace(cache=None)  # as operators get it from a compiler
    facts = facts_of(csr)
    assert facts_of(csr) is facts
    assert facts_of(csr._replace(rowptr=csr.rowptr.clone())) is not facts
    facts = facts_of(csr)
    csr.col.add_(0)
    assert facts_of(csr) is not facts


def test_arrays_with_facts_are_copied_and_saved(graph):
    csr = graph.csr()._replace(cache=None)
    facts = facts_of(csr)
    assert facts_of(csr._replace(col=copy.deepcopy(csr.col))) is not facts
    file = io.BytesIO()
    torch.save(csr.col, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False), csr.col)


def test_a_mean_over_more_edges_than_half_precision_can_count_has_a_gradient():
    edges = torch.stack([torch.arange(70_000) % 7, torch.zeros(70_000, dtype=torch.long)])
    graph = Graph.from_edge_index(edges, (7, 1))
    x = torch.ones(7, 2, dtype=torch.float16, requires_grad=True)
    out = ops.spmm(graph, x, reduce="mean")
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad.float(), torch.full((7, 2), 1 / 7), rtol=5e-3, atol=0)


REDUCES = ["sum", "mean", "max", "min"]


def test_a_graph_with_plans_is_freed_at_once_and_copies_have_plans_of_their_own():
    graph = Graph.from_edge_index(torch.randint(N, (2, E)), (N, N))
    x = torch.randn(N, 4, requires_grad=True)
    ops.spmm(graph, x, reduce="mean").sum().backward()
    ops.attention(graph, "add(u0,v1)", "u2", [x[:, :1], x[:, 1:2], x.unsqueeze(1)]).sum().backward()
    assert graph.plans
    twin = copy.deepcopy(graph)
    assert twin.plans == pickle.loads(pickle.dumps(graph)).plans == copy.copy(graph).plans == {}
    torch.testing.assert_close(ops.spmm(twin, x), ops.spmm(graph, x))
    gone, enabled = weakref.ref(graph.col), gc.isenabled()
    gc.disable()
    try:
        del graph
        assert gone() is None
    finally:
        if enabled:
            gc.enable()


@pytest.mark.parametrize("change", ["block", "setting", "variable", "disable"])
def test_a_plan_holds_until_choices_may_change(graph, change, monkeypatch):
    x = torch.randn(N, 4)

    def backend():
        with record_choices() as names:
            ops.spmm(graph, x)
        return list(names)

    first = backend()
    assert backend() == first
    if first == ["reference"]:
        pytest.skip("there is no other backend")
    with monkeypatch.context() as patch:
        if change == "variable":
            patch.setenv("PYG_ACCEL_BACKEND", "reference")
        elif change == "disable":
            patch.setenv("PYG_ACCEL_DISABLE", ",".join(n for n in backends() if n != "reference"))
        elif change == "setting":
            settings.backend = "reference"
        with use_backend("reference") if change == "block" else nullcontext():
            assert backend() == ["reference"]
        settings.backend = None
    assert backend() == first


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    "lay",
    [
        lambda g: g.sum(),
        lambda g: (g.sum(0) * torch.arange(6.0, dtype=torch.float64)).sum(),
        lambda g: (g.t() * torch.arange(6.0, dtype=torch.float64)[:, None]).t().sum(),
        lambda g: g[:, ::2].square().sum(),
    ],
    ids=["expanded", "expanded-rows", "transposed", "sliced"],
)
def test_gradients_may_lie_in_any_way(graph, reduce, lay):
    inputs = torch.randn(6, N, dtype=torch.float64).t()  # column by column
    wide = torch.randn(N, 12, dtype=torch.float64)
    for x in (inputs, inputs.contiguous(), wide[:, ::2], wide[:, :6]):
        leaf, copied = x.detach().requires_grad_(), x.clone(memory_format=torch.contiguous_format)
        copied.requires_grad_()
        weight = torch.rand(E, dtype=torch.float64)
        (actual,) = torch.autograd.grad(lay(ops.spmm(graph, leaf, weight, reduce=reduce)), leaf)
        with use_backend("reference"):
            right = lay(ops.spmm(graph, copied, weight, reduce=reduce))
            (right,) = torch.autograd.grad(right, copied)
        torch.testing.assert_close(actual, right)


def test_saved_tensors_are_unpacked_once(graph):
    x = torch.randn(N, 4, dtype=torch.float64, requires_grad=True)
    weight, unpacked = torch.rand(E, dtype=torch.float64, requires_grad=True), []
    for again in (False, True):
        unpacked.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.clone(), lambda t: unpacked.append(t) or t
        ):
            out = ops.spmm(graph, x, weight)
        torch.autograd.grad(out.sum(), (x, weight), create_graph=again)
        assert len(unpacked) == 2


def test_checkpointed_calls_have_their_gradients(graph):
    x = torch.randn(N, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(E, dtype=torch.float64, requires_grad=True)

    def run(x, weight):
        return ops.spmm(graph, x, weight, reduce="max").square().sum()

    kept = checkpoint(run, x, weight, use_reentrant=False)
    for one, other in zip(
        torch.autograd.grad(kept, (x, weight)), torch.autograd.grad(run(x, weight), (x, weight)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other)


def test_a_tensor_that_left_a_function_transform_is_an_ordinary_one(graph):
    left, x = [], torch.randn(N, 4)
    torch.func.grad(lambda x: left.append(x) or x.sum())(x)
    torch.testing.assert_close(ops.spmm(graph, left[0]), ops.spmm(graph, x))
    leaf = torch.randn(N, 4, requires_grad=True)
    out = ops.gspmm(graph, "mul(u0,v1)", [leaf, left[0]])
    right = ops.gspmm(graph, "mul(u0,v1)", [leaf, x])
    (actual,), (good,) = (torch.autograd.grad(t.sum(), leaf) for t in (out, right))
    torch.testing.assert_close(actual, good)


def test_a_plan_is_made_anew_when_a_graph_on_a_gpu_turns_out_to_stay(graph, monkeypatch):
    monkeypatch.setattr(facts, "_USES", 3)
    for module in (launch, passes):  # as of a graph on a GPU
        monkeypatch.setattr(module, "kind_of", lambda csr, **_: column_reuse._measured_kind(csr))
    graph.is_cuda = True
    x, plans = torch.randn(N, 4, requires_grad=True), []
    right = ops.spmm(graph, x).detach()
    for _ in range(8):
        out = ops.spmm(graph, x)
        torch.testing.assert_close(out.detach(), right)
        out.sum().backward()
        plans.append(*graph.plans.values())
    assert len({id(plan) for plan in plans}) == 2
    assert plans[0].facts is not None
    assert plans[-1].facts is None
