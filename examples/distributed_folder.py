"""Training from a stored graph: each rank reads its part of memory-mapped files, and no other.

    python examples/distributed_folder.py save FOLDER
    torchrun --nproc-per-node 4 examples/distributed_folder.py train FOLDER

The first command needs the memory for the whole graph, the second only for the part of a rank. It
goes on from its last checkpoint if it is started again, also with another number of processes.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pyg_accel
import torch
from pyg_accel import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, one_hot
from torch_geometric.data import Data
from torch_geometric.nn import GCN

EPOCHS = 20


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


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def train(folder: Path) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    pyg_accel.patch()
    model = GCN(32, 64, num_layers=2, out_channels=5, norm="batch_norm", dropout=0.3)
    model, data = pyg_accel.distribute(model, folder, mesh, rows="own")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    # One folder for each checkpoint; what torch writes last, .metadata, says that it is complete.
    checkpoints = folder.with_suffix(".checkpoints")
    begin = max((int(p.parent.name) for p in checkpoints.glob("*/.metadata")), default=0)
    if begin:
        state = state_of(model, optimizer)
        checkpoint.load(state, checkpoint_id=checkpoints / str(begin))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    for epoch in range(begin, EPOCHS):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)  # rows of this rank, as y and train_mask are
        each = cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")
        loss = distributed.mean(each)  # over the nodes of all ranks
        loss.backward()
        optimizer.step()
        if (epoch + 1) % 10 == 0:
            where = checkpoints / str(epoch + 1)
            checkpoint.save(state_of(model, optimizer), checkpoint_id=where)

    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(dim=1) == data.y
    held_out = ~data.train_mask
    accuracy = distributed.total(int(right[held_out].sum())) / distributed.total(
        int(held_out.sum())
    )
    if mesh.get_rank() == 0:
        print(f"epochs {begin} to {EPOCHS}: accuracy {accuracy:.3f}")
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("save", "train"), help="train runs under torchrun")
    parser.add_argument("folder", type=Path, help="of the stored graph")
    options = parser.parse_args()
    if options.command == "save":
        distributed.save(community(), options.folder, overwrite=True)
    elif "WORLD_SIZE" not in os.environ:
        parser.error(
            f"start it as: torchrun --nproc-per-node 4 {sys.argv[0]} train {options.folder}"
        )
    else:
        train(options.folder)


if __name__ == "__main__":
    main()
