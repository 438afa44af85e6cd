"""``to_maxk`` swaps pairs of ReLU and layer, keeps parameters, and says what it did."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, GATConv, GCNConv, GraphSAGE, SAGEConv, Sequential

import pyg_accel
from pyg_accel.layers import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv

N, IN, HIDDEN, OUT, K = 40, 9, 16, 3, 3
X, EDGES = torch.randn(N, IN), torch.randint(N, (2, 150))


class Functional(nn.Module):
    """ReLU in code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(IN, HIDDEN), GCNConv(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def sequence(*layers) -> Sequential:
    return Sequential("x, edge_index", [(GCNConv(IN, HIDDEN), "x, edge_index -> x"), *layers])


@pytest.mark.parametrize("kind", [GraphSAGE, GCN, GIN])
@pytest.mark.parametrize("norm", [None, "batch_norm"])
def test_stacks_of_pyg(kind, norm):
    model = kind(IN, HIDDEN, 3, OUT, norm=norm)
    swapped = pyg_accel.to_maxk(model, K)
    assert type(swapped) is kind and list(swapped.state_dict()) == list(model.state_dict())
    assert [s.swapped for s in swapped.maxk_swaps] == [False, True, True]
    assert swapped.act is None and model.act is not None, "the model that was given is as it was"
    expected = copy.deepcopy(model)
    expected.act = MaxK(K)
    torch.testing.assert_close(swapped(X, EDGES), expected(X, EDGES))
    for ours in swapped.convs[1:]:
        assert isinstance(ours, (MaxKSAGEConv, MaxKGCNConv, MaxKGINConv)) and ours.k == K


def test_jumping_knowledge_keeps_its_relu():
    model = GraphSAGE(IN, HIDDEN, 3, OUT, jk="cat")
    swapped = pyg_accel.to_maxk(model, K)
    assert swapped.act is not None
    assert {s.relu_kept for s in swapped.maxk_swaps if s.swapped} == {
        "jumping knowledge reads it as well"
    }
    swapped(X, EDGES).sum().backward()


def test_layers_that_project_are_swapped_and_keep_the_relu_in_front():
    swapped = pyg_accel.to_maxk(GraphSAGE(IN, HIDDEN, 2, OUT, project=True), K)
    assert all(s.swapped for s in swapped.maxk_swaps) and swapped.act is not None


def test_a_model_that_holds_a_stack_keeps_its_class():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gnn, self.head = GCN(IN, HIDDEN, 2), nn.Linear(HIDDEN, OUT)

        def forward(self, x, edge_index):
            return self.head(self.gnn(x, edge_index)) if x.sum() > -1e9 else x

    swapped = pyg_accel.to_maxk(Model(), K)
    assert type(swapped) is Model and isinstance(swapped.gnn.convs[1], MaxKGCNConv)
    assert [s.name for s in swapped.maxk_swaps] == ["gnn.convs.0", "gnn.convs.1"]


@pytest.mark.filterwarnings("ignore")
def test_sequential_models_of_pyg():
    layers = [
        (GCNConv(IN, HIDDEN), "x, edge_index -> x"),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        (GCNConv(HIDDEN, HIDDEN), "x, edge_index -> x"),
        nn.ReLU(inplace=True),
        nn.Linear(HIDDEN, OUT),
    ]
    model = Sequential("x, edge_index", layers).eval()
    Sequential("x, e", [(GCNConv(IN, HIDDEN), "x, e -> x")])  # PyG leaves its forward at the class
    swapped = pyg_accel.to_maxk(model, K)
    assert [s.swapped for s in swapped.maxk_swaps] == [False, True]
    h = model[0](X, EDGES)
    expected = model[5](model[3](MaxK(K)(h), EDGES).relu())
    torch.testing.assert_close(swapped(X, EDGES), expected)


def test_a_relu_that_others_read_stays():
    model = sequence(
        nn.ReLU(),
        (GCNConv(HIDDEN, HIDDEN), "x, edge_index -> y"),
        (torch.add, "x, y -> x"),
        nn.ReLU(),
        nn.Dropout(0.5),
        (GCNConv(HIDDEN, HIDDEN), "x, edge_index -> y"),
    ).eval()
    swapped = pyg_accel.to_maxk(model, K)
    assert [s.relu_kept for s in swapped.maxk_swaps] == ["", "module_3 reads it as well", ""]
    h = model[0](X, EDGES).relu()
    h = h + model[2](MaxK(K)(h), EDGES)
    torch.testing.assert_close(swapped(X, EDGES), model[6](MaxK(K)(h), EDGES))


def test_a_relu_with_hooks_or_in_place_of_what_others_may_read_stays():
    relu = nn.ReLU()
    relu.register_forward_hook(lambda module, args, out: None)
    hooked = sequence(relu, (GCNConv(HIDDEN, HIDDEN), "x, edge_index -> x"))
    assert "it has hooks" in str(pyg_accel.to_maxk(hooked, K).maxk_swaps)
    shared = sequence(
        (nn.Identity(), "x -> y"),
        (nn.ReLU(inplace=True), "x -> x"),
        (GCNConv(HIDDEN, HIDDEN), "x, edge_index -> x"),
        (torch.add, "x, y -> x"),
    )
    swapped = pyg_accel.to_maxk(shared, K)
    assert "it works in place" in str(swapped.maxk_swaps)
    h = shared[0](X, EDGES).relu()
    torch.testing.assert_close(swapped(X, EDGES), h + shared[3](MaxK(K)(h), EDGES))


def test_stacks_and_sequences_inside_of_models_are_swapped_and_code_is_not():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sequence = sequence(nn.ReLU(), (SAGEConv(HIDDEN, HIDDEN), "x, edge_index -> x"))
            self.code = Functional()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.sequence(x, edge_index) + self.code(x, edge_index)

    model = Model()
    swapped = pyg_accel.to_maxk(model, K)
    assert type(swapped) is Model and list(swapped.state_dict()) == list(model.state_dict())
    assert {s.name for s in swapped.maxk_swaps if s.swapped} == {"sequence.module_2"}
    assert str(swapped.maxk_swaps).count("write a MaxK layer there") == 2
    h = model.sequence[2](MaxK(K)(model.sequence[0](X, EDGES)), EDGES)
    torch.testing.assert_close(swapped(X, EDGES), h + model.code(X, EDGES))


def test_without_a_copy_the_parameters_are_the_very_same():
    for model in (
        GraphSAGE(IN, HIDDEN, 2, OUT),
        sequence(nn.ReLU(), (SAGEConv(HIDDEN, HIDDEN), "x, edge_index -> x")),
    ):
        before = dict(model.named_parameters())
        swapped = pyg_accel.to_maxk(model, K, copy=False)
        assert swapped is model
        assert all(before[name] is p for name, p in swapped.named_parameters())


def twice() -> Sequential:
    conv = SAGEConv(HIDDEN, HIDDEN)
    return sequence(nn.ReLU(), (conv, "x, edge_index -> x"), (conv, "x, edge_index -> x"))


@pytest.mark.parametrize(
    ("build", "k", "reason"),
    [
        (Functional, K, "write a MaxK layer there, in place of it and its ReLU"),
        (twice, K, "the model has it in several places"),
        (
            lambda: sequence(nn.ELU(), (SAGEConv(HIDDEN, HIDDEN), "x, edge_index -> x")),
            K,
            "no ReLU in front of it",
        ),
        (lambda: GAT(IN, HIDDEN, 2, OUT), K, "MaxK layers exist for"),
        (lambda: nn.Linear(2, 2), K, "no message passing layers"),
        (lambda: GraphSAGE(IN, HIDDEN, 2, OUT, aggr="max"), K, "aggr=MaxAggregation()"),
        (lambda: GraphSAGE(IN, HIDDEN, 2, OUT, act="elu"), K, "ELU in front of it, not ReLU"),
        (lambda: GraphSAGE(IN, HIDDEN, 2, OUT, act=None), K, "nothing in front of it, not ReLU"),
        (lambda: GraphSAGE(IN, HIDDEN, 2, OUT), HIDDEN, "leave no nonlinearity"),
        (
            lambda: GCN(IN, HIDDEN, 2, act_first=True, norm="batch_norm"),
            K,
            "a normalisation between",
        ),
        (lambda: SAGEConv(IN, HIDDEN), K, "it is the whole model"),
        (lambda: GATConv(IN, HIDDEN), K, "MaxK layers exist for"),
    ],
)
def test_models_without_swappable_layers_are_refused_with_reasons(build, k, reason):
    model = build()
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=r"nothing of .* can be put on MaxK") as error:
        pyg_accel.to_maxk(model, k)
    assert reason in str(error.value)
    assert [type(m) for m in model.modules()] == before


def test_things_that_are_no_models_and_no_numbers():
    with pytest.raises(ValueError, match=r"expected 'model' to be a torch\.nn\.Module"):
        pyg_accel.to_maxk(GraphSAGE, K)
    with pytest.raises(ValueError, match="expected 'copy'"):
        pyg_accel.to_maxk(GraphSAGE(IN, HIDDEN, 2), K, copy="yes")
    with pytest.raises(ValueError, match="expected 'k'"):
        pyg_accel.to_maxk(GraphSAGE(IN, HIDDEN, 2), 0)


def test_the_result_can_be_copied_and_saved():
    swapped = pyg_accel.to_maxk(GraphSAGE(IN, HIDDEN, 2, OUT), K).eval()
    file = io.BytesIO()
    torch.save(swapped, file)
    file.seek(0)
    expected = swapped(X, EDGES)
    for other in (copy.deepcopy(swapped), torch.load(file, weights_only=False)):
        assert str(other.maxk_swaps) == str(swapped.maxk_swaps)
        torch.testing.assert_close(other(X, EDGES), expected, rtol=0, atol=0)
