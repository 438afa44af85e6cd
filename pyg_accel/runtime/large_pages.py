"""Large pages for large CPU tensors: switched on at import, explained by the report.

The system provides new memory in zeroed pages of 4 KiB. A training step on a large graph allocates
gigabytes, and zeroing them can take longer than the arithmetic. torch can request pages of 2 MiB,
with an environment variable that it reads at its first allocation. So the variable is set at
import.
"""

import os
import sys
from pathlib import Path

__all__ = ["VARIABLE", "ask_for_large_pages", "small_pages_reasons"]

VARIABLE = "THP_MEM_ALLOC_ENABLE"
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def ask_for_large_pages() -> None:
    """Set torch's variable, unless it is set already."""
    os.environ.setdefault(VARIABLE, "1")


def small_pages_reasons() -> list[str]:
    """Return why large tensors are in small pages; empty if not, or if unknown."""
    if sys.platform != "linux" or not _SYSTEM.exists():
        return []
    system = _SYSTEM.read_text()
    if "[always]" in system:
        return []
    if "[never]" in system:
        return [f"this system never gives large pages ({_SYSTEM})"]
    if os.environ.get(VARIABLE) != "1":
        return [f"{VARIABLE} is {os.environ.get(VARIABLE)!r}"]
    import torch

    # With the variable, large tensors begin at a page, otherwise after a header of the allocator.
    if torch.empty(8 << 20, dtype=torch.uint8).data_ptr() % os.sysconf("SC_PAGESIZE") == 0:
        return []
    return [
        "torch had allocated memory before pyg_accel was imported: import pyg_accel before "
        f"torch_geometric, or start Python with {VARIABLE}=1"
    ]
