"""What one warm call costs the host: Python frames and C calls, which may only become fewer."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor
from torch_geometric import nn

import pyg_accel
from pyg_accel import Graph, ops

N, E, F = 200, 800, 16
SCALE = 2.0
WARM_CALLS = 10

# Frames and C calls of one call, those of torch and PyG included: ceilings, to be lowered with
# every change that needs fewer. Measured with the versions below and torch-sparse, which
# take part in the numbers.
VERSIONS = ((3, 11), "2.13", "2.8")
CEILINGS = {
    "GCNConv": (21, 70),
    "SAGEConv": (19, 66),
    "GINConv": (19, 67),
    "GATConv": (20, 78),
    "GATv2Conv": (20, 74),
    "TransformerConv": (19, 74),
    "own layer": (25, 69),
    "optimized SAGEConv": (26, 67),
    "spmm": (5, 15),
    "spmm and its gradient": (32, 55),
}


class Own(nn.MessagePassing):
    """A user's layer; its message reads a constant of the module."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = torch.nn.Linear(F, F)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.relu(x_i - x_j) * SCALE


class Model(torch.nn.Module):
    """A model of one layer."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "GCNConv": lambda: nn.GCNConv(F, F),
    "SAGEConv": lambda: nn.SAGEConv(F, F),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, F)),
    "GATConv": lambda: nn.GATConv(F, F // 4, heads=4),
    "GATv2Conv": lambda: nn.GATv2Conv(F, F // 4, heads=4),
    "TransformerConv": lambda: nn.TransformerConv(F, F // 4, heads=4),
    "own layer": Own,
}


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls that are counted, by name."""
    x, edge_index = torch.randn(N, F), torch.randint(N, (2, E))
    for name, make in LAYERS.items():
        layer = make().eval()
        pyg_accel.patch(layer)
        yield name, lambda layer=layer: layer(x, edge_index)
    fast = pyg_accel.optimize(Model(nn.SAGEConv(F, F)).eval(), x, edge_index)
    yield "optimized SAGEConv", lambda: fast(x, edge_index)
    graph = Graph.from_edge_index(edge_index, size=(N, N))
    yield "spmm", lambda: ops.spmm(graph, x)
    leaf, seed = x.clone().requires_grad_(), torch.ones(N, F)

    def both() -> None:
        with torch.enable_grad():
            torch.autograd.grad(ops.spmm(graph, leaf), leaf, seed)

    yield "spmm and its gradient", both


def count(call: Callable[[], Any]) -> tuple[int, int]:
    """Count the frames and C calls of a warm call; of three, as some flush what others collect."""
    for _ in range(WARM_CALLS):
        call()
    frames, c_calls = [], []
    gc.collect()
    gc.disable()  # finalizers run whenever it pleases the collector
    try:
        for _ in range(3):
            seen = {"call": 0, "c_call": 0}

            def profile(frame: Any, event: str, arg: Any, seen: dict[str, int] = seen) -> None:
                if event in seen:
                    seen[event] += 1

            sys.setprofile(profile)
            try:
                call()
            finally:
                sys.setprofile(None)
            frames.append(seen["call"])
            c_calls.append(seen["c_call"])
    finally:
        gc.enable()
    return min(frames), min(c_calls)


def table(actual: dict[str, tuple[int, ...]]) -> str:
    """The counts as lines of :data:`CEILINGS`."""
    return "\n".join(f'    "{name}": {counts},' for name, counts in actual.items())


def test_a_warm_call_needs_no_more_frames_and_c_calls_than_before():
    versions = (sys.version_info[:2], torch.__version__, torch_geometric.__version__)
    if not (versions[0] == VERSIONS[0] and all(map(str.startswith, versions[1:], VERSIONS[1:]))):
        pytest.skip(f"the ceilings are those of {VERSIONS}, not of {versions}")
    # In a process of its own: what other tests left in caches would take part in the counts.
    env = os.environ | {"PYG_ACCEL_ALWAYS": "1", "PYTHONHASHSEED": "0"}
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    actual = {name: tuple(counts) for name, counts in json.loads(run.stdout).items()}
    assert actual.keys() == CEILINGS.keys(), table(actual)
    grown = {
        name: f"{counts}, more than {CEILINGS[name]}"
        for name, counts in actual.items()
        if any(a > b for a, b in zip(counts, CEILINGS[name], strict=True))
    }
    assert not grown, f"{grown}; all counts:\n{table(actual)}"


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        print(json.dumps({name: count(call) for name, call in calls()}))
