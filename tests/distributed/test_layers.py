"""Layers, norms and pools on several ranks, each against one process in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import nn
from torch_geometric.data import Data

import pyg_accel
from pyg_accel.settings import settings

F, H, E = 6, 4, 3


def mlp(first: int, last: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(first, last), torch.nn.Tanh())


LAYERS: dict[str, Any] = {
    "SAGE": (lambda: nn.SAGEConv(F, H),),
    "SAGE max": (lambda: nn.SAGEConv(F, H, aggr="max", project=True),),
    "SAGE several": (lambda: nn.SAGEConv(F, H, aggr=["mean", "max", "std"]),),
    "GIN": (lambda: nn.GINConv(mlp(F, H), train_eps=True),),
    "GINE": (lambda: nn.GINEConv(mlp(F, H), edge_dim=E), "edge_attr"),
    "Simple": (lambda: nn.SimpleConv("mean"),),
    "GatedGraph": (lambda: nn.GatedGraphConv(F, 2),),
    "MF": (lambda: nn.MFConv(F, H),),
    "WLContinuous": (lambda: nn.WLConvContinuous(),),
    "Signed": (lambda: nn.SignedConv(F, H, first_aggr=True), "signed"),
    "GCN": (lambda: nn.GCNConv(F, H),),
    "GCN weighted": (lambda: nn.GCNConv(F, H, improved=True), "edge_weight"),
    "Graph": (lambda: nn.GraphConv(F, H), "edge_weight"),
    "Cheb": (lambda: nn.ChebConv(F, H, K=3),),
    "Cheb rw": (lambda: nn.ChebConv(F, H, K=3, normalization="rw"),),
    "Cheb none": (lambda: nn.ChebConv(F, H, K=3, normalization=None),),
    "ARMA": (lambda: nn.ARMAConv(F, H, num_stacks=2, num_layers=2),),
    "SG": (lambda: nn.SGConv(F, H, K=2),),
    "SSG": (lambda: nn.SSGConv(F, H, alpha=0.1, K=2),),
    "APPNP": (lambda: nn.APPNP(2, 0.1),),
    "TAG": (lambda: nn.TAGConv(F, H, K=2),),
    "GCN2": (lambda: nn.GCN2Conv(F, alpha=0.1), "x_0"),
    "LG": (lambda: nn.LGConv(),),
    "MixHop": (lambda: nn.MixHopConv(F, H),),
    "ClusterGCN": (lambda: nn.ClusterGCNConv(F, H, diag_lambda=0.5),),
    "PDN": (lambda: nn.PDNConv(F, H, edge_dim=E, hidden_channels=5), "edge_attr"),
    "LE": (lambda: nn.LEConv(F, H), "edge_weight"),
    "EG": (lambda: nn.EGConv(F, H, num_heads=2, aggregators=["symnorm", "max"]),),
    "GMM": (lambda: nn.GMMConv(F, H, dim=E, kernel_size=2), "edge_attr"),
    "PNA": (
        lambda: nn.PNAConv(F, H, ["mean", "max", "std"], ["identity", "amplification"],
                           torch.tensor([1, 5, 9, 4]), edge_dim=E),
        "edge_attr",
    ),
    "GAT": (lambda: nn.GATConv(F, H, heads=2, edge_dim=E), "edge_attr"),
    "GATv2": (lambda: nn.GATv2Conv(F, H, heads=2, edge_dim=E), "edge_attr"),
    "Transformer": (lambda: nn.TransformerConv(F, H, heads=2, edge_dim=E, beta=True), "edge_attr"),
    "AGNN": (lambda: nn.AGNNConv(),),
    "FA": (lambda: nn.FAConv(F), "x_0"),
    "FeaSt": (lambda: nn.FeaStConv(F, H, heads=2),),
    "General": (lambda: nn.GeneralConv(F, H, in_edge_channels=E, attention=True, heads=2),
                "edge_attr"),
    "PointTransformer": (lambda: nn.PointTransformerConv(F, H), "pos"),
    "PointNet": (lambda: nn.PointNetConv(mlp(F + 3, H)), "pos"),
    "RGAT": (lambda: nn.RGATConv(F, H, num_relations=3), "edge_type"),
    "RGCN": (lambda: nn.RGCNConv(F, H, num_relations=3), "edge_type"),
    "RGCN bases": (lambda: nn.RGCNConv(F, H, num_relations=9, num_bases=2), "edge_type"),
    "RGCN blocks": (lambda: nn.RGCNConv(F, H, num_relations=3, num_blocks=2), "edge_type"),
    "FastRGCN": (lambda: nn.FastRGCNConv(F, H, num_relations=3), "edge_type"),
    "GEN": (lambda: nn.GENConv(F, H, aggr="softmax", learn_t=True, edge_dim=E), "edge_attr"),
    "ResGated": (lambda: nn.ResGatedGraphConv(F, H, edge_dim=E), "edge_attr"),
    "FiLM": (lambda: nn.FiLMConv(F, H, num_relations=3), "edge_type"),
    "CG": (lambda: nn.CGConv(F, dim=E), "edge_attr"),
    "Edge": (lambda: nn.EdgeConv(mlp(2 * F, H)),),
    "NN": (lambda: nn.NNConv(F, H, mlp(E, F * H)), "edge_attr"),
    "DirGNN": (lambda: nn.DirGNNConv(nn.SAGEConv(F, H, aggr="max")),),
    "DirGNN GCN": (lambda: nn.DirGNNConv(nn.GCNConv(F, H), alpha=0.3, root_weight=False),),
    "DirGNN GAT": (lambda: nn.DirGNNConv(nn.GATConv(F, H)),),
}  # fmt: skip


MAXK = {
    "SAGE": lambda: pyg_accel.MaxKSAGEConv(32, 32, k=2),
    "SAGE narrow": lambda: pyg_accel.MaxKSAGEConv(32, 2, k=4, project=True),
    "GCN": lambda: pyg_accel.MaxKGCNConv(32, 32, k=2),
    "GCN cached": lambda: pyg_accel.MaxKGCNConv(32, 32, k=2, cached=True),
    "GIN": lambda: pyg_accel.MaxKGINConv(torch.nn.Linear(32, 8), k=3),
    "many kept": lambda: pyg_accel.MaxKSAGEConv(32, 32, k=20),
}


class Compressed(torch.nn.Module):
    def __init__(self, layer: str) -> None:
        super().__init__()
        self.before, self.conv = torch.nn.Linear(F, 32), MAXK[layer]()

    def forward(self, data: Data) -> Tensor:
        return self.conv(self.before(data.x), data.edge_index)


class Twice(torch.nn.Module):
    """A layer between two linear maps: features it aggregates, and what it returns, are learned."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        make, *self.more = LAYERS[layer]
        self.before, self.conv = torch.nn.Linear(F, F), make()

    def forward(self, data: Data) -> Tensor:
        h = torch.tanh(self.before(data.x))
        if "x_0" in self.more:
            return self.conv(h, data.x, data.edge_index)
        if "pos" in self.more:
            return self.conv(h, data.pos, data.edge_index)
        if "signed" in self.more:
            return self.conv(h, data.edge_index, data.other_edge_index)
        inputs = [data.edge_weight.sigmoid() if n == "edge_weight" else data[n] for n in self.more]
        return self.conv(h, data.edge_index, *inputs)


