"""Reads the JSON file of what ``python -m pyg_accel tune`` has measured on this machine.

The file has an object for each device, by its :attr:`~pyg_accel.machine.Device.slug` or, for all
devices of a kind, ``"cpu"`` or ``"cuda"``. An object may have these parts:

- ``"size"``: the numbers that decide from which size on calls are accelerated; see
  :mod:`pyg_accel.patching.size`.
- ``"launch"``: launch parameters of Triton's kernels; see :mod:`pyg_accel.backends.triton.launch`.
- ``"measured"``: when and with which versions; only for information.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pyg_accel.machine import Device
from pyg_accel.settings import Settings, settings

__all__ = ["device_of_kind", "read_tuning", "tuned", "tuned_launch", "tuning_file"]


def tuning_file() -> Path:
    """Return the path of the file, which need not exist."""
    return Path(settings.tuning).expanduser()


def tuned(device: Device) -> dict[str, Any]:
    """Return the object of a device in the file; empty if there is none, or no file.

    Raises:
        ValueError: naming the file, if it does not have an object for each device, or if the
            setting names a file that does not exist.
    """
    name = settings.tuning
    devices = _read(tuning_file(), name != Settings.tuning.default) if name else {}
    return devices.get(device.slug) or devices.get(device.kind) or {}


def tuned_launch(name: str) -> dict[str, dict[str, int]]:
    """Return the launch parameters that were measured on a GPU, for each class of graphs.

    Args:
        name: of the GPU.

    Raises:
        ValueError: naming the file, if a parameter is not a positive number.
    """
    parameters: dict[str, dict[str, int]] = tuned(Device("cuda", name)).get("launch", {})
    try:
        wrong = [
            f"{kind}: {name}"
            for kind, entry in parameters.items()
            for name, value in entry.items()
            if type(value) is not int or value < 1
        ]
    except AttributeError:
        wrong = ["no objects"]
    if wrong:
        raise ValueError(f"expected launch parameters in '{tuning_file()}' ({', '.join(wrong)})")
    return parameters


@lru_cache(maxsize=16)
def device_of_kind(kind: str, threads: int) -> Device:
    """Return the device of a kind; that of CUDA is the current one.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
        threads: ``torch.get_num_threads()``, a part of the name of a CPU.
    """
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        return Device.of(kind)
    return Device(kind, kind)  # of fake tensors, or of another kind


@lru_cache(maxsize=4)
def _read(path: Path, required: bool) -> dict[str, dict[str, Any]]:
    return read_tuning(path) if required or path.exists() else {}


def read_tuning(path: Path) -> dict[str, dict[str, Any]]:
    """Return the object of each device in a file.

    Raises:
        ValueError: naming the file, if it does not have an object for each device.
    """
    try:
        devices = json.loads(path.read_text())
        if not isinstance(devices, dict) or not all(isinstance(d, dict) for d in devices.values()):
            raise TypeError("the file must hold an object for each device")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"expected tuned parameters in '{path}': {error!r}") from error
    return devices
