"""Tables of the papers' experiments, of their CSV files alone; and the page on the five papers."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks.papers import common, dgl_x86, es_spmm, maxk_gnn, sensei, tc_gnn
from benchmarks.papers.common import Paper
from benchmarks.tools import frames, timing
from benchmarks.tools.frames import PARTS, mean
from benchmarks.tools.markdown import NONE, SHARE, TIMES, Make, markdown, measured, pivot

PAPERS = [module.PAPER for module in (sensei, dgl_x86, maxk_gnn, es_spmm, tc_gnn)]
PAGE = timing.ROOT / "docs" / "results" / "papers.md"
STATES = {
    "reproduced": "the same experiment, on synthetic graphs of the paper's sizes where its data "
    "cannot be had",
    "in part": "some of it, or by a neighbouring definition",
    "not": "no counterpart yet",
    "nothing to measure": "a drawing, a definition, or arithmetic on sizes",
}
LACKING = ("hardware", "data", "peer", "run", "benchmark", "absent")


def orders(frame: pd.DataFrame) -> list[str]:
    """SENSEi, table 3: over PyG's order, and ours over DGL's, which orders products by size."""
    rows = []
    for (model, device, mode), group in frame.groupby(["model", "device", "mode"], sort=False):
        ours = group["default"] / group["chosen"]
        rows.append({
            "layer": model, "device": device, "mode": mode, "cases": len(group),
            "ours, max": ours.max(), "min": ours.min(),
            "min of more than 1 ms": ours[group["iteration"] > 1].min(), "ours": mean(ours),
            "alternative": mean(group["default"] / group["alternative"]),
            "naive": mean(group["default"] / group["naive"]),
            "ours over DGL's order": mean(group["paper_default"] / group["chosen"]),
            "iterations that choosing costs, median":
                (group["overhead"] / group["iteration"]).median(),
        })  # fmt: skip
    table = pd.DataFrame(rows)
    return markdown(table, dict.fromkeys(table, "{:.3g}"), dict.fromkeys(table, ""))


def table4() -> list[str]:
    """SENSEi, table 4: over PyG's order, the best tree, ours, and oracles that see one thing."""
    frame = frames.orders()
    summary = frames.order_cases(frame).set_index(frames.ORDER)
    oracles = {"device only": ["model", "device"], "sizes only": ["model", "in", "out"],
               "graph only": ["model", "graph"]}  # fmt: skip
    totals = {name: frames.oracle(frame, by) for name, by in oracles.items()}
    rows = [
        {"layer": model, "device": device, "optimal": mean(group["default"] / group["optimal"]),
         "ours, without overhead": mean(group["default"] / group["chosen_alone"]),
         "ours / optimal": mean(group["optimal"] / group["chosen_alone"]),
         **{n: mean(group["default"] / total.reindex(group.index)) for n, total in totals.items()}}
        for (model, device), group in summary.groupby(["model", "device"], sort=False)
    ]  # fmt: skip
    return markdown(pd.DataFrame(rows), dict.fromkeys(rows[0], "{:.3f}"))


def order_sizes() -> list[str]:
    """SENSEi, figure 11; of GAT, PyG's order is DGL's."""
    table = frames.order_by_size(frames.order_cases(frames.orders())).reset_index()
    return markdown(table, dict.fromkeys(table, "{:.3g}"))


def gaan(device: str) -> list[str]:
    """SENSEi, figure 10: gated attention."""
    frame = frames.orders("papers/sensei/gaan", device)
    return [*orders(frames.order_cases(frame)), "", measured(frame)]


