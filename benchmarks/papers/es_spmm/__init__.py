"""ES-SpMM (arXiv:2104.10716): sums over sampled edges."""

from collections.abc import Iterator

import pandas as pd

from benchmarks.papers.common import Paper, Ratio, read
from benchmarks.tools.frames import PARTS

# Table V and figure 8: GCN's speed-up over cuSPARSE; graph, strategy, width.
ES_SPEED = {
    ("Table V", "reddit-like", "bucket", 32): 25.59,
    ("Table V", "reddit-like", "fastrand", 32): 15.06,
    ("Table V", "proteins-like", "fastrand", 128): 13.23,
    ("Table V", "arxiv-like", "bucket", 16): 3.25,
    ("Table V", "arxiv-like", "fastrand", 16): 3.17,
    ("Figure 8", "reddit-like", "bucket", 64): 12.5,
    ("Figure 8", "reddit-like", "fastrand", 64): 8.72,
}
ES_RATES = {("reddit-like", 64): 11.3, ("proteins-like", 64): 9.9, ("arxiv-like", 64): 99.3}

ES_SHARES = {"pubmed-like": 16, "arxiv-like": 56, "proteins-like": 95.4, "reddit-like": 95.4}
# Table II: SpMM's speed-up, and the slowdown in all.
ES_DROPPED = {"pubmed-like": (1.05, 2.1), "arxiv-like": (1.07, 5.2), "reddit-like": (1.12, 63.8)}
ES_INFERENCE = {(model, width): times for width, times in ((64, 10.0), (512, 2.0))
                for model in ("GCN", "GraphSAGE")}  # fmt: skip


def ratios() -> Iterator[Ratio]:
    """ES-SpMM: sampled sums over cuSPARSE on all edges, and the edges that a width keeps."""
    rows = read("papers/es_spmm/sampled_kernels_cuda")
    rows = rows[rows["storage"] == "fp32"]
    library = rows[rows["backend"] == "cuSPARSE"].set_index("graph")["device_ms"]
    ours = rows[rows["backend"] == "sampled_spmm"].set_index(["graph", "strategy", "width"])
    for (item, graph, strategy, width), theirs in ES_SPEED.items():
        rate = ours["rate"][graph, strategy, width]
        ratio = library[graph] / ours["device_ms"][graph, strategy, width]
        yield Ratio(item, f"{graph}, {strategy}, S = {width}", theirs, ratio,
                    because=f"{rate:.0%} of the edges are kept: at cuSPARSE's time for an edge "
                    f"that makes {1 / rate:.3g}x")  # fmt: skip
    shares = [
        100 * ours["device_ms"][graph, "fastrand", width] / library[graph]
        for graph in ("reddit-like", "proteins-like")
        for width in (32, 128)
    ]
    for name, theirs, share in (("least", 5.0, min(shares)), ("most", 20.0, max(shares))):
        yield Ratio("Figure 10", f"Reddit and Proteins, S = 32 and 128, {name} of cuSPARSE's time",
                    theirs, share, "%", "less")  # fmt: skip
    for (graph, width), theirs in ES_RATES.items():
        yield Ratio("Table IV", f"{graph}, edges kept at S = {width}", theirs,
                    100 * ours["rate"][graph, "fastrand", width], "%",
                    "")  # fmt: skip
    rows = read("papers/es_spmm/dropped_edges_cuda")
    rows = rows.set_index([rows["graph"].str.partition("@")[0], "dropped"])
    for graph, (sums, slower) in ES_DROPPED.items():
        whole, part = rows.loc[(graph, 0.0)], rows.loc[(graph, 0.2)]
        yield Ratio("Table II", f"{graph}, SpMM without 20% of the edges", sums,
                    whole["spmm_ms"] / part["spmm_ms"], better="")  # fmt: skip
        yield Ratio("Table II", f"{graph}, slower with the drawing", slower,
                    (part["inference_ms"] + part["sample_ms"]) / whole["inference_ms"],
                    better="")  # fmt: skip
    rows = read("papers/sensei/shares_cuda").query("what == 'models' and model == 'GCN'")
    parts = rows.set_index(rows["graph"].str.partition("@")[0])[list(PARTS)]
    for graph, theirs in ES_SHARES.items():
        share = 100 * parts.loc[graph, "SpMM"] / parts.loc[graph].sum()
        yield Ratio("Figure 3", f"{graph}, GCN, share of SpMM", theirs, share, "%", "")
    rows = read("papers/es_spmm/sampled_inference_cuda")
    rows = rows[rows["graph"].str.startswith("reddit-like")]
    for (model, width), theirs in ES_INFERENCE.items():
        times = rows[rows["model"] == model].set_index(["case", "width"])
        whole, part = times.loc["all edges", 0], times.loc["sampled", width]
        first, then = (row["ms"] * row["SpMM"] / row[list(PARTS)].sum() for row in (whole, part))
        because = f"{part['kept']:.0%} of the edges are kept"
        if not pd.isna(first):
            slower, rest = then / first / part["kept"], 1 - first / whole["ms"]
            because += (f", one of them takes {slower:.2g} times as long as one of all, and "
                        f"{rest:.0%} of inference is not SpMM")  # fmt: skip
        yield Ratio("Figure 9", f"Reddit, {model}, S = {width}", theirs,
                    whole["ms"] / part["ms"], because=because)  # fmt: skip


PAPER = Paper(
    "ES-SpMM", "es_spmm", "2104.10716",
    "Speed-ups are over cuSPARSE on all edges: a V100 there, an H200 here; S is the width.", ratios,
)  # fmt: skip
