"""Puts measured figures where people read them: into pages of docs/, the README, and the like.

    python -m benchmarks.tools.tables

A page has a comment `<!-- table: NAME -->` before a table and `<!-- /table -->` behind it, and gets
what is between them from `TABLES`, which makes it of CSV files alone. Everything else on a page is
written by hand.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from benchmarks.layers import modes
from benchmarks.papers import tables as papers
from benchmarks.tools import frames, results, timing
from benchmarks.tools.decisions import decision, further, headline, ratio_of, short
from benchmarks.tools.markdown import NONE, SHARE, TIMES, Make, columns, markdown, measured, pivot

BLOCK = re.compile(r"(<!-- table: (?P<name>.*?) -->\n).*?(<!-- /table -->)", re.DOTALL)
PAGES = (timing.ROOT / "README.md", *sorted((timing.ROOT / "docs").rglob("*.md")))


def epochs(frame: pd.DataFrame) -> list[str]:
    """Epochs on a CPU: a row a data set and model."""
    wide = frames.epochs(frame)
    times, peaks = wide["epoch_ms"], wide["peak_mib"]
    return markdown(pd.DataFrame({
        "epoch ms, stock": times["stock"], "large pages": times["large pages"],
        "patched": times["patched"], "ratio": times["stock"] / times["patched"],
        "peak MiB, stock": peaks["stock"].round(), "peak, patched": peaks["patched"].round(),
        "peak, ratio": peaks["stock"] / peaks["patched"],
    }).reset_index(), {"ratio": TIMES, "peak, ratio": TIMES})  # fmt: skip


def applications(frame: pd.DataFrame) -> list[str]:
    """A row an application and data set; geometric means over the applications."""
    wide = frames.applications(frame)
    times, peaks = wide["epoch_ms"], wide["peak_mib"].round()
    variants = [v for v in ("stock", "large pages", "patched", "optimized") if v in times]
    ours = [v for v in variants if v in ("patched", "optimized")]
    shown = {f"epoch ms, {v}": times[v] for v in variants}
    shown |= {f"ratio, {v}": times["stock"] / times[v] for v in ours}
    shown |= {f"peak MiB, {v}": peaks[v] for v in ("stock", *ours)}
    table = pd.DataFrame(shown).reset_index()
    means = frames.application_means(frame)
    return [*markdown(table.replace({"batch": {0: NONE}}), {f"ratio, {v}": TIMES for v in ours}),
            "", "Geometric means over the applications, without batches: "
            + ", ".join(f"{v} {means[v]:.2f}x" for v in ours) + "."]  # fmt: skip


def kernels(frame: pd.DataFrame) -> list[str]:
    """A row per graph and kind of operation: mean ratio to the best peer, and the worst."""
    cases = frames.best_peers(frame)
    kind = cases["op"].map({"spmm": "SpMM", "sddmm": "SDDMM"}).fillna("binary-reduce")
    cases["kernel"] = kind + cases["weighted"].map({True: ", weighted", False: ""})
    rows = []
    for (graph, name), group in cases.groupby(["graph", "kernel"], sort=False):
        worst = group.loc[group["ratio"].idxmin()]
        what = f"{worst['reduce'] or 'dot'}, F = {worst['F']}, {worst['best_peer']}"
        rows.append({"graph": graph, "kernel": name,
                     "geometric mean": f"{frames.mean(group['ratio']):.2f}x",
                     "worst case": f"{worst['ratio']:.2f}x ({what})",
                     "lost": f"{(group['ratio'] < 1).sum()} of {len(group)}"})  # fmt: skip
    dgl = frames.beside_ours(frame, frame[(frame["backend"] == "DGL") & frame["correct"]])
    beyond = dgl[dgl["op"] != "spmm"]["ratio"]
    return [*markdown(pd.DataFrame(rows)), "", "SDDMM and binary-reduce against DGL alone: "
            f"{frames.mean(beyond):.2f}x over {len(beyond)} cases."]  # fmt: skip


def gpu_kernels(frame: pd.DataFrame) -> list[str]:
    """Weighted sums: cuSPARSE's time over ours, a row per graph."""
    ratio = frames.over_cusparse(frame)
    means = ratio.T.groupby("dtype").apply(lambda part: frames.mean(part.stack()))
    ratio.columns = [f"{dtype}, F = {width}" for dtype, width in ratio.columns]
    shown = ", ".join(f"{dtype} {mean:.2f}x" for dtype, mean in means.items())
    return [*markdown(ratio.reset_index(), dict.fromkeys(ratio, TIMES)), "",
            f"Geometric means: {shown}."]  # fmt: skip


