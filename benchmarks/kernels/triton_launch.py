"""Measures launch parameters on this GPU and writes them to pyg_accel/backends/triton/launch.json.

    python -m benchmarks.kernels.triton_launch [--write] [--quick]

For each class of row lengths and each size of an element one parameter after the other is chosen by
the geometric mean of the times of a weighted sum, on graphs of the performance figures.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.gpu import Inputs
from pyg_accel.backends import get_backend
from pyg_accel.backends.triton import launch, plan
from pyg_accel.formula import parse
from pyg_accel.rewrite.cost.timing import timed

GRAPHS = {
    "tiny": ("molecules-like/ordered",),
    "short": ("arxiv-like", "amazon0505-like", "amazon0505-like/ordered"),
    "long": ("reddit-like", "proteins-like", "products-like", "products-like/ordered"),
}
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
WIDTHS = (64, 256)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--quick", action="store_true", help="one graph a class")
    parser.add_argument("--classes", default="tiny,short,long")
    parser.add_argument("--sizes", default="4,2", help="bytes of an element")
    options = parser.parse_args(arguments)
    device = torch.cuda.get_device_name()
    found: dict[str, dict[str, int]] = {}
    for name in options.classes.split(","):
        cases = [Inputs(g) for g in GRAPHS[name][: 1 if options.quick else None]]
        for size in map(int, options.sizes.split(",")):
            kind = f"{name}-{size}"
            found[kind] = best_parameters(name, size, cases, device)
            print(device, kind, json.dumps(found[kind]), flush=True)
    if options.write:
        content = json.loads(launch.TABLE.read_text())
        content["devices"].setdefault(device, {}).update(found)
        launch.TABLE.write_text(dump(content))


def best_parameters(
    name: str, itemsize: int, cases: Sequence[Inputs], device: str
) -> dict[str, int]:
    """The parameters of a class of graphs, found one after the other."""
    kind = f"{name}-{itemsize}"
    best = dict(launch.table(device)[kind])
    record: float | None = None
    for parameter, values in CANDIDATES[name].items():
        times = {}
        for value in values:
            if best.get(parameter, 1) == value and record is not None:
                times[value] = record
                continue
            with parameters(device, kind, {**best, parameter: value}):
                times[value] = score(cases, DTYPES[itemsize])
        best[parameter] = min(times, key=times.__getitem__)
        record = times[best[parameter]]
    return best


@contextmanager
def parameters(device: str, kind: str, changed: Mapping[str, int]) -> Iterator[None]:
    """Launch with other parameters inside the block."""
    entry = launch.table(device)[kind]
    before = dict(entry)
    entry.update(changed)
    forget()
    try:
        yield
    finally:
        entry.clear()
        entry.update(before)
        forget()


def forget() -> None:
    launch.choose_tile.cache_clear()
    plan.make_plan.cache_clear()


def score(cases: Sequence[Inputs], dtype: torch.dtype) -> float:
    """Geometric mean of the seconds of a weighted sum."""
    gspmm, logs = get_backend("triton").kernels["gspmm"].run, []
    for case in cases:
        csr, weight = case.graph.csr(), case.weight
        for width in WIDTHS:
            x = torch.randn(case.graph.num_cols, 1, width, device=weight.device, dtype=dtype)
            operands = [weight.to(dtype).view(-1, 1, 1), x]
            # The backend itself: operators keep the kernels of earlier parameters.
            call = partial(gspmm, csr, parse("mul(e0,u1)"), operands, ["sum"], want_arg=False)
            logs.append(math.log(timed(call, weight.device).median))
    return math.exp(sum(logs) / len(logs))


def dump(content: dict[str, Any]) -> str:
    """The table with one line a class."""
    devices = [
        f"    {json.dumps(device)}: {{\n"
        + ",\n".join(f"      {json.dumps(k)}: {json.dumps(v)}" for k, v in entry.items())
        + "\n    }"
        for device, entry in content["devices"].items()
    ]
    body = ",\n".join(devices)
    return f'{{\n  "note": {json.dumps(content["note"])},\n  "devices": {{\n{body}\n  }}\n}}\n'


if __name__ == "__main__":
    main()
