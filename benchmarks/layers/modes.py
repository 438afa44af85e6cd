"""What patch() does with every layer in every mode: formula, backend, and how the call runs.

    python -m benchmarks.layers.modes

writes tests/layer_modes.csv, a row per layer, option and mode, which tests/test_layer_modes.py
compares with what happens: a row may improve, and never lose. Sizes do not matter (``always``); the
graph is small and on the CPU. Columns:

- ``runs``: ``recorded``: a warm call runs what an earlier one recorded; ``traced``: the message is
  traced in each call; ``partly``: PyG runs a part of it; ``PyG``: all of it. Under torch.compile,
  where a call is traced when it is compiled: ``compiled``. ``raises``: the call fails.
- ``formula``, ``backend``, ``reason``: those of ``report()``; of a call that fails what it raises.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import pyg_accel
from benchmarks.layers.cases import CASES, Case, Inputs, inputs
from benchmarks.layers.user_cases import USER_CASES
from benchmarks.tools.timing import ROOT
from benchmarks.tools.variants import report
from pyg_accel.patching.lazy import Tracer
from pyg_accel.settings import settings

PATH = ROOT / "tests" / "layer_modes.csv"
ALL = CASES | USER_CASES
MODES = ("inference", "training", "new graph each call", "autocast", "compile")
FIELDS = ["layer", "option", "mode", "runs", "formula", "backend", "reason"]
# From the worst to the best.
RUNS = ("raises", "PyG", "partly", "traced", "compiled", "recorded")
Row = dict[str, str]
NODES, EDGES, WIDTH = 50, 300, 16
WARM_CALLS = 3  # the first call of a kind is traced, the second may be


@contextlib.contextmanager
def traces() -> Iterator[list[Tracer]]:
    """Collect the traces that are entered."""
    entered: list[Tracer] = []
    original = Tracer.__enter__

    def enter(self: Tracer) -> Tracer:
        entered.append(self)
        return original(self)

    Tracer.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        Tracer.__enter__ = original  # type: ignore[method-assign]


def new(graph: Inputs) -> Inputs:
    """The same numbers in other tensors."""
    return Inputs(*(t.clone() for t in dataclasses.astuple(graph)))


def run(model: torch.nn.Module, case: Case, graph: Inputs, mode: str) -> None:
    """Call a model once in a mode."""
    train = mode == "training"
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")
    with torch.set_grad_enabled(train), autocast:
        out = model(*case.call(graph))
    if train:
        sum(t.sum() for t in tree_leaves(out) if isinstance(t, Tensor)).backward()


def row(layer: str, option: str, mode: str) -> Row:
    """Return the row of a case in a mode, under patch() and with settings.always."""
    try:
        found = _reported(ALL[layer, option], mode)
    except Exception as error:
        text = str(error).partition("\n")[0]
        found = {"runs": "raises", "formula": "", "backend": "",
                 "reason": f"{type(error).__name__}: {text}"}  # fmt: skip
    return {"layer": layer, "option": option, "mode": mode} | found


def _reported(case: Case, mode: str) -> Row:
    """Run a case in a mode; return what the report says of a warm call."""
    torch.manual_seed(0)
    graph = inputs(NODES, EDGES, WIDTH, "cpu")
    model = case.make(WIDTH).train(mode == "training")
    graph.x.requires_grad_(mode == "training")
    compiles = mode == "compile"
    if compiles:
        torch._dynamo.reset()
        run(model, case, graph, mode)  # parameters that are made in the first call
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    for _ in range(0 if compiles else WARM_CALLS):
        run(model, case, graph, mode)
        graph = new(graph) if mode == "new graph each call" else graph
    pyg_accel.reset_report()
    with traces() as entered:
        run(model, case, graph, mode)
    rows = report()
    ours = [r for r in rows if r.backend != "PyG"]
    if not ours:
        runs = "PyG"
    elif len(ours) < len(rows):
        runs = "partly"
    else:
        runs = "compiled" if compiles else "traced" if entered else "recorded"
    return {
        "runs": runs,
        "formula": "; ".join(sorted({r.formula for r in ours})),
        "backend": "+".join(sorted({r.backend for r in rows})),
        "reason": "; ".join(sorted({r.reason for r in rows if r.reason})),
    }


def losses(before: Row, now: Row) -> list[str]:
    """Say in which way a row is worse than it was."""
    found = []
    if RUNS.index(now["runs"]) < RUNS.index(before["runs"]):
        found.append(f"runs {now['runs']} instead of {before['runs']}: {now['reason']}")
    missing = set(before["formula"].split("; ")) - {"", *now["formula"].split("; ")}
    found += [f"no longer computes {formula}" for formula in sorted(missing)]
    if now["backend"] != before["backend"] and before["formula"]:
        found.append(f"runs on {now['backend']} instead of {before['backend']}")
    return found


@functools.cache
def recorded() -> dict[tuple[str, str, str], Row]:
    """The table as it was written, by layer, option and mode."""
    with PATH.open(newline="") as file:
        return {(r["layer"], r["option"], r["mode"]): r for r in csv.DictReader(file)}


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    settings.always, settings.tuning = True, ""
    torch.set_num_threads(1)
    with pyg_accel.patched():
        rows = [row(layer, option, mode) for layer, option in ALL for mode in MODES]
    with PATH.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
