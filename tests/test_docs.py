"""Documentation: links lead somewhere, names exist, code runs.

A page may hold code that is run and not shown, in a comment before a block::

    <!-- hidden
    model = ...
    -->

and a block that is not run, with the reason: ``<!-- not run: it trains for an hour -->``, or that
needs a GPU: ``<!-- needs cuda -->``.
"""

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pyg_accel.costs import fewest_edges, work_of
from pyg_accel.formula import Computation, parse
from pyg_accel.settings import SETTINGS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/*.md"))
    if "build" not in path.relative_to(ROOT).parts
)
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
TEXT = {name: (ROOT / name).read_text() for name in NAMES}
# Trained or measured on more than a toy: more than a few seconds each.
LONG = {
    f"docs/tutorials/{page}.md"
    for page in ("patch_a_model", "rewrite_with_optimize", "train_with_maxk", "write_a_fast_layer")
}
# Files that the text asks the reader to write, or that programs write.
OF_THE_READER = {
    "script.py", "segments.py", "segments_plugin.py", "measurements.csv", "about.json",
    "trees.dot", "sampling.png", "__init__.py", "facebook_edges.csv", "facebook.json",
    "facebook_target.csv", "your_script.py", "meta.json",
}  # fmt: skip

# Of the programs behind `python -m benchmarks`, and options that their package names by one word.
SOURCE = "".join(path.read_text() for path in ROOT.glob("benchmarks/**/*.py"))
NUMBERED = ("--table", "--figure", "--section")

pages = pytest.mark.parametrize("name", NAMES)


class Block(NamedTuple):
    """A piece of code in a page."""

    line: int
    code: str
    language: str
    skip: str  # why it is not run; "cuda" where a GPU is needed
    hidden: bool = False


