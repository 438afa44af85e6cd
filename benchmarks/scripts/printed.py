"""What patch() brings to the benchmarks that PyG has in its tests, unchanged.

    python -m benchmarks.scripts.printed --pyg CHECKOUT [--device cuda] [--only SCRIPT ...]

Each script runs stock and as `python -m pyg_accel run`, in turns, in processes of their own; what
is compared are the seconds that it prints, the least of all turns. Rows are told apart by the line
above a table, such as the model, and by the name in it. The scripts print with `tabulate`.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.tools import results
from benchmarks.tools.fresh import python_path, small_pages

SCRIPTS = (
    "nn/models/test_basic_gnn.py --backward --dynamic", "nn/conv/test_hetero_conv.py --backward",
    "nn/conv/test_hgt_conv.py", "nn/aggr/test_fused.py --backward",
    "utils/test_softmax.py --backward", "utils/test_segment.py --backward", "utils/test_spmm.py",
    "nn/test_compile_conv.py --backward",
)  # fmt: skip
Key = tuple[str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=("cpu", "cuda"), turns=1)
    parser.add_argument("--pyg", type=Path, required=True, help="a checkout of pytorch_geometric")
    parser.add_argument(
        "--only", nargs="+", default=SCRIPTS, help="paths below test/, with options"
    )
    options = parser.parse_args(arguments)
    rows = results.Rows(f"scripts/printed_{options.device}", options, options.device,
                        key=("script",))  # fmt: skip
    scripts = options.only[:1] if options.quick else options.only
    for (script,) in results.each(rows.missing((name,) for name in scripts)):
        path, *arguments = script.split()
        command = [str(options.pyg.resolve() / "test" / path), *arguments, "--device",
                   options.device]  # fmt: skip
        rows.add(compared(command, options.turns), show=True, script=script)
    rows.done()


def compared(command: Sequence[str], turns: int) -> list[dict[str, object]]:
    """The rows of a script."""
    least: dict[str, dict[Key, float]] = {"stock": {}, "patched": {}}
    errors: dict[str, str] = {}
    for _ in range(turns):
        for variant, found in least.items():
            run = [sys.executable, *(("-m", "pyg_accel", "run") * (variant == "patched")), *command]
            with small_pages() if variant == "stock" else nullcontext():
                environment = os.environ | {"PYTHONPATH": python_path()}
                done = subprocess.run(run, env=environment, capture_output=True, text=True,
                                      check=False)  # fmt: skip
            if done.returncode:
                errors[f"error, {variant}"] = done.stderr.strip().rpartition("\n")[2][:120]
            for key, seconds in printed(done.stdout):
                found[key] = min(seconds, found.get(key, seconds))
    keys = list(dict.fromkeys(key for found in least.values() for key in found)) or [("", "")]
    return [
        {"section": key[0], "name": key[1]}
        | {f"{variant}_s": found.get(key) for variant, found in least.items()}
        | errors
        for key in keys
    ]


def printed(text: str) -> Iterator[tuple[Key, float]]:
    """Yield the rows of all tables: section and name, and the last number in seconds."""
    section, tables = "", Counter[str]()
    for line in text.splitlines():
        if not line.startswith(("|", "+")):
            section = line.strip() or section
        elif line.startswith("| Name"):
            tables[section] += 1
        elif row := re.fullmatch(r"\| (.+?) +\|.*?([\d.]+)s +\|", line):
            number = f" ({tables[section]})" if tables[section] > 1 else ""
            yield (f"{section}{number}", row[1]), float(row[2])


if __name__ == "__main__":
    main()
