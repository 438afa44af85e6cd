"""Puts measured figures where people read them: in pages of docs/ and in the README.

    python -m benchmarks.tables

All are made from the CSV files in results/ alone: docs/results.md, docs/results/papers.md and
docs/reference/layers.md as a whole, the README's part between its two `results` comments, those of
docs/is_it_for_me.md between comments with the name of a table.
"""

import pandas as pd

from benchmarks import (
    association_samples,
    decision,
    dropped_edges,
    gpu_counters,
    layer_table,
    machine,
    maxk_convergence,
    papers,
    primitives,
    results,
    sampled_inference,
    shares,
    table_lines,
)
from benchmarks.association_tables import cases, completed, table3
from benchmarks.table_lines import NONE, Make, columns, side_by_side

BEGIN, END = "<!-- results -->", "<!-- /results -->"
SHOWN = {
    "cpu_epochs": ("arxiv-like", "facebook-pages"),
    "gpu_epochs": ("arxiv-like", "reddit-like"),
}


# Title, CSV file, what the figures are, how they become lines.
SECTIONS: tuple[tuple[str, str, str, Make], ...] = (
    (
        "Epochs on a CPU",
        "cpu_epochs",
        "3 layers, 128 hidden. `large pages` is PyG with the [memory pages](explanation/"
        "how_patch_works.md#memory) that importing pyg_accel first switches on.",
        table_lines.epochs,
    ),
    (
        "The seven applications of the DGL paper",
        "applications",
        "Training epochs of the [examples](examples.md#applications), one thread, milliseconds of "
        "the processor: other programs ran beside. `large pages` as above. The paper's own work "
        "makes DGL 0.4.3 on 28 cores 1.5 to 13 times faster; it gives no number for each.",
        table_lines.applied,
    ),
    (
        "The seven applications on a GPU",
        "applications_cuda",
        "The same, milliseconds of the clock, all variants in turns inside of one process. Below "
        "some 10 ms the host's work is what takes the time: where patch() leaves calls to PyG "
        "(MoNet, LGNN, the batches), the same kernels run, and what is lost is the question "
        "whether a call is small, in LGNN 72 times a step.",
        table_lines.applied,
    ),
    (
        "Primitives of these applications",
        "primitives",
        "What DGL would call for the formulas of one forward pass, read from `report()`; each "
        "formula is one kernel here. `paper`: how many its table 2 lists; the text that we have of "
        "it has lost their names. GAT's softmax is taken apart into the four parts that DGL runs "
        "one by one. The decoder of GC-MC takes the rows of its pairs by index, which is no "
        "message passing.",
        primitives.table,
    ),
    (
        "Binary-reduce and copy-reduce on a CPU",
        "binary_reduce",
        "Every pair of operands that DGL has: layers of PyG with that message under `patch()`, 64 "
        "features, one thread. Times of stock PyG / DGL 1.1.3 over ours, processor time. `u` is "
        "the source of an edge, `v` its target, `e` the edge; `edges`: no reduction, one value an "
        "edge is written. Other programs ran beside.",
        table_lines.operand_pairs,
    ),
    (
        "Where the time goes on a CPU",
        "shares_cpu",
        "Under `patch()`. First one layer, from so many features to so many: SpMM / GEMM / values "
        "of edges (scores and softmax of attention), the rest of 100% is element by element. Then "
        "inference of the models of the ES-SpMM paper, on graphs of its sizes or a share of them.",
        shares.table,
    ),
    (
        "Where the time goes on a GPU",
        "shares_cuda",
        "The same of GCN.",
        shares.table,
    ),
    (
        "One order for samples of a graph",
        "association_samples_cpu",
        "Inference of one layer on samples of a graph, in the order that is chosen for the graph "
        "and in that chosen for the sample, against the fastest order; geometric means. `nodes`: a "
        "subgraph of so many nodes; `neighbours`: so many of each node. The paper finds that one "
        "choice serves all samples. Here that holds where every node keeps neighbours; on a "
        "subgraph of few nodes GAT loses by it, as the GEMM that spares work on edges costs more "
        "than they do. `optimize()` chooses anew where a size has changed by more than a factor of "
        "two.",
        association_samples.table,
    ),
    (
        "One order for samples of a graph, on a GPU",
        "association_samples_cuda",
        "The same, two samples of each size.",
        association_samples.table,
    ),
    (
        "Gated attention on a CPU",
        "gaan/association_cpu",
        "The attention of GaAN's layer, 100 iterations, choosing included, over `α (X W)`, the "
        "order of its code; the columns are those of the [tables of other layers]"
        "(../benchmarks/results/association_tables.md).",
        lambda frame: table3(cases(completed(frame, "cpu"))),
    ),
    (
        "Gated attention on a GPU",
        "gaan/association_cuda",
        "The same.",
        lambda frame: table3(cases(completed(frame, "cuda"))),
    ),
    (
        "BatchNorm and Embedding on a CPU",
        "cpu_batchnorm_embedding",
        "Milliseconds, forward and backward, of what the DGL paper rewrites beside aggregation. "
        "torch's BatchNorm1d is held against copies of the bytes that it has to move; of Embedding "
        "(rows: words) a step with ids that are new in each, as torch and as `patch()` runs it, "
        "whatever the size.",
        table_lines.beside_aggregation,
    ),
    (
        "Kernels on a CPU",
        "cpu_kernels",
        "Forward: time of the best peer of each case (MKL, torch, DGL 1.1.3, torch-sparse, PyG) "
        "over ours.",
        table_lines.kernels,
    ),
    (
        "Epochs on a GPU",
        "gpu_epochs",
        "3 layers, 256 hidden (attention: 4 heads x 64), fp32. Rows are of several runs: the CSV "
        "has the commit of each.",
        table_lines.gpu_models,
    ),
    (
        "First steps on a GPU",
        "gpu_first_call",
        "Seconds of a process's first training step and its second one. `cold`: nothing is in "
        "Triton's cache; `warm`: everything is.",
        columns("graph", "model", "backend", "kernel_cache", "first_step_s", "second_step_s"),
    ),
    (
        "Sampled batches on a GPU",
        "gpu_batches",
        "Milliseconds of a training step, 2 layers, 256 hidden, fan-outs 15 and 10, a new graph in "
        "each. `trimmed`: layers get what the seeds still need. `always`: whatever the size.",
        side_by_side(["graph", "model", "trimmed", "seeds", "E"], "backend", "step_ms"),
    ),
    (
        "Attention by dot products on a GPU",
        "gpu_dot_attention",
        "AGNN epochs in fp32; one head of 128 features in fp16. Milliseconds forward and in all, "
        "MiB.",
        columns("what", "graph", "by", "forward_ms", "ms", "peak_mib", out_of_memory="ms"),
    ),
    (
        "Attention of several heads on a GPU",
        "gpu_attention",
        "Milliseconds forward, and with all gradients, by its parts and in one kernel.",
        columns(
            "graph",
            "form",
            "heads",
            "width",
            "dtype",
            "parts_forward_ms",
            "one_forward_ms",
            "parts_ms",
            "one_ms",
        ),
    ),
    (
        "SpMM on a GPU",
        "gpu_kernels",
        "Weighted sums: cuSPARSE's time over ours.",
        table_lines.gpu_kernels,
    ),
    (
        "Rewritten models on a GPU",
        "rewrite_epochs",
        "Milliseconds of a training epoch, 3 layers, 256 hidden, 40 classes. `static`: the "
        "features are the same tensor in every call, what a layer aggregates of them is kept.",
        side_by_side(["graph", "model"], "variant", "epoch_ms"),
    ),
    (
        "MaxK on a GPU",
        "maxk_epochs_cuda",
        "Milliseconds of a training epoch, 3 layers, 256 hidden. `no edges` is the time of "
        "everything but aggregation, the limit by Amdahl's law. `torch CSR` is stock PyG on "
        "cuSPARSE.",
        side_by_side(["graph", "model", "shape"], "case", "epoch_ms"),
    ),
    (
        "Products of MaxK on a GPU",
        "gpu_maxk",
        "Milliseconds, F = 256, fp32; products with weights. `sspmm` is the gradient of "
        "`cbsr_spmm`; `chosen` is what dispatch takes of Triton's kernels and the CUDA library's.",
        table_lines.maxk_products,
    ),
    (
        "Products of MaxK on a GPU, by k",
        "maxk_by_k/gpu_maxk",
        "The same, for more of the k that the paper has.",
        table_lines.maxk_products,
    ),
    (
        "Memory traffic on a GPU",
        "gpu_counters",
        "What Nsight Compute counts: the products of MaxK, 32 of 256, and one layer of GCN on "
        "graphs of the sizes of three citation graphs, aggregated at the width of the input. "
        "Gigabytes between L1 and L2 and between L2 and memory, %. Each kernel starts with empty "
        "caches.",
        gpu_counters.table,
    ),
    (
        "MaxK on a CPU",
        "maxk_epochs_cpu",
        "The same.",
        side_by_side(["graph", "model", "shape"], "case", "epoch_ms"),
    ),
    (
        "Accuracy with MaxK",
        "maxk_training",
        "Test nodes, %, mean ± standard deviation of 5 seeds; 3 layers, 64 hidden; community: 3000 "
        "nodes.",
        table_lines.maxk_accuracy,
    ),
    (
        "Accuracy with MaxK, k of 256",
        "maxk_accuracy",
        "The same on real data, trained on a GPU: 3 layers, 256 hidden, 200 epochs, every k of the "
        "paper. Two classes of twitch-fr are hardly told apart, whatever the network. The run "
        "ended before GIN on cornell5 was over.",
        table_lines.maxk_accuracy,
    ),
    (
        "Convergence with MaxK",
        "maxk_convergence",
        "3 layers, 256 hidden, real data; means over the seeds.",
        maxk_convergence.table,
    ),
    (
        "Epochs with MaxK on these data sets",
        "maxk_training_epochs",
        "Milliseconds of a training epoch of the networks with 64 hidden.",
        side_by_side(["dataset", "model"], "case", "epoch_ms"),
    ),
    (
        "Orders of the nodes on a GPU",
        "node_order",
        "`community` is `reorder()`. `reuse`: edges per distinct column in windows of 16 rows; "
        "seconds to find the order on the GPU, milliseconds of a sum before and after.",
        columns(
            "graph",
            "order",
            "reuse",
            "find_s",
            "spmm_fp32_64_ms",
            "spmm_fp32_256_ms",
            "spmm_bf16_256_ms",
        ),
    ),
    (
        "Relations on a GPU",
        "relations_cuda",
        "Milliseconds of a training step of one layer, 64 features; HeteroConv holds SAGEConv.",
        side_by_side(["graph", "layer", "relations"], "backend", "step_ms"),
    ),
    (
        "Tensor Cores on a GPU",
        "tc_sweep",
        "The best of the `cuda` backend beside the Triton kernels on CUDA cores, milliseconds: the "
        "rows of a window, and how many entries a column must have to go to Tensor Cores "
        "(`entries` is their part of all).",
        table_lines.tensor_cores,
    ),
    (
        "Tensor Cores beside cuSPARSE",
        "tc_kernels",
        "What dispatch chooses, and milliseconds of either backend and of cuSPARSE in the same "
        "precision, but for `tf32`, where the others stay in fp32.",
        table_lines.beside_cusparse,
    ),
    (
        "Sampled edges on a GPU",
        "sampled_kernels_cuda",
        "`sampled_spmm` with `fastrand`, F = 128, fp32 unless said: time on the device, sampling "
        "included.",
        table_lines.sampled,
    ),
    (
        "Sampled edges on a CPU",
        "sampled_kernels",
        "The same.",
        table_lines.sampled,
    ),
    (
        "Inference with sampled edges on a CPU",
        "sampled_inference_cpu",
        "Whole inference of two layers with `fastrand`, milliseconds; accuracy of the test nodes "
        "where the graph is real and the model has learned.",
        sampled_inference.table,
    ),
    (
        "Inference with sampled edges on a GPU",
        "sampled_inference_cuda",
        "The same. Stock PyG with GraphSAGE runs out of memory on the two large graphs.",
        sampled_inference.table,
    ),
    (
        "GCN without a share of its edges",
        "dropped_edges_cpu",
        "Edges drawn at random outside of the kernel, two layers, 64 hidden: SpMM of 64 features, "
        "whole inference on the graph that is left, what drawing and sorting it takes, and the "
        "accuracy of three draws where the graph is real.",
        dropped_edges.table,
    ),
    (
        "GCN without a share of its edges on a GPU",
        "dropped_edges_cuda",
        "The same.",
        dropped_edges.table,
    ),
    (
        "Accuracy with sampled edges",
        "sampled_accuracy",
        "The smallest width that loses at most 1% on the validation nodes, and what it does on the "
        "test nodes.",
        table_lines.sampled_models,
    ),
)


