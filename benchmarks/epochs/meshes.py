"""Simulators on meshes: a training step of MeshGraphNet and of a model like GraphCast.

    python -m benchmarks.epochs.meshes [--device cuda] [--quick] [--out FOLDER]

Both are made of interaction networks: an MLP with LayerNorm updates the features of every edge from
its ends, another one those of every node from the sum over its edges. MeshGraphNet (Pfaff et al.
2021, Section 3.2) has 15 on a mesh; the other model (Lam et al. 2023) has one from a grid to a mesh
of fewer nodes, some on the mesh, and one back. Width 128. `new meshes`: every step has a mesh that
was not used before, as in a loader of simulations. The losses of all steps are compared.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch_geometric.nn import MLP, MessagePassing
from torch_geometric.typing import PairTensor

from benchmarks.tools import results, timing
from benchmarks.tools.variants import must_agree, patched, stock_pyg

NAME, WIDTH = "epochs/meshes", 128
SIZES = {"MeshGraphNet": (2_000, 0), "GraphCast-like": (642, 2_592)}  # nodes of mesh and grid
NEIGHBORS, OF_GRID = 6, 3  # on the mesh, and between mesh and grid
STEPS = {"MeshGraphNet": 15, "GraphCast-like": 8}
LAPS, WARM_UP = 12, 4
ALLOWED = 1e-3  # Adam makes rounding grow: in float64 losses differ by 1e-15


def mlp(inputs: int, outputs: int = WIDTH, *, norm: bool = True) -> nn.Module:
    layers = MLP([inputs, WIDTH, WIDTH, outputs], norm=None)
    return nn.Sequential(layers, nn.LayerNorm(outputs)) if norm else layers


class Interaction(MessagePassing):
    """Updates edges [E, WIDTH] and the nodes that they point to [N, WIDTH]."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.edge, self.node = mlp(3 * WIDTH), mlp(2 * WIDTH)

    def forward(
        self, x: PairTensor, edge_index: Tensor, edge_attr: Tensor
    ) -> tuple[Tensor, Tensor]:
        edge_attr = edge_attr + self.edge_updater(edge_index, x=x, edge_attr=edge_attr)
        out = self.propagate(edge_index, edge_attr=edge_attr, size=(x[0].size(0), x[1].size(0)))
        return x[1] + self.node(torch.cat([x[1], out], dim=-1)), edge_attr

    def edge_update(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.edge(torch.cat([x_i, x_j, edge_attr], dim=-1))

    def message(self, edge_attr: Tensor) -> Tensor:
        return edge_attr


class Simulator(nn.Module):
    """Interaction networks on a mesh, with an encoder and a decoder between a grid and the mesh."""

    def __init__(self, steps: int, *, grid: bool) -> None:
        super().__init__()
        self.nodes, self.edges, self.out = mlp(3), mlp(4), mlp(WIDTH, 3, norm=False)
        self.steps = nn.ModuleList(Interaction() for _ in range(steps))
        self.between = nn.ModuleList(Interaction() for _ in range(2 * grid))

    def forward(self, mesh: Tensor, grid: Tensor, *edges: Tensor) -> Tensor:
        x, points = self.nodes(mesh), self.nodes(grid)
        inside, *between = edges
        if self.between:
            x, _ = self.between[0]((points, x), between[0], self.features(grid, mesh, between[0]))
        edge_attr = self.features(mesh, mesh, inside)
        for step in self.steps:
            x, edge_attr = step((x, x), inside, edge_attr)
        if self.between:
            attr = self.features(mesh, grid, between[1])
            x, _ = self.between[1]((x, points), between[1], attr)
        return self.out(x)

    def features(self, source: Tensor, target: Tensor, edge_index: Tensor) -> Tensor:
        """Encode the vector along every edge, and its length."""
        along = source[edge_index[0]] - target[edge_index[1]]
        return self.edges(torch.cat([along, along.norm(dim=-1, keepdim=True)], dim=-1))


def nearest(source: Tensor, target: Tensor, k: int) -> Tensor:
    """Edges [2, E] to every target from its k nearest sources."""
    near = torch.cdist(target, source).topk(k, largest=False).indices
    ends = torch.arange(target.size(0), device=target.device).repeat_interleave(k)
    return torch.stack([near.flatten(), ends])


def inputs_of(model: str, number: int, device: str, share: float = 1.0) -> tuple[Tensor, ...]:
    """Points of a mesh and a grid on a sphere, and edges on the mesh, from and to the grid."""
    torch.manual_seed(number)
    mesh, grid = (nn.functional.normalize(torch.randn(max(int(n * share), 8), 3, device=device))
                  for n in SIZES[model])  # fmt: skip
    inside = nearest(mesh, mesh, NEIGHBORS)
    return mesh, grid, inside, nearest(grid, mesh, OF_GRID), nearest(mesh, grid, OF_GRID)


def measure(model: str, device: str, *, new: bool, share: float) -> dict[str, float]:
    """Median milliseconds of a step of PyG and of `patch()`, in turns."""
    meshes = [inputs_of(model, number, device, share) for number in range(LAPS if new else 1)]
    targets = [torch.randn_like(points[bool(SIZES[model][1])]) for points in meshes]
    losses: dict[str, list[Tensor]] = {"stock": [], "patched": []}

    def of(variant: str) -> Callable[[], None]:
        torch.manual_seed(0)
        simulator = Simulator(STEPS[model], grid=SIZES[model][1] > 0).to(device)
        optimizer = torch.optim.Adam(simulator.parameters(), 1e-4)
        # Copies, as a graph that one variant has used is not new to the other.
        copies = [[part.clone() for part in mesh] for mesh in meshes]
        inputs = itertools.cycle(zip(copies, targets, strict=True))

        def step() -> None:
            with stock_pyg() if variant == "stock" else nullcontext():
                optimizer.zero_grad()
                mesh, target = next(inputs)
                loss = (simulator(*mesh) - target).square().mean()
                loss.backward()
                optimizer.step()
            losses[variant].append(loss.detach())

        return step

    with patched(on=True):
        took = timing.in_turns({variant: of(variant) for variant in losses}, device,
                               LAPS - WARM_UP, WARM_UP)  # fmt: skip
    stock, ours = (torch.stack(losses[variant]) for variant in losses)
    error = must_agree([ours], [stock], ALLOWED, f"losses of {model}")
    columns = {f"{variant}_ms": timed.median for variant, timed in took.items()}
    return columns | {"ratio": columns["stock_ms"] / columns["patched_ms"], "error": error}


def main(arguments: Sequence[str] | None = None) -> None:
    options = results.parser(__doc__, devices=("cpu", "cuda")).parse_args(arguments)
    rows = results.Rows(f"{NAME}_{options.device}", options, options.device)
    share = 0.05 if options.quick else 1.0
    for model, new in itertools.product(SIZES, (False, True)):
        rows.add([measure(model, options.device, new=new, share=share)], show=True, model=model,
                 meshes="new" if new else "one")  # fmt: skip
    rows.done()


if __name__ == "__main__":
    main()
