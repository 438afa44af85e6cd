"""What patch() brings to PyG's own examples, unchanged, on made data.

    python -m benchmarks.scripts --pyg CHECKOUT [--device cuda] [--only gcn.py gat.py ...]
    python -m benchmarks.scripts --pyg CHECKOUT [--device cuda] --models

Each script runs stock and as `python -m pyg_accel run`, in processes of one thread; with `--models`
its model is also what `optimize()` and, on a GPU, `graphed()` makes of it. A step ends with a
backward pass. The processes begin together, and from their first step on one runs at a time, for a
few steps: machines that others use are slower for seconds at a time, and then for all of them.
`step_ms` is the median from one end to the next, over the last two thirds of the steps; `until_ms`
is the time of the process until they are over, with the beginning that all share. Times are the
processor's, on a GPU those of the clock, without pauses, and the least of some turns: processes
differ, on a GPU by more than patch() brings. So there `step_ms` is from another process, in which
stock PyG and patch() make some steps in turns, but with `--models`. `loss_difference` is the
largest one of all steps, over the loss: from `stock`, or, if that draws other batches, from
`sampled`, which has the batches of `pyg_accel` and the layers of PyG.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.scripts.child import FIRST
from benchmarks.tools import results
from benchmarks.tools.fresh import python_path, small_pages

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
    "alternating": {"patched": True, "model": "alternating"},
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
    """A row of a script; each variant has the best of several processes."""
    every = [in_turns(command, steps, seconds, variants, device) for _ in range(turns)]
    made = min(len(one["ends"]) for runs in every for one in runs.values())
    row: dict[str, Any] = {"steps": made}
    for name in variants:
        mine = [runs[name] for runs in every]
        times = [of_steps(one["ends"][:made]) for one in mine]
        row[f"step_ms, {name}"] = min(one[0] for one in times)
        row[f"until_ms, {name}"] = min(one[1] for one in times)
        row[f"peak_mib, {name}"] = min(one["peak_mib"] for one in mine)
        row[f"error, {name}"] = mine[0]["error"].partition("\n")[0][:120]
        row |= {f"note, {name}": mine[0]["note"]} if mine[0].get("note") else {}
    beside, losses = "stock", {name: one["losses"] for name, one in every[0].items()}
    if made and difference(losses["stock"][:3], losses["patched"][:3]) > SAME_BATCHES:
        beside = "sampled"
        losses[beside] = in_turns(command, steps, seconds, [beside], device)[beside]["losses"]
    if device == "cuda" and len(variants) == 2:
        both = in_turns(command, 2 * steps, seconds, ["alternating"], device)["alternating"]
        row |= {f"step_ms, {name}": of_mode(both, name) for name in variants}
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


def of_mode(run: Mapping[str, Any], mode: str) -> float:
    """Median of the steps of an alternating process in a mode, in milliseconds."""
    own = np.diff(run["ends"])[np.array(run["modes"][1:]) == mode]
    return 1e3 * float(np.median(own)) if len(own) else np.nan


def in_turns(
    script: Sequence[str], steps: int, seconds: int, variants: Sequence[str], device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """The results of a script with its arguments, by variant, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        children = {
            name: Child(Path(folder, name), script, steps, seconds, device, **VARIANTS[name])
            for name in variants
        }
        for child in children.values():
            stack.callback(child.end)
        running = [*children.values()]
        while running:
            running = [child for child in running if child.turn(FIRST * seconds + 120)]
        return {name: child.result() for name, child in children.items()}


class Child:
    """A process that runs a script, and waits for its turn after some steps."""

    def __init__(
        self, folder: Path, script: Sequence[str], steps: int, seconds: int, device: str, *,
        patched: bool, model: str = "", variables: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        folder.mkdir()
        self.out, self.waits = folder / "out.json", False
        self.turns, theirs = Pipe()
        accelerated = ("-m", "pyg_accel", "run") * patched
        command = [sys.executable, *accelerated, "-m", "benchmarks.scripts.child", str(self.out),
                   str(theirs.fileno()), str(steps), str(seconds), device, model,
                   *script]  # fmt: skip
        variables = {"PYTHONPATH": python_path(), "MPLBACKEND": "Agg",
                     "PYTHONDONTWRITEBYTECODE": "",  # or each process compiles what it imports
                     **({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu"
                        else {}), **(variables or {})}  # fmt: skip
        with nullcontext() if patched else small_pages():
            self.process = subprocess.Popen(
                command, cwd=folder, env=os.environ | variables, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        theirs.close()

    def turn(self, limit: int) -> bool:
        """Let it make a turn, at first up to its first step; return whether it waits for another.

        While it waits its workers are stopped too: they would prepare batches in untimed pauses.
        """
        try:
            if self.waits:
                os.killpg(self.process.pid, signal.SIGCONT)
                self.turns.send_bytes(b"go")
            self.waits = self.turns.poll(limit) and self.turns.recv_bytes() == b"turn"
        except (EOFError, OSError):  # it was killed, perhaps for want of memory
            self.waits = False
        if self.waits:
            os.killpg(self.process.pid, signal.SIGSTOP)
        else:
            self.end()
        return self.waits

    def end(self) -> None:
        """End it with its workers, if it runs."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def result(self) -> dict[str, Any]:
        """What it has written."""
        if not self.out.exists():
            return {"losses": [], "ends": [], "error": "no result", "peak_mib": np.nan}
        result: dict[str, Any] = json.loads(self.out.read_text())
        return result


if __name__ == "__main__":
    main()
