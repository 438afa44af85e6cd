"""Puts measured figures where people read them: in pages of docs/ and in the README.

    python -m benchmarks.tables

All are made from the CSV files in results/ alone: docs/results.md, the pages of docs/results/ and
docs/reference/layers.md as a whole; the README's part between its two `results` comments, and parts
of docs/is_it_for_me.md and docs/how-to/rewrite_a_model.md between comments that name a table.
"""

from collections.abc import Iterator

import pandas as pd

from benchmarks import decision, layer_table, machine, papers, results, table_lines
from benchmarks.sections import PAGES, Section
from benchmarks.table_lines import NONE

BEGIN, END = "<!-- results -->", "<!-- /results -->"
REWRITTEN = machine.ROOT / "docs" / "how-to" / "rewrite_a_model.md"
# Of the README's table: graphs of a file, and their models if not all.
SHOWN = {
    "cpu_epochs": {"arxiv-like": ()},
    "gpu_epochs": {"arxiv-like": (), "reddit-like": ("GraphSAGE", "GCN", "GAT")},
}
NAMES = {"torch CSR": "sparse tensor", "stock, compiled": "torch.compile"}
INTRODUCTION = (
    "A ratio above 1 means that pyg_accel is faster. `python -m benchmarks.tables` makes the "
    "tables from the CSV files in [benchmarks/results](../benchmarks/results), which have every "
    "row, losing ones included; [benchmarks](../benchmarks/README.md#results) says by which "
    "command each was measured and how.",
    "",
    "- `stock`: PyG as it is; `patched`: the same model under `patch()`; `optimized` or "
    "`rewritten`: what `optimize()` returns.",
    "- `large pages`: PyG with the [memory pages](explanation/how_patch_works.md#memory) that "
    "importing pyg_accel first switches on. `torch CSR`: PyG on a sparse tensor in place of the "
    "`edge_index`. `compiled`: under `torch.compile`.",
    "- `arxiv-like` and other graphs `-like` are generated with the numbers of nodes and edges of "
    "the data set of that name, in communities, with random ids; `rmat-...` have power-law "
    "degrees; `@0.1` is a tenth of the graph.",
    "- SpMM: a sparse matrix (the edges) times features; GEMM: a product of dense matrices.",
    f"- `{NONE}`: not measured, or nothing to compare with. `out of memory`: tried, and it did not "
    "fit.",
)


def read(name: str) -> pd.DataFrame | None:
    path = results.FOLDER / f"{name}.csv"
    return results.read(path) if path.exists() else None


def page(name: str) -> str:
    """A page of `PAGES`: its questions, and under each its tables."""
    title, questions = PAGES[name]
    lines = [f"# {title}", ""]
    if name == "results":
        others = [f"[{PAGES[other][0].removeprefix('Results: ')}]({other}.md)" for other in PAGES
                  if other != name]  # fmt: skip
        lines += [
            *INTRODUCTION,
            "",
            f"More tables: {', '.join(others)}; tables and figures of "
            "[five papers](results/papers.md); [every layer](reference/layers.md).",
        ]
    else:
        lines += ["Words and marks are those of [the main page](results.md)."]
    for question, sections in questions.items():
        lines += ["", f"## {question}"]
        for section in sections:
            lines += _of_section(section)
    text = "\n".join(lines) + "\n"
    return text if name == "results" else text.replace("](", "](../").replace("](../http", "](http")


def _of_section(section: Section) -> Iterator[str]:
    frame = read(section.name)
    if frame is None:
        return
    yield from ("", f"### {section.title}", f"{section.what} {results.measured_on(frame)}.", "")
    yield from section.make(frame)
    if (results.FOLDER / f"{section.name}.png").exists():
        yield from ("", f"![{section.title}](../benchmarks/results/{section.name}.png)")


def rewritten(text: str) -> str:
    """docs/how-to/rewrite_a_model.md with its table made anew."""
    lines = table_lines.rewritten(results.read(results.FOLDER / "rewrite_epochs.csv"))
    before, begin, rest = text.partition("<!-- table: rewrite_epochs -->")
    end = "<!-- /table: rewrite_epochs -->"
    return before + "\n".join([begin, *lines, end]) + rest.partition(end)[2]


def headline() -> list[str]:
    """The README's table: whole training epochs, then what is slower."""
    lines = [
        "| on | graph | model | stock PyG, ms | fastest without pyg_accel | patched | over stock | "
        "over the fastest |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, graphs in SHOWN.items():
        frame = results.read(results.FOLDER / f"{name}.csv")
        where = "GPU" if "gpu" in frame else "CPU"
        frame = frame.rename(columns={"dataset": "graph"})
        for graph, models in graphs.items():
            for model, group in frame[frame["graph"] == graph].groupby("model", sort=False):
                if not models or model in models:
                    times = group.groupby("backend")["epoch_ms"].median()
                    lines.append(f"| {where} | {graph} | {model} | {' | '.join(_figures(times))} |")
    for where, graph, model, times in _losses():
        lines.append(f"| {where} | {graph} | {model} | {' | '.join(_figures(times))} |")
    return lines


def _losses() -> Iterator[tuple[str, str, str, pd.Series]]:
    """What takes 3% longer than stock PyG or more, of the applications and of sampled batches."""
    for name, where in (("applications", "CPU"), ("applications_cuda", "GPU")):
        frame = results.read(results.FOLDER / f"{name}.csv")
        for (application, data, batch), group in frame.groupby(
            ["application", "data", "batch"], sort=False
        ):
            times = group.groupby("variant")["epoch_ms"].median()
            if times["patched"] > 1.03 * times["stock"]:
                graph = data + (f", batches of {batch}" if batch else "")
                yield where, graph, application, times[["stock", "patched"]]
    frame = results.read(results.FOLDER / "gpu_batches.csv")
    frame = frame[(frame["seeds"] == frame["seeds"].min()) & ~frame["trimmed"]]
    for model, group in frame.groupby("model", sort=False):
        times = group.groupby("backend")["step_ms"].median()[["stock", "patched"]]
        if times["patched"] > 1.03 * times["stock"]:
            yield "GPU", f"sampled batches of {int(group['E'].iloc[0]):,} edges", model, times


def _figures(times: pd.Series) -> list[str]:
    ours, variants = times["patched"], times[[b for b in times.index if "patched" not in b]]
    stock, others = variants["stock"], variants.drop("stock").dropna()
    fastest = others.idxmin() if len(others) else ""
    return [
        "out of memory" if pd.isna(stock) else f"{stock:.4g}",
        f"{others.min():.4g} ({NAMES.get(fastest, fastest)})" if len(others) else NONE,
        f"{ours:.4g}",
        NONE if pd.isna(stock) else _ratio(stock / ours),
        _ratio(others.min() / ours) if len(others) else NONE,
    ]


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"


def main() -> None:
    for name in PAGES:
        (machine.ROOT / "docs" / f"{name}.md").write_text(page(name))
    papers.PAGE.write_text(papers.page())
    layer_table.PAGE.write_text(layer_table.page())
    for path, make in ((machine.ROOT / "docs" / "is_it_for_me.md", decision.page),
                       (REWRITTEN, rewritten)):  # fmt: skip
        path.write_text(make(path.read_text()))
    path = machine.ROOT / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    block = "\n".join([BEGIN, *headline(), END])
    path.write_text(before + block + rest.partition(END)[2])


if __name__ == "__main__":
    main()
