"""Padded calls give what unpadded ones do: the function itself is run, so no GPU is needed."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    GCN,
    BatchNorm,
    GATConv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    GraphNorm,
    GraphSizeNorm,
    InstanceNorm,
    LayerNorm,
    MeanSubtractionNorm,
    PairNorm,
    SAGEConv,
    SoftmaxAggregation,
    TransformerConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

import pyg_accel
from pyg_accel.cuda_graphs.engine import Engine
from pyg_accel.cuda_graphs.functions import CONSTANTS, Functions

Inputs = dict[str, Tensor]


pytestmark = pytest.mark.usefixtures("rerun")


def batch_of(graphs: int, seed: int, dtype: torch.dtype = torch.float64) -> Inputs:
    numbers = torch.Generator().manual_seed(seed)
    nodes = torch.randint(4, 12, (graphs,), generator=numbers)
    batch = torch.repeat_interleave(torch.arange(graphs), nodes)
    starts = nodes.cumsum(0) - nodes
    target = torch.randint(len(batch), (2 * len(batch) + seed % 7,), generator=numbers)
    place = torch.rand(len(target), generator=numbers) * nodes[batch[target]]
    return {
        "x": torch.randn(len(batch), 6, generator=numbers, dtype=dtype),
        "edge_index": torch.stack([starts[batch[target]] + place.long(), target]),
        "edge_attr": torch.randn(len(target), 3, generator=numbers, dtype=dtype),
        "batch": batch,
    }


def mlp(rows: int, hidden: int) -> Sequential:
    return Sequential(Linear(rows, hidden), BatchNorm1d(hidden), ReLU(), Linear(hidden, hidden))


class Network(torch.nn.Module):
    """Two layers, a normalisation and a reduction over each graph."""

    def __init__(
        self,
        conv: Callable[[int, int], torch.nn.Module],
        norm: torch.nn.Module | None = None,
        pool: Callable[..., Tensor] = global_mean_pool,
        *,
        edges: bool = False,
        batched: bool = False,
    ) -> None:
        super().__init__()
        self.first, self.second = conv(6, 8), conv(8, 8)
        self.norm, self.pool = norm, pool
        self.edges, self.batched = edges, batched
        self.head = Sequential(Linear(8, 8), BatchNorm1d(8), ReLU(), Linear(8, 2))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Any:
        more = (edge_attr,) if self.edges else ()
        x = self.first(x, edge_index, *more)
        if self.norm is not None:
            x = self.norm(x, batch) if self.batched else self.norm(x)
        x = self.second(x.relu(), edge_index, *more)
        return self.head(self.pool(x, batch)), x


LAYERS = {
    "GIN": lambda i, o: GINConv(mlp(i, o)),
    "SAGE": SAGEConv,
    "SAGE-max": lambda i, o: SAGEConv(i, o, aggr="max"),
    "GraphConv-mean": lambda i, o: GraphConv(i, o, aggr="mean"),
    "GCN": GCNConv,
    "GAT": lambda i, o: GATConv(i, o // 2, heads=2),
    "Transformer": TransformerConv,
}


def train(
    model: torch.nn.Module, batches: list[Inputs], **options: Any
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Outputs, gradients of parameters and arguments, and buffers of eager and padded calls."""
    both: tuple[list[list[Tensor]], list[list[Tensor]]] = ([], [])
    eager = copy.deepcopy(model)
    for run, found in ((eager, both[0]), (pyg_accel.graphed(model, **options), both[1])):
        for inputs in batches:
            run.zero_grad()
            x = inputs["x"].clone().requires_grad_()
            outs = run(**inputs | {"x": x})
            outs = outs if isinstance(outs, tuple) else (outs,)
            numbers = torch.Generator().manual_seed(3)
            weights = [torch.randn(o.shape, generator=numbers, dtype=o.dtype) for o in outs]
            sum((o * w).sum() for o, w in zip(outs, weights, strict=True)).backward()
            grads = [p.grad.clone() for p in run.parameters() if p.grad is not None]
            buffers = [b.clone() for b in run.buffers()]
            found.append([*(o.detach() for o in outs), x.grad, *grads, *buffers])
    return both


def same(both: tuple[list[list[Tensor]], list[list[Tensor]]]) -> None:
    for expected, found in zip(*both, strict=True):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-9)


SIZES = [5, 7, 6, 5, 8, 6, 4, 7, 6, 3]


