"""Tables of several files: what the README and docs/is_it_for_me.md say of whom this is for."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pandas as pd

from benchmarks.tools import frames, results, timing
from benchmarks.tools.markdown import NONE, markdown

LAYERS = ("GraphSAGE", "GCN", "GIN", "GAT", "GATv2", "Transformer")


def short(number: Any) -> str:
    return NONE if number is None or pd.isna(number) else f"{number:.4g}"


def ratio_of(slow: Any, fast: Any) -> str:
    known = not (pd.isna(slow) or pd.isna(fast))
    return f"{slow / fast:.2f}x" if known else NONE


def headline() -> list[str]:
    """The README's table: epochs on a whole graph, steps on sampled ones, and the worst loss."""
    rows = []

    def add(where: str, graph: str, model: str, times: pd.Series, memory: pd.Series) -> None:
        others = times[[b for b in times.index if b != "stock" and "patched" not in b]].dropna()
        name = {"torch CSR": "sparse tensor", "stock, compiled": "torch.compile"}
        best = others.idxmin() if len(others) else None
        rows.append({
            "on": where, "graph": graph, "model": model, "stock PyG, ms": short(times["stock"]),
            "the fastest without pyg_accel": f"{others.min():.4g} ({name.get(best, best)})"
            if best else None,
            "patched, ms": times["patched"],
            "over stock": ratio_of(times["stock"], times["patched"]),
            "over the fastest": ratio_of(others.min(), times["patched"]) if best else None,
            "peak MiB, stock": rounded(memory, "stock"),
            "peak, patched": rounded(memory, "patched"),
        })  # fmt: skip

    def rounded(memory: pd.Series, variant: str) -> str | None:
        return f"{memory[variant]:.0f}" if variant in memory else None

    for file, models in (("cpu_epochs", ("GraphSAGE", "GCN")), ("gpu_epochs", ("GCN", "GAT"))):
        frame = results.read(f"epochs/{file}").rename(columns={"dataset": "graph"})
        for model, group in frame[frame["graph"] == "arxiv-like"].groupby("model", sort=False):
            if model in models:
                where = "GPU" if "gpu" in frame else "CPU"
                by = group.groupby("backend")[["epoch_ms", "peak_mib"]].median()
                add(where, "arxiv-like", model, by["epoch_ms"], by["peak_mib"])
    frame = results.read("epochs/gpu_batches").query("seeds == 1023 and model == 'GCN'")
    steps = frame.groupby("backend")["step_ms"].median()
    graph = f"sampled batches of {int(frame['E'].iloc[0]):,} edges"
    add("GPU", graph, "GCN", steps, pd.Series(dtype=float))
    worst = max(losses(), key=lambda loss: loss[3]["patched"] / loss[3]["stock"])
    add(*worst, pd.Series(dtype=float))
    return markdown(pd.DataFrame(rows), right=True)


def losses() -> Iterator[tuple[str, str, str, pd.Series]]:
    """What takes 3% longer than stock PyG or more, of the applications and of sampled batches."""
    for name, where in (("applications", "CPU"), ("applications_cuda", "GPU")):
        wide = frames.applications(results.read(f"epochs/{name}"))["epoch_ms"]
        for (application, data, batch), times in wide.iterrows():
            if times["patched"] > 1.03 * times["stock"]:
                graph = data + (f", batches of {batch}" if batch else "")
                yield where, graph, application, times[["stock", "patched"]]
    frame = results.read("epochs/gpu_batches")
    frame = frame[(frame["seeds"] == frame["seeds"].min()) & ~frame["trimmed"]]
    for model, group in frame.groupby("model", sort=False):
        times = group.groupby("backend")["step_ms"].median()[["stock", "patched"]]
        if times["patched"] > 1.03 * times["stock"]:
            yield "GPU", f"sampled batches of {int(group['E'].iloc[0]):,} edges", model, times


@cache
def link_of(file: str) -> str:
    """The heading above a table in the results, as docs/ links it; without a table, the file."""
    docs = timing.ROOT / "docs"
    for page in (docs / "results.md", *sorted((docs / "results").glob("*.md"))):
        above, mark, _ = page.read_text().partition(f"<!-- table: {file} -->")
        if mark:
            heading = re.findall(r"^#+ (.*)$", above, re.MULTILINE)[-1].lower()
            anchor = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
            return f"{page.relative_to(docs)}#{anchor}"
    return f"../benchmarks/results/{file}.csv"


def gain(file: str, value: str, by: str, slow: str | None, fast: str, **where: Any,
         ) -> str:  # fmt: skip
    """How often `fast` fits into `slow`, with a link to the rows; `—` where it was not measured.

    Args:
        file: folder and name of the CSV file.
        value: column of the time.
        by: the column that says what was timed.
        slow: its value there; None for the fastest that is not ours.
        fast: the same.
        where: what the rows have in other columns.
    """
    frame = results.read(file)
    for column, wanted in where.items():
        frame = frame[frame[column] == wanted]
    times = frame.groupby(by)[value].median()
    others = times[[name for name in times.index if "patched" not in name]].dropna()
    time = others.min() if slow is None else times.get(slow)
    if pd.isna(times.get(fast)):
        return NONE
    link = link_of(file)
    if time is None or pd.isna(time):
        ran_out = "note" in frame and (frame["note"].fillna("") == "out of memory").any()
        return f"[out of memory]({link})" if ran_out else NONE
    return f"[{time / times[fast]:.2f}x]({link})"


