"""What sampling edges costs in accuracy: trained models, calibrated, judged on their test nodes.

    python -m benchmarks.sampled_accuracy [--quick]

GCN and GraphSAGE of two layers on Cora, Facebook pages (where PYG_ACCEL_DATA names their folder)
and community graphs. Each is trained over all edges; the width that is chosen is the smallest one
that loses at most 1% on the validation nodes, as `calibrate_sampling` finds it, and the model is
judged on the test nodes: what the choice has not seen. Writes results/sampled_accuracy.csv.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from tqdm import tqdm

import pyg_accel
from benchmarks import machine, results
from benchmarks.datasets import load_task
from benchmarks.graphs import community_task
from benchmarks.sampled_kernels import with_others

NAME = "sampled_accuracy"
STRATEGIES = ("bucket", "fastrand", "random")
EPOCHS, HIDDEN, MAX_DROP = 60, 64, 0.01
COMMUNITIES = {
    "community, degree 50": (10_000, 500_000, 64, 8),
}
FILE = f"{NAME}.csv"


class Net(torch.nn.Module):
    """Two layers of one kind."""

    def __init__(self, conv: type[torch.nn.Module], inputs: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = conv(inputs, HIDDEN), conv(HIDDEN, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(self.first(x, edge_index).relu(), 0.5, self.training)
        return self.second(x, edge_index)


def train(conv: type[torch.nn.Module], data: Data, *, epochs: int, seed: int) -> Net:
    """A model that has learned on the training nodes, over all edges."""
    torch.manual_seed(seed)
    model = Net(conv, data.x.size(1), int(data.y.max()) + 1).to(data.x.device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
    mask = data.train_mask
    with pyg_accel.patched(model):
        for _ in range(epochs):
            optimizer.zero_grad()
            out = model(data.x, data.edge_index)
            torch.nn.functional.cross_entropy(out[mask], data.y[mask]).backward()
            optimizer.step()
    return model.eval()


def accuracy(model: torch.nn.Module, data: Data, mask: Tensor) -> float:
    """Share of the nodes of a mask that are classified right."""
    return float((model(data.x, data.edge_index)[mask].argmax(-1) == data.y[mask]).double().mean())


def tasks(quick: bool, only: str) -> dict[str, Data]:
    """What is learned, by name."""
    made: dict[str, Callable[[], Data]] = {}
    if root := os.environ.get("PYG_ACCEL_DATA"):
        made = {name: partial(load_task, name, root) for name in ("Cora", "facebook-pages")}
    else:
        print("real graphs are left out: PYG_ACCEL_DATA is not set")
    shapes = {"community-2k": (2_000, 100_000, 32, 8)} if quick else COMMUNITIES
    made |= {name: partial(community_task, *shape, signal=1.5) for name, shape in shapes.items()}
    return {name: make() for name, make in made.items() if name.startswith(only)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small graphs, few epochs")
    parser.add_argument("--only", default="", help="graphs whose name starts like this")
    options = parser.parse_args(arguments)
    facts = machine.facts()
    rows: list[dict[str, Any]] = []
    for name, data in tasks(options.quick, options.only).items():
        for conv in tqdm((GCNConv, SAGEConv), desc=name):
            model = train(conv, data, epochs=10 if options.quick else EPOCHS, seed=0)
            for strategy in STRATEGIES:
                for rescale in ("row", "gcn", "none") if conv is GCNConv else ("row",):
                    rows += measure(model, data, strategy, rescale, name, conv.__name__)
    frame = with_others(pd.DataFrame([{**row, **facts} for row in rows]), results.FOLDER / FILE)
    frame = results.write(frame.to_dict("records"), NAME, quick=options.quick)
    chosen = frame[frame["chosen"]]
    print(chosen.drop(columns=list(facts)).round(4).to_string(index=False))


def measure(
    model: Net, data: Data, strategy: str, rescale: str, name: str, conv: str
) -> list[dict[str, Any]]:
    """A row for each width of one model, strategy and rescaling."""
    degree = torch.bincount(data.edge_index[1])
    widths = [4 << i for i in range((int(degree.max()) - 1).bit_length() - 1)] or [4]
    rows: list[dict[str, Any]] = []
    with pyg_accel.patched(model), torch.no_grad():
        exact, test_all = (accuracy(model, data, m) for m in (data.val_mask, data.test_mask))
        for width, share in pyg_accel.sampling_rates(degree, widths).items():
            with pyg_accel.sampled(width, strategy, rescale=rescale):
                val, test = (accuracy(model, data, m) for m in (data.val_mask, data.test_mask))
            good = exact - val <= MAX_DROP + 1e-9 and not any(row["chosen"] for row in rows)
            rows.append({
                "graph": name, "model": conv, "strategy": strategy, "rescale": rescale,
                "width": width, "chosen": good, "edges": share, "val_all": exact, "val": val,
                "test_all": test_all, "test": test, "test_drop": test_all - test,
            })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
