"""The seven applications of the DGL paper: epochs and memory of stock PyG, patched and optimized.

    python -m benchmarks.epochs.applications [--device cuda] [--quick] [--applications GCN GAT ...]

The programs are those of `examples/applications`; a row is one of them on one data set, real ones
where PYG_ACCEL_DATA names their folder. All variants begin with the same seed: `stock` is PyG and
torch as they come, `large pages` stock PyG with torch's variable for large memory pages, which
importing pyg_accel sets, `patched` has `pyg_accel.patch()`, `optimized` in addition
`pyg_accel.optimize(model, train=True)`. Losses of the first steps must agree before the clock
starts; then the variants take turns, an epoch each, so that they share the noise of the machine.
On a CPU each has a process of its own, since memory pages belong to a process. On a GPU one process
has them all: steps there take as long as their Python, in which two processes differ by up to 30%.
The first epoch, which builds the graphs, is timed apart. Memory is the peak of two epochs above
what the data take, `optimize()` included. With OMP_NUM_THREADS=1 `clock` is that of the processor,
for machines that others use, and `load` is that of the machine when a case began.

The paper measures DGL 0.4.3 before and after its own work, on 28 cores and other models' sizes:
1.5x to 13x over the seven. Its figures for each application are bars without numbers.
"""

import argparse
import ctypes
import gc
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pandas as pd
import torch

from benchmarks.tools import frames, plot, results, tasks, timing
from benchmarks.tools import variants as variants_
from benchmarks.tools.fresh import PeakMemory, fresh_process, small_pages, wait_for_imports
from benchmarks.tools.timing import clock_of
from benchmarks.tools.variants import stock_pyg

NAME = "epochs/applications"
EXAMPLES = timing.ROOT / "examples/applications"
VARIANTS = ("stock", "large pages", "patched", "optimized")
CHECKED = 2  # steps whose losses are compared: training blows up the rounding of the steps before
ALLOWED = 1e-3  # of a loss: sums in another order, through the steps of Adam
LEAST, MOST = 3, 30  # epochs on the clock
CASE = ["application", "data", "batch"]
Processes = dict[str, ProcessPoolExecutor]


class Case(NamedTuple):
    """An application on a data set.

    Attributes:
        application: as the paper calls it.
        program: of `examples/applications`.
        data: as `tasks.load` knows it.
        on_gpu: instead of it on a GPU; the same where it is empty.
        size: of a batch, or None for everything at once, as in the paper.
    """

    application: str
    program: str
    data: str
    on_gpu: str = ""
    size: int | None = None


CASES = (
    Case("GCN", "gcn", "facebook-pages"),
    Case("GCN", "gcn", "pubmed-like"),
    Case("GraphSAGE", "graphsage", "cornell5"),
    Case("GraphSAGE", "graphsage", "products-like@0.01", "products-like@0.2"),
    Case("GraphSAGE, sampled", "graphsage", "products-like@0.01", size=1024),
    Case("R-GCN", "rgcn", "bgs-like@0.1", "bgs-like"),
    Case("LGNN", "lgnn", "block-models@0.25", "block-models"),
    Case("LGNN", "lgnn", "block-models@0.1", size=1),
    Case("MoNet", "monet", "facebook-pages"),
    Case("MoNet", "monet", "pubmed-like"),
    Case("GC-MC", "gcmc", "douban"),
    Case("GC-MC", "gcmc", "ml-1m-like"),
    Case("GAT", "gat", "molecules-like"),
    Case("GAT", "gat", "molecules-like@0.25", size=128),
)


def program(name: str) -> ModuleType:
    """An example as a module; PyG looks layers up by the module that they are of."""
    known = f"pyg_accel_example_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


class Run:
    """A model in training, by one variant."""

    current: ClassVar[dict[str, "Run"]] = {}  # of this process, by variant

    def __init__(self, case: Case, variant: str, device: str, data: Any) -> None:
        import pyg_accel

        self.device, made = device, program(case.program)
        torch.manual_seed(0)
        model: torch.nn.Module = made.build(data).to(device)
        self.batches: Iterable[Any] = [data]
        if hasattr(made, "batches"):
            self.batches = made.batches(data, case.size)
        if variant == "optimized":
            with torch.random.fork_rng():  # the batches are those of other variants
                first = made.arguments(next(iter(self.batches)))
                model = pyg_accel.optimize(model, *first, train=True, static=made.STATIC)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.005, eps=1e-6)
        self.model, self.train = model, made.train

    def epoch(self) -> list[float]:
        """The losses of the batches."""
        losses = [self.train(self.model, self.optimizer, batch) for batch in self.batches]
        if self.device == "cuda":
            torch.cuda.synchronize()
        return losses

    def lap(self) -> float:
        """Seconds of an epoch."""
        clock = clock_of(self.device)
        begin = clock()
        self.epoch()
        return clock() - begin


class PeakOnGpu:
    """As `PeakMemory`, of what torch has allocated on a GPU."""

    mib = 0.0

    def __enter__(self) -> "PeakOnGpu":
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        self.mib = (torch.cuda.max_memory_allocated() - self._before) / 2**20


def clear(device: str) -> None:
    """Forget the case before in this process, its runs and its graphs."""
    import pyg_accel

    Run.current.clear()
    pyg_accel.unpatch()
    # Starts threads and libraries for all variants alike.
    torch.mm(torch.ones(512, 512, device=device), torch.ones(512, 512, device=device))


