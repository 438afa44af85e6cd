"""PyG's own examples under `python -m pyg_accel run`, on generated data: losses, time, what ran.

    python -m benchmarks.epochs.pyg_examples CHECKOUT [--examples gcn ...] [--steps 6]

CHECKOUT is a copy of PyG's repository; its scripts run as they are, from the same seed, once by
themselves and once by `python -m pyg_accel run`. Data that they would download are replaced by
generated ones of their shapes (`stand_ins.py`). Each run ends after some training steps. What is
compared is the loss of every step; what is timed is from the first to the last step, evaluation
between them included, by the clock of the processor if OMP_NUM_THREADS=1. An example that cannot
run here has the reason in its row. With PYG_ACCEL_ALWAYS=1 and a small share it checks results
quickly; ratios then say nothing.
"""

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import random
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from tqdm import tqdm

from benchmarks.epochs import stand_ins
from benchmarks.tools import results, variants
from benchmarks.tools.timing import clock_of
from pyg_accel.__main__ import run_script
from pyg_accel.settings import settings

NAME = "epochs/pyg_examples"
ALLOWED = 2e-3  # of a loss: sums in another order, through the steps of Adam
VARIANTS = ("stock", "patched")
EXAMPLES = (
    "agnn ar_link_pred argva_node_clustering arma autoencoder colors_topk_pool dir_gnn dna "
    "film gat gcn gcn2_cora gcn2_ppi geniepath glnn graph_gps graph_unet "
    "infomax_transductive lightgcn link_pred linkx mem_pool mixhop mutag_gin ogc "
    "pmlp pna ppi proteins_diff_pool proteins_dmon_pool proteins_gmt proteins_mincut_pool "
    "proteins_topk_pool qm9_nn_conv rect renet rgat rgcn rgcn_link_pred seal_link_pred sgc sign "
    "signed_gcn super_gat tagcn triangles_sag_pool upfd explain/gnn_explainer "
    "explain/gnn_explainer_ba_shapes explain/gnn_explainer_link_pred "
    "explain/graphmask_explainer explain/captum_explainer explain/captum_explainer_hetero_link "
    "contrib/rbcd_attack contrib/pgm_explainer_node_classification hetero/bipartite_sage "
    "hetero/dmgi_unsup hetero/han_imdb hetero/hetero_conv_dblp hetero/hetero_link_pred "
    "hetero/hgt_dblp jit/gat jit/gcn jit/gin pytorch_lightning/gin pytorch_ignite/gin "
)
# Explanations begin after a training; so their graphs are small.
STEPS = {
    "explain/gnn_explainer": 230,
    "explain/graphmask_explainer": 230,
    "explain/gnn_explainer_ba_shapes": 210,
    "explain/gnn_explainer_link_pred": 230,
}
SHARES = dict.fromkeys(STEPS, 0.1)
NO_TRAINING = "it ended before the first step of training"


class Enough(SystemExit):
    """The steps that were asked for are done."""


