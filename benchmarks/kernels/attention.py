"""Attention in one kernel against its parts, on a CPU and on a GPU.

    python -m benchmarks.kernels.attention --device cpu [--graphs NAME ...] [--rounds 5]
    python -m benchmarks.kernels.attention --device cuda --what forms      # or dot

cpu_attention.csv: epochs of 3 layers, 128 hidden in 4 heads, on a CPU. `parts` is pyg_accel with
scores, softmax and weighted sum one after the other, `one pass` the kernels of csrc/cpu/stages.h
wherever they can run, `dispatch` what a user gets; the ways take turns.
gpu_attention.csv (forms): the scores of GATConv, GATv2Conv and TransformerConv, operands in float32
and bfloat16; Triton's kernel against its parts, each where dispatch puts it.
gpu_dot_attention.csv (dot): epochs of AGNN, the second model of the TC-GNN paper, beside stock PyG;
and one head of 128 features in fp16, by its parts, on Tensor Cores and on CUDA cores, by Triton's
kernel and by stock PyG. Outputs and gradients are compared before they are timed; what runs out of
memory stays in the table without a time.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import nan
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch_geometric.nn import AGNNConv, GATConv, GATv2Conv, TransformerConv
from torch_geometric.utils import softmax

import pyg_accel
from benchmarks.tools import graphs, results, timing
from benchmarks.tools.variants import epoch_of, must_agree, patched
from pyg_accel import Graph, ops
from pyg_accel.backends import get_backend
from pyg_accel.backends.dispatch import forget_decisions
from pyg_accel.graph.column_reuse import per_column, reuse_of
from pyg_accel.ops.attention_unfused import unfused

HIDDEN, HEADS, LAYERS = 128, 4, 3
WAYS = ("parts", "one pass", "dispatch")
FORMS = {
    "GAT": ("leaky_relu(add(u1,v2),0.2)", "u0", "FHH"),
    "GAT, dropout": ("leaky_relu(add(u1,v2),0.2)", "mul(u0,e3)", "FHHM"),
    "GATv2": ("sum(mul(leaky_relu(add(v1,u0),0.2),v2))", "u0", "FF1"),
    "Transformer": ("div(sum(mul(v0,u1)),8.0)", "u2", "FFF"),
}
ALLOWED = {torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}  # of the largest value
SCORE, VALUE, WIDTH = "div(sum(mul(v0,u1)),11.313708498984761)", "u2", 128


class Layers(Module):
    """A layer in, layers of one convolution, a layer out."""

    def __init__(self, inputs: int, hidden: int, classes: int, convs: list[Module]) -> None:
        super().__init__()
        self.first, self.convs = Linear(inputs, hidden), ModuleList(convs)
        self.last, self.between = Linear(hidden, classes), not isinstance(convs[0], AGNNConv)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x).relu()
        for conv in self.convs:
            x = conv(x, edge_index)
            x = x.relu() if self.between else x
        return self.last(x)


def agnn(features: int, classes: int) -> Layers:
    """The second model of the TC-GNN paper: four layers of 32 features."""
    return Layers(features, 32, classes, [AGNNConv() for _ in range(4)])


def heads(kind: type[Module], **extra: Any) -> Callable[[], Layers]:
    return lambda: Layers(128, HIDDEN, 40, [kind(HIDDEN, HIDDEN // HEADS, HEADS, **extra)
                                            for _ in range(LAYERS)])  # fmt: skip


MODELS: dict[str, Callable[[], Layers]] = {
    "GAT": heads(GATConv), "GAT, dropout": heads(GATConv, dropout=0.5), "GATv2": heads(GATv2Conv),
    "Transformer": heads(TransformerConv),
    "AGNN": lambda: Layers(128, HIDDEN, 40, [AGNNConv() for _ in range(LAYERS)]),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=("cpu", "cuda"), graphs=None, models=MODELS,
                            forms=FORMS, sizes=("4x64", "8x16", "8x8"), what=("forms", "dot"),
                            rounds=5)  # fmt: skip
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        rows = results.Rows("kernels/cpu_attention", options)
        names = options.graphs or ["arxiv-like@0.05" if options.quick else "arxiv-like"]
        for graph, model in results.each([(g, m) for g in names for m in options.models]):
            rounds = 1 if options.quick else options.rounds
            rows.add([epochs(graph, model, rounds)], show=True, graph=graph, model=model)
        rows.done()
        return
    small = "@0.02" if options.quick else ""
    if "forms" in options.what:
        rows = results.Rows("kernels/gpu_attention", options, "cuda")
        for name in options.graphs or [f"{n}{small}" for n in ("arxiv-like", "amazon0505-like",
                                                               "reddit-like")]:  # fmt: skip
            graph = graph_of(name)
            for form, size, dtype in product(options.forms, options.sizes,
                                             (torch.float32, torch.bfloat16)):  # fmt: skip
                row = fused(graph, form, *map(int, size.split("x")), dtype)
                rows.add([row], show=True, graph=name)
        rows.done()
    if "dot" in options.what:
        rows = results.Rows("kernels/gpu_dot_attention", options, "cuda")
        for name in ("amazon0505-like", "reddit-like"):
            rows.add(agnn_epochs(f"{name}{small}"), show=True)
        for name in (f"reddit-like/ordered{small}", f"products-like/ordered{small}",
                     "mycielskian11" if small else "mycielskian17"):  # fmt: skip
            rows.add(dot_products(name), show=True)
        rows.done()


def graph_of(name: str) -> Graph:
    """A graph whose reuse of columns dispatch knows."""
    rowptr, col = graphs.load(name, device="cuda")
    graph = Graph(rowptr.int(), col.int(), None, rowptr.numel() - 1, sorted=True)
    for csr in (graph.csr(), graph.transposed()):
        reuse_of(csr)
    return graph


@contextlib.contextmanager
def running(way: str) -> Iterator[None]:
    """The CPU kernels that a way uses."""
    several = ("attention", "gspmm_several") if way == "parts" else ()
    kernels = get_backend("cpu").kernels
    forced = {op: replace(kernels[op], prefers_unfused=lambda spec: spec.op in several)
              for op in ("attention", "gspmm_several")}  # fmt: skip
    with pyg_accel.patched(), patch.dict(kernels, {} if way == "dispatch" else forced):
        forget_decisions()
        yield


@contextlib.contextmanager
def in_one_kernel() -> Iterator[None]:
    """Attention, and its gradient, by Triton's kernels, whatever their parts would cost."""
    kernels = get_backend("triton").kernels
    fixed = {op: replace(kernel, prefers_unfused=lambda spec: False)
             for op, kernel in kernels.items() if op.startswith("attention")}  # fmt: skip
    with patch.dict(kernels, fixed):
        forget_decisions()
        yield
    forget_decisions()