def mode_of(variant: str) -> AbstractContextManager[None]:
    """What `patch()` does in this process where the variant has it, PyG as it is where not."""
    import pyg_accel

    if variant not in ("patched", "optimized"):
        return stock_pyg()
    pyg_accel.patch()
    return nullcontext()


def start(case: Case, variant: str, device: str) -> dict[str, Any]:
    """Make a run in this process: losses, time, peak memory and report of its first epochs."""
    import pyg_accel

    program(case.program)
    data, losses, clock = tasks.load(case.data).to(device), [], clock_of(device)
    pyg_accel.reset_report()
    gc.collect()
    if sys.platform == "linux":  # what an allocator keeps would hide the peak of the next run
        ctypes.CDLL(None).malloc_trim(0)
    with PeakMemory() if device == "cpu" else PeakOnGpu() as memory, mode_of(variant):
        Run.current[variant] = run = Run(case, variant, device, data)
        begin = clock()
        losses += run.epoch()
        first = clock() - begin
        losses += run.epoch()
    return {"losses": losses[:CHECKED], "first_epoch_ms": first * 1e3, "peak_mib": memory.mib,
            "report": told()}  # fmt: skip


def lap(variant: str) -> float:
    """Seconds of an epoch of a run of this process."""
    with mode_of(variant):
        return Run.current[variant].lap()


def told() -> str:
    """What was accelerated since the last `reset_report()`, a line each."""
    rows = variants_.report()
    return "; ".join(f"{row.layer} {row.calls}x: {row.formula or row.reason}" for row in rows)


def size_of(data: str) -> dict[str, int]:
    loaded = tasks.load(data)
    return {"N": loaded.num_nodes, "E": loaded.edge_index.size(1)}


@contextmanager
def processes_of(variants: Sequence[str], device: str) -> Iterator[Processes]:
    """The processes that the variants run in; stock PyG has one without large memory pages."""
    with ExitStack() as stack:
        processes: Processes = {}
        for variant in variants:
            if device != "cpu" and processes:
                processes[variant] = next(iter(processes.values()))
                continue
            with small_pages() if variant == "stock" else nullcontext():
                processes[variant] = stack.enter_context(fresh_process())
        wait_for_imports(*processes.values())
        yield processes


def measure(case: Case, processes: Processes, device: str, seconds: float) -> list[dict[str, Any]]:
    """A row a variant."""
    for process in dict.fromkeys(processes.values()):
        process.submit(clear, device).result()
    found = {v: p.submit(start, case, v, device).result() for v, p in processes.items()}
    right = next(iter(found.values()))["losses"]
    for variant, run in found.items():
        run["error"] = max(
            abs(a - b) / abs(b) for a, b in zip(run.pop("losses"), right, strict=True)
        )
        if not run["error"] <= ALLOWED:
            raise SystemExit(f"{case}, {variant}: losses differ by {run['error']:.2g}")
    times = laps(processes, seconds)
    return [
        {"variant": variant, **timing.quantiles(times[variant]).columns("epoch_ms"),
         "least_ms": min(times[variant]) * 1e3, "epochs": len(times[variant]), **run}
        for variant, run in found.items()
    ]  # fmt: skip


def laps(processes: Processes, seconds: float) -> dict[str, list[float]]:
    """Epochs in turns, until they have taken so long in all."""
    times: dict[str, list[float]] = {variant: [] for variant in processes}
    for number in itertools.count():
        if number == MOST or (number >= LEAST and sum(map(sum, times.values())) > seconds):
            return times
        for variant, process in processes.items():
            times[variant].append(process.submit(lap, variant).result())
    raise AssertionError


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(
        __doc__, devices=("cpu", "cuda"), quick="a tenth of the sizes: does it work?", seconds=8.0,
        applications={case.application: 0 for case in CASES}, variants=dict.fromkeys(VARIANTS),
        add=False,
    )  # fmt: skip
    options = parser.parse_args(arguments)
    device, fraction = options.device, 10 if options.quick else 1
    variants = [v for v in options.variants if device == "cpu" or v != "large pages"]
    cases = [available(case, options) for case in CASES if case.application in options.applications]
    name = NAME if device == "cpu" else f"{NAME}_cuda"
    rows = results.Rows(name, options, device, CASE if options.add else ())
    with processes_of(variants, device) as processes:
        for case in results.each(case for case in cases if case):
            head = {"application": case.application, "data": case.data, "batch": case.size or 0}
            rows.without(**head)
            noise = {"load": os.getloadavg()[0], "clock": clock_of(device).__name__}
            found = measure(case, processes, device, options.seconds / fraction)
            rows.add(found, **head, **size_of(case.data), **noise)
    frame = rows.done()
    times = frames.applications(frame)["epoch_ms"]
    over = times.rdiv(times["stock"], axis=0)
    print(pd.concat({"ms": times, "over stock": over}, axis=1).round(2).to_string())
    print("geometric means over applications\n", frames.application_means(frame).round(2))
    plot.beside(rows.path)


def available(case: Case, options: argparse.Namespace) -> Case | None:
    """The case as it is run on this device and at this size, if its files are there."""
    data = case.on_gpu if case.on_gpu and options.device != "cpu" else case.data
    base, _, share = data.partition("@")
    if base in tasks.REAL and not os.environ.get("PYG_ACCEL_DATA"):
        print(f"{case.application} on {base} is left out: PYG_ACCEL_DATA names no folder")
        return None
    if options.quick and base in tasks.GENERATED:
        data = f"{base}@{float(share or 1) / 10:g}"
    return case._replace(data=data)


if __name__ == "__main__":
    main()
