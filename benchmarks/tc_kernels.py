"""Tensor-Core SpMM and SDDMM against cuSPARSE and the CUDA-core kernels, in milliseconds a call.

    python -m benchmarks.tc_kernels [--only reddit] [--out FOLDER]

Precisions are matched: `fp32` (products exact to 2^-21), `tf32` (torch may round float32 factors;
the others stay in fp32, which they do not leave) and `bf16`. Every result is first held against
float64 on the longest rows and a sample of the others; a wrong one of ours ends the run. `chosen`
says which backend dispatch takes, `ratio` what it expected of ours over CUDA cores, `least` which
columns of a window go to Tensor Cores (`entries` is their part of all entries, `columns` how many
there are an entry), `sgt_ms` what the translation costs once a graph.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks import gpu_machine
from benchmarks.gpu_kernels import Inputs
from pyg_accel import ops, use_backend
from pyg_accel.backends import OpSpec, choose, get_backend
from pyg_accel.backends.cuda.choice import choose_launch
from pyg_accel.column_reuse import reuse_of
from pyg_accel.tiles import build_tiles

GRAPHS = (
    "mycielskian17", "reddit-like/ordered", "proteins-like/ordered", "products-like/ordered",
    "reddit-like", "proteins-like", "arxiv-like",
)  # fmt: skip
MODES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
# Of the sum of |terms|: fp32 as the contract suite; rounded factors, and the rounded result.
ALLOWED = {"fp32": 2e-5, "tf32": 2e-3, "bf16": 1e-2}
BUDGET = 0.04


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="graphs whose name starts like this")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args(arguments)
    facts = gpu_machine.facts()
    rows: list[dict[str, Any]] = []
    for name in GRAPHS:
        if name.startswith(options.only):
            for row in measure(name):
                rows.append({**row, **facts})
                print(*(f"{row[key]:.4g}" if isinstance(row[key], float) else row[key]
                        for key in row), flush=True)  # fmt: skip
            pd.DataFrame(rows).to_csv(options.out / "tc_kernels.csv", index=False,
                                      float_format="%.5g")  # fmt: skip
            torch.cuda.empty_cache()


def measure(name: str) -> Iterator[dict[str, Any]]:
    inputs = Inputs(name)
    csr = inputs.graph.csr()
    sharing = reuse_of(csr)
    ordered = "/" in name or name.startswith("myc")
    for op in ("spmm", "sddmm"):
        widths = ((64, 128, 256) if op == "spmm" else (64, 256)) if ordered else (64,)
        for width in widths:
            for mode, dtype in MODES.items():
                torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
                calls, error = make(inputs, op, width, dtype)
                launch = choose_launch(
                    dtype, width, csr.num_cols, sharing, mean=inputs.entries / inputs.nodes,
                    rounded=mode == "tf32", dot=op == "sddmm",
                )  # fmt: skip
                shared = next(s for s in sharing if s[:2] == (launch.window, launch.least))
                text, reduces = ("mul(u0,e1)", ("sum",))
                shapes = ((1, width), (1, 1))
                if op == "sddmm":
                    text, reduces, shapes = "sum(mul(u1,v0))", ("none",), ((1, width),) * 2
                spec = OpSpec("gspmm", "cuda", dtype, csr.num_rows, csr.num_cols,
                              csr.col.numel(), 1, width, text, reduces, shapes=shapes,
                              sharing=sharing, rounded=mode == "tf32")  # fmt: skip
                row = {"graph": name, "op": op, "F": width, "mode": mode, **shared._asdict(),
                       "ratio": launch.ratio, "chosen": choose(spec).backend.name,
                       "sgt_ms": sgt_ms(inputs, launch.window, launch.least)}  # fmt: skip
                for backend, call in calls.items():
                    wrong = error(call())
                    if wrong > ALLOWED[mode] and backend != "cusparse":
                        raise SystemExit(f"{row} {backend}: off by {wrong:.2g}")
                    row[f"{backend}_error"] = wrong
                    row[f"{backend}_ms"] = gpu_machine.timed(call, budget=BUDGET).median
                yield row
    torch.set_float32_matmul_precision("highest")


Calls = dict[str, Callable[[], Tensor]]


def make(
    inputs: Inputs, op: str, width: int, dtype: torch.dtype
) -> tuple[Calls, Callable[[Tensor], float]]:
    """Who can run an operation, and the error of a result relative to the sum of |terms|."""
    graph, x = inputs.graph, inputs.features(width, dtype)
    y, weight = inputs.features(width, dtype, seed=1), inputs.weight.to(dtype)
    rows, entry, local = inputs.sample
    source = x[inputs.col[entry].long()].double()
    size = (inputs.nodes, inputs.nodes)

    def on(backend: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with use_backend(backend):
                if op == "spmm":
                    result: Tensor = ops.spmm(graph, x, weight)
                else:
                    result = ops.sddmm(graph, y, x)
            return result

        return call

    calls: Calls = {name: on(name) for name in ("cuda", "triton")
                    if not get_backend(name).unavailable_reasons()}  # fmt: skip
    if op == "spmm":
        matrix = torch.sparse_csr_tensor(inputs.rowptr, inputs.col, weight, size)
        calls["cusparse"] = lambda: matrix @ x
        terms = source * weight[entry].double().unsqueeze(1)
        zeros = terms.new_zeros(rows.numel(), width)
        right = zeros.index_add(0, local, terms)
        scale = zeros.index_add(0, local, terms.abs())
        return calls, lambda out: float(((out[rows].double() - right).abs() / (scale + 1e-9)).max())
    if dtype == torch.float32:
        pattern = torch.sparse_csr_tensor(inputs.rowptr, inputs.col, torch.zeros_like(weight), size)
        calls["cusparse"] = lambda: torch.sparse.sampled_addmm(pattern, y, x.t()).values()
    terms = source * y[rows[local]].double()
    right, scale = terms.sum(1), terms.abs().sum(1)
    return calls, lambda out: float(((out[entry].double() - right).abs() / scale).max())


_translation: dict[tuple[str, int, int], float] = {}


def sgt_ms(inputs: Inputs, window: int, least: int) -> float:
    """Milliseconds of the sparse graph translation, the second time."""
    key = (inputs.name, window, least)
    if key not in _translation:
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            build_tiles(inputs.graph.csr(), window, 32, least)
            torch.cuda.synchronize()
            _translation[key] = (time.perf_counter() - start) * 1e3
    return _translation[key]


if __name__ == "__main__":
    main()
