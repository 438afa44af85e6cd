"""Reads the JSON file of ``python -m pyg_accel tune``, with measurements of this machine.

The file has an object for each device, by its :attr:`.machine.Device.slug` or, for all
devices of a kind, ``"cpu"`` or ``"cuda"``. An object may have these parts:

- ``"size"``: the numbers that decide the least size of accelerated calls; see
  :mod:`pyg_accel.costs`.
- ``"measured"``: when and with which versions; only for information.
"""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pyg_accel.runtime.machine import Device
from pyg_accel.settings import Settings, settings

__all__ = ["device_of_kind", "read_tuning", "tuned", "tuning_file"]


def tuning_file() -> Path:
    """Return the path of the file, which need not exist.

    Raises:
        ValueError: if it is in the folder of a user who has none, as in many containers.
    """
    path = os.path.expanduser(settings.tuning)
    if path.startswith("~"):
        raise ValueError(f"there is no home folder for '{path}': set HOME, or let PYG_ACCEL_TUNING "
                         "name a file")  # fmt: skip
    return Path(path)


def tuned(device: Device) -> dict[str, Any]:
    """Return the object of a device in the file, or an empty one.

    Raises:
        ValueError: naming the file, if it is no tuning file, or if the setting names a file that
            does not exist.
    """
    devices = _read(settings.tuning) if settings.tuning else {}
    return devices.get(device.slug) or devices.get(device.kind) or {}


@lru_cache(maxsize=16)
def device_of_kind(kind: str, threads: int) -> Device:
    """Return the device of a kind: for CUDA, the current device.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
        threads: ``torch.get_num_threads()``, a part of the name of a CPU.
    """
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        return Device.of(kind)
    return Device(kind, kind)  # of fake tensors, or of another kind


@lru_cache(maxsize=4)
def _read(name: str) -> dict[str, dict[str, Any]]:
    # os.path.exists(), unlike pathlib's, is False for a folder that may not be read.
    if name == Settings.tuning.default and not os.path.exists(os.path.expanduser(name)):
        return {}
    return read_tuning(tuning_file())


def read_tuning(path: Path) -> dict[str, dict[str, Any]]:
    """Return the object of each device in a file.

    Raises:
        ValueError: naming the file, if it is no tuning file, or has costs that no machine has.
    """
    try:
        devices = json.loads(path.read_text())
        for device, parts in devices.items():
            if not parts.keys() & {"size", "launch", "measured"}:
                raise TypeError(f"'{device}' is no object of a device")
            for name, number in parts.get("size", {}).items():
                if type(number) not in (int, float) or not 1e-6 <= number <= 1e9:
                    raise TypeError(f"{name} of '{device}' is {number!r}, which no machine has")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected tuned parameters in '{path}': {error!r}") from error
    return devices  # type: ignore[no-any-return]
