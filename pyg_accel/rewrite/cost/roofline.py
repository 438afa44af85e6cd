"""Times predicted from counts of bytes and operations: the default cost model."""

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace

import torch

from pyg_accel.machine import Device
from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures

__all__ = ["Machine", "Roofline", "machine_of"]

VALUE = 4  # bytes: of float32, and of 32-bit ids
_MAY_BE_0 = ("edge", "row", "overlaps", "fused")


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits of a machine.

    Attributes:
        flops: multiplications and additions of a large matrix product, per second.
        memory: bytes per second, read and written in order.
        gather: bytes per second of rows gathered from memory, where the cache does not hold them.
        cache: bytes per second from the cache.
        cache_bytes: capacity of the cache.
        slice_bytes: width of the piece of a row that the sparse kernels process at a time.
        sector: bytes that move when a single number is read or written.
        edge: seconds of arithmetic per edge and head, in kernels with a result per edge.
        row: seconds per row of a sparse result.
        call: fixed seconds of a dense call, its Python code included.
        sparse_call: fixed seconds of a sparse call.
        shared: factor on the time of a weighted sum if all heads sum the same features.
        overlaps: whether calls are queued: the next is prepared while the last one runs.
        entry: the number of columns of a dense row that takes as long as one entry of CBSR.
        link: bytes per second received from other processes.
        fused: factor on the time of a weighted sum if its kernel has read the features for the
            weights. Measured on a CPU only.
    """

    flops: float
    memory: float
    gather: float
    cache: float
    cache_bytes: float
    slice_bytes: float
    sector: float
    edge: float
    row: float
    call: float
    sparse_call: float
    shared: float
    overlaps: bool
    entry: float = 4.0
    link: float = 1e9
    fused: float = 1.0

    def __post_init__(self) -> None:
        """Refuse figures that no machine has, as infinity, which JSON can spell."""
        for name, value in asdict(self).items():
            if not (0 if name in _MAY_BE_0 else 1e-15) <= value <= 1e21:
                raise ValueError(f"no machine has {name}={value!r}")


# Fitted to benchmarks/results/cost_measurements: those of one H200, and for one core those of two
# processors with AVX-512 (an EPYC and a Xeon, two threads each).
H200 = Machine(flops=33e12, memory=3.3e12, gather=4.8e12, cache=10.5e12, cache_bytes=30e6,
               slice_bytes=256, sector=32, edge=0.0, row=0.0, call=12e-6, sparse_call=90e-6,
               shared=0.3, overlaps=True, link=290e9)  # fmt: skip
CORE = Machine(flops=80e9, memory=8.7e9, gather=6.7e9, cache=25e9, cache_bytes=8.5e6,
               slice_bytes=1024, sector=70, edge=6.4e-9, row=26e-9, call=60e-6, sparse_call=90e-6,
               shared=3.5, overlaps=False, entry=6.0, fused=0.0)  # fmt: skip
H200_UNITS = 132  # multiprocessors
RATES = ("flops", "memory", "gather", "cache", "cache_bytes")  # grow with the number of units
TIMES = ("edge", "row")  # shrink with it


def machine_of(device: Device, units: int = H200_UNITS) -> Machine:
    """Return the figures of the machine that was measured, scaled to another device.

    Their proportions are right, which choices between products depend on.

    Args:
        device: the device.
        units: multiprocessors of a GPU.
    """
    like, by = (H200, units / H200_UNITS) if device.kind == "cuda" else (CORE, device.threads or 1)
    rates = {name: getattr(like, name) * by for name in RATES}
    return replace(like, **rates, **{name: getattr(like, name) / by for name in TIMES})


@dataclass(frozen=True)
class Roofline:
    """Predicts the longer of the times for arithmetic and for memory, plus the cost of a call.

    Attributes:
        machine: the figures.
        source: where the figures come from, for people.
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
        """Build the model of a device; ``why`` is the reason against a learned one."""
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
        # Values of edges that are read or written through a permutation move one by one.
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
