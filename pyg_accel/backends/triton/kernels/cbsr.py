"""Products with CBSR features that gather from dense rows, which stay in the L1 cache."""

import triton
import triton.language as tl

__all__ = ["dot_kernel", "sspmm_push_kernel"]


@triton.jit(do_not_specialize=["limit", "k", "width"])  # type: ignore[untyped-decorator]
def sspmm_push_kernel(
    rowptr_ptr: tl.tensor,
    row_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    col_ptr: tl.tensor,
    eid_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    limit: tl.tensor,
    k: tl.tensor,
    width: tl.tensor,
    EDGES: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """A program has one row of the graph, or a piece, and adds its x to the sums of its sources.

    The paper's outer product: the row of x stays in the L1 cache. Additions are atomic, so their
    order differs from run to run.
    """
    task = tl.program_id(0)
    row = task.to(tl.int64)
    if PIECES:
        row = tl.load(row_ptr + task).to(tl.int64)
        begin = tl.load(begin_ptr + task)
        end = tl.load(end_ptr + task)
    else:
        begin = tl.load(rowptr_ptr + task)
        end = tl.load(rowptr_ptr + task + 1)
        if end - begin > limit:
            return
    at = begin
    while at < end:
        edge = at + tl.arange(0, EDGES)
        live = edge < end
        node = tl.load(col_ptr + edge, mask=live, other=0).to(tl.int64)
        slot = 0
        while slot < k:
            s = slot + tl.arange(0, SLOTS)
            ok = live[:, None] & (s < k)[None, :]
            place = (node * k)[:, None] + s[None, :]
            c = tl.load(indices_ptr + place, mask=ok, other=0).to(tl.int32)
            x = tl.load(x_ptr + row * width + c, mask=ok, other=0.0).to(out_ptr.dtype.element_ty)
            if weight_ptr is not None:
                number = edge if eid_ptr is None else tl.load(eid_ptr + edge, mask=live, other=0)
                x = x * tl.load(weight_ptr + number, mask=live, other=0.0).to(x.dtype)[:, None]
            tl.atomic_add(out_ptr + place, x, mask=ok, sem="relaxed")
            slot += SLOTS
        at += EDGES


@triton.jit(do_not_specialize=["limit", "k", "width"])  # type: ignore[untyped-decorator]
def dot_kernel(
    rowptr_ptr: tl.tensor,
    row_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    col_ptr: tl.tensor,
    eid_ptr: tl.tensor,
    values_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    limit: tl.tensor,
    k: tl.tensor,
    width: tl.tensor,
    EDGES: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """A program has the edges of one row, or of a piece: its row of x stays in the L1 cache."""
    task = tl.program_id(0)
    row = task.to(tl.int64)
    if PIECES:
        row = tl.load(row_ptr + task).to(tl.int64)
        begin = tl.load(begin_ptr + task)
        end = tl.load(end_ptr + task)
    else:
        begin = tl.load(rowptr_ptr + task)
        end = tl.load(rowptr_ptr + task + 1)
        if end - begin > limit:
            return
    at = begin
    while at < end:
        edge = at + tl.arange(0, EDGES)
        live = edge < end
        node = tl.load(col_ptr + edge, mask=live, other=0).to(tl.int64)
        total = tl.zeros([EDGES, SLOTS], ACC)
        slot = 0
        while slot < k:
            s = slot + tl.arange(0, SLOTS)
            ok = live[:, None] & (s < k)[None, :]
            place = (node * k)[:, None] + s[None, :]
            c = tl.load(indices_ptr + place, mask=ok, other=0).to(tl.int32)
            value = tl.load(values_ptr + place, mask=ok, other=0.0).to(ACC)
            total += value * tl.load(x_ptr + row * width + c, mask=ok, other=0.0).to(ACC)
            slot += SLOTS
        number = edge if eid_ptr is None else tl.load(eid_ptr + edge, mask=live, other=0)
        tl.store(out_ptr + number, tl.sum(total, axis=1), mask=live)
        at += EDGES
