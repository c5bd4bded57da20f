"""Gradients beside things that are not numbers: tiles that came out not finite are done again, by ``triton``'s kernels.

As in the forward, 0 * NaN lets what a mask hides through. The fast kernels say of each tile of 64 rows of dQ, and of 64
keys of dK and dV, whether it is finite. This one reads that, and has nothing to do but where there was a NaN or inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.backward import dkdv_tile, dq_tile

CHUNK = 16  # tiles that one program looks at


@triton.jit(do_not_specialize=["len_q", "len_k", "n_q", "n_k", "total_q", "total"])
def careful_kernel(
    odd, q, k, v, do, lse, delta, dq, dk, dv, qs, ks, vs, dos, dqs, dks, dvs, stats, len_q, len_k, heads, group, scale,
    qk_scale, n_q, n_k, total_q, total, m, KEEP: tl.constexpr, REACH_Q: tl.constexpr, REACH_K: tl.constexpr,
    D: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """odd: a byte for each of total tiles. First those of queries (batch, head, n_q), then those of keys (.., n_k)."""
    first = tl.program_id(0) * CHUNK
    x = first + tl.arange(0, CHUNK)
    found = tl.load(odd + x, mask=x < total, other=0)
    if tl.max(found.to(tl.int32), 0) > 0:
        for at in range(first, tl.minimum(first + CHUNK, total)):
            if tl.load(odd + at) > 0:
                if at < total_q:
                    bh = at // n_q
                    dq_tile(
                        at % n_q, bh % heads, bh // heads, q, k, v, do, lse, None, None, None, delta, dq, qs, ks, vs,
                        dos, None, None, dqs, stats, 0, 0, len_q, len_k, n_q, heads, group, scale, qk_scale, 0.0, None,
                        (0, 0, 0, 0), None, (0, 0, 0, 0), None, (0, 0), None, None, None, None, 0, 1.0, None,
                        (0, 0, 0), m, KEEP, REACH_K, D, D, 64, 64, D, D, UNIT, False, WIDE, False, "ieee", True,
                    )  # fmt: skip
                else:
                    pair = (at - total_q) // n_k
                    tile = (at - total_q) % n_k
                    kv_heads = heads // group
                    if tile * 64 < len_k:
                        dkdv_tile(
                            tile, pair % kv_heads, pair // kv_heads, q, k, v, do, lse, None, delta, dk, dv, qs, ks, vs,
                            dos, dks, dvs, stats, 0, 0, len_q, len_k, heads, group, scale, qk_scale, 0.0, None,
                            (0, 0, 0, 0), None, (0, 0), None, 0, 1.0, None, (0, 0, 0), m, KEEP, REACH_Q, D, D, 64, 64,
                            D, D, UNIT, False, WIDE, False, "ieee", False, True,
                        )  # fmt: skip
