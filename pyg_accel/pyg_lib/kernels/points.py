"""Triton kernels over points.

A neighbour is one int64, the bits of its squared distance above its id, so that smaller ones are
nearer, and equal distances go by id. Each query holds its ``most`` smallest ones, unsorted, and the
largest of them; a tile of points gives them one after another, as long as any query gets one. Tiles
are [points, queries]: a thread has a query, and looks for its smallest point in its registers.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(2**63 - 1)


@triton.jit  # type: ignore[untyped-decorator]
def keys_of(distance: tl.tensor, ids: tl.tensor, valid: tl.tensor) -> tl.tensor:
    """Return the neighbours of a tile; ``NOTHING`` where there is none."""
    bits = distance.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(valid, (bits << 32) | ids.to(tl.int64), NOTHING)


@triton.jit  # type: ignore[untyped-decorator]
def take(keys: tl.tensor, best: tl.tensor, worst: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Move the keys of a tile that are among the smallest into ``best``."""
    least = tl.min(keys, 0)
    while tl.max((least < worst).to(tl.int32), 0) > 0:
        better = (least < worst)[None, :] & (best == worst[None, :])
        best = tl.where(better, least[None, :], best)
        worst = tl.max(best, 0)
        keys = tl.where(keys == least[None, :], NOTHING, keys)
        least = tl.min(keys, 0)
    return best, worst


