"""Attention by dot products on a GPU: AGNN epochs, and the operator of TransformerConv.

    python -m benchmarks.gpu_dot_attention [--quick]

AGNN is the second model of the TC-GNN paper: a layer in, four AGNNConv of 32 features, a layer out.
Stock PyG stands beside `pyg_accel.patched()`; what runs out of memory stays in the table without a
time. The operator is one head of 128 features in fp16, on Tensor Cores in one kernel, by its parts
(each where dispatch puts it), by Triton's kernel and by stock PyG; forward, and with the gradients
of queries, keys and values. Everything is compared with the parts before it is timed.
"""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.utils import softmax

import pyg_accel
from benchmarks import gpu_machine, graphs, results
from benchmarks.tc_paper import AGNN
from pyg_accel import Graph, ops
from pyg_accel.backends import get_backend
from pyg_accel.backends.dispatch import forget_decisions
from pyg_accel.column_reuse import per_column, reuse_of
from pyg_accel.ops.attention_unfused import unfused

NAME = "gpu_dot_attention"
SCORE, VALUE = "div(sum(mul(v0,u1)),11.313708498984761)", "u2"
WIDTH, FEATURES, CLASSES = 128, 96, 16
ALLOWED = 1e-2  # of the largest value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small graphs")
    options = parser.parse_args(arguments)
    size = "@0.02" if options.quick else ""
    facts, rows = gpu_machine.facts(), []
    for measure, name in (
        (agnn, f"amazon0505-like{size}"),
        (agnn, f"reddit-like{size}"),
        (operator, f"reddit-like/ordered{size}"),
        (operator, f"products-like/ordered{size}"),
        (operator, "mycielskian17" if not options.quick else "mycielskian11"),
    ):
        for row in measure(name):
            print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()),
                  flush=True)  # fmt: skip
            rows.append({**row, **facts})
            results.write(rows, NAME, quick=options.quick)


def agnn(name: str) -> list[dict[str, Any]]:
    csr = graphs.load(name, device="cuda")
    edge_index, nodes = graphs.edge_list(csr), csr[0].numel() - 1
    torch.manual_seed(0)
    x = torch.randn(nodes, FEATURES, device="cuda")
    y = torch.randint(CLASSES, (nodes,), device="cuda")

    def train() -> tuple[Tensor, Callable[[], None]]:
        torch.manual_seed(1)
        model = AGNN(FEATURES, CLASSES).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        with torch.no_grad():
            out = model(x, edge_index)

        def epoch() -> None:
            optimizer.zero_grad()
            cross_entropy(model(x, edge_index), y).backward()
            optimizer.step()

        return out, epoch

    rows, right = [], None
    for backend in ("patched", "stock"):
        row = {"what": "AGNN epoch", "graph": name, "by": backend, "forward_ms": float("nan")}
        with pyg_accel.patched() if backend == "patched" else contextlib.nullcontext():
            found = within_memory(lambda: measured(train))
        if found is None:
            rows.append({**row, "ms": float("nan"), "peak_mib": float("nan")})
            continue
        out, time, peak = found
        right = out if right is None else right
        compare([out], [right], f"{backend} AGNN on {name}")
        rows.append({**row, "ms": time, "peak_mib": peak})
    return rows


def measured(train: Callable[[], tuple[Tensor, Callable[[], None]]]) -> tuple[Tensor, float, float]:
    out, epoch = train()
    for _ in range(3):  # four layers each: dispatch knows the graph after that
        epoch()
    return out, gpu_machine.timed(epoch, budget=0.5).median, gpu_machine.peak_memory(epoch)


def operator(name: str) -> list[dict[str, Any]]:
    rowptr, col = graphs.load(name, device="cuda")
    graph = Graph(rowptr.int(), col.int(), None, rowptr.numel() - 1, sorted=True)
    sharing = per_column(reuse_of(graph.csr()))
    edge_index = graphs.edge_list((rowptr, col))
    torch.manual_seed(0)
    operands = [
        torch.randn(graph.num_rows, 1, WIDTH, device="cuda").half().requires_grad_()
        for _ in range(3)
    ]
    grad = torch.randn(graph.num_rows, 1, WIDTH, device="cuda").half()

    def stock() -> Tensor:
        query, key, value = (t.squeeze(1) for t in operands)
        source, target = edge_index
        scores = (query[target] * key[source]).sum(-1) / WIDTH**0.5
        weights = softmax(scores, target, num_nodes=graph.num_rows)
        messages = value[source] * weights.unsqueeze(-1)
        return value.new_zeros(value.shape).index_add_(0, target, messages).unsqueeze(1)

    def parts() -> Tensor:
        return unfused(graph, SCORE, VALUE, operands, edge_order=False)

    def whole() -> Tensor:
        return ops.attention(graph, SCORE, VALUE, operands)

    free = contextlib.nullcontext
    ways: dict[str, tuple[Any, Callable[[], Tensor]]] = {
        "Tensor Cores, one kernel": (lambda: preferring("cuda"), whole),
        "dispatch": (free, whole),
        "parts": (free, parts),
        "parts, CUDA cores": (lambda: pyg_accel.use_backend("triton"), parts),
        "Triton, one kernel": (lambda: preferring("triton"), whole),
        "stock": (free, stock),
    }
    rows, right = [], None
    for way, (context, run) in ways.items():
        row = {"what": f"attention {WIDTH} fp16", "graph": name, "by": way}
        row |= {"forward_ms": float("nan"), "ms": float("nan"), "peak_mib": float("nan")}

        def train(run: Callable[[], Tensor] = run) -> list[Tensor]:
            return [*torch.autograd.grad(run(), operands, grad)]

        def figures(
            context: Any = context, run: Callable[[], Tensor] = run, train: Any = train
        ) -> dict[str, Any]:
            with context():
                with torch.no_grad():
                    for _ in range(9):  # dispatch knows the graph after that
                        out = run()
                    time = gpu_machine.timed(run, budget=0.2).median
                return {"found": [out, *train()], "forward_ms": time,
                        "ms": gpu_machine.timed(train, budget=0.2).median,
                        "peak_mib": gpu_machine.peak_memory(train)}  # fmt: skip

        done = within_memory(figures)
        if done is not None:
            found = done.pop("found")
            right = found if right is None else right
            compare(found, right, f"{way} on {name}")
            row |= done
        rows.append(row | {"sharing": sharing[-1]})
    return rows


@contextlib.contextmanager
def preferring(backend: str) -> Any:
    """Attention in one kernel of this backend, its gradient in two, whatever they would cost."""
    with contextlib.ExitStack() as stack:
        for name in ("cuda", "triton"):
            kernels, price = get_backend(name).kernels, float(name != backend)
            fixed = {
                op: replace(kernel, cost=lambda spec, price=price: price,
                            prefers_unfused=lambda spec: False)
                for op, kernel in kernels.items() if op.startswith("attention")
            }  # fmt: skip
            stack.enter_context(patch.dict(kernels, fixed))
        forget_decisions()
        yield
    forget_decisions()


def within_memory(fn: Callable[[], Any]) -> Any:
    """The result, or None where memory runs out."""
    try:
        return fn()
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def compare(ours: list[Tensor], right: list[Tensor], what: str) -> None:
    for k, (a, b) in enumerate(zip(ours, right, strict=True)):
        error = float((a.float() - b.float()).abs().max() / b.float().abs().max())
        if not error < ALLOWED:
            raise SystemExit(f"{what}: result {k} is off by {error:.3g}")


if __name__ == "__main__":
    main()
