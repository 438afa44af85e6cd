"""Times from bytes and operations: what decides where no learned model does."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.device import Device
from pyg_accel.rewrite.cost.features import GraphFeatures

__all__ = ["Machine", "Roofline", "machine_of"]

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
        call: seconds that a call takes whatever its size.
    """

    flops: float
    memory: float
    gather: float
    cache: float
    cache_bytes: float
    slice_bytes: float
    call: float


# Measured: a copy, a large product, and sums over graphs that do and do not fit the cache.
H200 = Machine(flops=50e12, memory=4.2e12, gather=3.2e12, cache=9.7e12, cache_bytes=40e6,
               slice_bytes=256, call=20e-6)  # fmt: skip
H200_UNITS = 132  # multiprocessors
CORE = Machine(flops=75e9, memory=12e9, gather=14e9, cache=45e9, cache_bytes=16e6,
               slice_bytes=1024, call=10e-6)  # fmt: skip


def machine_of(device: torch.device | str) -> tuple[Machine, str]:
    """Return figures for a device, and where they come from.

    Those of the machines that were measured are scaled by threads or multiprocessors: right in
    their proportions, which is what a choice between products depends on.
    """
    device = torch.device(device)
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
        return _scaled(H200, units / H200_UNITS), f"an H200's figures for {units} multiprocessors"
    threads = torch.get_num_threads()
    return _scaled(CORE, threads), f"one measured core's figures for {threads} threads"


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

    def seconds(self, primitive: Primitive) -> float:
        """Return the expected time of one call.

        Raises:
            ValueError: for a primitive that nobody knows, or a sparse one without its graph.
        """
        p, m = primitive, self.machine
        if p.name in ("gemm", "gemm_tn"):
            read = p.rows * p.inner + p.inner * p.cols + p.rows * p.cols
            return m.call + max(2 * p.rows * p.inner * p.cols / m.flops, VALUE * read / m.memory)
        if p.name in ("scale_rows", "elementwise"):
            return m.call + 2 * VALUE * p.rows * p.cols / m.memory
        if p.graph is None:
            raise ValueError(f"expected features of a graph for '{p.name}'")
        return m.call + self._sparse(p, p.graph)

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        """Return the expected time of each call."""
        return [self.seconds(primitive) for primitive in primitives]

    def _sparse(self, p: Primitive, graph: GraphFeatures) -> float:
        m, entries = self.machine, graph.num_entries
        out = VALUE * graph.num_rows * p.cols
        if p.name in ("spmm", "spmm_weighted"):
            weights = p.heads * VALUE if p.name == "spmm_weighted" else 0
            return self._gather(graph, p.cols) + (entries * (INDEX + weights) + out) / m.memory
        if p.name == "sddmm":
            edges = entries * (INDEX + p.heads * VALUE)
            return self._gather(graph, p.cols) + (edges + out) / m.memory
        if p.name == "scale_edges":
            return self._gather(graph, 1) + entries * (INDEX + VALUE) / m.memory
        if p.name == "edge_softmax":  # read twice, written once
            return 3 * entries * VALUE * p.heads / m.memory
        if p.name == "cbsr_spmm":  # k values and one-byte positions of every neighbour
            return self._gather(graph, p.inner * 1.25) + (entries * INDEX + out) / m.memory
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
        hits = max(fits, 1 - graph.far)
        return graph.num_entries * width * VALUE * (hits / m.cache + (1 - hits) / m.gather)
