"""All benchmarks: check, measure, write the CSV, draw.

python -m benchmarks.run [kernels|epochs|all] [--quick]
"""

import argparse

from benchmarks import cpu_epochs, cpu_kernels, plot

SUITES = {"kernels": (cpu_kernels,), "epochs": (cpu_epochs,), "all": (cpu_kernels, cpu_epochs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", nargs="?", choices=SUITES, default="all")
    parser.add_argument("--quick", action="store_true", help="small graphs: does it all work?")
    options = parser.parse_args()
    for suite in SUITES[options.suite]:
        suite.main(["--quick"] if options.quick else [])
    plot.main(quick=options.quick)


if __name__ == "__main__":
    main()
