"""The native libraries as files: what they show to others in the process."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import library_paths
from torch_geometric.nn import SAGEConv

import pyg_accel
from pyg_accel.patching import programs
from pyg_accel.record import guard
from pyg_accel.runtime import native
from pyg_accel.runtime.native import cpu_unavailable_reasons

ROOT = Path(__file__).parents[2]
LIBRARIES = sorted(Path(pyg_accel.__file__).parent.glob("_C_*.so"))
# Files and numbers of C++ streams look up facets of a locale, and those of another copy of the C++
# library are none of ours. The string streams are in torch's headers, which word errors with them.
READS_BY_LOCALE = re.compile(r"St14?basic_[io]?f(ile|stream)|filebuf|_ZNSi|use_facet|has_facet")

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")


def symbols(library: Path, which: str) -> list[str]:
    """Return the names in the dynamic symbol table, without their versions."""
    text = subprocess.check_output(["nm", "-D", which, "--format=posix", library], text=True)
    return [line.split()[0].partition("@")[0] for line in text.splitlines()]


@needs_nm
@pytest.mark.skipif(not LIBRARIES, reason="no library is built")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_a_library_exports_what_python_calls_and_reads_no_locale(library):
    called = ["pyg_accel_unchanged"] if "_C_cpu" in library.name else []
    assert symbols(library, "--defined-only") == called
    undefined = symbols(library, "--undefined-only")
    assert "aoti_torch_new_tensor_handle" in undefined  # so nm did read the table
    assert not [name for name in undefined if READS_BY_LOCALE.search(name)]


@pytest.mark.parametrize("name", ["call", "optimize"])
def test_without_the_library_calls_are_not_recorded(name, monkeypatch, always):
    monkeypatch.setattr(native, "_load_cpu", lambda: ("not built",))
    monkeypatch.setattr(guard, "identities_hold", native.identities_hold.__wrapped__)
    x, edges = torch.randn(20, 4), torch.randint(20, (2, 50))
    layer = SAGEConv(4, 4)
    expected = layer(x, edges)
    with pyg_accel.use_backend("reference"):
        if name == "optimize":
            layer = pyg_accel.optimize(layer, x, edges)
        with pyg_accel.patched():
            for _ in range(3):
                torch.testing.assert_close(layer(x, edges), expected)
    if name == "call":
        assert programs.why(layer, "call") == "not built"


@pytest.mark.skipif(bool(cpu_unavailable_reasons()), reason="the CPU library is not built")
def test_a_library_without_what_python_calls_is_of_other_sources(monkeypatch):
    monkeypatch.setattr(native.ctypes, "PyDLL", lambda path: object())
    (reason,) = native._load_cpu.__wrapped__()
    assert "other sources" in reason


def test_no_source_of_ours_uses_a_stream_or_a_locale():
    files = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix != ".map"]
    assert len(files) > 50
    for path in files:
        actual = re.search(r"#include <(\w*stream|iomanip|locale|regex)>", path.read_text())
        assert actual is None, f"{path.name}: {actual}"


@pytest.mark.full
@pytest.mark.slow
@needs_nm
@pytest.mark.skipif(bool(cpu_unavailable_reasons()), reason="the CPU library is not built")
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_a_library_with_a_cpp_standard_library_of_its_own_works(tmp_path):
    """Some compilers link libstdc++ statically: then torch's copy and ours are in one process."""
    sources = [ROOT / "csrc" / "library.cpp", *(ROOT / "csrc" / "cpu").glob("*.cpp")]
    names = [f"{path.relative_to(ROOT)}.o" for path in sources]
    folders = [f for f in ROOT.glob("build/temp.*") if all((f / name).exists() for name in names)]
    objects = [str(folders[0] / name) for name in names] if folders else []
    if not objects:
        pytest.skip("no object files in build/: run setup.py build_ext --inplace")
    library = tmp_path / "static.so"
    subprocess.check_call([
        "c++", "-shared", "-static-libstdc++", *objects, "-o", str(library),
        *(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-Wl,--no-undefined",
        f"-Wl,--version-script={ROOT / 'csrc' / 'exports.map'}",
    ])  # fmt: skip
    assert symbols(library, "--defined-only") == ["pyg_accel_unchanged"]
    assert not [name for name in symbols(library, "--undefined-only") if "_ZNSt" in name]
    script = (
        "import sys, torch; torch.ops.load_library(sys.argv[1]); ours = torch.ops.pyg_accel_cpu\n"
        "print(ours.info())\n"
        "print(ours.maxk(torch.tensor([[1.0, 3.0, 2.0]]), 2)[1].tolist())\n"
        "try: ours.csr_from_coo(torch.tensor([[7], [0]]), 1, 2, 3, False)\n"
        "except RuntimeError as error: print(str(error).splitlines()[0])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script, path], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for path in (str(library), str(next(p for p in LIBRARIES if "_C_cpu" in p.name)))
    ]
    assert said[0] == said[1]  # numbers in the message of the error included
    assert said[0][1] == "[[1, 2]]"
    assert len(said[0]) == 3
