"""``python -m pyg_accel doctor | run | explain | profile | tune``."""

import argparse
import platform
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any

import pyg_accel

__all__ = ["main"]

PACKAGES = ("torch", "torch_geometric", "torch_sparse", "pyg_lib", "triton", "xgboost")
TESTED = {"torch": (2, 15), "torch_geometric": (2, 8)}  # the newest


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m pyg_accel", description=__doc__)
    parser.add_argument("--version", action="version", version=f"pyg_accel {pyg_accel.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    examine = commands.add_parser("doctor", help="versions, processor, backends and why not")
    examine.set_defaults(call=lambda _: doctor())
    run = commands.add_parser("run", help="run a PyG script unchanged under patch(), then report")
    run.add_argument("-m", dest="module", action="store_true", help="the name of a module follows")
    run.add_argument("script", help="path of a Python script; with -m, the name of a module")
    run.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    run.set_defaults(call=lambda o: run_script(o.script, o.args, module=o.module))
    explain = commands.add_parser("explain", help="what optimize() would do to a script's model")
    explain.add_argument("model", metavar="SCRIPT:MODEL", help="a script and the name of its model")
    names = "what the script calls the arguments, e.g. data.x,data.edge_index"
    explain.add_argument("--inputs", default="x,edge_index", metavar="NAMES", help=names)
    explain.add_argument("--train", action="store_true", help="forward and backward are to be fast")
    explain.add_argument("--format", choices=("text", "md", "dot"), default="text")
    explain.set_defaults(call=lambda o: explain_model(o.model, o.inputs, train=o.train,
                                                      format=o.format))  # fmt: skip
    profile = commands.add_parser("profile", help="learn what kernels cost on this machine")
    profile.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    profile.add_argument("--out", type=Path, default=Path("cost_models"), help="folder to write")
    profile.add_argument("--minutes", type=float, default=float("inf"), help="stop measuring then")
    profile.set_defaults(call=lambda o: profile_machine(o.device, o.out, o.minutes))
    tune = commands.add_parser("tune", help="measure call costs and launches on this machine")
    tune.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    tune.add_argument("--out", type=Path, help="file to write; default: the one that is used")
    tune.set_defaults(call=lambda o: tune_machine(o.device, o.out))
    options = parser.parse_args(argv)
    result: int = options.call(options)
    return result


def doctor() -> int:
    """Print versions and backends; return 0 if patch() works with a fast backend."""
    import torch

    from pyg_accel.doctor import examine
    from pyg_accel.pyg_lib.seam import description
    from pyg_accel.runtime.large_pages import small_pages_reasons
    from pyg_accel.runtime.machine import processor

    print(f"pyg_accel {pyg_accel.__version__} in {Path(pyg_accel.__file__).parent}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    distributions = packages_distributions()
    for module in PACKAGES:
        installed = _version(module, distributions.get(module, ()))
        print(f"  {module:16} {installed}{_untested(module, installed)}")
    print(f"processor: {processor()}, {torch.get_num_threads()} threads")
    print(f"large pages: {'; '.join(small_pages_reasons()) or 'yes'}")
    gpus = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(gpus))
    print(f"GPUs: {names or 'none'}")
    fast, wrong = False, False
    for what, read in _settings(gpus):
        try:
            print(f"{what}: {read()}")
        except ValueError as error:
            print(f"{what}: wrong: {error}")
            wrong = True
    print("backends:")
    for name, reasons, info in examine():
        print(f"  {name:16} {'available' if not reasons else 'no: ' + '; '.join(reasons)}")
        fast |= name != "reference" and not reasons
        for key, value in info.items():
            text = " ".join(value) if isinstance(value, list) else value
            print(f"    {key}: {text}")
    print(f"for pyg-lib: {description()}")
    verdict = "accelerates models here" if fast else "changes nothing: no fast backend"
    print(f"verdict: patch() {'raises: a setting is wrong' if wrong else verdict}")
    return 0 if fast and not wrong else 1


def _settings(gpus: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield kinds of settings and functions that describe them, or raise a ValueError."""
    from pyg_accel.backends.dispatch import fast_backend_reasons
    from pyg_accel.rewrite.cost import cost_model
    from pyg_accel.settings import settings

    def changed() -> str:
        values = settings.changed()
        fast_backend_reasons("cpu")
        return ", ".join(f"{name}={value}" for name, value in values.items()) or "all defaults"

    for kind in ("cpu", "cuda") if gpus else ("cpu",):
        yield "tuning", partial(_tuning, kind)
        yield "cost model", lambda kind=kind: cost_model(kind).source  # type: ignore[misc]
    yield "settings", changed


def _tuning(kind: str) -> str:
    """Return the origin of the call costs of a kind of device."""
    import torch

    from pyg_accel.costs import costs
    from pyg_accel.runtime.tuned import device_of_kind, tuned, tuning_file

    device = device_of_kind(kind, torch.get_num_threads())
    costs(kind)
    if not (parameters := tuned(device)):
        command = f"python -m pyg_accel tune --device {kind}"
        return f"{device}: the numbers of the package (yours: {command})"
    measured = parameters.get("measured")
    day = measured.get("date") if isinstance(measured, dict) else "an unknown day"
    return f"{device}: measured on {day} ({tuning_file()})"


def _untested(module: str, installed: str) -> str:
    """Return a note on a version that is newer than the tested ones, or an empty string."""
    newest, number = TESTED.get(module), re.match(r"(\d+)\.(\d+)", installed)
    if newest is None or number is None or tuple(map(int, number.groups())) <= newest:
        return ""
    return f": newer than {newest[0]}.{newest[1]}, the newest that was tested"


def _version(module: str, distributions: Sequence[str]) -> str:
    if distributions:
        name = distributions[0]
        same = name.replace("-", "_").lower() == module
        return version(name) + ("" if same else f" ({name})")
    return "found, version unknown" if find_spec(module) else "not installed"


def run_script(target: str, args: Sequence[str], *, module: bool = False) -> int:
    """Run a script or a module as ``__main__`` under ``patch()``, and always print the report.

    Raises:
        BaseException: errors of the script, printed as by ``python script.py``.
    """
    if not module and not Path(target).is_file():
        return _fail("run", f"no file '{target}'")
    sys.argv = [target, *args]
    sys.path.insert(0, str(Path.cwd() if module else Path(target).resolve().parent))
    sys.excepthook = _print_frames_of_the_script
    with pyg_accel.patched():
        try:
            if module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(target, run_name="__main__")
        finally:
            sys.stdout.flush()
            report = pyg_accel.report(StringIO())
            print(f"\n{report if report.rows else 'pyg_accel: no message passing was called'}")
    return 0


def _print_frames_of_the_script(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    outer = (__file__, runpy.__file__, "<frozen ")  # frozen: runpy and the import system
    while frames and frames.tb_frame.f_code.co_filename.startswith(outer):
        frames = frames.tb_next
    sys.__excepthook__(kind, error.with_traceback(frames), frames)


def explain_model(target: str, inputs: str, *, train: bool, format: str) -> int:
    """Print the plan of ``optimize()`` for the model of a script."""
    script, colon, name = target.rpartition(":")
    problem = "" if colon and name else f"expected SCRIPT:MODEL (got '{target}')"
    if not problem and not Path(script).is_file():
        problem = f"there is no script '{script}'"
    if problem:
        return _fail("explain", problem)
    sys.argv = [script]  # a script that parses its arguments takes its defaults
    sys.path.insert(0, str(Path(script).resolve().parent))
    values = runpy.run_path(script, run_name="pyg_accel_explain")
    try:
        arguments = [_value_of(values, path.strip(), script) for path in (name, *inputs.split(","))]
        pyg_accel.explain(*arguments, train=train, format=format)
    except ValueError as error:
        return _fail("explain", f"{error} (--inputs {inputs})")
    return 0


def _value_of(values: dict[str, Any], path: str, script: str) -> Any:
    """Return a global of a script, or an attribute of one, by its name."""
    first, *names = path.split(".")
    if first not in values:
        raise ValueError(f"{script} has no '{first}' outside of its functions")
    value = values[first]
    for part in names:
        if not hasattr(value, part):
            raise ValueError(f"'{path}': a {type(value).__name__} has no '{part}'")
        value = getattr(value, part)
    return value


def _lacking(device: str, *modules: str) -> str:
    """Return why a measurement cannot be made here, or an empty string."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    missing = [name for name in modules if find_spec(name) is None]
    packages = " ".join("xgboost-cpu" if name == "xgboost" else name for name in missing)
    return f"it needs {' and '.join(missing)}: pip install {packages}" if missing else ""


def _fail(command: str, problem: str) -> int:
    print(f"python -m pyg_accel {command}: {problem}", file=sys.stderr)
    return 2


def profile_machine(kind: str, out: Path, minutes: float) -> int:
    """Measure every primitive, continuing an earlier run, and train cost models."""
    import torch

    from pyg_accel.rewrite.cost import Device
    from pyg_accel.rewrite.cost.measurements import collect
    from pyg_accel.rewrite.cost.train import train

    if why := _lacking(kind, "pandas", "tqdm", "xgboost"):
        return _fail("profile", why)
    device = torch.device(kind)
    folder = out / Device.of(device).slug
    measurements = folder / "measurements.csv"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not collect(device, measurements, minutes):
            print("Out of time: the same command goes on from here.")
        metadata = train(measurements, folder)
    except (ValueError, OSError) as error:
        return _fail("profile", str(error))
    print(f"{metadata['device']['name']}: error on graphs that were held out, median and 95%:")
    for name, part in metadata["primitives"].items():
        print(f"  {name:16} {part['error_median']:6.1%} {part['error_95']:6.1%}"
              f"   ({part['rows']} measurements)")  # fmt: skip
    print(f"To use these models: export PYG_ACCEL_COST_MODELS={out.resolve()}")
    return 0


def tune_machine(kind: str | None, out: Path | None) -> int:
    """Measure call costs, and print them and the path of the file."""
    import torch

    from pyg_accel.runtime.tuned import tuning_file
    from pyg_accel.tuning import tune

    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        path = out or tuning_file()
        tuning = tune(kind, path)
    except (ValueError, OSError) as error:
        return _fail("tune", str(error))
    print(tuning["measured"]["device"])
    for name, value in tuning["size"].items():
        print(f"  {name:16} {value:>10,}")
    print(f"Written to {path}", end="")
    print(f"; to use it: export PYG_ACCEL_TUNING={out.resolve()}" if out else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
