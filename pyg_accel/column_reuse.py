"""How much the rows of a graph share: what decides whether tiles pay, and which entries they take.

A row of the features that is fetched for a window serves all entries of a column in it. Columns of
one entry gain nothing, so a graph is described by its columns of at least so many entries.
"""

from typing import NamedTuple

import torch

from pyg_accel.facts import Kind, facts_of
from pyg_accel.graph import CSR
from pyg_accel.machine import is_captured

__all__ = [
    "HEIGHTS",
    "LEAST",
    "Shared",
    "kind_of",
    "per_column",
    "reuse_of",
    "typical_column_reuse",
]

# Windows that kernels are written for, and the fewest entries of a column that is worth a tile.
HEIGHTS = (16, 32, 64)
LEAST = (1, 2, 3)
_SAMPLED_WINDOWS, _SAMPLED_ENTRIES = 256, 2**22


class Shared(NamedTuple):
    """The columns with many entries in a window.

    Attributes:
        window: rows of a window.
        least: entries of a column that counts.
        entries: of those columns, as a part of all entries of the graph.
        columns: of those, an entry of the graph.
    """

    window: int
    least: int
    entries: float
    columns: float


def per_column(sharing: tuple[Shared, ...]) -> tuple[float, ...]:
    """Return the entries that share a column, on average of all columns, by height of the window.

    Empty for a graph whose columns were not counted.
    """
    return tuple(1 / max(s.columns, 1e-3) for s in sharing if s.least == 1)


_NOTHING = tuple(Shared(h, m, float(m == 1), float(m == 1)) for h in HEIGHTS for m in LEAST)


def reuse_of(csr: CSR) -> tuple[Shared, ...]:
    """Return what rows share, for windows of each of :data:`HEIGHTS` and each of :data:`LEAST`.

    Estimated from some of the windows; waits for the device when it is first asked of a graph.
    """
    facts = facts_of(csr)
    if facts.shared_kind is None:
        facts.shared_kind = Kind.of(csr.rowptr, csr.col, csr.num_cols, _estimate(csr))
    return facts.shared_kind.sharing


def kind_of(csr: CSR) -> Kind:
    """Return the kind of a graph that a kernel is about to run on, and count that use.

    It tells what rows share (:func:`reuse_of`) of a graph on a GPU that is used again and again.
    Sampled batches are gone before tiles could pay. While a CUDA graph is captured nothing can be
    estimated, and what was not known stays unknown. Nor is anything told to those who asked torch
    for deterministic algorithms: another kernel after a while means other roundings.
    """
    facts = facts_of(csr)
    facts.uses += 1
    return _known_kind(csr) if csr.col.is_cuda else facts.kind


def typical_column_reuse(csr: CSR) -> tuple[Shared, ...]:
    """Return what :func:`kind_of` would tell on a GPU, and count a use."""
    facts_of(csr).uses += 1
    return _known_kind(csr).sharing


def _known_kind(csr: CSR) -> Kind:
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
    counts = csr.rowptr.diff()[rows].long()
    row = torch.repeat_interleave(rows, counts)
    if row.numel() == 0:
        return _NOTHING
    first = torch.repeat_interleave(csr.rowptr[rows].long() - counts.cumsum(0) + counts, counts)
    col = csr.col[first + torch.arange(row.numel(), device=device)].long()
    least = torch.tensor(LEAST, device=device).unsqueeze(1)
    found = []
    for height in HEIGHTS:
        _, each = torch.unique(row // height * csr.num_cols + col, return_counts=True)
        counted = each >= least
        both = torch.stack([(counted * each).sum(1), counted.sum(1)], 1).tolist()
        found += [
            Shared(height, at_least, round(of / row.numel(), 3), round(columns / row.numel(), 3))
            for at_least, (of, columns) in zip(LEAST, both, strict=True)
        ]
    return tuple(found)
