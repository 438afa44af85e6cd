#!/usr/bin/env bash
# Compiles the CPU library for 64-bit ARM and tests its kernels under emulation: make test-arm
#
# Takes about half an hour and 2 GB, as root on Debian or Ubuntu, of which it needs the packages
# g++-aarch64-linux-gnu, qemu-user-static and debootstrap. What was downloaded and compiled stays in
# build/arm. The words after the name of this script go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."

for program in aarch64-linux-gnu-g++ qemu-aarch64-static debootstrap; do
  command -v $program >/dev/null || {
    echo "no $program: apt-get install g++-aarch64-linux-gnu qemu-user-static debootstrap"
    exit 1
  }
done
python=${PYTHON:-.venv/bin/python}
here=$PWD/build/arm
mkdir -p "$here/objects" "$here/wheels"

# Debian's Python for ARM: its packages, unpacked. Debian 12 has Python 3.11.
system=$here/system
if [[ ! -x $system/usr/bin/python3.11 ]]; then
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3,libgomp1 \
    bookworm "$here/packages"
  for package in "$here"/packages/var/cache/apt/archives/*.deb; do
    dpkg -x "$package" "$system"
  done
fi

# torch 2.10 is the oldest that is served, and the last whose ARM wheel on PyPI is for the CPU alone.
site=$here/site
if [[ ! -d $site/torch ]]; then
  "$python" -m pip install --quiet --target "$site" --only-binary=:all: --no-deps \
    --python-version 3.11 --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \
    torch==2.10.0 numpy==1.26.4 scipy==1.14.1 psutil aiohttp xxhash requests multidict yarl \
    propcache frozenlist aiosignal aiohappyeyeballs attrs idna urllib3 certifi charset-normalizer \
    typing_extensions sympy==1.13.3 mpmath networkx jinja2 markupsafe filelock fsspec \
    torch-geometric==2.8.* tqdm pyparsing pytest pluggy iniconfig packaging pygments hypothesis \
    sortedcontainers
fi

compile() {
  aarch64-linux-gnu-g++ -std=c++20 -O3 -g0 -fPIC -fvisibility=hidden -Icsrc \
    -DTORCH_TARGET_VERSION=0x020a000000000000 -I"$2/torch/include" \
    -I"$2/torch/include/torch/csrc/api/include" -c "$1" -o "$3/$(basename "$1").o"
  echo "$1"
}
export -f compile
rm -f "$here"/objects/*
printf '%s\n' csrc/library.cpp csrc/cpu/*.cpp |
  xargs -P "$(nproc)" -I{} bash -ec "compile {} '$site' '$here/objects'"

# A copy of the package with this library instead of the machine's own.
project=$here/project
rm -rf "$project"
mkdir "$project"
cp -r pyg_accel tests pyproject.toml "$project"
rm -f "$project"/pyg_accel/*.so "$project"/pyg_accel/build_info.json
aarch64-linux-gnu-g++ -shared "$here"/objects/*.o -L"$site/torch/lib" -ltorch_cpu \
  -Wl,--no-undefined,--allow-shlib-undefined,--version-script=csrc/exports.map \
  -o "$project/pyg_accel/_C_cpu.abi3.so"

cd "$project"
tests=("$@")
((${#tests[@]})) || tests=(tests/backends/test_contract.py tests/backends/test_contract_cbsr.py -k cpu)
qemu-aarch64-static -L "$system" -E PYTHONPATH="$project:$site" -E OMP_NUM_THREADS=1 \
  "$system/usr/bin/python3.11" -m pytest -q -p no:cacheprovider "${tests[@]}"
