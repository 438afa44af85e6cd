"""Products with CBSR features that gather from dense rows, which stay in the L1 cache."""

import triton
import triton.language as tl

__all__ = ["row_kernel"]


@triton.jit(do_not_specialize=["limit", "k", "width"])  # type: ignore[untyped-decorator]
def row_kernel(
    rowptr_ptr: tl.tensor,
    row_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    col_ptr: tl.tensor,
    eid_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    DOT: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """A program has the edges of one row of the graph, or of a piece of a row.

    It adds its row of x to the sums of the sources, the paper's outer product. Additions are
    atomic, so their order differs from run to run. With DOT it multiplies the row by the values of
    each source instead, a number per edge.
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
        number = edge if eid_ptr is None else tl.load(eid_ptr + edge, mask=live, other=0)
        total = tl.zeros([EDGES, SLOTS], ACC)
        slot = 0
        while slot < k:
            s = slot + tl.arange(0, SLOTS)
            ok = live[:, None] & (s < k)[None, :]
            place = (node * k)[:, None] + s[None, :]
            c = tl.load(indices_ptr + place, mask=ok, other=0).to(tl.int32)
            x = tl.load(x_ptr + row * width + c, mask=ok, other=0.0).to(ACC)
            if DOT:
                total += tl.load(values_ptr + place, mask=ok, other=0.0).to(ACC) * x
            else:
                if weight_ptr is not None:
                    x = x * tl.load(weight_ptr + number, mask=live, other=0.0).to(ACC)[:, None]
                tl.atomic_add(out_ptr + place, x, mask=ok, sem="relaxed")
            slot += SLOTS
        if DOT:
            tl.store(out_ptr + number, tl.sum(total, axis=1), mask=live)
        at += EDGES
