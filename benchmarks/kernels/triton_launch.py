"""Measures launch parameters on this GPU and writes them to pyg_accel/backends/triton/launch.json.

    python -m benchmarks.kernels.triton_launch [--write] [--quick]

As `python -m pyg_accel tune`, on the graphs of the performance figures and for two widths.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.kernels.gpu import Inputs
from pyg_accel.backends.triton import launch
from pyg_accel.tuning.launching import CANDIDATES, Case, best_parameters

GRAPHS = {
    "tiny": ("molecules-like/ordered",),
    "short": ("arxiv-like", "amazon0505-like", "amazon0505-like/ordered"),
    "long": ("reddit-like", "proteins-like", "products-like", "products-like/ordered"),
}
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
        inputs = [Inputs(g) for g in GRAPHS[name][: 1 if options.quick else None]]
        cases = [Case(each.graph, each.weight) for each in inputs]
        for size in map(int, options.sizes.split(",")):
            kind = f"{name}-{size}"
            found[kind] = best_parameters(name, size, cases, CANDIDATES[name], WIDTHS, device)
            print(device, kind, json.dumps(found[kind]), flush=True)
    if options.write:
        content = json.loads(launch.TABLE.read_text())
        content["devices"].setdefault(device, {}).update(found)
        launch.TABLE.write_text(dump(content))


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
