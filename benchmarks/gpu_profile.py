"""Where the time of a training epoch goes on a GPU: kernels by name, and gaps between them.

    python -m benchmarks.gpu_profile [--graphs NAME ...] [--models NAME ...] [--stock] [--top N]

The models and graphs are those of :mod:`benchmarks.gpu_epochs`. Kernel times come from torch's
profiler, the time of the epoch from CUDA events without it.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import pyg_accel
from benchmarks import gpu_epochs, gpu_machine, graphs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--graphs", nargs="+", default=["arxiv-like"])
    parser.add_argument("--models", nargs="+", default=list(gpu_epochs.ATTENTION))
    parser.add_argument("--stock", action="store_true", help="PyG without patch()")
    parser.add_argument("--top", type=int, default=25, help="kernels to show")
    options = parser.parse_args(arguments)
    for graph in options.graphs:
        rowptr, col = graphs.load(graph, device="cuda")
        edge_index = graphs.edge_list((rowptr, col), shuffled=True)
        for model in options.models:
            with nullcontext() if options.stock else pyg_accel.patched():
                show(graph, model, edge_index, rowptr.numel() - 1, options.top)


def show(graph: str, name: str, edge_index: torch.Tensor, nodes: int, top: int) -> None:
    """Print the kernels of one epoch, the longest first."""
    x = torch.randn(nodes, gpu_epochs.FEATURES[graph.partition("@")[0]], device="cuda")
    y = torch.randint(gpu_epochs.CLASSES, (nodes,), device="cuda")
    model = gpu_epochs.build(name, x.size(1))
    optimizer = torch.optim.Adam(model.parameters())

    def epoch() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x, edge_index), y).backward()
        optimizer.step()

    took = gpu_machine.timed(epoch, budget=0.3).median
    epoch()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        epoch()
        torch.cuda.synchronize()
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:100], ""].append(event.time_range.elapsed_us() / 1e3)
    total = sum(map(sum, times.values()))
    print(f"\n{graph} {name}: epoch {took:.2f} ms, kernels {total:.2f} ms")
    for (kernel, _), each in sorted(times.items(), key=lambda item: -sum(item[1]))[:top]:
        every = " ".join(f"{t:.2f}" for t in each[:8])
        print(f"  {sum(each):8.3f} ms {len(each):4d} x  {kernel}   [{every}]")


if __name__ == "__main__":
    main()
