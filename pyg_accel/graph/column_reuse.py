"""Measures the columns that rows of a graph share: they decide whether tiles pay.

A kernel with tiles takes rows in windows. It fetches a row of the features once per window, for all
entries of the window in that column. Columns with one entry gain nothing, so a graph is described
by the share of entries in columns with at least 1, 2 or 3 entries.
"""

from typing import NamedTuple

import torch

from pyg_accel.graph.csr import CSR, entries_of_rows
from pyg_accel.graph.facts import Kind, facts_of
from pyg_accel.runtime.machine import is_captured

__all__ = ["HEIGHTS", "LEAST", "Shared", "kind_of", "per_column", "reuse_of"]

# Rows per window of the kernels, and the fewest entries of a column in a tile.
HEIGHTS = (16, 32, 64)
LEAST = (1, 2, 3)
_SAMPLED_WINDOWS, _SAMPLED_ENTRIES = 256, 2**22


class Shared(NamedTuple):
    """The columns with at least ``least`` entries in a window.

    Attributes:
        window: rows per window.
        least: the fewest entries of a column.
        entries: share of the entries of the graph in such columns.
        columns: number of such columns per entry of the graph.
    """

    window: int
    least: int
    entries: float
    columns: float


def per_column(sharing: tuple[Shared, ...]) -> tuple[float, ...]:
    """Return the mean number of entries per column, for each height of the window.

    Empty for a graph whose columns were not counted.
    """
    return tuple(1 / max(s.columns, 1e-3) for s in sharing if s.least == 1)


_NOTHING = tuple(Shared(h, m, float(m == 1), float(m == 1)) for h in HEIGHTS for m in LEAST)


def reuse_of(csr: CSR) -> tuple[Shared, ...]:
    """Return the shared columns for each of :data:`HEIGHTS` and each of :data:`LEAST`.

    They are estimated from a sample of windows; the first call for a graph waits for the device.
    """
    facts = facts_of(csr)
    if facts.shared_kind is None:
        facts.shared_kind = Kind.of(csr.rowptr, csr.col, csr.num_cols, _estimate(csr))
    return facts.shared_kind.sharing


def kind_of(csr: CSR, *, counts: bool = True) -> Kind:
    """Return the kind of a graph, and count a use if a kernel is about to run on it.

    It includes :func:`reuse_of` for a graph on a GPU that is used repeatedly: sampled batches are
    freed before tiles could pay. Nothing is measured while a CUDA graph is captured, as the host
    cannot wait, nor with deterministic algorithms: the kernel would change after some calls, and
    with it the rounding.
    """
    facts = facts_of(csr)
    facts.uses += counts
    return _measured_kind(csr) if csr.col.is_cuda else facts.kind


def _measured_kind(csr: CSR) -> Kind:
    facts = facts_of(csr)
    if facts.shared_kind is None and not facts.stays:
        return facts.kind
    if torch.are_deterministic_algorithms_enabled():
        return facts.kind
    if facts.shared_kind is None:
        if is_captured(csr.col):
            return facts.kind
        reuse_of(csr)
    assert facts.shared_kind is not None
    return facts.shared_kind


def _estimate(csr: CSR) -> tuple[Shared, ...]:
    tallest = HEIGHTS[-1]
    windows, entries, device = -(-csr.num_rows // tallest), csr.col.numel(), csr.col.device
    if entries == 0:
        return _NOTHING
    share = min(1.0, _SAMPLED_ENTRIES / entries, _SAMPLED_WINDOWS / windows)
    some = torch.linspace(0, windows - 1, max(1, int(windows * share)), device=device).long()
    rows = (some.unsqueeze(1) * tallest + torch.arange(tallest, device=device)).flatten()
    rows = rows[rows < csr.num_rows]
    local, entry = entries_of_rows(csr.rowptr.long(), rows)
    row, col = rows[local], csr.col[entry].long()
    if row.numel() == 0:
        return _NOTHING
    least = torch.tensor(LEAST, device=device).unsqueeze(1)
    shared = []
    for height in HEIGHTS:
        _, counts = torch.unique(row // height * csr.num_cols + col, return_counts=True)
        large = counts >= least
        sums = torch.stack([(large * counts).sum(1), large.sum(1)], 1).tolist()
        shared += [
            Shared(height, fewest, round(filled / row.numel(), 3), round(columns / row.numel(), 3))
            for fewest, (filled, columns) in zip(LEAST, sums, strict=True)
        ]
    return tuple(shared)
