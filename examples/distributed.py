"""Full-graph training on several GPUs, or processes of a CPU: three lines more than on one.

torchrun --nproc-per-node 4 examples/distributed.py
python examples/distributed.py        # the same script in one process
"""

import os

import pyg_accel
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def community_data(nodes: int = 3_000, classes: int = 5) -> Data:
    """Communities as classes; noisy features, so that neighbours matter."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (nodes,), generator=generator)
    order = y.argsort()
    place = torch.randint(nodes, (30_000,), generator=generator)
    near = (place + torch.randint(1, 300, place.shape, generator=generator)) % nodes
    edges = torch.stack([order[place], order[near]])
    x = torch.randn(nodes, 32, generator=generator)
    x[torch.arange(nodes), y] += 1
    return Data(
        x=x,
        y=y,
        edge_index=torch.cat([edges, edges.flip(0)], dim=1),
        train_mask=torch.rand(nodes, generator=generator) < 0.3,
    )


def main() -> None:
    torch.manual_seed(0)
    data = community_data()
    model = GraphSAGE(32, 64, num_layers=2, out_channels=5, dropout=0.3)

    if "WORLD_SIZE" in os.environ:  # under torchrun
        mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),))
        pyg_accel.patch()
        model, data = pyg_accel.distribute(model, data, mesh)
    else:
        model, data = model.to(DEVICE), data.to(DEVICE)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)  # rows of all nodes, in the order of the data
        loss = cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(dim=1) == data.y
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"loss {loss:.4f}, accuracy {right[~data.train_mask].float().mean():.3f}")
        if "WORLD_SIZE" in os.environ:
            pyg_accel.distributed.report(model)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
