"""GraphSAGE on mini-batches of a large graph: PyG's script, and two lines.

    python examples/neighbor_loader.py [nodes] [epochs]

It needs neither pyg-lib nor torch-sparse. The graph is made here, so that it runs offline: classes
are communities, and three of four edges stay inside of theirs.
"""

import sys

import pyg_accel  # the first line
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

pyg_accel.patch()  # the second one

NODES, EPOCHS = (int(number) for number in (*sys.argv[1:], 20_000, 3)[:2])
CLASSES, FEATURES = 10, 32


def community_graph(nodes: int, edges: int) -> Data:
    torch.manual_seed(0)
    y = torch.randint(CLASSES, (nodes,))
    source = torch.randint(nodes, (4 * edges,))
    target = torch.randint(nodes, (4 * edges,))
    kept = (y[source] == y[target]) | (torch.rand(4 * edges) < 0.04)
    x = torch.randn(CLASSES, FEATURES)[y] + 3 * torch.randn(nodes, FEATURES)
    return Data(x=x, edge_index=torch.stack([source[kept], target[kept]]), y=y)


data = community_graph(NODES, 20 * NODES)
train = torch.arange(NODES) < NODES // 2
loader = NeighborLoader(data, [15, 10], input_nodes=train, batch_size=1024, shuffle=True)
test_loader = NeighborLoader(data, [15, 10], input_nodes=~train, batch_size=1024)
model = GraphSAGE(FEATURES, 64, num_layers=2, out_channels=CLASSES)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(EPOCHS):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss:.3f}")

model.eval()
with torch.no_grad():
    right = sum(
        int((model(b.x, b.edge_index).argmax(-1) == b.y)[: b.batch_size].sum()) for b in test_loader
    )
print(f"accuracy {right / int((~train).sum()):.3f}")
pyg_accel.report()
