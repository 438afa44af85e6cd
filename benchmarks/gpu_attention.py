"""Attention in one kernel against its three parts, forward and with the backward pass, on a GPU.

    python -m benchmarks.gpu_attention [--graphs NAME ...] [--heads H] [--width F] [--vary]

The scores are those of GATConv, GATv2Conv and TransformerConv. Both sides are compared on the same
operands before they are timed. ``--vary`` times other launch parameters as well.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_machine, graphs
from pyg_accel import Graph, ops
from pyg_accel.backends.triton import attention, launch
from pyg_accel.ops.attention_parts import unfused

FORMS = {
    "GAT": ("leaky_relu(add(u1,v2),0.2)", "u0", "FHH"),
    "GATv2": ("sum(mul(leaky_relu(add(v1,u0),0.2),v2))", "u0", "FF1"),
    "Transformer": ("div(sum(mul(v0,u1)),8.0)", "u2", "FFF"),
}
VARIANTS = [(256, 64), (64, 64), (256, 32), (256, 16), (64, 16), (257, 32)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--graphs", nargs="+", default=["arxiv-like", "amazon0505-like"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--vary", action="store_true")
    options = parser.parse_args(arguments)
    for name in options.graphs:
        rowptr, col = graphs.load(name, device="cuda")
        graph = Graph(rowptr.int(), col.int(), None, rowptr.numel() - 1, sorted=True)
        for form in options.forms:
            show(name, graph, form, options.heads, options.width, options.vary)


def show(name: str, graph: Graph, form: str, heads: int, width: int, vary: bool) -> None:
    score, value, shapes = FORMS[form]
    nodes = graph.num_rows
    torch.manual_seed(0)
    operands = [
        torch.randn(1 if s == "1" else nodes, heads, 1 if s == "H" else width, device="cuda")
        .div_(4).requires_grad_() for s in shapes
    ]  # fmt: skip
    grad = torch.randn(nodes, heads, width, device="cuda")

    def given() -> list[Tensor]:
        return [t.expand(nodes, -1, -1) if t.size(0) == 1 else t for t in operands]

    def fused() -> Tensor:
        return ops.attention(graph, score, value, given())

    def parts() -> Tensor:
        return unfused(graph, score, value, given(), edge_order=False)

    def train(run: Any) -> Any:
        return lambda: torch.autograd.grad(run(), operands, grad)

    right = [parts(), *train(parts)()]
    check([fused(), *train(fused)()], right, form)
    times = {}
    for what, run in (("parts", parts), ("fused", fused)):
        with torch.no_grad():
            forward = gpu_machine.timed(run).median
        times[what] = (forward, gpu_machine.timed(train(run)).median)
    line = "  ".join(f"{k} {a:.3f} + {b - a:.3f} = {b:.3f}" for k, (a, b) in times.items())
    print(f"{name:16s} {form:12s} {line}  x{times['parts'][1] / times['fused'][1]:.2f}", flush=True)
    if not vary:
        return
    before = launch.ATTENTION_COLUMNS, launch.ATTENTION_REGISTERS
    for variant in VARIANTS:
        launch.ATTENTION_COLUMNS, launch.ATTENTION_REGISTERS = variant
        attention._kernels.cache_clear()
        check([fused(), *train(fused)()], right, form)
        line = []
        for run in (parts, fused):
            with torch.no_grad():
                forward = gpu_machine.timed(run).median
            total = gpu_machine.timed(train(run)).median
            line.append(f"{forward:.3f} + {total - forward:.3f} = {total:.3f}")
        print(f"    {variant}: parts {line[0]}  fused {line[1]}", flush=True)
    launch.ATTENTION_COLUMNS, launch.ATTENTION_REGISTERS = before
    attention._kernels.cache_clear()


def check(ours: list[Tensor], right: list[Tensor], form: str) -> None:
    for k, (a, b) in enumerate(zip(ours, right, strict=True)):
        error = float((a - b).detach().abs().max() / b.detach().abs().max())
        if not error < 2e-4:
            raise SystemExit(f"{form}: result {k} is off by {error:.3g}")


if __name__ == "__main__":
    main()
