"""Time of MaxK selection and of the products with its result, in milliseconds a call.

    PYG_ACCEL_DATA=DIR python -m benchmarks.papers.maxk_gnn.products [--device cuda] [--only GRAPH]

For each graph and k, with F = 256 in fp32: `maxk` against torch.topk and against topk with the
scattered mask that a plain implementation of the paper uses; `cbsr_spmm` and its gradient `sspmm`,
weighted, by every backend that has them, against our dense SpMM and that of torch (cuSPARSE, MKL)
on the masked matrix. The dense gradients leave out the selection that would follow. `auto` is what
dispatch chooses where there is a choice; on a GPU gradients are taken with atomic additions, and
without (`deterministic`, PYG_ACCEL_ATOMICS=0).

Every result is first held against float64 on the longest rows and a sample of the others; a wrong
one of ours ends the run.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.tools import frames, graphs, results, timing
from benchmarks.tools.datasets import load_cornell5
from pyg_accel import CBSR, Graph, ops, use_backend
from pyg_accel.backends import OpSpec, backends, choose
from pyg_accel.graph import CSR
from pyg_accel.ops.arrays import Arrays
from pyg_accel.settings import settings

GRAPHS = {
    "cpu": ("cornell5", "rmat-20k", "arxiv-like@0.3"),
    "cuda": ("arxiv-like", "amazon0505-like", "proteins-like", "reddit-like", "products-like",
             "products-like/ordered"),
}  # fmt: skip
QUICK = {"cpu": ("rmat-2.7k",), "cuda": ("arxiv-like@0.2",)}
FEATURES = 256
KEPT = (16, 32, 64)
SAMPLE = 1000

Call = Callable[[], Any]
Error = Callable[[Any], float]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=tuple(GRAPHS), quick="one small graph", only="",
                            k=KEPT, budget=1.0)  # fmt: skip
    options = parser.parse_args(arguments)
    device = options.device
    prefix = "gpu" if device == "cuda" else "cpu"
    rows = results.Rows(f"papers/maxk_gnn/{prefix}_maxk", options, device)
    names = [n for n in (QUICK if options.quick else GRAPHS)[device] if n.startswith(options.only)]
    if "cornell5" in names and "PYG_ACCEL_DATA" not in os.environ:
        names.remove("cornell5")
        print("cornell5 is left out: PYG_ACCEL_DATA is not set")
    for name in results.each(names, "graph"):
        rows.add(measure(name, device, options.budget, options.k), show=True)
    print(frames.chosen_products(rows.done()).round(3).to_string())


def load(name: str, device: str) -> Graph:
    if name == "cornell5":
        edge_index, nodes = load_cornell5(os.environ["PYG_ACCEL_DATA"])
        return Graph.from_edge_index(edge_index.to(device), (nodes, nodes))
    rowptr, col = graphs.load(name, device=device)
    return Graph.from_csr(rowptr.int(), col.int(), num_cols=rowptr.numel() - 1)


def measure(name: str, device: str, budget: float, kept: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of one graph."""
    graph = load(name, device)
    generator = torch.Generator(device).manual_seed(0)
    x, y = (torch.randn(graph.num_cols, FEATURES, device=device, generator=generator)
            for _ in range(2))  # fmt: skip
    weight = torch.rand(graph.num_edges, device=device, generator=generator) + 0.5
    for k in kept:
        cbsr = ops.maxk(x, k)
        for op, calls, error in (
            ("maxk", selections(x, k), selection_error(x, k)),
            ("cbsr_spmm", products(graph, cbsr, weight), product_error(graph, cbsr, weight)),
            ("sspmm", gradients(graph, cbsr, weight, y), gradient_error(graph, cbsr, weight, y)),
        ):
            wrong = {backend: error(call()) for backend, call in calls.items()}
            if bad := {backend: e for backend, e in wrong.items() if e > 1}:
                raise SystemExit(f"{name} k = {k} {op}: {bad} times the allowed error")
            if device == "cuda":
                times = {b: timing.timed(call, device, budget=budget) for b, call in calls.items()}
            else:
                times = timing.side_by_side(calls, 5, budget=budget)
            for backend, time in times.items():
                yield {"graph": name, "N": graph.num_cols, "E": graph.num_edges, "F": FEATURES,
                       "k": k, "op": op, "backend": backend, **time.columns(prefix="ms_"),
                       "error": wrong[backend]}  # fmt: skip


def able(op: str, graph: Graph, k: int, *, atomics: bool = False) -> list[str]:
    """Backends that have an operator for these tensors; the reference writes E x k terms out."""
    spec = OpSpec(op, graph.device.type, torch.float32, graph.num_rows,
                  graph.num_cols, graph.num_edges, 1, FEATURES, k=k, atomics=atomics)  # fmt: skip
    names = [
        name
        for name, backend in backends().items()
        if name != "reference"
        and not (backend.unavailable_reasons() or backend.not_supported_reasons(spec))
    ]
    return names if len(names) == 1 else [*names, f"auto ({choose(spec).backend.name})"]


def on(backend: str, call: Call) -> Call:
    def run() -> Any:
        with use_backend("auto" if backend.startswith("auto") else backend):
            return call()

    return run


def with_setting(name: str, value: bool, call: Call) -> Call:
    def run() -> Any:
        setattr(settings, name, value)
        try:
            return call()
        finally:
            setattr(settings, name, None)

    return run


