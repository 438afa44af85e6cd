"""TC-GNN (arXiv:2112.02052): sparse products on Tensor Cores."""

from collections.abc import Iterator

from benchmarks.papers.common import Paper, Ratio, read
from benchmarks.tools.frames import mean


def ratios() -> Iterator[Ratio]:
    """TC-GNN."""
    epochs = read("papers/tc_gnn/tc_paper_epochs")
    speedup = epochs[epochs["type"] != "-"].groupby("model")["speedup"]
    for model, theirs in (("GCN", 1.76), ("AGNN", 2.82)):
        yield Ratio("Figure 6", f"{model}, epochs over PyG, geometric mean", theirs,
                    mean(speedup.get_group(model)))  # fmt: skip
    tiles = read("papers/tc_gnn/tc_paper_tiles")
    removed = tiles[tiles["order"] == "as it is"]["removed"]
    yield Ratio("Figure 7", "tiles that translation removes, mean", 67.47, 100 * removed.mean(),
                "%")  # fmt: skip
    yield Ratio("Figure 8", "time of translation of 200 epochs, mean", 4.43,
                100 * read("papers/tc_gnn/tc_paper_overhead")["share"].mean(), "%",
                "less")  # fmt: skip
    sparse = (
        read("papers/tc_gnn/tc_paper_sparsity").pivot_table("gflop_s", "blocks", "backend").loc[:16]
    )
    for backend, name in (("cuda, tf32", "Tensor Cores"), ("triton", "CUDA cores")):
        yield Ratio("Table 6", f"{name} over the block-sparse product, mean of 1 to 16 blocks", 6.9,
                    (sparse[backend] / sparse["torch BSR 16x16"]).mean(),
                    because="the peer is torch's BSR, not bSpMM, and at 16 features a tile's "
                    "product is too small to hide its bookkeeping")  # fmt: skip


PAPER = Paper(
    "TC-GNN", "tc_gnn", "2112.02052",
    "An RTX 3090 there, an H200 here. Its 1.70x over DGL has no counterpart, see figure 6.", ratios,
)  # fmt: skip
