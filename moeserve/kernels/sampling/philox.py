"""The uniform random number of an output token, in kernels: Philox4x64-10, as specified in
`csrc/sampling/sampling.h`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform_at(seed, position, STREAM: tl.constexpr):
    """Returns a float64 in [0, 1), a multiple of 2^-53, from uint64 scalars."""
    zero = position * 0
    c0, c1, c2, c3 = position, zero + STREAM, zero, zero
    k0, k1 = seed, zero
    m0 = zero + 0xD2E7470EE14C6C93
    m1 = zero + 0xCA5A826395121157
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(m0, c0), m0 * c0
        high_b, low_b = tl.umulhi(m1, c2), m1 * c2
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return (c0 >> 11).to(tl.float64) * 1.1102230246251565e-16
