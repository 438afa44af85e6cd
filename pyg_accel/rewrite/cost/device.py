"""Which machine a cost model was made for."""

import platform
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["Device"]


@dataclass(frozen=True, slots=True)
class Device:
    """What must agree for times measured on one machine to hold on another.

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
        return cls("cpu", _processor(), isa, torch.get_num_threads())

    def __str__(self) -> str:
        if self.kind != "cpu":
            return self.name
        return f"{self.name}, {self.isa}, {self.threads} threads"

    @property
    def slug(self) -> str:
        """A name for its folder, such as ``nvidia_h200`` or ``amd_epyc_avx512_2_threads``."""
        return "_".join(re.findall(r"[a-z0-9]+", str(self).lower()))

    def as_dict(self) -> dict[str, str | int]:
        """Return the fields, for a file."""
        return asdict(self)


@lru_cache(maxsize=1)
def _processor() -> str:
    """The family, such as ``AMD EPYC``: the number of the model is left out."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2]
                break
    words = name.replace("(R)", " ").replace("(TM)", " ").split()
    return " ".join(words[:2]) or "unknown"
