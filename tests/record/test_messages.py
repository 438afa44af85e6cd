"""Change what a message reads between calls that are made again without a trace."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.record.steps import (  # isort: skip
    COLUMN, EDGES, FEW, OTHER_ROW, ROW, THREE, WIDTH, E, N, Step, X, call, features, first,
    gradient_of, inference, of, replaced, setting, under
)  # fmt: skip
from tests.user_layers import Layer, says, says_by, written

pytestmark = pytest.mark.usefixtures("always")

TWO, TRIPLE, LINE = COLUMN * 0 + 2, COLUMN * 0 + 3, features(N)
ORDERS = [list(range(E)), list(range(E)), list(reversed(range(E)))]
run, edges3, column = call(), call(X, EDGES, THREE), call(X, EDGES, COLUMN)
no_grad = under(of(torch.no_grad), times=1)
narrow = setting("scale", torch.ones(3))
CELL, FLAG = {"factor": 1.0}, 0


def embedded(**more: Any) -> Any:
    """Features of edges that are computed in other ways than by one linear layer."""
    torch.manual_seed(3)
    linears = {"first": nn.Linear(3, 6), "second": nn.Linear(6, WIDTH)}
    return says_by(
        lambda self, x_j, w: (x_j + self.second(self.first(w) * self.scale + self.shift)).relu(),
        **linears | {"scale": torch.ones(1, 6), "shift": 0.5} | more,
    )()


def attribute_of_tensor(scale: float) -> Step:
    def step(layer: Any) -> Any:
        w = COLUMN.clone()
        w.scale = scale
        return layer(X, EDGES, w)

    return step


def flag(value: int) -> Step:
    return under(replaced(globals(), "FLAG", value), times=1)


class Private(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) * self.__scale


Scaled = written(message=lambda self, x_i, x_j: (x_i + x_j) * self.scale)


class Counting(Scaled):
    count = 0

    @property
    def scale(self) -> float:
        self.count += 1
        return float(self.count % 3)


class Looked(Scaled):
    def __getattr__(self, name: str) -> Any:
        return float(torch.rand(())) if name == "scale" else super().__getattr__(name)


class Super(Scaled):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return super().message(x_i, x_j)


class LastSize(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        s = (x_i * x_j).sum(-1)
        return (x_i + x_j) / s.size(-1)


class SizeOfAttribute(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        w = self.scale
        return (x_i + x_j) / w.size(-1)


class Identity(Layer):
    propagate_type: ClassVar = dict(x=Any, a=Any, b=Any)

    def forward(self, x: Any, edge_index: Tensor, a: Any, b: Any) -> Tensor:
        return self.propagate(edge_index, x=x, a=a, b=b)

    def message(self, x_i: Tensor, x_j: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x_i + x_j) * a * (5 if a is b else b)


class Seeding(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        torch.manual_seed(99)
        return x_i + x_j


class Nested(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        def times(t: Tensor) -> Tensor:
            return t * self.scale

        return times(x_i + x_j)


class Counted(Layer):
    count = 0

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        self.count = self.count + 1
        return (x_i + x_j) * self.count


def times(t: Tensor, *, scale: float = 2.0) -> Tensor:
    return t * scale


def times_factor(t: Tensor) -> Tensor:
    return t * times_factor.factor


times_factor.factor = 2.0


def closed_over() -> tuple[Any, Any]:
    """Layers that read what a closure and what a decorator refers to."""
    cell = CELL

    def decorated(method: Any) -> Any:
        return lambda self, x_i, x_j: method(self, x_i, x_j) * cell["factor"]

    return (says(lambda self, x_i, x_j: (x_i + x_j) * cell["factor"]),
            says(decorated(lambda self, x_i, x_j: x_i + x_j)))  # fmt: skip


SIZE = written(message=lambda self, x_i, x_j: (x_i + x_j) / x_j.size(-1))
DEFAULT = written(message=lambda self, x_i, x_j, scale=2.0: (x_i + x_j) * scale)
BUILTIN = written(message=lambda self, x_i, x_j: (x_i + x_j) * max(1, 2))

# The layer, the steps, and how they run.
TABLE: dict[str, tuple[Callable[[], nn.Module], list[Step], str]] = {
    # Parts of features, chosen by what a kind of call may not tell.
    "columns": (
        says(lambda self, x_i, x_j: self.lin(x_i[:, 1:5]) * x_j[:, :1] + x_j[:, -2:-1],
             lin=nn.Linear(4, WIDTH)),
        [run, run, call(features(N + 2, WIDTH), EDGES), call(features(N, 12), FEW), run], "tpttp"),
    "columns by numbers of edges": (
        says_by(lambda self, x_i, x_j, w: (
            x_i[:, : self.scale[0]] + x_j[:, w.long()[0, 0] : w.long()[0, 0] + 1]), scale=(1, 2)),
        [call(X, EDGES, w) for w in (TWO, TWO, TRIPLE, TWO)], ".*"),
    "a number in a tensor chooses": (
        says_by(lambda self, x_i, x_j, w: (x_i + x_j) * self.scale[w], scale=(1.0, 2.0)),
        [call(X, EDGES, torch.tensor(n)) for n in (0, 0, 1, 0, 1)], r"tt\.\.\."),
    "columns of edges": (
        says_by(lambda self, x_i, x_j, w: (x_i + x_j) * w[:, :1] + w[:, 1:2] * w[:, None, 2]),
        [*(call(X, EDGES, THREE * n) for n in (1, 1, -2)), call(X, FEW, THREE[:7]),
         call(X, EDGES, features(E, 4))], "tpptt"),
    "the first edges": (
        says_by(lambda self, x_i, x_j, w: (x_i + x_j) * w[:1]),
        [call(X, EDGES, w) for w in (TWO, TWO, TRIPLE, TWO, TWO[:1])], ".*"),
    "orders": (
        says_by(lambda self, x_i, x_j, w: (x_i + x_j) * w[[i for i in self.order]],
                order=ORDERS[0]),
        [setting("order", o, column) for o in ORDERS], ".*"),
    "steps of features of edges": (embedded, [
        edges3, edges3, setting("shift", -1.5, edges3), edges3,
        setting("scale", torch.full((1, 6), 2.0), edges3), edges3,
        setting("scale", torch.rand(6), edges3), setting("scale", torch.rand(E, 6), edges3), edges3,
        setting("scale", 3, edges3), edges3, call(X, FEW, THREE[:7])], "(.*p){4}.*"),
    "one step twice": (
        lambda: (lambda one: embedded(first=one, second=one, scale=1))(nn.Linear(WIDTH, WIDTH)),
        [call(X, EDGES, features(E, WIDTH))] * 3, ".*"),
    # What a message reads, and does.
    "of a tensor": (
        says_by(lambda self, x_i, x_j, w: (x_i + x_j) * w.scale),
        [attribute_of_tensor(n) for n in (1.0, 1.0, 3.0)], ".*"),
    "a private name": (Private, [setting("_Private__scale", v) for v in (1.0, 1.0, 3.0)], ".*"),
    "a property that counts": (Counting, [run] * 5, ".*"),
    "__getattr__": (Looked, [run] * 3, ".*"),
    "the last size": (LastSize, [run, run, call(X, FEW)], ".*"),
    "a size": (SIZE, [run, run, call(features(N, 3), EDGES)], ".*"),
    "a size of two": (lambda: SIZE(node_dim=0), [
        *[call((LINE, LINE), EDGES)] * 2, call((LINE, LINE), FEW)], ".*"),
    "a size of edges": (
        lambda: SIZE(node_dim=0), [*[call(LINE, EDGES)] * 2, call(LINE, FEW)], ".*"),
    "a size of an attribute": (
        SizeOfAttribute, [narrow, narrow, setting("scale", torch.ones(4))], ".*"),
    "a length": (
        says(lambda self, x_i, x_j: (x_i + x_j) / len(x_j)), [run, run, call(X, FEW)], ".*"),
    "a shape": (
        says(lambda self, x_i, x_j: (x_i + x_j) / x_j.shape[0]), [run, run, call(X, FEW)], ".*"),
    "identity": (Identity, [
        *[call(X, EDGES, COLUMN, COLUMN * 2)] * 2, call(X, EDGES, COLUMN, COLUMN)], ".*"),
    "a seed": (Seeding, [run] * 3, ".*"),
    "a default": (
        DEFAULT, [run, run, under(replaced(DEFAULT.message, "__defaults__", (5.0,)))], ".*"),
    "inference mode": (
        says(lambda self, x_i, x_j: (x_i + x_j) * 3 if x_j.is_inference() else x_i + x_j),
        [no_grad, no_grad, inference(), inference()], ".*"),
    "data": (
        says(lambda self, x_i, x_j: x_i + x_j if x_j.sum() > 0 else x_i - x_j),
        [run, run, call(-X, EDGES)], ".*"),
    "data of edges": (
        says_by(lambda self, x_i, x_j, w: x_i + x_j if bool(w.max() > 100) else x_i - x_j),
        [column, column, call(X, EDGES, COLUMN + 1000)], ".*"),
    "a global": (
        says(lambda self, x_i, x_j: (x_i + x_j) * (FLAG + 1)), [flag(n) for n in (0, 0, 2, 0)],
        ".*"),
    "a builtin": (BUILTIN, [run, run, under(replaced(BUILTIN, "unrelated", 1)), run], ".*"),
    "a name that hides a builtin": (
        BUILTIN, [run, run, under(replaced(globals(), "max", min)), run], ".*p"),
    "a list in a dictionary": (
        says(lambda self, x_i, x_j: (x_i + x_j) * self.scale["a"][0], scale={"a": [2.0]}),
        [run, run, first(lambda s: s.scale["a"].__setitem__(0, 7.0))], ".*"),
    "a nested function": (lambda: Nested(scale=2.0), [run, run, setting("scale", 3.0)], ".*"),
    "super": (lambda: Super(scale=2.0), [run, run, setting("scale", 3.0)], ".*"),
    "random numbers": (says(lambda self, x_i, x_j: x_i + x_j * torch.rand(1)), [run] * 3, ".*"),
    "dropout in a message": (
        says(lambda self, x_i, x_j: F.dropout(x_i + x_j, 0.5, self.training)), [run] * 3, ".*"),
    "a count": (Counted, [run] * 4, ".*"),
    "a default by name": (
        says(lambda self, x_i, x_j: times(x_i + x_j)),
        [run, run, under(replaced(times.__kwdefaults__, "scale", 5.0)), run], ".*"),
    "keywords of a partial function": (
        says(lambda self, x_i, x_j: self.times(x_i + x_j),
             times=functools.partial(times, scale=3.0)),
        [run, run, under(lambda s: replaced(s.times.keywords, "scale", 5.0)(s)), run], ".*"),
    "an attribute of a function": (
        says(lambda self, x_i, x_j: times_factor(x_i + x_j)),
        [run, run, under(replaced(times_factor, "factor", 5.0)), run], ".*"),
    **{f"a variable of a {name}": (
        make, [under(replaced(CELL, "factor", n), times=1) for n in (1.0, 1.0, 3.0, 1.0)], ".*")
       for name, make in zip(("closure", "decorator"), closed_over(), strict=True)},
    "a tensor in two places": (
        says(lambda self, x_i, x_j: x_i if self.a is None else (x_i + x_j) * self.b, a=ROW, b=ROW),
        [run, run, setting("b", OTHER_ROW), setting("a", OTHER_ROW), setting("b", ROW)], ".*"),
    **{f"{name} as attribute and argument": (
        says_by(lambda self, x_i, x_j, w: (x_i + x_j) * self.scale, scale=value),
        [*[call(X, EDGES, value)] * 2, *[call(X, EDGES, changed)] * 2], ".*")
       for name, value, changed in (("row", ROW, OTHER_ROW), ("column", COLUMN, COLUMN * 3))},
}  # fmt: skip


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", TABLE)
def test_a_change_of_what_a_message_reads_is_seen(name: str, like_stock: Any) -> None:
    make, steps, ways = TABLE[name]
    actual = like_stock(make(), *steps)
    assert re.fullmatch(ways, actual), actual


IDLE_MESSAGES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a product": lambda layer, x, d: x * d,
    "a product from the left": lambda layer, x, d: d * x * 2,
    "a product of a parameter": lambda layer, x, d: layer.scale * d + x,
    "a product of views": lambda layer, x, d: (x.view(-1, 2, 4) * d.view(-1, 1, 1)).flatten(1),
    "a linear layer": lambda layer, x, d: layer.lin(x * d),
    "a linear layer of a sum": lambda layer, x, d: layer.lin((x + d).relu()),
    "a linear layer of a concatenation": lambda layer, x, d: layer.joint(torch.cat([x, d], -1)),
    "a matrix product": lambda layer, x, d: (x + d) @ layer.lin.weight,
    "a norm": lambda layer, x, d: F.layer_norm(x + d, (WIDTH,), layer.scale),
    "a square": lambda layer, x, d: (x + d).square(),
    "a power": lambda layer, x, d: (x + d) ** 3,
    "sigmoid": lambda layer, x, d: (x + d).sigmoid(),
    "tanh": lambda layer, x, d: torch.tanh(x - d),
    "silu": lambda layer, x, d: F.silu(x + d),
    "gelu": lambda layer, x, d: F.gelu(d + x),
    "elu": lambda layer, x, d: F.elu(x + d),
    "softplus": lambda layer, x, d: F.softplus(x + d),
    "lerp": lambda layer, x, d: torch.lerp(x, layer.scale * d, 0.5),
    "relu": lambda layer, x, d: (x + d).relu(),
    "minimum": lambda layer, x, d: torch.minimum(x, d),
}


class OfIdleNodes(Layer):
    """Reads something that is no number at nodes that send no message."""

    propagate_type: ClassVar = dict(x=Any, d=Any)

    def forward(self, x: Tensor, d: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.first(x), d=d)

    def message(self, x_j: Tensor, d_j: Tensor) -> Tensor:
        return self.kind(self, x_j, d_j)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", IDLE_MESSAGES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_values_of_idle_nodes_reach_no_gradient(name: str, bad: float, like_stock: Any) -> None:
    """PyG gathers no features of nodes that send no message."""
    d = features(N, 1, seed=5).abs()
    d[[2, 7]] = bad
    idle = EDGES.clone()
    idle[0][(idle[0] == 2) | (idle[0] == 7)] = 3
    other = idle.clone()
    other[0] = torch.arange(E) % 2  # more nodes send nothing
    more = d.clone()
    more[4] = bad
    busy, again = gradient_of(0, X, torch.ones(N, 1), EDGES), gradient_of(0, X, d, idle)
    layer = OfIdleNodes(
        kind=IDLE_MESSAGES[name], scale=nn.Parameter(features(WIDTH)),
        first=nn.Linear(WIDTH, WIDTH), lin=nn.Linear(WIDTH, WIDTH), joint=nn.Linear(WIDTH + 1, 3),
    )  # fmt: skip
    ways = like_stock(layer, busy, again, again, gradient_of(0, X, more, other), busy)
    assert ways.count("p") >= 3 or name in ("a norm", "lerp")  # these are traced in each call
