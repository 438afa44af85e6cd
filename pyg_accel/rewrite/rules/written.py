"""Layers that users write: their code is run in every call, and its products are put off.

:mod:`pyg_accel.rewrite.running` finds the products; this rule says where their values are.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyg_accel.patching.rng_state import random_state, restore
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted, Value
from pyg_accel.rewrite.record import Record
from pyg_accel.rewrite.running import Run

__all__ = ["written"]


def written(conv: Any, call: Call) -> Algebra:
    """Return the product of a call, by default the first one.

    Raises:
        NotLifted: if the layer computes none.
    """
    if "record" not in call.memo:
        call.memo |= _first(call)
    record: Record = call.memo["record"]
    values = {name: _value(name) for name in record.entries}
    learned = tuple(name for name, entry in record.entries.items()
                    if entry.leaf.kind in ("weighted", "diagonal") and entry.tensors)  # fmt: skip
    return record.algebra(call.memo["made"], values, owners=("edge_weight",), learned=learned,
                          compiles=False)  # fmt: skip


def _value(name: str) -> Callable[[Call], Value]:
    def value(call: Call) -> Value:
        entry = call.memo["record"].entries[name]
        return entry.make(call, *entry.tensors)  # type: ignore[no-any-return]

    return value


class _Found(Exception):
    """The first product of a layer."""


def _first(call: Call) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def compute(inner: Call) -> Tensor:
        found.append(inner.memo)
        raise _Found

    run = Run(call, compute)
    state = random_state(call.x.device, call.conv)
    try:
        run(tuple(call.given.values()), {})
    except _Found:
        restore(state)
        return found[0]
    raise NotLifted(run.left)
