"""Launch parameters of Triton's kernels, measured on a GPU one after the other."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from pyg_accel.backends import get_backend
from pyg_accel.backends.triton import launch, plan
from pyg_accel.formula import parse
from pyg_accel.graph import Graph
from pyg_accel.rewrite.cost.timing import timed

__all__ = ["CANDIDATES", "Case", "best_parameters", "measure_launch"]

CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "tiny": {
        "passes": (4, 1, 2, 8), "unroll": (2, 1, 4), "lanes": (1, 2), "columns": (128, 32, 64, 256),
    },
    "short": {
        "passes": (2, 1, 4), "unroll": (4, 2, 8), "lanes": (1, 2, 4), "resident": (70, 45, 100),
        "columns": (128, 32, 64), "split": (128, 64, 256),
    },
    "long": {
        "unroll": (8, 4, 16), "resident": (70, 45, 110), "columns": (64, 128, 32, 256),
        "split": (1024, 4096),
    },
}  # fmt: skip
DTYPES = {4: torch.float32, 2: torch.bfloat16}
# Nodes and mean degree of a graph of each class of row lengths.
GRAPHS = {"tiny": (1_000_000, 3), "short": (200_000, 16), "long": (60_000, 150)}
WIDTH = 128  # features
_WEIGHTED = parse("mul(e0,u1)")


class Case(NamedTuple):
    """A graph and a weight per edge, [E]."""

    graph: Graph
    weight: Tensor


def measure_launch() -> dict[str, dict[str, int]]:
    """Return the best launch parameters of the current GPU, for each class of graphs."""
    found: dict[str, dict[str, int]] = {}
    device = torch.cuda.get_device_name()
    kinds = [(name, size) for name in GRAPHS for size in DTYPES]
    for name, size in tqdm(kinds, desc="launch parameters", disable=None):
        case = _random_case(*GRAPHS[name])
        found[f"{name}-{size}"] = best_parameters(
            name, size, [case], CANDIDATES[name], (WIDTH,), device
        )
    return found


def _random_case(nodes: int, degree: int) -> Case:
    torch.manual_seed(0)
    edge_index = torch.randint(nodes, (2, nodes * degree), device="cuda")
    graph = Graph.from_edge_index(edge_index, (nodes, nodes))
    return Case(graph, torch.rand(edge_index.size(1), device="cuda"))


def best_parameters(
    name: str,
    itemsize: int,
    cases: Sequence[Case],
    candidates: Mapping[str, Sequence[int]],
    widths: Sequence[int],
    device: str,
) -> dict[str, int]:
    """Return the parameters of a class of graphs, found one after the other.

    The geometric mean of a weighted sum over the graphs and the widths decides.

    Args:
        name: of the class of row lengths.
        itemsize: bytes of an element, 4 or 2.
        cases: graphs of the class.
        candidates: values to try of each parameter.
        widths: numbers of features.
        device: name of the GPU.
    """
    kind = f"{name}-{itemsize}"
    best = dict(launch.table(device)[kind])
    record: float | None = None
    for parameter, values in candidates.items():
        times = {}
        for value in values:
            if best.get(parameter, 1) == value and record is not None:
                times[value] = record
                continue
            with _parameters(device, kind, {**best, parameter: value}):
                times[value] = _score(cases, DTYPES[itemsize], widths)
        best[parameter] = min(times, key=times.__getitem__)
        record = times[best[parameter]]
    return best


@contextmanager
def _parameters(device: str, kind: str, changed: Mapping[str, int]) -> Iterator[None]:
    """Launch with other parameters inside the block."""
    entry = launch.table(device)[kind]
    before = dict(entry)
    entry.update(changed)
    _forget()
    try:
        yield
    finally:
        entry.clear()
        entry.update(before)
        _forget()


def _forget() -> None:
    launch.choose_tile.cache_clear()
    plan.make_plan.cache_clear()


def _score(cases: Sequence[Case], dtype: torch.dtype, widths: Sequence[int]) -> float:
    """Geometric mean of the seconds of a weighted sum."""
    gspmm, logs = get_backend("triton").kernels["gspmm"].run, []
    for graph, weight in cases:
        csr = graph.csr()
        for width in widths:
            x = torch.randn(graph.num_cols, 1, width, device=weight.device, dtype=dtype)
            operands = [weight.to(dtype).view(-1, 1, 1), x]
            # The backend itself: operators keep the kernels of earlier parameters.
            call = partial(gspmm, csr, _WEIGHTED, operands, ["sum"], want_arg=False)
            logs.append(math.log(timed(call, weight.device).median))
    return math.exp(sum(logs) / len(logs))
