"""Padded calls give what unpadded ones do: the function itself is run, so no GPU is needed."""

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.data import Batch, Data

import pyg_accel
from pyg_accel.cuda_graphs.functions import CONSTANTS, Functions
from tests.cuda_graphs.models import SIZES, Inputs, Network, conv, mlp, module, same, sampled, some

pytestmark = pytest.mark.usefixtures("rerun")

# -- layers, normalisations and reductions do not see padding -------------------------------------

LAYERS = {
    "GIN": lambda i, o: pyg.GINConv(mlp(i, o)),
    "SAGE": pyg.SAGEConv,
    "SAGE-max": lambda i, o: pyg.SAGEConv(i, o, aggr="max"),
    "GraphConv-mean": lambda i, o: pyg.GraphConv(i, o, aggr="mean"),
    "GCN": pyg.GCNConv,
    "GAT": lambda i, o: pyg.GATConv(i, o // 2, heads=2),
    "Transformer": pyg.TransformerConv,
}
NORMS = {
    "BatchNorm": lambda: pyg.BatchNorm(8),
    "BatchNorm without statistics": lambda: BatchNorm1d(8, track_running_stats=False),
    "BatchNorm without weights": lambda: BatchNorm1d(8, affine=False),
    "GraphNorm": lambda: pyg.GraphNorm(8),
    "GraphSizeNorm": pyg.GraphSizeNorm,
    "InstanceNorm": lambda: pyg.InstanceNorm(8),
    "LayerNorm graph": lambda: pyg.LayerNorm(8, mode="graph"),
    "LayerNorm node": lambda: pyg.LayerNorm(8, mode="node"),
    "MeanSubtractionNorm": pyg.MeanSubtractionNorm,
    "PairNorm": pyg.PairNorm,
    "PairNorm individually": lambda: pyg.PairNorm(scale_individually=True),
}
BATCHED = ("GraphNorm", "GraphSizeNorm", "InstanceNorm", "LayerNorm graph", "PairNorm",
           "MeanSubtractionNorm")  # fmt: skip
add = pyg.global_add_pool
POOLS = {
    "add": add,
    "mean": pyg.global_mean_pool,
    "max": pyg.global_max_pool,
    "softmax": pyg.SoftmaxAggregation(),
    "all rows, mean": lambda x, batch: add(x * x.mean(0), batch),
    "all rows, max": lambda x, batch: add(x - x.max(dim=0).values, batch),
    "all rows, std": lambda x, batch: add(x / x.std(dim=0), batch),
    "all rows, no batch": lambda x, batch: add(x + add(x, None), batch),
}


@pytest.mark.each
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_the_unpadded_call(name, mode, batches, replayed):
    torch.manual_seed(1)
    network = Network(LAYERS[name], pyg.BatchNorm(8)).double()
    same(network.train(mode == "train"), batches)
    replayed(len(batches) - 3)


@pytest.mark.parametrize("patched", [False, True])
def test_edge_features(patched, batches, replayed, always):
    network = Network(lambda i, o: pyg.GINEConv(mlp(i, o), edge_dim=3), edges=True).double()
    with pyg_accel.patched(network) if patched else io.StringIO():
        same(network, batches)
    replayed(len(batches) - 3)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "name, batched", [*((n, False) for n in NORMS), *((n, True) for n in BATCHED)]
)
def test_normalisations_do_not_see_padding(name, batched, batches, replayed):
    same(Network(pyg.SAGEConv, NORMS[name](), batched=batched).double(), batches)
    replayed(len(batches) - 3)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", POOLS)
def test_reductions_do_not_see_padding(name, batches, replayed):
    same(Network(pyg.SAGEConv, pool=POOLS[name]).double(), batches)
    replayed(len(batches) - 3)


# -- arguments ------------------------------------------------------------------------------------


def test_a_number_of_graphs_may_be_given(batches, replayed):
    def forward(self: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor,
                batch_size: int) -> Tensor:  # fmt: skip
        return pyg.global_mean_pool(self.conv(x, edge_index), batch, size=batch_size)

    same(conv(forward), [b | {"batch_size": n} for b, n in zip(batches, SIZES, strict=True)])
    replayed(len(batches) - 3)


def of_weights(batches: list[Inputs]) -> list[Inputs]:
    return [some([b], "x", "edge_index")[0] | {"edge_weight": b["edge_attr"][:, 0].abs()}
            for b in batches]  # fmt: skip


def test_sampled_batches_have_no_batch_vector(batches, replayed):
    same(sampled(), of_weights(batches))
    replayed(len(batches) - 3)


def test_argument_names_of_the_user(batches, replayed):
    def forward(self: Any, atoms: Tensor, bonds: Tensor, strength: Tensor, segment: Tensor) -> Any:
        return pyg.global_mean_pool(self.inner(atoms, bonds, strength), segment)

    roles = {"atoms": "nodes", "bonds": "edge_index", "strength": "edges", "segment": "batch"}
    calls = [(b["x"], b["edge_index"], b["edge_attr"][:, 0], b["batch"]) for b in batches]
    same(module(forward, inner=sampled()), calls, roles=roles)
    replayed(len(batches) - 3)