def read(name: str) -> pd.DataFrame | None:
    path = results.FOLDER / f"{name}.csv"
    return results.read(path) if path.exists() else None


def page() -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        "A ratio above 1 means that pyg_accel is faster. `python -m benchmarks.tables` makes the "
        "tables from the CSV files in [benchmarks/results](../benchmarks/results), which have "
        "every row, losing ones included; [benchmarks](../benchmarks/README.md#results) says by "
        "which command each was measured and how. The tables and figures of five papers have "
        "[a page of their own](results/papers.md).",
        "",
        f"`{NONE}`: not measured, or nothing to compare with. `out of memory`: tried, and it did "
        "not fit.",
    ]
    for title, name, what, make in SECTIONS:
        frame = read(name)
        if frame is not None:
            lines += ["", f"## {title}", f"{what} {results.measured_on(frame)}.", "", *make(frame)]
            if (results.FOLDER / f"{name}.png").exists():
                lines += ["", f"![{title}](../benchmarks/results/{name}.png)"]
    return "\n".join(lines) + "\n"


def headline() -> list[str]:
    """The README's table: whole training epochs."""
    lines = [
        "| on | graph | model | epoch ms, stock PyG | its best variant | patched | over stock | "
        "over the best |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, graphs in SHOWN.items():
        frame = read(name)
        if frame is None:
            continue
        where = "GPU" if "gpu" in frame else "CPU"
        frame = frame.rename(columns={"dataset": "graph"})
        for graph in graphs:
            for model, group in frame[frame["graph"] == graph].groupby("model", sort=False):
                figures = " | ".join(_of_one_model(group.groupby("backend")["epoch_ms"].median()))
                lines.append(f"| {where} | {graph} | {model} | {figures} |")
    return lines


def _of_one_model(times: pd.Series) -> list[str]:
    ours, variants = times["patched"], times[[b for b in times.index if "patched" not in b]]
    stock, others = variants["stock"], variants.drop("stock").dropna()
    return [
        "out of memory" if pd.isna(stock) else f"{stock:.4g}",
        f"{others.min():.4g} ({others.idxmin()})" if len(others) else NONE,
        f"{ours:.4g}",
        NONE if pd.isna(stock) else f"{stock / ours:.1f}x",
        f"{others.min() / ours:.1f}x" if len(others) else NONE,
    ]


def main() -> None:
    (machine.ROOT / "docs" / "results.md").write_text(page())
    papers.PAGE.write_text(papers.page())
    layer_table.PAGE.write_text(layer_table.page())
    path = machine.ROOT / "docs" / "is_it_for_me.md"
    path.write_text(decision.page(path.read_text()))
    path = machine.ROOT / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    block = "\n".join([BEGIN, *headline(), END])
    path.write_text(before + block + rest.partition(END)[2])


if __name__ == "__main__":
    main()
