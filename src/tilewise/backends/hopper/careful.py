"""Gradients beside things that are not numbers: ``triton``'s functions do tiles again that came out not finite.

As in the forward, 0 * NaN lets what a mask hides through. The fast kernels say of each tile of 64 rows of dQ, and of 64
keys of dK and dV, whether it is finite. This one reads that, and has nothing to do but where there was a NaN or inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.backward import dkdv_tile, dq_tile
from ..triton.primitives import sequence
from .ragged import located

CHUNK = 16  # tiles that one program looks at


@triton.jit(do_not_specialize=["sequences", "len_q", "len_k", "n_q", "n_k", "total_q", "total"])
def careful_kernel(
    odd, q, k, v, do, lse, delta, dq, dk, dv, qs, ks, vs, dos, dqs, dks, dvs, stats, cu_q, cu_k, sequences, len_q,
    len_k, heads, group, scale, qk_scale, cap, n_q, n_k, total_q, total, m, KEEP: tl.constexpr, REACH_Q: tl.constexpr,
    REACH_K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """odd: a byte for each of total tiles. First those of queries (batch, head, n_q), then those of keys: n_k for each
    head, two for each BLOCK_N keys."""
    start = tl.program_id(0) * CHUNK
    x = start + tl.arange(0, CHUNK)
    found = tl.load(odd + x, mask=x < total, other=0)
    if tl.max(found.to(tl.int32), 0) > 0:
        for at in range(start, tl.minimum(start + CHUNK, total)):
            if tl.load(odd + at) > 0:
                if at < total_q:
                    bh = at // n_q
                    first_q, tile, own_q, b = located(cu_q, at % n_q, sequences, len_q, 64)
                    first_k, own_k = sequence(b, cu_k, len_k)
                    dq_tile(
                        tile, bh % heads, bh // heads + b, q, k, v, do, lse, None, None, None, delta, dq, qs, ks, vs,
                        dos, None, None, dqs, stats, first_q, first_k, own_q, own_k, n_q, heads, group, scale, qk_scale,
                        cap, None, (0, 0, 0, 0), None, (0, 0, 0, 0), None, (0, 0), None, None, None, None, 0, 1.0, None,
                        (0, 0, 0), m, KEEP, REACH_K, D, DV, 64, 64, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, False,
                        "ieee", False, True,
                    )  # fmt: skip
                else:
                    pair = (at - total_q) // n_k
                    half = (at - total_q) % n_k
                    kv_heads = heads // group
                    first_k, tile, own_k, b = located(cu_k, half // 2, sequences, len_k, BLOCK_N)
                    first_q, own_q = sequence(b, cu_q, len_q)
                    if BLOCK_N == 128:
                        tile = 2 * tile + half % 2
                    if tile * 64 < own_k:
                        dkdv_tile(
                            tile, pair % kv_heads, pair // kv_heads + b, q, k, v, do, lse, None, delta, dk, dv, qs, ks,
                            vs, dos, dks, dvs, stats, first_q, first_k, own_q, own_k, heads, group, scale, qk_scale,
                            cap, None, (0, 0, 0, 0), None, (0, 0), None, 0, 1.0, None, (0, 0, 0), m, KEEP, REACH_Q, D,
                            DV, 64, 64, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, False, "ieee", False, False, True,
                        )  # fmt: skip
