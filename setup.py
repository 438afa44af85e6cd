"""The native libraries of pyg_accel. Everything else about the package is in pyproject.toml."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

CPU, CUDA = "pyg_accel._C_cpu", "pyg_accel._C_cuda"
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
NVCC = shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin")) or (
    shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
)
# Nothing is exported: libraries are loaded for their static initialisers, which register operators.
# An exported copy of a C++ standard-library symbol could take the place of another library's.
SCRIPT, EXPORTS = "--version-script", os.path.abspath("csrc/exports.map")
# Machine code for Ampere and Hopper; later ones compile the PTX when they first load it.
TARGETS = ("arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a",
           "arch=compute_90,code=compute_90")  # fmt: skip


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


def missing_cuda() -> list[str]:
    """Return what keeps the CUDA library from being built beside the other one."""
    if os.environ.get("PYG_ACCEL_NO_CUDA") == "1":
        return ["PYG_ACCEL_NO_CUDA=1 is set"]
    if sys.platform != "linux":
        return ["it is built on Linux only"]
    return [] if NVCC else ["there is no CUDA compiler (nvcc, on the PATH or in CUDA_HOME/bin)"]


def version_of(compiler: str) -> str:
    """Return the line of a compiler's --version that has the number."""
    lines = subprocess.check_output([compiler, "--version"], text=True).splitlines()
    return next((line for line in lines if "release" in line), lines[0])


def native() -> dict[str, Any]:
    """Return the arguments of `setup` that build the libraries. A compile error fails the build."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths

    os.environ["CXX"] = CXX  # else setuptools links with what built Python itself
    prefixes = [f"-ffile-prefix-map={path}/=" for path in (os.getcwd(), *include_paths())]

    class Build(BuildExtension):
        def run(self) -> None:
            super().run()
            facts = {"torch": torch.__version__, "compiler": version_of(CXX), "flags": FLAGS}
            if NVCC and not missing_cuda():
                facts |= {"cuda compiler": version_of(NVCC), "cuda targets": TARGETS}
            info = Path(self.get_ext_fullpath(CPU)).with_name("build_info.json")
            info.write_text(json.dumps(facts, indent=2) + "\n")

        def build_extension(self, ext: Extension) -> None:
            """Compile CUDA by hand: torch's own way refuses where torch was built without CUDA."""
            if ext.name != CUDA:
                super().build_extension(ext)
                return
            folder = Path(self.build_temp, "cuda")
            folder.mkdir(parents=True, exist_ok=True)
            target = Path(self.get_ext_fullpath(CUDA))
            target.parent.mkdir(parents=True, exist_ok=True)
            includes = [f"-I{path}" for path in ("csrc", *include_paths())]
            headers = [p.stat().st_mtime for p in Path("csrc/cuda").glob("*.*h")]

            def compile_one(source: str) -> str:
                made = folder / (Path(source).name + ".o")
                newest = max(Path(source).stat().st_mtime, *headers)
                if made.exists() and made.stat().st_mtime > newest:
                    return str(made)
                command = [str(NVCC), "-ccbin", CXX, *FLAGS[:2], *FLAGS[4:], *includes]
                command += [f"-Xcompiler={f}" for f in ("-fPIC", "-fvisibility=hidden", *prefixes)]
                for where in TARGETS:
                    command += ["-gencode", where]
                command += ["-c", source, "-o", str(made)]
                subprocess.check_call(command)
                return str(made)

            jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
            with ThreadPoolExecutor(jobs) as pool:
                objects = list(pool.map(compile_one, sorted(ext.depends)))
            newest = max(Path(path).stat().st_mtime for path in (EXPORTS, *objects))
            if target.exists() and target.stat().st_mtime > newest:
                return
            # libtorch must stay a dependency though nothing here names it: with a CUDA build of
            # torch it brings libtorch_cuda, which has the current stream.
            link = [str(NVCC), "-ccbin", CXX, "-shared", *objects,
                    *(f"-L{path}" for path in library_paths()), "-Xlinker", f"{SCRIPT}={EXPORTS}",
                    "-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu", "-cudart", "static",
                    "-o", str(target)]  # fmt: skip
            subprocess.check_call(link)

    # Not CppExtension, which links c10 and libtorch too: the stable ABI is a C interface that lives
    # in torch_cpu. No rpath either: whoever loads this library has imported torch.
    library = Extension(
        CPU,
        sources=["csrc/library.cpp", *sorted(glob("csrc/cpu/*.cpp"))],
        depends=[*sorted(glob("csrc/cpu/*.h")), EXPORTS],
        include_dirs=[os.path.abspath("csrc"), *include_paths()],
        library_dirs=library_paths(),
        libraries=["torch_cpu"],
        language="c++",
        py_limited_api=True,  # uses nothing of Python, so one wheel serves all versions
        # Error messages name source files: without the build machine's folders, please.
        extra_compile_args=FLAGS + prefixes,
        # A kernel that was declared but not written fails here, not in a user's process.
        extra_link_args=(
            ["-Wl,--no-undefined", f"-Wl,{SCRIPT}={EXPORTS}"] if sys.platform == "linux" else []
        ),
    )
    cuda = Extension(
        CUDA, sources=[], depends=glob("csrc/cuda/*.cpp") + glob("csrc/cuda/*.cu"),
        py_limited_api=True,
    )  # fmt: skip
    return {
        "ext_modules": [library] if missing_cuda() else [library, cuda],
        "cmdclass": {"build_ext": Build},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


reasons = missing()
if not {"egg_info", "dist_info"} & set(sys.argv):  # once, not in each metadata pass
    how = "`make venv` or `pip install --no-build-isolation -e .`"
    for what, lacking in (("native", reasons), ("Tensor-Core", missing_cuda())):
        if lacking:
            print(f"pyg_accel without {what} kernels: {'; '.join(lacking)}. To build them: {how}")
setup(**({} if reasons else native()))
