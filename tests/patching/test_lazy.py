"""The rules of lazy edge tensors, one by one, through messages that a user might write."""

import math  # noqa: F401 - of messages
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as fn
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

import pyg_accel
from benchmarks.layers.modes import traces
from tests.user_layers import Layer, written

pytestmark = pytest.mark.usefixtures("always")

N, E, F = 25, 160, 6
LINEAR = torch.nn.Linear(F, 5).double()
WIDE = torch.nn.Linear(3 * F, 5).double()
ONE_SCORE = torch.nn.Linear(F, 1).double()
SCALE = torch.randn(F, dtype=torch.float64)
SCORES = torch.randn(3, 40, dtype=torch.float64)
ONES, THREE = torch.ones(40, 40).double(), torch.ones(3, 80).double()
EXPONENT = torch.nn.Parameter(torch.tensor([1.5]))


def features(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


def edges(ends: int = N) -> Tensor:
    return torch.randint(0, ends, (2, E))


class Says(Layer):
    """A layer whose message is a function of x_i, x_j, e (features of edges) and w (a number)."""

    propagate_type: ClassVar = dict(x=Any, e=Any, w=Any)

    def __init__(self, says: Any, aggr: Any = "sum", node_dim: int = -2) -> None:
        super().__init__(aggr, node_dim, says=function(says) if isinstance(says, str) else says)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e, w=w)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return self.says(x_i, x_j, e, w)


@pytest.fixture
def inputs() -> tuple[Tensor, ...]:
    return features(N, F), edges(N - 3), features(E, F), features(E, 1)


def of_width(width: int, of_edges: int | None = None) -> tuple[Tensor, ...]:
    return features(N, width), edges(), features(E, of_edges or width), features(E, 1)


# -- messages, as texts ---------------------------------------------------------------------------


