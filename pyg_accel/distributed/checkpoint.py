"""Checkpoints: written by one rank, whole or not at all, read by any number of ranks."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from pyg_accel.distributed.agreement import agree
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import FolderError

__all__ = ["load_checkpoint", "save_checkpoint"]


def _wire() -> Wire:
    on_gpu = torch.distributed.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Wire(None, device)


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint on the first rank; every rank calls it, and knows at the end whether.

    The file of that name is replaced when the new one is complete, so there is always a whole one.

    Args:
        path: of the file.
        state: ``state_dict()`` of model and optimizer, numbers, texts; alike on all ranks.

    Raises:
        NotDistributable: on every rank, if it could not be written.
    """
    wire = _wire()

    def write() -> dict[str, str]:
        if wire.rank == 0:
            _write(Path(path), state)
        return {}

    agree(wire, write)


def _write(path: Path, state: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # a full disk is either, as torch's writer sees it
        raise FolderError(f"the checkpoint {path} could not be written: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint on every rank, of which there may be another number than before.

    Only tensors and plain values are read (``weights_only``), no code is run.

    Raises:
        NotDistributable: on every rank, if one of them could not read it.
    """
    found: dict[str, Any] = {}

    def read() -> dict[str, str]:
        try:
            found.update(torch.load(path, map_location=map_location, weights_only=True))
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FolderError(f"{path} is no checkpoint, or damaged: {text}") from error
        return {"size of the checkpoint": str(os.path.getsize(path))}

    agree(_wire(), read)
    return found
