"""DGL as a peer, in the Python environment that PYG_ACCEL_DGL_PYTHON names.

DGL 1.1.3 has the CPU kernels (libxsmm) that DGL was tuned with, and wants older packages than this
project does. So it runs in a worker process, `dgl_worker.py`, which takes its own time. Arrays
travel through files in a temporary folder, requests and replies as one line of JSON each.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, Inputs

PYTHON_VARIABLE = "PYG_ACCEL_DGL_PYTHON"
WORKER = Path(__file__).with_name("dgl_worker.py")


class Dgl:
    """DGL's gspmm and gsddmm, which its `update_all` calls."""

    name = "DGL"

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._loaded: Inputs | None = None
        self._has_edge_features = False

    def reasons(self, case: Case) -> list[str]:
        missing = [] if os.environ.get(PYTHON_VARIABLE) else [f"{PYTHON_VARIABLE} is not set"]
        if case.op == "gspmm" and case.formula not in _OPERATIONS:
            missing.append(f"{case.formula} is not translated for DGL")
        return missing

    def prepare(self, case: Case, inputs: Inputs) -> "RemoteCall":
        if self._worker is None:
            self._worker = Worker(os.environ[PYTHON_VARIABLE])
        self._load(inputs, edge_features=case.op == "gspmm")
        key = case.formula or (case.op + " weighted" * case.weighted)
        return RemoteCall(self._worker, {**_OPERATIONS[key], "reduce": case.reduce})

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._worker = self._loaded = None

    def _load(self, inputs: Inputs, *, edge_features: bool) -> None:
        """Send graph and operands, unless the worker has them; [E, F] ones only when needed."""
        if self._loaded is inputs and self._has_edge_features >= edge_features:
            return
        names = ["rowptr", "col", "weight", "u", "v", *(["e"] if edge_features else [])]
        path = self._worker.folder / "inputs.npz"
        np.savez(path, **{name: getattr(inputs, name).numpy() for name in names})
        self._worker.ask({"load": str(path)})
        path.unlink()
        self._loaded, self._has_edge_features = inputs, edge_features


class RemoteCall:
    """One operation in the worker: called it gives the output, and it takes its own time.

    Args:
        worker: that has the operands.
        request: which operation, as the worker reads it.
        clock: a function of `time`.
    """

    def __init__(
        self, worker: "Worker", request: dict[str, Any], clock: str = "perf_counter"
    ) -> None:
        self._worker, self._request, self._clock = worker, request, clock

    def __call__(self) -> Tensor:
        return self.outputs()[0].squeeze(-1)  # of a dot product

    def outputs(self) -> list[Tensor]:
        """The output, and the gradients of the operands where they are asked for."""
        path = self._worker.folder / "output.npz"
        self._worker.ask({"run": self._request, "output": str(path)})
        with np.load(path) as stored:
            return [torch.from_numpy(stored[name]) for name in stored.files]

    def lap(self, calls: int) -> float:
        """Seconds that `calls` calls in a row took in the worker."""
        request = {"run": self._request, "calls": calls, "clock": self._clock}
        return self._worker.ask(request)["seconds"]


class Worker:
    """A process of the other environment, with as many threads as torch has here."""

    def __init__(self, python: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="pyg_accel-")
        self.folder = Path(self._temporary.name)
        threads = str(torch.get_num_threads())
        environment = {**os.environ, "DGLBACKEND": "pytorch", "OMP_NUM_THREADS": threads}
        environment.pop("PYTHONPATH", None)  # it belongs to this environment
        self._process = subprocess.Popen(
            [python, str(WORKER), threads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError(f"the DGL worker ended with code {self._process.wait()}; see above")
        return json.loads(reply)

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._temporary.cleanup()


def _operation(name: str, *operands: str, relu: bool = False) -> dict[str, Any]:
    return {"operation": name, "operands": operands, "relu": relu}


# What gspmm cannot do in one call (a relu, an operand of the target), DGL computes on the edges.
_OPERATIONS = {
    "spmm": _operation("copy_lhs", "u"),
    "spmm weighted": _operation("mul", "u", "weight"),
    "sddmm": _operation("dot", "u", "v"),
    "add(u0,e1)": _operation("add", "u", "e"),
    "mul(u0,e1)": _operation("mul", "u", "e"),
    "relu(add(u0,e1))": _operation("add", "u", "e", relu=True),
    "sub(v0,u1)": _operation("sub", "v", "u"),
}