def graph(device: torch.device) -> Data:
    generator = torch.Generator().manual_seed(2)
    edges = torch.randint(27, (2, 180), generator=generator)
    return Data(
        x=torch.randn(30, F, generator=generator, dtype=torch.float64),
        pos=torch.randn(30, 3, generator=generator, dtype=torch.float64),
        edge_index=edges,
        edge_attr=torch.rand(180, E, generator=generator, dtype=torch.float64),
        edge_weight=torch.rand(180, generator=generator, dtype=torch.float64),
        edge_type=torch.randint(3, (180,), generator=generator),
        batch=torch.arange(30) // 12,
        other_edge_index=torch.randint(30, (2, 180), generator=generator),
        edge_label_index=torch.arange(360).view(2, 180),  # as many as edges, and none of them
    ).to(device)


def run(model: torch.nn.Module, *args: Any) -> dict[str, Tensor]:
    for p in model.parameters():
        p.grad = None
    out = model(*args)
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(out.shape, generator=generator, dtype=out.dtype).to(out.device)
    if out.requires_grad:
        (out * weights).sum().backward()
    result = {"output": out.detach().clone()}
    for name, p in model.named_parameters():
        result[name.removeprefix("module.")] = p.grad
    for name, b in model.named_buffers():
        result[name.removeprefix("module.")] = b.clone()
    return result


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (wanted is None) == (actual[name] is None), name
        if wanted is not None:
            limit = 1e-12 * max(float(wanted.abs().max()) if wanted.numel() else 0, 1)
            torch.testing.assert_close(actual[name], wanted, rtol=0, atol=limit,
                                       msg=lambda t, n=name: f"{n}: {t}")  # fmt: skip


def compare_layer(
    device: torch.device, layer: str, patched: bool, parts: Tensor | None = None
) -> None:
    torch.set_default_dtype(torch.float64)
    settings.always = True
    try:
        made = Compressed(layer.removeprefix("MaxK ")) if "MaxK" in layer else Twice(layer)
        data, model = graph(device), made.to(device)
        many = copy.deepcopy(model)
        expected = [run(model, data) for _ in range(2)]
        with pyg_accel.patched() if patched else torch.enable_grad():
            options = {} if parts is None else {"partition": parts}
            spread, share = pyg_accel.distribute(many, data, **options)
            for wanted in expected:  # what is kept of the first call must serve the second
                same(run(spread, share), wanted)
        assert spread.wire.traffic["halo"].received > 0 or share.num_nodes == 0
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("layer", [name for name in LAYERS if name.startswith("Dir")])
def test_layers_that_turn_edges_round_with_a_rank_that_has_none(ranks, layer):
    ranks(3)(compare_layer, layer=layer, patched=True, parts=1 + torch.arange(30) % 2)