@pytest.fixture
def batches() -> list[Inputs]:
    return [batch_of(graphs, seed) for seed, graphs in enumerate(SIZES)]


@pytest.mark.each
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_the_unpadded_call(name, mode, batches, replays, reasons):
    torch.manual_seed(1)
    model = Network(LAYERS[name], BatchNorm(8)).double()
    model.train(mode == "train")
    same(train(model, batches))
    assert not reasons()
    assert replays() == len(batches) - 3


@pytest.mark.parametrize("patched", [False, True])
def test_edge_features(patched, batches, replays, reasons, always):
    model = Network(lambda i, o: GINEConv(mlp(i, o), edge_dim=3), edges=True).double()
    with pyg_accel.patched(model) if patched else io.StringIO():
        same(train(model, batches))
    assert not reasons() and replays() == len(batches) - 3


NORMS = {
    "BatchNorm": lambda: BatchNorm(8),
    "BatchNorm without statistics": lambda: BatchNorm1d(8, track_running_stats=False),
    "BatchNorm without weights": lambda: BatchNorm1d(8, affine=False),
    "GraphNorm": lambda: GraphNorm(8),
    "GraphSizeNorm": GraphSizeNorm,
    "InstanceNorm": lambda: InstanceNorm(8),
    "LayerNorm graph": lambda: LayerNorm(8, mode="graph"),
    "LayerNorm node": lambda: LayerNorm(8, mode="node"),
    "MeanSubtractionNorm": MeanSubtractionNorm,
    "PairNorm": PairNorm,
    "PairNorm individually": lambda: PairNorm(scale_individually=True),
}
BATCHED = ("GraphNorm", "GraphSizeNorm", "InstanceNorm", "LayerNorm graph", "PairNorm",
           "MeanSubtractionNorm")  # fmt: skip


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "name, batched", [*((n, False) for n in NORMS), *((n, True) for n in BATCHED)]
)
def test_normalisations_do_not_see_padding(name, batched, batches, replays, reasons):
    model = Network(SAGEConv, NORMS[name](), batched=batched).double()
    same(train(model, batches))
    assert not reasons() and replays() == len(batches) - 3


