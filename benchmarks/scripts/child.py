"""Runs one script, and notes when each of its backward passes ends, with which loss.

    python -m benchmarks.scripts.child OUT TURNS STEPS SECONDS DEVICE MODEL SCRIPT [ARGUMENTS]

It writes OUT, as JSON, when the script ends or has made so many steps, or the seconds are over
since the first one. After a turn it sends ``turn`` to the connection TURNS, a file descriptor, and
waits for an answer. Under ``python -m pyg_accel run -m benchmarks.scripts.child ...`` the script is
accelerated, and its model is what `optimize()` or `graphed()` makes of it where MODEL is
``optimized`` or ``graphed``. Where it is ``alternating``, blocks of steps are stock PyG's and
accelerated in turns, and the script is run again until it has made its steps. Times are those of
the processor since the process began, on a GPU those of the clock without pauses.
"""

import json
import random
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.scripts import data, ogb

TURN = 0.05  # seconds
BLOCK, WARM_UP = 6, 30  # alternating steps; a block is as long as epochs of 1, 2, 3 or 6 batches
FIRST = 10  # times the seconds until the end of the first step: kernels are compiled


class Enough(BaseException):
    """The script has made its steps."""


def main(
    out: str, connection: str, most: str, seconds: str, device: str, model: str, script: str,
    *arguments: str,
) -> None:  # fmt: skip
    losses: list[float] = []
    ends: list[float] = []
    modes: list[str] = []  # of alternating steps, empty for the first of a block
    away = ExitStack()
    backward = torch.Tensor.backward
    turns = Connection(int(connection))
    born, began = psutil.Process().create_time(), 0.0

    def clock() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.time() - born

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal began
        if self.numel() == 1:
            losses.append(self.item())
        backward(self, *args, **kwargs)
        ends.append(clock())
        if model == "alternating":
            alternate()
        if len(ends) >= int(most):
            raise Enough
        if ends[-1] - began >= TURN:
            pause()
            began = clock()

    def alternate() -> None:
        """Note the mode of a step, and begin another block after the last of one."""
        block, step = divmod(len(ends) - 1 - WARM_UP, BLOCK)
        modes.append("" if block < 0 or step == 0 else ("patched", "stock")[block % 2])
        if step == BLOCK - 1 and block >= -1:
            away.enter_context(stock_pyg()) if block % 2 == 0 else away.close()

    def pause() -> None:
        """Wait for the next turn."""
        nonlocal born
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
        begin = time.time()
        turns.send_bytes(b"turn")
        turns.recv_bytes()
        born += time.time() - begin
        signal.setitimer(signal.ITIMER_REAL, int(seconds) if len(ends) == 1 else left)

    def late(*_: Any) -> None:
        raise Enough

    torch.Tensor.backward = noted  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGALRM, late)
    torch.manual_seed(12345)
    np.random.seed(12345)
    random.seed(12345)
    data.install()
    ogb.install()
    note: Callable[[], str] = str
    # What imports pyg_accel, which stock PyG lacks.
    if model == "alternating":
        from benchmarks.tools.variants import stock_pyg
    elif model:
        from benchmarks.scripts.models import change

        note = change(model)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    error = ""
    signal.setitimer(signal.ITIMER_REAL, FIRST * int(seconds))
    try:
        runpy.run_path(script, run_name="__main__")
        while model == "alternating" and ends:
            runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    except BaseException as raised:  # whatever the script raises is its result
        error = f"{type(raised).__name__}: {raised}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    result = {"losses": losses, "ends": ends, "error": error, "peak_mib": peak, "note": note(),
              "parts": data.parts, "modes": modes}  # fmt: skip
    Path(out).write_text(json.dumps(result))
    turns.send_bytes(b"end")


if __name__ == "__main__":
    main(*sys.argv[1:])
