"""What patch() brings to PyG's own examples, unchanged, on made data.

    python -m benchmarks.scripts --pyg CHECKOUT [--only gcn.py gat.py ...] [--steps 60]

Each script runs stock and as `python -m pyg_accel run`, in turns, in processes of one thread. A
step ends with a backward pass. `step_ms` is the median of the processor's time from one end to the
next, over the last two thirds of the steps; `until_ms` is its time until they are over, imports and
records included. `loss_difference` is the largest one of all steps, over the loss.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tools import results, timing

NAME = "scripts/scripts_cpu"
SCRIPTS = (
    "gcn.py", "gat.py", "super_gat.py", "agnn.py", "tagcn.py", "mixhop.py", "linkx.py", "pna.py",
    "ppi.py", "rgcn.py", "mutag_gin.py", "proteins_topk_pool.py", "proteins_mincut_pool.py",
    "mem_pool.py", "graph_gps.py", "graph_unet.py", "link_pred.py", "hetero/to_hetero_mag.py",
    # under patch() alone, without pyg-lib
    "dgcnn_classification.py", "pointnet2_classification.py", "randlanet_classification.py",
    "mnist_graclus.py", "mnist_voxel_grid.py", "mnist_nn_conv.py", "cora.py", "faust.py",
    "node2vec.py", "cluster_gcn_ppi.py", "cluster_gcn_reddit.py", "shadow.py",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, steps=60, seconds=20, turns=2)
    parser.add_argument("--pyg", type=Path, required=True, help="a checkout of pytorch_geometric")
    parser.add_argument("--only", nargs="+", default=SCRIPTS, help="paths below examples/")
    options = parser.parse_args(arguments)
    rows = results.Rows(NAME, options, key=("script",), steps_at_most=options.steps)
    scripts = options.only[:2] if options.quick else options.only
    for (script,) in results.each(rows.missing((name,) for name in scripts)):
        path = options.pyg.resolve() / "examples" / script
        rows.add([compared(path, options.steps, options.seconds, options.turns)],
                 show=True, script=script)  # fmt: skip
    rows.done()


def compared(path: Path, steps: int, seconds: int, turns: int) -> dict[str, Any]:
    """A row of a script; each variant has the best of its turns."""
    runs: dict[str, list[dict[str, Any]]] = {"stock": [], "patched": []}
    for _ in range(turns):
        for variant, found in runs.items():
            found.append(run([str(path)], steps, seconds, patched=variant == "patched"))
    made = min(len(found["ends"]) for both in runs.values() for found in both)
    row: dict[str, Any] = {"steps": made}
    for variant, found in runs.items():
        times = [of_steps(one["ends"][:made]) for one in found]
        row[f"step_ms, {variant}"] = min((one[0] for one in times), default=np.nan)
        row[f"until_ms, {variant}"] = min((one[1] for one in times), default=np.nan)
        row[f"peak_mib, {variant}"] = min(one["peak_mib"] for one in found)
        row[f"error, {variant}"] = found[0]["error"].partition("\n")[0][:120]
    pairs = zip(runs["stock"][0]["losses"], runs["patched"][0]["losses"], strict=False)
    row["loss_difference"] = max((abs(a - b) / max(abs(a), 1e-6) for a, b in pairs), default=np.nan)
    return row


def of_steps(ends: Sequence[float]) -> tuple[float, float]:
    """Median of the last two thirds, and all together, in milliseconds."""
    if len(ends) < 6:
        return np.nan, np.nan
    each = np.diff(ends)
    return 1e3 * float(np.median(each[len(each) // 3 :])), 1e3 * ends[-1]


def run(
    script: Sequence[str], steps: int, seconds: int, *, patched: bool,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run a script with its arguments in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        child = ["-m", "benchmarks.scripts.child", str(out), str(steps), str(seconds), *script]
        command = [sys.executable, "-m", "pyg_accel", "run", *child] if patched else (
            [sys.executable, *child])  # fmt: skip
        variables = {"PYTHONPATH": str(timing.ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg",
                     **(variables or {})}  # fmt: skip
        with suppress(subprocess.TimeoutExpired):  # workers of a loader may not end
            subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True,
                           check=False, timeout=10 * seconds + 120)  # fmt: skip
        if not out.exists():
            return {"losses": [], "ends": [], "error": "no result", "peak_mib": np.nan}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    main()
