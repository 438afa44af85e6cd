"""The precompiled reductions of rows beside Triton's, and what a call costs the host.

    python -m benchmarks.kernels.rows [--quick] [--minutes M]

For each graph, width, dtype, reduction and kind of weights: microseconds of the kernels of both
backends by CUDA graphs, taken in turns, their ratio (Triton over precompiled: below 1 is slower),
and the largest difference of their results. Then the host: microseconds of ``ops.spmm`` forward,
and forward and backward, on a graph of 24 edges, for both backends, beside ``gather + index_add``.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.tools import graphs, results, timing
from pyg_accel import Graph, ops, use_backend
from pyg_accel.facts import expect_to_stay

NAMES = ("arxiv-like", "amazon0505-like", "molecules-like", "proteins-like", "reddit-like",
         "products-like")  # fmt: skip
SIZES = ("1000x4", "3000x4", "20000x5", "100000x1", "100000x10", "10000x100")  # nodes x mean row
WIDTHS = (1, 2, 7, 16, 33, 64, 128, 256, 602)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = ("triton", "cuda_rows")
MOST_PRODUCTS = 2**36  # edges x features of a case
CALLS = 10  # of each CUDA graph


def graph_of(name: str) -> Graph:
    """A graph by name, or random by its nodes and mean number of entries per row."""
    if name in NAMES:
        rowptr, col = graphs.load(name, device="cuda")
        return Graph.from_csr(rowptr.int(), col.int(), num_cols=rowptr.numel() - 1)
    nodes, mean = map(int, name.split("x"))
    edge_index = torch.randint(nodes, (2, nodes * mean), device="cuda")
    return Graph.from_edge_index(edge_index, (nodes, nodes))


def spmm(backend: str, *args: Any, **options: Any) -> Tensor:
    """``ops.spmm`` by one backend."""
    with use_backend(backend):
        out: Tensor = ops.spmm(*args, **options)
        return out


def kernels(graph: Graph, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the table of kernels on one graph."""
    weights = {"none": None, "edge": torch.rand(graph.num_edges, device="cuda"),
               "head": torch.rand(graph.num_edges, 4, device="cuda")}  # fmt: skip
    widths, dtypes = (7, 64, 256) if quick else WIDTHS, ("fp32", "bf16") if quick else DTYPES
    reduces = ("sum", "max") if quick else ("sum", "mean", "max")
    for width, dtype, kind, reduce in product(widths, dtypes, weights, reduces):
        heads = (4,) if kind == "head" else ()
        if graph.num_edges * width * max(4 * len(heads), 1) > MOST_PRODUCTS:
            continue
        x = torch.randn(graph.num_cols, *heads, width, device="cuda").to(DTYPES[dtype])
        weight = weights[kind]
        weight = None if weight is None else weight.to(x.dtype)
        for edge_order in (False,) if weight is None else (False, True):
            row = both(graph, x, weight, reduce=reduce, edge_order=edge_order)
            yield {"F": width, "dtype": dtype, "weights": kind, "reduce": reduce,
                   "edge_order": edge_order, **row}  # fmt: skip


def both(*args: Any, **options: Any) -> dict[str, Any]:
    """Both backends on one call."""
    with expect_to_stay():
        calls = {backend: partial(spmm, backend, *args, **options) for backend in BACKENDS}
        outs = {backend: call().float() for backend, call in calls.items()}
        replays = {backend: timing.captured(lambda call=call: [call() for _ in range(CALLS)])
                   for backend, call in calls.items()}  # fmt: skip
    laps: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(5):
        for backend, replay in replays.items():
            laps[backend].append(timing.timed(replay, "cuda", budget=0.02).median)
    us = {backend: statistics.median(times) * 1e3 / CALLS for backend, times in laps.items()}
    first, second = outs.values()
    difference = (first - second).abs().max() / first.abs().max().clamp(min=1)
    return {**{f"{backend}_us": value for backend, value in us.items()},
            "ratio": us["triton"] / us["cuda_rows"], "difference": float(difference)}  # fmt: skip


def host() -> Iterator[dict[str, Any]]:
    """Rows of what a call costs the host, on tiny tensors."""
    row, col = edge_index = torch.randint(10, (2, 24), device="cuda")
    graph = Graph.from_edge_index(edge_index, (10, 10))
    x = torch.randn(10, 16, device="cuda", requires_grad=True)
    seed = torch.ones(10, 16, device="cuda")
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "x + 0": lambda y: y + 0,
        "gather + index_add": lambda y: torch.zeros_like(y).index_add_(0, col, y[row]),
        "ops.spmm": lambda y: ops.spmm(graph, y),
        **{backend: partial(spmm, backend, graph) for backend in BACKENDS},
    }
    laps: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for lap in range(40):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began, y = time.perf_counter(), x
            for _ in range(50):
                y = call(y)
            forward = time.perf_counter()
            torch.autograd.grad(y, x, seed)
            ended = time.perf_counter()
            if lap >= 10:
                laps[name].append((forward - began, ended - began))
    for name, times in laps.items():
        first, both = (statistics.median(column) / 50 * 1e6 for column in zip(*times, strict=True))
        yield {"call": name, "forward_us": first, "forward_backward_us": both}


def main() -> None:
    """Measure and write both tables."""
    options = results.parser(
        __doc__, quick="one named graph, few widths", minutes=60.0
    ).parse_args()
    costs = results.Rows("kernels/gpu_rows_host", options, "cuda")
    costs.add(host(), show=True)
    rows = results.Rows("kernels/gpu_rows", options, "cuda")
    deadline = time.monotonic() + 60 * options.minutes
    for name in results.each([*SIZES, *(NAMES[:1] if options.quick else NAMES)], unit="graph"):
        for row in kernels(graph_of(name), options.quick):
            rows.add([row], graph=name)
            if time.monotonic() > deadline:
                break
    frame = rows.frame
    print(frame.groupby(["weights", "reduce", "dtype"]).ratio.describe().to_string())
    rows.done([frame.nsmallest(20, "ratio").iloc[:, :10].to_string(index=False)])


if __name__ == "__main__":
    main()
