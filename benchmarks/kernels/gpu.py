"""Time of the sparse GPU kernels against cuSPARSE and stock PyG, forward, in milliseconds a call.

    python -m benchmarks.kernels.gpu [--quick] [--only GRAPH] [--out FOLDER]

Every output is first held against a float64 result on the longest rows and a sample of the others;
a wrong result of our own ends the run. Then median and 20/80% quantiles, launching included, the
device's share by a CUDA graph (`graph_ms`), gathered TB/s, the share of the floor, peak memory, and
what is prepared once a graph. The floor is `max(E F b / 9.7 TB/s, bytes of X, Y and A / 4.2 TB/s)`,
the L2 and HBM rates of an H200.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.tools import frames, graphs, plot, results, timing
from pyg_accel import Graph, ops
from pyg_accel.backends import schedule
from pyg_accel.graph import CSR

NAME = "kernels/gpu_kernels"
BASES = ("arxiv-like", "amazon0505-like", "molecules-like", "proteins-like", "reddit-like",
         "products-like")  # fmt: skip
GRAPHS = tuple(f"{name}{order}" for name in BASES for order in ("", "/ordered"))
QUICK_GRAPHS = ("arxiv-like", "molecules-like@0.2/ordered", "reddit-like@0.1")
FEATURES = (32, 64, 128, 256)
MORE_AT = (64, 256)  # features of the cases beside the weighted sum
L2_RATE, HBM_RATE = 9.7e12, 4.2e12
STOCK_BYTES = 40e9  # E x F tensors above this are left out
SAMPLE = 2000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = torch.finfo(torch.float32).eps
Error = Callable[[Any], float]
Call = tuple[Callable[[], Any], Error | None]


class Inputs:
    """A graph on the GPU, by name or as `csr`, and operands for it."""

    def __init__(self, name: str, csr: graphs.Csr | None = None) -> None:
        rowptr, col = csr or graphs.load(name, device="cuda")
        self.name = name
        self.rowptr, self.col = rowptr.int(), col.int()
        self.nodes, self.entries = rowptr.numel() - 1, col.numel()
        self.graph = Graph.from_csr(self.rowptr, self.col, num_cols=self.nodes)
        self.weight = torch.rand(self.entries, device="cuda") + 0.5

    def features(self, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(self.nodes, width, device="cuda", generator=generator).to(dtype)

    def matrix(self, weight: Tensor) -> Tensor:
        """torch's own, whose product is cuSPARSE's."""
        return torch.sparse_csr_tensor(self.rowptr, self.col, weight, (self.nodes, self.nodes))

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
    parser = results.parser(__doc__, devices=("cuda",), only="", minutes=30.0)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    rows = results.Rows(NAME, options, "cuda", copy_tb_s=timing.copy_bandwidth("cuda") / 1e3)
    names = [n for n in (QUICK_GRAPHS if options.quick else GRAPHS) if n.startswith(options.only)]
    for name in results.each(names, "graph"):
        if time.monotonic() > deadline:
            print(f"out of time before {name}")
            break
        rows.add(measure(name), show=True)
        torch.cuda.empty_cache()
    print(frames.over_cusparse(rows.done()).round(2).to_string())
    plot.beside(rows.path)


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Rows of one graph."""
    inputs = Inputs(name)
    facts = {"graph": name, "N": inputs.nodes, "E": inputs.entries}
    for width, (label, dtype) in product(FEATURES, DTYPES.items()):
        x = inputs.features(width, dtype)
        for op, calls in cases(inputs, x):
            for backend, (call, error) in calls.items():
                what, ours = f"{name} {width} {label} {op}", backend == "pyg_accel"
                try:
                    wrong = error(call()) if error else 0.0
                except RuntimeError as reason:  # out of memory too
                    if ours:
                        raise
                    tqdm.write(f"{what}: {backend} cannot: {reason}"[:200])
                    torch.cuda.empty_cache()
                    continue
                if wrong > 1 and ours:
                    raise SystemExit(f"{what}: {wrong:.3g} times the allowed error")
                memory, wall = timing.peak_memory(call), timing.timed(call, "cuda")
                device = wall
                if wall.median < 2.0 and ours and "backward" not in op:
                    device = timing.timed(timing.captured(call), "cuda")
                moved = inputs.entries * width * dtype.itemsize
                index = inputs.entries * (8 if "weighted" in op else 4)
                once = 2 * inputs.nodes * width * dtype.itemsize + index
                floor = max(moved / L2_RATE, once / HBM_RATE) * 1e3
                yield {
                    **facts, "F": width, "dtype": label, "op": op, "backend": backend,
                    **wall.columns(prefix="ms_"), "graph_ms": device.median,
                    "gather_tb_s": moved / device.median / 1e9, "floor_ms": floor,
                    "share_of_floor": floor / device.median, "peak_mib": memory, "error": wrong,
                    "prepare_ms": prepare_ms(inputs) if ours else math.nan,
                }  # fmt: skip


