"""``to_maxk`` swaps pairs of ReLU and layer, keeps parameters, and says what it did."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GAT, GCN, GIN, GATConv, GCNConv, GraphSAGE, SAGEConv, Sequential

import pyg_accel
from pyg_accel.layers import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv

N, IN, HIDDEN, OUT, K = 40, 9, 16, 3, 3
X, EDGES = torch.randn(N, IN), torch.randint(N, (2, 150))


def replace_relu(model: nn.Module) -> nn.Module:
    """The same model with MaxK written out in the place of its activation modules."""
    found = copy.deepcopy(model)
    for parent in list(found.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(parent, name, MaxK(K))
    return found


class Functional(nn.Module):
    """ReLU as people write it: functions, methods, with normalisation and dropout around it."""

    def __init__(self, act=None) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(IN, HIDDEN), GCNConv(HIDDEN, HIDDEN)
        self.third, self.norm = SAGEConv(HIDDEN, OUT), nn.BatchNorm1d(HIDDEN)
        self.act = act

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        relu = self.act or F.relu
        x = relu(self.norm(self.first(x, edge_index)))
        x = F.dropout(x, p=0.4, training=self.training)
        x = self.second(x, edge_index, edge_weight)
        x = x.relu() if self.act is None else relu(x)
        return F.log_softmax(self.third(x, edge_index), dim=-1)


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(IN, HIDDEN), SAGEConv(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        return x + self.second(x, edge_index)


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


def test_models_that_people_write():
    torch.manual_seed(0)
    model = Functional()
    expected = Functional(MaxK(K))
    expected.load_state_dict(model.state_dict())
    swapped = pyg_accel.to_maxk(model, K)
    assert [s.swapped for s in swapped.maxk_swaps] == [False, True, True]
    assert isinstance(swapped.second, MaxKGCNConv) and isinstance(swapped.third, MaxKSAGEConv)
    assert set(swapped.state_dict()) == set(model.state_dict())
    weight = torch.rand(EDGES.size(1))
    for given in ((), (weight,)):
        swapped.eval(), expected.eval()
        torch.testing.assert_close(swapped(X, EDGES, *given), expected(X, EDGES, *given))
    assert not torch.equal(swapped.train()(X, EDGES), swapped(X, EDGES)), "dropout is on"


def test_dropout_follows_the_mode_of_the_model():
    swapped = pyg_accel.to_maxk(Functional().eval(), K)
    assert torch.equal(swapped(X, EDGES), swapped(X, EDGES))
    assert not swapped.training


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
    model = Skip()
    swapped = pyg_accel.to_maxk(model, K)
    h = model.first(X, EDGES).relu()
    torch.testing.assert_close(swapped(X, EDGES), h + model.second(MaxK(K)(h), EDGES))
    assert "reads it as well" in str(swapped.maxk_swaps)


def test_without_a_copy_the_parameters_are_the_very_same():
    for model in (GraphSAGE(IN, HIDDEN, 2, OUT), Functional()):
        swapped = pyg_accel.to_maxk(model, K, copy=False)
        before = dict(model.named_parameters())
        assert all(before[name] is p for name, p in swapped.named_parameters())


def test_modules_that_the_forward_does_not_use_are_kept():
    model = Functional()
    model.unused = nn.Sequential(nn.Linear(2, 3))
    assert set(pyg_accel.to_maxk(model, K).state_dict()) == set(model.state_dict())


class OnMode(Functional):
    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index) if self.training else self.second(2 * x, edge_index)
        return x


class OnArgument(Functional):
    def forward(self, x, edge_index, edge_weight=None):
        x = self.first(x, edge_index).relu()
        if edge_weight is None:
            x = x + 1
        return self.second(x, edge_index)


class OnData(Functional):
    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        return self.second(x, edge_index) if x.sum() > 0 else x


class Frozen(Functional):
    def forward(self, x, edge_index):
        with torch.no_grad():
            x = self.first(x, edge_index)
        return self.second(x.relu(), edge_index)


class Counting(Functional):
    def forward(self, x, edge_index):
        self.calls = 1
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Hooked(Functional):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, given, out: 2 * out)


@pytest.mark.parametrize(
    ("build", "k", "reason"),
    [
        (Frozen, K, "switches gradients"),
        (Counting, K, "changes calls"),
        (Hooked, K, "a hook on Hooked"),
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
        (OnMode, K, "depends on the mode"),
        (OnArgument, K, "depends on whether an optional argument is given"),
        (OnData, K, "torch.fx cannot read the forward"),
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
    model = Functional().eval()
    model.unused = nn.Linear(2, 3)
    swapped = pyg_accel.to_maxk(model, K)
    assert [n for n, _ in swapped.named_parameters()] == [n for n, _ in model.named_parameters()]
    file = io.BytesIO()
    torch.save(swapped, file)
    file.seek(0)
    expected = swapped(X, EDGES)
    for other in (copy.deepcopy(swapped), torch.load(file, weights_only=False)):
        assert list(other.state_dict()) == list(model.state_dict())
        assert str(other.maxk_swaps) == str(swapped.maxk_swaps)
        torch.testing.assert_close(other(X, EDGES), expected, rtol=0, atol=0)
        assert not torch.equal(other.train()(X, EDGES), other(X, EDGES)), "dropout is on"
        other.second.lin.weight.data.zero_()
        torch.testing.assert_close(swapped(X, EDGES), expected, rtol=0, atol=0)
    doubled = {name: 2 * tensor for name, tensor in swapped.state_dict().items()}
    called = torch.func.functional_call(swapped, doubled, (X, EDGES))
    swapped.load_state_dict(doubled)
    torch.testing.assert_close(called, swapped(X, EDGES))


def test_the_result_has_the_methods_attributes_and_modes_of_the_model():
    class Model(Functional):
        note = "mine"

        def hidden(self) -> str:
            return f"{type(self.first).__name__} {self.training}"

    model = Model()
    swapped = pyg_accel.to_maxk(model, K, copy=False)
    assert swapped.note == "mine" and swapped.hidden() == f"{type(model.first).__name__} True"
    assert swapped.eval() is swapped and not model.training
    swapped.name = "one"
    assert model.name == "one"
    seen: list[torch.Tensor] = []
    swapped.register_forward_hook(lambda module, args, out: seen.append(out))
    out = swapped(X, EDGES)
    assert seen[0] is out
    torch.testing.assert_close(
        swapped.double()(X.double(), EDGES).float(), out, rtol=1e-4, atol=1e-5
    )