def samples(frame: pd.DataFrame) -> list[str]:
    """SENSEi, figure 9: the choice for a graph and for its samples, over the best."""
    rows = []
    case = ["graph", "sampling", "size", "model", "in", "out"]
    for key, group in frame.groupby(case, sort=False):
        best = group.groupby("sample")["ms"].min()
        by = {n: group[group[n]].set_index("sample") for n in ("whole", "chosen")}
        over = {name: rows_["ms"] / best for name, rows_ in by.items()}
        equal = (by["whole"]["tree"] == by["chosen"]["tree"]).mean()
        graph, sampling, size, model, n_in, n_out = key
        rows.append({
            "graph": graph, "sample": f"{size:,} {sampling}", "layer": model,
            "in, out": f"{n_in}, {n_out}", "samples": len(best), "equal choices": equal,
            "the graph's over the best": mean(over["whole"]), "worst": over["whole"].max(),
            "the sample's over the best": mean(over["chosen"]),
            "iterations that choosing costs":
                f"{(by['chosen']['overhead_ms'] / by['whole']['ms']).median():.2g}",
        })  # fmt: skip
    times = dict.fromkeys(
        ("the graph's over the best", "worst", "the sample's over the best"), TIMES
    )
    return markdown(pd.DataFrame(rows), {"equal choices": SHARE} | times)


def shares(frame: pd.DataFrame) -> list[str]:
    """SENSEi, figure 2, and ES-SpMM, figure 3: layers by sizes, then models."""
    total = frame[list(PARTS)].sum(axis=1)
    of = frame[list(PARTS)].div(total, axis=0)
    found = []
    if (layers := frame["what"] == "layers").any():
        cell = of["SpMM"].map(SHARE.format)
        for part in ("GEMM", "edges"):
            cell = cell + " / " + of[part].map(SHARE.format)
        size = frame["in"].astype(str) + " to " + frame["out"].astype(str)
        table = frame.assign(cell=cell, size=size)[layers].rename(columns={"model": "layer"})
        index = ["graph", "layer", "mode"]
        table = table.pivot_table("cell", index, "size", aggfunc="first", sort=False).reset_index()
        found += [*markdown(table, right=list(table.columns[3:])), ""]
    models = frame[~layers][["graph", "model", "layers", "hidden"]].join(of)
    return [*found, *markdown(models, dict.fromkeys(PARTS, SHARE))]


def cost_models(frame: pd.DataFrame) -> list[str]:
    """The fastest time over the chosen one's, mean and worst."""
    every = frame[frame["layer"] == "all"]
    cell = every["mean"].map("{:.3f}".format) + ", " + every["worst"].map("{:.2f}".format)
    table = every.assign(cell=cell).pivot_table("cell", ["machine", "cases"], "model",
                                                aggfunc="first", sort=False)  # fmt: skip
    table = table.reset_index().rename(columns={"machine": "measured on"})
    return markdown(table, right=True)


def primitives(frame: pd.DataFrame) -> list[str]:
    """DGL on x86, table 2: applications by primitives, and how many ours and the paper's have."""
    called = frames.primitives_called(frame)
    names = list(dict.fromkeys(name for found in called.values() for name in found))
    paper = frame.groupby("application")["paper"].first()
    rows = [{"application": application} | {f"`{n}`": "x" if n in found else "" for n in names}
            | {"ours": len(found), "paper": paper[application]}
            for application, found in called.items()]  # fmt: skip
    return markdown(pd.DataFrame(rows))


def operand_pairs(frame: pd.DataFrame) -> list[str]:
    """DGL on x86, table 1: over stock PyG / over DGL; then means, and what loses to PyG."""
    over = frames.operand_ratios(frame)
    ours = frame[frame["variant"] == "patched"].set_index(frames.OPERANDS)
    shown = over.map(lambda r: NONE if pd.isna(r) else f"{r:.2f}x")
    cell = shown["stock"] + " / " + shown.get("DGL", pd.Series(NONE, shown.index))
    cell += ours["formula"].isna().map({True: " \\*", False: ""}).reindex(cell.index)
    table = cell.rename("cell").reset_index()
    work = table["reduce"] + ("; " + table["pass"]).where(table["pass"] != "forward", "")
    table = table.assign(work=work, message="`" + table["message"] + "`")
    wide = table.pivot_table("cell", ["graph", "message"], "work", aggfunc="first", sort=False)
    means = ", ".join(
        f"{mean(ratio):.2f}x over {peer} ({(ratio < frames.NOISE).sum()} of {ratio.count()} below "
        f"{frames.NOISE})" for peer, ratio in over.items()
    )  # fmt: skip
    return [*markdown(wide.reset_index(), right=True), "",
            f"Geometric means: {means}. \\*: left to PyG."]  # fmt: skip


