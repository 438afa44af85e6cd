"""Tensor-Core SpMM and SDDMM: every window beside CUDA cores, dispatch's choice beside cuSPARSE.

    python -m benchmarks.kernels.tensor_cores [--only NAME] [--sweep] [--out FOLDER]
    python -m benchmarks.kernels.tensor_cores --fit    # writes choice.json from tc_sweep.csv

Columns with fewer than `least` entries in a window are left to CUDA cores: `entries` is the part of
all entries that are not, `columns` how many columns they have an entry. Precisions are matched:
`fp32` (products exact to 2^-21), `tf32` (torch may round float32 factors; the others stay in fp32)
and `bf16`. `--sweep` writes tc_sweep.csv, the times of every window beside those on CUDA cores;
else tc_kernels.csv: which backend dispatch takes (`chosen`), what it expected (`ratio`), what the
translation costs once a graph (`sgt_ms`) and cuSPARSE. Every result is first held against float64
on the longest rows and a sample of the others; a wrong one of ours ends the run.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.kernels.gpu import Inputs
from benchmarks.tools import results, timing
from pyg_accel import ops, use_backend
from pyg_accel.backends import OpSpec, choose, get_backend
from pyg_accel.backends.cuda import sddmm, spmm
from pyg_accel.backends.cuda.choice import FILE, choose_launch, mode_of, terms
from pyg_accel.graph.column_reuse import Shared, reuse_of
from pyg_accel.graph.tiles import build_tiles

SHARING = ("mycielskian17", "reddit-like/ordered", "proteins-like/ordered", "products-like/ordered")
GRAPHS = (*SHARING, "reddit-like", "proteins-like", "arxiv-like")
MODES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
# Of the sum of |terms|: fp32 as the contract suite; rounded factors, and the rounded result.
ALLOWED = {"fp32": 2e-5, "tf32": 2e-3, "bf16": 1e-2}
Calls = dict[str, Callable[[], Tensor]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=("cuda",), only="", sweep=False, fit=False)
    options = parser.parse_args(arguments)
    name = "kernels/tc_sweep" if options.sweep or options.fit else "kernels/tc_kernels"
    if options.fit:
        fit(results.read(results.path_of(name, options)))
        return
    graphs = SHARING if options.sweep else GRAPHS
    if options.quick:
        graphs = ("mycielskian13", "arxiv-like@0.1")
    rows = results.Rows(name, options, "cuda")
    for graph in (g for g in graphs if g.startswith(options.only)):
        rows.add(sweep(graph) if options.sweep else measure(graph), show=True)
        torch.cuda.empty_cache()
    rows.done()


def call_of(op: str, inputs: Inputs, x: Tensor, y: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """An operation wherever dispatch puts it."""
    if op == "spmm":
        return partial(ops.spmm, inputs.graph, x, weight)
    return partial(ops.sddmm, inputs.graph, y, x)


def sweep(name: str) -> Iterator[dict[str, Any]]:
    """A row a window."""
    inputs = Inputs(name)
    csr = inputs.graph.csr()
    for width, (mode, dtype), op in product((64, 256), MODES.items(), ("spmm", "sddmm")):
        x, y = inputs.features(width, dtype), inputs.features(width, dtype, 1)
        weight, warps = inputs.weight.to(dtype), max(2, min(4, width * dtype.itemsize // 128))
        simple = call_of(op, inputs, x, y, weight)
        with use_backend("triton"):
            right = simple()
            simple_ms = timing.timed(simple, "cuda", budget=0.03).median
        for shared in reuse_of(csr):
            common = {"window": shared.window, "least": shared.least, "exact": mode == "fp32"}
            call: Callable[[], Tensor] = partial(sddmm.run, csr, y, x, slice=width, **common)
            if op == "spmm":
                call = partial(spmm.run, csr, x, weight, warps=warps, mean=False, **common)
            off = (call().double() - right.double()).abs().max() / right.abs().max()
            yield {"graph": name, "N": inputs.nodes, "E": inputs.entries, "F": width, "mode": mode,
                   "op": op, **shared._asdict(), "warps": 4 if op == "sddmm" else warps,
                   "ms": timing.timed(call, "cuda", budget=0.03).median,
                   "cuda_core_ms": simple_ms, "error": float(off)}  # fmt: skip


def fit(frame: pd.DataFrame) -> None:
    """Find the prices of columns and entries that tell the measured ratios best."""
    prices: dict[str, Any] = {}
    for (op, mode, window), rows in frame.groupby(["op", "mode", "window"], sort=False):
        dot, dtype = op == "sddmm", MODES[mode]
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


def measure(name: str) -> Iterator[dict[str, Any]]:
    """A row an operation, width and precision."""
    inputs = Inputs(name)
    csr = inputs.graph.csr()
    sharing, ordered = reuse_of(csr), name in SHARING
    translation = cache(partial(sgt_ms, inputs))
    for op, width, (mode, dtype) in product(
        ("spmm", "sddmm"), (64, 128, 256) if ordered else (64,), MODES.items()
    ):
        if (op, width) == ("sddmm", 128):
            continue
        torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
        calls, error = make(inputs, op, width, dtype)
        launch = choose_launch(
            dtype, width, csr.num_cols, sharing, mean=inputs.entries / inputs.nodes,
            rounded=mode == "tf32", dot=op == "sddmm",
        )  # fmt: skip
        shared = next(s for s in sharing if s[:2] == (launch.window, launch.least))
        text, reduces, shapes = "mul(u0,e1)", ("sum",), ((1, width), (1, 1))
        if op == "sddmm":
            text, reduces, shapes = "sum(mul(u1,v0))", ("none",), ((1, width),) * 2
        spec = OpSpec("gspmm", "cuda", dtype, csr.num_rows, csr.num_cols, csr.col.numel(), 1, width,
                      text, reduces, shapes=shapes, sharing=sharing,
                      rounded=mode == "tf32")  # fmt: skip
        row = {"graph": name, "op": op, "F": width, "mode": mode, **shared._asdict(),
               "ratio": launch.ratio, "chosen": choose(spec).backend.name,
               "sgt_ms": translation(launch.window, launch.least)}  # fmt: skip
        for backend, call in calls.items():
            wrong = error(call())
            if wrong > ALLOWED[mode] and backend != "cusparse":
                raise SystemExit(f"{row} {backend}: off by {wrong:.2g}")
            time = timing.timed(call, "cuda", budget=0.04).median
            row |= {f"{backend}_error": wrong, f"{backend}_ms": time}
        yield row
    torch.set_float32_matmul_precision("highest")


def make(
    inputs: Inputs, op: str, width: int, dtype: torch.dtype
) -> tuple[Calls, Callable[[Tensor], float]]:
    """Who can run an operation, and the error of a result relative to the sum of |terms|."""
    x, y = inputs.features(width, dtype), inputs.features(width, dtype, seed=1)
    weight = inputs.weight.to(dtype)
    rows, entry, local = inputs.sample
    source = x[inputs.col[entry].long()].double()
    run = call_of(op, inputs, x, y, weight)

    def on(backend: str) -> Tensor:
        with use_backend(backend):
            return run()

    calls: Calls = {name: partial(on, name) for name in ("cuda", "triton")
                    if not get_backend(name).unavailable_reasons()}  # fmt: skip
    if op == "spmm":
        matrix = inputs.matrix(weight)
        calls["cusparse"] = lambda: matrix @ x
        terms_ = source * weight[entry].double().unsqueeze(1)
        zeros, at = terms_.new_zeros(rows.numel(), width), rows
        right, scale = zeros.index_add(0, local, terms_), zeros.index_add(0, local, terms_.abs())
    else:
        if dtype == torch.float32:
            pattern = inputs.matrix(torch.zeros_like(weight))
            calls["cusparse"] = lambda: torch.sparse.sampled_addmm(pattern, y, x.t()).values()
        terms_, at = source * y[rows[local]].double(), entry
        right, scale = terms_.sum(1), terms_.abs().sum(1)
    return calls, lambda out: float(((out[at].double() - right).abs() / (scale + 1e-9)).max())


def sgt_ms(inputs: Inputs, window: int, least: int) -> float:
    """Milliseconds of the sparse graph translation, the second time."""
    make_tiles = partial(build_tiles, inputs.graph.csr(), window, 32, least)
    return [timing.seconds_of(make_tiles, "cuda") * 1e3 for _ in range(2)][1]


if __name__ == "__main__":
    main()
