"""Memory traffic, cache hits and occupancy of kernels: MaxK-GNN's table 2 and TC-GNN's table 1.

    python -m benchmarks.papers.counters [--only maxk gcn] [--quick]

    maxk    the three products of the paper on a graph of Reddit's size, 256 features, k = 32
    gcn     one layer of GCN on graphs of the sizes of three citation graphs: aggregation
            at the width of the input, as DGL has it, then the product with weights, 16 columns

The program runs itself below Nsight Compute (`ncu`, which has to be found on the PATH and be
allowed to read the counters). A kernel with no work stands between two cases, so that a kernel of
the profile is known to belong to its case. Outputs are held against float64 on a sample of rows
before they are profiled. Rates of a case with several kernels are of their sums, and those of the
whole device are weighted by the kernels' times, which are taken below the profiler: caches are
flushed before each kernel.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch

from benchmarks.kernels.gpu import Inputs, gate
from benchmarks.papers import tables
from benchmarks.papers.maxk_gnn import products as products_
from benchmarks.papers.tc_gnn import experiments as tc_paper
from benchmarks.tools import results, timing
from pyg_accel import ops

NAME = "papers/gpu_counters"
MARKER = "spin_kernel"  # of torch.cuda._sleep
METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_write",
    "lts__t_bytes.sum": "l2_bytes",
    "l1tex__t_sectors.sum": "l1_sectors",
    "l1tex__t_sectors_lookup_hit.sum": "l1_hits",
    "lts__t_sectors.sum": "l2_sectors",
    "lts__t_sectors_lookup_hit.sum": "l2_hits",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "bandwidth",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
}
CASE = ["experiment", "graph", "case"]
Case = tuple[str, str, str, Callable[[], Any]]


def products(*, quick: bool) -> Iterator[Case]:
    """SpMM, SpGEMM and SSpMM of the MaxK paper, ours and cuSPARSE's."""
    name, k = "reddit-like@0.1" if quick else "reddit-like", 32
    graph = products_.load(name, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    x, y = (torch.randn(graph.num_cols, products_.FEATURES, device="cuda", generator=generator)
            for _ in range(2))  # fmt: skip
    weight = torch.rand(graph.num_edges, device="cuda", generator=generator) + 0.5
    cbsr = ops.maxk(x, k)
    forward = products_.products(graph, cbsr, weight)
    backward = products_.gradients(graph, cbsr, weight, y)
    for calls, error, chosen in (
        (forward, products_.product_error(graph, cbsr, weight),
         {"torch CSR": "SpMM, cuSPARSE", "our dense SpMM": "SpMM, ours", "cuda": "cbsr_spmm"}),
        (backward, products_.gradient_error(graph, cbsr, weight, y),
         {"cuda": "sspmm", "cuda, deterministic": "sspmm, deterministic"}),
    ):  # fmt: skip
        for backend, title in chosen.items():
            if (wrong := error(calls[backend]())) > 1:
                raise SystemExit(f"{title}: {wrong:.1f} times the allowed error")
            yield "maxk", name, title, calls[backend]


def layers(*, quick: bool) -> Iterator[Case]:
    """Aggregation and update of GCN on the citation graphs of the TC-GNN paper."""
    chosen = [d for d in tc_paper.DATASETS if d.name in ("Cora", "Citeseer", "Pubmed")]
    for dataset in chosen[:1] if quick else chosen:
        inputs = Inputs(dataset.name, tc_paper.load(dataset))
        x = inputs.features(dataset.features, torch.float32)
        weight = torch.randn(dataset.features, 16, device="cuda")
        calls = {
            "aggregation, cuSPARSE": tc_paper.peers(inputs, x)["cuSPARSE CSR"],
            "aggregation, ours": lambda i=inputs, x=x: ops.spmm(i.graph, x, i.weight),
            "aggregation, Tensor Cores in tf32": tc_paper.ours(inputs, x)["cuda, tf32"],
        }
        for title, call in calls.items():
            allowed = tc_paper.LOOSER.get(title.rpartition(" in ")[2], 1)
            if (wrong := gate(inputs, x, inputs.weight, "sum")(call())) > allowed:
                raise SystemExit(f"{dataset.name}, {title}: {wrong:.1f} times the allowed error")
            yield "gcn", dataset.name, title, call
        yield "gcn", dataset.name, "update", lambda x=x, weight=weight: x @ weight


EXPERIMENTS = {"maxk": products, "gcn": layers}


def work(chosen: Sequence[str], *, quick: bool) -> None:
    """The part below the profiler: run the cases, and say which they are."""
    for name in chosen:
        for *case, call in EXPERIMENTS[name](quick=quick):
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            print("CASE", *case, sep="\t", flush=True)


def read(text: str) -> pd.DataFrame:
    """A row a kernel from what ncu prints: the number of its case, and the metrics in base units.

    Raises ValueError if a metric is missing, as it is on a device without that counter.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]  # others are messages
    if not lines:
        raise ValueError(f"ncu gave no table:\n{text[-2000:]}")
    found = pd.read_csv(io.StringIO("\n".join(lines)), thousands=",")
    found = found.pivot(index=["ID", "Kernel Name"], columns="Metric Name", values="Metric Value")
    if missing := set(METRICS) - set(found.columns):
        raise ValueError(f"ncu has no {', '.join(sorted(missing))}")
    kernels = found[list(METRICS)].rename(columns=METRICS).astype(float).reset_index()
    marks = kernels["Kernel Name"].str.contains(MARKER)
    kernels["number"] = marks.cumsum() - 1
    return kernels[~marks]


def figures(kernels: pd.DataFrame) -> dict[str, float]:
    """The columns of the tables for the kernels of one case."""
    time = kernels["ns"].sum()
    return {
        "kernels": len(kernels),
        "ms": time / 1e6,
        "l2_gb": kernels["l2_bytes"].sum() / 1e9,
        "dram_gb": (kernels["dram_read"] + kernels["dram_write"]).sum() / 1e9,
        "l1_hit_rate": 100 * kernels["l1_hits"].sum() / kernels["l1_sectors"].sum(),
        "l2_hit_rate": 100 * kernels["l2_hits"].sum() / kernels["l2_sectors"].sum(),
        "bandwidth": (kernels["bandwidth"] * kernels["ns"]).sum() / time,
        "occupancy": (kernels["occupancy"] * kernels["ns"]).sum() / time,
    }


def profiled(options: argparse.Namespace) -> tuple[pd.DataFrame, list[list[str]]]:
    """The kernels that the cases ran, and the cases."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("ncu (Nsight Compute) is not on the PATH")
    log = results.QUICK / "gpu_counters.ncu.csv"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        ncu, "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start",
        "off", "--metrics", ",".join(METRICS), "--log-file", str(log), sys.executable, "-m",
        "benchmarks.papers.counters", "--below-profiler", "--only", *options.only,
        *(["--quick"] if options.quick else []),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=timing.ROOT, stdout=subprocess.PIPE, text=True,
                         env=os.environ, check=False)  # fmt: skip
    if run.returncode:
        raise SystemExit(f"{run.stdout}\n{log.read_text()[-2000:] if log.exists() else ''}")
    cases = [line.split("\t")[1:] for line in run.stdout.splitlines() if line.startswith("CASE\t")]
    return read(log.read_text()), cases


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=("cuda",), quick="a small graph for each experiment",
                            only=EXPERIMENTS, below_profiler=False)  # fmt: skip
    options = parser.parse_args(arguments)
    if options.below_profiler:
        work(options.only, quick=options.quick)
        return
    kernels, cases = profiled(options)
    rows = results.Rows(NAME, options, "cuda")
    for number, case in enumerate(cases):
        rows.add([figures(kernels[kernels["number"] == number])],
                 **dict(zip(CASE, case, strict=True)))  # fmt: skip
    print("\n".join(tables.counters(rows.done())))


if __name__ == "__main__":
    main()
