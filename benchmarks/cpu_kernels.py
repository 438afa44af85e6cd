"""Time of the sparse CPU kernels against their peers, forward only, as milliseconds per call.

    python -m benchmarks.cpu_kernels [--quick]

Every output is checked first (`gate.py`): a wrong peer is marked and never counts as the best, a
wrong result of our own ends the run before anything is timed. Then all backends of a case run in
turns. `gather_gb_s` is E * F * 4 bytes over the time, what a kernel has to fetch from node features
at least; it passes the bandwidth of a copy where the features stay in cache.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks import gate, graphs, machine, results
from benchmarks.cases import BINARY_REDUCE, SDDMM, SPMM, Case, Inputs
from benchmarks.dgl_peer import Dgl
from benchmarks.peers import OURS, Mkl, Peer, PygAccel, Stock, TorchSparse, TorchSparseMm

NAME = "cpu_kernels"
GRAPHS = ("rmat-169k", "rmat-20k", "rmat-2.7k")
QUICK_GRAPHS = ("rmat-2.7k", "arxiv-like@0.1")
NUM_FEATURES, QUICK_NUM_FEATURES = (32, 128, 256), (32,)
BINARY_FEATURES = 32  # its edge operand is [E, F], so that wider ones measure nothing but memory
STOCK_FEATURES = 128  # wider, stock PyG takes minutes a case and has long lost
CASE = ["graph", "F", "op", "reduce", "weighted"]
# Seconds for one backend on one case, beyond the three laps that everyone gets.
BUDGET, QUICK_BUDGET = 3.0, 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small graphs and few rounds")
    options = parser.parse_args(arguments)
    console = Console()
    peers: list[Peer] = [PygAccel(), Stock(), Mkl(), TorchSparseMm(), TorchSparse(), Dgl()]
    absent = [f"{peer.name}: {reason}" for peer in peers for reason in peer.reasons(SPMM[0])]
    for line in absent:
        console.print(f"left out, {line}")
    with ExitStack() as stack, torch.no_grad():
        for peer in peers:
            stack.enter_context(closing(peer))
        rows = measure_all(peers, quick=options.quick)
    frame = results.write(rows, NAME, quick=options.quick)
    show(best_peers(frame), console)


def measure_all(peers: Sequence[Peer], *, quick: bool) -> list[dict[str, Any]]:
    """All rows of the CSV, one for each graph, width, case and backend."""
    facts = machine.facts()
    copy = machine.copy_bandwidth()
    plan = list(jobs(QUICK_GRAPHS, QUICK_NUM_FEATURES) if quick else jobs(GRAPHS, NUM_FEATURES))
    rows: list[dict[str, Any]] = []
    inputs, at = None, None
    for graph, features, case in (progress := tqdm(plan, unit="case")):
        progress.set_postfix_str(f"{graph}, F = {features}, {case.label}")
        if at != (graph, features):
            at, inputs = (graph, features), None  # frees the last operands before making new ones
            inputs = Inputs(*graphs.load(graph), features)
        rounds, budget = (1, QUICK_BUDGET) if quick else (5, BUDGET)
        for row in measure(case, inputs, peers, rounds=rounds, budget=budget):
            share = row["gather_gb_s"] / copy
            rows.append({"graph": graph, **row, "share_of_copy": share, "copy_gb_s": copy, **facts})
    return rows


def jobs(names: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, int, Case]]:
    """What is measured: (graph, F, case)."""
    for graph in names:
        for features in widths:
            binary = BINARY_REDUCE if features == BINARY_FEATURES else ()
            for case in (*SPMM, *SDDMM, *binary):
                yield graph, features, case


def measure(
    case: Case, inputs: Inputs, peers: Sequence[Peer], *, rounds: int, budget: float
) -> Iterator[dict[str, Any]]:
    """Check every backend that can run the case, then time them in turns: a row each."""
    able = [peer for peer in peers if not peer.reasons(case)]
    if inputs.num_features > STOCK_FEATURES:
        able = [peer for peer in able if not isinstance(peer, Stock)]
    calls = {peer.name: peer.prepare(case, inputs) for peer in able}
    right = gate.truth(case, inputs)
    errors = {name: gate.error(call(), right) for name, call in calls.items()}
    if errors.get(OURS, 0.0) > 1:
        raise SystemExit(
            f"{OURS} is wrong, {errors[OURS]:.3g} times the allowed error: {case.label}, "
            f"N = {inputs.num_nodes}, E = {inputs.num_entries}, F = {inputs.num_features}"
        )
    del right
    for name, time in machine.side_by_side(calls, rounds, budget=budget).items():
        yield {
            "N": inputs.num_nodes,
            "E": inputs.num_entries,
            "F": inputs.num_features,
            "op": case.formula or case.op,
            "reduce": case.reduce or "",
            "weighted": case.weighted,
            "backend": name,
            "ms": time.median,
            "ms_p20": time.p20,
            "ms_p80": time.p80,
            "gather_gb_s": inputs.num_entries * inputs.num_features * 4 / time.median / 1e6,
            "correct": errors[name] <= 1,
        }


def best_peers(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a case: our time, the fastest right peer, and the ratio (above 1: we are faster)."""
    others = frame[(frame["backend"] != OURS) & frame["correct"]]
    best = others.loc[others.fillna({"reduce": ""}).groupby(CASE, sort=False)["ms"].idxmin()]
    return _beside_ours(frame, best)


