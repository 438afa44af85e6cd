"""The same loops eagerly and with CUDA graphs: a fixed graph, molecules, sampled batches.

    python examples/graphed.py [fixed] [molecules] [sampled]

It needs a GPU to show anything: without one everything runs eagerly, the report says so, and the
two lines of each part differ by chance alone.
"""

import sys
import time
from collections.abc import Iterable

import pyg_accel
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy, mse_loss
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.nn import GCN, GINConv, GraphSAGE, global_add_pool
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Molecules(torch.nn.Module):
    """Three GIN layers and a sum over each molecule."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for rows in (features, hidden, hidden):
            network = Sequential(
                Linear(rows, hidden), BatchNorm1d(hidden), ReLU(), Linear(hidden, hidden)
            )
            self.convs.append(GINConv(network))
        self.head = Linear(hidden, 1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.head(global_add_pool(x, batch))


def fixed() -> None:
    """Full-batch training: the whole step is one CUDA graph."""
    nodes, edges = 2_708, 10_556
    x = torch.randn(nodes, 256, device=DEVICE)
    edge_index = torch.randint(nodes, (2, edges), device=DEVICE)
    y = torch.randint(7, (nodes,), device=DEVICE)
    for captured in (False, True):
        torch.manual_seed(0)
        model = GCN(256, 16, 2, 7, dropout=0.5).to(DEVICE)
        optimizer = torch.optim.Adam(
            model.parameters(), lr=0.01, capturable=captured and DEVICE.type == "cuda"
        )

        def step(x: Tensor, edge_index: Tensor, y: Tensor, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = cross_entropy(model(x, edge_index), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = pyg_accel.graphed_step(step, modules=[model]) if captured else step
        for _ in range(10):
            loss = run(x, edge_index, y)
        synchronize()
        start = time.perf_counter()
        for _ in range(100):
            loss = run(x, edge_index, y)
        synchronize()
        spent = 1e3 * (time.perf_counter() - start) / 100
        print(f"  {'graphed' if captured else 'eager':>8}: {spent:.2f} ms a step, loss {loss:.3f}")


def train(model: torch.nn.Module, loader: Iterable[Data], seeds_only: bool) -> tuple[float, int]:
    """One epoch: the loop knows nothing of CUDA graphs."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total, steps = torch.zeros((), device=DEVICE), 0
    for data in loader:
        data = data.to(DEVICE, non_blocking=True)
        optimizer.zero_grad()
        if seeds_only:
            out = model(data.x, data.edge_index)[: data.batch_size]
            loss = cross_entropy(out, data.y[: data.batch_size])
        else:
            loss = mse_loss(model(data.x, data.edge_index, data.batch).squeeze(-1), data.y)
        loss.backward()
        optimizer.step()
        total, steps = total + loss.detach(), steps + 1
    return float(total) / steps, steps


def compare(model: torch.nn.Module, loader: Iterable[Data], seeds_only: bool = False) -> None:
    for captured in (False, True):
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        run = pyg_accel.graphed(model) if captured else model
        for _ in range(3):
            start = time.perf_counter()
            loss, steps = train(run, loader, seeds_only)
            spent = 1e3 * (time.perf_counter() - start) / steps
        name = "graphed" if captured else "eager"
        print(f"  {name:>8}: {spent:.2f} ms a step with its batch, loss {loss:.3f}")


def molecules() -> None:
    """Batches of small graphs, each of another size."""
    graphs = []
    for _ in range(1_000):
        nodes = int(torch.randint(10, 30, ()))
        chain = torch.stack([torch.arange(1, nodes), torch.arange(nodes - 1)])
        x = torch.randn(nodes, 16)
        graphs.append(
            Data(x=x, edge_index=torch.cat([chain, chain.flip(0)], 1), y=x.sum().view(1) / 10)
        )
    compare(Molecules(16, 128).to(DEVICE), DataLoader(graphs, batch_size=64, shuffle=True))


def sampled() -> None:
    """Batches of sampled neighbours."""
    if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        print("  skipped: NeighborLoader needs pyg_accel.patch(), pyg-lib or torch-sparse")
        return
    nodes, edges = 20_000, 200_000
    data = Data(
        x=torch.randn(nodes, 64),
        edge_index=torch.randint(nodes, (2, edges)),
        y=torch.randint(10, (nodes,)),
    )
    loader = NeighborLoader(data, num_neighbors=[10, 10], batch_size=512, shuffle=True)
    compare(GraphSAGE(64, 128, 2, 10).to(DEVICE), loader, seeds_only=True)


def main() -> None:
    modes = {"fixed": fixed, "molecules": molecules, "sampled": sampled}
    pyg_accel.patch()
    if DEVICE.type == "cpu":
        print("no CUDA device: both lines run eagerly, and differ by chance alone")
    for name in sys.argv[1:] or modes:
        print(name)
        modes[name]()
        pyg_accel.report()
        pyg_accel.reset_report()


if __name__ == "__main__":
    main()
