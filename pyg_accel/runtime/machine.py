"""The devices of this machine: their names in measurements, and the properties of a GPU."""

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["INTERPRETED", "Device", "Gpu", "as_captured", "gpu_of", "is_captured", "is_capturing",
           "processor"]  # fmt: skip

_warming_up = 0  # blocks of as_captured; global, as backward passes run in other threads


@dataclass(frozen=True, slots=True)
class Device:
    """A device, by the properties that affect measured times.

    Attributes:
        kind: ``"cpu"`` or ``"cuda"``.
        name: of the GPU, or of the processor's family.
        isa: vector instructions of a CPU as torch names them; empty for a GPU.
        threads: threads that torch uses on a CPU; 0 for a GPU.
    """

    kind: str
    name: str
    isa: str = ""
    threads: int = 0

    @classmethod
    def of(cls, device: torch.device | str) -> "Device":
        """Describe a device of this machine."""
        device = torch.device(device)
        if device.type == "cuda":
            return cls("cuda", torch.cuda.get_device_name(device))
        if device.type != "cpu":
            return cls(device.type, device.type)
        isa = torch.backends.cpu.get_cpu_capability()
        return cls("cpu", _family(), isa, torch.get_num_threads())

    def __str__(self) -> str:
        if self.kind != "cpu":
            return self.name
        return f"{self.name}, {self.isa}, {self.threads} threads"

    @property
    def slug(self) -> str:
        """A name for its folder, such as ``nvidia_h200`` or ``amd_epyc_avx512_2_threads``."""
        return "_".join(re.findall(r"[a-z0-9]+", str(self).lower()))


@contextmanager
def as_captured() -> Iterator[None]:
    """Make the choices of a capture in the block, for the warm-up before one.

    Compiling or loading a kernel inside of a capture breaks it, so a capture may only launch
    kernels that its warm-up has launched.
    """
    global _warming_up
    _warming_up += 1
    try:
        yield
    finally:
        _warming_up -= 1


def is_captured(tensor: torch.Tensor) -> bool:
    """Return whether calls on a tensor become part of a CUDA graph, now or after a warm-up."""
    return _warming_up > 0 or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def is_capturing() -> bool:
    """Return whether calls on a CUDA device become part of a CUDA graph, now or after a warm-up."""
    return _warming_up > 0 or torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=1)
def processor() -> str:
    """Return the name of the processor, with the number of its model."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _family() -> str:
    """Return the family of the processor, such as ``AMD EPYC``, without the model number."""
    words = processor().replace("(R)", " ").replace("(TM)", " ").split()
    return " ".join(words[:2]) or "unknown"


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a CUDA device that kernels depend on; the defaults are of an H200.

    Attributes:
        name: of the device.
        l2_bytes: size of its L2 cache.
        multiprocessors: number of multiprocessors.
        shared_bytes: the most shared memory of a block of threads.
        bandwidth: bytes per second between its memory and its L2 cache, as specified.
        l2_bandwidth: multiprocessors times clock rate (Hz), to which the rate of the L2 is
            proportional.
    """

    name: str
    l2_bytes: int
    multiprocessors: int
    shared_bytes: int = 227 << 10
    bandwidth: float = 4.8e12
    l2_bandwidth: float = 132 * 1.98e9


INTERPRETED = Gpu("interpreter", 2**16, 2)
_RESERVED = 1 << 10  # bytes of shared memory per block that CUDA reserves


@lru_cache(maxsize=64)
def gpu_of(index: int) -> Gpu:
    """Return the properties of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    optional: dict[str, Any] = {  # not every release of torch has all of these
        "bandwidth": 2e3 * getattr(properties, "memory_clock_rate", 0)
        * getattr(properties, "memory_bus_width", 0) / 8,
        "l2_bandwidth": 1e3 * getattr(properties, "clock_rate", 0)
        * properties.multi_processor_count,
        "shared_bytes": getattr(properties, "shared_memory_per_multiprocessor", 0) - _RESERVED,
    }  # fmt: skip
    return Gpu(
        properties.name,
        properties.L2_cache_size,
        properties.multi_processor_count,
        **{name: value for name, value in optional.items() if value > 0},
    )
