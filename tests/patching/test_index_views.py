"""Messages that use views of ``index`` for more than gathering, at default settings."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GraphConv, MessagePassing, SAGEConv
from torch_geometric.nn.aggr import PowerMeanAggregation
from torch_geometric.utils import scatter, softmax, to_torch_coo_tensor, to_torch_csc_tensor

import pyg_accel

N, E, F = 500, 12_000, 24
TABLE = torch.randn(N, F, dtype=torch.float64)
EVERY = torch.arange(0, E + 1, 24)  # a ptr: segments that have nothing to do with the targets


class Layer(MessagePassing):
    """A layer whose message is a function of x_i, x_j and the ids of its targets."""

    def __init__(self, says: Callable[..., Tensor]) -> None:
        super().__init__(aggr="sum")
        self.says = says

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        return self.says(x_i, x_j, index)


def zeros(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.float64)


def column(index: Tensor, width: int) -> Tensor:
    return index.unsqueeze(-1).expand(-1, width)


def changed(index: Tensor) -> Tensor:
    index = index.contiguous() if not index.is_contiguous() else index.clone()
    index[::2] = 0
    return index


SAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "table-of-a-row": lambda i, j, t: TABLE[t.unsqueeze(0)].sum(0) * j,
    "degrees-of-a-column": lambda i, j, t: TABLE[:, 0][t.view(-1, 1)] * j,
    "degrees-alone": lambda i, j, t: TABLE[:, 0][t.view(-1, 1)],
    "table-of-two-rows": lambda i, j, t: TABLE[t.view(2, -1)].sum(0).repeat(2, 1) * j,
    "table-of-columns": lambda i, j, t: TABLE[:, 0][column(t, F)] * j,
    "table-of-bits": lambda i, j, t: TABLE[t.contiguous().view(torch.int32)][:E] * j,
    "a-changed-copy": lambda i, j, t: TABLE[changed(t)] * j,
    "select-by-keywords": lambda i, j, t: torch.index_select(TABLE, index=t, dim=0) * j,
    "add-one-column": lambda i, j, t: j + zeros(N, F).scatter_add(0, t.unsqueeze(-1), j)[t],
    "add-three-columns": lambda i, j, t: j + zeros(N, F).scatter_add(0, column(t, 3), j)[t],
    "add-to-wider": lambda i, j, t: j + zeros(N, F + 2).scatter_add(0, column(t, F), j)[t][:, 2:],
    "add-narrow": lambda i, j, t: zeros(N, 4).scatter_add(0, column(t, 2), j[:, :4])[t][:, :1] * j,
    "maxima-of-three": lambda i, j, t: j
    + zeros(N, F).scatter_reduce(0, column(t, 3), j, "amax", include_self=False)[t],
    "add-in-place": lambda i, j, t: j + zeros(N, F).scatter_add_(0, t.view(-1, 1), j)[t],
    "scatter": lambda i, j, t: j + scatter(j, t.view(-1, 1).squeeze(1), 0, N)[t],
    "softmax-over-a-ptr": lambda i, j, t: softmax((i * j).sum(-1), t, EVERY).unsqueeze(-1) * j,
}  # fmt: skip


PARTIAL = {"add-one-column", "add-three-columns", "add-narrow", "maxima-of-three", "add-in-place"}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("says", SAYS)
def test_a_view_of_another_shape_is_not_the_row_itself(says, strided, same_as_stock):
    edge_index = torch.randint(0, N, (E, 2)).t()
    x = torch.randn(N, F, dtype=torch.float64, requires_grad=True)
    layer, edge_index = Layer(SAYS[says]), edge_index if strided else edge_index.contiguous()
    # torch has no derivative of a scatter that leaves out a part of what it is given.
    with torch.set_grad_enabled(says not in PARTIAL):
        same_as_stock(layer, x, edge_index)


FUSED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "view-and-back": (lambda i, j, t: TABLE[t.view(-1, 1).view(-1)] * j, "mul(v0,u1)"),
    "scatter-expanded": (
        lambda i, j, t: j + zeros(N, F).scatter_add(0, t.view(-1, 1).expand_as(j), j)[t],
        "sum_j u0; sum_j add(u0,v1)",
    ),
    "select-by-keywords": (
        lambda i, j, t: torch.index_select(input=TABLE, index=t, dim=0) * j,
        "mul(v0,u1)",
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_what_is_the_row_is_still_known(name, report_of):
    says, formula = FUSED[name]
    with pyg_accel.patched():
        Layer(says)(torch.randn(N, F, dtype=torch.float64), torch.randint(0, N, (2, E)))
    (row,) = report_of()
    assert formula in row.formula


@pytest.mark.parametrize(
    "says",
    [
        lambda i, j, t: TABLE.index_select(2, t) * j,
        lambda i, j, t: j * (i * j).sum(3, True),
        lambda i, j, t: j + zeros(N, F).scatter_add(2, column(t, F), j)[t],
        lambda i, j, t: j + zeros(N, F).float().scatter_add(0, column(t, F), j)[t],
    ],
    ids=["index_select", "sum", "scatter", "scatter-to-another-dtype"],
)
def test_what_torch_refuses_is_refused(says):
    layer, x = Layer(says), torch.randn(N, F, dtype=torch.float64)
    edge_index = torch.randint(0, N, (2, E))
    with pytest.raises((IndexError, RuntimeError)) as stock:
        layer(x, edge_index)
    with pyg_accel.patched(), pytest.raises(stock.type):
        layer(x, edge_index)


def test_maxima_over_a_tensor_that_is_learned_leave_it_its_gradient(same_as_stock):
    start = zeros(N, F).requires_grad_()
    layer = Layer(
        lambda i, j, t: j + start.scatter_reduce(0, column(t, F), j, "amax", include_self=False)[t]
    )
    layer.start = torch.nn.Parameter(start)
    start = layer.start
    # Half of the nodes have no edges: their maxima are what was there before.
    edge_index = torch.randint(0, N // 2, (2, E))
    same_as_stock(layer, torch.randn(N, F, dtype=torch.float64), edge_index)


STEEP: dict[str, Callable[[], torch.nn.Module]] = {
    "power-mean": lambda: SAGEConv(8, 8, aggr=PowerMeanAggregation(learn=True)),
    "power": lambda: Layer(lambda i, j, t: j**0.5),
    "root": lambda: Layer(lambda i, j, t: j.sqrt()),
    "quotient": lambda: Layer(lambda i, j, t: j / i),
    "reciprocal": lambda: Layer(lambda i, j, t: 1 / j + i.log()),
    "one-feature-each": lambda: Layer(lambda i, j, t: j.gather(1, (8 * i[:, :1]).long() % 8)),
}


@pytest.mark.parametrize("name", STEEP)
def test_narrow_ids_give_what_wide_ones_give(name):
    """Gradients are those of stock with int64: with int32 torch's own are wrong on some CPUs."""
    layer, edge_index = STEEP[name]().double(), torch.randint(0, N, (2, E))
    x = (torch.rand(N, 8, dtype=torch.float64) + 0.1).requires_grad_()

    def run(edges: Tensor) -> tuple[Tensor, Tensor]:
        out = layer(x, edges)
        return out.detach(), torch.autograd.grad(out.sin().sum(), x)[0]

    right = run(edge_index)
    torch.testing.assert_close(layer(x, edge_index.int()).detach(), right[0])
    with pyg_accel.patched():
        torch.testing.assert_close(run(edge_index.int()), right, rtol=1e-9, atol=1e-9)


