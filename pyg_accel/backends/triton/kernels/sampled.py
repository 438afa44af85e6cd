"""Sums over a sample of each row's entries, in the two stages of the ES-SpMM paper (section IV).

`choose_kernel` lays the chosen columns and their factors side by side, `sum_kernel` adds up rows of
features from there. The paper does both in one kernel, through shared memory. Here features are
gathered in slices of columns that stay in the L2, and each slice would choose again: reading
entries that lie scattered over a row costs a 32-byte sector each, more than a second kernel.

`pyg_accel.backends.sampling` defines which entries are chosen.
"""

import triton
import triton.language as tl

__all__ = ["choose_kernel", "sum_kernel"]

RUN = tl.constexpr(256)  # entries of a lane that are added up before they join the others


@triton.jit  # type: ignore[untyped-decorator]
def _step(degree: tl.tensor, width: tl.tensor) -> tl.tensor:
    """How far the entries of the samples of rows lie apart."""
    modulus = tl.maximum(degree, 1)
    step = tl.where(modulus % 577 == 0, 587, 577)
    step = tl.where(modulus % step == 0, 593, step)
    return tl.where(degree <= width, 1, step % modulus)


@triton.jit  # type: ignore[untyped-decorator]
def _position(number: tl.tensor, step: tl.tensor, modulus: tl.tensor, turn: tl.tensor) -> tl.tensor:
    """Number * step mod modulus.

    The quotient in float32 is off by less than 1 for numbers below 2**20, which the launcher sees
    to; larger ones come in 64 bits.
    """
    if number.dtype == tl.int64:
        return number * step % modulus
    turns = (number.to(tl.float32) * turn).to(tl.int32)
    position = number * step - turns * modulus  # products may wrap, the difference not
    position = tl.where(position < 0, position + modulus, position)
    return tl.where(position >= modulus, position - modulus, position)


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(x: tl.tensor, ACC: tl.constexpr, INT8: tl.constexpr) -> tl.tensor:
    """Stored features as numbers."""
    if INT8:
        # As the last byte of 2**23: a GPU converts integers at an eighth of the rate of additions.
        word = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint32) | 0x4B000000
        return (word.to(tl.float32, bitcast=True) - 8388736.0).to(ACC)
    else:
        return x.to(ACC)


@triton.jit(do_not_specialize=["rows", "heads", "width", "samples"])  # type: ignore[untyped-decorator]
def choose_kernel(
    rowptr_ptr: tl.tensor,
    col_ptr: tl.tensor,
    eid_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    source_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    samples: tl.tensor,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    STRATEGY: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NUMBERED: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    PADDED: tl.constexpr,
    ACC: tl.constexpr,
    POS: tl.constexpr,
) -> None:
    """Program (block of rows, head): columns and factors of the samples of ROWS rows.

    The samples of row r begin at r * width if PADDED, else where the row itself begins. Each head
    has `samples` factors; columns are the same for all heads.
    """
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok_row = row < rows
    begin = tl.load(rowptr_ptr + row, mask=ok_row, other=0)
    degree = (tl.load(rowptr_ptr + row + 1, mask=ok_row, other=0) - begin).to(POS)
    begin = begin.to(tl.int64)
    count = tl.minimum(degree, width.to(POS))
    modulus = tl.maximum(degree, 1)
    step = _step(degree, width.to(POS)).to(POS)
    turn = (step.to(tl.float32) / modulus.to(tl.float32))[:, None]
    place = row * width if PADDED else begin

    most = tl.max(count, axis=0)
    done = most * 0
    while done < most:
        number = (done + tl.arange(0, LANES).to(POS))[None, :]
        ok = number < count[:, None]
        position = number
        if STRATEGY != "bucket":
            position = _position(number, step[:, None], modulus[:, None], turn)
        entry = begin[:, None] + position
        source = tl.load(col_ptr + entry, mask=ok, other=0)
        slot = place[:, None] + number
        if head == 0:
            tl.store(source_ptr + slot, source, mask=ok)
        if WEIGHTED != "" or ROW_SCALE:
            factor = tl.where(ok, 1.0, 0.0).to(ACC)
            if WEIGHTED != "":
                if NUMBERED:
                    entry = tl.load(eid_ptr + entry, mask=ok, other=0).to(tl.int64)
                if WEIGHTED == "head":
                    entry = entry * heads + head
                factor = tl.load(weight_ptr + entry, mask=ok, other=0).to(ACC)
            if ROW_SCALE:
                factor *= tl.load(row_scale_ptr + source, mask=ok, other=0.0).to(ACC)
            tl.store(factor_ptr + head.to(tl.int64) * samples + slot, factor, mask=ok)
        done += LANES


