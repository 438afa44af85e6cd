"""Change a layer or a call between calls that are made again without a trace."""

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import aggr

from pyg_accel import use_backend

from tests.record.layers import (  # isort: skip
    ATTENTION, LAYERS, AsNumber, Attending, ByWeight, Divided, Factor, InPlace, Plain,
    Positions, Rectified, Scaled, ScatteredMaximum, Sum, TwoMasks, Unused, UnusedMask,
    Unweighted, pna, scaled
)  # fmt: skip
from tests.record.steps import (  # isort: skip
    COLUMN, EDGES, FEW, OTHER_EDGES, OTHER_ROW, ROW, THREE, WEIGHT, WIDTH, Context, E, N,
    Step, X, call, default_device, features, first, gradient_of, graph, hooked,
    hooked_everywhere, multiplied, of, replaced, set_to, setting, under
)  # fmt: skip
from tests.user_layers import Layer

pytestmark = pytest.mark.usefixtures("always")

FLAG = 0
WEIGHTS = [
    lambda a: F.dropout(a, 0.5), lambda a: F.dropout(a, p=0.5, training=True),
    lambda a: F.dropout(a, p=0.3, training=True), lambda a: a.view(-1, 1),
    lambda a: a.view([-1, 1]), lambda a: a.view_as(COLUMN), lambda a: a.unsqueeze(-1),
    lambda a: a * 2, lambda a: a.detach(), lambda a: F.dropout(F.dropout(a, 0.5), 0.5),
]  # fmt: skip
ANY = ["mean", "max", "var"]
EVERY = [*ANY, "min", "std", "sum", "mul"]
PROJECTED = {"mode": "proj", "mode_kwargs": {"in_channels": WIDTH, "out_channels": WIDTH}}
ATTENDED = {
    "mode": "attn",
    "mode_kwargs": {"in_channels": WIDTH, "out_channels": WIDTH, "num_heads": 2, "dropout": 0.5},
}
SMALL, TO_FEW = features(6, WIDTH), torch.stack([OTHER_EDGES[0], graph(nodes=6)[0]])
SQUARE, LINE = features(N, E, seed=4), features(N)
ONE = EDGES[:, :1].clone()
NUMBERS = [2.0, 3.0, 3, True, 1.0, 1, math.nan, float("nan"), 0.0, math.inf]
ARGUMENTS = [COLUMN, COLUMN * 2, None, 2.0, 3.0, 3, True, torch.tensor(2.0), torch.tensor(3.0), ROW,
             OTHER_ROW, features(E, WIDTH), features(1, 1), COLUMN[:7], COLUMN.double(),
             COLUMN.clone().requires_grad_()]  # fmt: skip
SIZES = [None, (N, N), (N, N), (N, N + 3), (N + 3, N), (None, N), (N, None), [N, N]]
ONES = {"forward": lambda self, x, *args, **kwargs: x.new_ones(N, WIDTH)}
run, edges3, small = call(), call(X, EDGES, THREE), call((X, SMALL), TO_FEW)
weighted, column = call(X, EDGES, WEIGHT), call(X, EDGES, COLUMN)


def flag(value: int, *contexts: Context) -> Step:
    return under(replaced(globals(), "FLAG", value), *contexts, times=1)


