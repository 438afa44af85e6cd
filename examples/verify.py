"""Check every accelerated call against stock PyG while a model trains, and see a bug get caught.

    python examples/verify.py

The report has two rows for GATConv: attention weights (`deferred`: computed inside the sum that
follows), and that sum.

For a script of your own no code is needed: PYG_ACCEL_VERIFY=1 python -m pyg_accel run train.py
"""

from typing import Any

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
from pyg_accel.backends import Backend, Kernel
from pyg_accel.backends.reference import REFERENCE
from pyg_accel.errors import VerificationError
from pyg_accel.settings import settings
from torch import Tensor
from torch_geometric.nn.models import GAT, GCN, PNA, GraphSAGE

DEGREES = torch.tensor([0, 100, 200, 300, 200, 100])  # what PNA scales its messages by
MODELS = {
    "GCN": (GCN, {}),
    "GraphSAGE": (GraphSAGE, {}),
    "GAT": (GAT, {"heads": 4, "dropout": 0.5}),  # dropout: both paths draw the same numbers
    "PNA": (PNA, {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": DEGREES}),
}


def off_by_one(*args: Any, **kwargs: Any) -> list[Tensor]:
    """A kernel with a bug."""
    outs = REFERENCE.kernels["gspmm"].run(*args, **kwargs)
    return [out + 1 if out.is_floating_point() else out for out in outs]


def train(model: torch.nn.Module, x: Tensor, edge_index: Tensor, steps: int = 3) -> float:
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x, edge_index).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    torch.manual_seed(0)
    x, edge_index = torch.randn(1000, 32), torch.randint(1000, (2, 8000))
    settings.verify = True  # or PYG_ACCEL_VERIFY=1
    settings.always = True  # or PYG_ACCEL_ALWAYS=1: this graph is below the size thresholds
    with pyg_accel.patched():
        for name, (kind, extra) in MODELS.items():
            loss = train(kind(32, 32, 2, **extra), x, edge_index)
            print(f"{name}: 3 steps verified, loss {loss:.4f}")
        pyg_accel.report()

        kernels = REFERENCE.kernels | {"gspmm": Kernel(off_by_one, cost=lambda spec: 1.0)}
        pyg_accel.register_backend(Backend("off-by-one", kernels))
        try:
            with pyg_accel.use_backend("off-by-one"):
                train(GCN(32, 32, 2), x, edge_index)
        except VerificationError as error:
            print(f"\nand with a broken backend: {error}")


if __name__ == "__main__":
    main()
