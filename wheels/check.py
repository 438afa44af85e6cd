"""Install the wheel of dist/ into one fresh environment after another, and see whether it works.

    python wheels/check.py                                 # the matrix below
    python wheels/check.py --python 3.12 --torch 2.11 2.12 --pyg 2.8
    python wheels/check.py --all                           # the product of the three lists

Without --all, one of the three varies at a time; the others are the first of their lists. An
environment is deleted before the next is made: with CUDA builds of torch each takes several GB.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.10", "3.12", "3.13", "3.14")
TORCHES = ("2.13", "2.10", "2.11", "2.12", "newest")
PYGS = ("2.8", "2.7", "newest")
OLD_TORCH = "2.9.1"  # which pip must refuse
ROOM = 12 << 30  # bytes of disk that a cell may take


def interpreter(version: str) -> str | None:
    """Return a Python of that version: on the PATH, or one of pyenv's."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    for found in (*map(str, of_pyenv), shutil.which(f"python{version}")):
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    return None


def requirement(package: str, version: str) -> str:
    """Return what pip is asked for."""
    return package if version == "newest" else f"{package}=={version}.*"


def last_line(text: str) -> str:
    """Return the line that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"ERROR|[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1][:160]


def try_cell(python: str, torch: str, pyg: str, wheel: Path, folder: Path) -> str:
    """Return "ok" and what was installed, or the reason why a cell is not."""
    program = interpreter(python)
    if program is None:
        return "not run: no such Python here"
    if shutil.disk_usage(folder).free < ROOM:
        return "not run: too little room on the disk"
    environment = folder / "environment"
    subprocess.run([program, "-m", "venv", environment], check=True)
    own = environment / "bin" / "python"
    what = [str(wheel), requirement("torch", torch), requirement("torch-geometric", pyg)]
    install = subprocess.run(
        [own, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir", *what],
        capture_output=True, text=True,
    )  # fmt: skip
    if install.returncode:
        return f"pip: {last_line(install.stderr)}"
    smoke = subprocess.run(
        [own, ROOT / "wheels" / "smoke.py"], cwd=folder, capture_output=True, text=True
    )
    if smoke.returncode:
        return f"failed: {last_line(smoke.stderr)}"
    return f"ok: {smoke.stdout.splitlines()[0].rpartition(',')[0]}"


def refuses_old_torch(wheel: Path, folder: Path) -> str:
    """Return how pip refuses a torch that is too old. As a constraint it is never downloaded."""
    (folder / "constraint").write_text(f"torch=={OLD_TORCH}\n")
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    ran = subprocess.run(
        [folder / "environment" / "bin" / "python", "-m", "pip", "install", "--dry-run",
         "--constraint", folder / "constraint", wheel],
        capture_output=True, text=True,
    )  # fmt: skip
    said = (ran.stdout + ran.stderr).splitlines()
    wanted = [line.strip() for line in said if "depends on torch" in line]
    if ran.returncode == 0 or not wanted:
        return f"failed: {last_line(ran.stderr)}"
    return f"ok, refused: {wanted[-1]}"


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Return the combinations to try, without repetitions."""
    lists = (options.python, options.torch, options.pyg)
    if options.all:
        yield from product(*lists)
        return
    first = tuple(versions[0] for versions in lists)
    yield first
    for i, versions in enumerate(lists):
        for version in versions[1:]:
            yield (*first[:i], version, *first[i + 1 :])


def main() -> None:
    """Try all cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    parser.add_argument("--pyg", nargs="+", default=PYGS)
    parser.add_argument("--all", action="store_true", help="the product of the lists")
    parser.add_argument("--wheel", type=Path, help="by default the newest in dist/")
    parser.add_argument("--folder", help="where environments are made, by default a temporary one")
    options = parser.parse_args()
    wheels = sorted(ROOT.glob("dist/*.whl"), key=lambda path: path.stat().st_mtime)
    if options.wheel is None and not wheels:
        parser.error("there is no wheel in dist/: make wheel")
    wheel = (options.wheel or wheels[-1]).resolve()
    good = True
    print(f"{wheel.name}, {wheel.stat().st_size / 2**20:.1f} MB\n", flush=True)
    print("| Python | torch | PyG | seconds | result |\n|---|---|---|--:|---|", flush=True)
    for cell in cells(options):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            result = try_cell(*cell, wheel, Path(folder))
        good &= result.startswith(("ok", "not run"))
        print(f"| {' | '.join(cell)} | {time.monotonic() - began:.0f} | {result} |", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = refuses_old_torch(wheel, Path(folder))
    good &= result.startswith("ok")
    print(f"|  | {OLD_TORCH} |  |  | {result} |", flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
