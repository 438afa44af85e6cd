"""SENSEi (arXiv:2306.15155): orders of a layer's products, chosen by input."""

from collections.abc import Iterator
from functools import cache

import pandas as pd

from benchmarks.papers.common import Paper, Ratio
from benchmarks.tools import frames
from benchmarks.tools.frames import mean


@cache
def speedups() -> pd.DataFrame:
    """A row a case of SENSEi's experiment: speed-ups over DGL's order, what choosing costs."""
    cases = frames.order_cases(frames.orders())
    return cases.assign(
        ours=cases["paper_default"] / cases["chosen"],
        best=cases["paper_default"] / cases["optimal"],
        iterations=cases["overhead"] / cases["iteration"],
    )


# Geometric mean and maximum of the speed-ups in table 3.
TABLE_3 = {
    ("GCN", "cuda", "inference"): (1.17, 2.012),
    ("GCN", "cuda", "training"): (1.04, 1.156),
    ("GCN", "cpu", "inference"): (1.11, 1.85),
    ("GCN", "cpu", "training"): (1.07, 1.35),
    ("GAT", "cuda", "inference"): (1.5, 6.294),
    ("GAT", "cuda", "training"): (1.61, 7.252),
    ("GAT", "cpu", "inference"): (1.64, 16.274),
    ("GAT", "cpu", "training"): (1.95, 26.85),
}


def ratios() -> Iterator[Ratio]:
    """SENSEi: 100 iterations in the order that was chosen, choosing included, over DGL's order."""
    cases = speedups()
    for (model, device, mode), (average, most) in TABLE_3.items():
        part = cases[
            (cases["model"] == model) & (cases["device"] == device) & (cases["mode"] == mode)
        ]
        name = f"{model}, {'GPU' if device == 'cuda' else 'CPU'}, {mode}"
        yield _over_dgl("Table 3", name, average, part)
        yield Ratio("Figure 7" if model == "GCN" else "Figure 8", f"{name}, maximum", most,
                    part["ours"].max(),
                    because=f"the best order gives {part['best'].max():.3g}x")  # fmt: skip
    for device, name, most in (("cuda", "GPU", 4.4), ("cpu", "CPU", 1.1)):
        part = cases[cases["device"] == device]
        case = part.loc[part["iterations"].idxmax()]
        yield Ratio("Section 6.3.1", name, most, case["iterations"], " iterations", "less",
                    f"{case['model']} on {case['graph']}: choosing takes {case['overhead']:.3g} "
                    f"ms, an iteration {case['iteration']:.3g} ms")  # fmt: skip
    on_gpu = cases[cases["device"] == "cuda"]
    for models, average in (("SGC, TAGCN", 1.13), ("GATv2", 1.17)):
        part = on_gpu[on_gpu["model"].isin(models.split(", "))]
        yield _over_dgl("Figure 10", f"{models}, GPU", average, part)
    gaan = frames.order_cases(frames.orders("papers/sensei/gaan"))
    ours, best = (gaan["paper_default"] / gaan[name] for name in ("chosen", "optimal"))
    yield _over_dgl("Figure 10", "GaAN's attention, a CPU here", 1.17,
                    gaan.assign(ours=ours, best=best))  # fmt: skip
    for model, average, most in (("GCN", 1.347, 6.02), ("GAT", 2.64, 22.56)):
        part = on_gpu[(on_gpu["model"] == model) & (on_gpu["mode"] == "inference")]
        over, best = (part["default"] / part[name] for name in ("chosen", "optimal"))
        for name, theirs, reduce in (("geometric mean", average, mean), ("maximum", most, max)):
            because = f"the best order gives {reduce(best):.3g}x"
            yield Ratio("Figure 12", f"{model}, GPU, inference, over PyG's order, {name}", theirs,
                        reduce(over), because=because)  # fmt: skip
    for model, theirs in (("GCN", 1.109 / 1.146), ("GAT", 1.619 / 1.619)):
        part = cases[cases["model"] == model]
        share = part["optimal"] / part["chosen_alone"]
        yield Ratio("Table 4", f"{model}, share of the optimum", 100 * theirs, 100 * mean(share),
                    "%", because=f"in {(share < 0.999).sum()} of {len(part)} cases another order "
                    "was a little faster")  # fmt: skip


def _over_dgl(item: str, name: str, paper: float, part: pd.DataFrame) -> Ratio:
    because = f"without what choosing costs, the best order gives {mean(part['best']):.3g}x"
    return Ratio(item, f"{name}, geometric mean", paper, mean(part["ours"]), because=because)


PAPER = Paper(
    "SENSEi", "sensei", "2306.15155",
    "Speed-ups are over DGL's order of the products, on our kernels.", ratios,
)  # fmt: skip
