"""Where the time of RelBench's `gnn_entity.py` goes, unchanged, on a made database.

    python -m benchmarks.scripts.relational --relbench CHECKOUT

It needs the packages `relbench<3` and `pytorch-frame`; PyG alone needs pyg-lib too. Variants, in
turns, in processes of one thread: `stock`; `sampled`, with the batches of `pyg_accel` and the
layers of PyG; `patched`, as `python -m pyg_accel run`. A step ends with a backward pass. Times are
the processor's, medians of the last two thirds of the steps; `loss_difference` is the largest one
from `sampled`, over the loss: pyg-lib draws other batches.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scripts import __main__ as scripts
from benchmarks.tools import results

TASKS = ("driver-dnf", "driver-position")
VARIANTS = ("stock", "sampled", "patched")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, steps=12, seconds=120, tasks=TASKS)
    parser.add_argument("--relbench", type=Path, required=True, help="a checkout of relbench")
    options = parser.parse_args(arguments)
    rows = results.Rows("scripts/relational_cpu", options, key=("task",), steps=options.steps)
    script = options.relbench.resolve() / "examples/gnn_entity.py"
    for (task,) in results.each(rows.missing((task,) for task in options.tasks)):
        command = [str(Path(__file__).with_name("database.py")), str(script), "--dataset", "rel-f1",
                   "--task", task, "--no-download", "--cache_dir", "cache"]  # fmt: skip
        rows.add(compared(command, options), show=True, task=task)
    rows.done()


def compared(command: Sequence[str], options: Any) -> list[dict[str, Any]]:
    """A row for each part and variant, and one for whole steps."""
    runs = scripts.in_turns(command, options.steps, options.seconds, VARIANTS)
    rows, right = [], runs["sampled"]["losses"]
    for name, one in runs.items():
        pairs = [(a, b) for a, b in zip(right, one["losses"], strict=False) if name == "patched"]
        late = one.get("parts", [])[len(one["ends"]) // 3 :]
        ms = (
            {part: 1e3 * float(np.median([step[part] for step in late])) for part in late[0]}
            if late
            else {}
        )
        ms = {"step": scripts.of_steps(one["ends"])[0]} | ms
        rows += [{
            "part": part, "variant": name, "ms": value, "peak_mib": one["peak_mib"],
            "error": one["error"].partition("\n")[0][:120],
            "loss_difference": max((abs(a - b) / abs(a) for a, b in pairs), default=np.nan),
        } for part, value in ms.items()]  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