@triton.jit  # type: ignore[untyped-decorator]
def nothing_yet(
    bits: tl.tensor, most: tl.tensor, QUERIES: tl.constexpr, SLOTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return different keys at the limit; slots that are not used hold what is never replaced."""
    slot = tl.arange(0, SLOTS).to(tl.int64)
    keys = tl.where(slot < most, ((slot * 0 + bits) << 32) + slot, -1 - slot)
    return tl.zeros([SLOTS, QUERIES], tl.int64) + keys[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def write(
    out: tl.tensor, rows: tl.tensor, valid: tl.tensor, best: tl.tensor, most: tl.tensor,
    SLOTS: tl.constexpr, SORTS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the neighbours of every query, sorted if that takes little code."""
    best = tl.trans(best)
    place = tl.arange(0, SLOTS)
    if SORTS:
        best = tl.sort(best, 1)
        place -= SLOTS - most  # slots that are not used come first
    at = out + rows.to(tl.int64)[:, None] * most + place[None, :]
    tl.store(at, best, mask=valid[:, None] & ((place >= 0) & (place < most))[None, :])


@triton.jit(do_not_specialize=["rows", "dims", "most", "bits"])  # type: ignore[untyped-decorator]
def scan_examples(
    x: tl.tensor, y: tl.tensor, ptr_x: tl.tensor, ptr_y: tl.tensor, block_ptr: tl.tensor,
    block_row: tl.tensor, out: tl.tensor, rows: tl.tensor, dims: tl.tensor, most: tl.tensor,
    limit: tl.tensor, bits: tl.tensor, skip_same: tl.tensor, QUERIES: tl.constexpr,
    POINTS: tl.constexpr, SLOTS: tl.constexpr, SORTS: tl.constexpr,
) -> None:  # fmt: skip
    """Compare a block of queries with all points of its example."""
    block = tl.program_id(0)
    row = tl.load(block_row + block)
    if row < rows:
        first = tl.load(ptr_y + row) + (block - tl.load(block_ptr + row)) * QUERIES
        query = first + tl.arange(0, QUERIES)
        asked = query < tl.load(ptr_y + row + 1)
        best = nothing_yet(bits, most, QUERIES, SLOTS)
        worst = tl.max(best, 0)
        end = tl.load(ptr_x + row + 1)
        for begin in range(tl.load(ptr_x + row), end, POINTS):
            point = begin + tl.arange(0, POINTS)
            inside = point < end
            distance = tl.zeros([POINTS, QUERIES], tl.float32)
            for d in range(dims):
                a = tl.load(y + query * dims + d, mask=asked, other=0.0)
                b = tl.load(x + point * dims + d, mask=inside, other=0.0)
                gap = a[None, :] - b[:, None]
                distance += gap * gap
            valid = asked[None, :] & inside[:, None] & (distance < limit)
            if skip_same:
                valid = valid & (query[None, :] != point[:, None])
            best, worst = take(keys_of(distance, point[:, None], valid), best, worst)
        write(out, query, asked, best, most, SLOTS, SORTS)


@triton.jit(do_not_specialize=["rows", "nx", "ny", "nz", "most", "bits"])  # type: ignore[untyped-decorator]
def scan_cells(
    x: tl.tensor, x_ids: tl.tensor, y: tl.tensor, y_ids: tl.tensor, cell_ptr: tl.tensor,
    origin: tl.tensor, row_ptr: tl.tensor, block_ptr: tl.tensor, block_row: tl.tensor,
    out: tl.tensor, rows: tl.tensor, nx: tl.tensor, ny: tl.tensor, nz: tl.tensor, size: tl.tensor,
    slack: tl.tensor, most: tl.tensor, limit: tl.tensor, bits: tl.tensor, skip_same: tl.tensor,
    QUERIES: tl.constexpr, POINTS: tl.constexpr, SLOTS: tl.constexpr, SORTS: tl.constexpr,
) -> None:  # fmt: skip
    """Compare a block of queries of a row of cells with the cells around, until none is nearer.

    Points and queries are [n, 3], sorted by cell: of an example, z, y and x. So the cells between
    two x are one range of points.
    """
    block = tl.program_id(0)
    row = tl.load(block_row + block)
    if row < rows:
        first = tl.load(row_ptr + row) + (block - tl.load(block_ptr + row)) * QUERIES
        query = first + tl.arange(0, QUERIES)
        asked = query < tl.load(row_ptr + row + 1)
        qx = tl.load(y + query * 3, mask=asked, other=0.0)
        qy = tl.load(y + query * 3 + 1, mask=asked, other=0.0)
        qz = tl.load(y + query * 3 + 2, mask=asked, other=0.0)
        ids = tl.load(y_ids + query, mask=asked, other=-1)
        example = row // (ny * nz)
        ox, oy, oz = tl.load(origin), tl.load(origin + 1), tl.load(origin + 2)
        cy, cz = row % ny, row // ny % nz
        cell = tl.minimum(tl.maximum(((qx - ox) / size).to(tl.int32), 0), nx - 1)
        low = tl.min(tl.where(asked, cell, nx), 0)
        high = tl.max(tl.where(asked, cell, -1), 0)
        best = nothing_yet(bits, most, QUERIES, SLOTS)
        worst = tl.max(best, 0)
        before = -1
        around = 1
        searches = 1
        while searches > 0:
            # The middle first, then 1, -1, 2, -2 ...: the nearest points leave least to take.
            for i in range(2 * around + 1):
                z = cz + tl.where(i % 2 == 0, -(i // 2), (i + 1) // 2)
                for j in range(2 * around + 1):
                    v = cy + tl.where(j % 2 == 0, -(j // 2), (j + 1) // 2)
                    exists = (z >= 0) & (z < nz) & (v >= 0) & (v < ny)
                    base = ((example * nz + z) * ny + v) * nx
                    seen = (tl.abs(z - cz) <= before) & (tl.abs(v - cy) <= before)
                    for side in range(2):  # of what was seen before; else the whole row at once
                        left = tl.where(side == 0, low - around, high + before + 1)
                        right = tl.where(seen & (side == 0), low - before - 1, high + around)
                        left, right = tl.maximum(left, 0), tl.minimum(right, nx - 1)
                        right = tl.where((side == 1) & (seen == 0), left - 1, right)
                        begin, end = 0, 0
                        if exists & (left <= right):
                            begin = tl.load(cell_ptr + base + left)
                            end = tl.load(cell_ptr + base + right + 1)
                        for start in range(begin, end, POINTS):
                            point = start + tl.arange(0, POINTS)
                            inside = point < end
                            px = tl.load(x + point * 3, mask=inside, other=0.0)
                            py = tl.load(x + point * 3 + 1, mask=inside, other=0.0)
                            pz = tl.load(x + point * 3 + 2, mask=inside, other=0.0)
                            names = tl.load(x_ids + point, mask=inside, other=0)
                            gx = qx[None, :] - px[:, None]
                            gy = qy[None, :] - py[:, None]
                            gz = qz[None, :] - pz[:, None]
                            distance = gx * gx + gy * gy + gz * gz
                            valid = asked[None, :] & inside[:, None] & (distance < limit)
                            if skip_same:
                                valid = valid & (ids[None, :] != names[:, None])
                            found = keys_of(distance, names[:, None], valid)
                            best, worst = take(found, best, worst)
            # How far the cells reach that were searched; without end at the sides of the grid.
            far = tl.zeros([QUERIES], tl.float32) + float("inf")
            far = tl.where(low > around, tl.minimum(far, qx - ox - (low - around) * size), far)
            far = tl.where(high + around + 1 < nx,
                           tl.minimum(far, ox + (high + around + 1) * size - qx), far)  # fmt: skip
            far = tl.where(cy > around, tl.minimum(far, qy - oy - (cy - around) * size), far)
            far = tl.where(cy + around + 1 < ny,
                           tl.minimum(far, oy + (cy + around + 1) * size - qy), far)  # fmt: skip
            far = tl.where(cz > around, tl.minimum(far, qz - oz - (cz - around) * size), far)
            far = tl.where(cz + around + 1 < nz,
                           tl.minimum(far, oz + (cz + around + 1) * size - qz), far)  # fmt: skip
            far = tl.maximum(far - slack, 0.0)
            most_far = (worst >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            nearer = asked & (most_far > far * far)
            searches = tl.max(nearer.to(tl.int32), 0)
            before = around
            around = around * 2
        write(out, ids, asked, best, most, SLOTS, SORTS)


@triton.jit(do_not_specialize=["dims"])  # type: ignore[untyped-decorator]
def sample_farthest(
    src: tl.tensor, ptr: tl.tensor, ptr_out: tl.tensor, first: tl.tensor, distance: tl.tensor,
    out: tl.tensor, dims: tl.tensor, POINTS: tl.constexpr, REGISTERS: tl.constexpr,
) -> None:  # fmt: skip
    """Sample the points of an example, each the farthest from those before.

    With ``REGISTERS``, its number of dimensions, at most three, an example is one tile that a
    program holds; without (0), distances are in memory.
    """
    example = tl.program_id(0)
    begin = tl.load(ptr + example)
    count = tl.load(ptr + example + 1) - begin
    to = tl.load(ptr_out + example)
    steps = tl.load(ptr_out + example + 1) - to
    place = tl.arange(0, POINTS)
    last = tl.load(first + example).to(tl.int32)
    points = src + begin * dims
    if REGISTERS > 0:
        inside = place < count
        x = tl.load(points + place * dims, mask=inside, other=0.0)
        if REGISTERS > 1:
            y = tl.load(points + place * dims + 1, mask=inside, other=0.0)
        if REGISTERS > 2:
            z = tl.load(points + place * dims + 2, mask=inside, other=0.0)
        near = tl.where(inside, float("inf"), -1.0)
    for step in range(steps):
        tl.store(out + to + step, begin + last)
        farthest = tl.full([], -(2**63), tl.int64)
        if REGISTERS > 0:
            gap = x - tl.load(points + last * dims)
            total = gap * gap
            if REGISTERS > 1:
                gap = y - tl.load(points + last * dims + 1)
                total += gap * gap
            if REGISTERS > 2:
                gap = z - tl.load(points + last * dims + 2)
                total += gap * gap
            near = tl.where(inside, tl.minimum(near, total), -1.0)
            bits = near.to(tl.int32, bitcast=True).to(tl.int64)
            key = tl.where(inside, (bits << 32) | (0x7FFFFFFF - place).to(tl.int64), -1)
            farthest = tl.max(key, 0)
        else:
            for start in range(0, count, POINTS):
                at = start + place
                inside = at < count
                total = tl.zeros([POINTS], tl.float32)
                for d in range(dims):
                    gap = tl.load(points + at * dims + d, mask=inside, other=0.0)
                    gap -= tl.load(points + last * dims + d)
                    total += gap * gap
                old = tl.load(distance + begin + at, mask=inside, other=-1.0)
                near = tl.minimum(old, total)
                tl.store(distance + begin + at, near, mask=inside)
                bits = near.to(tl.int32, bitcast=True).to(tl.int64)
                key = tl.where(inside, (bits << 32) | (0x7FFFFFFF - at).to(tl.int64), -1)
                farthest = tl.maximum(farthest, tl.max(key, 0))
        last = (0x7FFFFFFF - (farthest & 0x7FFFFFFF)).to(tl.int32)
