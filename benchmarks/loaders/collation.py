"""Milliseconds to put 128 molecules into a batch: those of a list, and of a dataset in memory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.loader import DataLoader

from benchmarks.tools import timing
from benchmarks.tools.variants import patched
from pyg_accel import loader

MOLECULES, ROUNDS = 128, 100


class Molecules(InMemoryDataset):
    """Random graphs of the size of molecules."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.data, self.slices = self.collate([molecule() for _ in range(count)])


def molecule() -> Data:
    nodes = int(torch.randint(10, 30, ()))
    edges = 2 * nodes + 2
    return Data(x=torch.randn(nodes, 9), edge_index=torch.randint(nodes, (2, edges)),
                edge_attr=torch.randn(edges, 3), y=torch.randn(1, 1))  # fmt: skip


def collation(device: str) -> Iterator[tuple[str, str, timing.Quantiles]]:
    """Yield what is put together on a device, by whom, and how long a batch took."""
    torch.manual_seed(0)
    dataset = Molecules(MOLECULES)
    graphs = [*dataset]

    whole = DataLoader(dataset, batch_size=MOLECULES)
    resident = loader.DataLoader(dataset, batch_size=MOLECULES, device=device)
    cases: list[tuple[str, str, Callable[[], Any]]] = [
        ("collate a list", "stock", lambda: Batch.from_data_list(graphs).to(device)),
        ("collate a list", "patched", lambda: Batch.from_data_list(graphs).to(device)),
        ("load a dataset", "stock", lambda: next(iter(whole)).to(device)),
        ("load a dataset", "patched", lambda: next(iter(whole)).to(device)),
        ("load a dataset", "pyg_accel.loader", lambda: next(iter(resident))),
    ]
    for what, backend, call in cases:
        with patched(backend == "patched"):
            yield what, backend, timing.in_turns({"": call}, device, ROUNDS)[""]
