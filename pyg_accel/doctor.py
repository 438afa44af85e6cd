"""Tests whether backends work: each computes a small sum in another process, which may crash.

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

_MARK = "pyg_accel.doctor: "  # prefix of our lines, as backends may print others
_SECONDS = 300  # for all backends: Triton compiles its first kernels


class Finding(NamedTuple):
    """The result of the test of a backend.

    Attributes:
        name: of the backend.
        reasons: why it cannot be used; empty if it can.
        info: facts about its build.
    """

    name: str
    reasons: list[str]
    info: dict[str, Any]


def examine() -> list[Finding]:
    """Test every backend in another process; after a crash, the others in a new one."""
    findings: list[Finding] = []
    while True:
        tested = [finding.name for finding in findings]
        command = [sys.executable, "-m", "pyg_accel.doctor", *tested]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            out, ending = run.stdout, _ending(run.returncode, run.stderr)
        except subprocess.TimeoutExpired as error:
            out = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            ending = f"its test did not end within {_SECONDS} seconds"
        lines = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
        running = ""
        for line in lines:
            if line.startswith("{"):
                findings.append(Finding(**json.loads(line)))
                running = ""
            else:
                running = line
        if not ending:
            return findings
        if not running:  # no backend was running: another process would end the same way
            return [*findings, Finding("the others", [ending], {})]
        findings.append(Finding(running, [ending], {}))


def _ending(status: int, errors: str) -> str:
    """Return how a process failed; empty if it did not."""
    if status == 0:
        return ""
    how = f"its test ends with status {status}"
    if status < 0:
        how = f"its test crashes ({signal.Signals(-status).name})"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"{how}: {lines[-1]}" if lines else how


def main(names: Collection[str]) -> None:
    """Test all backends except ``names``, and print a line before and after each."""
    for name, backend in backends().items():
        if name in names:
            continue
        print(f"{_MARK}{name}", flush=True)
        reasons = backend.unavailable_reasons()
        info = {} if reasons else backend.info()
        reasons = reasons or _wrong(backend)
        finding = {"name": name, "reasons": reasons, "info": info}
        print(_MARK + json.dumps(finding, default=str), flush=True)


def _wrong(backend: Backend) -> list[str]:
    """Return errors of a sum of three edges; empty if a backend has no kernel for it."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        graph = Graph.from_edge_index(torch.tensor([[0, 1, 1], [1, 0, 1]], device=device), (2, 2))
        rows = {"u0": [[1.0, 2.0], [3.0, 4.0]], "e0": [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]}
        for formula, values in rows.items():
            operand = torch.tensor(values, device=device)
            try:
                with use_backend(backend.name):
                    out = gspmm(graph, formula, [operand])
            except BackendNotSupported:
                continue
            if out.tolist() != [[3.0, 4.0], [4.0, 6.0]]:
                return [f"a sum of three edges on {device} is wrong: {out.tolist()}"]
    return []


if __name__ == "__main__":
    main(sys.argv[1:])