@triton.jit(do_not_specialize=["rows", "columns", "stride", "heads", "width", "samples"])  # type: ignore[untyped-decorator]
def sum_kernel(
    rowptr_ptr: tl.tensor,
    source_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    x_ptr: tl.tensor,
    column_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    samples: tl.tensor,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
    UNIT: tl.constexpr,
    RESCALE: tl.constexpr,
    FACTORS: tl.constexpr,
    COLUMN_SCALE: tl.constexpr,
    INT8: tl.constexpr,
    PADDED: tl.constexpr,
    ACC: tl.constexpr,
    POS: tl.constexpr,
) -> None:
    """Program (block of rows, slice of columns of a head): ROWS x COLUMNS sums.

    LANES entries of each row are parallel, unrolled UNROLL times. `columns` and `stride` count
    units of UNIT features.
    """
    features = columns * UNIT
    slices = (features + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // slices
    c = (tl.program_id(1) % slices) * COLUMNS + tl.arange(0, COLUMNS)
    c_ok = c < features

    edge = tl.arange(0, ROWS * LANES)
    lane = (edge % LANES).to(POS)
    row = tl.program_id(0).to(tl.int64) * ROWS + edge // LANES
    ok_row = row < rows
    begin = tl.load(rowptr_ptr + row, mask=ok_row, other=0)
    degree = (tl.load(rowptr_ptr + row + 1, mask=ok_row, other=0) - begin).to(POS)
    count = tl.minimum(degree, width.to(POS))
    place = row * width if PADDED else begin.to(tl.int64)

    x_head = x_ptr + head.to(tl.int64) * features
    own_factor_ptr = factor_ptr
    if FACTORS:
        own_factor_ptr = factor_ptr + head.to(tl.int64) * samples
    total = tl.zeros([ROWS * LANES, COLUMNS], ACC)
    most = tl.max(count, axis=0)
    done = most * 0
    while done < most:
        stop = tl.minimum(done + RUN * LANES, most)
        run = tl.zeros([ROWS * LANES, COLUMNS], ACC)
        while done < stop:
            for u in tl.static_range(UNROLL):
                number = done + u * LANES + lane
                ok = number < count
                source = tl.load(source_ptr + place + number, mask=ok, other=0)
                where = source.to(tl.int64)[:, None] * (stride * UNIT) + c[None, :]
                x = tl.load(x_head + where, mask=ok[:, None] & c_ok[None, :], other=0)
                message = _decoded(x, ACC, INT8)
                if FACTORS:
                    factor = tl.load(own_factor_ptr + place + number, mask=ok, other=0.0)
                    message *= factor[:, None]
                run += message
            done += UNROLL * LANES
        total += run

    if LANES > 1:
        total = tl.sum(tl.reshape(total, [ROWS, LANES, COLUMNS]), axis=1)
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        ok_row = row < rows
        degree = tl.load(rowptr_ptr + row + 1, mask=ok_row, other=0).to(POS)
        degree -= tl.load(rowptr_ptr + row, mask=ok_row, other=0).to(POS)
        count = tl.minimum(degree, width.to(POS))
    if RESCALE != "none":
        taken = tl.maximum(count, 1).to(ACC)
        factor = 1.0 / taken if RESCALE == "mean" else degree.to(ACC) / taken
        total *= factor[:, None]
    if COLUMN_SCALE:
        own = column_scale_ptr + head * features + c
        total *= tl.load(own, mask=c_ok, other=0.0)[None, :]
    result = (row * heads + head)[:, None] * features + c[None, :]
    tl.store(out_ptr + result, total, mask=ok_row[:, None] & c_ok[None, :])
