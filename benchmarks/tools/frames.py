"""What is computed of the rows of CSV files, for tables and for pictures."""

import numpy as np
import pandas as pd

from benchmarks.tools import results
from benchmarks.tools.results import geometric_mean as mean

NOISE = 0.98  # of a rival's speed; above, a difference is noise
PARTS = ("SpMM", "GEMM", "edges", "rest")  # of a step
KERNEL = ["graph", "F", "op", "reduce", "weighted"]
APPLICATION = ["application", "data", "batch"]
SIZE = ["model", "mode", "graph", "workload"]
OPERANDS = ["graph", "message", "reduce", "pass"]
ORDER = ["device", "graph", "model", "in", "out", "mode"]
ITERATIONS = 100
FIRST_FAMILY = {"GCN": "dynamic", "SGC": "dynamic", "TAGCN": "dynamic", "GAT": "reuse",
                "GATv2": "reuse", "GaAN": "reuse", "GraphSAGE": "aggregate"}  # fmt: skip


def epochs(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a data set and model, with the columns (figure, backend): medians over the rounds."""
    figures = ["epoch_ms", "peak_mib", "first_forward_ms", "forward_ms"]
    return frame.pivot_table(figures, ["dataset", "model"], "backend", aggfunc="median", sort=False)


def applications(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a case, with the columns (figure, variant)."""
    frame = frame.assign(batch=frame["batch"].fillna(0).astype(int))
    return frame.pivot_table(["epoch_ms", "peak_mib"], APPLICATION, "variant", sort=False)


def application_means(frame: pd.DataFrame) -> pd.Series:
    """How many times faster than stock each variant is over the applications, batches left out.

    Where one has several data sets, their geometric mean counts once.
    """
    times = applications(frame)["epoch_ms"].xs(0, level="batch")
    each = np.log(times.rdiv(times["stock"], axis=0)).groupby("application").mean()
    return np.exp(each.mean())


def best_peers(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a case: our time, the fastest right peer, and the ratio (above 1: we are faster)."""
    others = frame[(frame["backend"] != "pyg_accel") & frame["correct"]].fillna({"reduce": ""})
    return beside_ours(frame, others.loc[others.groupby(KERNEL, sort=False)["ms"].idxmin()])


def beside_ours(frame: pd.DataFrame, peers: pd.DataFrame) -> pd.DataFrame:
    """The same for a choice of the peers' rows."""
    frame, peers = frame.fillna({"reduce": ""}), peers.fillna({"reduce": ""})
    ours = frame[frame["backend"] == "pyg_accel"].set_index(KERNEL)["ms"].rename("ours_ms")
    peers = peers.set_index(KERNEL)[["backend", "ms"]]
    joined = peers.rename(columns={"backend": "best_peer", "ms": "peer_ms"}).join(ours, how="inner")
    return joined.assign(ratio=joined["peer_ms"] / joined["ours_ms"]).reset_index()


def labels(cases: pd.DataFrame) -> pd.Series:
    """What a kernel does, without graph and width: `spmm weighted sum`."""
    weighted = cases["weighted"].map({True: " weighted ", False: " "})
    return (cases["op"] + weighted + cases["reduce"]).str.strip()


def over_cusparse(frame: pd.DataFrame) -> pd.DataFrame:
    """Weighted sums: cuSPARSE's time over ours, a row a graph, columns (dtype, F)."""
    sums = frame[frame["op"] == "spmm weighted sum"]
    table = sums.pivot_table("ms", ["graph", "dtype", "F"], "backend", sort=False)
    return (table["cuSPARSE"] / table["pyg_accel"]).unstack(["dtype", "F"])


def size_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """How many times faster than its rival a variant is, by least times, a row a case."""
    least = frame.pivot_table("least_ms", SIZE, "variant", sort=False)
    pairs = {"patched": "stock", "always": "stock", "patched compiled": "compiled",
             "graphed": "stock", "step": "stock"}  # fmt: skip
    return pd.DataFrame({mine: least[rival] / least[mine] for mine, rival in pairs.items()
                         if mine in least and rival in least})  # fmt: skip


def operand_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each pair of operands how many times faster than stock PyG and a DGL that is right."""
    times = frame[frame["correct"]].pivot_table("ms", OPERANDS, "variant", sort=False)
    return pd.DataFrame({peer: times[peer] / times["patched"] for peer in ("stock", "DGL")
                         if peer in times})  # fmt: skip


def primitives_called(frame: pd.DataFrame) -> dict[str, list[str]]:
    """DGL's primitives of each application, in the order of a call."""
    groups = frame.groupby("application", sort=False)["primitives"]
    return {name: list(dict.fromkeys(" ".join(texts).split())) for name, texts in groups}


def chosen_products(frame: pd.DataFrame) -> pd.DataFrame:
    """Products of MaxK, a row (graph, op, k), a column each backend; `chosen` by dispatch."""
    backend = frame["backend"].str.replace(r"auto \(\w+\)", "chosen", regex=True)
    return frame.assign(backend=backend).pivot_table("ms", ["graph", "op", "k"], "backend",
                                                     sort=False)  # fmt: skip


def orders(folder: str = "papers/sensei", device: str = "") -> pd.DataFrame:
    """All measured orders of both devices, with what all of their iterations took."""
    found = []
    for name in (device,) if device else ("cpu", "cuda"):
        path = results.FOLDER / folder / f"association_{name}.csv"
        if path.exists():
            frame = results.read(path)
            total = frame["first_ms"] + (ITERATIONS - 1) * frame["ms"]
            found.append(frame.assign(device=name, family=frame["family"].fillna(""), total=total))
    return pd.concat(found, ignore_index=True)


def order_cases(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a case with more than one tree: milliseconds of 100 iterations under each policy.

    `naive` calls each tree once, at its own cost, and then keeps the fastest.
    """
    rows = []
    for key, group in frame.groupby(ORDER, sort=False):
        case = dict(zip(ORDER, key, strict=True))
        ran = group[group["total"].notna()]
        chosen, default = ran[ran["chosen"]], ran[ran["default"]]
        if len(ran) < 2 or chosen.empty or default.empty:
            continue
        chosen, default = chosen.iloc[0], default.iloc[0]
        first = FIRST_FAMILY[case["model"]]
        families = ran[ran["family"] != ""].set_index("family")["total"]
        alternative = next((name for name in families.index if name != first), first)
        rows.append({
            **case, "default": default["total"],
            "chosen": chosen["total"] + chosen["overhead_ms"], "chosen_alone": chosen["total"],
            "alternative": families.get(alternative, np.nan),
            "paper_default": families.get(first, default["total"]),
            "naive": ran["first_ms"].sum() + (ITERATIONS - len(ran)) * ran["ms"].min(),
            "optimal": ran["total"].loc[ran["ms"].idxmin()], "iteration": chosen["ms"],
            "overhead": chosen["overhead_ms"], "took": chosen["family"] or "other",
        })  # fmt: skip
    return pd.DataFrame(rows)


def order_by_size(frame: pd.DataFrame) -> pd.DataFrame:
    """SENSEi, figure 11: over DGL's order, what is chosen and PyG's order; means by size."""
    over = frame.assign(**{"ours": frame["paper_default"] / frame["chosen"],
                           "PyG's order": frame["paper_default"] / frame["default"]})  # fmt: skip
    keys = ["model", "device", "mode", "in", "out"]
    shown = over[over["model"].isin(["GCN", "GAT"])]
    return shown.groupby(keys, sort=False)[["ours", "PyG's order"]].agg(mean)


def oracle(frame: pd.DataFrame, by: list[str]) -> pd.Series:
    """The total of the family that is best over all cases that agree in `by`, for each case."""
    families = frame[frame["family"] != ""].pivot_table("total", ORDER, "family", sort=False)
    relative = np.log(families.div(families.min(axis=1), axis=0))
    groups = [families.index.get_level_values(name) for name in by]
    scores = relative.fillna(relative.max().max()).groupby(groups).transform("mean")
    scores = scores.where(families.notna())  # a family that a layer does not have is no choice
    picked = scores.fillna(np.inf).to_numpy().argmin(axis=1)
    return pd.Series(families.to_numpy()[np.arange(len(families)), picked], index=families.index)