class Watch:
    """Notes the loss of every step, and ends the program after some of them."""

    def __init__(self, steps: int) -> None:
        self.steps, self.losses, self.times, self.clock = steps, [], [], clock_of("cpu")
        backward = torch.Tensor.backward

        def noted(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if len(self.losses) < 10_000:
                self.losses.append(float(loss.detach().sum()))
            backward(loss, *args, **kwargs)

        torch.Tensor.backward = noted
        register_optimizer_step_post_hook(self.step)

    def step(self, *_: Any) -> None:
        self.times.append(self.clock())
        if len(self.times) >= self.steps:
            raise Enough(0)


def run(script: Path, variant: str, steps: int, share: float) -> dict[str, Any]:
    """Run a script in this process, which is spent afterwards."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    stand_ins.install(share)
    watch, out, problem = Watch(steps), io.StringIO(), ""
    os.chdir(script.parent)
    try:
        with contextlib.redirect_stdout(out):
            if variant == "patched":
                run_script(str(script), [])
            else:
                sys.argv, sys.path[:0] = [str(script)], [str(script.parent)]
                runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        problem = str(end.code) if isinstance(end.code, str) else ""
    except Exception:  # an example's own: it is a row of the table
        problem = traceback.format_exc()
    found = {"losses": watch.losses, "times": watch.times, "problem": problem}
    report = variants.report()
    found["accelerated"] = [[r.layer, r.formula, r.calls] for r in report if r.formula]
    found["left"] = [[r.layer, r.reason, r.calls] for r in report if not r.formula]
    return found


def in_a_fork(*args: Any, seconds: float) -> dict[str, Any]:
    """What `run` returns in a process that has imported all of this already."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def work() -> None:
        with open(os.devnull, "w") as nowhere:  # progress bars
            os.dup2(nowhere.fileno(), 2)
        theirs.send(json.dumps(run(*args)))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        if not mine.poll(seconds):
            process.kill()
            return {"problem": f"it took longer than {seconds:g} s"}
        return json.loads(mine.recv())  # type: ignore[no-any-return]
    except EOFError:
        return {"problem": "its process ended early"}
    finally:
        process.join()


def compared(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The row of an example."""
    script, steps = folder / f"{name}.py", STEPS.get(name, options.steps)
    share = SHARES.get(name, 1.0) * options.share
    if not script.is_file():
        return {"example": name, "result": "no such file"}
    runs = [in_a_fork(script, v, steps, share, seconds=options.timeout) for v in VARIANTS]
    stock, patched = runs
    for variant, found in zip(VARIANTS, runs, strict=True):
        if problem := found["problem"].strip():
            last = problem.splitlines()[-1]
            return {"example": name, "result": f"{variant}: {last}"[:160]}
    row = {"example": name, "steps": len(stock["times"]), "losses": len(stock["losses"])}
    if not stock["losses"]:
        return row | {"result": NO_TRAINING}
    if len(stock["losses"]) != len(patched["losses"]):
        return row | {"result": "another number of losses"}
    error = max(
        abs(a - b) / max(abs(a), 1e-3) if math.isfinite(a) or math.isfinite(b) else 0.0
        for a, b in zip(stock["losses"], patched["losses"], strict=True)
    )
    row |= {"error": error, "result": "same losses" if error <= ALLOWED else "other losses"}
    row |= {f"{variant}_ms": step_ms(found["times"])
            for variant, found in zip(VARIANTS, runs, strict=True)}  # fmt: skip
    row["ratio"] = row["stock_ms"] / row["patched_ms"]
    calls = sum(number for *_, number in patched["accelerated"])
    row["calls"] = calls + sum(number for *_, number in patched["left"])
    row["accelerated_calls"] = calls
    row["accelerated"] = "; ".join(f"{layer}: {what}" for layer, what, _ in patched["accelerated"])
    row["left"] = "; ".join(f"{layer}: {what}" for layer, what, _ in patched["left"])
    return row


def step_ms(times: list[float]) -> float:
    """The median of a step but the first, with whatever an example does between two."""
    return (
        float(np.median(np.diff(times)[1:] if len(times) > 2 else np.diff(times or [0, 0]))) * 1e3
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, quick="write into results/quick",
                            examples=tuple(EXAMPLES.split()), steps=6, share=1.0,
                            timeout=600.0)  # fmt: skip
    parser.add_argument("checkout", type=Path, help="of github.com/pyg-team/pytorch_geometric")
    options = parser.parse_args(arguments)
    rows = results.Rows(NAME, options, share=options.share, always=settings.always,
                        clock=clock_of("cpu").__name__)  # fmt: skip
    for name in results.each(options.examples, "example"):
        row = compared(name, (options.checkout / "examples").resolve(), options)
        rows.add([row])
        shown = f"{row['ratio']:.2f}x, {row['accelerated']}" if "ratio" in row else ""
        tqdm.write(f"{name:40} {row['result']}  {shown}"[:200])
    result = rows.done()["result"]
    same = (result == "same losses").sum()
    print(f"{same + (result == 'other losses').sum()} examples ran, {same} with the same losses")


if __name__ == "__main__":
    main()
