"""Every pair of operands of DGL's binary-reduce and copy-reduce, as layers of PyG on a CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.papers.dgl_x86.binary_reduce [--messages ...]

A message is computed from values of the source (u), the target (v) or the edge (e), 64 features
each and one number an edge once, by a layer that a user of PyG would write; `v_sub_u` and the like
are there because a difference has two orders. It is reduced to the targets, forward and, for sums,
with the gradients of its operands, or stays on the edges (`edge_updater`). What is reduced to the
sources is the same on the reversed graph. Rows are of the layer as it is (`stock`), of the same
layer under `patch()` (`patched`) and of DGL where PYG_ACCEL_DGL_PYTHON names its environment
(README, Peers), which calls a kernel for the message and one for its sum where it has none for
both. Edges are sorted by source, as PyG's `coalesce` leaves them.

Outputs and gradients are held against float64 before they are timed: one of ours that is wrong ends
the run, a wrong peer is marked in `correct`. Variants take turns; with OMP_NUM_THREADS=1 the clock
is that of the processor, for machines that others use. Rows are written case by case and those that
exist are skipped, so that an interrupted run goes on: delete the CSV file to begin anew.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pyg_accel
from benchmarks.kernels.dgl import PYTHON_VARIABLE, RemoteCall, Worker
from benchmarks.papers.dgl_x86.operand_pairs import (
    EDGES,
    FEATURES,
    LAYERS,
    MESSAGES,
    OPS,
    Message,
    Operands,
)
from benchmarks.tools import frames, results, timing, variants
from benchmarks.tools.timing import laps
from benchmarks.tools.variants import stock_pyg

NAME = "papers/dgl_x86/binary_reduce"
GRAPHS, QUICK_GRAPHS = ("arxiv-like@0.3", "rmat-169k@0.2"), ("arxiv-like@0.05",)
ROUNDS = 3  # turns of the variants
TOLERANCE = 1e-4  # of the largest number: fp32 sums in another order, over a hub's edges
WORK = (("sum", "forward"), ("sum", "training"), ("mean", "forward"), ("max", "forward"),
        (EDGES, "forward"))  # fmt: skip


def with_gradients(
    run: Callable[..., Tensor], values: Mapping[str, Tensor], message: Message,
    operands: Operands, *, train: bool,
) -> list[Tensor]:  # fmt: skip
    """The output, and the gradients of what the message reads if it is to train."""
    with torch.set_grad_enabled(train):
        out = run(**values)
    if not train:
        return [out]
    wanted = [values[end] for end in message.ends]
    return [out.detach(), *torch.autograd.grad(out, wanted, operands.grad(out))]


def truth(message: Message, reduce: str, operands: Operands, *, train: bool) -> list[Tensor]:
    """What is right, in float64, from the definition; a target without edges gets 0."""
    source, target = operands.edge_index

    def run(u: Tensor, v: Tensor, e: Tensor) -> Tensor:
        at_edges = {"u": lambda: u[source], "v": lambda: v[target], "e": lambda: e}
        messages = OPS[message.op](*(at_edges[end]() for end in message.ends))
        if reduce == EDGES:
            return messages
        zeros = messages.new_zeros(v.size(0), messages.size(1))
        if reduce == "sum":
            return zeros.index_add(0, target, messages)
        name, index = {"max": "amax"}.get(reduce, reduce), target[:, None].expand_as(messages)
        return zeros.scatter_reduce(0, index, messages, name, include_self=False)

    values = operands.of(message, torch.float64)
    return with_gradients(run, values, message, operands, train=train)


def largest_error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference as a part of the largest number; infinite for another shape."""
    return max(variants.relative_error(a, b) for a, b in zip(found, right, strict=True))


