"""Programs: trees run as they were billed."""

import pytest
import torch
import torch_geometric.nn as nn

from pyg_accel.rewrite import lower
from pyg_accel.rewrite.algebra import Call
from pyg_accel.rewrite.enumerate import associations_of
from pyg_accel.rewrite.lift import bind, lift
from pyg_accel.rewrite.select import assumptions_of

SEVERAL = {
    "GCN": lambda: nn.GCNConv(12, 4),
    "SAGE": lambda: nn.SAGEConv(12, 4),
    "SG": lambda: nn.SGConv(12, 4, K=2),
    "SSG": lambda: nn.SSGConv(12, 4, alpha=0.1, K=2),
    "TAG": lambda: nn.TAGConv(12, 4, K=2),
    "APPNP": lambda: nn.APPNP(K=2, alpha=0.1),
    "Cheb": lambda: nn.ChebConv(12, 4, K=3),
}


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("static", [True, False])
def test_what_is_billed_once_is_computed_once(kind, static, monkeypatch):
    conv, x, edge_index = SEVERAL[kind](), torch.randn(30, 12), torch.randint(30, (2, 90))
    call = Call(conv, bind(conv, (x, edge_index), {}))
    call.static = static
    algebra = lift(conv, call)
    given = assumptions_of(algebra, call, train=False, upstream=True)
    calls, spmm = [], lower.spmm
    monkeypatch.setattr(lower, "spmm", lambda *a, **k: calls.append(a) or spmm(*a, **k))
    with torch.no_grad():
        right = conv(x, edge_index)
        for tree, bill in associations_of(algebra.expr, algebra.also, given).bills.items():
            program = lower.Program(tree, algebra, given.static)
            program.run(call)
            calls.clear()
            torch.testing.assert_close(program.run(call), right)
            billed = [w.once for w in bill.forward if w.name.startswith("spmm")]
            assert len(calls) == billed.count(False), str(tree)
            assert static or not any(billed)
