"""The page on the five papers: complete, its commands exist; tables of pages are filled."""

import importlib
import re
import shlex
from pathlib import Path

import numpy
import pytest

from benchmarks.papers import common, tables
from benchmarks.tools import datasets, panels, plot, results, timing
from benchmarks.tools import tables as pages

# How many figures and tables each paper has.
NUMBERED = {
    "SENSEi": (12, 4), "DGL on x86": (3, 3), "MaxK-GNN": (10, 5), "ES-SpMM": (11, 5),
    "TC-GNN": (10, 6),
}  # fmt: skip
PAPERS = pytest.mark.parametrize("paper", tables.PAPERS, ids=lambda paper: paper.module)


@PAPERS
def test_every_figure_and_table_has_one_row(paper):
    actual = [common.option(item).split() for item in common.items(paper.name)["item"]]
    for kind, count in zip(("--figure", "--table"), NUMBERED[paper.name], strict=True):
        assert sorted(int(n) for k, n in actual if k == kind) == [*range(1, count + 1)]


def help_of(module: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    return capsys.readouterr().out


def test_every_command_exists(capsys):
    rows = common.items()
    commands = {c for text in rows["command"] for c in text.split("; ") if c}
    commands |= {c for text in rows["reason"] for c in re.findall(r"`(python [^`]*)`", text)}
    assert len(commands) > 10
    for command in commands:
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        assert words[:2] == ["python", "-m"], command
        known = help_of(words[2], capsys)
        assert all(word in known for word in words[3:] if word.startswith("--")), command


def test_every_file_exists():
    for path in {path for text in common.items()["results"] for path in text.split()}:
        assert (timing.ROOT / path.partition("#")[0]).is_file(), path


@PAPERS
def test_every_number_belongs_to_a_row_with_its_file_and_a_loss_has_a_reason(paper):
    part = common.items(paper.name).set_index("item")
    ratios = common.ratios(paper)
    assert ratios
    for ratio in ratios:
        assert ratio.unit == " points" or min(ratio.paper, ratio.ours) > 0, ratio
        assert ratio.ours == ratio.ours, f"no number: {ratio}"
        assert ".csv" in part.loc[ratio.item, "results"], ratio
        assert not ratio.worse or ratio.because, ratio


@PAPERS
def test_an_item_is_shown_by_its_number(paper, capsys):
    item = next(iter(paper.ratios())).item
    common.main(paper, [*common.option(item).split(), "--show"])
    out = capsys.readouterr().out
    assert item in out and "| paper | ours |" in out
    with pytest.raises(SystemExit):
        common.main(paper, ["--table", "99"])


def test_an_item_is_measured_by_its_commands(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(common.subprocess, "run", lambda words, env, **_: ran.append((words, env)))
    paper = next(p for p in tables.PAPERS if p.module == "dgl_x86")
    common.main(paper, ["--table", "2", "--quick"])
    ((words, env),) = ran
    assert words[1:] == ["-m", "benchmarks.papers.dgl_x86.primitives", "--quick"]
    assert env["OMP_NUM_THREADS"] == "1"


def test_worse_goes_by_what_is_better_and_by_the_digits_that_are_shown():
    def make(paper, ours, better):
        return common.Ratio("Table 1", "", paper, ours, better=better)

    assert make(2.0, 1.9, "more").worse and not make(2.0, 2.1, "more").worse
    assert make(2.0, 2.1, "less").worse and not make(2.0, 1.9, "less").worse
    assert not make(2.0, 1.0, "").worse and not make(2.0, 1.9999, "more").worse


def test_every_table_of_a_page_is_made():
    names = {m["name"] for path in pages.PAGES for m in pages.BLOCK.finditer(path.read_text())}
    assert len(names) > 40
    for name in names:
        assert len(pages.table(name)) > 0, name


def test_a_page_is_filled_between_its_comments():
    text = "a\n\n<!-- table: papers: states -->\nold\n<!-- /table -->\n\nb\n"
    filled = pages.filled(text)
    assert "old" not in filled and "| reproduced |" in filled
    assert filled.startswith("a\n") and filled.endswith("b\n") and pages.filled(filled) == filled


@pytest.mark.parametrize("name", plot.FIGURES)
def test_every_picture_is_drawn(name):
    figure = plot.FIGURES[name](results.read(name))
    assert figure.axes
    panels.plt.close(figure)


def test_twitch_has_both_directions_and_no_split_for_unknown_classes(tmp_path: Path):
    numpy.savez(
        tmp_path / "twitch_fr.npz",
        edges=[[0, 1, 2], [1, 2, 3]],
        mature=numpy.array([0, 1, -1, 1]),
        feature_ptr=[0, 2, 2, 3, 4],
        feature_ids=[0, 4, 1, 1],
    )
    data = datasets.load_twitch_fr(tmp_path, num_features=8)
    assert data.x.shape == (4, 8) and not data.x[1].any()  # has no features
    assert (data.x[2] == data.x[3]).all() and (data.x[0] != data.x[2]).any()
    assert data.edge_index.tolist() == [[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]
    splits = sum(data[f"{part}_mask"].int() for part in ("train", "val", "test"))
    assert splits.tolist() == [1, 1, 0, 1] and data.y.tolist() == [0, 1, 0, 1]
