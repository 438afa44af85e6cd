"""Graphs with several types of nodes and edges, on several ranks and in one process."""

import copy

import pytest
import torch
from torch import Tensor
from torch_geometric import nn
from torch_geometric.data import HeteroData

import pyg_accel
from pyg_accel.settings import settings

RELATIONS = [("a", "to", "b"), ("b", "back", "a"), ("a", "self", "a")]
CONVS = {
    "SAGE": lambda: nn.SAGEConv((-1, -1), 4),
    "Graph": lambda: nn.GraphConv((-1, -1), 4),
    "GAT": lambda: nn.GATConv((-1, -1), 4, add_self_loops=False),
}


def graph() -> HeteroData:
    generator = torch.Generator().manual_seed(3)
    data, sizes = HeteroData(), {"a": 30, "b": 11}
    for name, size in sizes.items():
        data[name].x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
        data[name].y = torch.arange(size) % 2
    for source, relation, target in RELATIONS:
        ends = [torch.randint(sizes[k], (1, 90), generator=generator) for k in (source, target)]
        data[source, relation, target].edge_index = torch.cat(ends)
    return data


class Net(torch.nn.Module):
    """The last layer's result for "b" is not used: some parameters get no gradient."""

    def __init__(self, conv: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            nn.HeteroConv({key: CONVS[conv]() for key in RELATIONS}) for _ in range(2)
        )
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x: dict[str, Tensor], edges: dict[tuple[str, str, str], Tensor]) -> Tensor:
        for layer in self.layers:
            x = {key: h.tanh() for key, h in layer(x, edges).items()}
        return self.last(x["a"])


class Joint(torch.nn.Module):
    """HANConv, which takes all types at once; the last one's "b" is not used."""

    def __init__(self) -> None:
        super().__init__()
        metadata, widths = (["a", "b"], RELATIONS), {"a": 5, "b": 5}
        self.layers = torch.nn.ModuleList(nn.HANConv(n, 4, metadata, heads=2) for n in (widths, 4))
        self.last = torch.nn.Linear(4, 2)

    forward = Net.forward


def made(conv: str) -> torch.nn.Module:
    return Joint() if conv == "HAN" else Net(conv)


def run(model: torch.nn.Module, data: HeteroData) -> dict[str, Tensor | None]:
    model.zero_grad()
    out = model(data.x_dict, data.edge_index_dict)
    torch.nn.functional.cross_entropy(out, data["a"].y).backward()
    grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    return {"output": out.detach()} | grads


def stored(device: torch.device, folder: str, conv: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        data, model = graph().to(device), made(conv).to(device)
        with torch.no_grad():
            model(data.x_dict, data.edge_index_dict)
        many = copy.deepcopy(model)
        expected = run(model, data)
        spread, share = pyg_accel.distribute(many, folder)
        assert share.metadata() == data.metadata()
        assert sum(pyg_accel.distributed.total(e.size(0))
                   for e in share.edge_attr_dict.values()) == 90 * 3  # fmt: skip
        assert torch.equal(share["a"].y, data["a"].y) and share["a"].num_nodes < 30
        actual = run(spread, share)
        for name, wanted in expected.items():
            assert (wanted is None) == (actual[name] is None), name
            if wanted is not None:
                torch.testing.assert_close(actual[name], wanted, rtol=0, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("conv", ["SAGE", "HAN"])
def test_a_stored_graph_of_several_types(two, tmp_path, conv):
    data = attributed(unused=False)
    pyg_accel.distributed.save(data, tmp_path / "stored")
    two(stored, folder=str(tmp_path / "stored"), conv=conv)


def attributed(*, unused: bool = True) -> HeteroData:
    data = graph()
    for i, key in enumerate(RELATIONS):
        data[key].edge_attr = torch.arange(90 * (i + 1)).view(90, -1)
    if unused:
        data["c"].num_nodes = 4
        data["b", "sees", "c"].edge_index = torch.tensor([[1, 2], [3, 3]])
    data.about = torch.tensor(7)
    return data


def test_a_stored_graph_of_several_types_comes_back_whole(tmp_path):
    data = attributed()
    pyg_accel.distributed.save(data, tmp_path / "stored")
    back = pyg_accel.distributed.load(tmp_path / "stored", verify=True)
    assert isinstance(back, HeteroData) and back.metadata() == data.metadata()
    assert int(back.about) == 7 and back["c"].num_nodes == 4
    for key in ("a", "b"):
        assert torch.equal(back[key].x, data[key].x) and torch.equal(back[key].y, data[key].y)
    for key in RELATIONS:
        pairs = [sorted(zip(*d[key].edge_index.tolist(), d[key].edge_attr[:, 0].tolist(),
                            strict=True)) for d in (data, back)]  # fmt: skip
        assert pairs[0] == pairs[1]


def compare(
    device: torch.device, conv: str, patched: bool, given: bool, rewritten: bool = False
) -> None:
    torch.set_default_dtype(torch.float64)
    settings.always = True
    try:
        data, model = graph().to(device), made(conv).to(device)
        with torch.no_grad():
            model(data.x_dict, data.edge_index_dict)
        many = copy.deepcopy(model)
        if rewritten:
            many = pyg_accel.optimize(many, data.x_dict, data.edge_index_dict, train=True)
        expected = run(model, data)

        assert any(grad is None for grad in expected.values())
        last = torch.ones(11, dtype=torch.int64) if conv == "HAN" else torch.arange(11) // 8
        parts = {"a": torch.arange(30) % 2, "b": last}  # the first rank owns no "b" of some
        options = {"partition": parts} if given else {}
        with pyg_accel.patched() if patched else torch.enable_grad():
            spread, share = pyg_accel.distribute(many, graph(), **options)
            for _ in range(3 if rewritten else 1):  # the first calls of layers are recorded
                actual = run(spread, share)
        assert actual.keys() == expected.keys()
        for name, wanted in expected.items():
            if wanted is None:
                assert actual[name] is None, name
            else:
                torch.testing.assert_close(actual[name], wanted, rtol=0, atol=1e-12)
        assert spread.wire.traffic["halo"].received > 0
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("given", [False, True], ids=["community", "vector"])
@pytest.mark.parametrize("conv", [*CONVS, "HAN"])
def test_a_model_of_several_types_is_that_of_one_process(two, conv, given):
    two(compare, conv=conv, patched=not given, given=given)


@pytest.mark.parametrize("conv", ["SAGE", "GAT", "HAN"])
def test_a_rewritten_model_of_several_types_is_that_of_one_process(two, conv):
    two(compare, conv=conv, patched=False, given=True, rewritten=True)
