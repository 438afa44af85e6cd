"""Times predicted from counts of bytes and operations: the default cost model."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from pyg_accel.costs import H200_UNITS, Machine, machine_of
from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.runtime.machine import Device

__all__ = ["Roofline"]

VALUE = 4  # bytes: of float32, and of 32-bit ids


@dataclass(frozen=True)
class Roofline:
    """Predicts the longer of the times for arithmetic and for memory, plus the cost of a call.

    Attributes:
        machine: the figures.
        source: the origin of the figures, for people.
        learned: empty: no primitive was measured.

    Example:
        >>> model = Roofline.of("cpu")
        >>> model.seconds(Primitive("gemm", 1000, 64, 64)) > 0
        True
    """

    machine: Machine
    source: str
    learned: Collection[str] = ()

    @classmethod
    def of(cls, device: torch.device | str, why: str = "") -> "Roofline":
        """Build the model of a device; ``why`` says why no learned model is used."""
        name, units = Device.of(device), H200_UNITS
        origin = f"one core's figures for {name.threads} threads"
        if name.kind == "cuda":
            units = torch.cuda.get_device_properties(device).multi_processor_count
            origin = f"an H200's figures for {units} multiprocessors"
        source = f"roofline of {name} ({origin})" + (f": {why}" if why else "")
        return cls(machine_of(name, units), source)

    @property
    def roofline(self) -> "Roofline":
        """Itself: a learned model has a roofline too."""
        return self

    def seconds(self, primitive: Primitive) -> float:
        """Return the expected time of one call.

        Raises:
            ValueError: for an unknown primitive, or a sparse one without its graph.
        """
        p, m = primitive, self.machine
        if p.name in ("gemm", "gemm_tn"):
            moved = p.rows * p.inner + p.inner * p.cols + p.rows * p.cols
            work = 2 * p.rows * p.inner * p.cols
            return self._with_call(max(work / m.flops, self._stream(moved)), m.call)
        if p.name in ("scale_rows", "elementwise"):
            return self._with_call(self._stream(2 * p.rows * p.cols), m.call)
        if p.name == "exchange":
            return self._with_call(VALUE * p.rows * p.cols / m.link, m.sparse_call)
        if p.name == "maxk":  # a few passes over each row
            return self._with_call(4 * VALUE * p.rows * p.cols / m.memory, m.call)
        if p.graph is None:
            raise ValueError(f"expected features of a graph for '{p.name}'")
        return self._with_call(self._sparse(p, p.graph), m.sparse_call)

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        """Return the expected time of each call."""
        return [self.seconds(primitive) for primitive in primitives]

    def _with_call(self, seconds: float, call: float) -> float:
        if self.machine.overlaps:
            return math.sqrt(math.hypot(seconds**2, call**2))  # a smooth maximum
        return seconds + call

    def _sparse(self, p: Primitive, g: GraphFeatures) -> float:
        m, entries = self.machine, g.num_entries
        numbers = entries * p.heads  # one per edge and head
        # A permutation makes reads and writes of edge values random.
        permuted = self._gather(entries, max(m.sector / VALUE, p.heads), entries, g.far)
        permuted *= p.permuted
        result = g.num_rows * p.cols
        if p.name in ("spmm", "spmm_weighted"):
            values = numbers if p.name == "spmm_weighted" and not p.permuted else 0
            rows = self._rows(g, p.cols)
            rows *= (m.shared if p.shared else 1) * (m.fused if p.fused else 1)
            return rows + self._stream(entries + values + result) + permuted
        if p.name == "sddmm":
            moved = self._stream(entries + numbers + result)
            return self._rows(g, p.cols) + moved + numbers * m.edge + permuted
        if p.name == "scale_edges":
            return self._stream(entries + 2 * numbers) + numbers * m.edge + permuted
        if p.name == "edge_softmax":
            return self._stream(3 * numbers) + 2 * (numbers * m.edge + permuted)
        if p.name in ("cbsr_spmm", "sspmm"):
            width = min(p.inner * m.entry, p.cols)  # beyond, kernels add up dense rows
            return self._rows(g, width) + self._stream(entries + result)
        if p.name == "sampled_spmm":
            share = min(p.inner / max(g.degree_mean, 1e-9), 1.0)
            return share * (self._rows(g, p.cols) + self._stream(entries)) + self._stream(result)
        raise ValueError(f"no primitive is called '{p.name}'")

    def _rows(self, g: GraphFeatures, width: float) -> float:
        """Seconds to add up a row of ``width`` features for every entry."""
        return self._gather(g.num_entries, width, g.num_cols, g.far) + g.num_rows * self.machine.row

    def _gather(self, count: int, width: float, table: int, far: float) -> float:
        """Seconds to fetch ``count`` rows of ``width`` numbers from a table of that many rows."""
        m = self.machine
        fits = min(1.0, m.cache_bytes / max(table * min(width * VALUE, m.slice_bytes), 1.0))
        missed = (1 - fits) * far
        return count * width * VALUE * ((1 - missed) / m.cache + missed / m.gather)

    def _stream(self, numbers: float) -> float:
        """Seconds to move numbers in order."""
        m, moved = self.machine, VALUE * numbers
        return moved / (m.cache if moved < m.cache_bytes else m.memory)
