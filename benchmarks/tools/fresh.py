"""Fresh processes, and the memory that a stretch of code takes in them.

Peak memory is only honest in a process that has done nothing else: allocators keep what they once
had, and lazily loaded libraries are paid by whoever comes first.
"""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest import mock

import psutil

from benchmarks.tools import timing
from pyg_accel.runtime.large_pages import VARIABLE

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def small_pages() -> Iterator[None]:
    """New processes in the block take torch as it comes, without the variable of pyg_accel."""
    with mock.patch.dict(os.environ):
        os.environ[VARIABLE] = "0"
        yield


def python_path() -> str:
    """The PYTHONPATH of a program that imports this checkout, before what it has now."""
    return os.pathsep.join([str(timing.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def fresh_process() -> ProcessPoolExecutor:
    """A new interpreter, which imports the program from now on; as a context it ends."""
    pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
    pool.submit(os.getpid)  # starts it
    return pool


def wait_for_imports(*processes: ProcessPoolExecutor) -> None:
    """Return when they have imported the program, so that it disturbs no clock."""
    for started in [process.submit(os.getpid) for process in processes]:
        started.result()


def in_fresh_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of a module-level function, run in a new interpreter; its exceptions come back."""
    with fresh_process() as process:
        return process.submit(function, *args, **kwargs).result()


class PeakMemory:
    """Context manager; afterwards `mib` is the peak resident memory above that at the start."""

    mib = 0.0

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        _reset_peak()
        self._before = psutil.Process().memory_info().rss
        return self

    def __exit__(self, *_: object) -> None:
        self.mib = max(0, _peak_bytes() - self._before) / 2**20


if sys.platform == "linux":
    # getrusage is no use here: a spawned process inherits the peak of its parent.

    def _reset_peak() -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def _peak_bytes() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

else:

    def _reset_peak() -> None:
        """Elsewhere the peak of a process cannot be reset: load little before measuring."""

    def _peak_bytes() -> int:
        memory = psutil.Process().memory_info()
        if hasattr(memory, "peak_wset"):  # Windows
            return memory.peak_wset
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
