"""Products of a graph with CBSR features.

Threads own columns, eight each (an octet), and keep their sums in registers. What they need of a
node is packed into a word an octet: the eight bits of the columns that are stored, and above them
how many are stored in earlier octets, which is where the octet's values begin. So a dense row is
read from its k values alone, and nothing is scattered.
"""

import triton
import triton.language as tl

__all__ = ["combine_kernel", "dot_kernel", "pack_kernel", "spmm_kernel", "sspmm_kernel"]


@triton.jit(do_not_specialize=["count", "octets", "k"])  # type: ignore[untyped-decorator]
def pack_kernel(
    indices_ptr: tl.tensor,
    pack_ptr: tl.tensor,
    count: tl.tensor,
    octets: tl.tensor,
    k: tl.tensor,
    ELEMENTS: tl.constexpr,
) -> None:
    """The words of all nodes, by bisection on their ascending columns."""
    t = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    ok = t < count
    row = indices_ptr + (t // octets) * k
    first = ((t % octets) * 8).to(tl.int32)
    low = tl.zeros([ELEMENTS], tl.int32)
    high = tl.zeros([ELEMENTS], tl.int32) + k
    span = k
    while span > 0:
        middle = (low + high) >> 1
        column = tl.load(row + middle, mask=ok & (low < high), other=0).to(tl.int32)
        below = (column < first) & (low < high)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
        span = span >> 1
    word = low << 8
    for s in tl.static_range(8):
        inside = ok & (low + s < k)
        column = tl.load(row + low + s, mask=inside, other=0).to(tl.int32) - first
        hit = inside & (column >= 0) & (column < 8)
        word = word | tl.where(hit, 1 << (column & 7), 0)
    tl.store(pack_ptr + t, word.to(pack_ptr.dtype.element_ty), mask=ok)


@triton.jit  # type: ignore[untyped-decorator]
def add_column(
    total: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    word: tl.tensor,
    bit: tl.constexpr,
    weight: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Add the value of one column of each octet, if it is stored, and step to the next value."""
    on = (word >> bit) & 1
    total += tl.load(row + place, mask=on > 0, other=0.0).to(total.dtype) * weight
    return total, place + on


@triton.jit(do_not_specialize=["limit", "k", "width", "octets"])  # type: ignore[untyped-decorator]
def spmm_kernel(
    rowptr_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    col_ptr: tl.tensor,
    eid_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    pack_ptr: tl.tensor,
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,
    limit: tl.tensor,
    k: tl.tensor,
    width: tl.tensor,
    octets: tl.tensor,
    UNROLL: tl.constexpr,
    OCTETS: tl.constexpr,
    PIECES: tl.constexpr,
    MEAN: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """A program has one row up to `limit` edges, or one piece, and `8 * OCTETS` columns."""
    task = tl.program_id(0)
    if PIECES:
        begin = tl.load(begin_ptr + task)
        end = tl.load(end_ptr + task)
    else:
        begin = tl.load(rowptr_ptr + task)
        end = tl.load(rowptr_ptr + task + 1)
        if end - begin > limit:
            return
    octet = tl.program_id(1) * OCTETS + tl.arange(0, OCTETS)
    octet_ok = octet < octets
    a0 = tl.zeros([OCTETS], ACC)
    a1 = tl.zeros([OCTETS], ACC)
    a2 = tl.zeros([OCTETS], ACC)
    a3 = tl.zeros([OCTETS], ACC)
    a4 = tl.zeros([OCTETS], ACC)
    a5 = tl.zeros([OCTETS], ACC)
    a6 = tl.zeros([OCTETS], ACC)
    a7 = tl.zeros([OCTETS], ACC)
    at = begin
    while at < end:
        for u in tl.static_range(UNROLL):
            edge = at + u
            live = edge < end
            node = tl.load(col_ptr + edge, mask=live, other=0).to(tl.int64)
            word = tl.load(pack_ptr + node * octets + octet, mask=live & octet_ok, other=0)
            word = word.to(tl.int32)
            if pack_ptr.dtype.element_ty == tl.int16:
                word = word & 0xFFFF
            if weight_ptr is None:
                weight = 1.0
            else:
                number = edge if eid_ptr is None else tl.load(eid_ptr + edge, mask=live, other=0)
                weight = tl.load(weight_ptr + number, mask=live, other=0.0).to(ACC)
            row = values_ptr + node * k
            place = word >> 8
            a0, place = add_column(a0, row, place, word, 0, weight)
            a1, place = add_column(a1, row, place, word, 1, weight)
            a2, place = add_column(a2, row, place, word, 2, weight)
            a3, place = add_column(a3, row, place, word, 3, weight)
            a4, place = add_column(a4, row, place, word, 4, weight)
            a5, place = add_column(a5, row, place, word, 5, weight)
            a6, place = add_column(a6, row, place, word, 6, weight)
            a7, place = add_column(a7, row, place, word, 7, weight)
        at += UNROLL
    low = tl.join(tl.join(a0, a1), tl.join(a2, a3))
    high = tl.join(tl.join(a4, a5), tl.join(a6, a7))
    # Dimensions: octet, then bits 0, 1 and 2 of the column.
    total = tl.reshape(tl.permute(tl.join(low, high), (0, 3, 2, 1)), [OCTETS * 8])
    if MEAN:
        total = total / tl.maximum(end - begin, 1).to(ACC)
    c = tl.program_id(1) * (OCTETS * 8) + tl.arange(0, OCTETS * 8)
    tl.store(out_ptr + task.to(tl.int64) * width + c, total, mask=c < width)


@triton.jit(do_not_specialize=["columns"])  # type: ignore[untyped-decorator]
def combine_kernel(
    rowptr_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    first_ptr: tl.tensor,
    part_ptr: tl.tensor,
    out_ptr: tl.tensor,
    columns: tl.tensor,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MEAN: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """A program adds up the pieces of one long row."""
    begin = tl.load(first_ptr + tl.program_id(0))
    end = tl.load(first_ptr + tl.program_id(0) + 1)
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PARTS, COLUMNS], ACC)
    at = begin
    while at < end:
        part = at + tl.arange(0, PARTS)
        ok = (part < end)[:, None] & (c < columns)[None, :]
        total += tl.load(part_ptr + part.to(tl.int64)[:, None] * columns + c[None, :], mask=ok,
                         other=0.0)  # fmt: skip
        at += PARTS
    result = tl.sum(total, axis=0)
    if MEAN:
        length = tl.load(rowptr_ptr + row + 1) - tl.load(rowptr_ptr + row)
        result = result / length.to(ACC)
    tl.store(out_ptr + row * columns + c, result, mask=c < columns)


@triton.jit(do_not_specialize=["limit", "k", "width", "octets"])  # type: ignore[untyped-decorator]
def sspmm_kernel(
    rowptr_ptr: tl.tensor,
    row_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    col_ptr: tl.tensor,
    eid_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    pack_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    limit: tl.tensor,
    k: tl.tensor,
    width: tl.tensor,
    octets: tl.tensor,
    EDGES: tl.constexpr,
    SLOTS: tl.constexpr,
    SLICE: tl.constexpr,
    PIECES: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """A program has one row of the transpose, or a piece, and the stored columns of one slice.

    A slice is `SLICE` octets of columns (0: all). Programs of a slice run at about the same time,
    so its columns of x stay in the L2 cache.
    """
    task = tl.program_id(0)
    node = task.to(tl.int64)
    if PIECES:
        node = tl.load(row_ptr + task).to(tl.int64)
        begin = tl.load(begin_ptr + task)
        end = tl.load(end_ptr + task)
    else:
        begin = tl.load(rowptr_ptr + task)
        end = tl.load(rowptr_ptr + task + 1)
        if end - begin > limit:
            return
    slot = 0
    last = k
    if SLICE > 0:
        octet = tl.program_id(1) * SLICE
        slot = tl.load(pack_ptr + node * octets + octet).to(tl.int32) >> 8
        after = octet + SLICE
        last = tl.load(pack_ptr + node * octets + after, mask=after < octets, other=0)
        last = last.to(tl.int32) >> 8
        if pack_ptr.dtype.element_ty == tl.int16:
            slot = slot & 0xFF
            last = last & 0xFF
        last = tl.where(after < octets, last, k)
    lane = tl.arange(0, EDGES)
    while slot < last:
        s = slot + tl.arange(0, SLOTS)
        s_ok = s < last
        c = tl.load(indices_ptr + node * k + s, mask=s_ok, other=0).to(tl.int32)
        total = tl.zeros([EDGES, SLOTS], ACC)
        at = begin
        while at < end:
            edge = at + lane
            live = edge < end
            i = tl.load(col_ptr + edge, mask=live, other=0).to(tl.int64)
            x = tl.load(x_ptr + (i * width)[:, None] + c[None, :],
                        mask=live[:, None] & s_ok[None, :], other=0.0).to(ACC)  # fmt: skip
            if weight_ptr is not None:
                number = edge if eid_ptr is None else tl.load(eid_ptr + edge, mask=live, other=0)
                x = x * tl.load(weight_ptr + number, mask=live, other=0.0).to(ACC)[:, None]
            total += x
            at += EDGES
        row = task.to(tl.int64) if PIECES else node
        tl.store(out_ptr + row * k + s, tl.sum(total, axis=0), mask=s_ok)
        slot += SLOTS


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
