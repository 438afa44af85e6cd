"""Edge tensors in attributes of a layer, above all attention weights: do they leave it?

Weights that leave are materialised, and the result is computed from them. Weights that the layer
clears before it returns need not exist.
"""

import dis
import sys
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.graph.memo import changed, tensors_in
from pyg_accel.patching.layers import OF_EVERY_MODULE
from pyg_accel.patching.lazy import LazyTensor, first_operand, is_single_side
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.record.edge_tensors import materialize, plain_shape
from pyg_accel.runtime.state import running

__all__ = [
    "finish", "nothing", "ordinary", "refuse_kept", "returns_none", "written",
]  # fmt: skip

_WEIGHTS = "return_attention_weights"


def returns_none(module: MessagePassing) -> CodeType | None:
    """Return the code of the running ``forward`` if its caller requested no attention weights.

    Also None if the ``forward`` has no such argument, as its results are unknown then.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        if _WEIGHTS in frame.f_code.co_varnames:
            variables = frame.f_locals
            mine = variables.get(frame.f_code.co_varnames[0]) is module
            return frame.f_code if mine and variables.get(_WEIGHTS, _WEIGHTS) is None else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


@lru_cache(maxsize=256)
def _cleared(code: CodeType, alone: bool = False) -> frozenset[str]:
    """Return the attributes that a ``forward`` resets to None."""
    instructions = [*dis.get_instructions(code)]
    steps = [(step.opname.partition("_")[0], step.argval) for step in instructions]
    clears, asserts = [("LOAD", None), ("LOAD", code.co_varnames[0])], "LOAD_ASSERTION_ERROR"
    read = {name: i for i, (kind, name) in reversed([*enumerate(steps)]) if kind == "LOAD"}
    return frozenset(
        name
        for i, (kind, name) in enumerate(steps)
        if kind == "STORE"
        and steps[i - 2 : i] == clears  # alone, it is None before that too
        and not (alone and any(s.opname == asserts for s in instructions[read.get(name, i) : i]))
    )


def _edge_operand(lazy: LazyTensor) -> Tensor | None:
    """Return the edge operand of a lazy tensor without any function; None for others."""
    if not is_single_side(lazy) or lazy.edge_dim != 0:
        return None
    operand = first_operand(lazy)
    whole = plain_shape(operand) == plain_shape(lazy)
    return operand if lazy.formula.side == "e" and whole else None  # type: ignore[union-attr]


def refuse_kept(module: Any, trace: Any, forward: CodeType | None, alone: bool) -> None:
    """Raise if a layer stores a message, which programs do not.

    Raises:
        Unrecognised: a part of the message.
    """
    for name, value in vars(module).copy().items():
        if name in OF_EVERY_MODULE or (forward and name in _cleared(forward, alone)):
            continue
        if any(isinstance(t, LazyTensor) and t.tracer is trace for t in tensors_in(value)):
            reason = f"a part of the message that stays in 'self.{name}'"
            raise Unrecognised(reason, permanent=False)


def finish(
    module: MessagePassing,
    out: Any,
    change: Callable[[Any], Any],
    forward: CodeType | None = None,
    *,
    clear: bool = False,
) -> Any:
    """Replace lazy tensors in the result, and in attributes that the ``forward`` will not clear.

    Args:
        module: the layer.
        out: the result.
        change: replaces lazy tensors.
        forward: code of the running ``forward``.
        clear: reset the attributes that it will clear, as nothing reads them.
    """

    def change_own(value: Any) -> Any:  # another thread may run the layer on other messages
        others = isinstance(value, LazyTensor) and value.tracer not in running.traces
        return value if others else change(value)

    for name, value in vars(module).copy().items():
        if isinstance(value, LazyTensor) and forward is not None and name in _cleared(forward):
            if clear:
                vars(module)[name] = None
            elif (waiting := _edge_operand(value)) is not None:
                vars(module)[name] = waiting
            continue
        left = value if name in OF_EVERY_MODULE else changed(value, change_own)
        if left is not value:
            vars(module)[name] = left
    return changed(out, change)


def ordinary(value: Any) -> Any:
    """Materialise a lazy tensor, except for attention weights."""
    if isinstance(value, LazyTensor):
        weights = _edge_operand(value)
        return value.tracer.compute(value) if weights is None else weights
    return value


def nothing(value: Any) -> Any:
    """Drop messages of a failed call, but not weights from an earlier call."""
    return None if isinstance(value, LazyTensor) else value


def written(value: Any) -> Any:
    """Materialise a lazy tensor, attention weights too."""
    return materialize(ordinary(value))
