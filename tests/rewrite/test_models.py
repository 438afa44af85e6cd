"""``optimize()`` of models as people write them: what their code does beside calls of tensors."""

import copy
import io
import random

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer

import pyg_accel
from pyg_accel import optimize, plan
from pyg_accel.patching import reasons
from pyg_accel.rewrite.optimized import rewritten_layers
from pyg_accel.settings import settings

N, E = 60, 500


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def inputs():
    torch.manual_seed(0)
    return torch.randn(N, 12), torch.randint(N, (2, E))


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.GCNConv(12, 12), nn.SAGEConv(12, 4)
        self.bn = torch.nn.BatchNorm1d(12)

    def plain(self, x, edge_index):
        x = F.dropout(self.enc(x, edge_index), 0.5, self.training)
        return self.head(x, edge_index)


class Frozen(Base):
    def forward(self, x, edge_index):
        with torch.no_grad():
            x = self.bn(self.enc(x, edge_index))
        return self.head(x, edge_index)


class Autocast(Base):
    def __init__(self):
        super().__init__()
        self.float()

    def forward(self, x, edge_index):
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(self.enc(x.float(), edge_index), edge_index)


class Inference(Base):
    def forward(self, x, edge_index):
        with torch.inference_mode():
            return self.plain(x, edge_index)


class Checkpoint(Base):
    def forward(self, x, edge_index):
        x = checkpoint(self.enc, x, edge_index, use_reentrant=False)
        return self.head(x, edge_index)


class Block(Base):
    forward = Base.plain


def sequence():
    return nn.Sequential("x, edge_index", [
        (nn.GCNConv(12, 12), "x, edge_index -> a"), (torch.nn.Dropout(0.5), "a -> a"),
        (nn.SAGEConv(12, 12), "a, edge_index -> b"),
    ])  # fmt: skip


class Keywords(Base):
    def forward(self, x, edge_index, **options):
        return self.plain(x, edge_index) * options.get("scale", 1.0)


class Arguments(Base):
    def forward(self, x, *rest, scale=1.0):
        return self.plain(x, rest[0]) * scale


class Checking(Base):
    """Code that looks at its layers, and cannot be read."""

    def forward(self, x, edge_index):
        for conv in (self.enc, self.head):
            x = conv(x, edge_index) * (2 if isinstance(conv, nn.GCNConv) else conv.out_channels)
        return x if x.sum() > 1e9 else x + 1


class Counting(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.calls, self.seen = 0, []

    def forward(self, x, edge_index):
        self.count += 1
        self.calls += 1
        self.seen.append(self.calls)
        return self.plain(x, edge_index) * self.count * self.calls


class Average(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x, edge_index):
        x = self.enc(x, edge_index)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.head(x - self.mean, edge_index)


class Noise(Base):
    def forward(self, x, edge_index):
        return self.plain(x + torch.randn(12), edge_index)


class KeepsNorm(Base):
    """Its batch norm is in evaluation mode for good."""

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x, edge_index):
        return self.head(self.bn(self.enc(x, edge_index)), edge_index)


class Hooked(Base):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.block.register_forward_hook(lambda module, given, out: 3 * out)
        self.register_forward_pre_hook(lambda module, given: (2 * given[0], given[1]))

    def forward(self, x, edge_index):
        return self.block(x, edge_index) + self.plain(x, edge_index)


class Shared(Base):
    def __init__(self):
        super().__init__()
        self.again = self.enc

    def forward(self, x, edge_index):
        return self.plain(self.again(x, edge_index).relu(), edge_index)


class Several(Base):
    def forward(self, x, edge_index, weight=None):
        x = self.enc(x, edge_index, weight).relu_()
        return {"hidden": x, "rest": (self.head(x, edge_index), None)}


MODELS = [Frozen, Autocast, Inference, Checkpoint, Keywords, Arguments, Checking, Counting, Average,
          Noise, KeepsNorm, Hooked, Shared, Several, sequence]  # fmt: skip


