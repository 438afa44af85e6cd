"""``calibrate_sampling()``: how few edges a model's accuracy can bear."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyg_accel.checks import shown, whole
from pyg_accel.matrices import is_sparse_matrix
from pyg_accel.ops import sampling_rates
from pyg_accel.ops.sampled import note_samples
from pyg_accel.patching.api import patched
from pyg_accel.patching.sampling import sampled

__all__ = ["Calibration", "WidthResult", "calibrate_sampling"]


@dataclass(frozen=True)
class WidthResult:
    """One width.

    Attributes:
        width: most edges of a node; None for all of them.
        accuracy: on the mask.
        drop: accuracy over all edges less this one.
        rate: share of the edges that is kept.
        milliseconds: of one forward pass, the median.
        speedup: over the pass with all edges.
    """

    width: int | None
    accuracy: float
    drop: float
    rate: float
    milliseconds: float
    speedup: float


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate_sampling` found; ``print`` shows it as a table.

    Attributes:
        rows: all edges first, then each width.
        width: the smallest width within ``max_drop``; None if there is none.
        strategy: how edges were chosen.
        rescale: what sums were multiplied by.
        max_drop: the largest loss of accuracy that was allowed.
    """

    rows: tuple[WidthResult, ...]
    width: int | None
    strategy: str
    rescale: str
    max_drop: float

    def __str__(self) -> str:
        lines = ["  width  accuracy     drop   edges       ms  speed-up"]
        for row in self.rows:
            mark = "  <- chosen" if row.width is not None and row.width == self.width else ""
            lines.append(
                f"{row.width or 'all':>7}  {row.accuracy:8.4f}  {row.drop:+7.4f}  {row.rate:6.1%}  "
                f"{row.milliseconds:7.2f}  {row.speedup:7.2f}x{mark}"
            )
        if self.width is None:
            lines.append(f"no width stays within a drop of {self.max_drop}: use all edges")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draw accuracy and speed-up against width into an image file (ES-SpMM paper, figure 8)."""
        from matplotlib.figure import Figure  # no pyplot: neither state nor a window

        every, *rows = self.rows
        widths = [row.width or 0 for row in rows]
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        left = figure.subplots()
        right = left.twinx()
        (accuracy,) = left.plot(widths, [row.accuracy for row in rows], "o-", color="tab:blue",
                                label=f"accuracy, {self.strategy}")  # fmt: skip
        limit = left.axhline(every.accuracy - self.max_drop, color="tab:blue", linestyle=":",
                             label=f"all edges - {self.max_drop:g}")  # fmt: skip
        left.axhline(every.accuracy, color="tab:blue", linestyle="--", linewidth=0.8)
        (speed,) = right.plot(widths, [row.speedup for row in rows], "s-", color="tab:orange",
                              label="speed-up of a forward pass")  # fmt: skip
        if self.width is not None:
            left.axvline(self.width, color="0.6", linewidth=0.8)
        left.set_xscale("log", base=2)
        left.set_xticks(widths, [str(width) for width in widths])
        left.set(xlabel="edges of a node at most", ylabel="accuracy")
        right.set_ylabel("speed-up over all edges")
        left.legend(handles=[accuracy, limit, speed], loc="best")
        figure.savefig(path, dpi=150)


def calibrate_sampling(
    model: torch.nn.Module,
    data: Any,
    mask: Tensor,
    max_drop: float = 0.01,
    *,
    strategy: str = "fastrand",
    rescale: str = "row",
    widths: Sequence[int] | None = None,
    forward: Callable[[torch.nn.Module, Any], Tensor] | None = None,
    metric: Callable[[Tensor, Tensor], float] | None = None,
    repeats: int = 5,
    progress: bool = True,
) -> Calibration:
    """Find the smallest width whose accuracy on a mask stays within ``max_drop``.

    Runs the model in evaluation mode over all edges, then inside :func:`sampled` with each width.
    The model is patched while this runs, and is afterwards as it was.

    Args:
        model: a trained model.
        data: with ``x``, ``edge_index`` (or a sparse matrix ``adj_t``) and ``y``.
        mask: [N] bool, the nodes to judge by: a validation mask.
        max_drop: how much accuracy may be lost.
        strategy: as for :func:`sampled`.
        rescale: as for :func:`sampled`.
        widths: to try; by default powers of two from 4 to the first that takes every edge.
        forward: of model and data, returns the outputs [N, C]; by default
            ``model(data.x, data.edge_index)``, with ``edge_weight`` where both have it.
        metric: of outputs and targets of the masked nodes; by default the share of nodes whose
            largest output is that of their class.
        repeats: forward passes that are timed, for each width.
        progress: show a progress bar.

    Returns:
        The smallest width, or None where none is good enough, and a row for each that was tried.

    Raises:
        ValueError: for a mask that selects nothing or is not of these nodes, data without classes
            (or other targets and no metric), a negative drop, no widths, widths or repeats below 1,
            and for a model of which nothing is sampled.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not bool(mask.any()):
        raise ValueError("expected 'mask' to be bool and to select at least one node")
    y = getattr(data, "y", None)
    if not isinstance(y, Tensor) or y.dim() == 0:
        raise ValueError("expected 'data' to have the classes of its nodes, 'y'")
    whole("repeats", repeats)
    if metric is None and (y.is_floating_point() or y.is_complex() or y.numel() != y.size(0)):
        raise ValueError(
            f"expected 'data.y' to have one class a node (got {shown(y)} {y.dtype}); for other "
            "targets pass 'metric', of outputs and targets, larger where better"
        )
    if mask.shape != data.y.shape[:1]:
        raise ValueError(
            f"expected 'mask' to be [{data.y.size(0)}], one per node (got {list(mask.shape)})"
        )
    if not max_drop >= 0:
        raise ValueError(f"expected 'max_drop' to be at least 0 (got {max_drop})")
    degree = _degrees(data)
    if widths is None:
        most = int(degree.max()) if degree.numel() else 1
        widths = [4 << i for i in range(max(most - 1, 0).bit_length() - 1)] or [4]
    rates = sampling_rates(degree, widths)
    widths = sorted(rates)
    forward, metric = forward or _forward, metric or _accuracy
    was_training = model.training
    model.eval()
    measured = []
    try:
        with patched(model), torch.no_grad():
            bar = tqdm([None, *widths], desc="width", disable=not progress)
            for width in bar:
                bar.set_postfix_str("all" if width is None else str(width))
                if width is None:
                    out, milliseconds = _timed(forward, model, data, repeats)
                else:
                    with sampled(width, strategy, rescale=rescale), note_samples() as samples:
                        out, milliseconds = _timed(forward, model, data, repeats)
                    if not samples:
                        raise ValueError(
                            f"nothing of {type(model).__name__} is sampled, so no width is any "
                            "faster: only sums and means of patched layers are "
                            "(pyg_accel.report() lists the layers)"
                        )
                if not isinstance(out, Tensor) or out.shape[:1] != mask.shape:
                    raise ValueError(
                        f"expected the model's output to have {mask.numel()} rows, one per node "
                        f"(got {shown(out)}); 'forward' may select it"
                    )
                score = float(metric(out[mask], data.y[mask]))
                measured.append((width, score, milliseconds))
    finally:
        model.train(was_training)
    best, slowest = measured[0][1:]
    rows = tuple(
        WidthResult(w, score, best - score, 1.0 if w is None else rates[w], ms, slowest / ms)
        for w, score, ms in measured
    )
    # Accuracies are fractions of nodes: a drop of exactly max_drop must not fail by rounding.
    good = [r.width for r in rows if r.width is not None and r.drop <= max_drop + 1e-9]
    return Calibration(rows, min(good, default=None), strategy, rescale, max_drop)


