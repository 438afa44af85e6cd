"""Reductions over groups outside of layers: pools, aggregations, scatter, segment, softmax."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import utils
from torch_geometric.nn import aggr

import pyg_accel
from pyg_accel.patching import readouts
from pyg_accel.patching.size import fewest_edges
from pyg_accel.settings import settings

N, G, F = 90, 12, 5

Function = Callable[[Tensor, Tensor], Any]
READOUTS: dict[str, Function] = {
    "add-pool": lambda x, batch: pyg.global_add_pool(x, batch),
    "mean-pool": lambda x, batch: pyg.global_mean_pool(x, batch, G + 2),
    "max-pool": lambda x, batch: pyg.global_max_pool(x, batch, G + 2),
    "scatter-min": lambda x, batch: utils.scatter(x, batch, 0, G, "min"),
    "scatter-of-vectors": lambda x, batch: utils.scatter(x[:, 0], batch, reduce="mean"),
    "scatter-of-blocks": lambda x, batch: utils.scatter(x.view(N, 1, F), batch, -3, reduce="sum"),
    "softmax": lambda x, batch: utils.softmax(x, batch),
    "sum": lambda x, batch: aggr.SumAggregation()(x, batch),
    "mean": lambda x, batch: aggr.MeanAggregation()(x, batch, dim_size=G + 1),
    "max": lambda x, batch: aggr.MaxAggregation()(x, batch),
    "var": lambda x, batch: aggr.VarAggregation()(x, batch),
    "several": lambda x, batch: aggr.MultiAggregation(["mean", "max", "std"])(x, batch),
    "softmax-aggregation": lambda x, batch: aggr.SoftmaxAggregation()(x, batch),
    "attention": lambda x, batch: aggr.AttentionalAggregation(
        lambda t: t[:, :1], lambda t: t.tanh()
    )(x, batch),
    "segment-sum": lambda x, batch: utils.segment(x, starts(batch), "sum"),
    "segment-mean": lambda x, batch: utils.segment(x, starts(batch), "mean"),
    "segment-max": lambda x, batch: utils.segment(x, starts(batch), "max"),
    "softmax-ptr": lambda x, batch: utils.softmax(x, ptr=starts(batch)),
}
OF_NEIGHBOURS = ("segment-sum", "segment-mean", "segment-max", "softmax-ptr")


def starts(batch: Tensor) -> Tensor:
    counts = torch.bincount(batch, minlength=G)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def groups(*, ordered: bool) -> Tensor:
    batch = torch.randint(0, G - 2, (N,))  # the last ones are empty
    return batch.sort()[0] if ordered else batch


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("name", READOUTS)
def test_results_and_gradients_of_every_order_equal_stock(name, ordered, report_of):
    settings.always = True
    x = torch.randn(N, F, dtype=torch.double, requires_grad=True)
    batch = groups(ordered=ordered or name in OF_NEIGHBOURS)

    def run() -> list[Tensor]:
        out = READOUTS[name](x, batch)
        if name in OF_NEIGHBOURS:  # PyG's have no second gradient
            return [out, *torch.autograd.grad(out.sin().sum(), x)]
        (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(grad.square().sum(), x)
        return [out, grad, twice]

    expected = run()
    with pyg_accel.patched():
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other)
    assert any(row.formula for row in report_of())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_other_dtypes_equal_stock(dtype, index):
    settings.always = True
    x, batch = torch.randn(N, F).to(dtype), groups(ordered=False)
    expected = utils.scatter(x.float(), batch, reduce="mean")
    with pyg_accel.patched():
        found = utils.scatter(x, batch.to(index), reduce="mean")
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


UNTOUCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "columns": lambda x, batch: utils.scatter(x.t(), batch, dim=1),
    "whole-numbers": lambda x, batch: utils.scatter(batch, batch),
    "products": lambda x, batch: utils.scatter(x, batch, reduce="mul"),
    "any": lambda x, batch: utils.scatter(x > 0, batch, reduce="any"),
    "one-group": lambda x, batch: pyg.global_add_pool(x, None),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_reductions_are_pygs(name, report_of):
    settings.always = True
    x, batch = torch.randn(N, F), groups(ordered=True)
    expected = UNTOUCHED[name](x, batch)
    with pyg_accel.patched():
        torch.testing.assert_close(UNTOUCHED[name](x, batch), expected, rtol=0, atol=0)
    assert not report_of()


def test_errors_are_pygs():
    settings.always = True
    x, batch = torch.randn(N, F), groups(ordered=True)
    with pyg_accel.patched():
        for wrong in (
            lambda: utils.scatter(x, batch, dim_size=3),
            lambda: utils.scatter(x, batch.view(-1, 1)),
            lambda: utils.scatter(x, batch, reduce="median"),
            lambda: utils.scatter(x, batch[:-1] - 1),
        ):
            with pytest.raises((ValueError, RuntimeError, IndexError)):
                wrong()


def test_an_index_that_was_changed_in_place_is_another():
    settings.always = True
    x, batch = torch.randn(N, F), groups(ordered=True)
    with pyg_accel.patched():
        utils.scatter(x, batch, dim_size=G)
        batch.copy_(batch.flip(0))
        found = utils.scatter(x, batch, dim_size=G)
    torch.testing.assert_close(found, utils.scatter(x, batch, dim_size=G))


def test_a_graph_of_groups_is_gone_with_its_ptr():
    settings.always = True
    x, ptr = torch.randn(N, F), starts(groups(ordered=True))
    known = weakref.ref(ptr)
    with pyg_accel.patched():
        utils.segment(x, ptr, "max")
        del ptr
        gc.collect()
        assert known() is None


def test_only_a_patch_of_everything_reaches_readouts(report_of):
    settings.always = True
    x, batch = torch.randn(N, F), groups(ordered=True)
    with pyg_accel.patched(pyg.SAGEConv(F, F)):
        pyg.global_mean_pool(x, batch)
    assert not report_of()


def test_messages_of_a_layer_that_is_left_to_pyg_are_reduced_by_pyg(report_of):
    settings.always = True
    network = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.BatchNorm1d(20))
    layer, x = pyg.EdgeConv(network), torch.randn(N, 20)
    with pyg_accel.patched():
        layer(x, torch.randint(0, N, (2, 400)))
    assert {row.layer for row in report_of()} == {"EdgeConv"}


def test_a_compiled_readout_is_what_it_is_in_stock():
    settings.always = True
    x, batch = torch.randn(N, F), groups(ordered=True)

    def readout(x: Tensor) -> Tensor:
        return pyg.global_mean_pool(x, batch, G)

    with pyg_accel.patched():
        found = torch.compile(readout, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, readout(x))


def test_large_readouts_are_taken_at_default_settings_and_small_ones_are_not(report_of):
    rows = fewest_edges("cpu", readouts._WORK, 200, new=False, gradient=True)
    x = torch.randn(rows, 50, requires_grad=True)
    batch = torch.randint(0, 99, (x.size(0),))
    with pyg_accel.patched():
        for _ in range(3):  # new groups, and twice known ones
            pyg.global_mean_pool(x, batch).sum().backward()
        pyg.global_max_pool(x[:4000], batch[:4000]).sum().backward()
        assert {(row.formula, row.calls) for row in report_of()} == {
            ("mean_j u0", 2), ("max_j u0", 1)
        }  # fmt: skip
        pyg_accel.reset_report()
        pyg.global_max_pool(x[:20], batch[:20]).sum().backward()
        pyg.global_mean_pool(x[:200], batch[:200])
        assert not report_of()


def test_threads_do_not_change_a_bit():
    settings.always = True
    x, batch = torch.randn(20_000, 8), torch.randint(0, 3, (20_000,))
    with pyg_accel.patched():
        first = pyg.global_add_pool(x, batch)
        torch.set_num_threads(2)
        torch.testing.assert_close(pyg.global_add_pool(x, batch), first, rtol=0, atol=0)
