"""Softmax over the edges of each row, and its backward.

Scores are [E, H] in the order of the edges. A program has a tile of ``ROWS * LANES`` edges by
``HEADS`` heads. Each lane has a running maximum and a sum relative to it; the lanes of a row are
reduced, and a second pass over the same edges, which are in cache by then, writes.
"""

import triton
import triton.language as tl

__all__ = ["softmax_combine_kernel", "softmax_kernel"]


@triton.jit(do_not_specialize=["tasks", "heads", "limit"])  # type: ignore[untyped-decorator]
def softmax_kernel(
    rowptr_ptr: tl.tensor,
    eid_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    x_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    out_ptr: tl.tensor,
    most_ptr: tl.tensor,
    total_ptr: tl.tensor,
    tasks: tl.tensor,
    heads: tl.tensor,
    limit: tl.tensor,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    BACKWARD: tl.constexpr,
    NUMBERED: tl.constexpr,
    STAGE: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """STAGE "rows": whole rows up to `limit`; "sum" and "write": the two passes over pieces."""
    edges: tl.constexpr = ROWS * LANES
    task = tl.program_id(0) * ROWS + tl.arange(0, edges) // LANES
    lane = tl.arange(0, edges) % LANES
    live = task < tasks
    if STAGE == "rows":
        begin = tl.load(rowptr_ptr + task, mask=live, other=0)
        end = tl.load(rowptr_ptr + task + 1, mask=live, other=0)
        end = tl.where(end - begin <= limit, end, begin)
    else:
        begin = tl.load(begin_ptr + task, mask=live, other=0)
        end = tl.load(end_ptr + task, mask=live, other=0)
    longest = tl.max(end - begin, axis=0)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    h_ok = (h < heads)[None, :]
    most = tl.full([edges, HEADS], float("-inf"), ACC)
    total = tl.full([edges, HEADS], 0.0, ACC)

    if STAGE != "write":
        step = 0
        while step < longest:
            at = begin + step + lane
            ok = (at < end)[:, None] & h_ok
            edge = tl.load(eid_ptr + at, mask=at < end, other=0) if NUMBERED else at
            place = edge.to(tl.int64)[:, None] * heads + h[None, :]
            if BACKWARD:
                x = tl.load(x_ptr + place, mask=ok, other=0.0).to(ACC)
                total += x * tl.load(grad_ptr + place, mask=ok, other=0.0).to(ACC)
            else:
                x = tl.load(x_ptr + place, mask=ok, other=float("-inf")).to(ACC)
                larger = tl.maximum(most, x)
                shift = tl.where(larger == float("-inf"), 0.0, larger)
                total = total * tl.exp(most - shift) + tl.exp(x - shift)
                most = larger
            step += LANES
        if LANES > 1:
            lanes = tl.reshape(total, [ROWS, LANES, HEADS])
            if not BACKWARD:
                highs = tl.reshape(most, [ROWS, LANES, HEADS])
                high = tl.max(highs, axis=1, keep_dims=True)
                shift = tl.where(high == float("-inf"), 0.0, high)
                lanes = lanes * tl.exp(highs - shift)
                most = tl.reshape(tl.broadcast_to(high, [ROWS, LANES, HEADS]), [edges, HEADS])
            lanes = tl.broadcast_to(tl.sum(lanes, axis=1, keep_dims=True), [ROWS, LANES, HEADS])
            total = tl.reshape(lanes, [edges, HEADS])

    stat = task.to(tl.int64)[:, None] * heads + h[None, :]
    stat_ok = live[:, None] & h_ok
    if STAGE == "sum":
        first = stat_ok & (lane == 0)[:, None]
        tl.store(total_ptr + stat, total, mask=first)
        if not BACKWARD:
            tl.store(most_ptr + stat, most, mask=first)
    if STAGE == "write":
        total = tl.load(total_ptr + stat, mask=stat_ok, other=1.0)
        if not BACKWARD:
            most = tl.load(most_ptr + stat, mask=stat_ok, other=0.0)

    if STAGE != "sum":
        step = 0
        while step < longest:
            at = begin + step + lane
            ok = (at < end)[:, None] & h_ok
            edge = tl.load(eid_ptr + at, mask=at < end, other=0) if NUMBERED else at
            place = edge.to(tl.int64)[:, None] * heads + h[None, :]
            x = tl.load(x_ptr + place, mask=ok, other=0.0).to(ACC)
            if BACKWARD:
                result = x * (tl.load(grad_ptr + place, mask=ok, other=0.0).to(ACC) - total)
            else:
                result = tl.exp(x - most) / total
            tl.store(out_ptr + place, result, mask=ok)
            step += LANES


@triton.jit(do_not_specialize=["heads"])  # type: ignore[untyped-decorator]
def softmax_combine_kernel(
    first_ptr: tl.tensor,
    most_ptr: tl.tensor,
    total_ptr: tl.tensor,
    heads: tl.tensor,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """A program sets the maximum and the sum of a long row for all its pieces."""
    begin = tl.load(first_ptr + tl.program_id(0))
    end = tl.load(first_ptr + tl.program_id(0) + 1)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)
    most = tl.full([LANES, HEADS], float("-inf"), ACC)
    total = tl.full([LANES, HEADS], 0.0, ACC)
    step = 0
    while step < end - begin:
        at = begin + step + lane
        ok = (at < end)[:, None] & (h < heads)[None, :]
        place = at.to(tl.int64)[:, None] * heads + h[None, :]
        part = tl.load(total_ptr + place, mask=ok, other=0.0)
        if BACKWARD:
            total += part
        else:
            high = tl.load(most_ptr + place, mask=ok, other=float("-inf"))
            larger = tl.maximum(most, high)
            shift = tl.where(larger == float("-inf"), 0.0, larger)
            total = total * tl.exp(most - shift) + part * tl.exp(high - shift)
            most = larger
        step += LANES
    if not BACKWARD:
        high = tl.max(most, axis=0, keep_dims=True)
        total = total * tl.exp(most - tl.where(high == float("-inf"), 0.0, high))
        most = tl.broadcast_to(high, [LANES, HEADS])
    total = tl.broadcast_to(tl.sum(total, axis=0, keep_dims=True), [LANES, HEADS])
    step = 0
    while step < end - begin:
        at = begin + step + lane
        ok = (at < end)[:, None] & (h < heads)[None, :]
        place = at.to(tl.int64)[:, None] * heads + h[None, :]
        tl.store(total_ptr + place, total, mask=ok)
        if not BACKWARD:
            tl.store(most_ptr + place, most, mask=ok)
        step += LANES