def set_in_place(t: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(t)
    return t


def filled(function: Callable[[Tensor], Any]) -> Tensor:
    return set_in_place(torch.zeros(E, F, dtype=torch.float64), function)


def heads(j: Tensor, e: Tensor) -> Tensor:
    return j.view(j.size(0), 2, -1) * e.view(-1, 2, 1)


def tables() -> dict[str, dict[str, str]]:
    """The messages of ``messages.txt``, by section, and the formulas that they become."""
    actual: dict[str, dict[str, str]] = {}
    for line in Path(__file__).with_name("messages.txt").read_text().splitlines()[2:]:
        if line.startswith("["):
            section = actual[line[1 : line.index("]")]] = {}
        elif line:
            text, _, formula = line.partition(" -> ")
            section[text] = formula
    return actual


MESSAGES = tables()


def function(text: str, arguments: str = "i, j, e, w") -> Callable[..., Tensor]:
    return eval(f"lambda {arguments}: {text}", globals())


narrow_or_wide = pytest.mark.parametrize("width", [4, 40], ids=["narrow", "wide"])


@pytest.mark.one_of(4)
@pytest.mark.parametrize("reduce", ["sum", "max", "mean+sqsum"])
@pytest.mark.parametrize("text", MESSAGES["formulas"])
def test_a_message_becomes_the_formula_it_says_and_equals_stock(
    text, reduce, inputs, same_as_stock, report_of
):
    same_as_stock(Says(text, ["mean", "std"] if reduce == "mean+sqsum" else reduce), *inputs)
    assert [row.formula for row in report_of()] == [f"{reduce}_j {MESSAGES['formulas'][text]}"]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("text", [*MESSAGES["others"], *MESSAGES["calls"]])
def test_any_other_message_and_functions_called_in_other_ways_equal_stock(
    text, aggr, inputs, same_as_stock
):
    same_as_stock(Says(text, aggr), *inputs)


@pytest.mark.each
@narrow_or_wide
@pytest.mark.parametrize("text", [*MESSAGES["slices"], *MESSAGES["tensors"]])
def test_pieces_of_messages_and_functions_of_tensors_equal_stock(text, width, same_as_stock):
    same_as_stock(Says(text), *of_width(width))


@pytest.mark.each
@pytest.mark.parametrize("width", [6, 20], ids=["narrow", "wide"])
@pytest.mark.parametrize("text", MESSAGES["misfits"])
def test_linear_layers_that_do_not_fit_do_as_in_stock(text, width, same_as_stock):
    args, layer = of_width(width), Says(text)
    try:
        layer(*args)
    except (RuntimeError, IndexError) as error:
        with pyg_accel.patched(), pytest.raises(type(error)) as actual:
            layer(*args)
        assert str(actual.value) == str(error)
    else:
        same_as_stock(layer, *args)


@pytest.mark.each
@pytest.mark.parametrize("of_nodes", [False, True], ids=["edges", "nodes"])
@pytest.mark.parametrize("text", MESSAGES["pieces"])
def test_where_pieces_of_a_function_meet_it_equals_stock(text, of_nodes, same_as_stock):
    """On wide messages that are 0, or not far from it, at many edges."""
    x = torch.randn(N, 40).relu_() * 1e-5  # in float32, which cancels soonest
    x, graph, weight = x.requires_grad_(), edges(), torch.rand(E, 1)
    piece = function(text, "t")
    layer = Says(lambda i, j, e, w: piece(j) if of_nodes else piece(j * w))
    same_as_stock(layer, x, graph, weight, weight)


@pytest.mark.each
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("text", MESSAGES["steep"])
def test_nodes_without_edges_do_not_make_gradients_infinite(text, side, same_as_stock, report_of):
    x, steep = torch.rand(N, 40) + 0.1, function(text, "t")
    x[-3:] = torch.tensor([[0.0], [-1.0], [200.0]])
    layer = Says(lambda i, j, e, w: steep(j if side == "source" else i))
    layer.exponent = EXPONENT
    same_as_stock(layer, x.requires_grad_(), edges(N - 3), x.detach(), x.detach())
    assert layer.exponent.grad is None or bool(layer.exponent.grad.isfinite())
    assert [row.formula != "" for row in report_of()] == [True]


@pytest.mark.each
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", ["mean", "std"]], ids=str)
@pytest.mark.parametrize("text", MESSAGES["later"])
def test_what_is_left_for_the_reduced_messages_equals_stock(text, aggr, same_as_stock):
    same_as_stock(Says(text, aggr, node_dim=0), *of_width(40, 2))


@pytest.mark.parametrize("text", MESSAGES["later"])
def test_what_is_left_for_the_reduced_messages_leaves_the_formula_alone(text, report_of):
    with pyg_accel.patched():
        Says(text, node_dim=0)(*of_width(40, 2))
    assert [row.formula for row in report_of()] == [MESSAGES["later"][text]]


DECLINED = {
    "a maximum of sums over heads": (
        "heads(j, e).sum(1)", "max", lambda: of_width(40, 2), "'max' of messages that are sums"),
    "an unknown function": (
        "(i + j).cumsum(0)", "sum", lambda: of_width(40), "'cumsum' on messages of [E, 40]"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_a_wide_message_declines_with_a_reason(name, as_stock, report_of):
    text, aggr, make, reason = DECLINED[name]
    layer, args = Says(text, aggr, node_dim=0), make()
    with traces() as entered:
        assert as_stock(layer, *args, times=4) == {"Says": {f"[{reason}]"}}
    assert len(entered) == 2  # in a call of the layer, and alone: from then on it runs once
    with pyg_accel.patched():
        layer(*args), layer(*args)
    assert [(row.formula, row.calls) for row in report_of()] == [("", 2)]


def test_a_narrow_message_of_an_unknown_function_is_written_out(report_of):
    with pyg_accel.patched():
        Says("(i + j).sin()")(*of_width(3))
    (row,) = report_of()
    assert row.formula.startswith("add(v0,u1)")


@pytest.mark.parametrize("text", [
    "fn.dropout(i + j, 0.4, training=True)",
    "((i + j) * torch.rand(E, i.size(1))).sin()",  # drawn once, though the wide message declines
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
@narrow_or_wide
def test_random_numbers_in_a_message_are_those_of_stock(text, training, width, as_stock):
    layer, args = Says(text).train(training), of_width(width)

    def drawn() -> list[Tensor]:
        torch.manual_seed(11)
        return [layer(*args), layer(*args), torch.rand(3)]

    as_stock(drawn)


# -- types of numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("other", [0.5, torch.tensor(0.5)], ids=["number", "scalar-tensor"])
def test_a_number_that_is_chosen_does_not_widen_the_messages(other, inputs, same_as_stock):
    x, edge_index, e, w = inputs
    given = [t.detach().bfloat16() for t in (x, e, w)]
    layer = Says(lambda i, j, e, w: torch.where(w > 0, i * j, other), "max")
    same_as_stock(layer, given[0], edge_index, *given[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("text", ["j * e", "(i + j) * e + e"])
def test_mixed_precision_messages_have_the_dtype_of_stock(text, dtype, as_stock):
    x, e = torch.randn(N, F), torch.randn(E, F).to(dtype)
    as_stock(Says(text), x, edges(), e, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("aggr", ["sum", "max", "mean"])
def test_integer_messages_equal_stock(aggr, as_stock):
    as_stock(Layer(aggr), torch.arange(N).view(-1, 1), edges(), rtol=0, atol=0)


# -- layers that do more than send a message ------------------------------------------------------


class PutsAside(Says):
    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor, w: Tensor) -> Tensor:
        self.last, self.nested = x_i - x_j, [x_i * x_j]
        return self.last


class Returns(PutsAside):
    def update(self, out: Tensor) -> Any:
        return out, self.last.relu(), {"extra": [self.last, *self.nested]}


@pytest.mark.parametrize("kind", [PutsAside, Returns])
def test_what_a_layer_puts_aside_or_returns_are_ordinary_tensors(kind, inputs, same_as_stock):
    layer = kind(None)
    same_as_stock(layer, *inputs)
    expected = [kind(None)(*inputs), layer.last, *layer.nested]
    with pyg_accel.patched():
        out = layer(*inputs)
    tensors = [
        layer.last,
        *layer.nested,
        *([*out[:2], *out[2]["extra"]] if kind is Returns else []),
    ]
    assert {type(t) for t in tensors} == {Tensor}
    torch.testing.assert_close([out, layer.last, *layer.nested], expected)


def scatters(self: Any, inputs: Tensor, index: Tensor, dim_size: Any = None) -> Tensor:
    zeros = torch.zeros(dim_size, F, dtype=inputs.dtype)
    total = scatter(inputs, index, 0, dim_size, "sum") + zeros.index_add(0, index, inputs)
    return total + scatter(inputs, index, 0, dim_size, "max")


def continues(self: Any, inputs: Tensor, index: Tensor, dim_size: Any = None) -> Tensor:
    """Into something that is not empty."""
    start = torch.full((dim_size, F), 0.5, dtype=inputs.dtype)
    where = index.view(-1, 1).expand_as(inputs)
    return (
        start.scatter_add(0, where, inputs)
        + start.scatter_reduce(0, where, inputs, "amax", include_self=True)
        + start.scatter_reduce(0, where, inputs, "mean", include_self=False)
        + start.clone().scatter_add_(0, where, inputs)
    )


@pytest.mark.parametrize("aggregate", [scatters, continues])
def test_an_aggregate_written_by_hand_equals_stock(aggregate, inputs, same_as_stock, report_of):
    same_as_stock(written(Says, aggregate=aggregate)("(i + j).relu()"), *inputs)
    fused = any("sum_j relu(add(v0,u1))" in row.formula for row in report_of())
    assert fused or aggregate is continues


def over_sources(self: Any, x_i: Tensor, x_j: Tensor, edge_index_j: Tensor) -> Tensor:
    return scatter(x_i * x_j, edge_index_j, 0, N, "sum")[edge_index_j] + x_i


class Gathers(Says):
    """Gathers by hand by rows of its edge_index."""

    propagate_type: ClassVar = dict(x=Any, both=Any)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
        self.norm = x.abs().sum(1) + 1
        return self.propagate(edge_index, x=x, both=edge_index)

    def message(self, x_j: Tensor, edge_index_i: Tensor, edge_index_j: Tensor) -> Tensor:
        return x_j / (self.norm[edge_index_i] * self.norm[edge_index_j]).sqrt().view(-1, 1)


class Mixed(Says):
    """Node data that are integers and truth values."""

    propagate_type: ClassVar = dict(x=Any, kind=Any, flag=Any)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
        kind = torch.arange(N).view(-1, 1)
        return self.propagate(edge_index, x=x, kind=kind, flag=kind > 9)

    def message(self, x_j: Tensor, kind_i: Tensor, kind_j: Tensor, flag_j: Tensor) -> Tensor:
        return x_j * kind_i + (kind_j == kind_i) * x_j + flag_j * x_j


class Updates(Says):
    """Values of edges are an update of their own."""

    edge_updater_type: ClassVar = dict(x=Any, e=Any)
    propagate_type: ClassVar = dict(x=Any, alpha=Any)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Any:
        alpha = self.edge_updater(edge_index, x=x, e=e)
        return self.propagate(edge_index, x=x, alpha=alpha), alpha

    def edge_update(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return (x_i * x_j + e).tanh()

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return x_j * alpha


class Outer(Says):
    """A layer inside of a message."""

    propagate_type: ClassVar = dict(x=Any)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
        self.inner, self.x, self.edges = Layer("max"), x, edge_index
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        return self.inner(self.x, self.edges)[index] * x_j + x_i


@pytest.mark.parametrize(
    "kind", [written(Says, message=over_sources), Gathers, Mixed, Updates, Outer]
)
def test_layers_that_do_more_equal_stock(kind, inputs, same_as_stock):
    same_as_stock(kind(None), *inputs)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("heads", [1, 3, 40])
def test_attention_written_by_hand_equals_stock(heads, inputs, same_as_stock):
    class Attends(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Any, size_i: Any) -> Tensor:
            alpha = softmax(fn.leaky_relu(self.lin(x_i) + self.lin(x_j)), index, ptr, size_i)
            return alpha.unsqueeze(-1) * x_j.unsqueeze(1)

    layer = Attends(node_dim=0)
    layer.lin = torch.nn.Linear(F, heads).double()
    same_as_stock(layer, *inputs)


# -- values of edges ------------------------------------------------------------------------------

OF_EDGES = written(
    propagate_type=dict(e=Any),
    forward=lambda self, e, edge_index, size: self.propagate(edge_index, e=e, size=size),
    message=lambda self, e: e,
)


def more_sources() -> Tensor:
    return torch.stack([torch.randint(2 * N, (E,)), torch.randint(N - 3, (E,))])


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", ["sum", "min"]])
def test_values_of_edges_are_reduced_by_kernels(aggr, flow, same_as_stock, report_of):
    layer, graph = OF_EDGES(aggr, flow=flow), more_sources()
    for _ in range(2):  # the graph is known in the second call
        same_as_stock(layer, features(E, F), graph, (2 * N, N))
    wanted = f"{aggr if isinstance(aggr, str) else '+'.join(aggr)}_j e0"
    assert [(row.formula, row.reason) for row in report_of()] == [(wanted, "")]


LEFT_TO_PYG = {
    "no size": ({}, lambda: features(E, F), None),
    "numbers": ({}, lambda: torch.randint(9, (E, F)), (2 * N, N)),
    "one dimension": ({"node_dim": -1}, lambda: features(E), (2 * N, N)),
    "median": ({"aggr": "median"}, lambda: features(E, F), (2 * N, N)),
}


@pytest.mark.parametrize("kind", LEFT_TO_PYG)
def test_other_values_of_edges_are_left_to_pyg(kind, same_as_stock, report_of):
    options, values, size = LEFT_TO_PYG[kind]
    same_as_stock(OF_EDGES(**options), values(), more_sources(), size)
    assert [row.formula for row in report_of()] == [""]
