"""Every window height of the Tensor-Core kernels on graphs that share: what `choice.py` is made of.

    python -m benchmarks.tc_sweep [GRAPH ...] [--out FOLDER]
    python -m benchmarks.tc_sweep --fit [--out FOLDER]    # writes choice.json from tc_sweep.csv

Milliseconds a call, launching included, of weighted sums and of dots, and of the CUDA-core kernels
beside them. Columns with fewer than `least` entries in a window are left to CUDA cores: `entries`
is the part of all entries that are not, `columns` their columns an entry of the graph. `error` is
the largest difference to the CUDA-core result, relative to the largest element;
`tests/backends/test_cuda_gpu.py` holds the kernels against float64.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks import gpu_machine, results
from benchmarks.gpu_kernels import Inputs
from pyg_accel import ops, use_backend
from pyg_accel.backends.cuda import sddmm, spmm
from pyg_accel.backends.cuda.choice import FILE, mode_of, terms
from pyg_accel.column_reuse import Shared, reuse_of

GRAPHS = ("mycielskian17", "reddit-like/ordered", "products-like/ordered", "proteins-like/ordered")
BUDGET = 0.03
MODES = (("tf32", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("graphs", nargs="*", default=GRAPHS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--fit", action="store_true", help="do not measure")
    options = parser.parse_args()
    if options.fit:
        fit(results.read(options.out / "tc_sweep.csv"))
        return
    facts, rows = gpu_machine.facts(), []
    for name in options.graphs:
        for row in measure(name):
            rows.append({**row, **facts})
            print(*row.values(), flush=True)
        frame = pd.DataFrame(rows)
        frame.to_csv(options.out / "tc_sweep.csv", index=False, float_format="%.5g")


def measure(name: str) -> Iterator[dict[str, Any]]:
    inputs = Inputs(name)
    graph, csr = inputs.graph, inputs.graph.csr()
    for width in (64, 256):
        for mode, dtype in MODES:
            x, y = inputs.features(width, dtype), inputs.features(width, dtype, 1)
            weight = inputs.weight.to(dtype)
            warps = max(2, min(4, width * dtype.itemsize // 128))
            for op in ("spmm", "sddmm"):
                simple: Callable[[], Tensor] = partial(ops.sddmm, graph, y, x)
                if op == "spmm":
                    simple = partial(ops.spmm, graph, x, weight)
                with use_backend("triton"):
                    right = simple()
                    simple_ms = gpu_machine.timed(simple, budget=BUDGET).median
                for shared in reuse_of(csr):
                    common = {
                        "window": shared.window,
                        "least": shared.least,
                        "exact": mode == "fp32",
                    }
                    call: Callable[[], Tensor] = partial(
                        sddmm.run, csr, y, x, slice=width, **common
                    )
                    if op == "spmm":
                        call = partial(spmm.run, csr, x, weight, warps=warps, mean=False, **common)
                    off = (call().double() - right.double()).abs().max() / right.abs().max()
                    yield {
                        "graph": name, "N": inputs.nodes, "E": inputs.entries, "F": width,
                        "mode": mode, "op": op, **shared._asdict(),
                        "warps": 4 if op == "sddmm" else warps,
                        "ms": gpu_machine.timed(call, budget=BUDGET).median,
                        "cuda_core_ms": simple_ms, "error": float(off),
                    }  # fmt: skip


def fit(frame: pd.DataFrame) -> None:
    """Find the prices of columns and entries that tell the measured ratios best."""
    prices: dict[str, Any] = {}
    for (op, mode, window), rows in frame.groupby(["op", "mode", "window"], sort=False):
        dot, dtype = op == "sddmm", dict(MODES)[mode]
        parts, right = [], []
        for row in rows.itertuples():
            shared = Shared(row.window, row.least, row.entries, row.columns)
            bytes_of_row = row.F * dtype.itemsize
            *priced, rest = terms(shared, bytes_of_row, row.N, row.E / row.N, dot=dot)
            ratio = row.ms / row.cuda_core_ms
            parts.append([part / ratio**1.5 for part in priced])  # ratios near 1 decide
            right.append((ratio - rest) / ratio**1.5)
        found = torch.linalg.lstsq(torch.tensor(parts), torch.tensor(right).unsqueeze(1)).solution
        named = prices.setdefault("dot" if dot else "sum", {})
        of_mode = named.setdefault(mode_of(dtype, rounded=mode == "tf32"), {})
        of_mode[str(window)] = [round(max(float(price), 0.0), 3) for price in found.flatten()]
    text = json.dumps(prices, indent=2)
    FILE.write_text(re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text) + "\n")
    print(f"written: {FILE}")


if __name__ == "__main__":
    main()