POOLS = {
    "add": global_add_pool,
    "mean": global_mean_pool,
    "max": global_max_pool,
    "softmax": SoftmaxAggregation(),
    "all rows, mean": lambda x, batch: global_add_pool(x * x.mean(0), batch),
    "all rows, max": lambda x, batch: global_add_pool(x - x.max(dim=0).values, batch),
    "all rows, std": lambda x, batch: global_add_pool(x / x.std(dim=0), batch),
    "all rows, no batch": lambda x, batch: global_add_pool(x + global_add_pool(x, None), batch),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", POOLS)
def test_reductions_do_not_see_padding(name, batches, replays, reasons):
    model = Network(SAGEConv, pool=POOLS[name]).double()
    same(train(model, batches))
    assert not reasons() and replays() == len(batches) - 3


def test_a_number_of_graphs_may_be_given(batches, replays, reasons):
    class Sized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(6, 4).double()

        def forward(
            self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, batch_size: int
        ) -> Tensor:
            return global_mean_pool(self.conv(x, edge_index), batch, size=batch_size)

    for inputs, graphs in zip(batches, SIZES, strict=True):
        inputs["batch_size"] = graphs
    same(train(Sized(), batches))
    assert not reasons() and replays() == len(batches) - 3


class Sampled(torch.nn.Module):
    """What batches of sampled neighbours are given to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = SAGEConv(6, 8), BatchNorm(8), GraphConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        x = self.norm(self.conv(x, edge_index)).relu()
        return self.last(x, edge_index, edge_weight)


def test_sampled_batches_have_no_batch_vector(batches, replays, reasons):
    for inputs in batches:
        inputs.pop("batch")
        inputs["edge_weight"] = inputs.pop("edge_attr")[:, 0].abs()
    same(train(Sampled().double(), batches))
    assert not reasons() and replays() == len(batches) - 3


def test_argument_names_of_the_user(batches, replays, reasons):
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Sampled().double()

        def forward(self, atoms: Tensor, bonds: Tensor, strength: Tensor, segment: Tensor) -> Any:
            return global_mean_pool(self.inner(atoms, bonds, strength), segment)

    model = Named()
    roles = {"atoms": "nodes", "bonds": "edge_index", "strength": "edges", "segment": "batch"}
    fast = pyg_accel.graphed(copy.deepcopy(model), roles=roles)
    for inputs in batches:
        given = (inputs["x"], inputs["edge_index"], inputs["edge_attr"][:, 0], inputs["batch"])
        torch.testing.assert_close(fast(*given), model(*given))
    assert not reasons() and replays() == len(batches) - 3


def test_autocast(batches, replays, reasons):
    model = Network(SAGEConv, BatchNorm(8))
    eager = copy.deepcopy(model)
    fast = pyg_accel.graphed(model)
    for inputs in batches:
        single = {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16):
            one, two = eager(**single)[0], fast(**single)[0]
        assert one.dtype == two.dtype == torch.bfloat16
        torch.testing.assert_close(two, one, rtol=0.1, atol=0.1)
        two.float().sum().backward()
    assert not reasons() and replays() == len(batches) - 3


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(context, batches, replays):
    model = Network(SAGEConv, BatchNorm(8)).double().eval()
    fast = pyg_accel.graphed(model)
    with context():
        for inputs in batches:
            for one, two in zip(model(**inputs), fast(**inputs), strict=True):
                torch.testing.assert_close(two, one)
                assert two.is_inference() == one.is_inference()
    assert replays() == len(batches) - 3


class Reads(torch.nn.Module):
    """A layer, and something of one's own after it."""

    def __init__(self, then: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.then = SAGEConv(6, 4).double(), then

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        return self.then(self.conv(x, edge_index), batch)


LEAKS = {
    "a size read in Python": lambda x, batch: x / x.size(0),
    "a sum over all rows as a product": lambda x, batch: x + x.new_ones(1, x.size(0)) @ x,
    "a sort over rows": lambda x, batch: x.sort(dim=0).values.flip(0),
    "a cumulated sum backwards": lambda x, batch: x.flip(0).cumsum(0).flip(0),
    "another number of rows": lambda x, batch: x[: x.size(0) // 2],
    "a fixed number of graphs": lambda x, batch: global_add_pool(x, batch, size=8),
}


@pytest.mark.parametrize("name", LEAKS)
def test_models_that_see_padding_stay_eager_and_say_so(name, batches, replays, reasons):
    same(train(Reads(LEAKS[name]), batches))
    assert replays() == 0
    assert len(reasons()) == 1


def test_results_and_gradients_of_earlier_calls_are_not_overwritten(batches):
    model = pyg_accel.graphed(Network(SAGEConv).double().eval())
    with torch.no_grad():
        outs = [model(**inputs)[0] for inputs in batches]
        again = [model._original(**inputs)[0] for inputs in batches]
    for one, other in zip(outs, again, strict=True):
        torch.testing.assert_close(one, other)


def test_a_batch_object_is_an_argument_too(replays, reasons):
    class OfData(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(6, 4)

        def forward(self, data: Data) -> Tensor:
            return global_mean_pool(self.conv(data.x, data.edge_index).relu(), data.batch)

    model = OfData()
    fast = pyg_accel.graphed(model)
    for step in range(8):
        graphs = [
            Data(x=torch.randn(n, 6), edge_index=torch.randint(n, (2, 3 * n)), name=f"molecule {n}")
            for n in torch.randint(4, 10, (6,)).tolist()
        ]
        data = Batch.from_data_list(graphs)
        torch.testing.assert_close(fast(data), model(data))
        assert data.x.size(0) == data.num_nodes, step
    assert not reasons() and replays() == 5


def test_an_argument_that_does_not_go_along_is_named(batches, reasons):
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(6, 4)

        def forward(self, x: Tensor, edge_index: Tensor, odd: Tensor) -> Tensor:
            return self.conv(x, edge_index) + odd.sum()

    fast = pyg_accel.graphed(Odd())
    for i, inputs in enumerate(batches):
        fast(inputs["x"].float(), inputs["edge_index"], torch.ones(3 + i % 4))
    assert any("'odd' changes its size" in reason for reason in reasons())


def test_an_attribute_set_in_each_call_is_named(reasons):
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = Linear(3, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x)

    model = Counts()
    fast, x = pyg_accel.graphed(model), torch.randn(5, 3)
    for _ in range(7):
        fast(x)
    assert reasons() == {"each call changes calls"}
    assert model.calls == 7


def test_a_trial_leaves_random_numbers_and_gradients_alone():
    model = Sequential(Linear(3, 3), torch.nn.Dropout(0.5))
    fast, x = pyg_accel.graphed(copy.deepcopy(model)), torch.randn(5, 3)
    draws = []
    for run in (model, fast):
        torch.manual_seed(0)
        for _ in range(7):
            run(x).sum().backward()
        draws.append([torch.rand(1), *(p.grad for p in run.parameters())])
    for one, other in zip(*draws, strict=True):
        torch.testing.assert_close(one, other)


def test_a_changed_model_is_recorded_again(replays):
    model = Sequential(Linear(3, 3), torch.nn.Dropout(0.5), Linear(3, 3))
    fast, x = pyg_accel.graphed(model), torch.randn(5, 3)

    def run() -> None:
        for _ in range(6):
            torch.manual_seed(0)
            found = fast(x)
            torch.manual_seed(0)
            torch.testing.assert_close(found, model(x))
            found.sum().backward()

    run()
    before = replays()
    for change in (
        lambda: model.eval(),
        lambda: fast.train(),
        lambda: setattr(model[1], "p", 0.1),
        lambda: setattr(model[0], "weight", torch.nn.Parameter(torch.ones(3, 3))),
        lambda: setattr(model[0].weight, "data", torch.zeros(3, 3)),
        lambda: model[2].requires_grad_(False),
        lambda: setattr(model, "0", Linear(3, 3)),
    ):
        change()
        run()
        assert replays() > before
        before = replays()
    with torch.no_grad():
        model[0].weight += 1  # values are read anew, nothing is recorded
    assert len(fast.captures) == 7  # train() led back to the first
    run()
    assert replays() == before + 6


def test_an_argument_changed_in_place_is_read_again(replays):
    model, x = SAGEConv(3, 3), torch.randn(9, 3)
    edge_index = torch.randint(9, (2, 30))
    fast = pyg_accel.graphed(model)
    for step in range(16):
        if step in (6, 11):
            edge_index[0] = edge_index[0].flip(0)
            x += 1
        torch.testing.assert_close(fast(x, edge_index), model(x, edge_index))
    assert replays() > 6


def test_two_calls_before_their_backward_passes(reasons):
    model = Sequential(Linear(3, 8), ReLU(), Linear(8, 1))
    fast = pyg_accel.graphed(copy.deepcopy(model))
    x, z = torch.randn(9, 3), torch.randn(9, 3)
    for _ in range(6):
        for run in (model, fast):
            run.zero_grad()
            (run(x).sum() - run(z).square().sum()).backward()
        for one, other in zip(model.parameters(), fast.parameters(), strict=True):
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
    model = Linear(3, 3)
    fast, x = pyg_accel.graphed(copy.deepcopy(model)), torch.randn(9, 3)
    for step in range(12):
        for run in (model, fast):
            if step % 3 == 0:
                run.zero_grad(set_to_none=none)
            run(x * (step + 1)).sum().backward()
        torch.testing.assert_close(fast.weight.grad, model.weight.grad)


@pytest.mark.parametrize("value", [2.5, 3, True, [1, 2], np.float64(2)])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}, {"requires_grad": True}])
def test_tensors_of_python_numbers_keep_their_values(value, options):
    if options.get("requires_grad") and not isinstance(value, float):
        pytest.skip("no gradients of integers")
    expected = torch.tensor(value, **options)
    with Functions(CONSTANTS):
        found = torch.tensor(value, **options)
    assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert found.requires_grad == expected.requires_grad and found.is_leaf


def test_hooks_are_called(reasons):
    model, calls = Sequential(Linear(3, 3)), []
    model[0].register_forward_hook(lambda *_: calls.append(0))
    fast = pyg_accel.graphed(model)
    for _ in range(7):
        fast(torch.randn(2, 3))
    assert len(calls) == 7
    assert reasons() == {"a hook on one of its modules"}


def test_at_most_so_many_recordings(batches):
    fast = pyg_accel.graphed(Linear(3, 3), max_captures=2, dynamic=False)
    for rows in (2, 3, 4, 5, 6):
        for _ in range(5):
            fast(torch.randn(rows, 3))
    assert len(fast.captures) == 2
    fast.release()
    assert fast.captures == []
    for _ in range(5):
        fast(torch.randn(6, 3))
    assert len(fast.captures) == 1


class Halves(torch.nn.Module):
    """A layer between two halves of the nodes; or over all of them, of which it returns some."""

    def __init__(self, take: str) -> None:
        super().__init__()
        self.take, self.conv = take, SAGEConv(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.take == "some":
            return self.conv(x, edge_index)[:3]
        one, other = x.chunk(2) if self.take == "chunk" else (x[: len(x) // 2], x[len(x) // 2 :])
        return self.conv((one, other), edge_index % len(other))


@pytest.mark.parametrize("take", ["chunk", "slice"])
def test_halves_of_the_nodes_are_refused_before_edges_of_padding_end_outside(
    take, batches, replays, reasons
):
    batches = [{"x": b["x"][: len(b["x"]) // 2 * 2], "edge_index": b["edge_index"] % 10}
               for b in batches]  # fmt: skip
    same(train(Halves(take).double(), batches))
    (reason,) = reasons()
    assert "a part of its nodes" in reason and replays() == 0


def test_slices_of_a_fixed_number_of_first_nodes(batches, replays, reasons):
    batches = [{name: b[name] for name in ("x", "edge_index")} for b in batches]
    same(train(Halves("some").double(), batches))
    assert not reasons() and replays() == len(batches) - 3


def test_an_id_of_padding_is_refused(batches):
    model = pyg_accel.graphed(Sampled().double())
    for inputs in batches:
        model(inputs["x"], inputs["edge_index"], inputs["edge_attr"][:, 0])
    assert model.captures
    bad = batches[-2]["edge_index"].clone()
    bad[0, 3] = len(batches[-2]["x"])
    with pytest.raises(RuntimeError, match="found a node id that is as large as the number"):
        model(batches[-2]["x"], bad, batches[-2]["edge_attr"][:, 0])


def test_one_odd_batch_is_eager(batches, replays, reasons):
    class Shifts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(6, 4).double()

        def forward(self, x: Tensor, edge_index: Tensor, shift: Tensor) -> Tensor:
            return self.conv(x, edge_index) + shift

    fast = pyg_accel.graphed(Shifts())
    for step, inputs in enumerate(batches):
        shift = torch.randn(1 if step == 6 else len(inputs["x"]), 4, dtype=torch.float64)
        with torch.no_grad():
            found = fast(inputs["x"], inputs["edge_index"], shift)
            expected = fast._original(inputs["x"], inputs["edge_index"], shift)
        torch.testing.assert_close(found, expected)
    assert len(reasons()) == 1 and replays() == len(batches) - 4


def test_sizes_that_never_come_again_do_not_make_recordings_for_ever(replays, reasons):
    fast = pyg_accel.graphed(Sampled(), max_captures=2)
    for rows in [10, 11, 12, 13, *(9 + 2**k for k in range(5, 12)), 12, 13, 14]:
        x, edge_index = torch.randn(rows, 6), torch.randint(rows, (2, 3 * rows))
        fast(x, edge_index, torch.rand(3 * rows))
    assert reasons() == {"recaptured too often: 4 captures, 4 replays"}
    assert len(fast.captures) == 2
    assert replays() >= 4 + 3  # any that is large enough will do then


def test_sizes_that_change_are_named_where_they_must_not(reasons):
    fast = pyg_accel.graphed(Linear(3, 3), dynamic=False)
    for rows in range(2, 12):
        fast(torch.randn(rows, 3))
    assert reasons() == {"sizes change, and dynamic=False"}


def test_the_wrapper_is_the_model_in_all_but_its_calls():
    model = Network(SAGEConv, BatchNorm(8))
    fast = pyg_accel.graphed(model)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert fast.first is model.first
    fast.eval()
    assert not model.training and not model.first.training and not fast.training
    model.train()
    assert fast.training
    fast.note = 3
    assert model.note == 3
    fast.double()
    assert model.head[0].weight.dtype == torch.float64
    other = pickle.loads(pickle.dumps(fast))
    assert isinstance(other, pyg_accel.cuda_graphs.Graphed)
    twin = copy.deepcopy(fast)
    assert twin.first is not model.first
    fast.load_state_dict(twin.state_dict())
    assert pyg_accel.graphed(fast)._original is model


def test_without_a_gpu_calls_are_eager(monkeypatch, reasons):
    from pyg_accel.cuda_graphs.capture import Captured

    monkeypatch.setattr(Engine, "recorder", Captured)
    fast, x = pyg_accel.graphed(Linear(3, 3)), torch.randn(5, 3)
    for _ in range(6):
        torch.testing.assert_close(fast(x), fast._original(x))
    assert reasons() == {"no CUDA graphs on device 'cpu'"}


@pytest.mark.parametrize("of_a_step", [False, True], ids=["model", "step"])
def test_arguments_that_are_no_tensors_are_refused_by_name(of_a_step):
    x, edge_index, model = torch.randn(20, 3), torch.randint(20, (2, 60)), GCN(3, 3, 2)
    run = pyg_accel.graphed(model)
    if of_a_step:

        def step(x: Tensor, edge_index: Tensor) -> Tensor:
            return model(x, edge_index).sum()

        run = pyg_accel.graphed_step(step)
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
    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Tensor:
            return torch.from_numpy(x) * 2

    x = np.ones((5, 3))
    assert bool((pyg_accel.graphed(Net())(x) == 2).all())
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


def stepper(model: torch.nn.Module, loss: Callable[..., Tensor], name: str) -> Callable[..., Any]:
    optimizer = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), 1e-4),
        "momentum": lambda: torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9),
        "Adam": lambda: torch.optim.Adam(model.parameters(), 1e-3),
    }[name]()

    def step(x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        out = model(x, edge_index, edge_attr, batch)[1]
        value = loss(out, y)
        value.backward()
        optimizer.step()
        return value, out

    step.optimizer = optimizer
    return step


LOSSES = {
    "cross_entropy": lambda out, y: F.cross_entropy(out, y),
    "label smoothing": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "nll_loss": lambda out, y: F.nll_loss(out.log_softmax(-1), y),
    "mse_loss": lambda out, y: F.mse_loss(out, F.one_hot(y, 8).to(out)),
    "sum": lambda out, y: F.mse_loss(out, F.one_hot(y, 8).to(out), reduction="sum"),
    "by hand": lambda out, y: (out - F.one_hot(y, 8)).square().mean(),
    "bce": lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 8).to(out)),
}


@pytest.mark.one_of(5)
@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "Adam"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_leaves_padding_out_of_its_loss(name, optimizer, batches, replays, reasons):
    model = Network(SAGEConv, BatchNorm(8)).double()
    eager = copy.deepcopy(model)
    one = stepper(eager, LOSSES[name], optimizer)
    two = pyg_accel.graphed_step(stepper(model, LOSSES[name], optimizer), modules=[model])
    for seed, inputs in enumerate(batches + batches):
        y = torch.randint(8, (len(inputs["x"]),), generator=torch.Generator().manual_seed(seed))
        for found, expected in zip(two(**inputs, y=y), one(**inputs, y=y), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-8, atol=1e-8)
            assert not found.requires_grad
    assert not reasons()
    assert replays() >= 10
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-6, atol=1e-8)


