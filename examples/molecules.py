"""A GIN on batches of molecules: PyG's script, and two lines.

    python examples/molecules.py [molecules] [epochs]

Molecules are rings with side chains, made here, so that it runs offline; the model tells how many
atoms of the first kind are in a ring. `pyg_accel.loader.DataLoader` in place of PyG's would keep
the graphs of a dataset together and make a batch in half of the time, on a GPU if asked to.
"""

import sys

import pyg_accel  # the first line
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool

pyg_accel.patch()  # the second one

MOLECULES, EPOCHS = (int(number) for number in (*sys.argv[1:], 2000, 10)[:2])
KINDS, WIDTH = 4, 64


def molecule() -> Data:
    ring, chain = int(torch.randint(4, 8, ())), int(torch.randint(0, 8, ()))
    kind = torch.randint(KINDS, (ring + chain,))
    around = torch.arange(ring)
    bonds = [torch.stack([around, (around + 1) % ring])]
    if chain:
        along = torch.arange(ring, ring + chain)
        bonds.append(torch.stack([torch.cat([torch.zeros(1).long(), along[:-1]]), along]))
    bond = torch.cat(bonds, 1)
    return Data(
        x=torch.nn.functional.one_hot(kind, KINDS).float(),
        edge_index=torch.cat([bond, bond.flip(0)], 1),
        y=(kind[:ring] == 0).sum().float().view(1, 1),
    )


torch.manual_seed(0)
graphs = [molecule() for _ in range(MOLECULES)]
split = MOLECULES * 4 // 5
loader = DataLoader(graphs[:split], batch_size=128, shuffle=True)
test_loader = DataLoader(graphs[split:], batch_size=128)
gin, head = GIN(KINDS, WIDTH, num_layers=4), MLP([WIDTH, WIDTH, 1], norm=None)
optimizer = torch.optim.Adam([*gin.parameters(), *head.parameters()], lr=0.003)


def predict(batch: Data) -> torch.Tensor:
    return head(global_add_pool(gin(batch.x, batch.edge_index), batch.batch, batch.num_graphs))


for epoch in range(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss = (predict(batch) - batch.y).square().mean()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss:.3f}")

with torch.no_grad():
    wrong = torch.cat([(predict(b) - b.y).abs().view(-1) for b in test_loader])
print(f"off by {wrong.mean():.2f} atoms")
pyg_accel.report()
