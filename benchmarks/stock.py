"""Stock PyG in a process that has called `pyg_accel.patch()`."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyg_accel.patching import overrides


@contextmanager
def stock_pyg() -> Iterator[None]:
    """PyG as it is, with nothing of patch() in the way, which goes on knowing its graphs."""
    ours = [(h.function, h.function.__code__, h.original.__code__) for h in overrides._handed_over]
    for function, _, stock in ours:
        function.__code__ = stock
    layer = vars(overrides.MessagePassing).get("_call_impl")
    if layer is not None:
        del overrides.MessagePassing._call_impl
    try:
        yield
    finally:
        for function, code, _ in ours:
            function.__code__ = code
        if layer is not None:
            overrides.MessagePassing._call_impl = layer
