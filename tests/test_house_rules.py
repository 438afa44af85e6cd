"""Rules that matter are executable: floors, circles and lines of code; in `make lint`, form."""

import ast
import graphlib
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import pyg_accel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyg_accel"
FILES = sorted(PACKAGE.rglob("*.py"))
HARD_CAP = 420
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER}  # fmt: skip

# Lines of code, as `code_lines` counts them: ceilings, to be lowered with every change that needs
# fewer. One that needs more has to let something else go: no commit may raise them. The room that
# stands in for pyg-lib is counted apart.
MOST_CODE_LINES = 35954
MOST_PYG_LIB_LINES = 2452

# Imports run from later floors to earlier ones. Rooms of one floor may not import each other.
FLOORS = [
    {"errors", "settings", "formula"},
    {"runtime"},
    {"graph", "costs", "testing"},
    {"backends", "loader", "reordering"},
    {"ops"},
    {"record", "pyg_lib"},
    {"patching"},
    {"layers", "cuda_graphs", "distributed", "tuning", "doctor"},
    {"rewrite"},
    {"__main__"},
]  # fmt: skip
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PUBLIC_NAMES_FROM = FLOOR_OF["ops"]  # the first floor whose rooms may use names of the package

# Private names of PyG outside of the overrides, which ought to move there.
PRIVATES_IN_USE = {
    "settings.py": {"_data"},  # of os.environ
    "cuda_graphs/padding.py": {"_index"},  # the end of argument names, such as edge_index
    "loader/collate.py": {"_key", "_mapping"},  # of a storage, by which attributes are read at once
    "loader/selected.py": {"_data", "_mapping"},  # all graphs of a dataset, and the same
    "loader/dataloader.py": {"_data", "_data_list"},
    "layers/convert.py": {"_children"},  # Sequential shows the calls it makes nowhere else
    "graph/memo.py": {"_value"},  # of torch_sparse's storage, beside which PyG has one of that name
}


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "pyg_accel":
                yield from (f"pyg_accel.{alias.name}" for alias in node.names)


def breaches(files: Iterable[Path], look: Callable[[Path], Iterable[str]]) -> str:
    """What `look` finds in the files, a line each."""
    return "\n".join(f"{path.relative_to(ROOT)}: {text}" for path in files for text in look(path))


def test_the_rules_see_the_files_of_the_package():
    assert {PACKAGE / "__init__.py", PACKAGE / "patching" / "overrides.py"} < set(FILES)


def test_imports_run_downwards():
    def upwards(path: Path) -> Iterator[str]:
        mine = room(path)
        if mine not in FLOOR_OF:
            yield f"{mine} has no floor: add it to the list here and to the docs"
            return
        for name in imported(parsed(path)):
            parts = name.split(".")
            if parts[0] != "pyg_accel" or len(parts) < 2 or parts[1] == mine:
                continue
            theirs = parts[1]
            floor = FLOOR_OF[mine]
            if theirs not in FLOOR_OF:  # a name of the package
                if floor < PUBLIC_NAMES_FROM:
                    yield f"imports {name} from the top of the package"
            elif FLOOR_OF[theirs] >= floor:
                yield f"{mine} (floor {floor}) imports {theirs} (floor {FLOOR_OF[theirs]})"

    files = [path for path in FILES if path != PACKAGE / "__init__.py"]
    assert not (actual := breaches(files, upwards)), actual


def test_no_modules_import_one_another_in_a_circle():
    """Imports inside of functions count, and those for type checkers alone."""
    named = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    graph: dict[str, set[str]] = {}
    for name, path in named.items():
        graph[name] = set()
        tree = ast.parse(path.read_text())
        if name == "pyg_accel":  # its public names are imported when they are first asked for
            tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import, which this test does not follow"
                homes = pyg_accel._HOME if node.module == "pyg_accel" else {}
                for alias in node.names:
                    full = homes.get(alias.name, f"{node.module}.{alias.name}")
                    graph[name].add(full if full in named else node.module)
            elif isinstance(node, ast.Import):
                graph[name].update(alias.name for alias in node.names)
    edges = {name: (others & named.keys()) - {name} for name, others in graph.items()}
    graphlib.TopologicalSorter(edges).prepare()


