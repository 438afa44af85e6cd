"""Every window height of the Tensor-Core kernels on graphs that share: what `choice.py` is made of.

    python -m benchmarks.tc_sweep [GRAPH ...] [--out FOLDER]

Milliseconds a call, launching included, of weighted sums and of dots, and of the CUDA-core kernels
beside them. Columns with fewer than `least` entries in a window are left to CUDA cores: `entries`
is the part of all entries that are not, `columns` their columns an entry of the graph. `error` is
the largest difference to the CUDA-core result, relative to the largest element;
`tests/backends/test_cuda_gpu.py` holds the kernels against float64.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks import gpu_machine
from benchmarks.gpu_kernels import Inputs
from pyg_accel import ops, use_backend
from pyg_accel.backends.cuda import sddmm, spmm
from pyg_accel.sharing import sharing_of

GRAPHS = ("mycielskian17", "reddit-like/ordered", "products-like/ordered", "proteins-like/ordered")
BUDGET = 0.03
MODES = (("tf32", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("graphs", nargs="*", default=GRAPHS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
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
                for shared in sharing_of(csr):
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
                        "graph": name, "F": width, "mode": mode, "op": op, **shared._asdict(),
                        "warps": 4 if op == "sddmm" else warps,
                        "ms": gpu_machine.timed(call, budget=BUDGET).median,
                        "cuda_core_ms": simple_ms, "error": float(off),
                    }  # fmt: skip


if __name__ == "__main__":
    main()