def gpu_epochs(frame: pd.DataFrame) -> list[str]:
    """A row per graph and model: stock PyG, compiled, on torch's CSR; patched."""
    stocks, rows = ["stock", "stock, compiled", "torch CSR"], []
    for (graph, model), group in frame.groupby(["graph", "model"], sort=False):
        group = group.set_index("backend")
        times, notes = group["epoch_ms"], group["note"].fillna("")
        peaks, others = group["peak_mib"] / 1024, times.reindex(stocks).dropna()
        rows.append({"graph": graph, "model": model}
                    | {b: notes.get(b) or short(times.get(b)) for b in stocks}
                    | {"patched": short(times["patched"]),
                       "ratio to the best": ratio_of(others.min(), times["patched"]),
                       "peak GiB, that one": short(peaks[others.idxmin()] if len(others) else None),
                       "peak, patched": short(peaks["patched"])})  # fmt: skip
    return markdown(pd.DataFrame(rows), right=True)


def loaders(frame: pd.DataFrame) -> list[str]:
    """Batches and epochs by what makes the batches; of epochs also what the loader takes."""
    frame = frame.assign(ms=frame["ms"].fillna(1e3 * frame["seconds"]))
    index = ["what", "graph", "workers"]
    times, shares = (frame.pivot_table(value, index, "backend", sort=False, dropna=False)
                     .dropna(how="all") for value in ("ms", "share"))  # fmt: skip
    shown = {f"ms, {name}": times[name] for name in times}
    ratios = {
        f"ratio, {name}": times["stock"] / times[name] for name in times.drop(columns="stock")
    }
    parts = {f"loader's share, {name}": shares[name] for name in shares.dropna(how="all", axis=1)}
    table = pd.DataFrame(shown | ratios | parts).reindex(times.index).reset_index()
    return markdown(table, dict.fromkeys(ratios, TIMES) | dict.fromkeys(parts, SHARE))


def scripts(frame: pd.DataFrame) -> list[str]:
    """Programs of others, the losses of time first; then what runs under patch() alone."""
    frame = frame.rename(columns={f"step_ms, {v}": f"step ms, {v}" for v in ("stock", "patched")})
    frame["ratio"] = frame["step ms, stock"] / frame["step ms, patched"]
    frame["until the last step"] = frame["until_ms, stock"] / frame["until_ms, patched"]
    frame["peak"] = frame["peak_mib, stock"] / frame["peak_mib, patched"]
    both, what = frame[frame["ratio"].notna()].sort_values("ratio"), "the largest difference"
    shown = both[["script", "steps", "step ms, stock", "step ms, patched", "ratio",
                  "until the last step", "peak"]].assign(
        **{what: differences(both, "patched")})  # fmt: skip
    lines = markdown(shown, dict.fromkeys(("ratio", "until the last step", "peak"), TIMES))
    lines += ["", f"Geometric mean of the steps: {frames.mean(both['ratio']):.2f}x."]
    fails = [frame["ratio"].isna() & frame[f"error, {v}"].notna() for v in ("stock", "patched")]
    for scripts, text in (
        (frame[fails[0] & ~fails[1]], "Under `patch()` alone, for want of a package that PyG "
         "asks for"),
        (frame[fails[1] & ~fails[0]], "Stock alone"), (frame[fails[0] & fails[1]], "Neither"),
        (frame[frame["ratio"].isna() & ~fails[0] & ~fails[1]], "Fewer than six steps"),
    ):  # fmt: skip
        if len(scripts):
            lines += ["", f"{text}: {', '.join(scripts['script'])}."]
    return lines


