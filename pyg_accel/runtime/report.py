"""The report: how often and how long each kind of call ran, and why it took PyG's own path."""

import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from pyg_accel.runtime.large_pages import small_pages_reasons
from pyg_accel.runtime.state import during, running

__all__ = ["Report", "Row", "record", "record_batch", "report", "reset_report", "uncounted"]


@dataclass
class Row:
    """One kind of call.

    Attributes:
        layer: class name of the layer, or of the maker of batches.
        formula: the computation, e.g. ``mean_j u0``, or the association of a rewritten layer,
            e.g. ``(A·(X·W))``; empty if PyG computed it.
        backend: backend, or ``PyG``; of models and steps ``CUDA graph`` or ``eager``;
            ``deferred`` for attention weights that are computed inside the sum after them;
            ``torch`` for rewritten layers without a kernel of a backend.
        reason: why PyG's own path was taken.
        calls: number of forward calls, or of batches.
        seconds: their total time; for a loader, the time of waiting for batches. It is 0 for
            compiled calls, and for layers that were called by another name.
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
        if running.counted:
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
        small_pages: why large CPU tensors are in small pages (:mod:`.large_pages`).
    """

    rows: list[Row] = field(default_factory=list)
    small_pages: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.rows:
            return "pyg_accel: no message passing seen yet (is patch() on?)"
        forward = [row for row in self.rows if row.is_forward]
        calls, done = Counter[str](), Counter[str]()
        for row in forward:
            calls[row.layer] += row.calls
            done[row.layer] += row.calls * bool(row.formula)
        lines = [f"pyg_accel: {done.total()} of {calls.total()} forward calls accelerated"]
        lines += _table(forward, "layer", "formula or reason", "backend", "calls")
        if 0 < done.total() < calls.total():
            parts = (f"{name} {done[name]} of {count}" for name, count in calls.items())
            lines.append(f"accelerated: {', '.join(parts)}")
        shown = "\n".join(f"{row.formula} {row.backend}" for row in forward)
        lines += [text for pattern, text in _LEGEND if re.search(pattern, shown, re.MULTILINE)]
        if batches := [row for row in self.rows if not row.is_forward]:
            lines += ["", *_table(batches, "loader", "contents or reason", "made by", "batches")]
        lines += [f"Memory is in small pages, which is slower: {r}" for r in self.small_pages]
        return "\n".join(lines)


# Explanations of words in a table.
_LEGEND = (
    (r"\b[uve]\d", "u0, v1, e2: what a message reads at the source, the target, or of the edge"),
    (r"\bdeferred", "deferred: computed inside of the sum that follows"),
    (r"\w\+\w+$", "cpu+reference: parts of the call ran on either"),
    (r"_j ", "What that gains: time an epoch with and without patch()"),
)


def _table(rows: list[Row], *head: str) -> list[str]:
    """Return the lines of a table; unknown times are a dash."""
    lines = [(*head, "total ms", f"ms a {head[-1].rstrip('es')}")]
    for row in rows:
        each = row.seconds / max(row.calls, 1)
        times = (f"{1e3 * row.seconds:.1f}", f"{1e3 * each:.2f}") if row.seconds else ("-", "-")
        lines.append((row.layer, row.formula or row.reason, row.backend, str(row.calls), *times))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    row_format = "  ".join(f"{{:{side}{w}}}" for side, w in zip("<<<>>>", widths, strict=True))
    texts = [row_format.format(*line) for line in lines]
    return [texts[0], "-" * len(texts[0]), *texts[1:]]


_lock = threading.Lock()
_rows: dict[tuple[str, str, str, str], Row] = {}
# Reasons and formulas may have numbers that vary. After this many rows, new kinds share a row.
_MOST_ROWS = 500
_MOST_TIMES = 100  # times of a row that are noted before they are summed
_OTHERS = "others: the report is full"


def record(layer: str, formula: str, backend: str, reason: str, seconds: float) -> None:
    """Count one call."""
    if running.counted:
        row_of(layer, formula, backend, reason).add(seconds)


def record_batch(maker: str, what: str, where: str, reason: str, seconds: float) -> None:
    """Count one batch, in the row of the class that makes it."""
    if running.counted:
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
    """Do not count calls in the block, which are not calls of users."""
    with during(counted=False):
        yield


def report(file: TextIO | None = None) -> Report:
    """Print, for every layer class called under ``patch()``, the kernels, or why PyG's path ran.

    Args:
        file: where to print; standard output by default.

    Returns:
        The report as data.
    """
    if file is not None and not hasattr(file, "write"):
        raise ValueError(f"expected 'file' to be open for writing (got {file!r}); to write into a "
                         "file of that name, open(name, 'w') it")  # fmt: skip
    with _lock:
        for row in _rows.values():
            row._count()
        rows = [Row(*row._key(), row.calls, row.seconds, row.is_forward) for row in _rows.values()]
        snapshot = Report(rows, small_pages_reasons())
    slowest = Counter[str]()
    for row in snapshot.rows:
        slowest[row.layer] += row.seconds  # type: ignore[assignment]
    snapshot.rows.sort(key=lambda row: (-slowest[row.layer], row.layer, -row.seconds))
    print(snapshot, file=file or sys.stdout)
    return snapshot


def reset_report() -> None:
    """Delete all rows."""
    with _lock:
        for row in _rows.values():
            row.calls, row.seconds = 0, 0.0
            row._times.clear()
        _rows.clear()
