"""The precompiled reductions of rows beside Triton's, and what a call costs the host.

    python -m benchmarks.gpu_rows [--quick] [--minutes M] [--out FOLDER]

For each graph, width, dtype, reduction and kind of weights: microseconds of the kernels of both
backends by CUDA graphs, taken in turns, their ratio (Triton over precompiled: below 1 is slower),
and whether they agree. Then the host: microseconds of ``ops.spmm`` forward, and forward and
backward, on a graph of 24 edges, for both backends, beside ``gather + index_add``, net of x + 0.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import gpu_machine, graphs
from pyg_accel import Graph, ops, use_backend
from pyg_accel.facts import expect_to_stay

GRAPHS = ("arxiv-like", "amazon0505-like", "molecules-like", "proteins-like", "reddit-like",
          "products-like")  # fmt: skip
SIZES = ((1_000, 4), (3_000, 4), (20_000, 5), (100_000, 1), (100_000, 10), (10_000, 100))
WIDTHS = (1, 2, 7, 16, 33, 64, 128, 256, 602)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = ("triton", "cuda_rows")
CALLS = 10  # in a CUDA graph


def graph_of(name: str | tuple[int, int]) -> Graph:
    """A graph by name, or random by its nodes and mean entries a row."""
    if isinstance(name, str):
        rowptr, col = graphs.load(name, device="cuda")
        return Graph.from_csr(rowptr.int(), col.int(), num_cols=rowptr.numel() - 1)
    nodes, mean = name
    return Graph.from_edge_index(torch.randint(nodes, (2, nodes * mean), device="cuda"),
                                 (nodes, nodes))  # fmt: skip


def kernels(
    names: list[Any], widths: tuple[int, ...], dtypes: tuple[str, ...], reduces: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Rows of the table of kernels."""
    for name in tqdm(names):
        graph = graph_of(name)
        weights = {"none": None, "edge": torch.rand(graph.num_edges, device="cuda"),
                   "head": torch.rand(graph.num_edges, 4, device="cuda")}  # fmt: skip
        for width, dtype, kind, reduce, numbered in itertools.product(
            widths, dtypes, weights, reduces, (False, True)
        ):
            heads = (4,) if kind == "head" else ()
            if graph.num_edges * width * max(4 * len(heads), 1) > 2**36 or (
                numbered and kind == "none"
            ):
                continue
            x = torch.randn(graph.num_cols, *heads, width, device="cuda").to(DTYPES[dtype])
            weight = weights[kind]
            weight = None if weight is None else weight.to(x.dtype)
            row = one(graph, x, weight, reduce, numbered)
            yield {"graph": str(name), "F": width, "dtype": dtype, "weights": kind,
                   "reduce": reduce, "edge_order": numbered, **row}  # fmt: skip


def one(
    graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, numbered: bool
) -> dict[str, Any]:
    """Both backends on one call."""
    replays: dict[str, Callable[[], Any]] = {}
    outs = {}
    for backend in BACKENDS:

        def call(backend: str = backend) -> Tensor:
            with use_backend(backend):
                out: Tensor = ops.spmm(graph, x, weight, reduce=reduce, edge_order=numbered)
                return out

        with expect_to_stay():
            outs[backend] = call()
            replays[backend] = gpu_machine.captured(lambda: [call() for _ in range(CALLS)])
    laps: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(5):
        for backend, replay in replays.items():
            laps[backend].append(gpu_machine.timed(replay, budget=0.02).median)
    found = {
        f"{backend}_us": statistics.median(times) * 1e3 / CALLS for backend, times in laps.items()
    }
    scale = outs["triton"].abs().max().clamp(min=1)
    error = float(((outs["triton"].float() - outs["cuda_rows"].float()).abs() / scale).max())
    return {**found, "ratio": found["triton_us"] / found["cuda_rows_us"], "difference": error}


def host() -> Iterator[dict[str, Any]]:
    """Rows of what a call costs the host, on tiny tensors."""
    graph = Graph.from_edge_index(torch.randint(10, (2, 24), device="cuda"), (10, 10))
    row, col = torch.randint(10, (2, 24), device="cuda")
    x = torch.randn(10, 16, device="cuda", requires_grad=True)
    seed = torch.ones(10, 16, device="cuda")

    def spmm(backend: str) -> Callable[[Tensor], Tensor]:
        def call(y: Tensor) -> Tensor:
            with use_backend(backend):
                out: Tensor = ops.spmm(graph, y)
                return out

        return call

    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "x + 0": lambda y: y + 0,
        "gather + index_add": lambda y: torch.zeros_like(y).index_add_(0, col, y[row]),
        "ops.spmm": lambda y: ops.spmm(graph, y),
        **{backend: spmm(backend) for backend in BACKENDS},
    }
    laps: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for lap in range(40):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            y = x
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small graphs and few widths")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    costs = pd.DataFrame(host())
    print(costs.to_string(index=False))
    costs.to_csv(options.out / "gpu_rows_host.csv", index=False, float_format="%.4g")
    names: list[Any] = [*SIZES, *(GRAPHS[:1] if options.quick else GRAPHS)]
    rows, deadline = [], time.monotonic() + 60 * options.minutes
    quick = ((7, 64, 256), ("fp32", "bf16"), ("sum", "max"))
    for row in kernels(names, *(quick if options.quick else
                                (WIDTHS, tuple(DTYPES), ("sum", "mean", "max")))):  # fmt: skip
        rows.append({**row, **gpu_machine.facts()})
        pd.DataFrame(rows).to_csv(options.out / "gpu_rows.csv", index=False, float_format="%.4g")
        if time.monotonic() > deadline:
            break
    frame = pd.DataFrame(rows)
    print(frame.groupby(["weights", "reduce", "dtype"]).ratio.describe().to_string())
    print(frame.nsmallest(20, "ratio").iloc[:, :10].to_string(index=False))


if __name__ == "__main__":
    main()
