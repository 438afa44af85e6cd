"""What cost models choose, on trees that were measured: the roofline, and models that learned.

    python -m benchmarks.papers.sensei.cost_models         # from the CSV files, on any machine
    python -m benchmarks.papers.sensei.cost_models --features --device cuda NAME ...

Reads, in results/: `association_*.csv`, the measured trees of layers on graphs that no model was
trained on; `cost_measurements/MACHINE.csv`, what `python -m pyg_accel profile` measured there; and
`graph_features.csv`. Each model prices the trees of each layer; a row of `cost_models.csv` says how
near the tree that it chose came to the fastest one. The models:

- `roofline`: as shipped.
- `roofline, scaled`: its figures scaled to the machine by the medians of its measurements.
- `learned there`: residuals on that, learned on the machine itself.
- `learned elsewhere`: learned on all machines but this one.
- `learned, other device`: the same without machines of the same kind of device, if there are any.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch_geometric.utils import add_self_loops

from benchmarks.papers import tables
from benchmarks.papers.sensei import orders
from benchmarks.tools import results
from pyg_accel import Graph
from pyg_accel.rewrite.cost import GraphFeatures, Learned, Roofline
from pyg_accel.rewrite.cost.learned import vectors
from pyg_accel.rewrite.cost.measurements import devices_of, primitives_of, read_measurements
from pyg_accel.rewrite.cost.roofline import machine_of
from pyg_accel.rewrite.cost.train import boosted, factors_of
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers
from pyg_accel.rewrite.select import QUICK, Decision, Options, decide

FOLDER = "papers/sensei"
FEATURES = results.FOLDER / FOLDER / "graph_features.csv"
MEASUREMENTS = results.FOLDER / "cost_measurements"
# Machine, the kind of device, and its measured trees.
MACHINES = {
    "amd_epyc_avx2_1_threads": ("cpu", "epyc/association_cpu.csv"),
    "amd_epyc_avx512_2_threads": ("cpu", None),
    "intel_xeon_avx512_2_threads": ("cpu", "association_cpu.csv"),
    "nvidia_h100_80gb_hbm3": ("cuda", "association_cuda_h100.csv"),
    "nvidia_h200": ("cuda", "association_cuda.csv"),
}
CASE = ["graph", "model", "in", "out", "mode"]
LOOPS = ("GCN", "GAT", "SGC", "GATv2")  # layers that add them
# Which figures of a machine the measurements of a primitive scale.
SCALED = {"gemm": ("flops",), "spmm": ("cache", "gather"), "elementwise": ("memory",),
          "sddmm": ("edge",)}  # fmt: skip


class Samples(NamedTuple):
    """The measurements of one machine: its rooflines, inputs and residuals of each call."""

    shipped: Roofline
    roofline: Roofline
    known: set[str]
    inputs: np.ndarray
    factors: np.ndarray


@cache
def samples(machine: str) -> Samples:
    frame = read_measurements(MEASUREMENTS / f"{machine}.csv")
    (device,) = devices_of(frame)
    shipped = Roofline(machine_of(device), "")
    like, factors = shipped.machine, factors_of(frame, shipped)
    for name, figures in SCALED.items():
        by = float(np.exp(np.median(factors[frame.primitive == name])))
        better = {f: getattr(like, f) * (by if f == "edge" else 1 / by) for f in figures}
        like = replace(like, **better)
    roofline = Roofline(like, "")
    inputs = vectors(primitives_of(frame), roofline)
    factors = factors_of(frame, roofline)
    return Samples(shipped, roofline, set(frame.primitive), inputs, factors)


def learned(machine: str, on: Sequence[str]) -> Learned:
    """A model of some machines, asked about another."""
    parts = [samples(name) for name in on]
    booster = boosted(np.concatenate([p.inputs for p in parts]),
                      np.concatenate([p.factors for p in parts]))  # fmt: skip
    booster.set_param({"nthread": 1})
    known = set().union(*(p.known for p in parts))
    return Learned(booster, samples(machine).roofline, known, "")


def models(machine: str) -> Iterator[tuple[str, Learned | Roofline]]:
    kind = MACHINES[machine][0]
    measured = [name for name in MACHINES if (MEASUREMENTS / f"{name}.csv").exists()]
    yield "roofline", samples(machine).shipped
    yield "roofline, scaled", samples(machine).roofline
    yield "learned there", learned(machine, [machine])
    others = [name for name in measured if name != machine]
    yield "learned elsewhere", learned(machine, others)
    if others := [name for name in others if MACHINES[name][0] != kind]:
        yield "learned, other device", learned(machine, others)


@cache
def layer(name: str, n_in: int, n_out: int, train: bool) -> Decision:
    """The trees of a layer, from a call on a small graph."""
    conv = orders.MODELS[name].make(n_in, n_out)
    x, ring = torch.randn(6, n_in, requires_grad=train), torch.arange(6)
    rewritten = OptimizedModel(conv, Options(train=train))
    rewritten(x, torch.stack([ring, (ring + 1) % 6]))
    return rewritten_layers(rewritten)[""].decisions[-1]


@cache
def features_of(kind: str, graph: str, loops: bool) -> GraphFeatures:
    frame = pd.read_csv(FEATURES)
    row = frame[(frame.kind == kind) & (frame.graph == graph) & (frame.loops == loops)].iloc[0]
    values = [row[field.name] for field in fields(GraphFeatures)]
    return GraphFeatures(*map(int, values[:3]), *map(float, values[3:]))


def choices(machine: str, model: Learned | Roofline) -> Iterator[dict[str, object]]:
    """A row a case: the time of the fastest tree over that of the chosen one."""
    kind, source = MACHINES[machine]
    known = set(pd.read_csv(FEATURES).query("kind == @kind").graph)
    frame = results.read(results.FOLDER / FOLDER / str(source))
    for key, group in frame[frame.graph.isin(known)].groupby(CASE, sort=False):
        graph, name, n_in, n_out, mode = key
        times = group[group.ms.notna()].set_index("tree").ms
        if len(times) < 2:
            continue
        decision = layer(name, n_in, n_out, mode == "training")
        facts = features_of(kind, graph, name in LOOPS)
        sizes = {**decision.sizes, "N": facts.num_rows, "M": facts.num_cols}
        outline = GraphFeatures(facts.num_rows, facts.num_cols, facts.num_entries)
        found = decide(decision.pruned, sizes, lambda *_, f=outline: f, model.roofline)
        if min(found.seconds.values(), default=0) > QUICK:  # as `make_decision` does
            found = decide(decision.pruned, sizes, lambda *_, f=facts: f, model)
        if str(found.tree) not in set(group.tree):
            raise SystemExit(f"{source}: '{found.tree}' was not measured for {key}")
        yield {"graph": graph, "layer": name, "in": n_in, "out": n_out, "mode": mode,
               "chosen": str(found.tree), "fastest": times.idxmin(),
               "ratio": times.min() / times.get(str(found.tree), np.nan)}  # fmt: skip


def add_features(kind: str, graphs: Sequence[str]) -> None:
    """Write the features of graphs, without self-loops and with them."""
    rows = pd.read_csv(FEATURES).to_dict("records") if FEATURES.exists() else []
    for name in graphs:
        edges, nodes = orders.load(name, kind)
        for loops in (False, True):
            given = add_self_loops(edges, num_nodes=nodes)[0] if loops else edges
            found = GraphFeatures.of(Graph.from_edge_index(given, size=(nodes, nodes)))
            rows.append({"kind": kind, "graph": name, "loops": loops, **asdict(found)})
    pd.DataFrame(rows).to_csv(FEATURES, index=False, float_format="%.6g")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--features", action="store_true", help="add features of graphs, no more")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("graphs", nargs="*")
    options = parser.parse_args(arguments)
    if options.features:
        add_features(options.device, options.graphs)
        return
    rows = []
    for machine, (_, source) in MACHINES.items():
        if source is None or not (results.FOLDER / FOLDER / source).exists():
            continue
        for label, model in models(machine):
            found = pd.DataFrame(choices(machine, model))
            print(found.sort_values("ratio").head(5).to_string())
            for (name, mode), group in [*found.groupby(["layer", "mode"], sort=False),
                                        (("all", "all"), found)]:  # fmt: skip
                rows.append({"machine": machine, "model": label, "layer": name, "mode": mode,
                             "cases": len(group), "mean": np.exp(np.log(group.ratio).mean()),
                             "worst": group.ratio.min()})  # fmt: skip
    frame = pd.DataFrame(rows)
    frame.to_csv(results.FOLDER / f"{FOLDER}/cost_models.csv", index=False, float_format="%.5g")
    print("\n".join(tables.cost_models(frame)))


if __name__ == "__main__":
    main()
