"""The parts of shared_decode.py that run once per row and head: norm and RoPE of the row's own token, and partial
results."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def section_positions(
    positions, layout: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, TIME: gl.constexpr,
    ROTARY: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Does what rope/triton.py's function of this name does; returns int64 [DIM]."""
    d = gl.arange(0, DIM, layout=layout)
    angle = gl.where(d < ROTARY // 2, d, d - ROTARY // 2)
    if TIME:
        section = gl.where(angle < TIME, 0, gl.where(angle < TIME + HEIGHT, 1, 2))
    else:
        section = angle % 3
        is_time = ((section == 1) & (angle >= 3 * HEIGHT)) | ((section == 2) & (angle >= 3 * WIDTH))
        section = gl.where(is_time, 0, section)
    return gl.load(positions + section, d < ROTARY, 0).to(gl.int64)


@gluon.jit
def rotation(weight, cos, sin, layout: gl.constexpr, DIM: gl.constexpr, ROTARY: gl.constexpr):
    """Does what rope/triton.py's function of this name does; returns float32 [DIM] each."""
    d = gl.arange(0, DIM, layout=layout)
    rotates = d < ROTARY
    is_low = d < ROTARY // 2
    angle = gl.where(is_low, d, d - ROTARY // 2)
    still: gl.constexpr = 1.0 if ROTARY < DIM else 0.0  # cosine of the columns that do not rotate
    s = gl.load(sin + angle, rotates, 0.0)
    own = gl.load(cos + angle, rotates, still)
    other = gl.where(is_low, -s, s)
    if weight is not None:
        own *= gl.load(weight + d)
        other *= gl.load(weight + gl.where(is_low, d + ROTARY // 2, d - ROTARY // 2), rotates, 0.0)
    return own, other


@gluon.jit
def partners(layout: gl.constexpr, DIM: gl.constexpr, ROTARY: gl.constexpr):
    d = gl.arange(0, DIM, layout=layout)
    return gl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2), d < ROTARY


@gluon.jit
def rotated_queries(
    q, live, own, other, layout: gl.constexpr, DIM: gl.constexpr, ROTARY: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    """Loads the heads [H, DIM] that q [H] points to, and returns them after RMSNorm (unless EPS is None) and
    `rotation`."""
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    d = gl.arange(0, DIM, layout=columns)
    partner, rotates = partners(columns, DIM, ROTARY)
    a = gl.load(q[:, None] + d[None, :], live[:, None], 0.0).to(gl.float32)
    b = gl.load(q[:, None] + partner[None, :], live[:, None] & rotates[None, :], 0.0).to(gl.float32)
    x = a * own[None, :] + b * other[None, :]
    if EPS is not None:
        x *= gl.rsqrt(gl.sum(a * a, 1) / DIM + EPS)[:, None]
    return x


@gluon.jit
def rotated_key(
    k, own, other, layout: gl.constexpr, DIM: gl.constexpr, ROTARY: gl.constexpr, EPS: gl.constexpr
):
    """Loads the key head [DIM] that k points to, and returns it after RMSNorm (unless EPS is None) and `rotation`."""
    d = gl.arange(0, DIM, layout=layout)
    partner, rotates = partners(layout, DIM, ROTARY)
    a = gl.load(k + d).to(gl.float32)
    x = a * own + gl.load(k + partner, rotates, 0.0).to(gl.float32) * other
    if EPS is not None:
        x *= gl.rsqrt(gl.sum(a * a, 0) / DIM + EPS)
    return x


@gluon.jit
def store_heads(x, out, codes, scales, at, group: gl.constexpr, DIM: gl.constexpr):
    """Stores heads x [H, DIM], `group` of them, from column `at` on, as floats and as int8 (quantize/triton.py), where
    pointers are given."""
    H: gl.constexpr = x.shape[0]
    layout: gl.constexpr = x.type.layout
    g = gl.arange(0, H, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    if out is not None:
        gl.store(out + at + g[:, None] * DIM + d[None, :], x.to(out.dtype.element_ty), (g < group)[:, None])
    if codes is not None:
        y = gl.reshape(x, [H * DIM // 32, 32])
        of_groups: gl.constexpr = gl.SliceLayout(1, y.type.layout)
        largest = gl.max(gl.abs(y), 1)
        inverse = gl.where(largest > 0, 127.0 / largest, 0.0)
        # Adding 1.5 * 2^23 rounds to an integer, ties to even, as the reference does.
        code = (y * inverse[:, None] + 12582912.0) - 12582912.0
        n = gl.arange(0, H * DIM // 32, layout=of_groups)
        c = gl.arange(0, 32, layout=gl.SliceLayout(0, y.type.layout))
        live = n < group * DIM // 32
        gl.store(codes + at + n[:, None] * 32 + c[None, :], code.to(gl.int8), live[:, None])
        gl.store(scales + at // 32 + n, largest / 127.0, live)


@gluon.jit
def combine(
    part_sums, part_stats, program, second, parts, H: gl.constexpr, DIM: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Returns the normalised heads [H, DIM] of `parts` programs' partial results, from `program` on, TOGETHER at a
    time. second: 1 if the first program's is its second partial result."""
    layout: gl.constexpr = gl.BlockedLayout([TOGETHER, 1, DIM // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    of_stats: gl.constexpr = gl.SliceLayout(2, layout)
    of_heads: gl.constexpr = gl.SliceLayout(0, of_stats)
    of_sums: gl.constexpr = gl.SliceLayout(0, layout)
    part = gl.arange(0, TOGETHER, layout=gl.SliceLayout(1, of_stats))
    g = gl.arange(0, H, layout=of_heads)
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    top = gl.full([H], float("-inf"), gl.float32, layout=of_heads)
    whole = gl.zeros([H], gl.float32, layout=of_heads)
    acc = gl.zeros([H, DIM], gl.float32, layout=of_sums)
    for first in range(0, parts, TOGETHER):
        p = first + part
        at = ((program + p) * 2 + gl.where(p == 0, second, 0))[:, None] * H + g[None, :]
        here = (p < parts)[:, None] & (g >= 0)[None, :]
        largest = gl.load(part_stats + at * 2, here, float("-inf"), cache_modifier=".cg")
        total = gl.load(part_stats + at * 2 + 1, here, 0.0, cache_modifier=".cg")
        sums = gl.load(
            part_sums + gl.expand_dims(at, 2) * DIM + gl.expand_dims(gl.expand_dims(d, 0), 1),
            gl.expand_dims(here, 2), 0.0, cache_modifier=".cg",
        )  # fmt: skip
        new = gl.maximum(top, gl.max(largest, 0))
        share = gl.exp2(largest - new[None, :])
        shrink = gl.exp2(top - new)
        whole = whole * shrink + gl.sum(total * share, 0)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, of_sums))
        acc = acc * shrink[:, None] + gl.sum(sums * gl.expand_dims(share, 2), 0)
        top = new
    return acc / gl.convert_layout(whole, gl.SliceLayout(1, of_sums))[:, None]


@gluon.jit
def leave_part(
    sums, largest, total, part_sums, part_stats, counter, part, start, blocks, share, by_head: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """Stores a part of the attention of a row and KV head in scratch memory as number `part`: sums [H, DIM], largest
    scores and sums of weights [H], float32. The row's blocks have places start to start + blocks - 1 in the list of all
    blocks. Returns whether the other parts were there already, and then the normalised result [H, DIM]; the counter is
    0 again."""
    H: gl.constexpr = sums.shape[0]
    DIM: gl.constexpr = sums.shape[1]
    g = gl.arange(0, H, layout=gl.SliceLayout(1, by_head))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, by_head))
    at = part * H + g
    gl.store(part_sums + at[:, None] * DIM + d[None, :], sums)
    gl.store(part_stats + at * 2, largest)
    gl.store(part_stats + at * 2 + 1, total)
    gl.thread_barrier()  # all threads must have written before the counter says so
    program = start // share
    parts = (start + blocks - 1) // share - program + 1
    is_last = gl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
    result = sums
    if is_last:
        gl.store(counter, 0)
        second = (start != program * share).to(gl.int32)
        result = gl.convert_layout(
            combine(part_sums, part_stats, program, second, parts, H, DIM, TOGETHER), by_head
        )
    return is_last, result
