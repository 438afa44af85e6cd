"""Time of the sparse GPU kernels against cuSPARSE and stock PyG, forward, in milliseconds a call.

    python -m pyg_accel bench --suite kernels --device cuda [--quick] [--out FOLDER]

Every output is first held against a float64 result on the longest rows and a sample of the others;
a wrong result of our own ends the run. Then median and 20/80% quantiles, launching included, the
device's share by a CUDA graph (`graph_ms`), gathered TB/s, the share of the floor, peak memory, and
what is prepared once a graph. The floor is `max(E F b / 9.7 TB/s, bytes of X, Y and A / 4.2 TB/s)`,
the L2 and HBM rates of an H200.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import gpu_machine, graphs
from pyg_accel import Graph, ops
from pyg_accel.backends import schedule
from pyg_accel.graph import CSR

NAME = "gpu_kernels"
GRAPHS = (
    "arxiv-like", "arxiv-like/ordered", "amazon0505-like", "amazon0505-like/ordered",
    "molecules-like", "molecules-like/ordered", "proteins-like", "proteins-like/ordered",
    "reddit-like", "reddit-like/ordered", "products-like", "products-like/ordered",
)  # fmt: skip
QUICK_GRAPHS = ("arxiv-like", "molecules-like@0.2/ordered", "reddit-like@0.1")
FEATURES = (32, 64, 128, 256)
MORE_AT = (64, 256)  # features of the cases beside the weighted sum
L2_RATE, HBM_RATE = 9.7e12, 4.2e12
STOCK_BYTES = 40e9  # E x F tensors above this are left out
SAMPLE = 2000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Inputs:
    """A graph on the GPU, by name or as `csr`, and operands for it."""

    def __init__(self, name: str, csr: graphs.Csr | None = None) -> None:
        rowptr, col = csr or graphs.load(name, device="cuda")
        self.name = name
        self.rowptr, self.col = rowptr.int(), col.int()
        self.nodes, self.entries = rowptr.numel() - 1, col.numel()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.graph = Graph.from_csr(self.rowptr, self.col, num_cols=self.nodes)
        torch.cuda.synchronize()
        self.graph_ms = (time.perf_counter() - start) * 1e3
        self.weight = torch.rand(self.entries, device="cuda") + 0.5

    def features(self, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(self.nodes, width, device="cuda", generator=generator).to(dtype)

    @cached_property
    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows to check, and entries and (local) rows of all their edges."""
        degree = self.rowptr.diff()
        longest = degree.topk(min(20, self.nodes)).indices
        some = torch.randint(self.nodes, (SAMPLE,), device="cuda")
        rows = torch.cat([longest, some, torch.tensor([0, self.nodes - 1], device="cuda")])
        counts = degree[rows].long()
        local = torch.repeat_interleave(torch.arange(rows.numel(), device="cuda"), counts)
        first = counts.cumsum(0) - counts
        entry = torch.arange(local.numel(), device="cuda") - first[local]
        return rows, entry + self.rowptr[rows].long()[local], local


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small graphs")
    parser.add_argument("--only", default="", help="graphs whose name starts like this")
    parser.add_argument("--out", type=Path, help="folder of the CSV")
    parser.add_argument("--minutes", type=float, default=30.0, help="stop before the next graph")
    options = parser.parse_args(arguments)
    folder = options.out or Path(__file__).with_name("results")
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    facts = {**gpu_machine.facts(), "copy_tb_s": gpu_machine.copy_bandwidth()}
    rows: list[dict[str, Any]] = []
    names = [
        name
        for name in (QUICK_GRAPHS if options.quick else GRAPHS)
        if name.startswith(options.only)
    ]
    for name in (progress := tqdm(names, unit="graph")):
        progress.set_description(name)
        if time.monotonic() > deadline:
            progress.write(f"out of time before {name}")
            break
        for row in measure(name):
            rows.append({**row, **facts})
            progress.write(line(row))
        frame = pd.DataFrame(rows)
        suffix = "_quick" if options.quick else ""
        frame.to_csv(folder / f"{NAME}{suffix}.csv", index=False, float_format="%.5g")
        torch.cuda.empty_cache()
    summarise(pd.DataFrame(rows))


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    what = f"{row['graph']:24} {row['F']:4} {row['dtype']} {row['op']:22} {row['backend']:10}"
    times = f"{row['ms']:9.4f} ms, on the device {row['graph_ms']:9.4f}"
    return f"{what} {times} {row['gather_tb_s']:6.2f} TB/s {row['share_of_floor']:5.2f} of floor"


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Rows of one graph."""
    inputs = Inputs(name)
    facts = {"graph": name, "N": inputs.nodes, "E": inputs.entries}
    for width, (label, dtype) in itertools.product(FEATURES, DTYPES.items()):
        x = inputs.features(width, dtype)
        for op, calls in cases(inputs, x, width, dtype):
            for backend, (call, error) in calls.items():
                try:
                    result = call()
                except RuntimeError as reason:  # out of memory too
                    if backend == "pyg_accel":
                        raise
                    tqdm.write(f"{name} {width} {label} {op}: {backend} cannot: {reason}"[:200])
                    torch.cuda.empty_cache()
                    continue
                wrong = error(result) if error else 0.0
                if wrong > 1 and backend == "pyg_accel":
                    raise SystemExit(f"{name} {width} {label} {op}: {wrong:.3g} times the "
                                     "allowed error")  # fmt: skip
                del result
                memory = gpu_machine.peak_memory(call)
                wall = gpu_machine.timed(call)
                device = wall
                if wall.median < 2.0 and backend == "pyg_accel" and "backward" not in op:
                    device = gpu_machine.timed(gpu_machine.captured(call), budget=0.1)
                moved = inputs.entries * width * dtype.itemsize
                index = inputs.entries * (8 if "weighted" in op else 4)
                once = 2 * inputs.nodes * width * dtype.itemsize + index
                floor = max(moved / L2_RATE, once / HBM_RATE) * 1e3
                yield {
                    **facts, "F": width, "dtype": label, "op": op, "backend": backend,
                    "ms": wall.median, "ms_p20": wall.p20, "ms_p80": wall.p80,
                    "graph_ms": device.median, "gather_tb_s": moved / device.median / 1e9,
                    "floor_ms": floor, "share_of_floor": floor / device.median,
                    "peak_mib": memory, "error": wrong,
                    "prepare_ms": prepare_ms(inputs) if backend == "pyg_accel" else math.nan,
                }  # fmt: skip


Call = tuple[Callable[[], Tensor], Callable[[Tensor], float] | None]


def cases(
    inputs: Inputs, x: Tensor, width: int, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Call]]]:
    """Operations, and who can run them: the call, and its error in units of what is allowed."""
    graph, nodes = inputs.graph, inputs.nodes
    weight = inputs.weight.to(dtype)
    matrix = torch.sparse_csr_tensor(inputs.rowptr, inputs.col, weight, (nodes, nodes))

    def ours(reduce: str | list[str], weight: Tensor | None = None) -> Callable[[], Any]:
        return lambda: ops.spmm(graph, x, weight, reduce=reduce)

    weighted = gate(inputs, x, weight, "sum")
    calls: dict[str, Call] = {
        "pyg_accel": (ours("sum", weight), weighted),
        "cuSPARSE": (lambda: matrix @ x, weighted),
    }
    small = inputs.entries * width * dtype.itemsize < STOCK_BYTES
    if width == 64 and small and dtype == torch.float32:
        row = torch.repeat_interleave(inputs.rowptr.diff().long())
        col = inputs.col.long()
        calls["stock PyG"] = (
            lambda: x.new_zeros(nodes, width).index_add_(0, row, x[col] * weight.unsqueeze(1)),
            None,
        )
    yield "spmm weighted sum", calls
    if width not in MORE_AT:
        return
    yield "spmm sum", {"pyg_accel": (ours("sum"), gate(inputs, x, None, "sum"))}
    yield "spmm max", {"pyg_accel": (ours("max"), gate(inputs, x, None, "amax"))}
    if dtype != torch.float32:
        return
    gates = [gate(inputs, x, None, reduce) for reduce in ("mean", "amax", "amin", "sqsum")]
    yield (
        "spmm mean+max+min+sqsum",
        {
            "pyg_accel": (
                ours(["mean", "max", "min", "sqsum"]),
                lambda outs: max(error(out) for error, out in zip(gates, outs, strict=True)),
            )
        },
    )
    y = inputs.features(width, dtype, seed=1)
    sampled = {"pyg_accel": (lambda: ops.sddmm(graph, y, x), gate_dot(inputs, y, x))}
    pattern = torch.sparse_csr_tensor(inputs.rowptr, inputs.col, torch.zeros_like(weight),
                                      (nodes, nodes))  # fmt: skip
    turned = x.t()  # as it lies: cuSPARSE is several times slower on a copy in the other order
    sampled["cuSPARSE"] = (
        lambda: torch.sparse.sampled_addmm(pattern, y, turned).values(),
        gate_dot(inputs, y, x),
    )
    yield "sddmm dot", sampled
    if width == 64:
        scores = torch.randn(inputs.entries, 4, device="cuda")
        yield "edge_softmax 4 heads", {"pyg_accel": (lambda: ops.edge_softmax(graph, scores),
                                                   gate_softmax(inputs, scores))}  # fmt: skip
        leaf = x.clone().requires_grad_()
        out = ops.spmm(graph, leaf, reduce="max")
        grad = torch.randn_like(out)
        yield (
            "spmm max backward",
            {
                "pyg_accel": (
                    lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)[0],
                    gate_max_gradient(inputs, x, grad),
                )
            },
        )


def gate(
    inputs: Inputs, x: Tensor, weight: Tensor | None, reduce: str
) -> Callable[[Tensor], float]:
    """The error of an SpMM on the sampled rows, in units of what is allowed."""

    def error(out: Tensor) -> float:
        rows, entry, local = inputs.sample
        terms = x[inputs.col[entry].long()].double()
        if weight is not None:
            terms = terms * weight[entry].double().unsqueeze(1)
        if reduce == "sqsum":
            terms = terms.square()
        index = local.unsqueeze(1).expand_as(terms)
        zeros = terms.new_zeros(rows.numel(), x.size(1))
        if reduce in ("sum", "mean", "sqsum"):
            counts = torch.bincount(local, minlength=rows.numel()).clamp(min=1).unsqueeze(1)
            counts = counts if reduce == "mean" else torch.ones_like(counts)
            right = zeros.scatter_add(0, index, terms) / counts
            scale = zeros.scatter_add(0, index, terms.abs()) / counts
        else:
            right = zeros.scatter_reduce(0, index, terms, reduce, include_self=False)
            scale = right.abs()
        eps = torch.finfo(x.dtype).eps
        accumulated = 0 if x.dtype == torch.float32 else eps
        steps = 16 if reduce == "sqsum" else 4  # nothing cancels in up to 1024 additions
        allowed = scale * (steps * torch.finfo(torch.float32).eps + accumulated) + 4 * eps * (
            right.abs() + 1e-6
        ) + 4 * torch.finfo(torch.float32).eps * scale  # fmt: skip
        return float(((out[rows].double() - right).abs() / allowed.clamp(min=1e-30)).max())

    return error


def gate_dot(inputs: Inputs, y: Tensor, x: Tensor) -> Callable[[Tensor], float]:
    """The error of an SDDMM on the entries of the sampled rows."""

    def error(out: Tensor) -> float:
        rows, entry, local = inputs.sample
        a, b = y[rows[local]].double(), x[inputs.col[entry].long()].double()
        allowed = 8 * torch.finfo(torch.float32).eps * (a * b).abs().sum(1)
        return float(((out[entry].double() - (a * b).sum(1)).abs() / allowed).max())

    return error


def gate_softmax(inputs: Inputs, scores: Tensor) -> Callable[[Tensor], float]:
    """The error of an edge softmax on the entries of the sampled rows."""

    def error(out: Tensor) -> float:
        rows, entry, local = inputs.sample
        terms = scores[entry].double().exp()
        index = local.unsqueeze(1).expand_as(terms)
        total = terms.new_zeros(rows.numel(), scores.size(1)).scatter_add(0, index, terms)
        right = terms / total[local]
        allowed = 32 * torch.finfo(torch.float32).eps * right
        return float(((out[entry].double() - right).abs() / allowed).max())

    return error


def gate_max_gradient(inputs: Inputs, x: Tensor, grad: Tensor) -> Callable[[Tensor], float]:
    """The error of the gradient of a maximum, whole, in the first column."""

    def error(out: Tensor) -> float:
        degree = inputs.rowptr.diff().long()
        row = torch.repeat_interleave(degree)
        value = x[:, 0][inputs.col]
        most = value.new_zeros(inputs.nodes).scatter_reduce(
            0, row, value, "amax", include_self=False
        )
        wins = (value == most[row]).nonzero().flatten()
        first = torch.full_like(degree, inputs.entries)
        first = first.scatter_reduce(0, row[wins], wins, "amin")[degree > 0]
        won, given = inputs.col[first].long(), grad[:, 0][degree > 0].double()
        zeros = given.new_zeros(inputs.nodes)
        right, scale = zeros.index_add(0, won, given), zeros.index_add(0, won, given.abs())
        # Every winner's gradient is rounded to a fraction of the largest: see `triton.scatter`.
        rounded = torch.bincount(won, minlength=inputs.nodes) * inputs.nodes * 2.0**-61
        allowed = 8 * torch.finfo(torch.float32).eps * scale + rounded * given.abs().max() + 1e-30
        return float(((out[:, 0].double() - right).abs() / allowed).max())

    return error


def prepare_ms(inputs: Inputs) -> float:
    """Milliseconds for what is made once a graph: the schedule of its rows."""
    col, ordered = inputs.col.clone(), inputs.entries < 40 * inputs.nodes  # nothing is kept
    csr = CSR(inputs.rowptr, col, None, inputs.nodes, sorted=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    schedule.schedule_of(csr, 1024, 512, ordered=ordered)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def summarise(frame: pd.DataFrame) -> None:
    """Print speed-ups over cuSPARSE and the other targets."""
    sums = frame[frame.op == "spmm weighted sum"].pivot_table(
        index=["graph", "F", "dtype"], columns="backend", values="ms"
    )
    speedup = (sums["cuSPARSE"] / sums["pyg_accel"]).rename("speedup")
    table = speedup.unstack(["dtype", "F"])
    print("\nspeed-up over cuSPARSE, weighted sum\n", table.round(2).to_string())
    for label, values in speedup.groupby("dtype"):
        mean = math.exp(values.map(math.log).mean())
        print(f"{label}: geometric mean {mean:.3f}, lowest {values.min():.3f} {values.idxmin()}")
    own = frame[frame.backend == "pyg_accel"].pivot_table(
        index=["graph", "F"], columns=["op", "dtype"], values="graph_ms"
    )
    show = pd.DataFrame({
        "bf16 gain": own["spmm weighted sum", "fp32"] / own["spmm weighted sum", "bf16"],
        "max/sum": own["spmm max", "fp32"] / own["spmm sum", "fp32"],
        "four/sum": own["spmm mean+max+min+sqsum", "fp32"] / own["spmm sum", "fp32"],
        "sddmm/spmm": own["sddmm dot", "fp32"] / own["spmm weighted sum", "fp32"],
    })  # fmt: skip
    print(show.round(2).to_string())


if __name__ == "__main__":
    main()
