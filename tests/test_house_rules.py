"""Rules that matter are executable: floors, file lengths, where privates and variables are read."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyg_accel"
FILES = sorted(PACKAGE.rglob("*.py"))
HARD_CAP = 420

# Imports run downwards only. Rooms of one floor may know each other only if they are one room.
FLOORS = {
    "errors": 1, "settings": 1, "formula": 1, "native": 1, "graph": 1, "cbsr": 1,
    "large_pages": 1, "memo": 1, "matrices": 1, "calls": 1, "kept": 1, "tiles": 1,
    "sharing": 1,
    "backends": 2,
    "ops": 3,
    "testing": 3,
    "patching": 4, "layers": 4, "reordering": 4,
    "rewrite": 5, "cuda_graphs": 5,
    "__main__": 6,
}  # fmt: skip
PRIVATE_OF_PYG = re.compile(
    r"_jinja_|_orig_propagate|_orig_edge_updater|_set_jittable_templates|_(?:propagate|message|"
    r"aggregate|edge_update)_forward_(?:pre_)?hooks"
)


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "pyg_accel":
                yield from (f"pyg_accel.{alias.name}" for alias in node.names)


def each(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", files, ids=lambda p: str(p.relative_to(PACKAGE)))


@each([path for path in FILES if path != PACKAGE / "__init__.py"])
def test_imports_run_downwards(path):
    mine = room(path)
    assert mine in FLOORS, f"{mine} has no floor: add it to the table here and in the docs"
    for name in imported(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] != "pyg_accel" or len(parts) < 2 or parts[1] == mine:
            continue
        theirs = parts[1]
        if theirs not in FLOORS:  # a name of the package itself: only the top floors may use them
            assert FLOORS[mine] >= 3, f"{path.name} imports {name} from the top of the package"
            continue
        assert FLOORS[theirs] < FLOORS[mine] or FLOORS[theirs] == FLOORS[mine] == 1, (
            f"{mine} (floor {FLOORS[mine]}) imports {theirs} (floor {FLOORS[theirs]})"
        )


def test_no_modules_import_one_another_in_a_circle():
    """Imports inside of functions count; those for type checkers alone do not."""
    named = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    graph = {}
    for name, path in named.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body.clear()
        graph[name] = {
            full if full in named else node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in named
            for full in (f"{node.module}.{alias.name}" for alias in node.names)
        } - {name}
    graphlib.TopologicalSorter(graph).prepare()


@each([path for path in FILES if room(path) in ("backends", "ops", "graph", "formula", "native")])
def test_floors_below_patching_know_nothing_of_pyg(path):
    assert not any(
        name.startswith("torch_geometric") for name in imported(ast.parse(path.read_text()))
    )


@each(FILES)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= HARD_CAP


# large_pages.py sets torch's variable.
@each([path for path in FILES if path.name not in ("settings.py", "large_pages.py")])
def test_the_environment_is_read_in_settings_only(path):
    assert not re.search(r"\b(?:environ|getenv)\b", path.read_text())


@each([path for path in FILES if path != PACKAGE / "patching" / "seam.py"])
def test_private_names_of_pyg_live_in_the_seam_only(path):
    assert not PRIVATE_OF_PYG.search(path.read_text())


@each(FILES)
def test_nothing_swallows_every_exception(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except in line {node.lineno}"
            caught = ast.unparse(node.type)
            assert not re.search(r"\b(?:Base)?Exception\b", caught), f"line {node.lineno}: {caught}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            assert "ImportError" not in ast.unparse(node), f"line {node.lineno}"


def test_no_public_verb_shares_its_name_with_a_module_of_the_package():
    import pyg_accel

    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        p.name for p in PACKAGE.iterdir() if p.is_dir()
    }
    assert modules & set(pyg_accel.__all__) <= {"layers", "ops", "settings"}


def test_there_is_no_init_below_tests():
    """With one, a test folder named like a package would be imported in its place."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_room_has_its_tests():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert folders <= {p.name for p in (ROOT / "tests").iterdir() if p.is_dir()}
