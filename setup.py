"""The native libraries of pyg_accel. Everything else about the package is in pyproject.toml."""

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU, CUDA = "pyg_accel._C_cpu", "pyg_accel._C_cuda"
CONFIG = "csrc/cpu/config.cpp"
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    # The ABI of torch 2.10, which every later torch serves. With it, including any header from
    # outside the stable ABI is an error.
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
]  # and no -march: kernels choose their instruction set at run time, so that wheels are portable
CUDA_FLAGS = ["-std=c++20", "-O3", FLAGS[-1]]
CXX = os.environ.get("CXX") or ("c++" if shutil.which("c++") else "g++")
NVCC = shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", ""), "bin")) or (
    shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
)
LINKER = shlex.split(os.environ.get("LDSHARED") or f"{CXX} -shared")
# Libraries are loaded for their static initialisers, which register operators; one C function is
# called by its name. An exported copy of a C++ standard-library symbol could take the place of
# another library's.
EXPORTS = f"-Wl,--version-script={os.path.abspath('csrc/exports.map')}"
# What processors must have for the kernels of an instruction set; the last that one has is used.
ISAS = {"portable": "", "avx2": "avx2 fma f16c",
        "avx512": "avx512f avx512bw avx512dq avx512vl"}  # fmt: skip
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
    if shutil.which(CXX) is None:
        reasons.append(f"there is no C++ compiler (no program {CXX!r})")
    return reasons


def missing_cuda() -> list[str]:
    """Return what keeps the CUDA library from being built beside the other one."""
    wanted = os.environ.get("PYG_ACCEL_CUDA")
    if wanted == "0":
        return ["PYG_ACCEL_CUDA=0 is set"]
    if sys.platform != "linux":
        return ["it is built on Linux only"]
    if not NVCC:
        return ["there is no CUDA compiler (nvcc, on the PATH or in CUDA_HOME/bin)"]
    if wanted != "1" and not os.path.exists("/dev/nvidiactl"):
        return ["there is no GPU (PYG_ACCEL_CUDA=1 builds it nevertheless)"]
    return []


def left_out() -> list[str]:
    """Return the instruction sets that PYG_ACCEL_NATIVE=1 does without: all but this machine's."""
    if os.environ.get("PYG_ACCEL_NATIVE") != "1" or platform.machine() != "x86_64":
        return []
    has = set(Path("/proc/cpuinfo").read_text().split())
    usable = [isa for isa, needs in ISAS.items() if has.issuperset(needs.split())]
    return [isa for isa in ISAS if isa != usable[-1]]


def version_of(compiler: str) -> str:
    """Return the line of a compiler's --version that has the number."""
    lines = subprocess.check_output([compiler, "--version"], text=True).splitlines()
    return next((line for line in lines if "release" in line), lines[0])


def cuda_folders() -> list[str]:
    """Return where nvcc would have the linker look for the libraries of CUDA."""
    if not NVCC:
        return []
    said = subprocess.run([NVCC, "--dryrun", "-shared", "a.o"], capture_output=True, text=True)
    libraries = re.search(r"^#\$ LIBRARIES=(.*)$", said.stderr, re.MULTILINE)
    return shlex.split(libraries[1]) if libraries else []


