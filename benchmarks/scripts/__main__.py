"""What patch() brings to PyG's own examples, unchanged, on made data.

    python -m benchmarks.scripts --pyg CHECKOUT [--device cuda] [--only gcn.py gat.py ...]
    python -m benchmarks.scripts --pyg CHECKOUT [--device cuda] --models

Each script runs stock and as `python -m pyg_accel run`, in turns, in processes of one thread; with
`--models` its model is also what `optimize()` and, on a GPU, `graphed()` makes of it. A step ends
with a backward pass. `step_ms` is the median from one end to the next, over the last two thirds of
the steps; `until_ms` is the time of the process until they are over. Times are the processor's, on
a GPU those of the clock, and of several turns the least. `loss_difference` is the largest one of
all steps, over the loss: from `stock`, or, if that draws other batches, from `sampled`, which has
the batches of `pyg_accel` and the layers of PyG.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.tools import results, timing
from benchmarks.tools.fresh import small_pages

SCRIPTS = (
    "gcn.py", "gat.py", "super_gat.py", "agnn.py", "tagcn.py", "mixhop.py", "linkx.py", "pna.py",
    "ppi.py", "rgcn.py", "mutag_gin.py", "proteins_topk_pool.py", "proteins_mincut_pool.py",
    "mem_pool.py", "graph_gps.py", "graph_unet.py", "link_pred.py", "node2vec.py", "arma.py",
    "autoencoder.py", "dir_gnn.py", "dna.py", "rgat.py", "film.py", "geniepath.py", "gcn2_ppi.py",
    "infomax_transductive.py", "proteins_diff_pool.py", "proteins_gmt.py", "hetero/han_imdb.py",
    # with torch-sparse
    "ogbn_train.py --dataset ogbn-arxiv --model sage --num_workers 0",
    "ogbn_train.py --dataset ogbn-arxiv --model gat --num_workers 0",
    "ogbn_train.py --dataset ogbn-products --model sage --num_workers 0",
    "ogbn_train.py --dataset ogbn-products --model gat --num_workers 0",
    "ogbn_proteins_deepgcn.py", "graph_sage_unsup.py", "cluster_gcn_ppi.py",
    "cluster_gcn_reddit.py", "shadow.py", "hetero/to_hetero_mag.py",
    # under patch() alone, without pyg-lib
    "ogbn_train.py --num_workers 0",
    "dgcnn_classification.py", "pointnet2_classification.py", "randlanet_classification.py",
    "mnist_graclus.py", "mnist_voxel_grid.py", "mnist_nn_conv.py", "cora.py", "faust.py",
)  # fmt: skip
MODELS = (
    "gcn.py", "gat.py", "agnn.py", "tagcn.py", "rgcn.py", "mutag_gin.py", "arma.py", "ppi.py",
    "graph_gps.py", "link_pred.py",
    "ogbn_train.py --dataset ogbn-arxiv --model sage --num_workers 0",
    "ogbn_train.py --dataset ogbn-arxiv --model gat --num_workers 0",
    "ogbn_proteins_deepgcn.py",
)  # fmt: skip
LAYERS_OF_PYG = {"PYG_ACCEL_DISABLE": "cpu,cuda,triton,pyg_lib,reference"}
VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {"patched": False},
    "patched": {"patched": True},
    "optimized": {"patched": True, "model": "optimized"},
    "graphed": {"patched": True, "model": "graphed"},
    "sampled": {"patched": True, "variables": LAYERS_OF_PYG},
}
SAME_BATCHES = 1e-5  # difference of the first three losses, beyond which batches were others


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=("cpu", "cuda"), steps=60, seconds=20, turns=2,
                            models=False)  # fmt: skip
    parser.add_argument("--pyg", type=Path, required=True, help="a checkout of pytorch_geometric")
    parser.add_argument("--only", nargs="+", help="paths below examples/, with options")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as scripts on a CPU have: rows say so
    name = f"scripts/{'models' if options.models else 'scripts'}_{options.device}"
    rows = results.Rows(name, options, options.device, key=("script",),
                        steps_at_most=options.steps)  # fmt: skip
    scripts = options.only or (MODELS if options.models else SCRIPTS)
    variants = ["stock", "patched", *["optimized"] * options.models,
                *["graphed"] * (options.models and options.device == "cuda")]  # fmt: skip
    for (script,) in results.each(
        rows.missing((s,) for s in scripts[: 2 if options.quick else None])
    ):
        path, *words = script.split()
        command = [str(options.pyg.resolve() / "examples" / path), *words]
        row = compared(command, options.steps, options.seconds, options.turns, variants,
                       options.device)  # fmt: skip
        rows.add([row], show=True, script=script)
    rows.done()


def compared(
    command: Sequence[str], steps: int, seconds: int, turns: int,
    variants: Sequence[str] = ("stock", "patched"), device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """A row of a script; each variant has the best of its turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for _ in range(turns):
        for name, found in runs.items():
            found.append(run(command, steps, seconds, device=device, **VARIANTS[name]))
    made = min(len(one["ends"]) for found in runs.values() for one in found)
    row: dict[str, Any] = {"steps": made}
    for name, found in runs.items():
        times = [of_steps(one["ends"][:made]) for one in found]
        row[f"step_ms, {name}"] = min((one[0] for one in times), default=np.nan)
        row[f"until_ms, {name}"] = min((one[1] for one in times), default=np.nan)
        row[f"peak_mib, {name}"] = min(one["peak_mib"] for one in found)
        row[f"error, {name}"] = found[0]["error"].partition("\n")[0][:120]
        row |= {f"note, {name}": found[0]["note"]} if found[0].get("note") else {}
    beside, losses = "stock", {name: found[0]["losses"] for name, found in runs.items()}
    if made and difference(losses["stock"][:3], losses["patched"][:3]) > SAME_BATCHES:
        beside = "sampled"
        losses[beside] = run(command, steps, seconds, device=device, **VARIANTS[beside])["losses"]
    row["losses_beside"] = beside
    for name in variants[1:]:
        row[f"loss_difference, {name}"] = difference(losses[beside], losses[name])
    return row


def difference(right: Sequence[float], losses: Sequence[float]) -> float:
    """The largest relative difference."""
    pairs = zip(right, losses, strict=False)
    return max((abs(a - b) / max(abs(a), 1e-6) for a, b in pairs), default=np.nan)


def of_steps(ends: Sequence[float]) -> tuple[float, float]:
    """Median of the last two thirds, and all together, in milliseconds."""
    if len(ends) < 6:
        return np.nan, np.nan
    each = np.diff(ends)
    return 1e3 * float(np.median(each[len(each) // 3 :])), 1e3 * ends[-1]


def run(
    script: Sequence[str], steps: int, seconds: int, *, patched: bool, device: str = "cpu",
    model: str = "", variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run a script with its arguments in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        accelerated = ("-m", "pyg_accel", "run") * patched
        command = [sys.executable, *accelerated, "-m", "benchmarks.scripts.child", str(out),
                   str(steps), str(seconds), device, model, *script]  # fmt: skip
        paths = [str(timing.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg",
                     "PYTHONDONTWRITEBYTECODE": "",  # or each process compiles what it imports
                     **({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu"
                        else {}), **(variables or {})}  # fmt: skip
        with (
            nullcontext() if patched else small_pages(),
            suppress(subprocess.TimeoutExpired),  # workers of a loader may not end
        ):
            subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True,
                           check=False, timeout=10 * seconds + 120)  # fmt: skip
        if not out.exists():
            return {"losses": [], "ends": [], "error": "no result", "peak_mib": np.nan}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    main()
