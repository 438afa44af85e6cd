"""``python -m pyg_accel tune``: measures the costs of calls on this machine.

They replace the shipped numbers, which are of other machines (:mod:`pyg_accel.costs`).
"""

import datetime
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

import pyg_accel
from pyg_accel.runtime.machine import Device
from pyg_accel.runtime.tuned import read_tuning, tuning_file
from pyg_accel.tuning.sizes import measure_costs

__all__ = ["tune"]


def tune(kind: str, path: Path | None = None) -> dict[str, Any]:
    """Measure a device, and write the results to the file that later processes use.

    This takes seconds, in which the machine should be idle.

    Args:
        kind: ``"cpu"``, with as many threads as torch uses, or ``"cuda"``, the current device.
        path: of the file, by default the setting ``tuning``. Entries of other devices stay.

    Returns:
        The entry of the device.

    Raises:
        ValueError: for another kind, a GPU that is not there, and a file that cannot be read.
        OSError: if the file cannot be written.
    """
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"expected 'kind' to be 'cpu' or 'cuda' (got {kind!r})")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device")
    path = path or tuning_file()
    devices = read_tuning(path) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    measured: dict[str, Any] = {
        "measured": {
            "device": str(Device.of(kind)), "date": datetime.date.today().isoformat(),
            "pyg_accel": pyg_accel.__version__, "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }  # fmt: skip
    # Fails before the measurement if it must; and no process ever reads half a file.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        measured["size"] = measure_costs(kind)
        whole = Path(folder, path.name)
        whole.write_text(json.dumps(devices | {Device.of(kind).slug: measured}, indent=2) + "\n")
        whole.replace(path)
    return measured
