"""A made database of the schema and the size of RelBench's rel-f1, for its scripts."""

import os
import sys
import tempfile
import zlib
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

YEARS, RACES, DRIVERS, CONSTRUCTORS, CIRCUITS = range(1950, 2018), 16, 857, 211, 77


class Tables:
    """Columns of tables by their kinds; each row has a race and drivers of its time."""

    def __init__(self) -> None:
        self.g = np.random.default_rng(12345)
        days = [pd.Timestamp(year, 3, 1) + pd.Timedelta(days=14 * i)
                for year in YEARS for i in range(RACES)]  # fmt: skip
        self.date = pd.Series(days)

    def words(self, count: int, kinds: int, name: str) -> list[str]:
        return [f"{name} {i}" for i in self.g.integers(0, kinds, count)]

    def numbers(self, count: int, most: float, missing: float = 0.0) -> Any:
        values = np.round(self.g.random(count) * most, 3)
        return np.where(self.g.random(count) < missing, np.nan, values)

    def active(self, race: Any, all_of_them: int) -> Any:
        """Ids of those who are there at a race: a tenth, from the first to the last year."""
        begin = race / len(self.date) * all_of_them * 0.9
        return (begin + self.g.random(len(race)) ** 2 * all_of_them * 0.1).astype(int)

    def by_race(self, each: int, key: str, *, driver: bool = True, team: bool = True,
                **columns: float) -> pd.DataFrame:  # fmt: skip
        """So many rows for every race; `columns` have the most of a number, or of a category."""
        race = np.repeat(np.arange(len(self.date)), each)
        made: dict[str, Any] = {key: np.arange(len(race)), "raceId": race}
        if driver:
            made["driverId"] = self.active(race, DRIVERS)
        if team:
            made["constructorId"] = self.active(race, CONSTRUCTORS)
        for name, most in columns.items():
            whole = isinstance(most, int)
            made[name] = (self.g.integers(0, most, len(race)) if whole
                          else self.numbers(len(race), most, 0.2))  # fmt: skip
        return pd.DataFrame(made | {"date": self.date[race].to_numpy()})

    def races(self) -> pd.DataFrame:
        count = len(self.date)
        return pd.DataFrame({
            "raceId": np.arange(count), "year": self.date.dt.year,
            "round": np.arange(count) % RACES + 1,
            "circuitId": self.g.integers(0, CIRCUITS, count),
            "name": self.words(count, 40, "Grand Prix"), "date": self.date,
            "time": self.words(count, 20, "hour"),
        })  # fmt: skip

    def named(self, key: str, count: int, words: dict[str, int], **more: Any) -> pd.DataFrame:
        texts = {name: self.words(count, kinds, name) for name, kinds in words.items()}
        return pd.DataFrame({key: np.arange(count)} | texts | more)


def database(_: Any = None) -> Any:
    """Return the tables, with keys and times."""
    from relbench.base import Database, Table

    made = Tables()
    where = {"lat": made.numbers(CIRCUITS, 60), "lng": made.numbers(CIRCUITS, 60),
             "alt": made.numbers(CIRCUITS, 900)}  # fmt: skip
    born = pd.Timestamp(1920, 1, 1) + pd.to_timedelta(np.arange(DRIVERS) * 30, unit="D")
    both = {"points": 50.0, "position": 25, "wins": 12}
    frames = {
        "races": made.races(),
        "circuits": made.named("circuitId", CIRCUITS, {"circuitRef": 77, "name": 77,
                               "location": 70, "country": 30}, **where),
        "drivers": made.named("driverId", DRIVERS, {"driverRef": 857, "code": 90, "forename": 400,
                              "surname": 700, "nationality": 40}, dob=born),
        "results": made.by_race(24, "resultId", number=99.0, grid=24, position=24.0,
                                positionOrder=24, points=25.0, laps=80, milliseconds=9e6,
                                fastestLap=78.0, rank=24.0, statusId=4),
        "standings": made.by_race(31, "driverStandingsId", team=False, **both),
        "constructors": made.named("constructorId", CONSTRUCTORS, {"constructorRef": 211,
                                   "name": 211, "nationality": 24}),
        "constructor_results": made.by_race(11, "constructorResultsId", driver=False, points=40.0),
        "constructor_standings": made.by_race(12, "constructorStandingsId", driver=False, **both),
        "qualifying": made.by_race(9, "qualifyId", number=99, position=24),
    }  # fmt: skip
    owners = {"raceId": "races", "driverId": "drivers", "constructorId": "constructors",
              "circuitId": "circuits"}  # fmt: skip
    tables = {}
    for name, frame in frames.items():
        key, *others = frame.columns
        ends = {column: owners[column] for column in others if column in owners}
        time = "date" if "date" in frame else None
        tables[name] = Table(df=frame, fkey_col_to_pkey_table=ends, pkey_col=key, time_col=time)
    return Database(tables)


def embedded(texts: list[Any]) -> Tensor:
    """Return a vector for every text, the same for the same text, [len(texts), 300]."""
    seeds = [zlib.crc32(str(text).encode()) for text in texts]
    generators = [np.random.default_rng(seed) for seed in seeds]
    return torch.tensor(np.stack([g.standard_normal(300) for g in generators])).float()


def install() -> None:
    """Let RelBench have the database, and its examples an embedding of texts."""
    from relbench.datasets.f1 import F1Dataset

    os.environ["RELBENCH_CACHE_DIR"] = tempfile.mkdtemp()
    F1Dataset.make_db = database
    module: Any = ModuleType("text_embedder")
    module.GloveTextEmbedding = lambda **_: embedded
    sys.modules["text_embedder"] = module