@pytest.mark.one_of(2)
@pytest.mark.filterwarnings("ignore:Converting sparse tensor")
@pytest.mark.parametrize("make", [to_torch_csc_tensor, to_torch_coo_tensor])
def test_a_matrix_is_as_large_as_it_has_entries(make, report_of):
    few, many = (torch.randint(0, 3_000, (2, e)).unique(dim=1) for e in (300, 400_000))
    layer, x = GraphConv(64, 8), torch.randn(3_000, 64)
    with pyg_accel.patched():
        for edge_index in (few, few, many):
            adj_t = make(edge_index, size=(3_000, 3_000)).t()
            layer(x, adj_t.coalesce() if adj_t.layout == torch.sparse_coo else adj_t)
    rows = report_of()
    assert [row.calls for row in rows if row.formula] == [1]
    assert [row.reason[:6] for row in rows if not row.formula] == ["small:"]


def test_a_wide_matrix_of_few_entries_is_small(report_of):
    edge_index = torch.stack([torch.arange(0, 20_000, 10), torch.arange(0, 20_000, 10)])
    with pyg_accel.patched():
        adj_t = to_torch_csc_tensor(edge_index, size=(20_000, 20_000)).t()
        layer = GraphConv(4, 4)
        for _ in range(2):
            layer(torch.randn(20_000, 4), adj_t)
    assert any(row.reason.startswith("small:") for row in report_of())
