"""Sums over sampled edges against the full graph and against a graph sampled beforehand.

    python -m benchmarks.sampled_kernels [--device cuda] [--quick] [--tune] [--out FOLDER]

For each graph, strategy and width: `sampled_spmm` on the full graph, sampling included; the SpMM of
this package on a graph that holds the same edges, which somebody has sampled before; and on the
full graph that SpMM and cuSPARSE (MKL on a CPU). Every output is first held against float64 sums
over the sample that the definition writes out. `--tune` tries launch parameters of the GPU kernel.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import gpu_machine, machine, results, shares
from pyg_accel import Graph, ops, sampling_rates
from pyg_accel.backends.sampling import STRATEGIES, Sample, Sampling, edge_factors, take

NAME = "sampled_kernels"
GRAPHS = {
    "cuda": ("reddit-like", "proteins-like", "products-like", "arxiv-like", "pubmed-like"),
    "cpu": ("reddit-like@0.05", "rmat-20k", "rmat-169k"),
}
QUICK_GRAPHS = {"cuda": ("reddit-like@0.1",), "cpu": ("rmat-2.7k",)}
FEATURES = 128
WIDTHS = {"cuda": (16, 32, 64, 128, 256, 512), "cpu": (16, 64, 256)}
TARGETS = {16: 25.0, 32: 15.0, 64: 9.0}  # times cuSPARSE on reddit-like
TUNED_WIDTHS = (16, 64)
PEERS = {"sampled_spmm": "spmm, sampled before",
         "weighted, rescaled as gcn": "weighted spmm, sampled before"}  # fmt: skip
CHECKED = {"cuda": 2000, "cpu": 200}
SEED = 1


class Inputs:
    """A graph and features on a device."""

    def __init__(self, name: str, device: str) -> None:
        edge_index, self.nodes = shares.load(name, device)
        self.name, size = name, (self.nodes, self.nodes)
        self.graph = Graph.from_edge_index(edge_index.int(), size)
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(self.nodes, FEATURES, device=device, generator=generator)
        self.rows = torch.randint(
            self.nodes, (CHECKED[device],), device=device, generator=generator
        )
        longest = self.graph.degree.topk(min(CHECKED[device] // 100, self.nodes)).indices
        self.rows = torch.cat([self.rows, longest])

    def truth(self, graph: Graph, x: Tensor, weight: Tensor | None) -> Tensor:
        """[rows, F] float64, sums over the entries of a graph."""
        starts, stops = graph.rowptr[self.rows].long(), graph.rowptr[self.rows + 1].long()
        counts = stops - starts
        local = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        entry = torch.arange(local.numel(), device=x.device) - first[local] + starts[local]
        total = torch.zeros(len(counts), x.size(1), dtype=torch.float64, device=x.device)
        terms = x[graph.col[entry].long()].double()
        if weight is not None:
            terms = terms * weight[entry].unsqueeze(1)
        return total.index_add_(0, local, terms)

    def error(
        self, out: Tensor, graph: Graph, x: Tensor, weight: Tensor | None = None, *,
        allowed: float = 2e-5,
    ) -> float:  # fmt: skip
        """The largest error in units of what is allowed: relative to the sum of magnitudes."""
        scale = self.truth(graph, x.abs(), weight) + 1e-6
        off = (out[self.rows].double() - self.truth(graph, x, weight)).abs()
        return float((off / scale).max()) / allowed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a small graph")
    parser.add_argument("--tune", action="store_true", help="try launch parameters instead")
    parser.add_argument("--only", default="", help="graphs whose name starts like this")
    parser.add_argument("--widths", nargs="+", type=int, help="edges a node, at most")
    parser.add_argument("--out", type=Path, help="folder of the CSV")
    options = parser.parse_args(arguments)
    widths = options.widths or WIDTHS[options.device]
    names = (QUICK_GRAPHS if options.quick else GRAPHS)[options.device]
    names = tuple(name for name in names if name.startswith(options.only))
    folder = options.out or Path(__file__).with_name("results")
    folder.mkdir(parents=True, exist_ok=True)
    facts = gpu_machine.facts_of(options.device)
    rows: list[dict[str, Any]] = []
    for name in (progress := tqdm(names, unit="graph")):
        progress.set_description(name)
        inputs = Inputs(name, options.device)
        for row in tune(inputs) if options.tune else measure(inputs, widths):
            rows.append({**row, **facts})
            progress.write(line(row))
        suffix = ("_cuda" if options.device == "cuda" else "") + ("_tune" if options.tune else "")
        suffix += "_quick" if options.quick else ""
        frame = with_others(pd.DataFrame(rows), folder / f"{NAME}{suffix}.csv")
        frame.to_csv(folder / f"{NAME}{suffix}.csv", index=False, float_format="%.5g")
    if not options.tune:
        summarise(frame)


def with_others(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Rows that were measured, after those of the file whose graph and width were not."""
    if not path.exists():
        return frame
    before, key = results.read(path).set_index(["graph", "width"]), ["graph", "width"]
    kept = before[~before.index.isin(frame.set_index(key).index)].reset_index()
    return pd.concat([kept[frame.columns], frame], ignore_index=True)


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    what = f"{row['graph']:18} {row['strategy']:8} {row['width']:>4} {row['storage']:5}"
    return f"{what} {row['backend']:22} {row['ms']:9.4f} ms, on the device {row['device_ms']:9.4f}"


