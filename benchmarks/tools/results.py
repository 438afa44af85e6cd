"""The command line of a benchmark, the rows of its CSV file, and what is said of all of them."""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from tqdm import tqdm

from benchmarks.tools import timing

FOLDER = Path(__file__).parents[1] / "results"
QUICK = FOLDER / "quick"  # trial runs; git ignores it
T = TypeVar("T")


def parser(
    doc: str | None, *, devices: Sequence[str] = (), quick: str = "small graphs: does it all work?",
    **options: Any,
) -> argparse.ArgumentParser:  # fmt: skip
    """The options of a benchmark: `--quick`, `--out`, `--device` if there are several, and others.

    Args:
        doc: docstring of the module; its first line describes the command.
        devices: that it runs on, the first by default.
        quick: what a quick run is made of.
        options: defaults by name. Keys of a dictionary are all choices of a list; a tuple is a list
            with this default, None a list without one; `False` a flag.
    """
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--out", type=Path, help="folder of the CSV, by default results/")
    if devices:
        made.add_argument("--device", choices=devices, default=devices[0])
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            made.add_argument(flag, action="store_true")
        elif isinstance(default, Mapping):
            made.add_argument(flag, nargs="+", choices=default, default=list(default))
        elif default is None or isinstance(default, (tuple, list)):
            kind = type(default[0]) if default else str
            made.add_argument(flag, nargs="+", type=kind, default=default)
        else:
            made.add_argument(flag, type=type(default), default=default)
    return made


def path_of(name: str, options: argparse.Namespace) -> Path:
    """Where the CSV lies: below results/ by its folder, or flat in the folder that was named."""
    if options.out:
        return Path(options.out) / f"{Path(name).name}.csv"
    return (QUICK if options.quick else FOLDER) / f"{name}.csv"


class Rows:
    """The rows of a CSV file, which is written whenever some join: a run takes long.

    A file holds one run, and earlier ones are in the git history; with a `key` a file that exists
    is continued.

    Args:
        name: folder and name of the file, such as `kernels/gpu_kernels`.
        options: of the command line.
        device: whose facts every row carries.
        key: columns that tell cases apart.
        facts: further columns of every row.
    """

    def __init__(
        self, name: str, options: argparse.Namespace, device: str = "cpu",
        key: Sequence[str] = (), **facts: Any,
    ) -> None:  # fmt: skip
        self.path, self.key = path_of(name, options), list(key)
        self.facts = timing.facts(device) | facts
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = bool(key) and self.path.exists()
        self.rows: list[dict[str, Any]] = read(self.path).to_dict("records") if known else []

    def missing(self, cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The cases, in the order of the key, that the file does not have."""

        def plain(case: Iterable[Any]) -> tuple[Any, ...]:
            """Without what a CSV file cannot tell apart: nothing, 0 and an empty text."""
            return tuple(None if pd.isna(value) or not value else value for value in case)

        known = [k in row for row in self.rows[:1] for k in self.key] or [True] * len(self.key)
        done = {plain(row[k] for k in self.key if k in row) for row in self.rows}

        def of(case: tuple[Any, ...]) -> tuple[Any, ...]:
            """As far as the columns of the file tell."""
            return plain(value for value, there in zip(case, known, strict=True) if there)

        return [case for case in cases if of(case) not in done]

    def without(self, **case: Any) -> None:
        """Forget rows of a case that is measured again."""
        self.rows = [r for r in self.rows if any(r.get(k) != v for k, v in case.items())]

    def add(self, rows: Iterable[Mapping[str, Any]], /, *, show: bool = False, **case: Any) -> None:
        """Write rows of a case behind the others."""
        for row in rows:
            self.rows.append({**case, **row, **self.facts})
            if show:
                tqdm.write(line({**case, **row}))
        self.frame.to_csv(self.path, index=False, float_format="%.5g")

    @property
    def frame(self) -> pd.DataFrame:
        """All rows."""
        return pd.DataFrame(self.rows)

    def done(self, lines: Iterable[str] = ()) -> pd.DataFrame:
        """Read the file again and say where it is."""
        print("\n".join([*lines, f"written: {self.path}"]))
        return read(self.path)


def line(row: Mapping[str, Any]) -> str:
    """A row for people."""
    return "  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())


def each(cases: Iterable[T], unit: str = "case") -> Iterator[T]:
    """The cases, with a bar that says which is at work."""
    for case in (bar := tqdm(list(cases), unit=unit)):
        bar.set_postfix_str(", ".join(map(str, case)) if isinstance(case, tuple) else str(case))
        yield case


def read(path: Path | str) -> pd.DataFrame:
    """Read a CSV file, or by name one of results/; commits such as 47e3285 are no numbers."""
    path = FOLDER / f"{path}.csv" if isinstance(path, str) else path
    return pd.read_csv(path, dtype={"commit": str})


def geometric_mean(ratios: pd.Series) -> float:
    """Without missing ones."""
    return float(np.exp(np.log(ratios.dropna()).mean()))


def machine_of(frame: pd.DataFrame) -> str:
    """Hardware and versions of a result."""
    row = frame.iloc[-1]
    where = f"{row['cpu']}, {row['threads']} threads" if "cpu" in frame else ""
    if "gpu" in frame:
        where = " and ".join(f"{name} ({', '.join(dict.fromkeys(part['graph']))})"
                             if "graph" in frame and frame["gpu"].nunique() > 1 else str(name)
                             for name, part in frame.groupby("gpu", sort=False))  # fmt: skip
    triton = f"Triton {row['triton']}, " if "triton" in frame else ""
    return f"{where}, torch {row['torch']}, {triton}PyG {row['pyg']}"


def measured_on(frame: pd.DataFrame) -> str:
    """Hardware, versions and commits of a result."""
    return f"{machine_of(frame)}, measured at {', '.join(dict.fromkeys(map(str, frame['commit'])))}"
