"""A layer that pyg_accel has never seen: patch it, compare it with stock PyG, read the report.

    python examples/patch_any_model.py

`patch()` reads what `message` does to the features, so the layer below runs as one fused kernel
although pyg_accel does not know its class. The graph has 600,000 edges: calls with edge features on
fewer than 400,000 are left to PyG, which is faster there, and the report says so (try `--edges`).
"""

import argparse
import statistics
import time

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing


class GatedEdges(MessagePassing):
    """Mean and maximum of gated messages: sigmoid(gate_i + gate_j) * (value_j + edge)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr=["mean", "max"])
        self.gate = torch.nn.Linear(in_channels, out_channels)
        self.value = torch.nn.Linear(in_channels, out_channels)
        self.out = torch.nn.Linear(2 * out_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        gate, value = self.gate(x), self.value(x)
        return self.out(self.propagate(edge_index, gate=gate, value=value, edge_attr=edge_attr))

    def message(self, gate_i: Tensor, gate_j: Tensor, value_j: Tensor, edge_attr: Tensor) -> Tensor:
        return torch.sigmoid(gate_i + gate_j) * (value_j + edge_attr)


class PerEdgeNetwork(GatedEdges):
    """The same with a network of two layers on every edge, which no formula expresses."""

    def message(self, gate_i: Tensor, gate_j: Tensor, value_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.value(torch.relu(gate_i + gate_j + edge_attr)) * value_j


def train_steps(
    layer: torch.nn.Module, *inputs: Tensor, warmup: int = 2, steps: int = 5
) -> tuple[Tensor, list[Tensor], float]:
    """The output, the gradients of all parameters, and the median milliseconds of a step.

    The first steps are not timed: they sort the edges, and read what `message` computes.
    """
    times = []
    for _ in range(warmup + steps):
        layer.zero_grad()
        start = time.perf_counter()
        out = layer(*inputs)
        out.square().mean().backward()
        times.append(1e3 * (time.perf_counter() - start))
    gradients = [p.grad.clone() for p in layer.parameters()]
    return out.detach(), gradients, statistics.median(times[warmup:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--edges", type=int, default=600_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    width = 32
    inputs = (
        torch.randn(options.nodes, width),
        torch.randint(options.nodes, (2, options.edges)),
        torch.randn(options.edges, width),
    )
    for kind in (GatedEdges, PerEdgeNetwork):
        layer = kind(width, width)
        out, grads, stock_ms = train_steps(layer, *inputs)
        with pyg_accel.patched():  # pyg_accel.patch() does the same for the rest of the program
            ours, our_grads, our_ms = train_steps(layer, *inputs)
        worst = max(float((a - b).abs().max()) for a, b in zip(grads, our_grads, strict=True))
        print(f"{kind.__name__}: stock {stock_ms:.0f} ms, patched {our_ms:.0f} ms a step (median)")
        print(f"  outputs differ by {(out - ours).abs().max():.1e}, gradients by {worst:.1e}")
    print()
    pyg_accel.report()


if __name__ == "__main__":
    main()
