"""From which number of edges on acceleration pays on this machine, by bisection."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from pyg_accel.patching import patched
from pyg_accel.patching.thresholds import SHIPPED
from pyg_accel.settings import settings
from pyg_accel.tuning.cases import DEGREE, in_patch, layers, step

__all__ = ["SIZES", "SLACK", "measure_thresholds", "never_by_size", "not_measured"]

SIZES = {
    "cpu": (1_000, 2_000, 5_000, 10_000, 20_000, 40_000, 80_000, 200_000, 400_000, 800_000),
    "cuda": (10_000, 50_000, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000),
}
FEATURES = {"cpu": 32, "cuda": 128}
SLACK = 1.05  # within the noise of a measurement
# Of the laps that are compared: how many at most, how long each is at least, and all of them at
# most, in seconds; so that all calls of all kinds together take two minutes.
ROUNDS, LAP, BUDGET = 5, 5e-3, 0.4


class _Series(NamedTuple):
    """Calls that differ in the number of edges only."""

    kind: str
    layer: str
    train: bool
    fresh: bool

    @property
    def limit(self) -> str:
        """The limit that it is measured for."""
        return "new" if self.fresh else "training" if self.train else "inference"


def measure_thresholds(device: str, *, progress: bool = True) -> dict[str, Any]:
    """Return the thresholds of a kind of device, as a tuning file has them.

    A limit is the least of the sizes from which on no call of its kind is slower. What is not
    measured is that of the shipped file: numbers of elements, and ``compiled``.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        progress: show a progress bar.
    """
    sizes = SIZES[device]
    limits: dict[tuple[str, str], int] = {}  # indices into sizes
    ratios: list[tuple[float, int]] = []
    with never_by_size(device), patched():
        for series in tqdm(_all_series(device), desc="thresholds", disable=not progress):
            least = limits.setdefault((series.kind, series.limit), 0)

            def pays(index: int, series: _Series = series) -> bool:
                ratio = _ratio(series, sizes[index], device)
                ratios.append((ratio, index))
                return ratio <= SLACK

            if least < len(sizes) and not pays(least):
                limits[series.kind, series.limit] = _first(pays, least + 1, len(sizes))
    edges = {name: (*sizes, 2 * sizes[-1])[index] for name, index in limits.items()}
    gains = [index for ratio, index in ratios if ratio < 1 / SLACK]
    if device == "cuda":
        return {"min_edges": max(edges.values()), **not_measured(device)}
    shipped = _shipped(device)["kinds"]
    kinds = {kind: {"elements": part["elements"]} if "elements" in part else {}
             for kind, part in shipped.items()}  # fmt: skip
    for (kind, name), limit in edges.items():
        kinds[kind][name] = limit
    least = sizes[min(gains)] if gains else 2 * sizes[-1]
    return {"min_edges": least, **not_measured(device), "kinds": kinds}


def _shipped(device: str) -> dict[str, Any]:
    """Return what the shipped file has for a kind of device."""
    part: dict[str, Any] = json.loads(SHIPPED.read_text())[device]
    return part


def not_measured(device: str) -> dict[str, int]:
    """Return the shipped thresholds that no bisection finds: compilers take minutes a case."""
    part = _shipped(device)
    return {name: part[name] for name in ("min_elements", "compiled") if name in part}


@contextmanager
def never_by_size(device: str) -> Iterator[None]:
    """Keep every call to PyG's own code inside the block, unless it is ``settings.always``."""
    before = settings.assigned.get("tuning")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({device: {"thresholds": {"min_edges": 2**62}}}, file)
        file.flush()
        settings.tuning = file.name
        try:
            yield
        finally:
            settings.tuning = before


def _all_series(device: str) -> list[_Series]:
    new = (False, True) if device == "cpu" else (False,)
    return [
        _Series(kind, name, train, fresh)
        for name, (kind, _) in layers(FEATURES[device]).items()
        for fresh in new
        for train in (False, True)
    ]


def _first(pays: Callable[[int], bool], least: int, most: int) -> int:
    """The first index that pays, or ``most``, if all behind one that pays do so as well."""
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if pays(middle) else (middle + 1, most)
    return least


def _ratio(series: _Series, edges: int, device: str) -> float:
    """Seconds of an accelerated call over those of a stock one."""
    torch.manual_seed(0)
    nodes = max(edges // DEGREE, 2)
    edge_index = torch.randint(nodes, (2, edges), device=device)
    x = torch.randn(nodes, FEATURES[device], device=device, requires_grad=True)
    kind, layer = layers(FEATURES[device])[series.layer]
    run = step(kind, layer.to(device), x, edge_index, fresh=series.fresh, train=series.train)
    ours = in_patch(run)
    run()  # warm-up
    ours()
    once = [max(_seconds(call, 1), 1e-6) for call in (run, ours)]
    calls = [max(1, round(LAP / seconds)) for seconds in once]
    lasts = sum(seconds * times for seconds, times in zip(once, calls, strict=True))
    rounds = min(max(int(BUDGET / lasts), 1), ROUNDS)
    laps = [[_seconds(run, calls[0]), _seconds(ours, calls[1])] for _ in range(rounds)]
    stock, accelerated = (median(lap) for lap in zip(*laps, strict=True))
    return float(accelerated / stock)


def _seconds(call: Callable[[], None], times: int) -> float:
    """Of one of so many calls."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
