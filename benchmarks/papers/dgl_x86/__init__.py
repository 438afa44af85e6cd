"""Optimizing DGL on x86 (arXiv:2007.06354): its primitives and seven applications."""

from collections.abc import Iterator

from benchmarks.papers.common import Paper, Ratio, read
from benchmarks.tools import frames
from benchmarks.tools.frames import mean


def ratios() -> Iterator[Ratio]:
    """The paper on DGL for x86: stock PyG over `patch()`, least and most of seven applications."""
    times = frames.applications(read("epochs/applications"))["epoch_ms"]
    whole = times[times.index.get_level_values("batch") == 0]
    over = whole["stock"] / whole["patched"]
    each = over.groupby("application").apply(mean)
    least = over[each.idxmin()].droplevel("batch")
    because = ", ".join(f"{each.idxmin()} on {data} {ratio:.3g}x" for data, ratio in least.items())
    yield Ratio("Figure 2", "least of the applications", 1.5, each.min(), because=because)
    yield Ratio("Figure 2", "most of the applications", 13.0, each.max())
    calls = read("papers/dgl_x86/primitives")
    for name, names in frames.primitives_called(calls).items():
        listed = calls.loc[calls["application"] == name, "paper"].iloc[0]
        if len(names) != listed:
            yield Ratio("Table 2", f"primitives of {name}", listed, len(names), unit="", better="")


PAPER = Paper(
    "DGL on x86", "dgl_x86", "2007.06354",
    "Its baseline is DGL 0.4.3, ours stock PyG. The text gives a range over the seven "
    "applications, its bars have no numbers; of ours, several data sets of an application count by "
    "their geometric mean.", ratios,
)  # fmt: skip
