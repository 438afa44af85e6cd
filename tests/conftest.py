"""What every test shares: tiers, seeds, a clean house before and after, runs to compare."""

import fcntl
import functools
import gc
import hashlib
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from glob import glob
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, FileSystemLoader

# Read when torch's compiler is imported: its pool of processes takes longer to start than it saves.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.cpp_extension import include_paths, library_paths

if not torch.cuda.is_available():  # decorators of Triton kernels read it when they are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pyg_accel
from pyg_accel import Graph
from pyg_accel.backends import backends, dispatch, get_backend, registry
from pyg_accel.backends.base import Launch
from pyg_accel.graph import derived
from pyg_accel.patching import api, overrides, reasons
from pyg_accel.patching.dynamo_guards import Look
from pyg_accel.runtime.native import cpu_library, cpu_unavailable_reasons
from pyg_accel.settings import SETTINGS, settings

DATA = "PYG_ACCEL_DATA"
ROOT = Path(__file__).parents[1]


def pytest_configure() -> None:
    """Do once what torch and PyG do often: compile a template, queue seeds of devices to come.

    Make plain layers first: PyG renders the template of a class from its first instance, and
    one with several aggregators has no `message_and_aggregate`, for plain ones either.
    """
    from torch_geometric import template
    from torch_geometric.nn import GraphConv, SAGEConv

    environment = functools.cache(lambda path: Environment(loader=FileSystemLoader(path)))
    template.Environment = lambda loader: environment(*loader.searchpath)
    for device in (torch.cuda, torch.mtia, torch.xpu):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None
    SAGEConv(1, 1), GraphConv(1, 1)


def pytest_unconfigure() -> None:
    """Let the objects that ``little_garbage`` has set aside die as at any end of a process."""
    gc.unfreeze()


def covering(rows: Sequence[tuple[Hashable, ...]], strength: int) -> list[int]:
    """Choose rows of a table in which every value occurs that occurs in any row.

    With a `strength` of 2, every two values of two columns that meet in any row.

    Greedy: always the row that adds most, and among equals any, so that no value is met more often
    than need be. The choice is the same each time, and about as long as the longest column, or the
    product of the two longest.
    """
    order = random.Random(0).sample(range(len(rows)), len(rows))
    meetings = [
        frozenset(combinations(enumerate(row), strength)) or frozenset(enumerate(row))
        for row in rows
    ]
    missing = set().union(*meetings)
    chosen = []
    while missing:
        best = max(order, key=lambda i: len(meetings[i] & missing))
        missing -= meetings[best]
        chosen.append(best)
    return sorted(chosen)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as ``full`` by their parameters.

    ``pairs``: those that a table of all pairs leaves out. ``pairs("triton")`` looks only at cases
    with that parameter. ``each`` and ``each("triton")``: those that a table leaves out in which
    every value occurs. ``heavy("triton", 577)``: those that have both parameters. ``one_of(3, 1)``:
    all but every third, from the second one on.
    """
    products: dict[tuple[Any, str, int, Any], list[Any]] = {}
    counts = Counter[tuple[Any, str]]()
    for item in (item for item in items if hasattr(item, "callspec")):
        values = list(item.callspec.params.values())
        if any(all(v in values for v in heavy.args) for heavy in item.iter_markers("heavy")):
            item.add_marker(pytest.mark.full)
        elif marker := item.get_closest_marker("one_of"):
            number, first = (*marker.args, 0)[:2]
            if counts[item.parent, item.originalname] % number != first:
                item.add_marker(pytest.mark.full)
            counts[item.parent, item.originalname] += 1
        else:
            for strength, name in enumerate(("each", "pairs"), 1):
                if marker := item.get_closest_marker(name):
                    some = tuple(v for v in marker.args if v in values)
                    if some or not marker.args:
                        key = (item.parent, item.originalname, strength, some)
                        products.setdefault(key, []).append(item)
    for (_, _, strength, _), product in products.items():
        rows = [
            tuple(v if isinstance(v, Hashable) else id(v) for v in item.callspec.params.values())
            for item in product
        ]
        chosen = set(covering(rows, strength))
        for i, item in enumerate(product):
            if i not in chosen:
                item.add_marker(pytest.mark.full)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped, and why; first those that need a GPU."""
    reasons: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for report in terminalreporter.stats.get("skipped", []):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        marks = getattr(report, "keywords", ())  # modules that are skipped have none
        needs_gpu = "gpu" in marks or re.search("GPU|CUDA", reason) is not None
        reasons[needs_gpu][reason] += 1
    for needs_gpu, counts in reasons.items():
        what = "for want of a GPU" if needs_gpu else "for other reasons"
        terminalreporter.write_line(f"{counts.total()} tests skipped {what}")
        for reason, count in counts.most_common():
            terminalreporter.write_line(f"{count:6} {reason}")


