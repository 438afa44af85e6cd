"""The native library of pyg_accel. Everything else about the package is in pyproject.toml."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

NAME = "pyg_accel._C_cpu"
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",  # most Pythons add -g to every extension
    "-fvisibility=hidden",
    # The ABI of torch 2.10, which every later torch serves. With it, including any header from
    # outside the stable ABI is an error.
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
]  # and no -march: kernels choose their instruction set at run time, so that wheels are portable
CXX = os.environ.get("CXX") or ("c++" if shutil.which("c++") else "g++")


def missing() -> list[str]:
    """Return what keeps the library from being built; empty means that it can be."""
    reasons = []
    if os.environ.get("PYG_ACCEL_NO_EXTENSION") == "1":
        reasons.append("PYG_ACCEL_NO_EXTENSION=1 is set")
    if importlib.util.find_spec("torch") is None:
        reasons.append("torch is not installed")
    if shutil.which(CXX) is None:  # torch wants one program too: no "ccache g++"
        reasons.append(f"there is no C++ compiler (no program {CXX!r})")
    return reasons


def native() -> dict[str, Any]:
    """Return the arguments of `setup` that build the library. A compile error fails the build."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths

    os.environ["CXX"] = CXX  # else setuptools links with what built Python itself

    class Build(BuildExtension):
        def run(self) -> None:
            super().run()
            version = subprocess.check_output([CXX, "--version"], text=True).splitlines()[0]
            facts = {"torch": torch.__version__, "compiler": version, "flags": FLAGS}
            info = Path(self.get_ext_fullpath(NAME)).with_name("build_info.json")
            info.write_text(json.dumps(facts, indent=2) + "\n")

    # Not CppExtension, which links c10 and libtorch too: the stable ABI is a C interface that lives
    # in torch_cpu. No rpath either: whoever loads this library has imported torch.
    library = Extension(
        NAME,
        sources=["csrc/library.cpp", *sorted(glob("csrc/cpu/*.cpp"))],
        depends=sorted(glob("csrc/**/*.h", recursive=True)),
        include_dirs=[os.path.abspath("csrc"), *include_paths()],
        library_dirs=library_paths(),
        libraries=["torch_cpu"],
        language="c++",
        py_limited_api=True,  # uses nothing of Python, so one wheel serves all versions
        # Error messages name source files: without the build machine's folders, please.
        extra_compile_args=FLAGS
        + [f"-ffile-prefix-map={path}/=" for path in (os.getcwd(), *include_paths())],
        # A kernel that was declared but not written fails here, not in a user's process.
        extra_link_args=["-Wl,--no-undefined"] if sys.platform == "linux" else [],
    )
    return {
        "ext_modules": [library],
        "cmdclass": {"build_ext": Build},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


reasons = missing()
if reasons and not {"egg_info", "dist_info"} & set(sys.argv):  # once, not in each metadata pass
    how = "`make venv` or `pip install --no-build-isolation -e .`"
    print(f"pyg_accel without native kernels: {'; '.join(reasons)}. To build them: {how}")
setup(**({} if reasons else native()))
