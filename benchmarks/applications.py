"""The seven applications of the DGL paper: epochs and memory of stock PyG, patched and optimized.

    python -m benchmarks.applications [--device cuda] [--quick] [--applications GCN GAT ...]

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
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pandas as pd
import torch
from tqdm import tqdm

from benchmarks import gpu_machine, machine, results, tasks
from benchmarks.fresh import PeakMemory, fresh_process, small_pages, wait_for_imports
from benchmarks.machine import clock_of
from benchmarks.stock import stock_pyg

NAME = "applications"
EXAMPLES = machine.ROOT / "examples/applications"
VARIANTS = ("stock", "large pages", "patched", "optimized")
CHECKED = 3  # steps whose losses are compared: training blows up the rounding of the steps before
ALLOWED = 1e-3  # of a loss: sums in another order, through the steps of Adam
LOST = 0.98  # a ratio below is listed
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
            "report": report()}  # fmt: skip


def lap(variant: str) -> float:
    """Seconds of an epoch of a run of this process."""
    with mode_of(variant):
        return Run.current[variant].lap()


def report() -> str:
    """What was accelerated since the last `reset_report()`, a line each."""
    import pyg_accel

    with open(os.devnull, "w") as nowhere:
        rows = pyg_accel.report(nowhere).rows
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
    rows = []
    for variant, run in found.items():
        epoch = machine.quantiles(times[variant])
        rows.append({"variant": variant, "epoch_ms": epoch.median, "p20": epoch.p20,
                     "p80": epoch.p80, "least_ms": min(times[variant]) * 1e3,
                     "epochs": len(times[variant]), **run})  # fmt: skip
    return rows


def laps(processes: Processes, seconds: float) -> dict[str, list[float]]:
    """Epochs in turns, until they have taken so long in all."""
    times: dict[str, list[float]] = {variant: [] for variant in processes}
    for number in itertools.count():
        if number == MOST or (number >= LEAST and sum(map(sum, times.values())) > seconds):
            return times
        for variant, process in processes.items():
            times[variant].append(process.submit(lap, variant).result())
    raise AssertionError


def side_by_side(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a case, with the columns (figure, variant)."""
    frame = frame.assign(batch=frame["batch"].fillna(0).astype(int))
    order = frame[CASE].drop_duplicates()
    wide = frame.pivot_table(["epoch_ms", "peak_mib"], CASE, "variant", sort=False)
    return wide.loc[list(order.itertuples(index=False, name=None))]


def means(frame: pd.DataFrame) -> dict[str, float]:
    """How many times faster than stock, over the seven applications, nothing in batches.

    Where one has several data sets, their geometric mean counts once.
    """
    times = side_by_side(frame)["epoch_ms"]
    times = times[times.index.get_level_values("batch") == 0]
    logs = times.rdiv(times["stock"], axis=0).map(math.log)
    each = logs.groupby("application", sort=False).mean()
    return {variant: math.exp(column.mean()) for variant, column in each.items()}


def show(frame: pd.DataFrame) -> None:
    """Print all times, the ratios to stock, their means, and what loses."""
    wide = side_by_side(frame)
    times, peaks = wide["epoch_ms"], wide["peak_mib"]
    print("epoch, ms\n", times.round(1).to_string())
    print("peak, MiB\n", peaks.round(0).to_string())
    ratios = times.rdiv(times["stock"], axis=0)
    print("times faster than stock\n", ratios.round(2).to_string())
    for variant, mean in means(frame).items():
        print(f"{variant}: geometric mean over applications, without batches: {mean:.2f}")
    for variant in ratios.columns.drop("stock"):
        for case, ratio in ratios[variant][ratios[variant] < LOST].items():
            print(f"  lost: {variant} {ratio:.2f}  {case}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = list(dict.fromkeys(case.application for case in CASES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes: does it work?")
    parser.add_argument("--applications", nargs="+", choices=names, default=names)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--add", action="store_true", help="keep the CSV's rows of other cases")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a case, for all variants")
    options = parser.parse_args(arguments)
    variants = options.variants or [
        variant for variant in VARIANTS if options.device == "cpu" or variant != "large pages"
    ]
    facts = gpu_machine.facts_of(options.device)
    cases = [available(case, options) for case in CASES if case.application in options.applications]
    name = NAME if options.device == "cpu" else f"{NAME}_cuda"
    rows = kept(name, cases, quick=options.quick) if options.add else []
    with processes_of(variants, options.device) as processes:
        for case in (progress := tqdm([case for case in cases if case])):
            progress.set_postfix_str(f"{case.application}, {case.data}")
            noise = {"load": os.getloadavg()[0], "clock": clock_of(options.device).__name__}
            head = {"application": case.application, "data": case.data, "batch": case.size or 0}
            head |= size_of(case.data)
            seconds = options.seconds / 10 if options.quick else options.seconds
            found = measure(case, processes, options.device, seconds)
            rows += [head | row | noise | facts for row in found]
            frame = results.write(rows, name, quick=options.quick)  # each time: a run takes long
    show(frame)


def kept(name: str, cases: list[Case | None], *, quick: bool) -> list[dict[str, Any]]:
    """Rows of the CSV that are of none of these cases."""
    frame = results.read((results.QUICK if quick else results.FOLDER) / f"{name}.csv")
    new = {(case.application, case.data, case.size or 0) for case in cases if case}
    return [row for row in frame.to_dict("records") if tuple(row[k] for k in CASE) not in new]


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