def test_a_batch_object_is_an_argument_too(replayed):
    def forward(self: Any, data: Data) -> Tensor:
        return pyg.global_mean_pool(self.conv(data.x, data.edge_index).relu(), data.batch)

    eager = module(forward, conv=pyg.SAGEConv(6, 4))
    fast = pyg_accel.graphed(eager)
    for _ in range(8):
        graphs = [
            Data(x=torch.randn(n, 6), edge_index=torch.randint(n, (2, 3 * n)), name=f"molecule {n}")
            for n in torch.randint(4, 10, (6,)).tolist()
        ]
        data = Batch.from_data_list(graphs)
        torch.testing.assert_close(fast(data), eager(data))
        assert data.x.size(0) == data.num_nodes
    replayed(5)


def test_an_argument_that_does_not_go_along_is_named(batches, reasons):
    odd = conv(lambda self, x, edge_index, odd: self.conv(x, edge_index) + odd.sum())
    fast = pyg_accel.graphed(odd)
    for i, inputs in enumerate(batches):
        fast(inputs["x"], inputs["edge_index"], torch.ones(3 + i % 4))
    assert any("'odd' changes its size" in reason for reason in reasons())


def test_one_odd_batch_is_eager(batches, replays, reasons):
    calls = []
    for step, inputs in enumerate(batches):
        shift = torch.randn(1 if step == 6 else len(inputs["x"]), 4, dtype=torch.float64)
        calls.append((inputs["x"], inputs["edge_index"], shift))
    same(conv(lambda self, x, edge_index, shift: self.conv(x, edge_index) + shift), calls)
    assert len(reasons()) == 1 and replays() == len(batches) - 4


def test_an_argument_changed_in_place_is_read_again(replays):
    eager, x = pyg.SAGEConv(3, 3), torch.randn(9, 3)
    edge_index = torch.randint(9, (2, 30))
    fast = pyg_accel.graphed(eager)
    for step in range(16):
        if step in (6, 11):
            edge_index[0] = edge_index[0].flip(0)
            x += 1
        torch.testing.assert_close(fast(x, edge_index), eager(x, edge_index))
    assert replays() > 6


