"""Running gspmm by the kernel that was chosen for calls of one kind."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import Decision, Kernel, OpSpec
from pyg_accel.backends.base import Bound
from pyg_accel.backends.dispatch import decide, situation
from pyg_accel.backends.notes import note_choice
from pyg_accel.backends.spec import shapes_of
from pyg_accel.cache import Bounded
from pyg_accel.column_reuse import kind_of
from pyg_accel.facts import Kind
from pyg_accel.formula import parse
from pyg_accel.graph import CSR
from pyg_accel.ops.steps import widest

__all__ = ["Launch", "facts_of_operands", "kernel_for", "run_gspmm"]

_MOST, _CHOICES = 256, 4096  # bound calls of a launch; choices of backends


class Launch:
    """Runs gspmm on operands of the same dtypes and trailing sizes in every call.

    Args:
        text: formula of the message.
        reduces: of the messages.
        want_arg: also return winners.
    """

    def __init__(self, text: str, reduces: tuple[str, ...], *, want_arg: bool) -> None:
        self.text, self.reduces, self.want_arg = text, reduces, want_arg
        # By everything else that the choice depends on: a backend's name, and what runs the calls.
        self._bound: Bounded[tuple[Any, ...], tuple[str, Bound]] = Bounded(_MOST)

    def __call__(self, csr: CSR, operands: list[Tensor]) -> list[Tensor]:
        """Run :func:`pyg_accel.backends.reference.gspmm` on the cheapest backend.

        Args:
            csr: the graph.
            operands: [rows, H | 1, F | 1], contiguous within a row.
        """
        kind = kind_of(csr)
        rounded = csr.col.is_cuda and torch.get_float32_matmul_precision() != "highest"
        strides = [t.stride(0) for t in operands]
        key = (kind, csr.eid is None, rounded, situation(), *strides)
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._bind(csr, kind, operands, rounded)
        name, run = bound
        note_choice(name)
        return run(csr, operands)

    def _bind(
        self, csr: CSR, kind: Kind, operands: list[Tensor], rounded: bool
    ) -> tuple[str, Bound]:
        like, shapes = next(t for t in operands if t.is_floating_point()), shapes_of(operands)
        heads, width = widest(shapes)
        spec = OpSpec.on("gspmm", csr, like, heads, width, formula=self.text, reduces=self.reduces,
                         shapes=shapes, sharing=kind.sharing, rounded=rounded)  # fmt: skip
        decision = decide(spec)
        kernel, name = decision.kernel, decision.backend.name
        formula, reduces, want_arg = parse(self.text), list(self.reduces), self.want_arg
        if kernel.bind is not None:
            return name, kernel.bind(csr, formula, operands, reduces, want_arg=want_arg)
        run = kernel.run
        return name, lambda csr, given: run(csr, formula, given, reduces, want_arg=want_arg)


_decisions: Bounded[tuple[Any, ...], Decision] = Bounded(_CHOICES)


def kernel_for(key: tuple[Any, ...], spec: Callable[[], OpSpec]) -> Kernel:
    """Return the kernel for a call, as :func:`pyg_accel.backends.choose` does, but sooner.

    Args:
        key: everything of the call that its facts depend on.
        spec: makes the facts of a call with a new key.
    """
    key = (situation(), *key)
    decision = _decisions.get(key)
    if decision is None:
        decision = _decisions[key] = decide(spec())
    note_choice(decision.backend.name)
    return decision.kernel


def facts_of_operands(operands: Sequence[Tensor]) -> tuple[tuple[torch.dtype, int, int], ...]:
    """Return what a choice depends on of operands [rows, H, F]."""
    return tuple([(t.dtype, t.size(1), t.size(2)) for t in operands])


def run_gspmm(
    csr: CSR, text: str, reduces: tuple[str, ...], operands: list[Tensor], *, want_arg: bool
) -> list[Tensor]:
    """Run a call of any kind, as :class:`Launch` runs those of one."""
    return _launch_of(text, reduces, want_arg, facts_of_operands(operands))(csr, operands)


@lru_cache(maxsize=1024)
def _launch_of(
    text: str, reduces: tuple[str, ...], want_arg: bool, _facts: tuple[Any, ...]
) -> Launch:
    return Launch(text, reduces, want_arg=want_arg)
