"""Runs one script, and notes when each of its backward passes ends, with which loss.

    python -m benchmarks.scripts.child OUT STEPS SECONDS SCRIPT [ARGUMENTS]

It writes OUT, as JSON, when the script ends or has made so many steps, or after the seconds. Under
``python -m pyg_accel run -m benchmarks.scripts.child ...`` the script is accelerated.
"""

import json
import random
import resource
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.scripts import data


class Enough(BaseException):
    """The script has made its steps."""


def main(out: str, most: str, seconds: str, script: str, *arguments: str) -> None:
    losses: list[float] = []
    ends: list[float] = []
    backward = torch.Tensor.backward
    start = time.process_time()

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self.numel() == 1:
            losses.append(self.item())
        backward(self, *args, **kwargs)
        ends.append(time.process_time() - start)
        if len(ends) >= int(most):
            raise Enough

    def late(*_: Any) -> None:
        raise Enough

    torch.Tensor.backward = noted  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGALRM, late)
    torch.manual_seed(12345)
    np.random.seed(12345)
    random.seed(12345)
    data.install()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    error = ""
    signal.alarm(int(seconds))
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    except BaseException as raised:  # whatever the script raises is its result
        error = f"{type(raised).__name__}: {raised}"
    finally:
        signal.alarm(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {"losses": losses, "ends": ends, "error": error, "peak_mib": peak, "parts": data.parts}
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