def batchnorm_embedding(frame: pd.DataFrame) -> list[str]:
    """DGL on x86, section 5.2.2: a row a size."""
    keys = ["op", "rows", "width", "ids", "drawn"]
    times = frame.fillna({"drawn": NONE}).pivot_table("ms", keys, "backend", sort=False)
    table = times.reset_index()
    norm = table["op"] == "BatchNorm1d"
    torch = table["torch"].where(norm, table["step"])
    ours = table["copies of the same bytes"].where(norm, table["step, by a graph"])
    shown = table[keys].replace({"op": {"Embedding backward": "Embedding"}})
    shown = shown.assign(**{"torch": torch, "bound or ours": ours, "ratio": torch / ours})
    return markdown(shown, {"ratio": TIMES})


def maxk_products(frame: pd.DataFrame) -> list[str]:
    """MaxK-GNN, figure 8: what dispatch chooses, what it replaces, and what else there is."""
    table = frames.chosen_products(frame).drop(columns=["cuda", "cuda, deterministic"],
                                               errors="ignore")  # fmt: skip
    first = [name for name in table if name.startswith("chosen")]
    return markdown(table[[*first, *table.columns.drop(first)]].reset_index())


def maxk_accuracy(frame: pd.DataFrame) -> list[str]:
    """A row a data set and model: mean and standard deviation over the seeds, by k."""
    frame = frame.assign(k=frame["k"].fillna(0))
    found = frame.groupby(["dataset", "model", "k"], sort=False)["accuracy"].agg(["mean", "std"])
    found = found.dropna()
    cell = found["mean"].map("{:.1f}".format) + " ± " + found["std"].map("{:.1f}".format)
    wide = cell.unstack("k", sort=False)
    wide = wide[sorted(wide)].rename(columns=lambda k: f"MaxK {k:g}" if k else "ReLU")
    return markdown(wide.reset_index().rename(columns={"dataset": "data set"}), right=True)


def convergence(frame: pd.DataFrame) -> list[str]:
    """MaxK-GNN, figure 10: how far a setting gets, and after how many epochs; means over seeds."""
    rows = []
    for (dataset, model, k), group in frame.groupby(["dataset", "model", "k"], sort=False):
        runs = [run.reset_index(drop=True) for _, run in group.groupby("seed")]
        near = [run.loc[run["validation"] >= 0.99 * run["validation"].max(), "epoch"].iloc[0]
                for run in runs]  # fmt: skip
        right = [run.loc[run["validation"].idxmax(), "accuracy"] for run in runs]
        rows.append({
            "data set": dataset, "model": model, "nonlinearity": f"MaxK {k}" if k else "ReLU",
            "seeds": len(runs),
            "epochs to 99% of its best validation": f"{pd.Series(near).mean():.0f}",
            "loss at the end": f"{pd.Series([run['loss'].iloc[-1] for run in runs]).mean():.3g}",
            "test accuracy at the best validation": f"{pd.Series(right).mean():.1f}",
        })  # fmt: skip
    return markdown(pd.DataFrame(rows), right=list(rows[0])[4:])


def counters(frame: pd.DataFrame) -> list[str]:
    """MaxK-GNN, table 2, and TC-GNN, table 1: products of MaxK, then GCN's aggregation."""
    names = {"ms": "ms", "l2_gb": "L1 to L2, GB", "dram_gb": "memory, GB",
             "l1_hit_rate": "L1 hits, %", "l2_hit_rate": "L2 hits, %", "bandwidth": "bandwidth, %",
             "occupancy": "occupancy, %"}  # fmt: skip
    formats = dict.fromkeys(names.values(), "{:.3g}")
    maxk = frame[frame["experiment"] == "maxk"].rename(columns={"case": "product"} | names)
    gcn = frame[frame["experiment"] == "gcn"]
    update = gcn[gcn["case"] == "update"].set_index("graph")["ms"].reindex(gcn["graph"]).to_numpy()
    share = (100 * gcn["ms"] / (gcn["ms"] + update)).where(gcn["case"] != "update")
    gcn = gcn.assign(**{"of layer, %": share}).rename(columns={"case": "step"} | names)
    return [*markdown(maxk[["product", *names.values()]], formats), "",
            *markdown(gcn[["graph", "step", "of layer, %", *names.values()]],
                      formats | {"of layer, %": "{:.0f}"})]  # fmt: skip


