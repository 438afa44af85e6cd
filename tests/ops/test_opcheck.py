"""Every operator of the package keeps torch's contract: schema, fake tensors, autograd, compile."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyg_accel import Graph
from pyg_accel.ops import operator

EDGES = torch.tensor([[0, 1, 2, 2, 0, 3, 3, 3], [1, 0, 1, 1, 3, 3, 0, 0]])
COLUMNS = torch.tensor([[0, 3], [1, 2], [0, 5], [4, 5]], dtype=torch.uint8)


def arrays(edge_order: bool) -> tuple[Any, ...]:
    graph = Graph.from_edge_index(EDGES, (4, 5))
    return (
        *graph.csr(edge_order=edge_order)[:3],
        *graph.transposed(edge_order=edge_order)[:3],
        graph.num_cols,
        True,
    )


def turned(edge_order: bool) -> tuple[Any, ...]:
    return (*arrays(edge_order)[3:6], 5, True)


def operand(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, requires_grad=True)


def gspmm(text: str, reduces: list[str], *shapes: tuple[int, ...], want_arg: bool = False) -> Any:
    return lambda: (*arrays(True), [operand(*s) for s in shapes], text, reduces, want_arg)


def sampled(x: torch.Tensor, *others: Any) -> Any:
    return lambda: (*arrays(True)[:3], 4, x, *others, 2, "fastrand", "row")


CALLS = {
    "gspmm": {
        "copy": gspmm("u0", ["sum"], (4, 1, 3)),
        "copy-max": gspmm("u0", ["max"], (4, 1, 3), want_arg=True),
        "weighted": gspmm("mul(u0,e1)", ["mean"], (4, 2, 3), (8, 2, 1)),
        "several": gspmm(
            "relu(add(u0,e1))", ["sum", "max", "min"], (4, 1, 3), (8, 1, 3), want_arg=True
        ),
        "product": gspmm("u0", ["prod"], (4, 1, 3)),
        "messages": gspmm("mul(u0,v1)", ["none"], (4, 1, 3), (5, 1, 3)),
        "dot": gspmm("sum(mul(u0,v1))", ["none"], (4, 2, 3), (5, 2, 3)),
        "csr-order": lambda: (*arrays(False), [operand(8, 1, 2)], "e0", ["sum"], False),
    },
    "scatter_arg": {
        "some": lambda: (operand(5, 3), torch.randint(-1, 4, (5, 3), dtype=torch.int32), 4),
        "no-rows": lambda: (operand(0, 3), torch.empty(0, 3, dtype=torch.int64), 4),
    },
    "gather_arg": {"some": lambda: (operand(4, 3), torch.randint(-1, 4, (5, 3)))},
    "edge_softmax": {
        "one-head": lambda: (*arrays(True)[:3], 4, operand(8, 1)),
        "heads": lambda: (*arrays(False)[:3], 4, operand(8, 3)),
    },
    "edge_softmax_backward": {
        "heads": lambda: (*arrays(True)[:3], 4, operand(8, 3), operand(8, 3))
    },
    "maxk": {"some": lambda: (operand(3, 9), 4), "wide": lambda: (operand(2, 300), 7)},
    "cbsr_spmm": {
        "weighted": lambda: (*arrays(True), operand(4, 2), COLUMNS, 6, operand(8), "mean"),
        "plain": lambda: (*arrays(False), operand(4, 2), COLUMNS, 6, None, "sum"),
    },
    "sspmm": {
        "weighted": lambda: (*arrays(True), operand(5, 6), COLUMNS, operand(8)),
        "plain": lambda: (*arrays(False), operand(5, 6), COLUMNS, None),
    },
    "cbsr_dot": {"some": lambda: (*arrays(True), operand(4, 2), COLUMNS, operand(5, 6))},
    "sampled_sum": {
        "plain": sampled(torch.ones(4, 2, 3), None, None),
        "weighted": sampled(torch.ones(4, 2, 3), None, torch.ones(8, 2)),
        "8-bit": sampled(torch.ones(4, 1, 3, dtype=torch.int8), torch.ones(1, 3), None),
    },
    "segment_matmul": {
        "some": lambda: (operand(5, 3), torch.tensor([0, 2, 2, 5]), operand(3, 3, 4))
    },
    "segment_outer": {"some": lambda: (operand(5, 3), torch.tensor([0, 2, 2, 5]), operand(5, 4))},
    "attention": {
        "dots": lambda: (
            *arrays(True),
            [operand(4, 2, 3), operand(5, 2, 3)],
            "sum(mul(u0,v1))",
            "u0",
        ),
        "edges": lambda: (*arrays(False), [operand(8, 2, 1), operand(4, 1, 3)], "e0", "u1"),
    },
    "attention_gradients": {
        "dots": lambda: (
            *turned(True),
            [*map(torch.randn, [(4, 2, 3), (5, 2, 3), (5, 2, 3), (5, 2, 1), (5, 2, 1), (5, 2, 3)])],
            "sum(mul(u0,v1))",
            "u0",
            [True, True],
        ),
        "edges": lambda: (
            *turned(False),
            [*map(torch.randn, [(8, 2, 1), (4, 1, 3), (5, 2, 3), (5, 2, 1), (5, 2, 1), (5, 2, 3)])],
            "e0",
            "u1",
            [True, False],
        ),
    },
    "gspmm_several": {
        "both": lambda: (
            *arrays(True)[:3],
            4,
            True,
            [torch.randn(4, 2, 3), torch.randn(8, 2, 1)],
            ["mul(u0,e1)", "sum(mul(u0,e1))"],
            ["sum", "none"],
        )
    },
    "coo_to_csr": {"edges": lambda: (EDGES, 5, 4, 1), "turned": lambda: (EDGES, 4, 5, 0)},
    "coo_to_csc": {"edges": lambda: (EDGES, 5, 4, 1), "turned": lambda: (EDGES, 4, 5, 0)},
}


@pytest.mark.one_of(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name, calls in CALLS.items() for call in calls]
)
def test_the_operator_passes_opcheck(name, call):
    torch.library.opcheck(getattr(torch.ops.pyg_accel, name).default, CALLS[name][call]())


@pytest.mark.one_of(2, 1)
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_of_calls_equals_a_loop(name):
    for make in CALLS[name].values():
        flat, form = tree_flatten(make())
        floats = [
            i for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        if not floats:
            continue

        def run(*inputs: torch.Tensor, flat=flat, form=form, floats=floats) -> Any:
            args = list(flat)
            for place, value in zip(floats, inputs, strict=True):
                args[place] = value
            outs = getattr(torch.ops.pyg_accel, name)(*tree_unflatten(args, form))
            return tuple(outs) if isinstance(outs, (list, tuple)) else (outs,)

        batches = [torch.stack([flat[i].detach() * n for n in (1, 2, -3)], 1) for i in floats]
        actual = torch.func.vmap(run, in_dims=1)(*batches)
        loop = zip(*(run(*(b[:, i].contiguous() for b in batches)) for i in range(3)), strict=True)
        for one, other in zip(actual, loop, strict=True):
            assert torch.equal(one, torch.stack(other))


@pytest.mark.parametrize("road", ["direct", "dispatched"])
@pytest.mark.parametrize(
    "name",  # sums over samples refuse a backward pass
    [n for n, one in operator._operators.items() if one.record and n != "sampled_sum"],
)
def test_a_batch_of_gradients_equals_a_loop(name, road):
    call = (
        operator.call
        if road == "direct"
        else lambda name, *args: getattr(torch.ops.pyg_accel, name)(*args)
    )
    for make in CALLS[name].values():
        args = make()
        leaves = [
            t.requires_grad_()
            for t in tree_flatten(args)[0]
            if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        outs = call(name, *args)
        outs = [o for o in (outs if isinstance(outs, (list, tuple)) else [outs]) if o.requires_grad]
        if not outs:
            continue
        seeds = [torch.randn(3, *out.shape) for out in outs]

        def grads(*inputs: torch.Tensor, batched: bool = False, outs=outs, leaves=leaves) -> Any:
            return torch.autograd.grad(
                outs, leaves, inputs, retain_graph=True, allow_unused=True, is_grads_batched=batched
            )

        actual = grads(*seeds, batched=True)
        loop = list(zip(*(grads(*(s[i] for s in seeds)) for i in range(3)), strict=True))
        mapped = [torch.func.vmap(lambda *s, i=i: grads(*s)[i])(*seeds) if one is not None else None
                  for i, one in enumerate(actual)]  # fmt: skip
        for one, also, other in zip(actual, mapped, loop, strict=True):
            assert (one is None) == (other[0] is None)
            if one is not None:
                torch.testing.assert_close(one, torch.stack(other))
                torch.testing.assert_close(also, torch.stack(other))


def test_every_operator_of_the_package_is_checked_here():
    names = {
        schema.name.removeprefix("pyg_accel::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("pyg_accel::")
    }
    # Operators of pyg_accel.pyg_lib have no gradients, and tests of their own.
    points = {"knn", "radius", "nearest", "fps", "graclus_cluster", "grid_cluster", "random_walk"}
    assert set(CALLS) <= names and names - set(CALLS) <= points | {"softmax_csr"}
