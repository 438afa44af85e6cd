"""Launches edge softmax."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.schedule import schedule_of
from pyg_accel.backends.triton.kernels.softmax import softmax_combine_kernel, softmax_kernel
from pyg_accel.backends.triton.launcher import launch, type_of
from pyg_accel.graph import CSR

__all__ = ["run"]

ELEMENTS = 256  # of a tile: eight a thread
HEADS = 16  # at most, in a tile
SPLIT = 2048  # edges of a row for one program
PIECE = 1024  # edges of a piece of a longer row


def run(csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
    """Normalise short rows in one launch, and pieces of long rows in three."""
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    entries, heads = scores.shape
    if out.numel() == 0:
        return out
    block = min(1 << (heads - 1).bit_length(), HEADS)
    grid_heads = -(-heads // block)
    mean = entries // max(csr.num_rows, 1)
    most_lanes = ELEMENTS // block
    lanes = min(1 << (max(mean, 1).bit_length() - 1), most_lanes)
    wide = accumulate(scores.dtype)
    shared: dict[str, Any] = {"HEADS": block, "BACKWARD": grad is not None,
                              "ACC": type_of(wide)}  # fmt: skip
    entry = {**shared, "NUMBERED": csr.eid is not None}
    inputs = (scores, None if grad is None else grad.contiguous(), out)

    pieces = schedule_of(csr, SPLIT, PIECE, ordered=False).pieces
    rows = most_lanes // lanes
    tile = {"ROWS": rows, "LANES": lanes, "STAGE": "rows", **entry}
    longest = entries if pieces is None else SPLIT  # longer rows are in pieces
    tasks = (csr.num_rows, heads, longest)
    launch(softmax_kernel, (-(-csr.num_rows // rows), grid_heads),
           (csr.rowptr, csr.eid, None, None, *inputs, None, None, *tasks), **tile)  # fmt: skip
    if pieces is None:
        return out
    count = pieces.row.numel()
    stats = [torch.empty(count, heads, dtype=wide, device=out.device) for _ in range(2)]
    where = (csr.rowptr, csr.eid, pieces.begin, pieces.end, *inputs, *stats, count, heads, SPLIT)
    tile = {"ROWS": 1, "LANES": most_lanes, **entry}
    launch(softmax_kernel, (count, grid_heads), where, STAGE="sum", **tile)
    launch(softmax_combine_kernel, (pieces.rows.numel(), grid_heads),
           (pieces.first, *stats, heads), LANES=8, **shared)  # fmt: skip
    launch(softmax_kernel, (count, grid_heads), where, STAGE="write", **tile)
    return out
