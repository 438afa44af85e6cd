"""Training on sampled batches on a GPU, a new graph each step: stock PyG against `patched()`.

    python -m benchmarks.gpu_batches [--graph NAME] [--out FOLDER]

2 layers, 256 hidden, fan-outs 15 and 10 from batches of seeds. PyG's `NeighborLoader` needs pyg-lib
or torch-sparse; so that this runs without them, batches are drawn here, on the GPU, as it draws
them: each node once, edges in no order. They are drawn before the clock starts, and every step gets
an edge_index that it has never seen.
"""

import argparse
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.nn.models import GCN, GraphSAGE
from tqdm import tqdm

import pyg_accel
from benchmarks import gpu_machine, graphs
from benchmarks.machine import quantiles
from pyg_accel.settings import settings

NAME = "gpu_batches"
FAN_OUTS = (15, 10)
SEEDS = (256, 1024, 4096, 16384)
FEATURES, HIDDEN, CLASSES = 100, 256, 40
BATCHES, WARM_UP = 24, 4
MODELS = {"GraphSAGE": GraphSAGE, "GCN": GCN}


def sample(rowptr: Tensor, col: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes of a batch (the seeds first), and its edge_index between their places."""
    nodes, frontier, sources, targets = seeds, seeds, [], []
    for fan_out in FAN_OUTS:
        degree = (rowptr[frontier + 1] - rowptr[frontier]).unsqueeze(1)
        draw = (torch.rand(frontier.numel(), fan_out, device="cuda") * degree).long()
        found = degree.expand_as(draw) > 0
        source = col[(rowptr[frontier].unsqueeze(1) + draw)[found]]
        target = frontier.unsqueeze(1).expand_as(draw)[found]
        source, target = torch.unique(torch.stack([source, target]), dim=1)
        sources.append(source)
        targets.append(target)
        known = torch.isin(source, nodes)
        frontier = torch.unique(source[~known])
        nodes = torch.cat([nodes, frontier])
    place = torch.full((rowptr.numel() - 1,), -1, device="cuda")
    place[nodes] = torch.arange(nodes.numel(), device="cuda")
    edges = torch.stack([place[torch.cat(sources)], place[torch.cat(targets)]])
    return nodes, edges[:, torch.randperm(edges.size(1), device="cuda")]


def measure(name: str, batches: list[tuple[Tensor, Tensor]], seeds: int) -> dict[str, Any]:
    """Milliseconds a step of one model on batches of this many seeds."""
    torch.manual_seed(0)
    model = MODELS[name](FEATURES, HIDDEN, 2, CLASSES).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x = [torch.randn(nodes.numel(), FEATURES, device="cuda") for nodes, _ in batches]
    y = torch.randint(CLASSES, (seeds,), device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    loss = torch.zeros(())
    torch.cuda.synchronize()
    events[0].record()
    for k, (_, edge_index) in enumerate(batches):
        optimizer.zero_grad()
        # A copy, so that no graph is known from a run before.
        loss = cross_entropy(model(x[k], edge_index.clone())[:seeds], y)
        loss.backward()
        optimizer.step()
        events[k + 1].record()
    torch.cuda.synchronize()
    steps = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    took = quantiles(steps[WARM_UP:])
    return {"step_ms": took.median, "p20": took.p20, "p80": took.p80, "loss": float(loss)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--graph", default="products-like")
    parser.add_argument("--out", type=Path, help="folder of the CSV")
    options = parser.parse_args(arguments)
    folder = options.out or Path(__file__).with_name("results")
    folder.mkdir(parents=True, exist_ok=True)
    rowptr, col = graphs.load(options.graph, device="cuda")
    facts, rows = gpu_machine.facts(), []
    for seeds in tqdm(SEEDS, unit="batch size"):
        ids = [torch.randint(rowptr.numel() - 1, (seeds,), device="cuda") for _ in range(BATCHES)]
        batches = [sample(rowptr, col, torch.unique(some)) for some in ids]
        seeds = min(torch.unique(some).numel() for some in ids)
        shape = {"seeds": seeds, "N": int(sum(n.numel() for n, _ in batches) / BATCHES),
                 "E": int(sum(e.size(1) for _, e in batches) / BATCHES)}  # fmt: skip
        for name in MODELS:
            for backend in ("stock", "patched", "patched, always"):
                settings.always = backend.endswith("always")
                with pyg_accel.patched() if backend != "stock" else nullcontext():
                    run = measure(name, batches, seeds)
                rows.append({"graph": options.graph, "model": name, "backend": backend,
                             **shape, **run, **facts})  # fmt: skip
    settings.always = None
    frame = pd.DataFrame(rows)
    frame.to_csv(folder / f"{NAME}.csv", index=False, float_format="%.5g")
    shown = frame.pivot_table("step_ms", ["model", "seeds", "N", "E"], "backend", sort=False)
    print(shown.round(3).to_string())
    losses = frame.pivot_table("loss", ["model", "seeds"], "backend")
    print("losses agree to", float((losses["stock"] - losses["patched, always"]).abs().max()))


if __name__ == "__main__":
    main()
