"""The Triton kernel that samples points."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["dims"])  # type: ignore[untyped-decorator]
def sample_farthest(
    src: tl.tensor, ptr: tl.tensor, ptr_out: tl.tensor, first: tl.tensor, distance: tl.tensor,
    out: tl.tensor, dims: tl.tensor, POINTS: tl.constexpr, REGISTERS: tl.constexpr,
) -> None:  # fmt: skip
    """Sample the points of an example, each the farthest from the sampled ones.

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
