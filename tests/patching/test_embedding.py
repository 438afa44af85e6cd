"""``nn.Embedding`` on a CPU: torch's results and gradients, by aggregation."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv

import pyg_accel
from pyg_accel.ops.embedding import embedding
from pyg_accel.patching import overrides, reasons
from pyg_accel.patching.embedding import pays, reasons_against

WORDS, WIDTH = 13, 5
pytestmark = pytest.mark.usefixtures("always")

OPTIONS = {
    "plain": {},
    "padding": {"padding_idx": 3},
    "last": {"padding_idx": -1},
    "freq": {"scale_grad_by_freq": True},
    "both": {"padding_idx": 0, "scale_grad_by_freq": True},
    "norm": {"max_norm": 0.7, "padding_idx": 2},
    "one-norm": {"max_norm": 0.7, "norm_type": 1.0},
}
IDS = {
    "repeated": lambda: torch.randint(WORDS, (40,)),
    "matrix": lambda: torch.randint(WORDS, (7, 6)),
    "strided": lambda: torch.randint(WORDS, (9, 8)).t()[::2],
    "int32": lambda: torch.randint(WORDS, (30,), dtype=torch.int32),
    "one": lambda: torch.tensor(4),
    "none": lambda: torch.empty(0, dtype=torch.long),
    "hub": lambda: torch.full((500,), 3),
}


def outcome(table, ids, seed):
    table.weight.grad = None
    out = table(ids)
    out.backward(seed)
    return out.detach(), table.weight.grad, table.weight.detach().clone()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_equals_torch(name, ids, dtype, report_of):
    table = nn.Embedding(WORDS, WIDTH, dtype=dtype, **OPTIONS[name])
    other, where = copy.deepcopy(table), IDS[ids]()
    seed = torch.randn(*where.shape, WIDTH, dtype=dtype)
    if dtype is torch.bfloat16:  # in which torch adds up
        right = [t.to(dtype) for t in outcome(other.double(), where, seed.double())]
    else:
        right = list(outcome(other, where, seed))
    with pyg_accel.patched():
        found = list(outcome(table, where, seed))
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(found, right, rtol=rtol, atol=rtol)
    assert [(row.layer, row.backend) for row in report_of()] == [("Embedding", "torch")]


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2, "scale_grad_by_freq": True}], ids=str)
def test_it_can_be_differentiated_twice(options):
    weight = torch.randn(WORDS, WIDTH, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(WORDS, (20,))
    out = embedding(weight, ids, **options)
    seed = torch.randn_like(out).requires_grad_()

    def gradient(seed):
        return torch.autograd.grad(out, weight, seed, create_graph=True)[0]

    torch.testing.assert_close(
        gradient(seed),
        torch.ops.aten.embedding_dense_backward(
            seed, ids, WORDS, options.get("padding_idx", -1), "scale_grad_by_freq" in options
        ),
    )
    # torch's own second derivative leaves the frequencies out.
    assert torch.autograd.gradcheck(gradient, seed)
    assert torch.autograd.gradgradcheck(gradient, seed)


def test_gradients_of_many_outputs_at_once_equal_a_loop():
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    out = embedding(weight, torch.randint(9, (2, 30))).sum((0, 1))
    seeds = torch.eye(4).double()
    (found,) = torch.autograd.grad(out, weight, seeds, is_grads_batched=True, retain_graph=True)
    for seed, one in zip(seeds, found, strict=True):
        (alone,) = torch.autograd.grad(out, weight, seed, retain_graph=True)
        assert torch.equal(one, alone)


def test_ids_are_sorted_once_and_noticed_when_they_change(stored_graphs):
    table, ids = nn.Embedding(WORDS, WIDTH), torch.randint(WORDS, (50,))
    seed = torch.randn(50, WIDTH)
    with pyg_accel.patched():
        for _ in range(2):
            outcome(table, ids, seed)
            assert stored_graphs() == 1
        ids.add_(1).remainder_(WORDS)
        found = outcome(table, ids, seed)
    torch.testing.assert_close(found, outcome(table, ids, seed))
    with pyg_accel.patched():
        outcome(table, ids, seed)
        del ids
        assert stored_graphs() == 0


def test_when_it_is_left_to_torch():
    ids = torch.randint(WORDS, (50,))
    plain, sparse = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH, sparse=True)
    assert not reasons_against(plain, ids)
    assert reasons_against(sparse, ids) == ["a sparse gradient"]
    with torch.no_grad():
        assert reasons_against(plain, ids) == ["no gradient is asked for"]
    assert reasons_against(nn.Embedding.from_pretrained(torch.ones(3, 2)), ids)
    with pyg_accel.patched():
        sparse(ids).sum().backward()
    assert sparse.weight.grad.is_sparse
    assert pays(100_000, 1_000, 64)
    assert not pays(1_000, 1_000, 64)
    assert not pays(20_000, 170_000, 128)


def test_ids_outside_of_the_table_are_an_error():
    with pyg_accel.patched(), pytest.raises(IndexError):
        nn.Embedding(WORDS, WIDTH)(torch.tensor([WORDS]))


def test_the_class_is_as_it_was_afterwards_and_a_model_can_be_named():
    before, ids = nn.Embedding.forward, torch.randint(WORDS, (50,))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.conv = nn.Embedding(WORDS, WIDTH), GCNConv(WIDTH, 2)

    model, other = Model(), nn.Embedding(WORDS, WIDTH)
    with pyg_accel.patch(model):
        assert reasons.is_active(model.table)
        assert not reasons.is_active(other)
        assert "PygAccel" not in str(type(other(ids).grad_fn))
        assert type(model.table(ids).grad_fn) is not type(other(ids).grad_fn)
    assert nn.Embedding.forward is before
    assert not overrides.installed()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts_traces_and_compiled_code_hold_torchs_own():
    table, ids = nn.Embedding(WORDS, WIDTH, padding_idx=1), torch.randint(WORDS, (8,))
    right = table(ids)
    with pyg_accel.patched():
        scripted = torch.jit.script(nn.Sequential(table, nn.Linear(WIDTH, 2)))
        traced = torch.jit.trace(table, ids)
        compiled = torch.compile(table, backend="eager", fullgraph=True)
        for run in (scripted[0], traced, compiled):
            assert torch.equal(run(ids), right)
    assert torch.equal(scripted[0](ids), right)
    assert "aten::embedding" in str(traced.inlined_graph)


def test_threads_share_a_table():
    from concurrent.futures import ThreadPoolExecutor

    table = nn.Embedding(WORDS, WIDTH)
    batches = [torch.randint(WORDS, (300,)) for _ in range(8)]
    right = [torch.autograd.grad(table(b).square().sum(), table.weight)[0] for b in batches]
    with pyg_accel.patched(), ThreadPoolExecutor(4) as pool:
        found = pool.map(
            lambda b: torch.autograd.grad(table(b).square().sum(), table.weight)[0], batches
        )
        torch.testing.assert_close(list(found), right)