def _degrees(data: Any) -> Tensor:
    edges = getattr(data, "edge_index", None)
    if edges is None:
        adj = getattr(data, "adj_t", None)
        if adj is None:
            raise ValueError("expected 'data' to have an 'edge_index', or a sparse matrix 'adj_t'")
        row = adj.coo()[0] if not isinstance(adj, Tensor) else adj.to_sparse_coo().indices()[0]
        return torch.bincount(row)
    if is_sparse_matrix(edges):
        raise ValueError("expected a sparse matrix as data.adj_t, not as data.edge_index")
    return torch.bincount(edges[1], minlength=1)


def _forward(model: torch.nn.Module, data: Any) -> Tensor:
    edges = getattr(data, "edge_index", None)
    graph = data.adj_t if edges is None else edges
    weight = getattr(data, "edge_weight", None)
    if weight is not None and "edge_weight" in signature(model.forward).parameters:
        weighted: Tensor = model(data.x, graph, edge_weight=weight)
        return weighted
    out: Tensor = model(data.x, graph)
    return out


def _accuracy(out: Tensor, y: Tensor) -> float:
    if out.dim() != 2:
        raise ValueError(f"expected outputs [N, C], one per node and class (got {shown(out)})")
    return float((out.argmax(-1) == y.view(-1)).double().mean())


def _timed(
    forward: Callable[[torch.nn.Module, Any], Tensor],
    model: torch.nn.Module,
    data: Any,
    repeats: int,
) -> tuple[Tensor, float]:
    out = forward(model, data)
    laps = []
    for _ in range(repeats):
        _wait(out)
        start = time.perf_counter()
        forward(model, data)
        _wait(out)
        laps.append(time.perf_counter() - start)
    return out, 1e3 * median(laps)


def _wait(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
