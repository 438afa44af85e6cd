"""What the quick tier of the tests leaves out, and what it must not."""

import importlib.util
from itertools import combinations, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tiers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiers", Path(__file__).parent / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Case:
    """As much of a test as the choice of a tier looks at."""

    parent = originalname = "one test"

    def __init__(self, params: dict[str, Any], *markers: pytest.MarkDecorator) -> None:
        self.callspec = SimpleNamespace(params=params)
        self.markers = list(markers)

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [m.mark for m in self.markers if m.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers.append(marker)


def quick(tiers: ModuleType, cases: list[Case]) -> list[tuple[Any, ...]]:
    tiers.pytest_collection_modifyitems(cases)
    return [tuple(c.callspec.params.values()) for c in cases if not c.iter_markers("full")]


def pairs(rows: list[tuple[Any, ...]]) -> set[Any]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 4), (2, 2, 2), (9, 16, 7, 3)], ids=str)
def test_every_two_values_meet_in_a_table_that_is_not_long(tiers, sizes):
    every = [row for row in product(*map(range, sizes)) if sum(row) % 5 != 4]
    chosen = [every[i] for i in tiers.covering(every, 2)]
    assert pairs(chosen) == pairs(every)
    assert {item for row in chosen for item in enumerate(row)} == {
        item for row in every for item in enumerate(row)
    }
    longest = sorted(sizes)[-2:]
    assert len(chosen) <= 1.25 * longest[0] * longest[-1] if len(sizes) > 1 else sizes[0]


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 4), (2, 2, 2), (9, 16, 7, 3)], ids=str)
def test_every_value_occurs_in_a_table_that_is_as_short_as_can_be(tiers, sizes):
    every = list(product(*map(range, sizes)))
    chosen = [every[i] for i in tiers.covering(every, 1)]
    assert {item for row in chosen for item in enumerate(row)} == {
        item for row in every for item in enumerate(row)
    }
    assert len(chosen) == max(sizes)


def test_cases_with_values_that_occur_elsewhere_are_full(tiers):
    every = list(product(("triton", "cpu"), "cd", "efg"))
    found = quick(tiers, [Case(dict(enumerate(row)), pytest.mark.each) for row in every])
    assert {value for row in found for value in row} == set("cdefg") | {"triton", "cpu"}
    assert len(found) == 3
    found = quick(tiers, [Case(dict(enumerate(row)), pytest.mark.each("triton")) for row in every])
    assert [row for row in found if row[0] == "cpu"] == [row for row in every if row[0] == "cpu"]
    assert len([row for row in found if row[0] == "triton"]) == 3


def test_cases_beyond_all_pairs_are_full(tiers):
    every = list(product("ab", "cd", "ef"))
    found = quick(tiers, [Case(dict(enumerate(row)), pytest.mark.pairs) for row in every])
    assert pairs(found) == pairs(every)
    assert len(found) == 4


def test_only_cases_with_the_named_value_are_thinned_out(tiers):
    every = list(product(("triton", "cpu"), "cd", "ef", "gh"))
    cases = [Case(dict(enumerate(row)), pytest.mark.pairs("triton")) for row in every]
    found = quick(tiers, cases)
    assert [row for row in found if row[0] == "cpu"] == [row for row in every if row[0] == "cpu"]
    slow = [row for row in every if row[0] == "triton"]
    assert pairs([row for row in found if row[0] == "triton"]) == pairs(slow)
    assert len(found) < len(every)


def test_heavy_cases_are_full_where_all_parameters_meet(tiers):
    every = list(product(("triton", "cpu"), (150, 577)))
    cases = [Case(dict(enumerate(row)), pytest.mark.heavy("triton", 577)) for row in every]
    assert quick(tiers, cases) == [row for row in every if row != ("triton", 577)]