def outcome(model, mode, *args, **kwargs):
    """Results, gradients and buffers of a call."""
    model.train(mode)
    model.zero_grad()
    torch.manual_seed(1)
    result = model(*args, **kwargs)
    outs = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    total = sum(t.double().sin().sum() for t in outs)
    if total.requires_grad:
        total.backward()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    return outs, grads, buffers


def agree(expected, actual, tolerance=1e-8):
    for mine, theirs in zip(actual[0], expected[0], strict=True):
        assert mine.requires_grad == theirs.requires_grad
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(actual[1:], expected[1:], strict=True):
        assert list(mine) == list(theirs)
        for name, tensor in theirs.items():
            assert (tensor is None) == (mine[name] is None), name
            if tensor is not None:
                torch.testing.assert_close(mine[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_it_behaves_like_the_original(make, train):
    model, args = make(), inputs()
    other = make()  # shares nothing: buffers are changed in every call
    other.load_state_dict(model.state_dict())
    names, state = list(vars(model)), copy.deepcopy(model.state_dict())
    numbers = torch.get_rng_state()
    fast = optimize(model, *args, train=train)
    assert torch.equal(numbers, torch.get_rng_state())
    assert list(vars(model)) == names and getattr(model, "seen", []) == []
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert list(fast.state_dict()) == list(state)
    tolerance = 0.05 if make is Autocast else 1e-8
    for mode in (True, False, True):
        expected, actual = (outcome(m, mode, *args) for m in (other, fast))
        agree(expected, actual, tolerance)
    layers = list(rewritten_layers(fast).values())
    # A checkpoint counts what a call saves: layers inside of one are as ever.
    inside = train and make is Checkpoint
    assert layers and (any if inside else all)(layer.decisions for layer in layers)


@pytest.mark.parametrize("make", [Block, sequence], ids=lambda make: make.__name__)
def test_modes_are_those_of_the_model(make):
    model, args = make(), inputs()
    fast = optimize(model, *args)
    with torch.no_grad():
        for one, other in ((fast, model), (model, fast)):
            one.eval()
            assert not other.training
            assert torch.equal(fast(*args), fast(*args))
            other.train()
            assert one.training
            assert not torch.equal(fast(*args), fast(*args))
            assert not torch.equal(model(*args), model(*args))


def test_keywords_and_defaults_are_those_of_the_model():
    model, args = Keywords().eval(), inputs()
    fast = optimize(model, *args, scale=2.0)
    for options in ({}, {"scale": 2.0}, {"scale": 3.0}):
        torch.testing.assert_close(fast(*args, **options), model(*args, **options))
    model = Arguments().eval()
    fast = optimize(model, *args)
    torch.testing.assert_close(fast(*args, scale=3.0), model(*args, scale=3.0))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("make", [Keywords, Shared, sequence, lambda: nn.GCNConv(12, 4)])
@pytest.mark.filterwarnings("ignore")
def test_copies_and_saved_models_do_the_same(make):
    args = inputs()
    fast = optimize(make(), *args, train=True)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    for other in (copy.deepcopy(fast), torch.load(file, weights_only=False)):
        assert list(other.state_dict()) == list(fast.state_dict())
        assert not {id(p) for p in other.parameters()} & {id(p) for p in fast.parameters()}
        for mode in (True, False):
            state = copy.deepcopy(fast.state_dict())
            agree(outcome(fast, mode, *args), outcome(other, mode, *args))
            for each in (fast, other):
                each.load_state_dict(state)
        assert len(plan(other).layers) == len(plan(fast).layers)


@pytest.mark.parametrize("make", [Block, lambda: nn.GCNConv(12, 4)])
def test_a_functional_call_takes_the_names_of_the_original(make):
    model, args = make().eval(), inputs()
    fast = optimize(model, *args)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in fast.named_parameters()] == names
    state = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    expected = torch.func.functional_call(model, state, args)
    torch.testing.assert_close(torch.func.functional_call(fast, state, args), expected)


def test_its_modules_are_indexed_and_asked_as_those_of_the_original():
    model, (x, edge_index) = nn.GCN(12, 8, 2, 4, norm="batch").eval(), inputs()
    fast = optimize(model, x, edge_index)
    assert len(fast.convs) == 2
    assert isinstance(fast.convs[0], nn.GCNConv) and fast.convs[0].out_channels == 8
    assert fast.num_layers == 2
    h = model.convs[0](x, edge_index)
    torch.testing.assert_close(fast.convs[0](x, edge_index), h)
    torch.testing.assert_close(fast.norms[0](h), model.norms[0](h))
    torch.testing.assert_close(
        optimize(Block(), x, edge_index).eval().plain(x, edge_index).shape, torch.Size([N, 4])
    )


def explained(model, algorithm, *args):
    torch.manual_seed(0)
    task = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    masks = {"edge_mask_type": "object", "model_config": task}
    nodes = {"node_mask_type": "attributes"} if isinstance(algorithm, GNNExplainer) else {}
    explainer = Explainer(model, algorithm, explanation_type="model", **nodes, **masks)
    return explainer(*args, index=3).edge_mask


@pytest.mark.one_of(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda: nn.GCN(12, 8, 2, 4), Checking, lambda: nn.GATConv(12, 4)])
def test_explainers_find_its_layers(make):
    model, args = make().eval(), inputs()
    fast = optimize(model, *args).eval()
    mask = explained(model, GNNExplainer(epochs=3), *args)
    torch.testing.assert_close(explained(fast, GNNExplainer(epochs=3), *args), mask)
    assert float(mask.abs().sum()) > 0
    torch.testing.assert_close(fast(*args), model(*args))
    layers = list(rewritten_layers(fast).values())
    assert all(not layer.layer.explain for layer in layers)


