"""Launches the products with CBSR features of ``csrc/cuda/cbsr*.cu``."""

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyg_accel.backends.base import atomics_allowed
from pyg_accel.backends.cuda.plan import in_32_bits
from pyg_accel.backends.cuda.spmm import reordered
from pyg_accel.backends.schedule import schedule_of
from pyg_accel.backends.spec import OpSpec
from pyg_accel.costs import H200, RATES
from pyg_accel.graph import CSR
from pyg_accel.graph.facts import of_matrix
from pyg_accel.runtime.machine import INTERPRETED, gpu_of
from pyg_accel.runtime.native import cuda_library

__all__ = ["MAXK_WIDTH", "cost", "maxk", "spmm", "sspmm"]

SPLIT, PIECE = 2048, 1024  # entries: longer rows are cut into pieces
MAXK_WIDTH = 1024  # features that a warp has in registers
LONG = 128  # entries of a row that pay for more copies of its features, or for reading it again
QUAD = 4  # slots that a thread reads at once
L2_PART = 2 / 3  # of the L2 cache, which serves at its full rate (40 of 60 MiB of an H200)


@dataclass(frozen=True, eq=False)
class CbsrSchedule:
    """The rows and pieces of rows of a graph for the kernels.

    Attributes:
        mean: entries of a row.
        pieces: [3 * P] int32: the row of every piece, its first entry, and one past its last; None
            without long rows.
        long: [L] int32, the rows that were cut.
        first: [L + 1] int32, where the pieces of each begin.
    """

    mean: float
    pieces: Tensor | None
    long: Tensor
    first: Tensor

    @property
    def limit(self) -> int:
        """Entries of the longest row that is not cut."""
        return 2**31 - 1 if self.pieces is None else SPLIT

    def partial(self, x: Tensor, width: int) -> Tensor | None:
        """Return a buffer for the sums of pieces."""
        if self.pieces is None:
            return None
        return x.new_empty(self.pieces.numel() // 3, width, dtype=torch.float32)


@dataclass(frozen=True)
class Layout:
    """The layout of a row of features in shared memory; see ``csrc/cuda/cbsr.cuh``.

    Attributes:
        lanes: of an edge.
        shift: the columns of a bank, as a power of two.
    """

    lanes: int
    shift: int


def cost(spec: OpSpec) -> float:
    """Return the seconds of a call, comparable with other backends of a GPU."""
    if spec.op == "maxk":
        return 1e-5
    row = spec.width * spec.dtype.itemsize * ratio(spec)
    return RATES["triton", "cuda"].seconds(spec.num_edges, row)


def ratio(spec: OpSpec) -> float:
    """Return the ratio of times to Triton's kernels: a fit to 256 columns on an H200.

    Measured on graphs of 12 to 600 entries a row, k = 16, 32 and 64, and on one of 492 entries a
    row up to k = 192: beyond a quarter of the columns, gradients of whole rows take less time.
    """
    if spec.op != "sspmm":
        return 0.008 * spec.k
    if not spec.atomics:
        return 0.55 + 0.009 * spec.k
    if spec.k * H200.entry > spec.width:
        return 1.1
    slots = spec.k * spec.num_edges / max(spec.num_rows, 1)  # that share a copy of their row
    return 0.66 * max(1.0, 700 / max(slots, 1.0))


def maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select in registers, a warp per row."""
    values, indices = cuda_library().maxk(aligned(x), k, _first_guess(k, x.size(1)))
    return values, indices


@lru_cache(maxsize=256)
def _first_guess(k: int, width: int) -> float:
    """Return the expected position of the k-th largest of normal numbers, from 0 to 1."""
    quantile = NormalDist().inv_cdf
    return 0.5 + quantile(1 - (k - 0.5) / width) / quantile(1 - 0.5 / width) / 2


def plan_of(csr: CSR) -> CbsrSchedule:
    """Return the schedule of a graph; it is stored while its arrays live."""
    return of_matrix(csr, "CBSR plan", lambda: _build(csr))


def _build(csr: CSR) -> CbsrSchedule:
    mean = csr.col.numel() / csr.num_rows
    cut = schedule_of(csr, SPLIT, PIECE, ordered=False).pieces
    if cut is None:
        nothing = torch.zeros(1, dtype=torch.int32, device=csr.rowptr.device)
        return CbsrSchedule(mean, None, nothing[:0], nothing)
    pieces = torch.cat([cut.row, cut.begin, cut.end]).to(torch.int32)
    return CbsrSchedule(mean, pieces, cut.rows.to(torch.int32), cut.first.to(torch.int32))


def layout_of(k: int, width: int, mean: float) -> Layout:
    """Return the layout for k of `width` columns in rows of `mean` entries."""
    if width > 512:
        lanes = 32
    elif k > 32:  # so that all slots of an edge are read, or added to, in one go
        lanes = 16
    else:
        lanes = 4 if k <= 16 and width <= 256 and mean > LONG else 8
    depth = max(-(-width // lanes), 4 * 32 // lanes)  # a lane writes quads of consecutive columns
    return Layout(lanes, min((depth - 1).bit_length(), 7))


def in_quads(t: Tensor) -> Tensor:
    """Return rows of whole quads of slots, aligned."""
    short = -t.size(1) % QUAD
    if short:
        t = pad(t.view(torch.int16) if t.dtype == torch.uint16 else t, (0, short)).view(t.dtype)
    return t if t.data_ptr() % (QUAD * t.element_size()) == 0 else t.clone()


def aligned(x: Tensor) -> Tensor:
    """Return contiguous rows, aligned to 16 bytes."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def in_order(csr: CSR, weight: Tensor | None) -> Tensor | None:
    """Return weights in the order of ``csr.col``, in float32."""
    if weight is None or csr.eid is None:
        return weight if weight is None else weight.float()
    return reordered(weight, csr.eid, None).float()


def spmm(
    csr: CSR, values: Tensor, indices: Tensor, width: int, weight: Tensor | None, reduce: str
) -> Tensor:
    """Scatter the stored columns of neighbours into rows in shared memory."""
    out = values.new_empty(csr.num_rows, width)
    if out.numel() == 0 or csr.col.numel() == 0:
        return out.zero_()
    csr = in_32_bits(csr)
    plan, library, k, mean = plan_of(csr), cuda_library(), values.size(1), reduce == "mean"
    layout, partial = layout_of(k, width, plan.mean), plan.partial(values, width)
    stored, columns = in_quads(values), in_quads(indices)
    library.cbsr_spmm(
        csr.rowptr, csr.col, plan.pieces, plan.limit, in_order(csr, weight), stored, columns, k,
        layout.shift, layout.lanes, mean, partial, out,
    )  # fmt: skip
    if partial is not None:
        library.combine(partial, plan.long, plan.first, csr.rowptr if mean else None, out)
    return out


def sspmm(csr: CSR, transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None) -> Tensor:
    """Push rows to their neighbours if atomic additions are allowed, otherwise gather them."""
    if indices.numel() == 0 or csr.col.numel() == 0:
        return x.new_zeros(indices.shape)
    if atomics_allowed():
        return _push(csr, x, indices, weight)
    return _pull(transposed, x, indices, weight)


def _pull(transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None) -> Tensor:
    """Gather the stored columns: the same bits in every run."""
    csr = in_32_bits(transposed)
    plan, library, out = plan_of(csr), cuda_library(), x.new_empty(indices.shape)
    partial = plan.partial(x, indices.size(1))
    library.cbsr_pull(
        csr.rowptr, csr.col, plan.pieces, plan.limit, in_order(csr, weight), x, indices,
        slice_of(x, plan.mean), partial, out,
    )  # fmt: skip
    if partial is not None:
        library.combine(partial, plan.long, plan.first, None, out)
    return out


def slice_of(x: Tensor, mean: float) -> int:
    """Return the number of columns of x per pass, for rows of `mean` entries."""
    slice = x.size(1)
    if mean <= LONG:
        return slice
    near = near_bytes(x.device)
    while slice > 32 and x.size(0) * slice * x.element_size() > near:
        slice = -(-slice // 2)
    return slice if x.size(0) * slice * x.element_size() <= near else x.size(1)


def _push(csr: CSR, x: Tensor, indices: Tensor, weight: Tensor | None) -> Tensor:
    """Add every row to its neighbours atomically, in float32."""
    csr = in_32_bits(csr)
    plan, (rows, k) = plan_of(csr), indices.shape
    passes = passes_of(rows, k, plan.mean, near_bytes(x.device))
    weight, source = in_order(csr, weight), aligned(x.float())
    layout = layout_of(k // passes, x.size(1), plan.mean)
    outs = []
    for part in apart(indices, passes):
        part = in_quads(part)
        out = torch.zeros(part.shape, dtype=torch.float32, device=x.device)
        cuda_library().cbsr_push(
            csr.rowptr, csr.col, plan.pieces, plan.limit, weight, source, part, k // passes,
            layout.shift, layout.lanes, out,
        )  # fmt: skip
        outs.append(out[:, : k // passes])
    whole = outs[0].contiguous() if passes == 1 else torch.stack(outs, 2).view(rows, k)
    return whole.to(x.dtype)


def near_bytes(device: torch.device) -> int:
    """Return the bytes that the L2 cache holds at its full rate."""
    gpu = gpu_of(device.index) if device.type == "cuda" else INTERPRETED
    return int(gpu.l2_bytes * L2_PART)


def passes_of(rows: int, k: int, mean: float, near: int) -> int:
    """Return the number of parts of the slots such that ``near`` bytes hold a part."""
    passes, size = 1, 4 * rows * k
    if mean <= LONG:
        return 1
    while size > passes * near and k % (8 * passes) == 0 and k >= 16 * passes:
        passes *= 2
    return passes if size <= passes * near else 1


def apart(indices: Tensor, passes: int) -> list[Tensor]:
    """Split slots by stride: each part is spread over the columns like all slots."""
    if passes == 1:
        return [indices]
    wide = indices.view(torch.int16) if indices.dtype == torch.uint16 else indices
    return [wide[:, i::passes].contiguous().view(indices.dtype) for i in range(passes)]
