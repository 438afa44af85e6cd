"""Training steps replayed from CUDA graphs: stock PyG against `graphed()` and `graphed_step()`.

    python -m benchmarks.graphed [--cases NAME ...] [--rounds N] [--out FOLDER]

Full-batch training on graphs of the sizes of Cora and Pubmed, and batches of 128 molecules, a new
one each step: their padding is part of the step. Variants take turns, round by round, and each has
a model and an optimizer of its own; a row is written only if their losses agreed over the first
steps. Data is synthetic, and lies on the GPU before the clock starts.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.nn import GAT, GCN, GINConv, GINEConv, global_add_pool

import pyg_accel
from benchmarks import gpu_machine
from benchmarks.machine import quantiles
from pyg_accel.settings import settings

NAME = "graphed"
BATCHES, STEPS, CHECKED = 24, 24, 16


class Case(NamedTuple):
    """A model and what it is trained on.

    Attributes:
        model: makes the model.
        batches: arguments of the steps, the target last.
        loss: of output and target.
    """

    model: Callable[[], torch.nn.Module]
    batches: list[tuple[Tensor, ...]]
    loss: Callable[[Tensor, Tensor], Tensor]


class Molecules(torch.nn.Module):
    """Five GIN or GINE layers with networks of two linear layers, and a sum over each graph."""

    def __init__(self, edges: bool, hidden: int = 256) -> None:
        super().__init__()
        self.edges = edges
        self.embedding = Linear(16, hidden)
        self.bonds = Linear(4, hidden) if edges else None
        self.convs, self.norms = torch.nn.ModuleList(), torch.nn.ModuleList()
        for _ in range(5):
            network = Sequential(
                Linear(hidden, hidden), BatchNorm1d(hidden), ReLU(), Linear(hidden, hidden)
            )
            self.convs.append((GINEConv if edges else GINConv)(network))
            self.norms.append(BatchNorm1d(hidden))
        self.head = Linear(hidden, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        x = self.embedding(x)
        more = () if self.bonds is None else (self.bonds(edge_attr),)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, edge_index, *more)).relu()
        return self.head(global_add_pool(x, batch))


def molecules(graphs: int = 128) -> tuple[Tensor, ...]:
    nodes = torch.randint(14, 33, (graphs,))  # 23 atoms and 50 directed bonds each, as ZINC has
    batch = torch.repeat_interleave(torch.arange(graphs), nodes)
    starts, ids = (nodes.cumsum(0) - nodes)[batch], torch.arange(len(batch))
    chain = ids[1:][batch[1:] == batch[:-1]]
    rings = ids[torch.rand(len(ids)) < 0.13]
    ends = starts[rings] + (torch.rand(len(rings)) * nodes[batch[rings]]).long()
    one, two = torch.cat([chain, rings]), torch.cat([chain - 1, ends])
    edge_index = torch.stack([torch.cat([one, two]), torch.cat([two, one])])
    rows = torch.randn(len(batch), 16), torch.randn(edge_index.size(1), 4), torch.randn(graphs, 1)
    return tuple(t.cuda() for t in (rows[0], edge_index, rows[1], batch, rows[2]))


def whole(nodes: int, edges: int, features: int, classes: int) -> list[tuple[Tensor, ...]]:
    half = torch.randint(nodes, (2, edges // 2))
    edge_index = torch.cat([half, half.flip(0)], dim=1)
    x, y = torch.randn(nodes, features), torch.randint(classes, (nodes,))
    return [(x.cuda(), edge_index.cuda(), y.cuda())] * BATCHES


def cases() -> dict[str, Callable[[], Case]]:
    cora, pubmed = (2_708, 10_556, 1_433, 7), (19_717, 88_648, 500, 3)
    return {
        "Cora-size GCN 2x16": lambda: Case(
            lambda: GCN(cora[2], 16, 2, cora[3], dropout=0.0), whole(*cora), F.cross_entropy
        ),
        "Cora-size GAT 2x64": lambda: Case(
            lambda: GAT(cora[2], 64, 2, cora[3], heads=8, dropout=0.0),
            whole(*cora), F.cross_entropy,
        ),
        "Pubmed-size GCN 3x256": lambda: Case(
            lambda: GCN(pubmed[2], 256, 3, pubmed[3], dropout=0.0), whole(*pubmed), F.cross_entropy
        ),
        "128 molecules, GIN 5x256": lambda: Case(
            lambda: Molecules(edges=False), [molecules() for _ in range(BATCHES)], F.mse_loss
        ),
        "128 molecules, GINE 5x256": lambda: Case(
            lambda: Molecules(edges=True), [molecules() for _ in range(BATCHES)], F.mse_loss
        ),
    }  # fmt: skip


def stepper(case: Case, model: torch.nn.Module, capturable: bool) -> Callable[..., Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, capturable=capturable)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss(model(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def named(step: Callable[..., Tensor], places: int) -> Callable[..., Tensor]:
    """The same step with names for its arguments, by which padding knows them."""
    if places == 3:
        return lambda x, edge_index, y: step(x, edge_index, y)
    return lambda x, edge_index, edge_attr, batch, y: step(x, edge_index, edge_attr, batch, y)


VARIANTS = ("stock", "patched", "graphed, stock", "graphed", "step, stock", "step")


def variants(case: Case) -> dict[str, Callable[..., Tensor]]:
    """Steps of equal models."""
    found: dict[str, Callable[..., Tensor]] = {}
    for name in VARIANTS:
        torch.manual_seed(0)
        model = case.model().cuda()
        called = pyg_accel.graphed(model) if name.startswith("graphed") else model
        step = stepper(case, called, capturable=name.startswith("step"))
        if name.startswith("step"):
            step = pyg_accel.graphed_step(named(step, len(case.batches[0])), modules=[model])
        found[name] = step
    return found


def measure(name: str, case: Case, rounds: int) -> list[dict[str, Any]]:
    steps = variants(case)
    pyg_accel.reset_report()
    losses = {}
    laps: dict[str, list[float]] = {v: [] for v in steps}
    for turn in range(rounds + 1):
        for variant, step in steps.items():
            with nullcontext() if variant.endswith("stock") else pyg_accel.patched():
                if not turn:
                    found = [step(*case.batches[i]) for i in range(CHECKED)]
                    losses[variant] = torch.stack(found)
                step(*case.batches[0])  # patched() forgets graphs when it ends
                torch.cuda.synchronize()
                start = time.perf_counter()
                for i in range(STEPS):
                    step(*case.batches[i])
                torch.cuda.synchronize()
            if turn:  # the first round is for captures that came late
                laps[variant].append((time.perf_counter() - start) / STEPS)
    with open(os.devnull, "w") as nowhere:
        report = pyg_accel.report(nowhere)
    for row in report.rows:
        if row.backend in ("CUDA graph", "eager"):
            print(f"  {row.layer}: {row.calls} {row.backend} {row.formula or row.reason}")
    stock, rows = losses["stock"], []
    for variant in steps:
        off = float(((losses[variant] - stock).abs() / stock.abs().clamp(min=1e-2)).max())
        took = quantiles(laps[variant])
        if off > 0.05:
            print(f"{name}, {variant}: losses are off by {off:.3g}, no row")
            continue
        rows.append({"case": name, "variant": variant, "step_ms": took.median,
                     "p20": took.p20, "p80": took.p80, "loss_off": off})  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="*", default=list(cases()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder of the CSV")
    options = parser.parse_args(arguments)
    folder = options.out or Path(__file__).with_name("results")
    folder.mkdir(parents=True, exist_ok=True)
    settings.always = True  # for the patched models; the others are stock
    rows: list[dict[str, Any]] = []
    for name, make in cases().items():
        if name in options.cases:
            torch.manual_seed(0)
            print(name, flush=True)
            rows += measure(name, make(), options.rounds)
            for row in rows[-len(VARIANTS) :]:
                if row["case"] == name:
                    print(f"  {row['variant']}: {row['step_ms']:.3f} ms", flush=True)
    settings.always = None
    facts = gpu_machine.facts()
    frame = pd.DataFrame([row | facts for row in rows])
    frame.to_csv(folder / f"{NAME}.csv", index=False, float_format="%.5g")
    print(frame.pivot_table("step_ms", "case", "variant", sort=False).round(3).to_string())


if __name__ == "__main__":
    main()
