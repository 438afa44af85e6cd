"""Time of the sparse CPU kernels against their peers, forward only, as milliseconds per call.

    python -m benchmarks.kernels.cpu [--quick]

Every output is checked first: a wrong peer is marked and never counts as the best, a wrong result
of our own ends the run before anything is timed. Then all backends of a case run in turns.
`gather_gb_s` is E * F * 4 bytes over the time, what a kernel has to fetch from node features at
least; it passes the bandwidth of a copy where the features stay in cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch

from benchmarks.kernels import cases
from benchmarks.kernels.cases import BINARY_REDUCE, SDDMM, SPMM, Case, Inputs
from benchmarks.kernels.dgl import Dgl
from benchmarks.kernels.peers import OURS, Mkl, Peer, PygAccel, Stock, TorchSparse, TorchSparseMm
from benchmarks.tools import frames, graphs, plot, results, timing

NAME = "kernels/cpu_kernels"
GRAPHS, QUICK_GRAPHS = ("rmat-169k", "rmat-20k", "rmat-2.7k"), ("rmat-2.7k", "arxiv-like@0.1")
WIDTHS, QUICK_WIDTHS = (32, 128, 256), (32,)
BINARY_WIDTH = 32  # its edge operand is [E, F], so that wider ones measure nothing but memory
STOCK_WIDTH = 128  # wider, stock PyG takes minutes a case and has long lost
# Seconds for one backend on one case, beyond the three laps that everyone gets.
BUDGET, QUICK_BUDGET = 3.0, 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    options = results.parser(__doc__).parse_args(arguments)
    peers: list[Peer] = [PygAccel(), Stock(), Mkl(), TorchSparseMm(), TorchSparse(), Dgl()]
    for peer in peers:
        for reason in peer.reasons(SPMM[0]):
            print(f"left out, {peer.name}: {reason}")
    copy = timing.copy_bandwidth()
    rows = results.Rows(NAME, options, copy_gb_s=copy)
    graphs_of = QUICK_GRAPHS if options.quick else GRAPHS
    widths = QUICK_WIDTHS if options.quick else WIDTHS
    with ExitStack() as stack, torch.no_grad():
        for peer in peers:
            stack.enter_context(closing(peer))
        for graph, width in results.each([(g, w) for g in graphs_of for w in widths], "graph"):
            inputs = Inputs(*graphs.load(graph), width)
            for case in (*SPMM, *SDDMM, *(BINARY_REDUCE if width == BINARY_WIDTH else ())):
                for row in measure(case, inputs, peers, quick=options.quick):
                    rows.add([row | {"share_of_copy": row["gather_gb_s"] / copy}], graph=graph)
    frame = frames.best_peers(rows.done())
    frame["case"] = frames.labels(frame)
    print(frame.pivot_table("ratio", ["graph", "case"], "F", sort=False).round(2).to_string())
    plot.beside(rows.path)


def measure(
    case: Case, inputs: Inputs, peers: Sequence[Peer], *, quick: bool
) -> Iterator[dict[str, Any]]:
    """Check every backend that can run the case, then time them in turns: a row each."""
    able = [peer for peer in peers if not peer.reasons(case)]
    if inputs.num_features > STOCK_WIDTH:
        able = [peer for peer in able if not isinstance(peer, Stock)]
    calls = {peer.name: peer.prepare(case, inputs) for peer in able}
    right = cases.truth(case, inputs)
    errors = {name: cases.error(call(), right) for name, call in calls.items()}
    if errors.get(OURS, 0.0) > 1:
        raise SystemExit(
            f"{OURS} is wrong, {errors[OURS]:.3g} times the allowed error: {case.label}, "
            f"N = {inputs.num_nodes}, E = {inputs.num_entries}, F = {inputs.num_features}"
        )
    del right
    rounds, budget = (1, QUICK_BUDGET) if quick else (5, BUDGET)
    for name, time in timing.side_by_side(calls, rounds, budget=budget).items():
        yield {
            "N": inputs.num_nodes, "E": inputs.num_entries, "F": inputs.num_features,
            "op": case.formula or case.op, "reduce": case.reduce or "", "weighted": case.weighted,
            "backend": name, **time.columns(prefix="ms_"),
            "gather_gb_s": inputs.num_entries * inputs.num_features * 4 / time.median / 1e6,
            "correct": errors[name] <= 1,
        }  # fmt: skip


if __name__ == "__main__":
    main()
