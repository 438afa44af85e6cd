"""Attention in one kernel of Triton's against its three parts, forward and with its gradient.

    python -m benchmarks.gpu_attention [--graphs NAME ...] [--forms NAME ...] [--sizes HxF ...]

The scores are those of GATConv, GATv2Conv and TransformerConv, operands in float32 and bfloat16.
The parts run where dispatch puts each of them. Both sides are compared on the same operands before
they are timed; what runs out of memory stays in the table without a time.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_machine, graphs, results
from benchmarks.gpu_dot_attention import preferring, within_memory
from pyg_accel import Graph, ops
from pyg_accel.column_reuse import reuse_of
from pyg_accel.ops.attention_unfused import unfused

NAME = "gpu_attention"
FORMS = {
    "GAT": ("leaky_relu(add(u1,v2),0.2)", "u0", "FHH"),
    "GAT, dropout": ("leaky_relu(add(u1,v2),0.2)", "mul(u0,e3)", "FHHM"),
    "GATv2": ("sum(mul(leaky_relu(add(v1,u0),0.2),v2))", "u0", "FF1"),
    "Transformer": ("div(sum(mul(v0,u1)),8.0)", "u2", "FFF"),
}
GRAPHS = ("arxiv-like", "amazon0505-like", "reddit-like")
SIZES = ("4x64", "8x16", "8x8")
ALLOWED = {torch.float32: 2e-4, torch.bfloat16: 3e-2}  # of the largest value: sums in other orders


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--graphs", nargs="+", default=GRAPHS)
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    options = parser.parse_args(arguments)
    facts, rows = gpu_machine.facts(), []
    for name in options.graphs:
        rowptr, col = graphs.load(name, device="cuda")
        graph = Graph(rowptr.int(), col.int(), None, rowptr.numel() - 1, sorted=True)
        for csr in (graph.csr(), graph.transposed()):
            reuse_of(csr)  # dispatch knows the graph
        for form in options.forms:
            for size in options.sizes:
                heads, width = map(int, size.split("x"))
                for dtype in ALLOWED:
                    row = measure(name, graph, form, heads, width, dtype)
                    print(line_of(row), flush=True)
                    rows.append({**row, **facts})
                    results.write(rows, NAME, quick=False)


def measure(
    name: str, graph: Graph, form: str, heads: int, width: int, dtype: torch.dtype
) -> dict[str, Any]:
    score, value, shapes = FORMS[form]
    nodes = graph.num_rows
    torch.manual_seed(0)
    leaves = [
        torch.randn(1 if s == "1" else nodes, heads, 1 if s == "H" else width, device="cuda")
        .div_(4).to(dtype).requires_grad_() for s in shapes if s != "M"
    ]  # fmt: skip
    kept = torch.rand(graph.num_edges, heads, 1, device="cuda") < 0.4
    masks = [kept.to(dtype) / 0.4] if "M" in shapes else []
    grad = torch.randn(nodes, heads, width, device="cuda").to(dtype)

    def given() -> list[Tensor]:
        return [t.expand(nodes, -1, -1) if t.size(0) == 1 else t for t in leaves] + masks

    def parts() -> Tensor:
        return unfused(graph, score, value, given(), edge_order=False)

    def one() -> Tensor:
        return ops.attention(graph, score, value, given())

    row = {"graph": name, "form": form, "heads": heads, "width": width,
           "dtype": str(dtype).removeprefix("torch.")}  # fmt: skip
    right: list[Tensor] = []
    for way, run in (("parts", parts), ("one", one)):

        def train(run: Callable[[], Tensor] = run) -> list[Tensor]:
            return [*torch.autograd.grad(run(), leaves, grad)]

        def figures(run: Callable[[], Tensor] = run, train: Any = train) -> tuple[float, float]:
            found = [run().detach(), *train()]
            right[:] = right or found
            check(found, right, f"{form} on {name}")
            with torch.no_grad():
                forward = gpu_machine.timed(run, budget=0.05).median
            return forward, gpu_machine.timed(train, budget=0.1).median

        with preferring("triton"):
            times = within_memory(figures) or (float("nan"),) * 2
        row |= {f"{way}_forward_ms": times[0], f"{way}_ms": times[1]}
    return row


def line_of(row: dict[str, Any]) -> str:
    what = f"{row['graph']:22s} {row['form']:12s} {row['heads']}x{row['width']} {row['dtype']:9s}"
    for way in ("parts", "one"):
        what += f"  {way} {row[f'{way}_forward_ms']:.3f} {row[f'{way}_ms']:.3f}"
    forward, both = (row[f"one_{k}"] / row[f"parts_{k}"] for k in ("forward_ms", "ms"))
    return f"{what}  {forward:.2f} {both:.2f}"


def check(ours: list[Tensor], right: list[Tensor], what: str) -> None:
    for k, (a, b) in enumerate(zip(ours, right, strict=True)):
        error = float((a.float() - b.float()).abs().max() / b.float().abs().max())
        if not error < ALLOWED[a.dtype]:
            raise SystemExit(f"{what}: result {k} is off by {error:.3g}")


if __name__ == "__main__":
    main()