def against(frame: pd.DataFrame, peer: str) -> pd.DataFrame:
    """The same for one peer, wherever it is right."""
    return _beside_ours(frame, frame[(frame["backend"] == peer) & frame["correct"]])


def _beside_ours(frame: pd.DataFrame, peers: pd.DataFrame) -> pd.DataFrame:
    frame, peers = frame.fillna({"reduce": ""}), peers.fillna({"reduce": ""})
    ours = frame[frame["backend"] == OURS].set_index(CASE)["ms"]
    joined = peers.set_index(CASE)[["backend", "ms"]]
    joined = joined.rename(columns={"backend": "best_peer", "ms": "peer_ms"})
    joined = joined.join(ours.rename("ours_ms"), how="inner")
    joined["ratio"] = joined["peer_ms"] / joined["ours_ms"]
    return joined.reset_index()


def show(cases: pd.DataFrame, console: Console) -> None:
    """Our time and its ratio to the best peer, a table a graph, losses in red; then means."""
    widths = sorted(cases["F"].unique())
    for graph, group in cases.groupby("graph", sort=False):
        table = Table(
            "case",
            *(f"F = {width}" for width in widths),
            title=f"{graph}: our ms, ratio to the best peer",
        )
        for label, row in group.groupby(labels(group), sort=False):
            cells = {entry.F: cell(entry) for entry in row.itertuples()}
            table.add_row(label, *(cells.get(width, "") for width in widths))
        console.print(table)
    table = Table("geometric mean", "ratio", "lost", title="best peer's time / ours")
    for op, group in [*cases.groupby("op", sort=False), ("all", cases)]:
        lost = f"{(group['ratio'] < 1).sum()} of {len(group)}"
        table.add_row(op, f"{results.geometric_mean(group['ratio']):.2f}", lost)
    console.print(table)


def cell(case: Any) -> str:
    """Such as `4.14 2.10x MKL`."""
    colour = "red" if case.ratio < 1 else "green"
    return f"{case.ours_ms:.3g} [{colour}]{case.ratio:.2f}x[/] {case.best_peer}"


def labels(cases: pd.DataFrame) -> pd.Series:
    """What a case does, without graph and width: `spmm weighted sum`."""
    weighted = cases["weighted"].map({True: " weighted ", False: " "})
    return (cases["op"] + weighted + cases["reduce"]).str.strip()


if __name__ == "__main__":
    main()