def sampled(frame: pd.DataFrame) -> list[str]:
    """ES-SpMM: fastrand, against the full graph and one sampled beforehand."""
    library = "cuSPARSE" if "gpu" in frame else "MKL"
    whole = frame[frame["strategy"] == "all"].pivot_table("device_ms", "graph", "backend")
    rows = frame[frame["strategy"] == "fastrand"]
    name = rows["backend"].where(rows["backend"] != "sampled_spmm", rows["storage"])
    times = rows.assign(name=name).pivot_table("device_ms", ["graph", "width"], "name", sort=False)
    theirs, ours = (whole[b].reindex(times.index, level=0) for b in (library, "pyg_accel spmm"))
    rate = rows.groupby(["graph", "width"])["rate"].first().reindex(times.index)
    table = pd.DataFrame({
        "edges": rate, f"{library} ms, all edges": theirs, "ours, all edges": ours,
        "sampled": times["fp32"], f"ratio to {library}": theirs / times["fp32"],
        "to ours, sampled before": times["spmm, sampled before"] / times["fp32"],
        "bf16 ms": times["bf16"], "int8": times["int8"],
    }).reset_index()  # fmt: skip
    return markdown(table, {"edges": "{:.1%}"} | {n: TIMES for n in table if "to " in n})


def sampled_models(frame: pd.DataFrame) -> list[str]:
    """ES-SpMM, table III: the width that is chosen on validation nodes, and what it costs."""
    names = {"edges": "edges", "val_all": "validation, all", "val": "sampled",
             "test_all": "test, all", "test": "test, sampled"}  # fmt: skip
    shown = frame.loc[frame["chosen"], ["graph", "model", "strategy", "rescale", "width", *names]]
    formats = dict.fromkeys(names.values(), "{:.4f}") | {"edges": "{:.1%}"}
    return markdown(shown.rename(columns=names), formats)


def inference(frame: pd.DataFrame) -> list[str]:
    """ES-SpMM, figure 9: time over that of all edges, by parts."""
    case = frame.set_index(["graph", "model"])
    whole = case[case["case"] == "all edges"]["ms"].reindex(case.index).to_numpy()
    width = (
        frame["width"]
        .astype(str)
        .where(
            frame["width"] > 0, frame["case"].map({"stock": "all, stock PyG", "all edges": "all"})
        )
    )
    parts = frame[list(PARTS)].div(frame[list(PARTS)].sum(axis=1, skipna=False), axis=0)
    table = frame[["graph", "model"]].assign(
        width=width, kept=frame["kept"], ms=frame["ms"], **{"of all edges": frame["ms"] / whole},
        **parts, accuracy=frame["accuracy"]
    )  # fmt: skip
    formats = {"kept": "{:.1%}", "of all edges": SHARE, "accuracy": "{:.1%}"}
    return markdown(table, formats | dict.fromkeys(PARTS, SHARE))


def dropped(frame: pd.DataFrame) -> list[str]:
    """ES-SpMM, figure 5 and table II: SpMM, inference with the drawing, accuracy."""
    first = frame.groupby("graph", sort=False)[["spmm_ms", "inference_ms"]].transform("first")
    right = frame["accuracy"].map("{:.1%}".format) + " ± " + frame["deviation"].map("{:.1%}".format)
    table = frame[["graph", "dropped"]].assign(**{
        "SpMM ms": frame["spmm_ms"], "speed-up": first["spmm_ms"] / frame["spmm_ms"],
        "inference ms": frame["inference_ms"], "drawing ms": frame["sample_ms"],
        "drawing and inference over that of all edges":
            (frame["inference_ms"] + frame["sample_ms"]) / first["inference_ms"],
        "accuracy": right.where(frame["accuracy"].notna()),
    })  # fmt: skip
    formats = {n: TIMES for n in table if n == "speed-up" or "over" in n}
    return markdown(table, {"dropped": SHARE} | formats, right=["accuracy"])