@pytest.mark.filterwarnings("ignore")
def test_attention_is_explained():
    model, args = nn.GAT(12, 8, 2, 4).eval(), inputs()
    fast = optimize(model, *args).eval()
    mask = explained(model, AttentionExplainer(), *args)
    torch.testing.assert_close(explained(fast, AttentionExplainer(), *args), mask)


def test_patch_takes_it_and_leaves_it_as_it_was():
    model, args = nn.PNA(12, 8, 2, 4, aggregators=["mean", "max"], scalers=["identity"],
                         deg=torch.tensor([0, 3, 5])).eval(), inputs()  # fmt: skip
    fast = optimize(model, *args)
    expected = model(*args)
    settings.always = True
    pyg_accel.reset_report()
    with pyg_accel.patched(fast):
        torch.testing.assert_close(fast(*args), expected)
    assert any(row.formula for row in pyg_accel.report(io.StringIO()).rows)
    assert not any(m in reasons.marked for m in (*model.modules(), *fast.modules()))


def test_numbers_and_statistics_are_those_of_before():
    class Net(Base):
        def forward(self, x, edge_index):
            keep = random.random() < 0.5
            return self.head(self.bn(self.enc(x, edge_index)) * keep, edge_index)

    model, args = Net(), inputs()
    random.seed(3)
    first = random.random()
    random.seed(3)
    optimize(model, *args, train=True)
    assert random.random() == first
    assert torch.equal(model.bn.running_mean, torch.zeros(12))
    assert int(model.bn.num_batches_tracked) == 0
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_cannot_be_trained_on_the_example():
    class Net(Base):
        def forward(self, x, edge_index):
            return self.bn(self.enc(x, edge_index))

    model, edge_index = Net().eval(), torch.zeros(2, 3, dtype=torch.long)
    x = torch.randn(1, 12)  # BatchNorm refuses a single row in training mode
    fast = optimize(model, x, edge_index)
    torch.testing.assert_close(fast(x, edge_index), model(x, edge_index))