def within_memory(fn: Callable[[], Any]) -> Any:
    """The result, or None where memory runs out."""
    try:
        return fn()
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def epochs(graph: str, name: str, rounds: int) -> dict[str, Any]:
    """Epochs on a CPU by every way."""
    csr = graphs.load(graph)
    edge_index, nodes = graphs.edge_list(csr), csr[0].numel() - 1
    torch.manual_seed(0)
    x, y = torch.randn(nodes, 128), torch.randint(40, (nodes,))
    state, calls, outs = MODELS[name]().state_dict(), {}, {}
    for way in WAYS:
        model = MODELS[name]()
        model.load_state_dict(state)
        with running(way), torch.no_grad():
            outs[way] = model.eval()(x, edge_index)
        epoch = epoch_of(model.train(), (x, edge_index), y)
        for what, call in (("", epoch), (" forward", partial(model, x, edge_index))):
            calls[f"{way}{what}"] = partial(_by, way, call)
    for way in WAYS[1:]:
        must_agree([outs[way]], [outs["parts"]], ALLOWED[torch.float32], f"{name}, {way}")
    times = timing.in_turns(calls, "cpu", rounds)
    row = {f"{what.replace(' ', '_')}_ms": time.median for what, time in times.items()}
    over = row["parts_ms"] / row["dispatch_ms"]
    return {"N": nodes, "E": edge_index.size(1), **row, "parts_over_dispatch": over}


def _by(way: str, call: Callable[[], Any]) -> None:
    with running(way):
        torch.manual_seed(0)
        call()


def trained(
    run: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor, right: list[Tensor], what: str,
    budget: float,
) -> dict[str, float]:  # fmt: skip
    """Times of a way, forward and with all gradients, once its results agree with the first's."""

    def train() -> list[Tensor]:
        return [*torch.autograd.grad(run(), leaves, grad)]

    with torch.no_grad():
        for _ in range(9):  # dispatch knows the graph after that
            out = run()
        forward = timing.timed(run, "cuda", budget=budget).median
    found = [out, *train()]
    right[:] = right or found
    must_agree(found, right, ALLOWED[grad.dtype], what)
    return {"forward_ms": forward, "ms": timing.timed(train, "cuda", budget=budget).median,
            "peak_mib": timing.peak_memory(train)}  # fmt: skip


