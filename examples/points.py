"""A point cloud classifier in the manner of PointNet++, without pyg-lib.

    python examples/points.py [clouds] [epochs]

`fps` and `radius` of PyG want pyg-lib, which is on no package index; under `patch()` they run by
pyg_accel. Clouds are spheres, cubes and tori, made here, so that it runs offline.
"""

import sys

import pyg_accel
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, PointNetConv, fps, global_max_pool, radius

pyg_accel.patch()

CLOUDS, EPOCHS = (int(number) for number in (*sys.argv[1:], 300, 5)[:2])
POINTS = 128


def cloud(kind: int) -> Data:
    pos = torch.randn(POINTS, 3)
    if kind == 0:  # a sphere
        pos = pos / pos.norm(dim=1, keepdim=True)
    elif kind == 1:  # a cube
        pos = pos / pos.abs().amax(1, keepdim=True)
    else:  # a torus
        ring = pos[:, :2] / pos[:, :2].norm(dim=1, keepdim=True)
        turn = 6.283 * torch.rand(POINTS, 1)
        pos = torch.cat([ring * (1 + 0.3 * turn.cos()), 0.3 * turn.sin()], 1)
    return Data(pos=pos, y=torch.tensor([kind]))


class Level(torch.nn.Module):
    """Sample points, and let each see those around."""

    def __init__(self, ratio: float, r: float, channels: list[int]) -> None:
        super().__init__()
        self.ratio, self.r = ratio, r
        self.conv = PointNetConv(MLP(channels), add_self_loops=False)

    def forward(self, x, pos, batch):
        chosen = fps(pos, batch, ratio=self.ratio)
        row, col = radius(pos, pos[chosen], self.r, batch, batch[chosen], max_num_neighbors=32)
        target = None if x is None else x[chosen]
        x = self.conv((x, target), (pos, pos[chosen]), torch.stack([col, row]))
        return x, pos[chosen], batch[chosen]


class PointNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Level(0.5, 0.4, [3, 32, 32])
        self.second = Level(0.25, 0.8, [32 + 3, 64, 64])
        self.head = MLP([64, 32, 3], norm=None)

    def forward(self, pos, batch):
        x, pos, batch = self.first(None, pos, batch)
        x, pos, batch = self.second(x, pos, batch)
        return self.head(global_max_pool(x, batch))


torch.manual_seed(0)
clouds = [cloud(i % 3) for i in range(CLOUDS)]
split = len(clouds) * 4 // 5
model = PointNet()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
for epoch in range(EPOCHS):
    model.train()
    for batch in DataLoader(clouds[:split], batch_size=32, shuffle=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch.pos, batch.batch), batch.y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        tested = [(model(b.pos, b.batch).argmax(1) == b.y) for b in
                  DataLoader(clouds[split:], batch_size=64)]  # fmt: skip
    print(f"epoch {epoch}: loss {loss:.3f}, right {torch.cat(tested).float().mean():.0%}")
pyg_accel.report()
