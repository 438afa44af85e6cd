"""What an order of the nodes costs and brings: `reorder` on graphs with shuffled ids, on a GPU.

    python -m benchmarks.kernels.node_order [--quick] [--only NAME] [--out FOLDER]

For every graph and method: seconds to find the order of an edge list on the CPU and to carry it
out, entries per distinct column in 16 rows, and the time of our weighted SpMM on the result. Two
rows are not ours: `as it is`, and `planted`, the graph as it was before its ids were shuffled.
Every output is first held against float64 on a sample of rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.gpu import DTYPES, Inputs, gate
from benchmarks.tools import graphs, results, timing
from pyg_accel import Graph, ops
from pyg_accel.graph.column_reuse import per_column, reuse_of
from pyg_accel.reordering import METHODS, reorder

NAME = "kernels/node_order"
GRAPHS = ("arxiv-like", "amazon0505-like", "reddit-like", "products-like")
QUICK_GRAPHS = ("arxiv-like", "products-like@0.05")
FEATURES = (64, 256)


def main(arguments: Sequence[str] | None = None) -> None:
    options = results.parser(__doc__, devices=("cuda",), only="").parse_args(arguments)
    rows = results.Rows(NAME, options, "cuda", cpu_threads=torch.get_num_threads())
    names = QUICK_GRAPHS if options.quick else GRAPHS
    for name in results.each([n for n in names if n.startswith(options.only)], "graph"):
        rows.add(measure(name), show=True)
    rows.done()


def measure(name: str) -> Iterator[dict[str, Any]]:
    """A row for every order of a graph."""
    csr = graphs.load(name, device="cuda")
    edge_index, nodes = graphs.edge_list(csr), csr[0].numel() - 1
    del csr
    yield timed_row(name, "as it is", edge_index, nodes)
    for method in METHODS:
        result = reorder(edge_index.cpu(), method, num_nodes=nodes)
        times = dict(zip(("find_s", "apply_s"), result.seconds, strict=True))
        yield timed_row(name, method, result.data.cuda(), nodes) | times
        del result
    del edge_index
    planted = graphs.edge_list(graphs.load(f"{name}/ordered", device="cuda"))
    yield timed_row(name, "planted", planted, nodes)


def timed_row(name: str, order: str, edge_index: Tensor, nodes: int) -> dict[str, Any]:
    """Entries per column of an edge list, and milliseconds of SpMM on it."""
    graph = Graph.from_edge_index(edge_index, (nodes, nodes))
    reuse = per_column(reuse_of(graph.csr()))[0]
    row: dict[str, Any] = {"graph": name, "order": order, "reuse": reuse}
    inputs = Inputs(name, (graph.rowptr, graph.col))
    for label, dtype in DTYPES.items():
        weight = inputs.weight.to(dtype)
        for width in FEATURES:
            x = inputs.features(width, dtype)
            off = gate(inputs, x, weight, "sum")(ops.spmm(inputs.graph, x, weight))
            if off > 1:
                raise SystemExit(f"{name} {order} {label} {width}: {off:.3g} times what is allowed")
            time = timing.timed(lambda x=x, w=weight: ops.spmm(inputs.graph, x, w), "cuda")
            row[f"spmm_{label}_{width}_ms"] = time.median
    return row


if __name__ == "__main__":
    main()