def tensor_cores(frame: pd.DataFrame) -> list[str]:
    """The best window of each case beside the kernels on CUDA cores."""
    best = frame.loc[frame.groupby(["graph", "F", "mode", "op"], sort=False)["ms"].idxmin()]
    shown = ["graph", "F", "mode", "op", "window", "least", "entries", "ms", "cuda_core_ms"]
    return markdown(best[shown].assign(ratio=best["cuda_core_ms"] / best["ms"]), {"ratio": TIMES})


def states() -> list[str]:
    """How many tables and figures are reproduced."""
    counts = common.items()["state"].value_counts()
    rows = [{"state": s, "": what, "tables and figures": counts[s]} for s, what in STATES.items()]
    return markdown(pd.DataFrame(rows))


def link(path: str) -> str:
    """A link from the page to a path from the root, named by its heading or file."""
    file, _, anchor = path.partition("#")
    name = anchor.replace("-", " ") or (Path(file).stem if file.endswith(".md") else file)
    target = os.path.relpath(timing.ROOT / file, PAGE.parent)
    return f"[{Path(name).name}]({target}{'#' + anchor if anchor else ''})"


def items(paper: Paper) -> list[str]:
    """A line a table or figure; of several ratios the first, which is the headline."""
    first = {ratio.item: ratio for ratio in reversed(common.ratios(paper))}
    rows = []
    for row in common.items(paper.name).itertuples():
        ours = first.get(row.item)
        number = common.option(row.item)
        rows.append({
            "": row.item, "what it shows": row.shows, "state": row.state,
            "command": f"`python -m benchmarks.papers.{paper.module} {number}`"
            if row.command else None,
            "results": ", ".join(map(link, row.results.split())) or None,
            "paper": ours.numbers[0] if ours else None, "ours": ours.numbers[1] if ours else None,
        })  # fmt: skip
    return markdown(pd.DataFrame(rows), right=["paper", "ours"])


def lacking(what: str) -> list[str]:
    """What could not be reproduced for a reason."""
    rows = common.items()
    part = rows[rows["lacking"] == what]
    return [f"- {row.paper}, {row.item}: {row.reason}" for row in part.itertuples()]


MADE: dict[str, Make] = {f"papers/{name}": make for name, make in {
    "gpu_counters": counters,
    **{f"sensei/association_samples_{d}": samples for d in ("cpu", "cuda")},
    **{f"sensei/shares_{d}": shares for d in ("cpu", "cuda")},
    "sensei/cost_models": cost_models,
    "dgl_x86/primitives": primitives,
    "dgl_x86/binary_reduce": operand_pairs,
    "dgl_x86/cpu_batchnorm_embedding": batchnorm_embedding,
    "maxk_gnn/gpu_maxk": maxk_products,
    "maxk_gnn/maxk_by_k/gpu_maxk": maxk_products,
    **{f"maxk_gnn/maxk_epochs_{d}": pivot(["graph", "model", "shape"], "case", "epoch_ms")
       for d in ("cpu", "cuda")},
    "maxk_gnn/maxk_training": maxk_accuracy,
    "maxk_gnn/maxk_training_epochs": pivot(["dataset", "model"], "case", "epoch_ms"),
    "maxk_gnn/maxk_accuracy": maxk_accuracy,
    "maxk_gnn/maxk_convergence": convergence,
    "es_spmm/sampled_kernels": sampled,
    "es_spmm/sampled_kernels_cuda": sampled,
    "es_spmm/sampled_accuracy": sampled_models,
    **{f"es_spmm/sampled_inference_{d}": inference for d in ("cpu", "cuda")},
    **{f"es_spmm/dropped_edges_{d}": dropped for d in ("cpu", "cuda")},
}.items()}  # fmt: skip
TABLES: dict[str, Callable[[], list[str]]] = {
    "orders": lambda: orders(frames.order_cases(frames.orders())),
    "orders, table 4": table4,
    "orders, figure 11": order_sizes,
    **{f"gated attention, {d}": partial(gaan, d) for d in ("cpu", "cuda")},
    "papers: states": states,
    **{f"papers: {paper.name}": partial(items, paper) for paper in PAPERS},
    **{
        f"papers: {paper.name}, numbers": lambda p=paper: common.numbers(common.ratios(p))
        for paper in PAPERS
    },
    **{f"papers: lacking {what}": partial(lacking, what) for what in LACKING},
}
