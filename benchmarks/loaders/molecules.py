"""Training on batches of 128 molecules, the loader included: stock and patched, as a CUDA graph."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import GIN

import pyg_accel
from benchmarks.loaders.collation import MOLECULES, Molecules
from benchmarks.tools.variants import patched

HIDDEN, LAYERS, EPOCHS = 256, 5, 3
Epoch = Callable[[Any, Callable[[Any], None], str], dict[str, float]]


def step_of(device: str, *, graphed: bool) -> Callable[[Any], None]:
    """A step of training on a batch, of a new model."""
    torch.manual_seed(0)
    gin, head = GIN(9, HIDDEN, LAYERS).to(device), nn.Linear(HIDDEN, 1).to(device)
    optimizer = torch.optim.Adam([*gin.parameters(), *head.parameters()], capturable=graphed)

    def step(x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor, num_graphs: int) -> None:
        optimizer.zero_grad()
        pooled = global_add_pool(gin(x, edge_index), batch, num_graphs)
        mse_loss(head(pooled), y).backward()
        optimizer.step()

    run: Any = pyg_accel.graphed_step(step, modules=[gin, head], dynamic=True) if graphed else step
    return lambda b: run(b.x, b.edge_index, b.batch, b.y, b.num_graphs)


def epochs(device: str, batches: int, epoch: Epoch) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield by what batches are made and steps run, and how long an epoch took.

    Kernels are chosen, and graphs captured, in epochs before the one that counts.
    """
    torch.manual_seed(0)
    dataset = Molecules(MOLECULES * batches)
    whole = DataLoader(dataset, MOLECULES, shuffle=True)
    resident = pyg_accel.loader.DataLoader(dataset, MOLECULES, shuffle=True, device=device)
    for name, loader in (("stock", whole), ("patched", whole), ("pyg_accel.loader", resident),
                         ("pyg_accel.loader, graphed", resident)):  # fmt: skip
        with patched(name != "stock"):
            step = step_of(device, graphed=name.endswith("graphed"))
            found = [epoch(loader, step, device) for _ in range(EPOCHS)]
        yield name, found[-1]