FENCE = re.compile(
    r"^(?:<!-- hidden\n(?P<hidden>.*?)^-->$"
    r"|(?:<!-- (?P<mark>not run: [^>]*|needs cuda) -->\n+)?"
    r"^```(?P<language>(?:\w|{)*}?)\n(?P<code>.*?)^```$)",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, hidden ones included, in order."""
    for match in FENCE.finditer(text):
        hidden = match["hidden"] is not None
        code = match["hidden"] if hidden else match["code"]
        start = match.start("hidden" if hidden else "code")
        language = "python" if hidden else match["language"]
        skip = (match["mark"] or "").removeprefix("needs ")
        yield Block(text.count("\n", 0, start), code, language, skip, hidden)


def outside_of_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", outside_of_blocks(path.read_text()), re.MULTILINE)
    return {slug(heading) for heading in headings}


LINK = re.compile(r"\]\(([^)\s]+)\)")


@pages
def test_links_lead_to_files_and_headings(name):
    broken = []
    for link in LINK.findall(outside_of_blocks(TEXT[name])):
        if re.match(r"https?:|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert not broken


CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"^[\w*./-]*\w+\.(?:py|md|csv|png|json|h|cuh|cu|cpp|yml|toml|ipynb)$")


@pages
def test_files_that_are_named_exist(name):
    """A path as it is from the root, a bare name in one of the folders that the page names."""
    words = [word for text in CODE.findall(outside_of_blocks(TEXT[name])) for word in text.split()]
    words += [link.partition("#")[0] for link in LINK.findall(TEXT[name])]
    words += [word for b in blocks(TEXT[name]) if b.language == "bash" for word in b.code.split()]
    folders = {ROOT, ROOT / "pyg_accel", ROOT / "benchmarks/results", (ROOT / name).parent}
    for word in words:
        path = ROOT / word.rstrip("/")
        if re.fullmatch(r"[\w./-]+", word):
            folders |= {path} if path.is_dir() else {path.parent} if path.is_file() else set()
    missing = []
    for word in words:
        if not FILE.match(word) or Path(word).name in OF_THE_READER or word.startswith("http"):
            continue
        pattern = word.split("::")[0]
        if not any(any(folder.glob(pattern)) if "*" in pattern else (folder / pattern).exists()
                   for folder in folders):  # fmt: skip
            missing.append(word)
    assert not missing


def resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for i in range(len(parts), 0, -1):
        try:
            actual = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[i:]:
            if not hasattr(actual, attribute):
                return False
            actual = getattr(actual, attribute)
        return True
    return False


DOTTED = re.compile(r"(?<![\w/.-])((?:pyg_accel|ops|layers|benchmarks)(?:\.[A-Za-z_]\w*)+)")
SUFFIXES = (".py", ".json", ".md", ".csv", ".toml", ".ipynb")


@pages
def test_names_of_the_package_exist(name):
    unknown = set()
    for dotted in DOTTED.findall(TEXT[name]):
        whole = f"pyg_accel.{dotted}" if dotted.startswith(("ops.", "layers.")) else dotted
        if dotted.endswith(SUFFIXES) or whole.startswith("pyg_accel.egg"):
            continue
        if whole != "pyg_accel.backends" and not resolves(whole):
            unknown.add(dotted)
    assert not unknown


@pages
def test_settings_commands_and_targets_exist(name):
    text = TEXT[name]
    known = {f"PYG_ACCEL_{setting.name.upper()}" for setting in SETTINGS}
    known |= set(re.findall(r"PYG_ACCEL_\w+", (DOCS / "reference/settings.md").read_text()))
    assert set(re.findall(r"PYG_ACCEL_[A-Z_]*[A-Z]", text)) <= known
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    asked = re.findall(r"`make ([a-z][a-z-]*)[^`]*`|^make ([a-z][a-z-]*)", text, re.MULTILINE)
    assert {a or b for a, b in asked} <= targets
    main = (ROOT / "pyg_accel/__main__.py").read_text()
    for command in re.findall(r"python -m pyg_accel ([a-z]+)", text):
        assert f'"{command}"' in main
    for line in re.findall(r"python -m pyg_accel (?!run )([^`\n#]*)", text):
        for option in re.findall(r"(?<!\S)--[a-z-]+", line):
            assert f'"{option}"' in main, line


@pages
def test_options_of_benchmarks_exist(name):
    for command in re.findall(r"python -m (benchmarks\.[\w.]+[^`\n#;,(]*)", TEXT[name]):
        module, *words = command.split()
        assert resolves(module), command
        for option in (word for word in words if re.match(r"--[a-z]", word)):
            option = option.partition("=")[0]
            known = f"{option.removeprefix('--').replace('-', '_')}="  # of `results.parser`
            assert f'"{option}"' in SOURCE or known in SOURCE or option in NUMBERED, command


def without_numbers(text: str) -> list[str]:
    """The words of an output; numbers and rules under headings depend on the machine."""
    return re.sub(r"[\d.,]*\d|-{3,}", "#", text).split()


def runs(name: str) -> list[Block]:
    return [b for b in blocks(TEXT[name]) if b.language == "python"]


WITH_CODE = [
    pytest.param(name, marks=[pytest.mark.full] if name in LONG else [])
    for name in NAMES
    if any(not b.skip or b.skip == "cuda" for b in runs(name))
]
# What people paste is what they see: pages that run with hidden code must run without it too.
PASTED = [
    name
    for name in NAMES
    if (name == "README.md" or name.startswith("docs/how-to/")) and "<!-- hidden" in TEXT[name]
]


def run_page(name: str, shown: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks one after the other, as one file whose lines are those of the page.

    A block behind the name of a file, as in "`segments.py`:", is that file.
    """
    lines: list[str] = []
    for block in shown:
        skipped = block.skip and not (block.skip == "cuda" and torch.cuda.is_available())
        if block.language != "python" or skipped:
            continue
        before = "\n".join(TEXT[name].splitlines()[: block.line - 1]).rstrip()
        if file := re.search(r"`(\w+\.py)`:$", before):
            (folder / file[1]).write_text(block.code)
            monkeypatch.delitem(sys.modules, Path(file[1]).stem, raising=False)
            continue
        lines += [""] * (block.line - len(lines)) + block.code.splitlines()
        lines.append(f"print('<<{block.line}>>')")
    module = "page_" + re.sub(r"\W", "_", name)
    # PyG and readers of source want a file; a traceback has the line of the page.
    path = folder / f"{module}.py"
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(folder))
    spec = spec_from_file_location(module, path)
    assert spec and spec.loader
    page = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module, page)
    try:
        spec.loader.exec_module(page)
    finally:
        vars(page).clear()  # optimised models take their overrides with them