def models(frame: pd.DataFrame) -> list[str]:
    """What optimize() and graphed() bring to the models of programs of others."""
    table = frame[["script", "steps", "step_ms, stock"]].rename(
        columns={"step_ms, stock": "step ms, stock"}
    )
    ratios = [v for v in ("patched", "optimized", "graphed") if f"step_ms, {v}" in frame]
    for variant in ratios:
        table[variant] = frame["step_ms, stock"] / frame[f"step_ms, {variant}"]
    for variant in ratios[1:]:
        table[f"what is {variant}"] = frame[f"note, {variant}"]
        table[f"difference, {variant}"] = differences(frame, variant)
    return markdown(table.sort_values("optimized", ascending=False),
                    dict.fromkeys(ratios, TIMES))  # fmt: skip


def differences(frame: pd.DataFrame, variant: str) -> pd.Series:
    """Of losses from those of PyG's layers; an asterisk where batches of pyg_accel are beside."""
    different = frame[f"loss_difference, {variant}"]
    shown = different.map("{:.0e}".format) + frame["losses_beside"].map(
        {"stock": "", "sampled": " *"}
    )
    return shown.where(different.notna(), NONE)


def relational(frame: pd.DataFrame) -> list[str]:
    """Parts of a step, by variant."""
    wide = frame.pivot_table("ms", ["task", "part"], "variant", sort=False)
    gain = {"ratio": wide["stock"] / wide["patched"]}
    return markdown(wide.assign(**gain).reset_index(), dict.fromkeys(gain, TIMES))


def rewritten(frame: pd.DataFrame) -> list[str]:
    """A row a graph and model: epochs and gains, of variants that were measured together."""
    rows = []
    for (graph, model), group in frame.groupby(["graph", "model"], sort=False):
        group = group.set_index("variant")
        same = group[group["commit"] == group["commit"]["rewritten"]]["epoch_ms"]
        rows.append({"graph": graph, "model": model, "patched": same.get("patched"),
                     "rewritten": same.get("rewritten"),
                     "with `static`": same.get("rewritten, static")})  # fmt: skip
    table = pd.DataFrame(rows)
    gains = {"gain": table["patched"] / table["rewritten"],
             "gain, `static`": table["patched"] / table["with `static`"]}  # fmt: skip
    return markdown(table.assign(**gains), dict.fromkeys(gains, TIMES))


def layers(frame: pd.DataFrame) -> list[str]:
    """What patch() does with every layer: ratios over all sizes, reasons, tensors of edges."""
    frame, rows = frame.fillna({"option": "", "formula": "", "reason": ""}), []
    for (layer, option), group in frame.groupby(["layer", "option"], sort=False):
        formulas = " ; ".join(dict.fromkeys(f for f in group["formula"] if f))
        ratios = {name: group.loc[group["pass"] == name, "ratio"].dropna()
                  for name in ("forward", "training")}  # fmt: skip
        largest = group[group["edges"] == group["edges"].max()]
        left = group[group["reason"] != ""]
        small = left["reason"].str.startswith("small")
        reasons = list(dict.fromkeys(left.loc[~small, "reason"]))
        now = modes.recorded().get((layer, option, "training"), {})
        if now.get("runs") == "PyG":  # what was measured may be of another version
            formulas, reasons = "", [now["reason"], *(r for r in reasons if r == "out of memory")]
        elif now and reasons and not formulas:
            reasons = ["all calls when this was measured, none since"]
        if small.any():
            reasons.append(f"up to {left.loc[small, 'edges'].max():,} edges: too small")
        rows.append({
            "layer": f"`{layer}`", "option": option,
            "formula": f"`{formulas}`" if formulas else None,
            **{name: f"{r.min():.2f} to {r.max():.2f}, **{frames.mean(r):.2f}**" if len(r) else None
               for name, r in ratios.items()},
            "E x F": "yes" if largest["edge_tensor"].eq(True).any() else "no",
            "left to PyG": "; ".join(reasons) or None,
        })  # fmt: skip
    return markdown(pd.DataFrame(rows).replace(r"\|", r"\\|", regex=True))


