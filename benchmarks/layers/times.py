"""Every layer of torch_geometric.nn.conv, stock and patched, at default settings.

    python -m benchmarks.layers [--device cpu] [--quick] [--layers GATConv ...] [--edges 10000 ...]

A row per layer, option, size, width and pass: the least time of either variant, in turns, after
their outputs and gradients were compared; what `report()` says of the patched call; and whether it
makes a tensor of E x F numbers. With OMP_NUM_THREADS=1 the clock of a CPU is that of the processor,
for machines that others use. Rows are written as they are measured, and those that exist are
skipped, so that an interrupted run goes on: delete the CSV file to begin anew.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import pyg_accel
from benchmarks.layers.cases import CASES, Case, Inputs, inputs
from benchmarks.tools import results, variants
from benchmarks.tools.frames import NOISE
from benchmarks.tools.timing import laps
from benchmarks.tools.variants import stock_pyg
from pyg_accel.patching.dynamo_guards import Look

NAME = "layers/layers"
EDGES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
WIDTHS = (16, 64, 256)
ROUNDS = 5  # turns of the two variants
DEGREE = 10  # edges per node
MOST = 2**31  # numbers of a message tensor: larger cases would measure the lack of memory
TOLERANCE = 2e-3  # of the norm: fp32 sums in another order
CASE = ["layer", "option", "edges", "width", "pass"]
Step = Callable[[], list[Tensor]]


class Largest(Look):  # under other modes calls are PyG's
    """Looks for tensors with a row of features per edge."""

    def __init__(self, edges: int, width: int) -> None:
        super().__init__()
        self.numbers, self.found = edges * width, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.is_floating_point():
                self.found |= made.numel() >= self.numbers
        return out


def step_of(case: Case, model: torch.nn.Module, graph: Inputs, *, train: bool) -> Step:
    """A call, and its gradients if it is to train: outputs, then gradients."""
    args = case.call(graph)

    def step() -> list[Tensor]:
        with torch.set_grad_enabled(train):
            outs = [t for t in tree_leaves(model(*args)) if isinstance(t, Tensor)]
        if not train:
            return outs
        model.zero_grad()
        graph.x.grad = None
        sum((t.square().mean() for t in outs), torch.zeros(())).backward()
        grads = [p.grad for p in (graph.x, *model.parameters()) if p.grad is not None]
        return [t.detach() for t in (*outs, *grads)]

    return step


def largest_error(ours: Sequence[Tensor], stock: Sequence[Tensor]) -> float:
    """The largest difference of two tensors, as a part of their norm.

    Not of an element: where two messages are equal but for rounding, the gradient of their maximum
    may go to the other.
    """
    return max(
        (float((a - b).norm() / b.norm().clamp(min=1e-3))
         for a, b in zip(ours, stock, strict=True) if b.numel()), default=0.0,
    )  # fmt: skip


def measure(
    case: Case, graph: Inputs, width: int, device: str, *, train: bool, seconds: float
) -> dict[str, Any]:
    """The figures of a row."""
    torch.manual_seed(0)
    model = case.make(width).to(device)
    ours = step_of(case, model, graph, train=train)
    theirs = step_of(case, copy.deepcopy(model), graph, train=train)

    with stock_pyg():
        torch.manual_seed(1)
        wanted = theirs()
    for _ in range(2):  # the second call knows the graph, and may take another path
        torch.manual_seed(1)
        error = largest_error(ours(), wanted)
        if not error <= TOLERANCE:
            raise AssertionError(f"off by {error:.2g} of the norm")
    pyg_accel.reset_report()
    ours()
    found = variants.decided()
    with Largest(graph.edge_index.size(1), width) as seen:
        ours()
    least, share = {"stock": math.inf, "patched": math.inf}, seconds / ROUNDS
    for _ in range(ROUNDS):
        with stock_pyg():
            least["stock"] = min(least["stock"], *laps(theirs, device, share))
        least["patched"] = min(least["patched"], *laps(ours, device, share))
    return {
        "stock_ms": 1e3 * least["stock"], "patched_ms": 1e3 * least["patched"],
        "ratio": least["stock"] / least["patched"], "error": error, **found,
        "edge_tensor": seen.found,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(
        __doc__, devices=("cpu", "cuda"), quick="10,000 edges of 16 features", edges=EDGES,
        widths=WIDTHS, layers={layer: layer for layer, _ in CASES},
        passes={"forward": 0, "training": 0}, seconds=0.3,
    )  # fmt: skip
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.quick:
        options.edges, options.widths, options.seconds = (10_000,), (16,), 0.05
    rows = results.Rows(f"{NAME}_{options.device}", options, options.device, CASE)
    cases = [
        (*key, edges, width, name)
        for edges, width, key, name in itertools.product(options.edges, options.widths, CASES,
                                                         options.passes)
        if key[0] in options.layers and width <= CASES[key].largest and edges * width <= MOST
    ]  # fmt: skip
    with pyg_accel.patched():
        for case in results.each(rows.missing(cases)):
            layer, option, edges, width, name = case
            graph = inputs(max(edges // DEGREE, 2), edges, width, options.device)
            graph.x.requires_grad_()
            try:
                row = measure(CASES[layer, option], graph, width, options.device,
                              train=name == "training", seconds=options.seconds)  # fmt: skip
            except torch.OutOfMemoryError:
                row = {"reason": "out of memory"}
            except AssertionError as problem:
                raise AssertionError(f"{case}: {problem}") from problem
            rows.add([row], **dict(zip(CASE, case, strict=True)))
    frame = rows.done()
    for _, row in frame[frame["ratio"] < NOISE].sort_values("ratio").iterrows():
        print(f"{row['ratio']:.2f}  {', '.join(str(row[k]) for k in CASE)}  {row['backend']}")


if __name__ == "__main__":
    main()
