"""The page on the five papers: complete, its commands exist, its numbers are those of the files."""

import ast
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from torch_geometric.data import Data

pytest.importorskip("pandas", reason="the page is made by pandas, of the extra `bench`")
pytest.importorskip("matplotlib", reason="the modules of benchmarks draw with it")

ROOT = Path(__file__).parents[1]
# How many figures and tables each paper has.
NUMBERED = {
    "SENSEi": (12, 4),
    "DGL on x86": (3, 3),
    "MaxK-GNN": (10, 5),
    "ES-SpMM": (11, 5),
    "TC-GNN": (10, 6),
}
ROMAN = dict(zip(["I", "II", "III", "IV", "V"], range(1, 6), strict=True))


@pytest.fixture(autouse=True, scope="module")
def root_on_the_path():
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))


@pytest.fixture(scope="module")
def papers(root_on_the_path):
    return importlib.import_module("benchmarks.papers")


@pytest.fixture(scope="module")
def rows(papers):
    return papers.items()


def test_the_page_is_what_the_script_makes(papers):
    assert papers.PAGE.read_text() == papers.page()


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_figure_and_table_has_one_row(paper, rows):
    found = {"Figure": [], "Table": []}
    for item in rows.loc[rows["paper"] == paper, "item"]:
        kind, number = item.split()
        if kind != "Section":
            found[kind].append(ROMAN.get(number) or int(number))
    figures, tables = NUMBERED[paper]
    assert sorted(found["Figure"]) == [*range(1, figures + 1)]
    assert sorted(found["Table"]) == [*range(1, tables + 1)]


def test_every_row_has_a_state_and_what_it_asks_for(papers, rows):
    assert set(rows["paper"]) == set(NUMBERED) == set(papers.RATIOS) == set(papers.PAPERS)
    for row in rows.itertuples():
        name = f"{row.paper}, {row.item}"
        assert row.state in papers.STATES and row.shows, name
        wanting = row.state in ("in part", "not")
        assert bool(row.reason) == wanting and (row.lacking in papers.LACKING) == wanting, name
        if row.state == "reproduced":
            assert row.command and row.results, name
        if row.state == "nothing to measure":
            assert not row.command, name


def options(module: str) -> set[str]:
    """The options that a module's parser knows, read from its source."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if any(ast.unparse(call.func) == "by_graph.options_of" for call in calls):
        return options("benchmarks.by_graph")
    return {
        argument.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def test_every_command_exists(rows):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = {c for text in rows["command"] for c in text.split("; ") if c}
    commands |= {c for text in rows["reason"] for c in re.findall(r"`(python [^`]*)`", text)}
    assert len(commands) > 10
    for command in commands:
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "make":
            assert words[1] in targets, command
            continue
        assert words[:2] == ["python", "-m"], command
        assert callable(importlib.import_module(words[2]).main), command
        asked = {word for word in words[3:] if word.startswith("--")}
        assert asked <= options(words[2]), command


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def test_every_file_and_section_exists(rows):
    for path in {path for text in rows["results"] for path in text.split()}:
        file, _, anchor = path.partition("#")
        assert (ROOT / file).is_file(), path
        assert not anchor or anchor in anchors(ROOT / file), path


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_number_belongs_to_a_row_with_its_file_and_a_loss_has_a_reason(paper, papers, rows):
    part = rows[rows["paper"] == paper].set_index("item")
    ratios = list(papers.RATIOS[paper]())
    assert ratios
    for ratio in ratios:
        difference = ratio.unit == " points"
        assert difference or min(ratio.paper, ratio.ours) > 0, ratio
        assert ratio.ours == ratio.ours, f"no number: {ratio}"
        assert ".csv" in part.loc[ratio.item, "results"], ratio
        assert not ratio.worse or ratio.because, ratio


def test_worse_goes_by_what_is_better_and_by_the_digits_that_are_shown(papers):
    def make(paper, ours, better):
        return papers.Ratio("Table 1", "", paper, ours, better=better)

    assert make(2.0, 1.9, "more").worse and not make(2.0, 2.1, "more").worse
    assert make(2.0, 2.1, "less").worse and not make(2.0, 1.9, "less").worse
    assert not make(2.0, 1.0, "").worse and not make(2.0, 1.9999, "more").worse


def test_trainings_that_a_file_has_are_not_repeated(papers, monkeypatch, tmp_path):
    maxk_accuracy = importlib.import_module("benchmarks.maxk_accuracy")
    trained = []

    def train(data, setting, seed, **options):
        trained.append((setting, seed))
        if len(trained) == 3:
            raise KeyboardInterrupt
        return {"accuracy": 50.0 + seed, "validation": 50.0}

    monkeypatch.setattr(maxk_accuracy, "train", train)
    monkeypatch.setattr(maxk_accuracy, "load", lambda name, root: Data())
    monkeypatch.setenv("PYG_ACCEL_DATA", str(tmp_path))
    asked = ["--datasets", "Cora", "--seeds", "2", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        maxk_accuracy.main(asked)
    maxk_accuracy.main(asked)
    relu, maxk = ("SAGE", None), ("SAGE", 32)
    assert trained == [(relu, 0), (relu, 1), (maxk, 0), (maxk, 0), (maxk, 1)]
    maxk_accuracy.main(asked)
    assert len(trained) == 5


def test_twitch_has_both_directions_and_no_split_for_unknown_classes(papers, tmp_path):
    numpy = importlib.import_module("numpy")
    load = importlib.import_module("benchmarks.datasets").load_twitch_fr
    numpy.savez(
        tmp_path / "twitch_fr.npz",
        edges=[[0, 1, 2], [1, 2, 3]],
        mature=numpy.array([0, 1, -1, 1]),
        feature_ptr=[0, 2, 2, 3, 4],
        feature_ids=[0, 4, 1, 1],
    )
    data = load(tmp_path, num_features=8)
    assert data.x.shape == (4, 8) and not data.x[1].any()  # has no features
    assert (data.x[2] == data.x[3]).all() and (data.x[0] != data.x[2]).any()
    assert data.edge_index.tolist() == [[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]
    splits = sum(data[f"{part}_mask"].int() for part in ("train", "val", "test"))
    assert splits.tolist() == [1, 1, 0, 1] and data.y.tolist() == [0, 1, 0, 1]