def torch_folder() -> Path:
    """Return where torch is; importing it would take longer than some files take to compile."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def is_fresh(made: Path, command: str) -> bool:
    """Say whether an object is newer than all it was made of, and made by the same command."""
    rules, said = made.with_suffix(".d"), made.with_suffix(".command")
    if not (made.exists() and rules.exists() and said.exists()):
        return False
    sources = rules.read_text().replace("\\\n", " ").partition(":")[2].split()
    return said.read_text() == command and all(
        os.path.exists(path) and os.stat(path).st_mtime <= made.stat().st_mtime for path in sources
    )


def compile_all(commands: dict[Path, list[str]]) -> None:
    """Make objects by commands that end in their source, as many at a time as there are cores.

    An object is known by its command, with the version of torch in place of its folder: another
    environment with that version takes it as it is.
    """
    torch, release = str(torch_folder()), version("torch").partition("+")[0]
    known = {
        made: " ".join(how).replace(torch, f"torch-{release}") for made, how in commands.items()
    }
    todo = {made: how for made, how in commands.items() if not is_fresh(made, known[made])}
    done = count(1)

    def make(made: Path) -> None:
        began = time.monotonic()
        made.parent.mkdir(parents=True, exist_ok=True)
        rules = ["-MMD", "-MF", str(made.with_suffix(".d")), "-o", str(made)]
        cache = ["ccache"] if shutil.which("ccache") else []
        result = subprocess.run([*cache, *todo[made], *rules], capture_output=True, text=True)
        took = f"{time.monotonic() - began:.1f} s"
        print(f"[{next(done)}/{len(todo)}] {todo[made][-1]} ({took})\n" + result.stderr, end="")
        sys.stdout.flush()
        if result.returncode:
            raise SystemExit(f"{' '.join(todo[made])} failed with {result.returncode}")
        made.with_suffix(".command").write_text(known[made])

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        for _ in pool.map(make, todo):
            pass


def native() -> dict[str, Any]:
    """Return the arguments of `setup` that build the libraries. A compile error fails the build."""
    torch = torch_folder()
    # Error messages name source files: without the folders of the build machine.
    prefixes = [f"-ffile-prefix-map={path}/=" for path in (os.getcwd(), torch / "include")]
    includes = [f"-I{path}" for path in ("csrc", torch / "include")]
    folders = [f"-L{torch / 'lib'}"]
    gencode = [word for target in TARGETS for word in ("-gencode", target)]
    host = [f"-Xcompiler={flag}" for flag in ("-fPIC", "-fvisibility=hidden", *prefixes)]
    linux = sys.platform == "linux"
    # How to compile a file, and how to link. Neither library has an rpath: whoever loads it has
    # imported torch.
    tools = {
        # torch_cpu alone: the stable ABI is a C interface that lives there. A kernel that was
        # declared but not written fails here, not in a user's process.
        CPU: (
            [CXX, *FLAGS, *includes, *prefixes, "-c"],
            ["-ltorch_cpu", *(["-Wl,--no-undefined", EXPORTS] if linux else [])],
        ),
        # libtorch must stay a dependency though nothing here names it: with a CUDA build of torch
        # it brings libtorch_cuda, which has the current stream.
        CUDA: (
            [str(NVCC), "-ccbin", CXX, *CUDA_FLAGS, *includes, *host, *gencode, "-c"],
            [*cuda_folders(), "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", EXPORTS,
             "-lcudart_static", "-lpthread", "-ldl", "-lrt"],
        ),
    }  # fmt: skip

    class Build(build_ext):
        def finalize_options(self) -> None:
            """Let pip leave its objects where `make` looks for them, not in a temporary folder."""
            super().finalize_options()
            self.build_temp = "build/objects"

        def run(self) -> None:
            super().run()
            facts = {"torch": version("torch"), "compiler": version_of(CXX), "flags": FLAGS}
            if NVCC and not missing_cuda():
                facts |= {"cuda compiler": version_of(NVCC), "cuda targets": TARGETS}
            info = Path(self.get_ext_fullpath(CPU)).with_name("build_info.json")
            info.write_text(json.dumps(facts, indent=2) + "\n")

        def build_extensions(self) -> None:
            """Compile the files of all libraries side by side, then link."""
            made = {
                ext.name: {
                    Path(self.build_temp, source + ".o"): [
                        *tools[ext.name][0],
                        *(without if source == CONFIG else []),
                        source,
                    ]
                    for source in ext.sources
                }
                for ext in self.extensions
            }
            compile_all({path: how for objects in made.values() for path, how in objects.items()})
            for name, objects in made.items():
                target = Path(self.get_ext_fullpath(name))
                target.parent.mkdir(parents=True, exist_ok=True)
                link = [*LINKER, *map(str, objects), *folders, *tools[name][1], "-o", str(target)]
                subprocess.check_call(link)

    without = [f"-DPYG_ACCEL_WITHOUT_{isa.upper()}" for isa in left_out()]
    kernels = [  # first: they take longest
        f"csrc/cpu/{isa}_{dtype}.cpp"
        for isa in ISAS
        if isa not in left_out()
        for dtype in ("float", "double", "bf16", "fp16")
    ]
    every = {*glob("csrc/cpu/*.cpp"), *glob("csrc/cpu/pyg_lib/*.cpp"), "csrc/library.cpp"}
    operators = sorted(path for path in every if "_" not in Path(path).name)
    cuda = sorted(
        glob("csrc/cuda/**/*.cu", recursive=True) + glob("csrc/cuda/**/*.cpp", recursive=True)
    )
    libraries = {CPU: kernels + operators} | ({} if missing_cuda() else {CUDA: cuda})
    return {
        # They use nothing of Python but its stable ABI, so one wheel serves all versions.
        "ext_modules": [
            Extension(name, sources=sources, py_limited_api=True)
            for name, sources in libraries.items()
        ],
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
