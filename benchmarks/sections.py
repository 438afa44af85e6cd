"""The sections of docs/results.md and of the pages below docs/results/, by question."""

from typing import NamedTuple

from benchmarks import (
    association_samples,
    dropped_edges,
    gpu_counters,
    maxk_convergence,
    primitives,
    sampled_inference,
    shares,
    table_lines,
)
from benchmarks.association_tables import cases, completed, table3
from benchmarks.table_lines import Make, columns, side_by_side


class Section(NamedTuple):
    """A table.

    Attributes:
        title: its heading.
        name: of the CSV file, and of the picture if there is one.
        what: what the figures are.
        make: makes the lines of the rows.
    """

    title: str
    name: str
    what: str
    make: Make


TRAINING = (
    Section(
        "Epochs on a CPU",
        "cpu_epochs",
        "3 layers, 128 hidden. `large pages` is PyG with the [memory pages](explanation/"
        "how_patch_works.md#memory) that importing pyg_accel first switches on.",
        table_lines.epochs,
    ),
    Section(
        "Epochs on a GPU",
        "gpu_epochs",
        "3 layers, 256 hidden (attention: 4 heads x 64), fp32. Rows are of several runs: the CSV "
        "has the commit of each.",
        table_lines.gpu_models,
    ),
    Section(
        "Sampled batches on a GPU",
        "gpu_batches",
        "Milliseconds of a training step, 2 layers, 256 hidden, fan-outs 15 and 10, a new graph in "
        "each. `trimmed`: layers get what the seeds still need. `always`: whatever the size.",
        side_by_side(["graph", "model", "trimmed", "seeds", "E"], "backend", "step_ms"),
    ),
    Section(
        "First steps on a GPU",
        "gpu_first_call",
        "Seconds of a process's first training step and its second one. `cold`: nothing is in "
        "Triton's cache; `warm`: everything is.",
        columns("graph", "model", "backend", "kernel_cache", "first_step_s", "second_step_s"),
    ),
    Section(
        "Relations on a GPU",
        "relations_cuda",
        "Milliseconds of a training step of one layer, 64 features; HeteroConv holds SAGEConv.",
        side_by_side(["graph", "layer", "relations"], "backend", "step_ms"),
    ),
)
APPLICATIONS = (
    Section(
        "The seven applications of the DGL paper",
        "applications",
        "Training epochs of the [examples](examples.md#applications), one thread, milliseconds of "
        "the processor: other programs ran beside. `large pages` as above. The paper's own work "
        "makes DGL 0.4.3 on 28 cores 1.5 to 13 times faster; it gives no number for each.",
        table_lines.applied,
    ),
    Section(
        "The seven applications on a GPU",
        "applications_cuda",
        "The same, milliseconds of the clock, all variants in turns inside of one process. Below "
        "some 10 ms the host's work is what takes the time: where patch() leaves calls to PyG "
        "(MoNet, LGNN, the batches), the same kernels run, and what is lost is the question "
        "whether a call is small, in LGNN 72 times a step.",
        table_lines.applied,
    ),
)
REWRITTEN = (
    Section(
        "Rewritten models on a GPU",
        "rewrite_epochs",
        "Milliseconds of a training epoch, 3 layers, 256 hidden, 40 classes, fp32; 602 "
        "features in reddit-like, 100 in products-like, 128 in arxiv-like; GAT with one "
        "head. `static`: the features are the same tensor in every call, and what the first "
        "layer aggregates of them is computed once. Gains are over `patched`. Columns of a "
        "row are of one commit; where `static` was measured at another, it has no figure.",
        table_lines.rewritten,
    ),
)
MAXK = (
    Section(
        "MaxK on a GPU",
        "maxk_epochs_cuda",
        "Milliseconds of a training epoch, 3 layers, 256 hidden. `no edges` is the time of "
        "everything but aggregation, the limit by Amdahl's law. `torch CSR` is stock PyG on "
        "cuSPARSE.",
        side_by_side(["graph", "model", "shape"], "case", "epoch_ms"),
    ),
    Section(
        "MaxK on a CPU",
        "maxk_epochs_cpu",
        "The same.",
        side_by_side(["graph", "model", "shape"], "case", "epoch_ms"),
    ),
    Section(
        "Accuracy with MaxK",
        "maxk_training",
        "Test nodes, %, mean ± standard deviation of 5 seeds; 3 layers, 64 hidden; community: 3000 "
        "nodes.",
        table_lines.maxk_accuracy,
    ),
    Section(
        "Epochs with MaxK on these data sets",
        "maxk_training_epochs",
        "Milliseconds of a training epoch of the networks with 64 hidden.",
        side_by_side(["dataset", "model"], "case", "epoch_ms"),
    ),
    Section(
        "Accuracy with MaxK, k of 256",
        "maxk_accuracy",
        "The same on real data, trained on a GPU: 3 layers, 256 hidden, 200 epochs, every k of the "
        "paper. Two classes of twitch-fr are hardly told apart, whatever the network. The run "
        "ended before GIN on cornell5 was over.",
        table_lines.maxk_accuracy,
    ),
    Section(
        "Convergence with MaxK",
        "maxk_convergence",
        "3 layers, 256 hidden, real data; means over the seeds.",
        maxk_convergence.table,
    ),
)
NODE_ORDER = (
    Section(
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
)
SAMPLED = (
    Section(
        "Sampled edges on a GPU",
        "sampled_kernels_cuda",
        "`sampled_spmm` with `fastrand`, F = 128, fp32 unless said: time on the device, sampling "
        "included.",
        table_lines.sampled,
    ),
    Section(
        "Sampled edges on a CPU",
        "sampled_kernels",
        "The same.",
        table_lines.sampled,
    ),
    Section(
        "Accuracy with sampled edges",
        "sampled_accuracy",
        "The smallest width that loses at most 1% on the validation nodes, and what it does on the "
        "test nodes.",
        table_lines.sampled_models,
    ),
)
SUMS = (
    Section(
        "Kernels on a CPU",
        "cpu_kernels",
        "Forward: time of the best peer of each case (MKL, torch, DGL 1.1.3, torch-sparse, PyG) "
        "over ours.",
        table_lines.kernels,
    ),
    Section(
        "SpMM on a GPU",
        "gpu_kernels",
        "Weighted sums: cuSPARSE's time over ours.",
        table_lines.gpu_kernels,
    ),
)
MESSAGES = (
    Section(
        "Primitives of the seven applications",
        "primitives",
        "What DGL would call for the formulas of one forward pass, read from `report()`; each "
        "formula is one kernel here. `paper`: how many its table 2 lists; the text that we have of "
        "it has lost their names. GAT's softmax is taken apart into the four parts that DGL runs "
        "one by one. The decoder of GC-MC takes the rows of its pairs by index, which is no "
        "message passing.",
        primitives.table,
    ),
    Section(
        "Binary-reduce and copy-reduce on a CPU",
        "binary_reduce",
        "Every pair of operands that DGL has: layers of PyG with that message under `patch()`, 64 "
        "features, one thread. Times of stock PyG / DGL 1.1.3 over ours, processor time. `u` is "
        "the source of an edge, `v` its target, `e` the edge; `edges`: no reduction, one value an "
        "edge is written. Other programs ran beside.",
        table_lines.operand_pairs,
    ),
    Section(
        "BatchNorm and Embedding on a CPU",
        "cpu_batchnorm_embedding",
        "Milliseconds, forward and backward, of what the DGL paper rewrites beside aggregation. "
        "torch's BatchNorm1d is held against copies of the bytes that it has to move; of Embedding "
        "(rows: words) a step with ids that are new in each, as torch runs it and with its "
        "gradient as a sum over a graph.",
        table_lines.beside_aggregation,
    ),
    Section(
        "Attention by dot products on a GPU",
        "gpu_dot_attention",
        "AGNN epochs in fp32; one head of 128 features in fp16. Milliseconds forward and in all, "
        "MiB.",
        columns("what", "graph", "by", "forward_ms", "ms", "peak_mib", out_of_memory="ms"),
    ),
    Section(
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
)
MAXK_PRODUCTS = (
    Section(
        "Products of MaxK on a GPU",
        "gpu_maxk",
        "Milliseconds, F = 256, fp32; products with weights. `sspmm` is the gradient of "
        "`cbsr_spmm`; `chosen` is what dispatch takes of Triton's kernels and the CUDA library's.",
        table_lines.maxk_products,
    ),
    Section(
        "Products of MaxK on a GPU, by k",
        "maxk_by_k/gpu_maxk",
        "The same, for more of the k that the paper has.",
        table_lines.maxk_products,
    ),
    Section(
        "Memory traffic on a GPU",
        "gpu_counters",
        "What Nsight Compute counts: the products of MaxK, 32 of 256, and one layer of GCN on "
        "graphs of the sizes of three citation graphs, aggregated at the width of the input. "
        "Gigabytes between L1 and L2 and between L2 and memory, %. Each kernel starts with empty "
        "caches.",
        gpu_counters.table,
    ),
)
TENSOR_CORES = (
    Section(
        "Tensor Cores on a GPU",
        "tc_sweep",
        "The best of the `cuda` backend beside the Triton kernels on CUDA cores, milliseconds: the "
        "rows of a window, and how many entries a column must have to go to Tensor Cores "
        "(`entries` is their part of all).",
        table_lines.tensor_cores,
    ),
    Section(
        "Tensor Cores beside cuSPARSE",
        "tc_kernels",
        "What dispatch chooses, and milliseconds of either backend and of cuSPARSE in the same "
        "precision, but for `tf32`, where the others stay in fp32.",
        table_lines.beside_cusparse,
    ),
)
SHARES = (
    Section(
        "Where the time goes on a CPU",
        "shares_cpu",
        "Under `patch()`. First one layer, from so many features to so many: SpMM / GEMM / values "
        "of edges (scores and softmax of attention), the rest of 100% is element by element. Then "
        "inference of the models of the ES-SpMM paper, on graphs of its sizes or a share of them.",
        shares.table,
    ),
    Section(
        "Where the time goes on a GPU",
        "shares_cuda",
        "The same of GCN.",
        shares.table,
    ),
)
SAMPLES = (
    Section(
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
    Section(
        "One order for samples of a graph, on a GPU",
        "association_samples_cuda",
        "The same, two samples of each size.",
        association_samples.table,
    ),
)
GATED = (
    Section(
        "Gated attention on a CPU",
        "gaan/association_cpu",
        "The attention of GaAN's layer, 100 iterations, choosing included, over `α (X W)`, the "
        "order of its code; the columns are those of the [tables of other layers]"
        "(../benchmarks/results/association_tables.md).",
        lambda frame: table3(cases(completed(frame, "cpu"))),
    ),
    Section(
        "Gated attention on a GPU",
        "gaan/association_cuda",
        "The same.",
        lambda frame: table3(cases(completed(frame, "cuda"))),
    ),
)
INFERENCE = (
    Section(
        "Inference with sampled edges on a CPU",
        "sampled_inference_cpu",
        "Whole inference of two layers with `fastrand`, milliseconds; accuracy of the test nodes "
        "where the graph is real and the model has learned.",
        sampled_inference.table,
    ),
    Section(
        "Inference with sampled edges on a GPU",
        "sampled_inference_cuda",
        "The same. Stock PyG with GraphSAGE runs out of memory on the two large graphs.",
        sampled_inference.table,
    ),
)
DROPPED = (
    Section(
        "GCN without a share of its edges",
        "dropped_edges_cpu",
        "Edges drawn at random outside of the kernel, two layers, 64 hidden: SpMM of 64 features, "
        "whole inference on the graph that is left, what drawing and sorting it takes, and the "
        "accuracy of three draws where the graph is real.",
        dropped_edges.table,
    ),
    Section(
        "GCN without a share of its edges on a GPU",
        "dropped_edges_cuda",
        "The same.",
        dropped_edges.table,
    ),
)

RESULTS = {
    "How fast is training under patch()?": TRAINING,
    "How fast are whole applications?": APPLICATIONS,
    "What does optimize() bring?": REWRITTEN,
    "What does MaxK bring, and what does it cost?": MAXK,
    "What does the order of the nodes bring?": NODE_ORDER,
    "What does sampling of edges bring, and what does it cost?": SAMPLED,
    "How fast are sums on a matrix of edges?": SUMS,
}
KERNELS = {
    "How fast are the messages of layers?": MESSAGES,
    "How fast are the products of MaxK?": MAXK_PRODUCTS,
    "When do Tensor Cores pay?": TENSOR_CORES,
}
ORDERS = {
    "Where does the time go?": SHARES,
    "Does one order serve samples of a graph?": SAMPLES,
    "Do orders matter for gated attention?": GATED,
}
SAMPLING = {
    "How fast is inference on a part of the edges?": INFERENCE,
    "Why not drop edges beforehand?": DROPPED,
}
PAGES = {
    "results": ("Results", RESULTS),
    "results/kernels": ("Results: kernels", KERNELS),
    "results/orders": ("Results: orders of multiplication", ORDERS),
    "results/sampling": ("Results: sampling of edges", SAMPLING),
}
