"""The tables of docs/is_it_for_me.md: what each workload gains, every figure with its source.

`python -m benchmarks.tables` writes them; a test compares the page with the CSV files.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from benchmarks import results

BEGIN, END = "<!-- decision: {} -->", "<!-- /decision: {} -->"
NONE = "—"
EPOCHS = ("GraphSAGE", "GCN", "GIN", "GAT", "GATv2", "Transformer")
Cell = tuple[str, str]  # a CSV file, a section of docs/results.md or ""

CPU = ("cpu_epochs", "epochs-on-a-cpu")
GPU = ("gpu_epochs", "epochs-on-a-gpu")
BATCHES = ("gpu_batches", "sampled-batches-on-a-gpu")
SIZES = ("sizes_cuda", "")
MAXK = ("maxk_epochs_cuda", "maxk-on-a-gpu")
REWRITE = ("rewrite_epochs", "rewritten-models-on-a-gpu")
RELATIONS = ("relations_cuda", "relations-on-a-gpu")


def cell(
    source: Cell, value: str, where: Mapping[str, Any], by: str, slow: str | None, fast: str
) -> str:
    """One figure with a link to its rows: how often `fast` fits into `slow`.

    Args:
        source: CSV file and section of the results.
        value: column of the time.
        where: what the rows have in other columns.
        by: the column that says what was timed.
        slow: its value there; None for the fastest that is not ours.
        fast: the same.
    """
    frame = results.read(results.FOLDER / f"{source[0]}.csv")
    for column, wanted in where.items():
        frame = frame[frame[column] == wanted]
    times = frame.groupby(by)[value].median()
    if slow is None:
        others = times[[name for name in times.index if "patched" not in name]].dropna()
        time = others.min() if len(others) else float("nan")
    else:
        time = times.get(slow, float("nan"))
    if fast not in times or pd.isna(times[fast]):
        return NONE
    link = f"results.md#{source[1]}" if source[1] else f"../benchmarks/results/{source[0]}.csv"
    ran_out = "note" in frame and (frame["note"].fillna("") == "out of memory").any()
    if pd.isna(time):
        return f"[out of memory]({link})" if ran_out else NONE
    return f"[{time / times[fast]:.2f}x]({link})"


def epochs() -> list[str]:
    """What `patch()` makes of training, by device, graph and model."""
    lines = [
        f"| workload | against | {' | '.join(EPOCHS)} |",
        "|---|---|" + "--:|" * len(EPOCHS),
    ]

    def add(device: str, workload: str, against: str, of: Callable[[str], str]) -> None:
        lines.append(f"| {device}, {workload} | {against} | {' | '.join(map(of, EPOCHS))} |")

    cpu = {"facebook-pages": "full, 342K edges", "arxiv-like": "full, 2.3M edges"}
    for graph, workload in cpu.items():
        for against, slow in (("stock", "stock"), ("large pages", "large pages")):
            add("CPU", workload, against, lambda model, g=graph, s=slow: cell(
                CPU, "epoch_ms", {"dataset": g, "model": model}, "backend", s, "patched"
            ))  # fmt: skip
    short = {"GraphSAGE": "SAGE"}
    sizes = {
        ("Cora-size", "fixed"): "full, size of Cora",
        ("Pubmed-size", "fixed"): "full, size of PubMed",
        ("Flickr-size", "fixed"): "full, size of Flickr",
        ("molecules 5 x 256", "new"): "batches of 128 molecules",
        ("1024 seeds", "new"): "batches, 160K edges, 256 wide",
    }
    for (size, graph), workload in sizes.items():
        add("GPU", workload, "stock", lambda model, w=size, g=graph: cell(
            SIZES, "least_ms", {"workload": w, "graph": g, "mode": "training",
                                "model": short.get(model, model)},
            "variant", "stock", "patched",
        ))  # fmt: skip
    gpu = {
        "arxiv-like": "full, 2.3M edges",
        "amazon0505-like": "full, 4.9M edges",
        "reddit-like": "full, 115M edges",
        "products-like": "full, 124M edges",
    }
    for graph, workload in gpu.items():
        for against, slow in (("stock", "stock"), ("best of PyG", None)):
            add("GPU", workload, against, lambda model, g=graph, s=slow: cell(
                GPU, "epoch_ms", {"graph": g, "model": model}, "backend", s, "patched"
            ))  # fmt: skip
    for seeds, edges in ((256, "42K"), (1023, "168K"), (4090, "663K"), (16322, "2.5M")):
        add("GPU", f"batches, {edges} edges", "stock", lambda model, s=seeds: cell(
            BATCHES, "step_ms", {"model": model, "seeds": s, "trimmed": False},
            "backend", "stock", "patched",
        ))  # fmt: skip
    return lines


def further() -> list[str]:
    """What the other functions bring where `patch()` is not all."""
    lines = ["| you have | use | measured on | gain | over |", "|---|---|---|--:|---|"]

    def add(have: str, use: str, graph: str, gain: str, over: str) -> None:
        lines.append(f"| {have} | {use} | {graph} | {gain} | {over} |")

    guide = "[`optimize()`](how-to/rewrite_a_model.md)"
    for model in ("GraphSAGE", "GCN", "GAT"):
        add(f"a {model} on one large graph, features that never change",
            f"{guide} with `static`", "reddit-like, GPU",
            cell(REWRITE, "epoch_ms", {"graph": "reddit-like", "model": model}, "variant",
                 "patched", "rewritten, static"), "`patch()`")  # fmt: skip
        add(f"a {model} otherwise", guide, "products-like, GPU",
            cell(REWRITE, "epoch_ms", {"graph": "products-like", "model": model}, "variant",
                 "patched", "rewritten"), "`patch()`")  # fmt: skip
    guide = "[MaxK](how-to/train_with_maxk.md), k = 32 of 256"
    add("a model that you can train anew, many edges a node", guide, "reddit-like, GPU",
        cell(MAXK, "epoch_ms", {"graph": "reddit-like", "model": "SAGE", "shape": "paper"}, "case",
             "ReLU, patched", "MaxK 32"), "`patch()` with ReLU")  # fmt: skip
    add("the same on a CPU", guide, "cornell5, CPU",
        cell(("maxk_epochs_cpu", "maxk-on-a-cpu"), "epoch_ms", {"shape": "paper"}, "case",
             "ReLU, patched", "MaxK 32"), "`patch()` with ReLU")  # fmt: skip
    for layer in ("RGCNConv", "HeteroConv"):
        add(f"{layer}, 100 relations", "`patch()`", "arxiv-like, GPU",
            cell(RELATIONS, "step_ms", {"graph": "arxiv-like", "layer": layer, "relations": 100},
                 "backend", "stock", "patched"), "stock PyG")  # fmt: skip
    frame = results.read(results.FOLDER / "node_order.csv")
    times = frame[frame["graph"] == "products-like"].set_index("order")["spmm_fp32_64_ms"]
    add("ids of nodes in no order", "[`reorder()`](how-to/order_the_nodes.md) first",
        "products-like, GPU, one SpMM",
        f"[{times['as it is'] / times['community']:.2f}x](results.md#orders-of-the-nodes-on-a-gpu)",
        "the same kernel")  # fmt: skip
    frame = results.read(results.FOLDER / "sampled_kernels_cuda.csv")
    frame = frame[(frame["graph"] == "reddit-like") & (frame["storage"] == "fp32")]
    whole = frame[frame["backend"] == "pyg_accel spmm"]["device_ms"].iloc[0]
    some = frame[(frame["backend"] == "sampled_spmm") & (frame["strategy"] == "fastrand")]
    part = some[some["width"] == 64]["device_ms"].min()
    add("inference that may lose a little accuracy",
        "[`sampled(64)`](how-to/sample_edges.md)", "reddit-like, GPU, one SpMM",
        f"[{whole / part:.2f}x](results.md#sampled-edges-on-a-gpu)", "all edges")  # fmt: skip
    return lines


TABLES = {"epochs": epochs, "further": further}


def page(text: str) -> str:
    """Return docs/is_it_for_me.md with its tables made anew."""
    for name, make in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        text = "\n".join([before + begin, *make(), end]) + rest.partition(end)[2]
    return text
