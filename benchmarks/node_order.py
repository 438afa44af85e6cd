"""What an order of the nodes costs and brings: `reorder` on graphs with shuffled ids, on a GPU.

    python -m benchmarks.node_order [--quick] [--only NAME] [--out FOLDER]

For every graph and method: seconds to find the order, on the GPU and on the CPU, seconds to carry
it out, locality before and after, and the time of our weighted SpMM on the result. Two rows are not
ours: `as it is`, and `planted`, the graph as it was before its ids were shuffled. Every output is
first held against float64 on a sample of rows.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import gpu_machine, graphs
from benchmarks.gpu_kernels import DTYPES, Inputs, gate
from pyg_accel import Graph, ops
from pyg_accel.reordering import METHODS, Locality, locality, reorder

NAME = "node_order"
GRAPHS = ("arxiv-like", "amazon0505-like", "reddit-like", "products-like")
QUICK_GRAPHS = ("arxiv-like", "products-like@0.05")
FEATURES = (64, 256)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small graphs")
    parser.add_argument("--only", default="", help="graphs whose name starts like this")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {**gpu_machine.facts(), "cpu_threads": torch.get_num_threads()}
    rows: list[dict[str, Any]] = []
    names = [name for name in (QUICK_GRAPHS if options.quick else GRAPHS)]
    for name in tqdm([name for name in names if name.startswith(options.only)], unit="graph"):
        for row in measure(name):
            rows.append({**row, **facts})
            frame = pd.DataFrame(rows)
            suffix = "_quick" if options.quick else ""
            frame.to_csv(options.out / f"{NAME}{suffix}.csv", index=False, float_format="%.5g")
    with pd.option_context("display.width", 200, "display.max_columns", 30):
        print(pd.DataFrame(rows).drop(columns=list(facts)).round(3).to_string(index=False))


def measure(name: str) -> Iterator[dict[str, Any]]:
    """A row for every order of a graph."""
    csr = graphs.load(name, device="cuda")
    edge_index, nodes = graphs.edge_list(csr), csr[0].numel() - 1
    del csr
    yield timed_row(name, "as it is", edge_index, nodes)
    for method in METHODS:
        if method != "rcm":  # runs on the CPU wherever the graph is
            reorder(edge_index, method, num_nodes=nodes)  # the first call loads CUDA kernels
        result = reorder(edge_index, method, num_nodes=nodes)
        found, applied = result.seconds
        there = edge_index.cpu()
        on_cpu = reorder(there, method, num_nodes=nodes)
        assert torch.equal(on_cpu.order, result.order.cpu()), "the devices disagree"
        times = {"find_s": found, "apply_s": applied}
        times |= {"find_cpu_s": on_cpu.seconds[0], "apply_cpu_s": on_cpu.seconds[1]}
        yield timed_row(name, method, result.data, nodes, result.after) | times
        del result, on_cpu, there
    del edge_index
    planted = graphs.edge_list(graphs.load(f"{name}/ordered", device="cuda"))
    yield timed_row(name, "planted", planted, nodes)


def timed_row(
    name: str, order: str, edge_index: Tensor, nodes: int, measures: Locality | None = None
) -> dict[str, Any]:
    """Locality of an edge list, and milliseconds of SpMM on it."""
    graph = Graph.from_edge_index(edge_index, (nodes, nodes))
    row: dict[str, Any] = {"graph": name, "order": order, **asdict(measures or locality(graph))}
    inputs = Inputs(name, (graph.rowptr, graph.col))
    for label, dtype in DTYPES.items():
        weight = inputs.weight.to(dtype)
        for width in FEATURES:
            x = inputs.features(width, dtype)
            off = gate(inputs, x, weight, "sum")(ops.spmm(inputs.graph, x, weight))
            if off > 1:
                raise SystemExit(f"{name} {order} {label} {width}: {off:.3g} times what is allowed")
            time = gpu_machine.timed(lambda x=x, w=weight: ops.spmm(inputs.graph, x, w))
            row[f"spmm_{label}_{width}_ms"] = time.median
    return row


if __name__ == "__main__":
    main()
