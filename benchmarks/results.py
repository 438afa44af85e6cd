"""Where results lie, how rows become a CSV file, and what is said of all of its rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

FOLDER = Path(__file__).with_name("results")
QUICK = FOLDER / "quick"  # trial runs; git ignores it


def read(path: Path) -> pd.DataFrame:
    """Read a CSV file; commits such as 47e3285 are no numbers."""
    return pd.read_csv(path, dtype={"commit": str})


def write(
    rows: Sequence[dict[str, Any]], name: str, *, quick: bool, folder: Path | None = None
) -> pd.DataFrame:
    """Replace the CSV of that name: a file holds one run, earlier ones are in the git history."""
    path = (folder or (QUICK if quick else FOLDER)) / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows)
    frame.to_csv(path, index=False, float_format="%.5g")
    print(f"written: {path}")
    return frame


def geometric_mean(ratios: pd.Series) -> float:
    return float(np.exp(np.log(ratios).mean()))


def measured_on(frame: pd.DataFrame) -> str:
    """Hardware, versions, commit and date of a result."""
    row = frame.iloc[-1]
    where = row["gpu"] if "gpu" in frame else f"{row['cpu']}, {row['threads']} threads"
    triton = f"Triton {row['triton']}, " if "triton" in frame else ""
    commits = ", ".join(dict.fromkeys(map(str, frame["commit"])))
    return f"{where}, torch {row['torch']}, {triton}PyG {row['pyg']}, measured at {commits}"