@pytest.mark.lint
def test_modules_do_not_import_others_by_name():
    """A name in a string hides an import from every tool that reads them."""

    def by_name(path: Path) -> Iterator[str]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                "import_module", "__import__",
            ):  # fmt: skip
                yield f"line {node.lineno}: {ast.unparse(node)}"

    # The public names of the package, each imported when it is asked for; a suite of benchmarks/.
    files = [p for p in FILES if p not in (PACKAGE / "__init__.py", PACKAGE / "__main__.py")]
    assert not (actual := breaches(files, by_name)), actual


@pytest.mark.lint
def test_floors_below_patching_know_nothing_of_pyg():
    def of_pyg(path: Path) -> Iterator[str]:
        yield from (n for n in imported(parsed(path)) if n.startswith("torch_geometric"))

    files = [p for p in FILES if room(p) in ("backends", "ops", "graph", "formula", "costs")]
    assert not (actual := breaches(files, of_pyg)), actual


def code_lines(path: Path) -> int:
    """Count lines without comments, docstrings and blank ones."""
    text = path.read_text()
    if path.suffix != ".py":
        bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        return sum(bool(line.strip()) for line in bare.splitlines())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def of_pyg_lib(path: Path) -> bool:
    """Whether a file is of the room that stands in for pyg-lib."""
    *folders, name = path.relative_to(ROOT).parts
    return "pyg_lib" in folders or (folders[0] == "csrc" and name.startswith("pyg_lib_"))


def test_the_code_does_not_grow():
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    apart = {path for path in [*FILES, *sources] if of_pyg_lib(path)}
    lines = sum(map(code_lines, {*FILES, *sources} - apart))
    assert lines <= MOST_CODE_LINES, "more code than before: what does it replace?"
    assert sum(map(code_lines, apart)) <= MOST_PYG_LIB_LINES, "more code in place of pyg-lib"