def test_a_step_without_its_modules_is_eager(reasons):
    models = iter([Linear(3, 3)])
    hidden = next(models)

    class Holder:
        def __call__(self, x: Tensor) -> Tensor:
            return self.get()(x).sum()

        def get(self) -> torch.nn.Module:
            return globals()["_HIDDEN"]

    globals()["_HIDDEN"] = hidden
    step = pyg_accel.graphed_step(Holder().__call__)
    for _ in range(6):
        step(torch.randn(2, 3))
    assert reasons() == {"it refers to no module: pass modules="}


def test_settings_of_an_optimizer_are_part_of_the_kind(batches, replays, reasons):
    model = Network(SAGEConv).double()
    eager = copy.deepcopy(model)
    one = stepper(eager, LOSSES["mse_loss"], "SGD")
    inner = stepper(model, LOSSES["mse_loss"], "SGD")
    two = pyg_accel.graphed_step(inner, modules=[model])
    for epoch in range(3):
        for step in (one, inner):
            step.optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
        for inputs in batches:
            y = torch.zeros(len(inputs["x"]), dtype=torch.long)
            torch.testing.assert_close(two(**inputs, y=y)[0], one(**inputs, y=y)[0].detach())
    assert not reasons() and replays() >= 15


@pytest.mark.parametrize("named", [False, True])
def test_optimizers_whose_settings_have_lists(named, replays, reasons):
    """As those of named parameters do, and betas that come from a file of settings."""
    model = Linear(3, 3)
    optimizers = [
        torch.optim.AdamW(model.named_parameters() if named else model.parameters(), amsgrad=True),
        torch.optim.SGD([{"params": [model.weight], "tags": ["a", "b"]}], lr=0.1, momentum=0.5),
    ]
    optimizers[0].param_groups[0]["betas"] = [0.8, 0.9]

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    fast = pyg_accel.graphed_step(step)
    losses = [float(fast(torch.ones(4, 3))) for _ in range(8)]
    assert losses[-1] < losses[0] and not reasons() and replays() > 0


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    globals().pop("_HIDDEN", None)