@pytest.mark.parametrize("name", WITH_CODE)
def test_code_of_a_page_runs(name, tmp_path, monkeypatch, capsys):
    """A block without a language behind one of Python is what that prints, but for numbers."""
    expected: list[tuple[int, str]] = []
    last = None
    for block in blocks(TEXT[name]):
        if block.language == "" and not block.skip and last is not None:
            expected.append((last, block.code))
        ran = block.language == "python" and (
            not block.skip or (block.skip == "cuda" and torch.cuda.is_available())
        )
        last = block.line if ran else None
    run_page(name, list(blocks(TEXT[name])), tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    for line, text in expected:
        mine = printed.partition(f"<<{line}>>")[0].rpartition(">>\n")[2]
        assert without_numbers(mine) == without_numbers(text), f"the output of line {line}"


@pytest.mark.parametrize("name", PASTED)
def test_code_that_is_pasted_from_a_page_runs(name, tmp_path, monkeypatch):
    shown = [block for block in blocks(TEXT[name]) if not block.hidden]
    run_page(name, shown, tmp_path, monkeypatch)


def test_the_reader_of_blocks_sees_them():
    text = "a\n\n<!-- hidden\nx = 1\n-->\n\n```python\nprint(x)\n```\n\n<!-- needs cuda -->\n"
    text += "```python\ny\n```\n<!-- not run: slow -->\n```bash\nz\n```\n"
    assert [tuple(block) for block in blocks(text)] == [
        (3, "x = 1\n", "python", "", True),
        (7, "print(x)\n", "python", "", False),
        (12, "y\n", "python", "cuda", False),
        (16, "z\n", "bash", "not run: slow", False),
    ]


DIRECTIVE = re.compile(r"^\.\. (auto(?:module|function|class|data)|currentmodule):: (\S+)", re.M)
PUBLIC = (
    "backends", "cuda_graphs", "distributed", "errors", "formula", "layers", "ops", "patching",
    "reordering", "rewrite", "rewrite.cost", "rewrite.ir", "settings",
    "testing",
)  # fmt: skip


def documented() -> set[str]:
    """What the reference has a description for, made from docstrings."""
    names = set()
    for page in (DOCS / "reference").glob("*.md"):
        module = ""
        for kind, name in DIRECTIVE.findall(page.read_text()):
            if kind == "currentmodule":
                module = name
            elif kind == "automodule":
                names |= {f"{name}.{public}" for public in importlib.import_module(name).__all__}
            else:
                names.add(f"{module}.{name}")
    return names


def test_every_public_name_is_in_the_reference():
    objects = set()
    for name in documented():
        module, _, last = name.rpartition(".")
        objects.add(id(getattr(importlib.import_module(module), last)))
    missing = [
        f"{module}.{name}"
        for module in ("pyg_accel", *(f"pyg_accel.{room}" for room in PUBLIC))
        for name in importlib.import_module(module).__all__
        if id(getattr(importlib.import_module(module), name)) not in objects
        and not inspect.ismodule(getattr(importlib.import_module(module), name))
    ]
    assert not missing


def test_every_page_of_the_site_is_in_its_table_of_contents():
    text = (DOCS / "index.md").read_text()
    listed = {
        path
        for toctree in re.findall(r"```{toctree}\n(.*?)```", text, re.DOTALL)
        for line in toctree.splitlines()
        if line and not line.startswith(":")
        for path in DOCS.glob(f"{line}.md")
    }
    every = {p for p in DOCS.rglob("*.md") if p.name not in ("README.md", "index.md")}
    assert listed == every


@pytest.mark.full
def test_the_listing_of_doctor_has_the_lines_of_doctor():
    """Those that the page of the command line shows, in their order, whatever the machine has."""
    page = TEXT["docs/reference/command_line.md"]
    listing = page.partition("$ python -m pyg_accel doctor")[2].partition("```")[0]
    label = re.compile(r"^ *(\w[\w ]*?)(?:: |:$|  +)", re.MULTILINE)
    command = [sys.executable, "-m", "pyg_accel", "doctor"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout
    printed = iter(label.findall(out))
    for name in label.findall(listing.partition("\n")[2]):
        assert name in printed, name  # reads on from the line before


def test_sizes_in_the_text_are_those_of_the_rule():
    text = TEXT["docs/is_it_for_me.md"]
    rows = {"SAGEConv": ("mean", "u0"), "GINConv": ("sum", "u0"),
            "own": ("mean", "relu(sub(v0,u1))")}  # fmt: skip
    for layer, (reduce, formula) in rows.items():
        work = work_of([Computation(parse(formula), (reduce,))])
        for device in ("cpu", "cuda"):
            numbers = [
                f"{fewest_edges(device, work, 256, new=new, gradient=gradient):,}"
                for new in (False, True)
                for gradient in (False, True)
            ]
            line = next(
                one for one in text.splitlines() if one.startswith(f"| {layer}, {device} |")
            )
            assert [part.strip() for part in line.split("|")[2:-1]] == numbers
