"""Times from bytes and operations: what decides where no learned model does."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch

from pyg_accel.machine import Device
from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures

__all__ = ["Machine", "Roofline", "machine_like", "machine_of"]

VALUE, INDEX = 4, 4  # bytes: the models are for float32 and 32-bit ids


@dataclass(frozen=True, slots=True)
class Machine:
    """What bounds a kernel.

    Attributes:
        flops: multiplications and additions of a large matrix product, a second.
        memory: bytes a second, read and written in order.
        gather: bytes a second of rows gathered from memory, where the cache does not hold them.
        cache: bytes a second of rows gathered from the cache.
        cache_bytes: what the cache holds.
        slice_bytes: how wide the piece of a row is that the sparse kernels work on at a time.
        sector: bytes that move when one number is read at a place of its own.
        scattered: bytes that move, in effect, when one is written there.
        call: seconds that a dense call takes whatever its size.
        sparse_call: the same for a sparse one.
        overlaps: calls are queued: the next is prepared while the last one runs.
        entry: columns of a dense row that one stored entry of CBSR costs as much as.
        link: bytes a second that come from other processes.
    """

    flops: float
    memory: float
    gather: float
    cache: float
    cache_bytes: float
    slice_bytes: float
    sector: float
    scattered: float
    call: float
    sparse_call: float
    overlaps: bool
    entry: float = 4.0
    link: float = 1e9


# Fitted to the measurements that the shipped models were trained on.
H200 = Machine(flops=47e12, memory=3.3e12, gather=4.8e12, cache=10.5e12, cache_bytes=30e6,
               slice_bytes=256, sector=32, scattered=280, call=12e-6, sparse_call=90e-6,
               overlaps=True, link=290e9)  # fmt: skip
CORE = Machine(flops=73e9, memory=8e9, gather=7e9, cache=60e9, cache_bytes=8e6,
               slice_bytes=1024, sector=16, scattered=16, call=3e-6, sparse_call=50e-6,
               overlaps=False, entry=6.0)  # fmt: skip
H200_UNITS = 132  # multiprocessors


def machine_of(device: torch.device | str) -> tuple[Machine, str]:
    """Return figures for a device of this machine, and where they come from.

    Those of the machines that were measured are scaled by threads or multiprocessors: right in
    their proportions, which is what a choice between products depends on.
    """
    device = torch.device(device)
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
        return _scaled(H200, units / H200_UNITS), f"an H200's figures for {units} multiprocessors"
    threads = torch.get_num_threads()
    return _scaled(CORE, threads), f"one measured core's figures for {threads} threads"


def machine_like(device: Device) -> Machine:
    """Return figures to start from for a device that need not be here, as models correct them."""
    return H200 if device.kind == "cuda" else _scaled(CORE, device.threads)


def _scaled(machine: Machine, by: float) -> Machine:
    return replace(
        machine,
        **{name: getattr(machine, name) * by
           for name in ("flops", "memory", "gather", "cache", "cache_bytes")},
    )  # fmt: skip


class Roofline:
    """Predicts the slower of arithmetic and traffic, plus what every call costs.

    Example:
        >>> model = Roofline.of("cpu")
        >>> model.seconds(Primitive("gemm", 1000, 64, 64)) > 0
        True
    """

    def __init__(self, machine: Machine, source: str) -> None:
        """Take figures, and the words that tell users where they come from."""
        self.machine = machine
        self._source = source

    @classmethod
    def of(cls, device: torch.device | str, why: str = "") -> "Roofline":
        """Build the model of a device; ``why`` says what kept a learned one from being used."""
        machine, origin = machine_of(device)
        name = Device.of(device)
        return cls(machine, f"roofline of {name} ({origin})" + (f": {why}" if why else ""))

    @property
    def source(self) -> str:
        """What decides, for people."""
        return self._source

    @property
    def learned(self) -> Collection[str]:
        """None: nothing was measured."""
        return ()

    def seconds(self, primitive: Primitive) -> float:
        """Return the expected time of one call.

        Raises:
            ValueError: for a primitive that nobody knows, or a sparse one without its graph.
        """
        p, m = primitive, self.machine
        if p.name in ("gemm", "gemm_tn"):
            moved = p.rows * p.inner + p.inner * p.cols + p.rows * p.cols
            work = 2 * p.rows * p.inner * p.cols
            return self._with_call(max(work / m.flops, VALUE * moved / m.memory), m.call)
        if p.name in ("scale_rows", "elementwise"):
            return self._with_call(2 * VALUE * p.rows * p.cols / m.memory, m.call)
        if p.name == "exchange":
            return self._with_call(VALUE * p.rows * p.cols / m.link, m.sparse_call)
        if p.name == "cbsr_mm":  # an entry's products take twice as long as those of a dense row
            return self._with_call(4 * p.rows * p.inner * p.cols / m.flops, m.call)
        if p.name == "maxk":  # a few passes over each row
            return self._with_call(4 * VALUE * p.rows * p.cols / m.memory, m.call)
        if p.graph is None:
            raise ValueError(f"expected features of a graph for '{p.name}'")
        return self._with_call(self._sparse(p, p.graph), m.sparse_call)

    def _with_call(self, seconds: float, call: float) -> float:
        if self.machine.overlaps:
            return math.sqrt(math.hypot(seconds**2, call**2))  # the longer one, without a corner
        return seconds + call

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        """Return the expected time of each call."""
        return [self.seconds(primitive) for primitive in primitives]

    def _sparse(self, p: Primitive, graph: GraphFeatures) -> float:
        m, entries = self.machine, graph.num_entries
        out = VALUE * graph.num_rows * p.cols
        # What is read or written through a permutation, for want of locality, one by one.
        apart = entries * graph.far if p.permuted else 0.0
        edges = entries * VALUE * p.heads
        if p.name in ("spmm", "spmm_weighted"):
            moved: float = entries * INDEX + out
            if p.name == "spmm_weighted":
                moved += edges + apart * m.sector
            read = p.cols / p.heads if p.shared else p.cols
            return self._gather(graph, read) + moved / m.memory
        if p.name == "sddmm":
            moved = entries * INDEX + edges + out + apart * m.scattered
            return self._gather(graph, p.cols) + moved / m.memory
        if p.name == "scale_edges":
            moved = entries * INDEX + edges + apart * m.scattered
            return self._gather(graph, max(p.heads, m.sector / VALUE)) + moved / m.memory
        if p.name == "edge_softmax":  # read twice, written once
            return (3 * edges + apart * (m.sector + m.scattered)) / m.memory
        if p.name in ("cbsr_spmm", "sspmm"):
            width = min(p.inner * m.entry, p.cols)  # beyond, kernels add up dense rows
            return self._gather(graph, width) + (entries * INDEX + out) / m.memory
        if p.name == "sampled_spmm":
            kept = min(p.inner / max(graph.degree_mean, 1e-9), 1.0)
            sparse = self._gather(graph, p.cols) + entries * INDEX / m.memory
            return kept * sparse + out / m.memory
        raise ValueError(f"no primitive is called '{p.name}'")

    def _gather(self, graph: GraphFeatures, width: float) -> float:
        """Seconds to fetch a row of ``width`` features for every entry."""
        m = self.machine
        piece = graph.num_cols * min(width * VALUE, m.slice_bytes)
        fits = min(1.0, m.cache_bytes / max(piece, 1.0))
        hits = 1 - (1 - fits) * graph.far
        return graph.num_entries * width * VALUE * (hits / m.cache + (1 - hits) / m.gather)