def fused(graph: Graph, form: str, heads: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Triton's kernel against its parts."""
    score, value, shapes = FORMS[form]
    nodes = graph.num_rows
    torch.manual_seed(0)
    leaves = [
        torch.randn(1 if s == "1" else nodes, heads, 1 if s == "H" else width, device="cuda")
        .div_(4).to(dtype).requires_grad_() for s in shapes if s != "M"
    ]  # fmt: skip
    kept = torch.rand(graph.num_edges, heads, 1, device="cuda") < 0.4
    masks = [kept.to(dtype) / 0.4] if "M" in shapes else []
    grad = torch.randn(nodes, heads, width, device="cuda").to(dtype)

    def given() -> list[Tensor]:
        return [t.expand(nodes, -1, -1) if t.size(0) == 1 else t for t in leaves] + masks

    row: dict[str, Any] = {"form": form, "heads": heads, "width": width,
                           "dtype": str(dtype).removeprefix("torch.")}  # fmt: skip
    right: list[Tensor] = []
    for way, run in (
        ("parts", lambda: unfused(graph, score, value, given(), edge_order=False)),
        ("one", lambda: ops.attention(graph, score, value, given())),
    ):
        with in_one_kernel():
            found = within_memory(lambda run=run: trained(run, leaves, grad, right, form, 0.1))
        for name in ("forward_ms", "ms"):
            row[f"{way}_{name}"] = found[name] if found else nan
    return row


def agnn_epochs(name: str) -> Iterator[dict[str, Any]]:
    """AGNN, patched and stock."""
    csr = graphs.load(name, device="cuda")
    edge_index, nodes = graphs.edge_list(csr), csr[0].numel() - 1
    torch.manual_seed(0)
    x = torch.randn(nodes, 96, device="cuda")
    y = torch.randint(16, (nodes,), device="cuda")
    right: list[Tensor] = []

    def train() -> dict[str, float]:
        torch.manual_seed(1)
        model = agnn(96, 16).cuda()
        with torch.no_grad():
            out = model(x, edge_index)
        right[:] = right or [out]
        must_agree([out], right, 1e-2, f"AGNN on {name}")
        epoch = epoch_of(model, (x, edge_index), y)
        for _ in range(3):  # four layers each: dispatch knows the graph after that
            epoch()
        return {"ms": timing.timed(epoch, "cuda", budget=0.5).median,
                "peak_mib": timing.peak_memory(epoch)}  # fmt: skip

    for backend in ("patched", "stock"):
        with patched(backend == "patched"):
            found = within_memory(train) or {"ms": nan, "peak_mib": nan}
        yield {"what": "AGNN epoch", "graph": name, "by": backend, "forward_ms": nan, **found}


def dot_products(name: str) -> Iterator[dict[str, Any]]:
    """The operator of TransformerConv, one head."""
    graph = graph_of(name)
    sharing = per_column(reuse_of(graph.csr()))[-1]
    source, target = graph.col.long(), torch.repeat_interleave(graph.rowptr.diff().long())
    torch.manual_seed(0)
    *operands, grad = (torch.randn(graph.num_rows, 1, WIDTH, device="cuda").half().requires_grad_()
                       for _ in range(4))  # fmt: skip

    def stock() -> Tensor:
        query, key, value = (t.squeeze(1) for t in operands)
        scores = (query[target] * key[source]).sum(-1) / WIDTH**0.5
        weights = softmax(scores, target, num_nodes=graph.num_rows)
        messages = value[source] * weights.unsqueeze(-1)
        return value.new_zeros(value.shape).index_add_(0, target, messages).unsqueeze(1)

    def parts() -> Tensor:
        return unfused(graph, SCORE, VALUE, operands, edge_order=False)

    def whole() -> Tensor:
        return ops.attention(graph, SCORE, VALUE, operands)

    free = contextlib.nullcontext
    ways: dict[str, tuple[Any, Callable[[], Tensor]]] = {
        "dispatch": (free, whole),
        "parts": (free, parts),
        "parts, CUDA cores": (partial(pyg_accel.use_backend, "triton"), parts),
        "Triton, one kernel": (in_one_kernel, whole),
        "stock": (free, stock),
    }
    right: list[Tensor] = []
    for way, (context, run) in ways.items():
        with context():
            found = within_memory(
                lambda run=run, way=way: trained(run, operands, grad.detach(), right, way, 0.2)
            )
        yield {"what": f"attention {WIDTH} fp16", "graph": name, "by": way,
               **(found or dict.fromkeys(("forward_ms", "ms", "peak_mib"), nan)),
               "sharing": sharing}  # fmt: skip


if __name__ == "__main__":
    main()