def decision() -> list[str]:
    """What `patch()` makes of training, by device, graph and model: docs/is_it_for_me.md."""
    rows = []

    def add(workload: str, against: str, of: Callable[[str], str]) -> None:
        rows.append({"workload": workload, "against": against} | {m: of(m) for m in LAYERS})

    for graph, edges in (("facebook-pages", "342K"), ("arxiv-like", "2.3M")):
        for against in ("stock", "large pages"):
            add(f"CPU, full, {edges} edges", against, lambda model, g=graph, a=against: gain(
                "epochs/cpu_epochs", "epoch_ms", "backend", a, "patched",
                dataset=g, model=model))  # fmt: skip
    for size, graph, name in (("Cora-size", "fixed", "full, size of Cora"),
                              ("Pubmed-size", "fixed", "full, size of PubMed"),
                              ("Flickr-size", "fixed", "full, size of Flickr"),
                              ("molecules 5 x 256", "new", "batches of 128 molecules"),
                              ("1024 seeds", "new", "batches, 160K edges, 256 wide")):  # fmt: skip
        add(f"GPU, {name}", "stock", lambda model, s=size, g=graph: gain(
            "sizes/sizes_cuda", "least_ms", "variant", "stock", "patched", workload=s, graph=g,
            mode="training", model={"GraphSAGE": "SAGE"}.get(model, model)))  # fmt: skip
    for graph, edges in (("arxiv-like", "2.3M"), ("amazon0505-like", "4.9M"),
                         ("reddit-like", "115M"), ("products-like", "124M")):  # fmt: skip
        for against, slow in (("stock", "stock"), ("best of PyG", None)):
            add(f"GPU, full, {edges} edges", against, lambda model, g=graph, s=slow: gain(
                "epochs/gpu_epochs", "epoch_ms", "backend", s, "patched",
                graph=g, model=model))  # fmt: skip
    for seeds, edges in ((255, "33K"), (1023, "132K"), (4090, "519K"), (16322, "2.0M")):
        add(f"GPU, batches, {edges} edges", "stock", lambda model, s=seeds: gain(
            "epochs/gpu_batches", "step_ms", "backend", "stock",
            "patched", model=model, seeds=s, trimmed=False))  # fmt: skip
    return markdown(pd.DataFrame(rows), right=True)


def further() -> list[str]:
    """What the other functions bring where `patch()` is not all: docs/is_it_for_me.md."""
    rows = []

    def add(have: str, use: str, graph: str, gained: str, over: str) -> None:
        rows.append({"you have": have, "use": use, "measured on": graph, "gain": gained,
                     "over": over})  # fmt: skip

    guide, patch = "[`optimize()`](how-to/rewrite_a_model.md)", "`patch()`"
    for model in ("GraphSAGE", "GCN", "GAT"):
        for have, use, graph, fast in (
            ("on one large graph, features that never change", " with `static`", "reddit-like",
             "rewritten, static"), ("otherwise", "", "products-like", "rewritten")):  # fmt: skip
            add(f"a {model} {have}", guide + use, f"{graph}, GPU", gain(
                "epochs/rewrite_epochs", "epoch_ms", "variant",
                "patched", fast, graph=graph, model=model), patch)  # fmt: skip
    guide = "[MaxK](how-to/train_with_maxk.md), k = 32 of 256"
    for have, device, more in (
        ("a model that you can train anew, many edges a node", "cuda",
         {"graph": "reddit-like", "model": "SAGE"}), ("the same on a CPU", "cpu", {})):  # fmt: skip
        add(have, guide, "reddit-like, GPU" if more else "cornell5, CPU", gain(
            f"papers/maxk_gnn/maxk_epochs_{device}", "epoch_ms", "case", "ReLU, patched", "MaxK 32",
            shape="paper", **more),
            "`patch()` with ReLU")  # fmt: skip
    for layer in ("RGCNConv", "HeteroConv"):
        add(f"{layer}, 100 relations", patch, "arxiv-like, GPU", gain(
            "epochs/relations_cuda", "step_ms", "backend", "stock", "patched",
            graph="arxiv-like", layer=layer, relations=100), "stock PyG")  # fmt: skip
    add("ids of nodes in no order", "[`reorder()`](how-to/order_the_nodes.md) first",
        "products-like, GPU, one SpMM", gain(
            "kernels/node_order", "spmm_fp32_64_ms", "order",
            "as it is", "community", graph="products-like"), "the same kernel")  # fmt: skip
    frame = results.read("papers/es_spmm/sampled_kernels_cuda")
    frame = frame[(frame["graph"] == "reddit-like") & (frame["storage"] == "fp32")]
    whole = frame[frame["backend"] == "pyg_accel spmm"]["device_ms"].iloc[0]
    some = frame.query("backend == 'sampled_spmm' and strategy == 'fastrand' and width == 64")
    add("inference that may lose a little accuracy", "[`sampled(64)`](how-to/sample_edges.md)",
        "reddit-like, GPU, one SpMM", f"[{whole / some['device_ms'].min():.2f}x]"
        f"({link_of('papers/es_spmm/sampled_kernels_cuda')})", "all edges")  # fmt: skip
    return markdown(pd.DataFrame(rows), right=["gain"])
