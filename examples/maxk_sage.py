"""Train ReLU and MaxK side by side: accuracy over several seeds, and epoch time.

    python examples/maxk_sage.py
    python examples/maxk_sage.py --hidden 256 --k 8 32 64
    python examples/maxk_sage.py --dataset Cora --root DIR

MaxK keeps the k largest hidden features of every node, so that an aggregation reads k numbers of a
neighbour in place of all. Every network starts from the parameters of the ReLU network of its seed:
`pyg_accel.to_maxk(model, k)` is the whole change. All are trained under `patch()`. The speed-up
grows with the width, and with the edges of a node; on small graphs MaxK is slower.
"""

import argparse
import statistics
import time
from typing import Any

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
from torch.nn import Dropout, Linear, ReLU
from torch.nn.functional import cross_entropy, one_hot
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import SAGEConv, Sequential


def network(inputs: int, hidden: int, classes: int, layers: int = 3) -> Sequential:
    """The model of the MaxK paper: a linear map, layers behind a nonlinearity, a linear map."""
    parts: list[Any] = [(Linear(inputs, hidden), "x -> x")]
    for _ in range(layers):
        parts += [ReLU(), Dropout(0.3), (SAGEConv(hidden, hidden), "x, edge_index -> x")]
    return Sequential("x, edge_index", [*parts, Linear(hidden, classes)])


def main() -> None:
    options = parse_options()
    pyg_accel.patch()
    if options.dataset == "community":
        data = community(options.nodes)
    else:
        data = Planetoid(options.root, options.dataset)[0]
    print(f"{options.dataset}: {data.num_nodes:,} nodes, {data.num_edges:,} edges")
    print(f"{'network':10} {'test accuracy, %':>18} {'epoch ms':>9} {'over ReLU':>10}")
    relu_ms = 0.0
    for k in (None, *options.k):
        accuracies, epoch_ms = zip(
            *(train(data, k, seed, options) for seed in range(options.seeds)), strict=True
        )
        mean, spread = statistics.fmean(accuracies), statistics.pstdev(accuracies)
        ms = statistics.median(epoch_ms)
        relu_ms = relu_ms or ms
        name = "ReLU" if k is None else f"MaxK {k}"
        print(f"{name:10} {mean:11.1f} ± {spread:4.1f} {ms:9.1f} {relu_ms / ms:9.2f}x", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    datasets = ["community", "Cora", "CiteSeer", "PubMed"]
    parser.add_argument("--dataset", choices=datasets, default="community")
    parser.add_argument("--root", help="folder for PyG's files of a real data set")
    parser.add_argument("--k", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=5_000, help="of the community graph")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.dataset != "community" and options.root is None:
        parser.error(f"--dataset {options.dataset} needs --root, the folder with its files")
    return options


def train(data: Data, k: int | None, seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """The accuracy of the test nodes, and the median milliseconds of an epoch."""
    torch.manual_seed(seed)
    model = network(data.num_features, options.hidden, int(data.y.max()) + 1)
    if k is not None:
        model = pyg_accel.to_maxk(model, k)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    times = []
    for _ in range(options.epochs):
        start = time.perf_counter()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(dim=1) == data.y
    return 100 * float(right[data.test_mask].float().mean()), statistics.median(times)


def community(nodes: int, classes: int = 8, degree: int = 40) -> Data:
    """Classes as communities: 60% of the edges stay in a class, features alone say little."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(nodes) % classes
    source = torch.randint(nodes, (degree // 2 * nodes,), generator=generator)
    near = source + classes * torch.randint(nodes // classes, source.shape, generator=generator)
    far = torch.randint(nodes, source.shape, generator=generator)
    inside = torch.rand(source.shape, generator=generator) < 0.6
    pairs = torch.stack([source, torch.where(inside, near % nodes, far)])
    x = one_hot(y, 64) + torch.randn(nodes, 64, generator=generator)
    train_mask = torch.rand(nodes, generator=generator) < 0.3
    return Data(
        x=x,
        y=y,
        edge_index=torch.cat([pairs, pairs.flip(0)], dim=1),
        train_mask=train_mask,
        test_mask=~train_mask,
    )


if __name__ == "__main__":
    main()
