"""Link a library as wheels need it: for glibc 2.28, with libstdc++ inside.

    LDSHARED="python wheels/link.py" python -m pip wheel --no-build-isolation .

zig brings the symbols that each version of glibc had (`pip install ziglang`). The manylinux policy
knows an older libstdc++ than compilers of today link, so it goes into the library. libgcc_s stays
shared: exceptions may pass through frames of torch, and both must unwind alike.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

TARGET = f"{platform.machine()}-linux-gnu.2.28"


def of_compiler(name: str) -> str:
    """Return the path of a file that the C++ compiler brings."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.check_output(command, text=True).strip()


def main() -> None:
    """Link what the command line names."""
    libraries = [of_compiler(name) for name in ("libstdc++.a", "libgcc_s.so.1", "libgcc.a")]
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", TARGET, "-O2", "-s", "-shared"]
    own = str(Path(__file__).with_name("glibc_2_28.c"))
    sys.exit(subprocess.call([*zig, *sys.argv[1:], own, *libraries]))


if __name__ == "__main__":
    main()