def time_of(call: Callable[[], Any], device: str) -> dict[str, float]:
    """Median and quantiles of a call; on a GPU also without the launching."""
    if device == "cpu":
        time = machine.timed(call, repeats=5, min_time=0.02)
        return {"ms": time.median, "ms_p20": time.p20, "ms_p80": time.p80, "device_ms": time.median}
    time = gpu_machine.timed(call, budget=0.05)
    graph = gpu_machine.timed(gpu_machine.captured(call), budget=0.05)
    return {
        "ms": time.median, "ms_p20": time.p20, "ms_p80": time.p80, "device_ms": graph.median,
    }  # fmt: skip


def measure(inputs: Inputs, widths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of one graph."""
    graph, x, device = inputs.graph, inputs.x, inputs.x.device.type
    facts = {"graph": inputs.name, "N": inputs.nodes, "E": graph.num_edges, "F": FEATURES}
    whole = {**facts, "strategy": "all", "width": 0, "storage": "fp32", "rate": 1.0}
    ones = torch.ones(graph.num_edges, device=x.device)
    matrix = torch.sparse_csr_tensor(graph.rowptr, graph.col, ones, (inputs.nodes, inputs.nodes))
    library = "cuSPARSE" if device == "cuda" else "MKL"
    calls = {library: lambda: matrix @ x, "pyg_accel spmm": lambda: ops.spmm(graph, x)}
    for backend, call in calls.items():
        check(inputs.error(call(), graph, x), backend)
        yield {**whole, "backend": backend, **time_of(call, device)}

    rates = sampling_rates(graph, widths)
    for strategy, width in itertools.product(STRATEGIES, widths):
        case = {**facts, "strategy": strategy, "width": width, "rate": rates[width]}
        for row in one_case(inputs, strategy, width):
            yield {**case, **row}


def one_case(inputs: Inputs, strategy: str, width: int) -> Iterator[dict[str, Any]]:
    """Rows of one strategy and width."""
    graph, x, device = inputs.graph, inputs.x, inputs.x.device.type
    before, weights = sampled_graph(graph, strategy, width, x.device)
    seed = torch.tensor([SEED], device=x.device)
    how = {"width": width, "strategy": strategy, "seed": seed}
    for storage, features in storages(x, strategy).items():
        ours = partial(ops.sampled_spmm, graph, features, **how)
        exact = features.dequantize() if scaled(features) else features
        allowed = 5e-3 if storage == "bf16" else 2e-5
        error = inputs.error(ours(), before, exact, allowed=allowed)
        check(error, f"{strategy} {width} {storage}")
        yield {"storage": storage, "backend": "sampled_spmm", **time_of(ours, device)}
    if device == "cpu" and strategy == "fastrand":
        sampling = partial(take, graph.csr(), Sampling(width, strategy, "none"), seed)
        yield {"storage": "fp32", "backend": "sampling by itself, torch",
               **time_of(sampling, device)}  # fmt: skip

    ones, narrow = torch.ones(graph.num_edges, device=x.device), weights.float()
    calls = {
        "weighted, rescaled as gcn": (weights, lambda: ops.sampled_spmm(
            graph, x, ones, rescale="gcn", **how)),
        "spmm, sampled before": (None, lambda: ops.spmm(before, x)),
        "weighted spmm, sampled before": (weights, lambda: ops.spmm(before, x, narrow)),
    }  # fmt: skip
    for backend, (weight, call) in calls.items():
        check(inputs.error(call(), before, x, weight), f"{backend}, {strategy} {width}")
        yield {"storage": "fp32", "backend": backend, **time_of(call, device)}


def storages(x: Tensor, strategy: str) -> dict[str, Any]:
    """Features as they may be stored; the narrow ones for one strategy, which does not matter."""
    if strategy != "fastrand":
        return {"fp32": x}
    return {
        "fp32": x,
        "bf16": x.bfloat16(),
        "int8": ops.quantize(x),
        "fp8": ops.quantize(x, torch.float8_e4m3fn),
    }


def sampled_graph(
    graph: Graph, strategy: str, width: int, device: torch.device
) -> tuple[Graph, Tensor]:
    """A graph of the same edges, sampled before, as somebody would who keeps it: sorted.

    With it the weights that a GCN would give its edges, if they were 1 before: [S] float64.
    """
    sampling, csr = Sampling(width, strategy, "gcn"), graph.csr()
    sample: Sample = take(csr, sampling, torch.tensor([SEED], device=device))
    order = torch.argsort(sample.row * graph.num_cols + sample.col)
    weights = edge_factors(csr, sample, sampling)[order]
    col = sample.col[order].contiguous()
    return Graph.from_csr(sample.rowptr, col, num_cols=graph.num_cols), weights


def check(error: float, what: str) -> None:
    """Stop at a wrong result."""
    if not error <= 1:
        raise SystemExit(f"{what} is wrong: {error:.3g} times the allowed error")


def tune(inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Launch parameters of the GPU kernel, by width and how features are stored."""
    from pyg_accel.backends.triton import sampled

    graph = inputs.graph
    for width, (storage, stored) in itertools.product(
        TUNED_WIDTHS, storages(inputs.x, "fastrand").items()
    ):
        values, scale = (stored.values, stored.scale) if scaled(stored) else (stored, None)
        exact = stored.dequantize() if scaled(stored) else stored
        sampling = Sampling(width, "fastrand", "none")
        before, _ = sampled_graph(graph, "fastrand", width, inputs.x.device)
        for columns, rows, unroll in itertools.product((32, 64, 128), (1, 2, 4, 8), (4, 8, 16)):
            if not 32 <= rows * columns * values.element_size() // 16 <= 64:
                continue
            tile = sampled.SampledTile(rows, 1, columns, unroll, 1)

            def call(tile: Any = tile, sampling: Sampling = sampling, values: Tensor = values,
                     scale: Tensor | None = scale) -> Tensor:  # fmt: skip
                wide = values.unsqueeze(1)
                return sampled.run(graph.csr(), wide, scale, None, sampling, None, tile).squeeze(1)

            allowed = 5e-3 if storage == "bf16" else 2e-5
            check(inputs.error(call(), before, exact, allowed=allowed), f"{storage} {tile}")
            time = gpu_machine.timed(call, budget=0.01).median
            yield {
                "graph": inputs.name, "strategy": "fastrand", "width": width, "storage": storage,
                "backend": f"{rows}x{columns} u{unroll}", "ms": time, "device_ms": time,
            }  # fmt: skip


def scaled(features: Any) -> bool:
    """Whether features are stored in 8 bits, with scales."""
    return isinstance(features, ops.Quantized)


def summarise(frame: pd.DataFrame) -> None:
    """Print each case's time, and how it compares."""
    for name, rows in frame.groupby("graph", sort=False):
        whole = rows[rows.strategy == "all"].set_index("backend")["device_ms"]
        library = whole.drop("pyg_accel spmm").iloc[0]
        ours = rows[rows.backend.isin(PEERS)]
        others = rows[rows.backend.isin(PEERS.values())]
        others = others.set_index(["strategy", "width", "backend"])["device_ms"]
        table = ours.assign(
            weighted=ours.backend != "sampled_spmm",
            times_library=library / ours.device_ms,
            times_presampled=[
                row.device_ms / others.get((row.strategy, row.width, PEERS[row.backend]), nan)
                for row in ours.itertuples()
            ],
        )[["strategy", "width", "storage", "weighted", "rate", "ms", "device_ms",
           "times_library", "times_presampled"]]  # fmt: skip
        print(f"\n{name}: {whole.round(4).to_dict()}\n{table.round(3).to_string(index=False)}")


if __name__ == "__main__":
    main()
