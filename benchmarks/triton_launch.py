"""Measures launch parameters on this GPU and writes them to pyg_accel/backends/triton/launch.json.

    python -m benchmarks.triton_launch [--write] [--quick]

One parameter after the other, for each class of row lengths and element size, on a weighted sum:
the geometric mean over the graphs of the class and the widths decides.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import gpu_machine
from benchmarks.gpu_kernels import Inputs
from pyg_accel import ops
from pyg_accel.backends.triton import launch, plan

GRAPHS = {
    "tiny": ("molecules-like/ordered",),
    "short": ("arxiv-like", "amazon0505-like", "amazon0505-like/ordered"),
    "long": ("reddit-like", "proteins-like", "products-like", "products-like/ordered"),
}
CANDIDATES = {
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
WIDTHS = (64, 256)


@contextmanager
def parameters(kind: str, changed: dict[str, int]) -> Iterator[None]:
    """Launch with other parameters inside the block."""
    entry = launch.table(torch.cuda.get_device_name())[kind]
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
        inputs = [Inputs(g) for g in GRAPHS[name][: 1 if options.quick else None]]
        for size in map(int, options.sizes.split(",")):
            kind = f"{name}-{size}"
            found[kind] = tune(kind, inputs, CANDIDATES[name])
            print(device, kind, json.dumps(found[kind]), flush=True)
    if options.write:
        content = json.loads(launch.TABLE.read_text())
        content["devices"].setdefault(device, {}).update(found)
        launch.TABLE.write_text(dump(content))


def tune(kind: str, inputs: list[Inputs], candidates: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The best parameters of a class, found one after the other."""
    entry = launch.table(torch.cuda.get_device_name())[kind]
    best = dict(entry)
    dtype = {4: torch.float32, 2: torch.bfloat16}[int(kind[-1])]
    record: float | None = None
    for name, values in candidates.items():
        times = {}
        for value in values:
            same = best.get(name, 1) == value
            if same and record is not None:
                times[value] = record
                continue
            with parameters(kind, {**best, name: value}):
                times[value] = score(inputs, dtype)
        best[name] = min(times, key=times.__getitem__)
        record = times[best[name]]
        print(
            f"  {kind} {name}: " + ", ".join(f"{v} {t:.4f}" for v, t in times.items()), flush=True
        )
    return best


def score(inputs: list[Inputs], dtype: torch.dtype) -> float:
    """Geometric mean of milliseconds."""
    logs, parts = [], []
    for each in inputs:
        weight = each.weight.to(dtype)
        for width in WIDTHS:
            x = torch.randn(each.nodes, width, device="cuda", dtype=dtype)

            def call(each: Inputs = each, x: Any = x, weight: Any = weight) -> Any:
                return ops.spmm(each.graph, x, weight)

            time = gpu_machine.timed(call, budget=0.04).median
            parts.append(time)
            logs.append(math.log(time))
    print("     ", " ".join(f"{p:8.4f}" for p in parts), flush=True)
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