def printed(frame: pd.DataFrame) -> list[str]:
    """Seconds that PyG's benchmarks print; what is slower comes first."""
    frame = frame.assign(gain=frame["stock_s"] / frame["patched_s"]).sort_values("gain")
    return markdown(pd.DataFrame({
        "script": [Path(script.split()[0]).stem for script in frame["script"]],
        "case": frame["section"], "": frame["name"],
        "stock, s": frame["stock_s"], "patched, s": frame["patched_s"],
        "ratio": [f"{gain:.2f}x" for gain in frame["gain"]],
    }), right=["ratio"])  # fmt: skip


MADE: dict[str, Make] = {
    "epochs/cpu_epochs": epochs,
    "epochs/gpu_epochs": gpu_epochs,
    "epochs/gpu_batches": pivot(["graph", "model", "trimmed", "seeds", "E"], "backend", "step_ms"),
    "epochs/gpu_first_call": columns("graph", "model", "backend", "kernel_cache", "first_step_s",
                                     "second_step_s"),
    "epochs/relations_cuda": pivot(["graph", "layer", "relations"], "backend", "step_ms"),
    "epochs/meshes_cpu": columns("model", "meshes", "stock_ms", "patched_ms", "ratio"),
    "epochs/meshes_cuda": columns("model", "meshes", "stock_ms", "patched_ms", "ratio"),
    "epochs/applications": applications,
    "epochs/applications_cuda": applications,
    "epochs/rewrite_epochs": rewritten,
    "kernels/cpu_kernels": kernels,
    "kernels/cpu_points": columns("case", "threads", "ms", "peer_ms", "ratio"),
    "kernels/gpu_points": columns("case", "by_hand_ms", "search_ms", "ms", "ratio"),
    "kernels/gpu_kernels": gpu_kernels,
    "kernels/node_order": columns("graph", "order", "reuse", "find_s", "spmm_fp32_64_ms",
                                  "spmm_fp32_256_ms", "spmm_bf16_256_ms"),
    "kernels/gpu_dot_attention": columns("what", "graph", "by", "forward_ms", "ms", "peak_mib",
                                         missing={"ms": "out of memory"}),
    "kernels/gpu_attention": columns("graph", "form", "heads", "width", "dtype", "parts_forward_ms",
                                     "one_forward_ms", "parts_ms", "one_ms"),
    "kernels/tc_sweep": papers.tensor_cores,
    "kernels/tc_kernels": columns("graph", "F", "mode", "op", "chosen", "cuda_ms", "triton_ms",
                                  "cusparse_ms"),
    "loaders/loaders": loaders,
    "scripts/scripts_cpu": scripts,
    "scripts/scripts_cuda": scripts,
    "scripts/models_cpu": models,
    "scripts/models_cuda": models,
    "scripts/printed_cpu": printed,
    "scripts/printed_cuda": printed,
    "scripts/relational_cpu": relational,
    "layers/layers_cpu": layers,
    "layers/layers_cuda": layers,
} | papers.MADE  # fmt: skip
# Of several files, or not of a file alone.
TABLES: dict[str, Callable[[], list[str]]] = {
    "headline": headline, "decision": decision, "further": further,
} | papers.TABLES  # fmt: skip


def table(name: str) -> list[str]:
    """The lines between the comments of a table; of a file, with the machine at their end."""
    if name in TABLES:
        return TABLES[name]()
    frame = results.read(name)
    return [*MADE[name](frame), *(["", measured(frame)] if "commit" in frame else [])]


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(
        lambda m: "\n".join([m[1].rstrip("\n"), "", *table(m["name"]), "", m[3]]), text
    )


def main(paths: Iterable[Path] = PAGES) -> None:
    for path in paths:
        text = path.read_text()
        if (new := filled(text)) != text:
            path.write_text(new)
            print(f"written: {path}")


if __name__ == "__main__":
    main()