def git(*arguments: str) -> str:
    """What git prints; skips the test where there is no git, or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if done.returncode:
        pytest.skip(f"no history: {done.stderr.strip()}")
    return done.stdout


def raised(name: str, now: int, log: str) -> str:
    """Say which commits raised a ceiling, a line each.

    Args:
        name: of the ceiling.
        now: its number.
        log: of the commits that changed it, each behind a null character: its hash and its patch,
            of a merge one for each parent.
    """
    actual, lowest = [], now
    for commit in log.split("\0")[1:]:
        old, new = (
            [int(n) for n in re.findall(rf"^\{sign}{name} = ([\d_]+)$", commit, re.MULTILINE)]
            for sign in "-+"
        )
        if old and new and max(new) > min(old):
            actual.append(f"{commit.split()[0]} raised {name} from {min(old)} to {max(new)}")
        lowest = min([lowest, *old, *new])
    if lowest < now:
        actual.append(f"{name} was {lowest}, and is {now}")
    return "\n".join(actual)


@pytest.mark.parametrize("name", ["MOST_CODE_LINES", "MOST_PYG_LIB_LINES"])
def test_no_commit_raised_a_ceiling(name):
    """Of those since this test is there; in a shallow clone, as far as its history goes."""
    if Path(git("rev-parse", "--show-toplevel").strip()) != ROOT.resolve():
        pytest.skip("no history: these files are inside of another repository")
    file = "tests/test_house_rules.py"
    first = git("log", "--format=%H", "-Sdef test_no_commit_raised_a_ceiling", "--", file).split()
    log = ""
    if first:
        since = f"{first[-1]}..HEAD"
        log = git("log", "-m", "-p", "--format=%x00%h", f"-G^{name} = ", since, "--", file)
        log += f"\0HEAD\n-{name} = " + git("show", f"HEAD:{file}").split(f"\n{name} = ")[1]
    assert not (actual := raised(name, globals()[name], log)), actual


def test_a_raised_ceiling_is_seen():
    def log(*changes: str) -> str:
        return "".join(f"\0{i:08}\n\n{text}\n" for i, text in enumerate(changes))

    down, up = "-MOST = 9_000\n+MOST = 8000", "-MOST = 8000\n+MOST = 9000"
    assert raised("MOST", 8000, log(down, "-MOST = 9500\n+MOST = 9_000")) == ""
    assert raised("MOST", 8000, log(down, up)) == "00000001 raised MOST from 8000 to 9000"
    assert raised("MOST", 8000, log("+MOST = 8000", "-MOST = 7000")) == "MOST was 7000, and is 8000"
    assert raised("MOST", 9000, log(down)) == "MOST was 8000, and is 9000"
    assert raised("MOST", 9000, "") == ""


@pytest.mark.lint
def test_files_stay_short():
    def too_long(path: Path) -> Iterator[str]:
        if (lines := len(path.read_text().splitlines())) > HARD_CAP:
            yield f"{lines} lines, more than {HARD_CAP}"

    assert not (actual := breaches(FILES, too_long)), actual


@pytest.mark.lint
def test_the_environment_is_read_in_settings_only():
    def reads(path: Path) -> Iterator[str]:
        yield from re.findall(r"\b(?:environ|getenv)\b", path.read_text())

    # large_pages.py sets torch's variable.
    files = [path for path in FILES if path.name not in ("settings.py", "large_pages.py")]
    assert not (actual := breaches(files, reads)), actual


@pytest.mark.lint
def test_the_state_of_threads_is_in_one_file():
    """Except for the two blocks of users in which they may await, whose variables are of a task."""
    met = {
        str(path.relative_to(PACKAGE)): made
        for path in FILES
        if (made := re.findall(r"threading\.local\b|\bContextVar\(", path.read_text()))
    }
    assert met == {
        "backends/dispatch.py": ["ContextVar("],
        "patching/sampling.py": ["ContextVar("],
        "runtime/state.py": ["threading.local"],
    }


def private_names_of_pyg() -> set[str]:
    """Methods and attributes that PyG defines with a leading underscore and torch does not have."""
    spec = find_spec("torch_geometric")
    assert spec is not None and spec.origin is not None
    define = re.compile(r"def (_[a-z]\w*)\(|(?:self|cls|__class__)\.(_[a-z]\w*)\b(?:: [^=\n]+)? = ")
    names = {
        name
        for path in Path(spec.origin).parent.rglob("*.py")
        for match in define.findall(path.read_text())
        for name in match
    }
    return names - {""} - set(dir(torch.nn.Module())) - set(dir(torch.Tensor)) - set(dir(torch))


@pytest.mark.lint
def test_private_names_of_pyg_live_in_overrides_only():
    privates = private_names_of_pyg()
    assert {"_jinja_propagate", "_collect", "_explain", "_edge_mask", "_user_args"} < privates
    met: dict[str, set[str]] = {}
    for path in FILES:
        nodes = list(ast.walk(parsed(path)))
        own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))} | {
            n.attr
            for n in nodes
            if isinstance(n, ast.Attribute)
            and isinstance(n.ctx, ast.Store)
            and ast.unparse(n.value) == "self"
        }
        used = {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {
            n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
        if actual := (used & privates) - own:
            met[str(path.relative_to(PACKAGE))] = actual
    assert {"_collect", "_jinja_propagate", "_orig_propagate"} < met.pop("patching/overrides.py")
    assert met == PRIVATES_IN_USE


@pytest.mark.lint
def test_nothing_swallows_every_exception():
    """What code of the user may raise anywhere is caught if it is logged with its traceback."""

    def swallows(path: Path) -> Iterator[str]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = "everything" if node.type is None else ast.unparse(node.type)
                logged = any("exc_info=True" in ast.unparse(step) for step in node.body)
                everything = node.type is None or re.search(r"\b(?:Base)?Exception\b", caught)
                if everything and not logged:
                    yield f"line {node.lineno} catches {caught}"
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                text = ast.unparse(node)
                if re.search(r"ImportError|\b(?:Base)?Exception\b", text):
                    yield f"line {node.lineno}: {text}"

    assert not (actual := breaches(FILES, swallows)), actual


@pytest.mark.lint
def test_no_public_verb_shares_its_name_with_a_module_of_the_package():
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        p.name for p in PACKAGE.iterdir() if p.is_dir()
    }
    assert modules & set(pyg_accel.__all__) <= {
        "distributed", "layers", "ops", "settings"
    }  # fmt: skip


@pytest.mark.lint
def test_there_is_no_init_below_tests():
    """With one, a test folder named like a package would be imported in its place."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.lint
def test_every_room_has_its_tests():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    # A folder `pyg_lib` beside a script would be the package of that name.
    tests = {p.name.replace("pyg_lib_ops", "pyg_lib") for p in (ROOT / "tests").iterdir()}
    assert folders <= tests