@pytest.mark.one_of(4, 1)
@pytest.mark.parametrize(
    "patched", [pytest.param(False, marks=pytest.mark.full), True], ids=["PyG", "patched"]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_on_two_ranks_is_that_of_one_process(two, layer, patched):
    two(compare_layer, layer=layer, patched=patched)


NORMS = {
    "batch": lambda: nn.BatchNorm(F),
    "torch batch": lambda: torch.nn.BatchNorm1d(F, momentum=None),
    "single": lambda: nn.BatchNorm(F, allow_single_element=True),
    "graph": lambda: nn.GraphNorm(F),
    "layer": lambda: nn.LayerNorm(F),
    "layer of nodes": lambda: nn.LayerNorm(F, mode="node"),
    "pair": lambda: nn.PairNorm(),
    "pair rows": lambda: nn.PairNorm(scale_individually=True),
    "instance": lambda: nn.InstanceNorm(F, affine=True, track_running_stats=True),
    "plain instance": lambda: nn.InstanceNorm(F),
    "mean": lambda: nn.MeanSubtractionNorm(),
    "group": lambda: nn.DiffGroupNorm(F, groups=2),
    "size": lambda: nn.GraphSizeNorm(),
}
OF_BATCHES = {"graph", "layer", "pair", "plain instance", "mean", "size"}
POOLS = {
    "add": nn.global_add_pool,
    "mean": nn.global_mean_pool,
    "max": nn.global_max_pool,
    "sum of rows": nn.SumAggregation(),
    "least": nn.MinAggregation(),
    "several": nn.MultiAggregation(["mean", "max"]),
}


class Normed(torch.nn.Module):
    def __init__(self, norm: str, batched: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.GCNConv(F, F), NORMS[norm](), torch.nn.Linear(F, 2)
        self.batched = batched

    def forward(self, data: Data) -> Tensor:
        h = self.conv(data.x, data.edge_index)
        h = self.norm(h, data.batch) if self.batched else self.norm(h)
        return self.last(torch.tanh(h))


class Pooled(torch.nn.Module):
    def __init__(self, pool: str, batched: bool) -> None:
        super().__init__()
        self.conv, self.last = nn.SAGEConv(F, F), torch.nn.LazyLinear(2)
        self.pool, self.batched = pool, batched

    def forward(self, data: Data) -> Tensor:
        h = self.conv(data.x, data.edge_index).tanh()
        return self.last(POOLS[self.pool](h, data.batch if self.batched else None))


def compare_model(
    device: torch.device, kind: str, name: str, batched: bool, patched: bool = False
) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        data = graph(device)
        model = (Normed if kind == "norm" else Pooled)(name, batched).to(device)
        with torch.no_grad():
            model(data)
        many = copy.deepcopy(model)
        expected = [run(model, data) for _ in range(2)]
        model.eval()
        expected += [run(model, data)]
        settings.always = True
        with pyg_accel.patched() if patched else torch.enable_grad():
            spread, share = pyg_accel.distribute(many, data)
            actual = [run(spread, share) for _ in range(2)]
            spread.eval()
            actual += [run(spread, share)]
        for ours, wanted in zip(actual, expected, strict=True):
            same(ours, wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("norm", "batched"),
    [(n, False) for n in NORMS if n != "size"] + [(n, True) for n in sorted(OF_BATCHES)],
)
def test_norms_take_the_nodes_of_all_ranks(two, norm, batched):
    two(compare_model, kind="norm", name=norm, batched=batched)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("pool", POOLS)
def test_pools_take_the_nodes_of_all_ranks(two, pool, batched):
    two(compare_model, kind="pool", name=pool, batched=batched)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("norm", "graph"), ("norm", "layer"), ("norm", "size"), ("norm", "plain instance"),
     ("pool", "mean"), ("pool", "max"), ("pool", "several")],
)  # fmt: skip
def test_norms_and_pools_do_so_under_patch_too(two, kind, name):
    two(compare_model, kind=kind, name=name, batched=True, patched=True)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("layer", MAXK)
def test_maxk_layers_exchange_compressed_rows(two, layer):
    two(compare_layer, layer=f"MaxK {layer}", patched=True)


def half(device: torch.device) -> tuple[float, int, int]:
    torch.manual_seed(1)
    plain, actual = nn.SAGEConv(F, F), {}
    for dtype in (None, torch.bfloat16):
        data = graph(device)
        data.x = data.x.float()
        model, share = pyg_accel.distribute(copy.deepcopy(plain), data, wire_dtype=dtype)
        out = model(torch.nn.functional.relu(share.x), share.edge_index)
        out.sum().backward()
        actual[dtype] = out.detach(), model.wire.traffic["halo"].received
    difference = (actual[None][0] - actual[torch.bfloat16][0]).abs().max()
    return float(difference), actual[None][1], actual[torch.bfloat16][1]


def test_bfloat16_halves_the_bytes_sent(two):
    for difference, full, narrow in two(half):
        assert narrow * 2 == full
        assert 0 < difference < 0.02
