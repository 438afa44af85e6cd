"""Parameters sharded by torch's FSDP2, nodes by pyg_accel: for models with many parameters.

    torchrun --nproc-per-node 4 examples/distributed_fsdp.py

``wrap=False`` leaves gradients alone: FSDP2, DDP, accelerate or Lightning average them.
"""

import os
import sys

import pyg_accel
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, one_hot
from torch_geometric.data import Data
from torch_geometric.nn import GCN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def community(nodes: int = 3_000, classes: int = 5, edges: int = 60_000) -> Data:
    """Classes as communities; noisy features, so that neighbours matter."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(nodes) % classes
    source = torch.randint(nodes, (edges,), generator=generator)
    near = source + classes * torch.randint(nodes // classes, (edges,), generator=generator)
    far = torch.randint(nodes, (edges,), generator=generator)
    inside = torch.rand(edges, generator=generator) < 0.7
    x = one_hot(y, 32) + torch.randn(nodes, 32, generator=generator)
    return Data(
        x=x,
        y=y,
        edge_index=torch.stack([source, torch.where(inside, near % nodes, far)]),
        train_mask=torch.rand(nodes, generator=generator) < 0.3,
    )


def main() -> None:
    if "WORLD_SIZE" not in os.environ:
        print(f"start it as: torchrun --nproc-per-node 4 {sys.argv[0]}", file=sys.stderr)
        sys.exit(2)
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),))
    pyg_accel.patch()
    model = GCN(32, 256, num_layers=3, out_channels=5)
    model, data = pyg_accel.distribute(model, community(), mesh, wrap=False)
    for layer in model.module.convs:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.module, mesh=mesh)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
    if mesh.get_rank() == 0:
        print(f"loss {loss:.4f} on {mesh.size()} ranks")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
