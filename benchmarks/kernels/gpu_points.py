"""Time of what stands in for pyg-lib on a GPU, and of training steps that search in each step.

    python -m benchmarks.kernels.gpu_points [--quick]

`by hand` is what a script does without pyg-lib: `torch.cdist` and `topk` on examples of one size.
Edges are compared first, as sets. A step of DGCNN is forward, backward and Adam on clouds of points
whose neighbours are searched in both layers, one of SchNet on molecules, where all distances are
masked by molecule by hand: stock by hand, `search` with ours alone, patched with the layers too.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MLP, EdgeConv, SchNet, global_max_pool

import pyg_accel
from benchmarks.kernels.points import same
from benchmarks.tools import results, timing
from pyg_accel.pyg_lib import ops

NAME = "kernels/gpu_points"
CLOUDS, POINTS, K = 32, 1024, 20
MOLECULES, ATOMS, CUTOFF = 128, 18, 10.0
Search = Callable[[Tensor, int], Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    options = results.parser(__doc__, rounds=9).parse_args(arguments)
    rows = results.Rows(NAME, options, "cuda")
    for case, calls in cases(1000 if options.quick else 1_000_000):
        took = timing.in_turns(calls, "cuda", options.rounds, warm_up=5)
        row = {name: quantiles.median for name, quantiles in took.items()}
        ratio = row["by_hand_ms"] / row["ms"] if "by_hand_ms" in row else None
        rows.add([row | {"ratio": ratio}], show=True, case=case)
    rows.done()


def by_hand(x: Tensor, clouds: int) -> Tensor:
    """Return the K nearest points of every point [2, E]: of neighbours to points."""
    each = x.view(clouds, -1, x.size(1))
    first = torch.arange(clouds, device=x.device).view(-1, 1, 1) * each.size(1)
    near = torch.cdist(each, each).topk(K, largest=False).indices + first
    nodes = torch.arange(x.size(0), device=x.device).repeat_interleave(K)
    return torch.stack([near.view(-1), nodes])


def searched(x: Tensor, clouds: int) -> Tensor:
    """Return the same by our kernel."""
    ptr = torch.arange(clouds + 1, device=x.device) * (x.size(0) // clouds)
    return ops.knn(x, x, K, ptr, ptr).flip(0)


class DGCNN(nn.Module):
    """PyG's example `dgcnn_classification.py`, with its search as an argument."""

    def __init__(self, search: Search) -> None:
        super().__init__()
        self.search = search
        self.conv1, self.conv2 = EdgeConv(MLP([6, 64, 64, 64])), EdgeConv(MLP([128, 128]))
        self.linear, self.mlp = MLP([192, 1024]), MLP([1024, 512, 256, 10], dropout=0.5)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        first = self.conv1(x, self.search(x, CLOUDS))
        second = self.conv2(first, self.search(first.detach(), CLOUDS))
        out = global_max_pool(self.linear(torch.cat([first, second], 1)), batch, CLOUDS)
        return F.log_softmax(self.mlp(out), 1)


def step_of(model: DGCNN, x: Tensor) -> Callable[[], None]:
    """Return a step of training."""
    batch = torch.arange(CLOUDS, device=x.device).repeat_interleave(POINTS)
    y = torch.arange(CLOUDS, device=x.device) % 10
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.nll_loss(model(x, batch), y).backward()
        optimizer.step()

    return step


def near(search: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return what SchNet asks for: edges within the cutoff, and their lengths."""

    def graph(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        row, col = search(pos, batch)
        return torch.stack([row, col]), (pos[row] - pos[col]).norm(dim=-1)

    return graph


def within_by_hand(pos: Tensor, batch: Tensor) -> Tensor:
    """Return the pairs of atoms of a molecule that are nearer than the cutoff."""
    close = (torch.cdist(pos, pos) < CUTOFF) & (batch == batch.unsqueeze(1))
    return close.fill_diagonal_(False).nonzero().t()


def within(pos: Tensor, batch: Tensor) -> Tensor:
    """Return the same by our kernel."""
    ptr = torch.arange(MOLECULES + 1, device=pos.device) * ATOMS
    return ops.radius(pos, pos, CUTOFF, ptr, ptr, ATOMS, ignore_same_index=True).flip(0)


def step_of_schnet(model: SchNet) -> Callable[[], None]:
    """Return a step of training."""
    generator = torch.Generator("cuda").manual_seed(0)
    pos = 3 * torch.randn(MOLECULES * ATOMS, 3, device="cuda", generator=generator)
    batch = torch.arange(MOLECULES, device="cuda").repeat_interleave(ATOMS)
    z, y = 1 + torch.arange(pos.size(0), device="cuda") % 9, torch.ones(MOLECULES, 1, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.l1_loss(model(z, pos, batch), y).backward()
        optimizer.step()

    return step


def cases(most: int) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Yield what is timed."""
    torch.manual_seed(0)
    clouds = CLOUDS * POINTS
    for dims in (3, 64):
        x = torch.randn(clouds, dims, device="cuda")
        same(searched(x, CLOUDS), by_hand(x, CLOUDS))
        yield f"knn_graph {CLOUDS} x {POINTS} x {dims}, k = {K}", {
            "ms": lambda x=x: searched(x, CLOUDS), "by_hand_ms": lambda x=x: by_hand(x, CLOUDS),
        }  # fmt: skip
    x = torch.rand(most, 3, device="cuda")
    yield f"knn_graph {most} x 3, k = 16", {"ms": lambda: ops.knn(x, x, 17)}
    atoms = x[: most // 10].contiguous()
    reach = (50 / atoms.size(0) / 4.19) ** (1 / 3)  # with 50 points within on average
    yield f"radius_graph {most // 10} x 3, 50 neighbours", {
        "ms": lambda: ops.radius(atoms, atoms, reach, max_num_neighbors=100),
    }  # fmt: skip
    large, ptr = torch.randn(CLOUDS * 4096, 3, device="cuda"), torch.arange(CLOUDS + 1) * 4096
    ptr = ptr.cuda()
    yield f"fps {CLOUDS} x 4096 x 3, a quarter", {"ms": lambda: ops.fps(large, ptr, 0.25)}
    x = torch.randn(clouds, 3, device="cuda")
    stock = DGCNN(by_hand).cuda()
    search, fast = copy.deepcopy(stock), copy.deepcopy(stock)
    search.search = fast.search = searched
    pyg_accel.patch(fast)
    yield f"step of DGCNN, {CLOUDS} x {POINTS}, k = {K}", {
        "by_hand_ms": step_of(stock, x), "search_ms": step_of(search, x), "ms": step_of(fast, x),
    }  # fmt: skip
    schnet = [SchNet(interaction_graph=near(f)).cuda() for f in (within_by_hand, within, within)]
    for model in schnet[1:]:
        model.load_state_dict(schnet[0].state_dict())
    pyg_accel.patch(schnet[2])
    steps = [step_of_schnet(model) for model in schnet]
    yield (
        f"step of SchNet, {MOLECULES} molecules of {ATOMS} atoms",
        dict(zip(("by_hand_ms", "search_ms", "ms"), steps, strict=True)),
    )


if __name__ == "__main__":
    main()