HALVES = {
    "chunk": lambda self, x, edge_index: between(self.conv, *x.chunk(2), edge_index),
    "slice": lambda self, x, edge_index: between(
        self.conv, x[: len(x) // 2], x[len(x) // 2 :], edge_index
    ),
}


def between(layer: Any, one: Tensor, other: Tensor, edge_index: Tensor) -> Tensor:
    return layer((one, other), edge_index % len(other))


@pytest.mark.parametrize("take", HALVES)
def test_halves_of_the_nodes_are_refused_before_edges_of_padding_end_outside(
    take, batches, stayed_eager
):
    calls = [{"x": b["x"][: len(b["x"]) // 2 * 2], "edge_index": b["edge_index"] % 10}
             for b in batches]  # fmt: skip
    same(conv(HALVES[take], 6), calls)
    assert "a part of its nodes" in stayed_eager()


def test_slices_of_a_fixed_number_of_first_nodes(batches, replayed):
    first = conv(lambda self, x, edge_index: self.conv(x, edge_index)[:3], 6)
    same(first, some(batches, "x", "edge_index"))
    replayed(len(batches) - 3)


def test_an_id_of_padding_is_refused(batches):
    fast, calls = pyg_accel.graphed(sampled()), of_weights(batches)
    for call in calls:
        fast(**call)
    assert fast.captures
    bad = calls[-2]["edge_index"].clone()
    bad[0, 3] = len(calls[-2]["x"])
    with pytest.raises(RuntimeError, match="found a node id that is as large as the number"):
        fast(**calls[-2] | {"edge_index": bad})


@pytest.mark.parametrize("of_a_step", [False, True], ids=["model", "step"])
def test_arguments_that_are_no_tensors_are_refused_by_name(of_a_step):
    x, edge_index, gcn = torch.randn(20, 3), torch.randint(20, (2, 60)), pyg.GCN(3, 3, 2)
    run = pyg_accel.graphed(gcn)
    if of_a_step:
        run = pyg_accel.graphed_step(lambda x, edge_index: gcn(x, edge_index).sum())
    for _ in range(5):
        with pytest.raises(TypeError, match=r"'x' to be a tensor .*ndarray \[20, 3\].*from_numpy"):
            run(x.numpy(), edge_index)
        with pytest.raises(TypeError, match="'edge_index' to be a tensor"):
            run(x, edge_index=edge_index.numpy())
        with pytest.raises(TypeError, match=r"'edge_index' to be a tensor \(got a list\)"):
            run(x, edge_index.tolist())
        with pytest.raises(ValueError, match=r"'edge_index' to be whole numbers \[2, E\].*order"):
            run(edge_index, x)


def test_a_model_that_takes_arrays_gets_them(reasons):
    fast = pyg_accel.graphed(module(lambda self, x: torch.from_numpy(x) * 2))
    assert bool((fast(np.ones((5, 3))) == 2).all())
    assert reasons() == {"'x' is a ndarray"}


def test_bad_arguments_of_graphed():
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        pyg_accel.graphed(3)
    with pytest.raises(ValueError, match="max_captures"):
        pyg_accel.graphed(Linear(3, 3), max_captures=0)
    with pytest.raises(ValueError, match="to be a function"):
        pyg_accel.graphed_step(Linear(3, 3))
    with pytest.raises(ValueError, match="expected roles among"):
        pyg_accel.graphed(Linear(3, 3), roles={"x": "rows"})


# -- modes ----------------------------------------------------------------------------------------


def test_autocast(batches, replayed):
    network = Network(pyg.SAGEConv, pyg.BatchNorm(8))
    eager, fast = copy.deepcopy(network), pyg_accel.graphed(network)
    for inputs in batches:
        single = {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16):
            one, two = eager(**single)[0], fast(**single)[0]
        assert one.dtype == two.dtype == torch.bfloat16
        torch.testing.assert_close(two, one, rtol=0.1, atol=0.1)
        two.float().sum().backward()
    replayed(len(batches) - 3)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(context, batches, replays):
    network = Network(pyg.SAGEConv, pyg.BatchNorm(8)).double().eval()
    fast = pyg_accel.graphed(network)
    with context():
        pairs = [(network(**inputs), fast(**inputs)) for inputs in batches]
    for expected, actual in pairs:  # results of earlier calls are not overwritten
        for one, two in zip(expected, actual, strict=True):
            torch.testing.assert_close(two, one)
            assert two.is_inference() == one.is_inference()
    assert replays() == len(batches) - 3


LEAKS = {
    "a size read in Python": lambda x, batch: x / x.size(0),
    "a sum over all rows as a product": lambda x, batch: x + x.new_ones(1, x.size(0)) @ x,
    "a sort over rows": lambda x, batch: x.sort(dim=0).values.flip(0),
    "a cumulated sum backwards": lambda x, batch: x.flip(0).cumsum(0).flip(0),
    "another number of rows": lambda x, batch: x[: x.size(0) // 2],
    "a fixed number of graphs": lambda x, batch: add(x, batch, size=8),
}


@pytest.mark.parametrize("name", LEAKS)
def test_models_that_see_padding_stay_eager_and_say_so(name, batches, stayed_eager):
    def forward(self: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Any:
        return LEAKS[name](self.conv(x, edge_index), batch)

    same(conv(forward), batches)
    stayed_eager()


def test_a_trial_leaves_random_numbers_and_gradients_alone():
    eager = Sequential(Linear(3, 3), torch.nn.Dropout(0.5))
    fast, x = pyg_accel.graphed(copy.deepcopy(eager)), torch.randn(5, 3)
    draws = []
    for run in (eager, fast):
        torch.manual_seed(0)
        for _ in range(7):
            run(x).sum().backward()
        draws.append([torch.rand(1), *(p.grad for p in run.parameters())])
    torch.testing.assert_close(*draws)


# -- backward passes ------------------------------------------------------------------------------


def test_two_calls_before_their_backward_passes(reasons):
    eager = Sequential(Linear(3, 8), ReLU(), Linear(8, 1))
    fast = pyg_accel.graphed(copy.deepcopy(eager))
    x, z = torch.randn(9, 3), torch.randn(9, 3)
    for _ in range(6):
        for run in (eager, fast):
            run.zero_grad()
            (run(x).sum() - run(z).square().sum()).backward()
        for one, other in zip(eager.parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert reasons() == {"an earlier call still awaits its backward pass"}


def test_a_second_backward_pass_is_refused():
    fast, x = pyg_accel.graphed(Linear(3, 3)), torch.randn(9, 3)
    for _ in range(5):
        loss = fast(x).sum()
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated before"):
        loss.backward()


@pytest.mark.parametrize("none", [True, False])
def test_gradients_add_up(none):
    eager = Linear(3, 3)
    fast, x = pyg_accel.graphed(copy.deepcopy(eager)), torch.randn(9, 3)
    for step in range(12):
        for run in (eager, fast):
            if step % 3 == 0:
                run.zero_grad(set_to_none=none)
            run(x * (step + 1)).sum().backward()
        torch.testing.assert_close(fast.weight.grad, eager.weight.grad)


# -- recordings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value, options", [
    *((value, {}) for value in (2.5, 3, True, [1, 2], np.float64(2))),
    *((value, {"dtype": torch.float64}) for value in (2.5, 3, True, [1, 2], np.float64(2))),
    *((value, {"requires_grad": True}) for value in (2.5, np.float64(2))),
])  # fmt: skip
def test_tensors_of_python_numbers_keep_their_values(value, options):
    expected = torch.tensor(value, **options)
    with Functions(CONSTANTS):
        actual = torch.tensor(value, **options)
    assert torch.equal(actual, expected) and actual.dtype == expected.dtype
    assert actual.requires_grad == expected.requires_grad and actual.is_leaf
