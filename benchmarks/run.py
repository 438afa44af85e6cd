"""The two suites of a CPU: check, measure, write the CSV, draw.

python -m benchmarks.run [kernels|epochs|all] [--quick]
"""

import argparse

from benchmarks.epochs import cpu as epochs
from benchmarks.kernels import cpu as kernels

SUITES = {"kernels": (kernels,), "epochs": (epochs,), "all": (kernels, epochs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", nargs="?", choices=SUITES, default="all")
    parser.add_argument("--quick", action="store_true", help="small graphs: does it all work?")
    options = parser.parse_args()
    for suite in SUITES[options.suite]:
        suite.main(["--quick"] if options.quick else [])


if __name__ == "__main__":
    main()
