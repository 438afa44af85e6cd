"""Checkpoints in one file: written by one rank, completely or not at all, read by all ranks.

For states that are sharded over ranks there is ``torch.distributed.checkpoint``, which writes a
folder file by file and so may leave an incomplete one.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from pyg_accel.distributed.wire import agree, world
from pyg_accel.errors import FolderError

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint on the first rank; every rank calls it, and learns whether it succeeded.

    The file of that name is replaced once the new one is complete, so it is never incomplete.

    Args:
        path: the file.
        state: ``state_dict()`` of model and optimizer, numbers, texts; equal on all ranks.

    Raises:
        NotDistributable: on every rank, if it could not be written.
    """
    wire, path = world(), Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")

    def write() -> dict[str, str]:
        if wire.rank == 0:
            try:
                with temporary.open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except (OSError, RuntimeError) as error:  # torch raises either when the disk is full
                raise FolderError(f"the checkpoint {path} could not be written: {error}") from error
            finally:
                temporary.unlink(missing_ok=True)
        return {}

    agree(wire, write)


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint on every rank; the number of ranks may differ from before.

    Only tensors and plain values are read (``weights_only``); no code is run.

    Raises:
        NotDistributable: on every rank, if one of them could not read it.
    """
    state: dict[str, Any] = {}

    def read() -> dict[str, str]:
        try:
            state.update(torch.load(path, map_location=map_location, weights_only=True))
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FolderError(f"{path} is no checkpoint, or damaged: {text}") from error
        return {"size of the checkpoint": str(os.path.getsize(path))}

    agree(world(), read)
    return state
