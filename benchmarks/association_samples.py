"""One choice for a graph, or one for each sample of it (SENSEi, figure 9).

    python -m benchmarks.association_samples [--device cuda] [--sampling neighbours] [--quick]

Decides the order of a layer's products on the whole graph, and on every sample; times all orders
on the samples, as :mod:`benchmarks.association` does, whose models and checks these are. The paper
says "random neighborhood samples of sizes 1000, 100, and 10", and five more sizes from 5000 to 5.
That may be read in two ways: `nodes` takes the subgraph of so many nodes that a random node
reaches, `neighbours` leaves each node of the graph so many of its neighbours.

A row of results/association_samples_DEVICE.csv is an order on a sample; `whole` marks what is
chosen on the whole graph, `chosen` what is chosen on the sample. Run again, it goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import association, gpu_machine, graphs, machine, results
from benchmarks.association import MODELS, decide, measure
from benchmarks.table_lines import NONE
from pyg_accel.rewrite.algebra import Call
from pyg_accel.rewrite.lift import bind

NAME = "association_samples"
SIZES = {"GCN": (32, 256), "GAT": (1024, 2048)}
SAMPLES = {"nodes": (5000, 2000, 1000, 500, 100, 50, 10, 5), "neighbours": (1000, 100, 10)}
REPEATS = 10
CASE = ["graph", "sampling", "size", "sample", "model", "in", "out"]


def reached(csr: graphs.Csr, size: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """The subgraph of a random node and of nodes that are reached from it, `size` in all."""
    rowptr, col = csr
    total = rowptr.numel() - 1
    taken = torch.randint(total, (1,), generator=generator, device=col.device)
    while taken.numel() < size:
        near = col[_entries(rowptr, taken)].unique()
        fresh = near[~torch.isin(near, taken)]
        if not fresh.numel():  # a component is exhausted: another one
            fresh = torch.randint(total, (1,), generator=generator, device=col.device)
        order = torch.randperm(fresh.numel(), generator=generator, device=col.device)
        taken = torch.cat([taken, fresh[order[: size - taken.numel()]]]).unique()
    counts = rowptr[taken + 1] - rowptr[taken]
    row = torch.arange(size, device=col.device).repeat_interleave(counts)
    ends = col[_entries(rowptr, taken)]
    place = torch.searchsorted(taken, ends).clamp(max=size - 1)
    inside = taken[place] == ends
    return torch.stack([place[inside], row[inside]]), size


def thinned(csr: graphs.Csr, size: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """The graph with at most `size` random neighbours of each node."""
    rowptr, col = csr
    counts = rowptr.diff()
    row = torch.arange(counts.numel(), device=col.device).repeat_interleave(counts)
    place = torch.rand(col.numel(), generator=generator, device=col.device)
    order = (row + place.double()).argsort()  # rows stay together, each in a random order
    kept = order[torch.arange(col.numel(), device=col.device) - rowptr[row] < size].sort().values
    return torch.stack([col[kept], row[kept]]), counts.numel()


def _entries(rowptr: Tensor, nodes: Tensor) -> Tensor:
    """Where the entries of some rows lie."""
    counts = rowptr[nodes + 1] - rowptr[nodes]
    within = torch.arange(int(counts.sum()), device=rowptr.device)
    return within + (rowptr[nodes] - counts.cumsum(0) + counts).repeat_interleave(counts)


TAKE = {"nodes": reached, "neighbours": thinned}


def whole_choices(csr: graphs.Csr) -> dict[str, str]:
    """The order that each model gets on the whole graph."""
    edge_index, found = graphs.edge_list(csr), {}
    for name, (n_in, n_out) in SIZES.items():
        conv = MODELS[name].make(n_in, n_out).to(edge_index.device)
        x = torch.empty(csr[0].numel() - 1, n_in, device=edge_index.device)
        found[name] = decide(conv, Call(conv, bind(conv, (x, edge_index), {})), False)[1]
    return found


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a model and size of samples: equal choices, and time beside the fastest order."""
    rows = []
    for key, group in frame.groupby([*CASE[:3], *CASE[4:]], sort=False):
        lost: dict[str, list[float]] = {"whole": [], "chosen": []}
        equal, costs = 0, []
        for _, part in group.groupby("sample"):
            best, trees = part["ms"].min(), {}
            for name, ratios in lost.items():
                picked = part[part[name]].iloc[0]
                trees[name] = picked["tree"]
                ratios.append(picked["ms"] / best)
            equal += trees["whole"] == trees["chosen"]
            costs.append(part["overhead_ms"].iloc[0] / part.loc[part["whole"], "ms"].iloc[0])
        rows.append(dict(zip([*CASE[:3], *CASE[4:]], key, strict=True)) | {
            "samples": len(costs), "equal": equal,
            **{name: results.geometric_mean(pd.Series(v)) for name, v in lost.items()},
            "whole_worst": max(lost["whole"]), "iterations": pd.Series(costs).median(),
        })  # fmt: skip
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame) -> list[str]:
    """The lines of docs/results.md."""
    lines = [
        "| graph | sampling | size | layer | features | samples | same choice | time with the "
        "graph's choice over the fastest | worst | with the sample's choice | iterations that "
        "choosing on a sample costs |",
        "|---|---|--:|---|---|" + "--:|" * 6,
    ]
    for row in summary(frame).to_dict("records"):
        what = [row["graph"], row["sampling"], row["size"], row["model"],
                f"{row['in']} to {row['out']}", row["samples"],
                f"{row['equal'] / row['samples']:.0%}"]  # fmt: skip
        shown = [f"{row[name]:.2f}x" for name in ("whole", "whole_worst", "chosen")]
        lines.append(f"| {' | '.join(map(str, [*what, *shown]))} | {row['iterations']:.2g} |")
    return lines if len(lines) > 2 else [NONE]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graph", default="mycielskian17")
    parser.add_argument("--sampling", choices=TAKE, default="nodes")
    parser.add_argument("--sizes", nargs="+", type=int, help="of the samples")
    parser.add_argument("--samples", type=int, default=REPEATS)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--quick", action="store_true", help="a small graph, two samples")
    parser.add_argument("--out", type=Path, help="folder of the CSV, by default results/")
    options = parser.parse_args(arguments)
    device, sampling = options.device, options.sampling
    sizes = options.sizes or SAMPLES[sampling]
    graph, samples = options.graph, options.samples
    if options.quick:
        graph, samples, sizes = "mycielskian9", 2, (100, 10)
    folder = options.out or (results.QUICK if options.quick else results.FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}_{device}.csv"
    rows: list[dict[str, Any]] = results.read(path).to_dict("records") if path.exists() else []
    done = {tuple(row[key] for key in CASE) for row in rows}
    todo = [(graph, sampling, size, sample, model, *SIZES[model])
            for size in sizes for sample in range(samples) for model in options.models]  # fmt: skip
    todo = [case for case in todo if case not in done]
    if todo:
        association.clock = machine.clock_of(device)
        facts = gpu_machine.facts_of(device)
        csr = graphs.load(graph, device=device)
        whole = whole_choices(csr)
    for case in (progress := tqdm(todo, unit="case")):
        _, _, size, sample, model, n_in, n_out = case
        progress.set_postfix_str(f"{model}, {size} {sampling}")
        generator = torch.Generator(device).manual_seed(sample)
        edge_index, nodes = TAKE[sampling](csr, size, generator)
        facts_of_case = dict(zip(CASE, case, strict=True)) | {"N": nodes, "E": edge_index.size(1)}
        also = (whole[model],)
        for row in measure(model, n_in, n_out, False, edge_index, nodes, also=also):
            rows.append(facts_of_case | {"whole": row["tree"] == whole[model], **row, **facts})
        pd.DataFrame(rows).to_csv(path, index=False, float_format="%.6g")
    print("\n".join(table(results.read(path))))


if __name__ == "__main__":
    main()
