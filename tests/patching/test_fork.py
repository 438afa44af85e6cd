"""A process that was forked after patch(): what it inherits runs there, and in its parent."""

import copy
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import pyg_accel

pytestmark = [
    pytest.mark.usefixtures("always"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: GCNConv(6, 4),
    "sage": lambda: SAGEConv(6, 4),
    "gin": lambda: GINConv(torch.nn.Linear(6, 4)),
    "gat": lambda: GATConv(6, 2, heads=2),
}


def step(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    """The output of a layer and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    out = layer(x, edge_index)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]


def in_a_fork(function: Callable[[], Any]) -> Any:
    """What a function returns in a child of this process; an error there is one here."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def work() -> None:
        try:
            theirs.send(function())
        except BaseException as error:  # the parent raises it
            theirs.send(error)

    child = context.Process(target=work)
    child.start()
    theirs.close()
    try:
        assert mine.poll(60), "the child does not answer"
        actual = mine.recv()
    finally:
        child.kill()
        child.join()
    if isinstance(actual, BaseException):
        raise actual
    return actual


@pytest.mark.each
@pytest.mark.parametrize("warm", [0, 1, 3], ids=["never called", "called", "recorded"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_fork_after_patch_calls_layers_forward_and_backward(name, warm):
    layer = LAYERS[name]()
    known, new = torch.randint(0, 10, (2, 40)), torch.randint(0, 14, (2, 60))
    calls = [(torch.randn(10, 6), known), (torch.randn(14, 6), new)]
    expected = [step(copy.deepcopy(layer), *call) for call in calls]

    def child() -> tuple[list[Any], list[str]]:
        pyg_accel.reset_report()
        actual = [[t.tolist() for t in step(layer, *call)] for call in calls * 2]
        return actual, [row.formula for row in pyg_accel.report(open("/dev/null", "w")).rows]

    with pyg_accel.patched():
        for _ in range(warm):
            step(layer, *calls[0])
        actual, formulas = in_a_fork(child)
        here = [step(layer, *call) for call in calls]
    for right, mine in zip(expected * 2, actual, strict=True):
        torch.testing.assert_close([torch.tensor(t) for t in mine], right, rtol=1e-4, atol=1e-5)
    for right, mine in zip(expected, here, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    assert formulas and all(formulas)


def test_a_fork_can_unpatch_and_its_parent_stays_patched(report_of):
    layer, x, edges = SAGEConv(6, 4), torch.randn(10, 6), torch.randint(0, 10, (2, 40))
    expected = layer(x, edges)

    def child() -> list[Any]:
        pyg_accel.unpatch()
        pyg_accel.reset_report()
        out = layer(x, edges)
        return [out.tolist(), len(pyg_accel.report(open("/dev/null", "w")).rows)]

    with pyg_accel.patched():
        layer(x, edges)
        actual, rows = in_a_fork(child)
        pyg_accel.reset_report()
        torch.testing.assert_close(layer(x, edges), expected)
        assert [bool(row.formula) for row in report_of()] == [True]
    torch.testing.assert_close(torch.tensor(actual), expected)
    assert rows == 0
