"""Runs an example of RelBench on a made database, and notes what the parts of its steps take.

    database.py SCRIPT [ARGUMENTS]

The database has the tables, keys, most columns and about as many rows as rel-f1, of random values.
"""

import os
import runpy
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks.scripts import data

RACES = pd.Series(pd.date_range("1950-03-01", periods=1100, freq="22D"))
COUNTS = {"driverId": 857, "constructorId": 211, "circuitId": 77}
# Rows (negative: of each race), the primary key and other keys, and what columns hold: texts of so
# many kinds (a string), categories (an int), or numbers up to a most (a float).
SCHEMA: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "races": (-1, ["raceId", "circuitId"], {"round": 16, "name": "40", "time": "20"}),
    "circuits": (77, ["circuitId"], {"circuitRef": "77", "location": "70", "country": "30",
                                     "lat": 60.0, "lng": 60.0, "alt": 900.0}),
    "drivers": (857, ["driverId"], {"driverRef": "857", "code": "90", "forename": "400",
                                    "surname": "700", "nationality": "40"}),
    "results": (-24, ["resultId", "raceId", "driverId", "constructorId"], {
        "number": 99.0, "grid": 24, "position": 24.0, "positionOrder": 24, "points": 25.0,
        "laps": 80, "milliseconds": 9e6, "fastestLap": 78.0, "rank": 24.0, "statusId": 4}),
    "standings": (-31, ["driverStandingsId", "raceId", "driverId"],
                  {"points": 50.0, "position": 25, "wins": 12}),
    "constructors": (211, ["constructorId"], {"constructorRef": "211", "nationality": "24"}),
    "constructor_results": (-11, ["constructorResultsId", "raceId", "constructorId"],
                            {"points": 40.0}),
    "constructor_standings": (-12, ["constructorStandingsId", "raceId", "constructorId"],
                              {"points": 50.0, "position": 25, "wins": 12}),
    "qualifying": (-9, ["qualifyId", "raceId", "driverId", "constructorId"],
                   {"number": 99, "position": 24}),
}  # fmt: skip


def database(_: Any = None) -> Any:
    """Return the tables, with keys and times; a tenth of drivers and teams is there at a time."""
    from relbench.base import Database, Table

    g, tables = np.random.default_rng(12345), {}

    def column(count: int, most: Any) -> Any:
        if not isinstance(most, float):
            ids = g.integers(0, int(most), count)
            return ids if isinstance(most, int) else [f"text {i}" for i in ids]
        return np.where(g.random(count) < 0.2, np.nan, np.round(g.random(count) * most, 3))

    for name, (each, (key, *others), columns) in SCHEMA.items():
        race = np.repeat(np.arange(len(RACES)), -each) if each < 0 else np.arange(each)
        frame = pd.DataFrame({key: np.arange(len(race))})
        for other in others:
            part = 0.9 * race / len(RACES) + 0.1 * g.random(len(race)) ** 2
            frame[other] = race if other == "raceId" else (COUNTS[other] * part).astype(int)
        for label, most in columns.items():
            frame[label] = column(len(race), most)
        if each < 0:
            frame["date"] = RACES[race].to_numpy()
        ends = {other: f"{other[:-2]}s" for other in others}
        tables[name] = Table(frame, ends, key, "date" if each < 0 else None)
    return Database(tables)


def embedded(texts: list[Any]) -> Tensor:
    """Return a vector for every text, the same for the same text, [len(texts), 300]."""
    seeds = [zlib.crc32(str(text).encode()) for text in texts]
    rows = [np.random.default_rng(seed).standard_normal(300) for seed in seeds]
    return torch.tensor(np.stack(rows)).float()


class Border(torch.autograd.Function):
    """Where features go from the encoders to the layers: the backward pass of these is over."""

    passed = 0.0

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(_: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        Border.passed = time.process_time()
        return grads


def note_parts() -> None:
    """Note the processor's time of the parts of each step, in seconds."""
    from relbench.modeling.nn import HeteroEncoder, HeteroGraphSAGE, HeteroTemporalEncoder
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import NeighborSampler

    seconds: Counter[str] = Counter()

    def timed(owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            if owner is HeteroGraphSAGE:
                self, xs, *rest = args
                args = (self, dict(zip(xs, Border.apply(*xs.values()), strict=True)), *rest)
            out = original(*args, **kwargs)
            seconds[part] += time.process_time() - start
            return out

        setattr(owner, name, call)

    timed(NeighborSampler, "_sample", "sampling")
    timed(NodeLoader, "filter_fn", "collation")
    timed(HeteroEncoder, "forward", "encoders, forward")
    timed(HeteroTemporalEncoder, "forward", "encoders, forward")
    timed(HeteroGraphSAGE, "forward", "layers, forward")
    timed(torch.optim.Adam, "step", "optimizer")
    backward = torch.Tensor.backward

    def both(*args: Any, **kwargs: Any) -> None:
        start = time.process_time()
        backward(*args, **kwargs)
        seconds["layers, backward"] = Border.passed - start
        seconds["encoders, backward"] = time.process_time() - Border.passed
        data.parts.append(dict(seconds))
        seconds.clear()

    torch.Tensor.backward = both  # type: ignore[method-assign, assignment]


def install() -> None:
    """Let RelBench have the database, and its examples an embedding of texts."""
    os.environ["RELBENCH_CACHE_DIR"] = tempfile.mkdtemp()
    import duckdb
    from relbench.datasets.f1 import F1Dataset

    duckdb.sql("SET threads = 1")  # rows of tasks in the same order in each run
    F1Dataset.make_db = database
    module: Any = ModuleType("text_embedder")
    module.GloveTextEmbedding = lambda **_: embedded
    sys.modules["text_embedder"] = module


if __name__ == "__main__":
    install()
    note_parts()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