class Dgl:
    """A worker that has the graph and the values of messages."""

    def __init__(self, operands: Operands) -> None:
        self.worker, self.operands = Worker(os.environ[PYTHON_VARIABLE]), operands
        self.loaded: bool | None = None

    def call(self, message: Message, reduce: str, *, train: bool) -> RemoteCall:
        if self.loaded != message.scalar:
            self._load(message)
        name = {"u": "copy_lhs", "e": "copy_rhs"}.get(message.ends, message.op)
        request = {"operation": name, "operands": list(message.ends), "relu": False,
                   "reduce": None if reduce == EDGES else reduce, "train": train}  # fmt: skip
        return RemoteCall(self.worker, request, timing.clock_of("cpu").__name__)

    def _load(self, message: Message) -> None:
        path, held = self.worker.folder / "inputs.npz", self.operands
        arrays = {"rowptr": held.rowptr, "col": held.col, "edge": held.edge,
                  "grad": held.values["grad"], **held.of(message)}  # fmt: skip
        np.savez(path, **{name: array.detach().numpy() for name, array in arrays.items()})
        self.worker.ask({"load": str(path)})
        path.unlink()
        self.loaded = message.scalar

    def close(self) -> None:
        self.worker.stop()


def measure(
    message: Message, reduce: str, operands: Operands, dgl: Dgl | None, *, train: bool,
    seconds: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row a variant. `patch()` is on, and gives way to stock PyG."""
    layer = LAYERS[message.ends](OPS[message.op], reduce)
    values = operands.of(message)

    def step() -> list[Tensor]:
        run = partial(layer, edge_index=operands.edge_index)
        return with_gradients(run, values, message, operands, train=train)

    right = truth(message, reduce, operands, train=train)
    pyg_accel.reset_report()
    for _ in range(2):  # the second call knows the graph, and may take another path
        error = largest_error(step(), right)
        if not error <= TOLERANCE:
            raise AssertionError(f"off by {error:.2g} of the largest number")
    decided = variants.decided()
    with stock_pyg():
        rows = {"stock": {"error": largest_error(step(), right)}, "patched": {"error": error}}
    rows["patched"] |= decided
    remote = dgl.call(message, reduce, train=train) if dgl else None
    if remote:
        rows["DGL"] = {"error": largest_error(remote.outputs(), right)}
    del right
    calls = max(1, round(seconds / ROUNDS / remote.lap(1))) if remote else 0
    times: dict[str, list[float]] = {variant: [] for variant in rows}
    for _ in range(ROUNDS):
        with stock_pyg():
            times["stock"] += laps(step, "cpu", seconds / ROUNDS)
        times["patched"] += laps(step, "cpu", seconds / ROUNDS)
        if remote:
            times["DGL"].append(remote.lap(calls) / calls)
    for variant, row in rows.items():
        row |= {"variant": variant, **timing.quantiles(times[variant]).columns(),
                "correct": row["error"] <= TOLERANCE,
                "clock": timing.clock_of("cpu").__name__}  # fmt: skip
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, graphs=None, messages=MESSAGES, seconds=0.5)
    options = parser.parse_args(arguments)
    names = options.graphs or (QUICK_GRAPHS if options.quick else GRAPHS)
    seconds = 0.01 if options.quick else options.seconds
    rows = results.Rows(NAME, options, "cpu", frames.OPERANDS)
    cases = rows.missing(
        (graph, name, reduce, work)
        for graph, name, (reduce, work) in itertools.product(names, options.messages, WORK)
        if (name, reduce) != ("copy_e", EDGES)  # nothing to compute
    )
    with_dgl, held = bool(os.environ.get(PYTHON_VARIABLE)), ""
    if not with_dgl:
        print(f"left out, DGL: {PYTHON_VARIABLE} is not set")
    with pyg_accel.patched(), contextlib.ExitStack() as stack:
        for case in results.each(cases):
            if case[0] != held:
                stack.close()
                held, operands = case[0], Operands(case[0])
                dgl = stack.enter_context(contextlib.closing(Dgl(operands))) if with_dgl else None
                sizes = {"N": operands.rowptr.numel() - 1, "E": operands.col.numel(), "F": FEATURES}
            try:
                found = measure(MESSAGES[case[1]], case[2], operands, dgl,
                                train=case[3] == "training", seconds=seconds)  # fmt: skip
            except AssertionError as problem:
                raise AssertionError(f"{case}: {problem}") from problem
            rows.add(found, **dict(zip(frames.OPERANDS, case, strict=True)), **sizes)
    for peer, column in frames.operand_ratios(rows.done()).items():
        lost = column[column < frames.NOISE].sort_values()
        print(f"over {peer}: {frames.mean(column):.2f}, {len(lost)} of {column.count()} lost")
        for case, ratio in lost.items():
            print(f"  {ratio:.2f}  {', '.join(case)}")


if __name__ == "__main__":
    main()