@pytest.fixture(scope="session", autouse=True)
def interpreted_integers() -> None:
    """Let Triton's interpreter assert that no integer overflows: offsets may be of 32 bits."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        from triton.runtime.interpreter import interpreter_builder

        interpreter_builder.options = replace(interpreter_builder.options, debug=True)


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> None:
    """Leave what is there already out of collections, which take half a second with it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def clean_house(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start from defaults; whatever a test switched on is off after it, and that is checked."""
    for name in list(os.environ):
        if name.startswith("PYG_ACCEL_") and name != DATA:
            monkeypatch.delenv(name)
    settings.tuning = ""  # what was measured on this machine
    known = backends()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small graphs on a shared machine; tests of threads ask for more
    assert not overrides.installed()
    yield
    pyg_accel.unpatch()
    for setting in SETTINGS:
        setattr(settings, setting.name, None)
    pyg_accel.reset_report()
    registry._backends.clear()
    registry._backends.update(known)
    dispatch.forget_decisions()
    torch.set_num_threads(threads)
    if not cpu_unavailable_reasons():
        cpu_library().configure("", 0, 0)
    if overrides.installed():
        gc.collect()  # optimised models take their overrides with them
    left = overrides.installed()
    for handle in [*api._handles]:  # of a model that a failure holds: not the next test's
        handle.remove()
    assert not left
    assert not reasons.is_active()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what Python allocates with NaN, so that what a kernel does not write is seen."""

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            out = allocate(*args, **kwargs)
            plain = type(out) is Tensor and not torch.compiler.is_compiling()
            if plain and out.is_floating_point():
                out.detach().fill_(torch.nan)
            return out

        return filled

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture
def off_by(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make results of the kernels wrong by a factor, on graphs of more rows than `above`."""

    def change(factor: float, above: int = 0, kernel: str = "gspmm") -> None:
        kernels = get_backend("cpu").kernels
        right = kernels[kernel]

        def run(*args: Any, **kwargs: Any) -> Any:
            return right.run(*args, **kwargs) * factor

        def bind(*args: Any, **kwargs: Any) -> Any:
            bound = right.bind(*args, **kwargs)

            def on(csr: Any) -> Launch:
                launch = bound(csr)
                wrong = Launch(lambda inputs: [t * factor for t in launch(inputs)], listed=True)
                return wrong if len(csr.rowptr) - 1 > above else launch

            return on

        wrong = {"run": run} if right.bind is None else {"bind": bind}
        monkeypatch.setitem(kernels, kernel, replace(right, **wrong))
        dispatch.forget_decisions()

    return change


@pytest.fixture
def always() -> None:
    """Accelerate whatever can be, whatever its size."""
    settings.always = True


@pytest.fixture
def data_root() -> Path:
    """The folder of real graphs."""
    root = os.environ.get(DATA)
    if not root:
        pytest.skip(f"{DATA} does not name a folder of data sets")
    return Path(root)


@pytest.fixture
def report_of() -> Callable[[], list[Any]]:
    """Rows of the report so far, in the order of the layers' first calls, without printing."""

    def rows() -> list[Any]:
        with open(os.devnull, "w") as nowhere:
            return pyg_accel.report(nowhere).rows

    return rows


def flat_tensors(value: Any) -> list[Tensor]:
    """All tensors in a nest of tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in flat_tensors(v)]
    return []


def run_layer(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and all gradients of a fixed scalar function of them, with fixed random numbers."""
    torch.manual_seed(7)
    leaves = {
        f"input {i}": t for i, t in enumerate(flat_tensors([args, kwargs])) if t.requires_grad
    } | dict(layer.named_parameters())
    for leaf in leaves.values():
        leaf.grad = None
    outs = [t for t in flat_tensors(layer(*args, **kwargs)) if t.is_floating_point()]
    differentiable = [t for t in outs if t.requires_grad]
    if differentiable:
        weights = torch.Generator().manual_seed(3)
        loss = sum(
            (t * torch.randn(t.shape, generator=weights, dtype=t.dtype)).sum()
            for t in differentiable
        )
        loss.backward()
    result = {f"output {i}": t.detach() for i, t in enumerate(outs)}
    result |= {f"gradient of {n}": t.grad for n, t in leaves.items() if t.grad is not None}
    return {name: t.clone() for name, t in result.items()}


@pytest.fixture
def stock_and_patched() -> Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Run a layer without and with ``patch()`` and return the outputs and gradients of both."""

    def run(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        stock = run_layer(layer, args, kwargs)
        with pyg_accel.patched():
            ours = run_layer(layer, args, kwargs)
        return stock, ours

    return run


@pytest.fixture
def same_as_stock(stock_and_patched: Callable[..., Any]) -> Callable[..., None]:
    """Assert that a layer gives the same outputs and gradients under ``patch()``.

    ``rtol`` is relative to the largest element: results are sums whose order of additions differs,
    so that small elements carry the rounding of large terms.
    """

    def check(layer: torch.nn.Module, *args: Any, rtol: float | None = None, **kwargs: Any) -> None:
        stock, ours = stock_and_patched(layer, *args, **kwargs)
        assert list(stock) == list(ours)
        for name, expected in stock.items():
            actual = ours[name]
            assert actual.shape == expected.shape, name
            assert actual.dtype == expected.dtype, name
            default = {torch.float64: 1e-10, torch.float32: 2e-5}.get(expected.dtype, 2e-2)
            finite = expected[expected.isfinite()].abs()
            scale = max(float(finite.max()) if finite.numel() else 0.0, 1.0)
            torch.testing.assert_close(
                actual, expected, rtol=0, atol=(rtol or default) * scale, equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )  # fmt: skip

    return check


@pytest.fixture
def stored_graphs() -> Callable[[], int]:
    """Count the graphs that are stored for the edge_index that they were built of."""
    return lambda: sum(isinstance(value, Graph) for value in derived.values())


class Dispatched(TorchDispatchMode):
    """The names of the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def dispatched() -> type[Dispatched]:
    return Dispatched


class LargestResult(Look):  # one of ours: under a mode of the user calls are PyG's
    """How many numbers the largest result of any operator has, and which operator's it is."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.operator = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and not t.is_meta:
                numbers = t.untyped_storage().nbytes() // t.itemsize
                if numbers > self.numbers:
                    self.numbers, self.operator = numbers, func.name()
        return out


@pytest.fixture
def largest_result() -> type[LargestResult]:
    return LargestResult


@pytest.fixture(scope="session")
def cuda_on_cpu() -> Any:
    """The operators of the CUDA library for CPU tensors; compiled where the source is another."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted([*ROOT.glob("csrc/**/*.*"), *ROOT.glob("tests/cuda_on_cpu/**/*.*")]):
        digest.update(path.read_bytes())
    built = ROOT / "build" / f"cuda_on_cpu_{digest.hexdigest()[:16]}.so"
    built.parent.mkdir(exist_ok=True)
    with open(built.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            compile_for_cpu(built)
    torch.ops.load_library(built)
    return torch.ops.pyg_accel_cuda


def compile_for_cpu(built: Path) -> None:
    """Compile the kernels that need nothing of a GPU."""
    names = ("cbsr_*.c*", "maxk.cu", "take.cu", "neighbors*.c*", "pyg_lib/points.c*",
             "collate.c*")  # fmt: skip
    sources = [path for name in names for path in glob(f"{ROOT}/csrc/cuda/{name}")]
    sources = [path for path in sources if not path.endswith(".cuh")]
    sources.append(f"{ROOT}/tests/cuda_on_cpu/fibers.cpp")
    folders = [f"-I{path}" for path in (f"{ROOT}/tests/cuda_on_cpu", f"{ROOT}/csrc",
                                        *include_paths())]  # fmt: skip
    part = built.with_suffix(".part")
    subprocess.check_call([
        "g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-x", "c++", *folders, *sources,
        "-DTORCH_TARGET_VERSION=0x020a000000000000", "-o", str(part),
        *(f"-L{path}" for path in library_paths()), "-ltorch_cpu",
    ])  # fmt: skip
    part.rename(built)
