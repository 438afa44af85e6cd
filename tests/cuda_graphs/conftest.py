"""What the report says of calls, and a stand-in for CUDA graphs that runs on any device.

A CUDA graph repeats kernels on the memory that they had, whatever Python would do now. So does a
tape: its operators read and write the tensors that they were recorded with. What waits for the
device raises while a tape is recorded, as it does in a capture.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pyg_accel.cuda_graphs.capture import Captured, Grads, Memory, gradients
from pyg_accel.cuda_graphs.engine import Engine
from pyg_accel.cuda_graphs.entry import Entry
from pyg_accel.runtime import machine
from tests.cuda_graphs.models import SIZES, batch_of

_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
          "unique_consecutive", "equal", "is_nonzero")  # fmt: skip


def _waits(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator's host waits for the device: numbers, and sizes that depend on data."""
    name = func._schema.name.partition("::")[2]
    if name == "repeat_interleave":
        return func._overloadname == "Tensor" and args[-1] is None
    if name.startswith(("index", "_index_put", "_unsafe_index")) and isinstance(args[1], list):
        by_mask = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        return by_mask and not (len(args) > 2 and args[2].numel() == 1)  # that is masked_fill
    return name in _WAITS


class Tape(TorchDispatchMode):
    """Operators that ran, to be run again."""

    __module__ = "pyg_accel.tape"  # modes of the package do not keep layers from being accelerated

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._numbers: list[Tensor] = []  # of torch.tensor(number), which lie on the host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_host = any(args[0] is number for number in self._numbers if args)
        if not on_host and _waits(func, [*args, *kwargs.values()]):
            raise RuntimeError(f"operation not permitted when stream is capturing ({func})")
        made = func(*args, **kwargs)
        new = [t for t in tree_flatten(made)[0] if isinstance(t, Tensor)]
        self._done.append((func, args, kwargs, new))
        if func is torch.ops.aten.lift_fresh.default:
            self._numbers += new
        return made

    def repeat(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, made in self._done:
                again = [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, Tensor)]
                for old, new in zip(made, again, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextmanager
def _capture() -> Iterator[Tape]:
    with machine.as_captured(), Tape() as tape:
        yield tape


class Rerun(Captured):
    """Runs the function itself each time."""

    repeats = False

    def __init__(self, function: Callable[[], list[Tensor]], inputs: Any, memory: Memory) -> None:
        self._function, self._inputs = function, inputs
        self._outs, self._grads = [], []

    def forward(self) -> Sequence[Tensor]:
        self._outs = self._function()
        self._grads = [torch.zeros_like(out) if out.requires_grad else None for out in self._outs]
        return [out.detach() for out in self._outs]

    def backward(self) -> Grads:
        return gradients(self._outs, self._inputs, self._grads)


class Taped(Captured):
    """Two tapes: one of the function, one of its gradients."""

    repeats = False  # in less time

    def __init__(self, function: Callable[[], list[Tensor]], inputs: Any, memory: Memory) -> None:
        with machine.as_captured():
            for _ in range(2):
                outs = function()
                gradients(outs, inputs, [torch.zeros_like(o) for o in outs])
        with _capture() as self._forward:
            outs = function()
        self._outs = [out.detach() for out in outs]
        self._grads = [torch.zeros_like(out) if out.requires_grad else None for out in outs]
        with _capture() as self._backward:
            self._input_grads = gradients(outs, inputs, self._grads)

    def forward(self) -> Sequence[Tensor]:
        self._forward.repeat()
        return self._outs

    def backward(self) -> Grads:
        self._backward.repeat()
        return [grad if grad is None else grad.clone() for grad in self._input_grads]


@pytest.fixture
def waits() -> Callable[[Any, Sequence[Any]], bool]:
    return _waits


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "recorder", Taped)


@pytest.fixture
def rerun(monkeypatch: pytest.MonkeyPatch) -> type[Captured]:
    monkeypatch.setattr(Engine, "recorder", Rerun)
    return Rerun


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays go on, however long they take: processes beside this one share the device."""
    monkeypatch.setattr(Entry, "saves", 0.0)


@pytest.fixture
def replays(report_of: Callable[[], list[Any]]) -> Callable[[], int]:
    return lambda: sum(row.calls for row in report_of() if row.backend == "CUDA graph")


@pytest.fixture
def reasons(report_of: Callable[[], list[Any]]) -> Callable[[], set[str]]:
    return lambda: {r.reason for r in report_of() if r.backend == "eager"} - {"warming up"}


@pytest.fixture
def replayed(replays: Callable[[], int], reasons: Callable[[], set[str]]) -> Callable[[int], None]:
    """Assert that so many calls were replays, and that only those that warm up were eager."""

    def check(calls: int) -> None:
        assert not reasons()
        assert replays() == calls

    return check


@pytest.fixture
def stayed_eager(replays: Callable[[], int], reasons: Callable[[], set[str]]) -> Callable[[], str]:
    """Assert that no call was a replay, for one reason, and return that."""

    def check() -> str:
        (reason,) = reasons()
        assert replays() == 0
        return reason

    return check


@pytest.fixture
def batches() -> list[dict[str, Any]]:
    return [batch_of(graphs, seed) for seed, graphs in enumerate(SIZES)]
