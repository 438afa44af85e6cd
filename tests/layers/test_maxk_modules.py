"""MaxK layers as modules: parameters, copies, compilers, autocast, processes."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.nn import Linear, Module
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv

N, F, H, K = 30, 16, 20, 3


def edges() -> torch.Tensor:
    return torch.randint(N, (2, 120))


def layers() -> dict[str, tuple[Module, Module]]:
    return {
        "SAGE": (MaxKSAGEConv(F, H, k=K), SAGEConv(F, H)),
        "GCN": (MaxKGCNConv(F, 40, normalize=False, k=K), GCNConv(F, 40, normalize=False)),
        "GIN": (
            MaxKGINConv(Linear(F, H), train_eps=True, k=K),
            GINConv(Linear(F, H), train_eps=True),
        ),
    }


each = pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])


@each
def test_parameters_are_those_of_pygs_layer_both_ways(kind):
    ours, stock = layers()[kind]
    assert list(ours.state_dict()) == list(stock.state_dict())
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())


@each
def test_a_layer_of_the_same_seed_starts_with_the_same_parameters(kind):
    torch.manual_seed(1)
    ours = layers()[kind][0]
    torch.manual_seed(1)
    again = layers()[kind][0]
    torch.testing.assert_close(dict(ours.named_parameters()), dict(again.named_parameters()))
    before = copy.deepcopy(ours.state_dict())
    ours.reset_parameters()
    changed = [not torch.equal(before[n], p) for n, p in ours.named_parameters() if p.dim() > 1]
    assert all(changed)


def test_representations_name_k():
    assert repr(MaxKSAGEConv(8, 4, k=2)) == "MaxKSAGEConv(8, 4, aggr=mean, k=2)"
    assert repr(MaxKGCNConv(8, 4, k=2)) == "MaxKGCNConv(8, 4, k=2)"
    assert repr(MaxKGINConv(Linear(2, 3), k=1)).endswith(", k=1)")


@each
def test_copies_give_the_same(kind):
    ours, edge_index, x = layers()[kind][0], edges(), torch.randn(N, F)
    out = ours(x, edge_index)
    assert torch.equal(copy.deepcopy(ours)(x, edge_index), out)


def test_sizes_that_are_found_at_the_first_call():
    x, edge_index = torch.randn(N, F), edges()
    for conv in (MaxKSAGEConv(-1, H, k=K), MaxKSAGEConv((-1, -1), H, k=K), MaxKGCNConv(-1, H, k=K)):
        assert conv(x, edge_index).shape == (N, H)


def test_gcn_keeps_its_normalised_graph_if_asked_to():
    conv, edge_index = MaxKGCNConv(F, H, cached=True, k=K), edges()
    first = conv(x := torch.randn(N, F), edge_index)
    assert torch.equal(conv(x, torch.empty(2, 0, dtype=torch.int64)), first)
    conv.reset_parameters()
    assert conv._cached_edge_index is None


@pytest.mark.one_of(3)
@each
@pytest.mark.filterwarnings("ignore")
def test_compiled_whole_and_for_other_sizes(kind):
    torch.compiler.reset()
    ours = layers()[kind][0].double()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for nodes in (N, 17, 41):
        x = torch.randn(nodes, F, dtype=torch.float64, requires_grad=True)
        edge_index = torch.randint(nodes, (2, 3 * nodes))
        actual, truth = compiled(x, edge_index), ours(x, edge_index)
        torch.testing.assert_close(actual, truth)
        leaves = (x, *ours.parameters())
        torch.testing.assert_close(
            torch.autograd.grad(actual.sum(), leaves), torch.autograd.grad(truth.sum(), leaves)
        )
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_gcn_with_its_cached_graph_compiles_whole():
    torch.compiler.reset()
    conv, x, edge_index = MaxKGCNConv(F, 40, cached=True, k=K), torch.randn(N, F), edges()
    truth = conv(x, edge_index)
    actual = torch.compile(conv, fullgraph=True, backend="aot_eager")(x, edge_index)
    torch.testing.assert_close(actual, truth)
    torch.compiler.reset()


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(kind, dtype):
    ours, edge_index, x = layers()[kind][0].to(dtype), edges(), torch.randn(N, F, dtype=dtype)
    out = ours(x, edge_index)
    assert out.dtype == dtype
    # The same parameters and features, and so the same choice of features, in double precision.
    truth = copy.deepcopy(ours).double()(x.double(), edge_index)
    scale = float(truth.detach().abs().max())
    assert float((out.double() - truth).detach().abs().max()) < 4 * torch.finfo(dtype).eps * scale


ONE_OF_TWO_PROCESSES = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel
from pyg_accel.layers import MaxKSAGEConv

rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
torch.manual_seed(0)
conv = MaxKSAGEConv(16, 20, k=3)
model = DistributedDataParallel(conv)
torch.manual_seed(10 + rank)
x, edge_index = torch.randn(30, 16), torch.randint(30, (2, 120))
(own,) = torch.autograd.grad(conv(x, edge_index).sum(), conv.lin_l.weight)
model(x, edge_index).sum().backward()
torch.distributed.all_reduce(own)
torch.testing.assert_close(conv.lin_l.weight.grad, own / 2)
torch.distributed.destroy_process_group()
print("same")
"""


@pytest.mark.full
def test_two_processes_share_their_gradients(tmp_path):
    command = [sys.executable, "-c", ONE_OF_TWO_PROCESSES]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]  # fmt: skip
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert out == "same\n", errors
