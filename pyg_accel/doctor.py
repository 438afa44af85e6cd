"""Whether backends work: each runs a small sum in another process, which may crash.

``python -m pyg_accel.doctor NAME...`` is that process; ``python -m pyg_accel doctor`` starts it.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from pyg_accel.backends import Backend, backends, use_backend
from pyg_accel.errors import BackendNotSupported
from pyg_accel.graph import Graph
from pyg_accel.ops import gspmm

__all__ = ["Finding", "examine", "main"]

_MARK = "pyg_accel.doctor: "  # of our lines, among what backends may print
_SECONDS = 300  # for all of them: the first kernels of Triton take some


class Finding(NamedTuple):
    """What was found of a backend.

    Attributes:
        name: of the backend.
        reasons: why it cannot be used; empty if it can.
        info: facts about its build.
    """

    name: str
    reasons: list[str]
    info: dict[str, Any]


def examine() -> list[Finding]:
    """Try every backend, in processes of their own."""
    found: list[Finding] = []
    while True:
        known = [finding.name for finding in found]
        command = [sys.executable, "-m", "pyg_accel.doctor", *known]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            out, ending = run.stdout, _ending(run.returncode, run.stderr)
        except subprocess.TimeoutExpired as error:
            out = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            ending = f"its test did not end within {_SECONDS} seconds"
        said = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
        begun = ""
        for line in said:
            if line.startswith("{"):
                found.append(Finding(**json.loads(line)))
                begun = ""
            else:
                begun = line
        if not ending:
            return found
        if not begun:  # before or between backends: another process would end the same way
            return [*found, Finding("the others", [ending], {})]
        found.append(Finding(begun, [ending], {}))


def _ending(status: int, errors: str) -> str:
    """How a process ended; empty if as it should."""
    if status == 0:
        return ""
    how = f"its test ends with status {status}"
    if status < 0:
        how = f"its test crashes ({signal.Signals(-status).name})"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"{how}: {lines[-1]}" if lines else how


def main(names: Collection[str]) -> None:
    """Try all backends but those of these names, and print a line before and after each."""
    for name, backend in backends().items():
        if name in names:
            continue
        print(f"{_MARK}{name}", flush=True)
        reasons = backend.unavailable_reasons()
        info = {} if reasons else backend.info()
        reasons = reasons or _wrong(backend)
        said = {"name": name, "reasons": reasons, "info": info}
        print(_MARK + json.dumps(said, default=str), flush=True)


def _wrong(backend: Backend) -> list[str]:
    """What is wrong with a sum of three edges; nothing where a backend has no such kernel."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        graph = Graph.from_edge_index(torch.tensor([[0, 1, 1], [1, 0, 1]], device=device), (2, 2))
        rows = {"u0": [[1.0, 2.0], [3.0, 4.0]], "e0": [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]}
        for formula, values in rows.items():
            given = torch.tensor(values, device=device)
            try:
                with use_backend(backend.name):
                    out = gspmm(graph, formula, [given])
            except BackendNotSupported:
                continue
            if out.tolist() != [[3.0, 4.0], [4.0, 6.0]]:
                return [f"a sum of three edges on {device} is wrong: {out.tolist()}"]
    return []


if __name__ == "__main__":
    main(sys.argv[1:])
