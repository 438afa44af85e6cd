"""The report: how often and how long each kind of call ran, and why it took PyG's own path."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TextIO

from pyg_accel.large_pages import small_pages_reasons

__all__ = ["Report", "Row", "record", "record_batch", "report", "reset_report", "uncounted"]


@dataclass
class Row:
    """One kind of call.

    Attributes:
        layer: class name of the layer, or of what makes batches.
        formula: what was computed, e.g. ``mean_j u0``, or by a rewritten layer its association,
            e.g. ``(A·(X·W))``; empty if PyG computed it.
        backend: backend, or ``PyG``; of models and steps ``CUDA graph`` or ``eager``;
            ``deferred`` for attention weights that are computed inside the sum after them;
            ``torch`` for rewritten layers without a kernel of a backend.
        reason: why PyG's own path was taken.
        calls: number of forward calls, or of batches.
        seconds: time spent in them; for a loader, the time that its batches were waited for. It is
            not measured for calls that PyG computed because they are small: reading a clock could
            take longer than the call.
        is_forward: whether these are forward calls, not batches that are sampled, collated or
            loaded.
    """

    layer: str
    formula: str
    backend: str
    reason: str
    calls: int = 0
    seconds: float = 0.0
    is_forward: bool = True
    _times: list[float] = field(default_factory=list, init=False, repr=False, compare=False)

    def _key(self) -> tuple[str, str, str, str]:
        return self.layer, self.formula, self.backend, self.reason

    def add(self, seconds: float) -> None:
        """Count one call; also valid on a row from before :func:`reset_report`."""
        if _counted.get():
            # append() is safe without the lock, whose cost shows in small calls.
            self._times.append(seconds)
            if not self.calls or len(self._times) >= _MOST_TIMES:
                with _lock:
                    self._count()

    def _count(self) -> None:
        """Add the noted times to the row that the report shows."""
        times = self._times[:]
        row = _rows.setdefault(self._key(), self)
        row.calls += len(times)
        row.seconds += sum(times)
        del self._times[: len(times)]  # another thread may have appended more


@dataclass
class Report:
    """A snapshot of :func:`report`; ``print`` shows it as a table.

    Attributes:
        rows: one per kind of call.
        small_pages: why large CPU tensors are in small pages (:mod:`pyg_accel.large_pages`).
    """

    rows: list[Row] = field(default_factory=list)
    small_pages: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.rows:
            return "pyg_accel: no message passing seen yet (is patch() on?)"
        head = ("layer", "formula or reason", "backend", "calls", "total ms", "ms a call")
        lines = [head]
        for row in self.rows:
            each = 1e3 * row.seconds / max(row.calls, 1)
            what = row.formula or row.reason
            lines.append((row.layer, what, row.backend, str(row.calls),
                          f"{1e3 * row.seconds:.1f}", f"{each:.2f}"))  # fmt: skip
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

        def show(line: tuple[str, ...]) -> str:
            left = [text.ljust(width) for text, width in zip(line[:3], widths[:3], strict=True)]
            right = [text.rjust(width) for text, width in zip(line[3:], widths[3:], strict=True)]
            return "  ".join([*left, *right]).rstrip()

        rule = "-" * len(show(tuple("x" * width for width in widths)))
        forward = [row for row in self.rows if row.is_forward]
        accelerated = sum(row.calls for row in forward if row.formula)
        total = sum(row.calls for row in forward)
        summary = f"pyg_accel: {accelerated} of {total} forward calls accelerated"
        notes = [f"Memory is in small pages, which is slower: {r}" for r in self.small_pages]
        return "\n".join([summary, show(head), rule, *(show(line) for line in lines[1:]), *notes])


_lock = threading.Lock()
_rows: dict[tuple[str, str, str, str], Row] = {}
# Reasons and formulas may have numbers that vary. After this many rows, new kinds share a row.
_MOST_ROWS = 500
_MOST_TIMES = 100  # times of a row that are noted before they are summed
_OTHERS = "others: the report is full"
_counted: ContextVar[bool] = ContextVar("pyg_accel_counted", default=True)


def record(layer: str, formula: str, backend: str, reason: str, seconds: float) -> None:
    """Count one call."""
    if _counted.get():
        row_of(layer, formula, backend, reason).add(seconds)


def record_batch(maker: str, what: str, where: str, reason: str, seconds: float) -> None:
    """Count one batch, in the row of the class that makes it."""
    if _counted.get():
        row = row_of(maker, what, where, reason)
        row.is_forward = False
        row.add(seconds)


def row_of(layer: str, formula: str, backend: str, reason: str) -> Row:
    """Return the row of a kind of call."""
    key = (layer, formula, backend, reason)
    row = _rows.get(key)
    if row is not None:
        return row
    if len(_rows) >= _MOST_ROWS:
        backend = "" if formula else "PyG"
        key = ("(others)", _OTHERS if formula else "", backend, "" if formula else _OTHERS)
    return _rows.get(key) or Row(*key)


@contextmanager
def uncounted() -> Iterator[None]:
    """Do not count calls in the block: calls that users have not made."""
    token = _counted.set(False)
    try:
        yield
    finally:
        _counted.reset(token)


def report(file: TextIO | None = None) -> Report:
    """Print, for every layer class called under ``patch()``, what ran, or why PyG's own path did.

    Args:
        file: where to print; standard output by default.

    Returns:
        The same as data.
    """
    if file is not None and not hasattr(file, "write"):
        raise ValueError(f"expected 'file' to be open for writing (got {file!r}); to write into a "
                         "file of that name, open(name, 'w') it")  # fmt: skip
    with _lock:
        for row in _rows.values():
            row._count()
        rows = [Row(*row._key(), row.calls, row.seconds, row.is_forward) for row in _rows.values()]
        snapshot = Report(rows, small_pages_reasons())
    snapshot.rows.sort(key=lambda row: -row.seconds)
    print(snapshot, file=file or sys.stdout)
    return snapshot


def reset_report() -> None:
    """Forget all calls so far."""
    with _lock:
        for row in _rows.values():
            row.calls, row.seconds = 0, 0.0
            row._times.clear()
        _rows.clear()