def flagged(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x * FLAG


def updated(self: Any, inputs: Tensor) -> Tensor:
    return inputs * FLAG if FLAG else inputs


def returned(layer: Any) -> Any:
    out, (_, alpha) = layer(X, EDGES, return_attention_weights=True)
    return out, alpha


def encoder(layer: Any) -> None:
    torch.manual_seed(1)
    layer.edge_encoder, layer.edge_dim = nn.Linear(3, WIDTH), 3


def twice(change: Callable[[Any], Any]) -> Step:
    def step(layer: Any) -> Any:
        change(layer)
        return edges3(layer), edges3(layer)

    return step


def member(number: int, make: Callable[[], Any]) -> Step:
    return lambda layer: layer.aggr_module.aggrs.__setitem__(number, make()) or run(layer)


def members(change: Callable[[Any], Any]) -> Step:
    return first(lambda layer: change(layer.aggr_module.aggrs))


def scaler(*names: str) -> Step:
    return lambda layer: setting("aggr_module.scaler", list(names))(layer)


def on_class(*classes: type) -> list[Step]:
    return [under(replaced(cls, name, value), times=1)
            for cls in classes for name, value in ONES.items()]  # fmt: skip


def dropping(name: str) -> nn.Module:
    layer = LAYERS[name][0]()
    layer.dropout = 0.5
    return layer


OF_MEMBERS = [
    run, run, member(0, aggr.MaxAggregation), member(1, aggr.StdAggregation), run,
    member(2, aggr.VarAggregation),
    member(2, lambda: aggr.VarAggregation(semi_grad=True)), run,
    member(2, lambda: aggr.SoftmaxAggregation(t=2.0)), run, member(2, Factor),
    member(2, aggr.StdAggregation), setting("aggr_module.aggrs.2.var_aggr.semi_grad", True), run,
    setting("aggr_module.aggrs.2.var_aggr", aggr.VarAggregation()), run,
    setting("aggr_module.mode", "sum"), setting("aggr_module.dense_combine", torch.sum), run,
    setting("aggr_module.dense_combine", torch.mean), setting("aggr_module.mode", "cat"),
    *(under(hooked(f"aggr_module{part}")) for part in ("", ".aggrs.0", ".aggrs.2")),
    *(under(multiplied("aggr_module", name, 2)) for name in ("combine", "forward")), run,
    *(under(multiplied("aggr_module.aggrs.1", name, 2)) for name in ("reduce", "forward")),
    under(multiplied("aggr_module.aggrs.2.var_aggr", "forward", 2)),
    under(hooked("aggr_module.fused_aggr")), members(lambda m: m.append(aggr.MaxAggregation())),
    members(lambda m: m.pop(3)), member(0, aggr.MeanAggregation), member(1, aggr.MaxAggregation),
    run,
    *on_class(aggr.MaxAggregation, aggr.StdAggregation, aggr.VarAggregation, aggr.MultiAggregation),
    under(replaced(aggr.MultiAggregation, "combine", lambda self, inputs: inputs[0] * 7), times=1),
    *(setting("aggr_module", m) for m in (aggr.SumAggregation(), aggr.StdAggregation())), run,
    *(setting("aggr_module", m) for m in (aggr.MultiAggregation(["sum"]), scaled("sum", False))),
    run, run,
]  # fmt: skip

TABLE: dict[str, tuple[Callable[[], nn.Module], list[Step], str]] = {
    # Layers of PyG.
    **{f"dropout of {name}": (
        lambda name=name: dropping(name),
        [run, run, run, setting("dropout", 0.2), run, lambda s: s.eval()(X, EDGES),
         lambda s: s.eval()(X, EDGES), lambda s: s.train()(X, EDGES), setting("dropout", 0.0), run,
         setting("dropout", 1), setting("dropout", 1.0)], "tp.*") for name in ATTENTION},
    **{f"returned weights of {name}": (
        LAYERS[name][0], [returned, returned, run, returned], ".*p.*|t+") for name in ATTENTION},
    **{f"settings of {name}": (
        LAYERS[name][0],
        [run, run, *(under(set_to(*to), times=1) for to in (("verify", True),
         ("backend", "reference"), ("disable", "cpu"))), under(of(use_backend, "reference")),
         under(set_to("graph_cache", 0)), run, run],
        ".*p") for name in ("sage", "sage max", "gat")},
    "pairs": (lambda: pyg.SAGEConv((WIDTH, WIDTH), 4), [
        small, small, call((X, None), TO_FEW, size=(N, 6)), call((X, None), TO_FEW, size=(N, 6)),
        call((X, None), TO_FEW, size=(N, 7)), call((X, None), TO_FEW), call((X, X), EDGES), run,
        call((X, X.clone()), EDGES), call((X, SMALL), TO_FEW, size=(N, 6)),
        call((X, SMALL), TO_FEW, size=(N, 7)), call((X, SMALL), EDGES), call((SMALL, X), TO_FEW),
    ], "tp.*p.*"),
    "pairs of attention": (lambda: pyg.GATConv((WIDTH, WIDTH), 4, add_self_loops=False), [
        small, small, call((X, None), EDGES), call((X, None), EDGES), call((X, X), EDGES)], ".*"),
    "shapes of weights": (lambda: pyg.GraphConv(WIDTH, 4), [
        weighted, weighted, call(X, EDGES, None), run, call(X, EDGES, COLUMN.squeeze(1)),
        call(X, EDGES, WEIGHT.clone().requires_grad_()), call(X, EDGES, WEIGHT[::2].repeat(2)),
        call(X, EDGES, WEIGHT[:-1]), weighted], "(.*p){4}"),
    "weights of a square": (lambda: pyg.GraphConv(E, 4), [
        *[call(SQUARE, EDGES, WEIGHT)] * 3, call(SQUARE, FEW, WEIGHT[:7])], ".*"),
    "lists of linear layers": (lambda: pna(edge_dim=3), [
        edges3, edges3, under(hooked("pre_nns.0.0"), run=edges3),
        twice(lambda s: s.pre_nns[0].append(nn.ReLU())), twice(lambda s: s.pre_nns[0].pop(1)),
        twice(lambda s: setattr(s, "pre_nns", nn.ModuleList(reversed(s.pre_nns)))),
        twice(lambda s: s.pre_nns.__setitem__(0, s.pre_nns[1]))], "tp.*"),
    "an attribute that comes later": (
        pna, [run, run, edges3, run, lambda s: encoder(s) or run(s), run, edges3, run], ".*p"),
    "softmax aggregation": (
        lambda: pyg.GENConv(WIDTH, WIDTH, aggr="softmax", learn_t=True).double(),
        [call(X.double(), EDGES)] * 3, ".*p"),
    # Attributes and arguments.
    "numbers": (
        lambda: Scaled(scale=2.0), [run, run, *(setting("scale", v) for v in NUMBERS)], "tp.*"),
    "tensors": (lambda: Scaled(scale=ROW), [
        run, run, *(setting("scale", v) for v in (
            OTHER_ROW, 2.0, torch.tensor(3.0), torch.tensor(4.0), ROW[:, :1], COLUMN, COLUMN * 2,
            torch.ones(E, WIDTH))),
        lambda s: delattr(s, "scale") or run(s), setting("scale", ROW)], "tp.*"),
    "arguments": (ByWeight, [
        *(call(X, EDGES, v) for v in ARGUMENTS * 2), run, call(X, ONE, COLUMN[:1]),
        call(X, ONE, ROW), call(X, ONE, OTHER_ROW), call(X, FEW, COLUMN[:7]),
        call(features(N, 4), EDGES, COLUMN), call(features(N, 4, WIDTH), EDGES, COLUMN)],
        "(.*p){5}.*"),
    "either sign of zero": (Divided, [call(X, EDGES, n) for n in (0.0, 0.0, -0.0, -0.0)], ".*"),
    **{f"sizes of {name}": (cls, [call(X, EDGES, size=size) for size in SIZES], ".*p.*")
       for name, cls in (("sources", Plain), ("both ends", Unused))},
    "flow and node dimension": (Sum, [
        run, run, setting("flow", "target_to_source"), run, setting("node_dim", 0),
        setting("node_dim", -2), setting("flow", "source_to_target")], ".*"),
    "the other flow": (
        lambda: Plain(flow="target_to_source"), [call((SMALL, X), TO_FEW.flip(0)), run, run], ".*"),
    "one dimension": (lambda: Plain(node_dim=0), [
        *[call(LINE, EDGES)] * 3, call(features(N + 1), FEW)], ".*"),
    "default devices": (lambda: Positions(lin=nn.Linear(WIDTH, 4)), [
        *[under(of(torch.device, "cpu"), times=1)] * 2, under(default_device, times=1),
        *[under(of(torch.device, "meta"), times=1)] * 2, run, run,
        under(of(torch.device, "cpu"), times=1)], "tpptptpp"),
    # Methods, hooks and functions.
    "hooks of an aggregation": (
        Sum, [run, run, under(hooked("aggr_module")), under(hooked_everywhere), run], ".*p"),
    "modules of aggregation": (Sum, [  # a module like one that was recorded is recognised
        run, run, setting("aggr_module", aggr.MaxAggregation()),
        setting("aggr_module", aggr.SumAggregation())], "tptp"),
    "a factor of an aggregation": (
        lambda: Sum(Factor()), [run, run, setting("aggr_module.factor", 3.0)], ".*"),
    "a temperature": (lambda: Sum(aggr.SoftmaxAggregation(t=1.0)), [
        run, run, setting("aggr_module.t", 4.0)], ".*"),
    "attention to members": (  # torch's reads a flag that is no part of the context
        lambda: Sum(aggr.MultiAggregation(ANY, **ATTENDED)), [run] * 3, r"tt\."),
    "members of an aggregation": (  # more records than are made of one layer
        lambda: Sum(aggr.MultiAggregation(["mean", "max", "std"])), OF_MEMBERS, ".*"),
    "a projection of members": (lambda: Sum(aggr.MultiAggregation(ANY, **PROJECTED)), [
        run, run, setting("aggr_module.lin.weight",
                          nn.Parameter(torch.ones(WIDTH, 3 * WIDTH), False)),
        under(hooked("aggr_module.lin")), run], "t.*p"),
    "scalers": (lambda: Sum(scaled(ANY)), [
        run, run, scaler("linear"), scaler("identity", "attenuation"),
        first(lambda s: s.aggr_module.avg_deg_log.mul_(3)),
        setting("aggr_module.avg_deg_lin", nn.Parameter(torch.full((1,), 2.0), False)),
        scaler("linear"), scaler("unknown"), scaler("linear"),
        lambda s: s.aggr_module.requires_grad_(False) and run(s),
        under(multiplied("aggr_module", "forward", 2)), under(hooked("aggr_module.aggr")),
        *on_class(aggr.DegreeScalerAggregation),
        setting("aggr_module.aggr", aggr.MaxAggregation()), run],
        "tp.*p"),
    "methods of an instance": (Sum, [
        run, run, under(replaced("", "message", lambda x_i, x_j: x_j * 3)),
        under(multiplied("", "update", 2)), under(multiplied("", "aggregate", 2)),
        under(multiplied("aggr_module", "forward", 5)), run], "t.*p"),
    "methods of a class": (Rectified, [
        run, run, under(replaced(Rectified, "message", lambda self, x_i, x_j: x_i - x_j), times=1),
        under(replaced(Rectified, "update", lambda self, inputs: inputs * 2), times=1), run,
        under(replaced(Rectified.message, "__code__", Sum.message.__code__), times=1),
        under(multiplied(aggr.SumAggregation, "forward", 2), times=1),
        under(replaced(F, "relu", F.leaky_relu), times=1), run,
        *(flag(n, replaced(pyg.MessagePassing, "update", updated)) for n in (0, 0, 3)), run],
        "tp.*p"),
    "a method of a base": (Layer, [
        run, run, under(replaced(pyg.MessagePassing, "message", lambda self, x_j: x_j * 3)), run],
        ".*"),
    # What stands in for a function may read what it likes, so it is traced each time.
    **{f"{name} that a message calls": (
        lambda: pyg.GATConv(WIDTH, 4, add_self_loops=False),
        [run, run, *(flag(n, replaced(owner, name, flagged)) for n in (2, 2, 5, 5)), run], ".*p")
       for owner, name in ((F, "leaky_relu"), (sys.modules[pyg.GATConv.__module__], "softmax"))},
    "features of both ends": (ByWeight, [
        column, column, call((X, X), EDGES, COLUMN), call((X, X), EDGES, COLUMN),
        call((X, X * 2), EDGES, COLUMN)], "tp.*"),
    # Attention.
    **{f"weights between calls, {name}": (
        lambda cls=cls: cls(node_dim=0),
        [run, run, *(call(X, EDGES, change=change) for change in WEIGHTS for _ in range(2)),
         call(X, EDGES, OTHER_EDGES), call(X, EDGES, OTHER_EDGES)], ".*")
       for name, cls in (
           ("factors", Attending), ("a number", AsNumber), ("results", Unweighted))},
    "a mask that is not used": (UnusedMask, [run] * 3, ".*"),
    "two masks": (TwoMasks, [lambda s: (run(s), s.put_aside * 1)] * 3, ".*"),
    **{f"a result changed in place by {name}": (
        lambda change=change: InPlace(change),
        [gradient_of(0, X, EDGES), gradient_of(0, X, EDGES), call(X, OTHER_EDGES)], "tpt")
       for name, change in {
           "a number": lambda out: out.add_(1), "a product": lambda out: out.mul_(2.0),
           "an activation": torch.relu_, "a view": lambda out: out.view(-1, 6).mul_(3.0),
           "rows": lambda out: out[:3].zero_(),
           "an assignment": lambda out: out.__setitem__((slice(None), 0), 1.0),
       }.items()},
    # Scattered into zeros without a look at them; the last node has no edges.
    **{f"a maximum scattered into {name}": (
        lambda change=change: ScatteredMaximum(change=change), [call(X, EDGES % (N - 1))] * 3, ways)
       for name, change, ways in (("zeros", lambda out: None, ".*p"),
                                  ("a row", lambda out: out[N - 1].fill_(5.0), r"tt\."),
                                  ("others", lambda out: out.add_(5.0), r".*t\.?"))},
}  # fmt: skip


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", TABLE)
def test_a_change_is_seen(name: str, like_stock: Any) -> None:
    make, steps, ways = TABLE[name]
    actual = like_stock(make(), *steps)
    assert re.fullmatch(ways, actual), actual


@pytest.mark.parametrize("kind", [
    "propagate_forward", "propagate_forward_pre", "message_forward", "message_forward_pre",
    "aggregate_forward", "aggregate_forward_pre",
])  # fmt: skip
def test_hooks_of_a_layer(kind: str, like_stock: Any) -> None:
    heard: list[int] = []
    step = under(hooked("", lambda *args: heard.append(len(args)), kind), times=1)
    assert like_stock(Sum(), call(), call(), step, call()) == "tp.p"
    assert len(heard) == 2


@pytest.mark.one_of(2)
@pytest.mark.parametrize("make", [
    lambda: aggr.MultiAggregation(EVERY), lambda: aggr.MultiAggregation(["sum"]),
    lambda: aggr.MultiAggregation(ANY, mode="sum"), lambda: aggr.MultiAggregation(ANY, mode="max"),
    lambda: aggr.MultiAggregation(ANY, mode="logsumexp"),
    lambda: aggr.MultiAggregation(ANY, **PROJECTED),
    lambda: aggr.VarAggregation(), lambda: aggr.StdAggregation(),
    lambda: scaled(EVERY[:-1]), lambda: scaled("std", learned=False),
    lambda: aggr.MultiAggregation([scaled("min"), "std"]),
    lambda: aggr.DegreeScalerAggregation(
        ANY, ["identity", "amplification", "attenuation", "linear", "inverse_linear"],
        torch.tensor([0, 2, 4, 6]), True
    ),
])  # fmt: skip
def test_aggregations_of_several_reductions(make: Callable[[], Any], like_stock: Any) -> None:
    # Other sizes are recorded once more, and then any; an empty graph is recorded by itself.
    ways = like_stock(Sum(make()), call(), call(), call(X, FEW), call(X, graph(0)),
                      call(features(N + 2, WIDTH), EDGES), call(X, graph(0)))  # fmt: skip
    assert ways == "tptttt"
    cube = features(N, 3, WIDTH)
    assert like_stock(Sum(make(), node_dim=0), call(cube, EDGES), call(cube, EDGES))[1] == "p"