def cases(inputs: Inputs, x: Tensor) -> Iterator[tuple[str, dict[str, Call]]]:
    """Operations, and who can run them: the call, and its error in units of what is allowed."""
    graph, nodes, width, dtype = inputs.graph, inputs.nodes, x.size(1), x.dtype
    weight = inputs.weight.to(dtype)
    matrix = inputs.matrix(weight)

    def ours(reduce: str | list[str], weight: Tensor | None = None) -> Callable[[], Any]:
        return lambda: ops.spmm(graph, x, weight, reduce=reduce)

    weighted = gate(inputs, x, weight, "sum")
    calls: dict[str, Call] = {"pyg_accel": (ours("sum", weight), weighted),
                              "cuSPARSE": (lambda: matrix @ x, weighted)}  # fmt: skip
    small = inputs.entries * width * dtype.itemsize < STOCK_BYTES
    if width == 64 and small and dtype == torch.float32:
        row, col = torch.repeat_interleave(inputs.rowptr.diff().long()), inputs.col.long()
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
    yield "spmm mean+max+min+sqsum", {"pyg_accel": (
        ours(["mean", "max", "min", "sqsum"]),
        lambda outs: max(error(out) for error, out in zip(gates, outs, strict=True)),
    )}  # fmt: skip
    y = inputs.features(width, dtype, seed=1)
    pattern, dot = inputs.matrix(torch.zeros_like(weight)), gate_dot(inputs, y, x)
    turned = x.t()  # as it lies: cuSPARSE is several times slower on a copy in the other order
    yield (
        "sddmm dot",
        {
            "pyg_accel": (lambda: ops.sddmm(graph, y, x), dot),
            "cuSPARSE": (lambda: torch.sparse.sampled_addmm(pattern, y, turned).values(), dot),
        },
    )
    if width == 64:
        scores = torch.randn(inputs.entries, 4, device="cuda")
        yield "edge_softmax 4 heads", {"pyg_accel": (lambda: ops.edge_softmax(graph, scores),
                                                     gate_softmax(inputs, scores))}  # fmt: skip
        leaf = x.clone().requires_grad_()
        out = ops.spmm(graph, leaf, reduce="max")
        grad = torch.randn_like(out)
        yield "spmm max backward", {"pyg_accel": (
            lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)[0],
            gate_max_gradient(inputs, x, grad),
        )}  # fmt: skip


def gate(inputs: Inputs, x: Tensor, weight: Tensor | None, reduce: str) -> Error:
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
        steps = 20 if reduce == "sqsum" else 8  # nothing cancels in up to 1024 additions
        allowed = scale * (steps * EPS + accumulated) + 4 * eps * (right.abs() + 1e-6)
        return float(((out[rows].double() - right).abs() / allowed.clamp(min=1e-30)).max())

    return error


def gate_dot(inputs: Inputs, y: Tensor, x: Tensor) -> Error:
    """The error of an SDDMM on the entries of the sampled rows."""

    def error(out: Tensor) -> float:
        rows, entry, local = inputs.sample
        terms = y[rows[local]].double() * x[inputs.col[entry].long()].double()
        allowed = 8 * EPS * terms.abs().sum(1)
        return float(((out[entry].double() - terms.sum(1)).abs() / allowed).max())

    return error


def gate_softmax(inputs: Inputs, scores: Tensor) -> Error:
    """The error of an edge softmax on the entries of the sampled rows."""

    def error(out: Tensor) -> float:
        rows, entry, local = inputs.sample
        terms = scores[entry].double().exp()
        index = local.unsqueeze(1).expand_as(terms)
        total = terms.new_zeros(rows.numel(), scores.size(1)).scatter_add(0, index, terms)
        right = terms / total[local]
        return float(((out[entry].double() - right).abs() / (32 * EPS * right)).max())

    return error


def gate_max_gradient(inputs: Inputs, x: Tensor, grad: Tensor) -> Error:
    """The error of the gradient of a maximum, whole, in the first column."""

    def error(out: Tensor) -> float:
        degree = inputs.rowptr.diff().long()
        row, value = torch.repeat_interleave(degree), x[:, 0][inputs.col]
        zeros = value.new_zeros(inputs.nodes)
        most = zeros.scatter_reduce(0, row, value, "amax", include_self=False)
        wins = (value == most[row]).nonzero().flatten()
        first = torch.full_like(degree, inputs.entries)
        first = first.scatter_reduce(0, row[wins], wins, "amin")[degree > 0]
        won, given = inputs.col[first].long(), grad[:, 0][degree > 0].double()
        zeros = given.new_zeros(inputs.nodes)
        right, scale = zeros.index_add(0, won, given), zeros.index_add(0, won, given.abs())
        # Every winner's gradient is rounded to a fraction of the largest: see `triton.scatter`.
        rounded = torch.bincount(won, minlength=inputs.nodes) * inputs.nodes * 2.0**-61
        allowed = 8 * EPS * scale + rounded * given.abs().max() + 1e-30
        return float(((out[:, 0].double() - right).abs() / allowed).max())

    return error


def prepare_ms(inputs: Inputs) -> float:
    """Milliseconds for what is made once a graph: the schedule of its rows."""
    col, ordered = inputs.col.clone(), inputs.entries < 40 * inputs.nodes  # nothing is kept
    csr = CSR(inputs.rowptr, col, None, inputs.nodes, sorted=True)
    make = lambda: schedule.schedule_of(csr, 1024, 512, ordered=ordered)  # noqa: E731
    return timing.seconds_of(make, "cuda") * 1e3


if __name__ == "__main__":
    main()