def selections(x: Tensor, k: int) -> dict[str, Call]:
    none = torch.zeros(1, dtype=torch.int32, device=x.device)
    graph = Graph(none, none[:0], None, x.size(0), sorted=True)

    def masked() -> Tensor:
        values, indices = x.topk(k, dim=1)
        return torch.zeros_like(x).scatter_(1, indices, values)

    calls = {name: on(name, lambda: ops.maxk(x, k)) for name in able("maxk", graph, k)}
    return {**calls, "torch.topk": lambda: x.topk(k, dim=1), "topk and mask": masked}


def products(graph: Graph, cbsr: CBSR, weight: Tensor) -> dict[str, Call]:
    dense = cbsr.dense()
    matrix = torch.sparse_csr_tensor(graph.rowptr, graph.col, weight,
                                     (graph.num_rows, graph.num_cols))  # fmt: skip
    calls = {
        name: on(name, lambda: ops.cbsr_spmm(graph, cbsr, weight))
        for name in able("cbsr_spmm", graph, cbsr.k)
    }
    calls["our dense SpMM"] = lambda: ops.spmm(graph, dense, weight)
    calls["torch CSR"] = lambda: matrix @ dense
    return calls


def gradients(graph: Graph, cbsr: CBSR, weight: Tensor, y: Tensor) -> dict[str, Call]:
    turned = graph.transposed()
    arrays = Arrays.join(graph.csr(), turned)

    def run() -> Tensor:
        found: Tensor = torch.ops.pyg_accel.sspmm(*arrays, y, cbsr.indices, weight)
        return found

    if not y.is_cuda:
        calls: dict[str, Call] = {name: on(name, run) for name in able("sspmm", graph, cbsr.k)}
    else:
        calls = {
            name if atomics else f"{name}, deterministic": with_setting(
                "atomics", atomics, on(name, run)
            )
            for atomics in (True, False)
            for name in able("sspmm", graph, cbsr.k, atomics=atomics)
        }
    back = Graph(turned.rowptr, turned.col, None, graph.num_rows, sorted=True)
    assert turned.eid is not None
    turned_weight = weight[turned.eid.long()]
    matrix = torch.sparse_csr_tensor(back.rowptr, back.col, turned_weight,
                                     (back.num_rows, back.num_cols))  # fmt: skip
    calls["our dense SpMM"] = lambda: ops.spmm(back, y, turned_weight)
    calls["torch CSR"] = lambda: matrix @ y
    return calls


def selection_error(x: Tensor, k: int) -> Error:
    """0 if a sample of the rows is exactly right, else infinity."""
    rows = torch.randint(x.size(0), (SAMPLE,), device=x.device)
    right = x[rows].sort(dim=1, descending=True).values[:, :k]

    def error(found: Any) -> float:
        if isinstance(found, CBSR):
            same = torch.equal(x[rows].gather(1, found.indices[rows].long()), found.values[rows])
            ascending = bool((found.indices[rows].long().diff(dim=1) > 0).all())
            ours = found.values[rows].sort(dim=1, descending=True).values
            return 0.0 if same and ascending and torch.equal(ours, right) else torch.inf
        if isinstance(found, tuple):
            ours = found[0][rows]
        else:  # what is not selected is 0, which may be larger than what is
            ours = found[rows].masked_fill(found[rows] == 0, -torch.inf)
        return 0.0 if torch.equal(ours.sort(1, True).values[:, :k], right) else torch.inf

    return error


def product_error(graph: Graph, cbsr: CBSR, weight: Tensor) -> Error:
    right, scale, rows = sampled_sums(graph.csr(), cbsr.dense(), weight)
    return lambda out: compare(out[rows], right, scale)


def gradient_error(graph: Graph, cbsr: CBSR, weight: Tensor, y: Tensor) -> Error:
    right, scale, rows = sampled_sums(graph.transposed(), y, weight)
    columns = cbsr.indices[rows].long()

    def error(out: Tensor) -> float:
        found = out[rows]
        if found.size(1) != cbsr.k:  # the dense peers
            return compare(found, right, scale)
        return compare(found, right.gather(1, columns), scale.gather(1, columns))

    return error


def sampled_sums(csr: CSR, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums in float64 on the longest rows and some others, of |terms| too; the rows."""
    degree = csr.rowptr.diff().long()
    some = torch.randint(csr.num_rows, (SAMPLE,), device=x.device)
    rows = torch.cat([degree.topk(min(20, csr.num_rows)).indices, some])
    counts = degree[rows]
    local = torch.repeat_interleave(torch.arange(rows.numel(), device=x.device), counts)
    entry = torch.arange(local.numel(), device=x.device) - (counts.cumsum(0) - counts)[local]
    entry = entry + csr.rowptr[rows].long()[local]
    right = torch.zeros(rows.numel(), x.size(1), dtype=torch.float64, device=x.device)
    scale = torch.zeros_like(right)
    for part in torch.arange(entry.numel(), device=x.device).split(1 << 20):  # memory
        number = entry[part] if csr.eid is None else csr.eid[entry[part]].long()
        terms = x[csr.col[entry[part]].long()].double() * weight[number].double().unsqueeze(1)
        right.index_add_(0, local[part], terms)
        scale.index_add_(0, local[part], terms.abs())
    return right, scale, rows


def compare(found: Tensor, right: Tensor, scale: Tensor) -> float:
    """The largest error, in units of what is allowed: 2e-5 of the sum of |terms|."""
    allowed = 2e-5 * scale + 1e-6
    return float(((found.double() - right).abs() / allowed).max())


if __name__ == "__main__":
    main()
