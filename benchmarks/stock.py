"""Stock PyG in a process that has called `pyg_accel.patch()`."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType

from pyg_accel.patching import overrides


@contextmanager
def stock_pyg() -> Iterator[None]:
    """PyG as it is, with nothing of patch() in the way, which goes on knowing its graphs."""
    ours = [(owner, name, vars(owner)[name]) for owner, name, _ in overrides._recorded
            if isinstance(vars(owner).get(name), FunctionType)]  # fmt: skip
    theirs = {(id(owner), name): stock for owner, name, stock in reversed(overrides._recorded)}
    for owner, name, _ in ours:
        stock = theirs[id(owner), name]
        delattr(owner, name) if stock is overrides._MISSING else setattr(owner, name, stock)
    try:
        yield
    finally:
        for owner, name, wrapper in ours:
            setattr(owner, name, wrapper)
