"""Parameters sharded by torch's FSDP2, nodes by pyg_accel: for models with many parameters.

    torchrun --nproc-per-node 4 examples/distributed_fsdp.py

``wrap=False`` leaves gradients alone: FSDP2, DDP, accelerate or Lightning average them.
"""

import os

import pyg_accel
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GCN

from distributed import DEVICE, community_data  # isort: skip  # the example next to this one


def main() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),))
    pyg_accel.patch()
    model = GCN(32, 256, num_layers=3, out_channels=5)
    model, data = pyg_accel.distribute(model, community_data(), mesh, wrap=False)
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
