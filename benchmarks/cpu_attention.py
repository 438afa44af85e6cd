"""Attention in one pass over a row against its parts, on the CPU.

    python -m benchmarks.cpu_attention [--quick] [--graphs NAME ...]

An epoch is forward, backward and Adam on the whole graph: 3 layers, 128 hidden in 4 heads. One
process, and the ways take turns, so that whatever else the machine does disturbs all alike; a row
has the median over the rounds. `parts` is pyg_accel with scores, softmax and weighted sum one after
the other, `one pass` the kernels of csrc/cpu/stages.h wherever they can run, `dispatch` what a user
gets. Outputs are compared before anything is timed. Stock PyG is in `cpu_epochs.py`.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import cross_entropy
from torch_geometric.nn import AGNNConv, GATConv, GATv2Conv, TransformerConv
from tqdm import tqdm

import pyg_accel
from benchmarks import graphs, machine, results
from pyg_accel.backends import get_backend
from pyg_accel.backends.dispatch import forget_decisions

NAME = "cpu_attention"
FEATURES, HIDDEN, HEADS, LAYERS, CLASSES = 128, 128, 4, 3, 40
WAYS = ("parts", "one pass", "dispatch")
ALLOWED = 2e-4  # of the largest output


class Model(Module):
    """Layers of one convolution, with relu between them."""

    def __init__(self, convs: list[Module]) -> None:
        super().__init__()
        self.first, self.convs = Linear(FEATURES, HIDDEN), ModuleList(convs)
        self.last = Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        out: Tensor = self.last(x)
        return out


def heads(kind: type[Module], **extra: Any) -> Callable[[], Model]:
    return lambda: Model([kind(HIDDEN, HIDDEN // HEADS, HEADS, **extra) for _ in range(LAYERS)])


MODELS: dict[str, Callable[[], Model]] = {
    "GAT": heads(GATConv),
    "GAT, dropout": heads(GATConv, dropout=0.5),
    "GATv2": heads(GATv2Conv),
    "Transformer": heads(TransformerConv),
    "AGNN": lambda: Model([AGNNConv() for _ in range(LAYERS)]),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small graph, one round")
    parser.add_argument("--graphs", nargs="+", default=["arxiv-like"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    names = ["arxiv-like@0.05"] if options.quick else options.graphs
    rows, facts = [], machine.facts()
    for graph in names:
        for model in options.models:
            row = measure(graph, model, 1 if options.quick else options.rounds)
            print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
            rows.append({"graph": graph, "model": model, **row, **facts})
            results.write(rows, NAME, quick=options.quick)


def measure(graph: str, model: str, rounds: int) -> dict[str, Any]:
    csr = graphs.load(graph)
    edge_index, nodes = graphs.edge_list(csr), csr[0].numel() - 1
    torch.manual_seed(0)
    x, y = torch.randn(nodes, FEATURES), torch.randint(CLASSES, (nodes,))
    state = MODELS[model]().state_dict()
    models = {}
    for way in WAYS:
        models[way] = MODELS[model]()
        models[way].load_state_dict(state)
    optimizers = {way: torch.optim.Adam(m.parameters()) for way, m in models.items()}
    outs = {}
    for way, one in models.items():
        with running(way), torch.no_grad():
            outs[way] = one.eval()(x, edge_index)
        one.train()
    for way in WAYS[1:]:
        error = float((outs[way] - outs["parts"]).abs().max() / outs["parts"].abs().max())
        if not error < ALLOWED:
            raise SystemExit(f"{model}, {way}: outputs are off by {error:.3g}")
    times: dict[str, list[float]] = {
        f"{way}{what}": [] for way in WAYS for what in ("", " forward")
    }
    for _ in tqdm(range(rounds + 1), desc=f"{model} on {graph}", leave=False):
        for way in WAYS:
            with running(way):
                torch.manual_seed(0)
                start = time.perf_counter()
                optimizers[way].zero_grad()
                loss = cross_entropy(models[way](x, edge_index), y)
                times[f"{way} forward"].append(time.perf_counter() - start)
                loss.backward()
                optimizers[way].step()
                times[way].append(time.perf_counter() - start)
    row: dict[str, Any] = {"N": nodes, "E": edge_index.size(1), "threads": torch.get_num_threads()}
    for what, each in times.items():
        row[f"{what.replace(' ', '_')}_ms"] = median(each[1:]) * 1e3
    ratios = zip(times["parts"][1:], times["dispatch"][1:], strict=True)
    return row | {"parts_over_dispatch": median(a / b for a, b in ratios)}


@contextlib.contextmanager
def running(way: str) -> Iterator[None]:
    several = ("attention", "gspmm_several") if way == "parts" else ()
    kernels = get_backend("cpu").kernels
    forced = {
        op: replace(kernels[op], prefers_unfused=lambda spec: spec.op in several)
        for op in ("attention", "gspmm_several")
    }
    with pyg_accel.patched(), patch.dict(kernels, {} if way == "dispatch" else forced):
        forget_decisions()
        yield


if __name__ == "__main__":
    main()
