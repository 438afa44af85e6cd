"""What is captured: a model, or what a subclass makes of a function."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.cuda_graphs.call import buffers_of, modules_of

__all__ = ["Subject"]


class Subject:
    """A model as what is captured.

    Args:
        call: makes an eager call.
        roots: modules that take part.
        name: for the report.
    """

    def __init__(
        self, call: Callable[..., Any], roots: Iterable[torch.nn.Module], name: str
    ) -> None:
        self.call, self.roots, self.name = call, tuple(dict.fromkeys(roots)), name

    def reasons(self) -> list[str]:
        """Return why no call can be captured."""
        return []

    def key(self) -> Any:
        """Return what else than its modules decides what a call does."""
        return None

    def tensors(self) -> list[Tensor]:
        """Return what a call may change in place."""
        return buffers_of(modules_of(self.roots))

    def evidence(self) -> dict[str, list[Tensor]]:
        """Return what of that tells whether a call was right."""
        return {"buffer": buffers_of(modules_of(self.roots))}

    def prepare(self) -> None:
        """Get ready to be captured."""

    def recorded(self) -> Any:
        """Return what a call leaves behind, after a recording was made."""

    def finish(self, left: Any) -> None:
        """Leave that behind, after a recording was replayed."""
