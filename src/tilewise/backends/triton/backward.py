"""The backward kernels: P is recomputed from the scores and lse, as in ``tiled``. No atomics: repeatable bit for bit.

    dq      a tile of queries stays, tiles of keys stream past; first delta = rowsum(dO * O) - dlse of its rows, which
            the others read; also the gradients of sinks, of ALiBi and of an unbroadcast bias
    dkdv    a tile of keys stays; tiles of queries of all query heads of its key head stream past
    dbias   of a broadcast bias: a program owns a tile of it and sums over what is broadcast
    dq_dbias  both of a bias that batch entries or heads share: dq of several entries side by side, tile by tile of keys

What the kernels must not let through is as in ``forward``: products that come out as not a number are done
again, by ``backward_careful_kernel`` and ``dbias_careful_kernel``; dbias does so itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import (
    INF,
    LOG2E,
    NATURAL,
    add_to_row,
    any_odd,
    at_once,
    cleaned,
    distance,
    dot,
    edge,
    exponent,
    first_masked,
    flagged,
    follow,
    head_base,
    head_slope,
    kept,
    like,
    listed,
    load_bias,
    load_bias_pairs,
    load_row,
    load_tile,
    odd_rows,
    odd_sum,
    offset64,
    pair_ptrs,
    pick,
    scores,
    sequence,
    store_tile,
    survives,
    unflatten,
    unpaired,
    visited,
    visited16,
    visits,
)

# --- shared ---------------------------------------------------------------------------------------


@triton.jit
def load_stat(x, at, i0, len_q, N: tl.constexpr, TAIL: tl.constexpr):
    """Rows i0 .. i0 + N of a statistic, 0 beyond the last. One 64-bit address: the rows are offsets to it."""
    rows = tl.arange(0, N)
    if TAIL:
        return tl.load(x + (at + i0) + rows, mask=rows < len_q - i0, other=0.0)
    else:
        return tl.load(x + (at + i0) + rows)


@triton.jit
def lse_rows(lse, low, at, i0, len_q, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr):
    """lse of rows i0 .. i0 + BLOCK_M in the unit of the scores (0 for a row without keys), and lse_low in units of
    log2, where there is one."""
    x = load_stat(lse, at, i0, len_q, BLOCK_M, TAIL)
    x = tl.where(x == -INF, 0.0, x)
    if UNIT != NATURAL:
        x = x * LOG2E
    rest = x
    if low is not None:
        rest = load_stat(low, at, i0, len_q, BLOCK_M, TAIL) * LOG2E
    return x, rest


@triton.jit
def row_stats(lse, low, delta, at, i0, len_q, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr):
    """``lse_rows``, and delta."""
    x, rest = lse_rows(lse, low, at, i0, len_q, BLOCK_M, UNIT, TAIL)
    return x, rest, load_stat(delta, at, i0, len_q, BLOCK_M, TAIL)


@triton.jit
def grad_scores(
    s, dp, i, j, i0, j0, lse, low, delta, alive, keep, len_q, len_k, qk_scale, cap, bias, slope, survivor_weight,
    has_low: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, some=None,
):  # fmt: skip
    """From q k^T and dO v^T of a tile: P after dropout, dS before and after the softcap, and what is kept.

    All that is not kept is 0, whatever stands there; keep None keeps all but what the bias excludes. lse, low and delta
    broadcast along the keys. Without MASKED what a bias of -inf hides is 0 only where it is finite, as in ``scores``.
    some: whether a tile has pairs that are not kept, if that is known. Then others are not masked, and of these P is 0,
    but dS as little a number as dP: the program finds it at its end.
    """
    s, t = scores(s, i, j, i0, j0, len_q, len_k, qk_scale, cap, bias, slope, SOFTCAP, UNIT, MASKED)
    if has_low:  # noqa: SIM108 - P = exp(S - lse) * exp(-lse_low)
        x = (s - lse) * LOG2E - low
    else:
        x = exponent(s, lse, qk_scale, UNIT)
    if MASKED and bias is not None:
        keep = s != -INF if keep is None else keep & (s != -INF)
    if some is not None:  # noqa: SIM102 - the outer one is decided when compiling
        if some:
            x = tl.where(keep, x, -INF)
    p = tl.exp2(x)
    survived = p
    if alive is not None:
        survived = tl.where(alive, p, 0.0)
        dp = tl.where(alive, dp * survivor_weight, 0.0)
    ds = p * (dp - delta)
    if keep is not None and some is None:
        survived = tl.where(keep, survived, 0.0)
        ds = tl.where(keep, ds, 0.0)
    ds_bias = ds
    if SOFTCAP:
        ds = ds * (1 - t * t)
        if keep is not None and some is None:
            ds = tl.where(keep, ds, 0.0)
    if keep is None:
        keep = (i >= 0) & (j >= 0)  # a function cannot return None among others
    return survived, ds_bias, ds, keep


@triton.jit
def scaled(x, scale):
    """x * scale, for a sum x: one of nothing stays 0 under a scale that is not a number."""
    return tl.where(x == 0, 0.0, x * scale)


# --- dK and dV ------------------------------------------------------------------------------------


@triton.jit
def add_rows(
    dk, dv, odd, k, v, q_base, do_base, qs, dos, lse, low, delta, at, b, h, bh, j0, t0, t1, lists, where, n_full, full,
    first, len_q, len_k, qk_scale, cap, bias, bias_strides, slope, rng, threshold, survivor_weight, m,
    KEEP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr,
    CAREFUL: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """What the queries of tiles t0 .. t1 add to dK and dV; odd becomes 1 if some that are kept are not finite.

    TAIL: tiles may pass an end. Tiles are transposed, (N, M), as P^T and dS^T are needed.
    """
    j = j0 + tl.arange(0, BLOCK_N)[:, None]
    # A bias beyond whose edges nothing is read has addresses and masks of each element: too many to load ahead.
    n: tl.constexpr = TILE // BLOCK_M
    ahead = listed(t0, t1, lists, where)
    for t in tl.range(t0 * n, t1 * n, num_stages=1 if CAREFUL or (MASKED and bias is not None) else None):
        i0 = visited(t // n, lists, ahead, n_full, full, first, CAREFUL or not MASKED, MASKED) * TILE + t % n * BLOCK_M
        ahead = listed((t + 1) // n, t1, lists, where)
        i = i0 + tl.arange(0, BLOCK_M)[None, :]
        add = bias
        if bias is not None and not MASKED:
            if PAIRED:
                add = load_bias_pairs(bias, i0, j0, bias_strides, BLOCK_M, BLOCK_N)
            else:
                add = load_bias(bias, i, j, i0, j0, len_q, len_k, bias_strides, False, WIDE)
        q = load_tile(q_base, i0, len_q, qs, BLOCK_M, D, BLOCK_D, TAIL, WIDE)
        # Before the products, or beside a bias after them: elsewhere it costs registers.
        if bias is None:
            row_lse, row_low, row_delta = row_stats(lse, low, delta, at, i0, len_q, BLOCK_M, UNIT, TAIL)
        s = dot(k, tl.trans(q), None, UPCAST, PRECISION)  # (N, M)
        do = load_tile(do_base, i0, len_q, dos, BLOCK_M, DV, BLOCK_DV, TAIL, WIDE)
        dp = s
        if NEED_DK:
            dp = dot(v, tl.trans(do), None, UPCAST, PRECISION)  # (N, M)
        if bias is not None:
            row_lse, row_low, row_delta = row_stats(lse, low, delta, at, i0, len_q, BLOCK_M, UNIT, TAIL)
        alive = None
        if rng is not None:
            alive = tl.trans(survives(rng, threshold, bh, i0, j0, BLOCK_M, BLOCK_N))
        inside = (tl.arange(0, BLOCK_M) < len_q - i0)[None, :]
        keep = kept(b, h, i, j, inside, len_q, len_k, m, KEEP, TAIL) if MASKED else None
        if bias is not None and MASKED:
            add = load_bias(bias, i, j, i0, j0, len_q, len_k, bias_strides, True, WIDE)
        if bias is not None and not MASKED and PAIRED:
            add = unpaired(add, bias.dtype.element_ty, BLOCK_M, BLOCK_N)
        p, _, ds, keep = grad_scores(
            s, dp, i, j, i0, j0, row_lse[None, :], row_low[None, :], row_delta[None, :], alive, keep, len_q, len_k,
            qk_scale, cap, add, slope, survivor_weight, low is not None, UNIT, SOFTCAP, MASKED,
            t // n >= n_full if MASKED and not TAIL else None,
        )  # fmt: skip
        if CAREFUL:
            do, found = cleaned(do, keep)
            q, found_q = cleaned(q, keep)
            odd = tl.maximum(odd, tl.maximum(found, found_q))
        if NEED_DV:
            dv = dot(p.to(do.dtype), do, dv, UPCAST, PRECISION)
        if NEED_DK:
            dk = dot(ds.to(q.dtype), q, dk, UPCAST, PRECISION)
    return dk, dv, odd


@triton.jit
def odd_queries(
    j, k_base, v_base, q_base, do_base, qs, ks, vs, dos, lse, low, delta, at, b, h, bh, i0, len_q, len_k,
    qk_scale, cap, bias, bias_strides, slope, rng, threshold, survivor_weight, m,
    KEEP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(D,) and (Dv,): what queries and dO that are not finite among i0 .. i0 + BLOCK_M add to dK and dV of key j."""
    i = i0 + tl.arange(0, BLOCK_M)[None, :]
    row_lse, row_low, row_delta = row_stats(lse, low, delta, at, i0, len_q, BLOCK_M, UNIT, True)
    q = load_tile(q_base, i0, len_q, qs, BLOCK_M, D, BLOCK_D, True, WIDE)
    do = load_tile(do_base, i0, len_q, dos, BLOCK_M, DV, BLOCK_DV, True, WIDE)
    s = tl.sum(q.to(tl.float32) * load_row(k_base, j, len_k, ks, D, BLOCK_D), 1)[None, :]  # (1, M)
    dp = tl.sum(do.to(tl.float32) * load_row(v_base, j, len_k, vs, DV, BLOCK_DV), 1)[None, :]
    alive = None
    if rng is not None:  # the word of key j among those of its group of four
        four = tl.trans(survives(rng, threshold, bh, i0, j // 4 * 4, BLOCK_M, 4))  # (4, M)
        alive = tl.max(tl.where(four & (tl.arange(0, 4) == j % 4)[:, None], 1, 0), 0)[None, :] > 0
    at_j = j + tl.zeros([1, 1], tl.int32)
    add = bias
    if bias is not None:
        add = load_bias(bias, i, at_j, i0, j, len_q, len_k, bias_strides, True, WIDE)
    p, _, ds, keep = grad_scores(
        s, dp, i, at_j, i0, j, row_lse[None, :], row_low[None, :], row_delta[None, :], alive,
        kept(b, h, i, at_j, i < len_q, len_q, len_k, m, KEEP), len_q, len_k, qk_scale, cap, add, slope,
        survivor_weight, low is not None, UNIT, SOFTCAP, True,
    )  # fmt: skip
    return odd_sum(ds, keep, q), odd_sum(p, keep, do)


@triton.jit
def add_odd_heads(
    j, k_base, v_base, q, do, qs, ks, vs, dos, lse, low, delta, stats, first_q, b, kv_head, tile, j0, len_q, len_k,
    heads, group, qk_scale, cap, bias, bias_strides, alibi, alibi_strides, rng, threshold, survivor_weight, lists,
    list_strides, m, KEEP: tl.constexpr, REACH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """``odd_queries`` over all that key j sees."""
    dk = tl.zeros([BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_DV], tl.float32)
    for g in tl.range(0, group, num_stages=1):
        h = kv_head * group + g
        q_base, do_base = head_base(q, qs, b, h, first_q), head_base(do, dos, b, h, first_q)
        at = offset64(b, stats[0]) + offset64(h, stats[1]) + first_q
        slope, bias_base = None, None
        if bias is not None:
            bias_base = bias + offset64(b, bias_strides[0]) + offset64(h, bias_strides[1])
        if alibi is not None:
            slope = head_slope(alibi, alibi_strides, b, h, qk_scale, UNIT)
        where, n_full, n_all, full, first = visits(
            b, h, tile, j0, len_k, len_q, len_q, len_k, lists, list_strides, m, REACH, BLOCK_N, BLOCK_M,
            bias is not None,
        )  # fmt: skip
        for t in tl.range(0, n_all * (BLOCK_M // 16), num_stages=1):
            i0 = visited16(t, lists, where, n_full, full, first, BLOCK_M)
            more_k, more_v = odd_queries(
                j, k_base, v_base, q_base, do_base, qs, ks, vs, dos, lse, low, delta, at, b, h, b * heads + h, i0,
                len_q, len_k, qk_scale, cap, bias_base, bias_strides, slope, rng, threshold, survivor_weight, m, KEEP,
                D, DV, 16, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE,
            )  # fmt: skip
            dk += more_k
            dv += more_v
    return dk, dv


@triton.jit
def dkdv_tile(
    tile, kv_head, b, q, k, v, do, lse, low, delta, dk, dv, qs, ks, vs, dos, dks, dvs, stats, first_q, first_k, len_q,
    len_k, heads, group, scale, qk_scale, cap, bias, bias_strides, alibi, alibi_strides, rng, threshold,
    survivor_weight, lists, list_strides, m, KEEP: tl.constexpr, REACH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, PAIRED: tl.constexpr,
    EVEN: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """dK (N, D) and dV (N, Dv) of one tile of keys: the sum over the query heads that share it and their query tiles.

    EVEN: no tile passes an end; then one loop takes the masked tiles as well, so that no second one waits for its first
    tiles. Returns whether one came out not finite.
    """
    NEED_DK: tl.constexpr = dk is not None
    NEED_DV: tl.constexpr = dv is not None
    EDGE: tl.constexpr = edge(BLOCK_M, bias, 16)
    AT_ONCE: tl.constexpr = EVEN or at_once(CAREFUL, EDGE, BLOCK_M)
    j0 = tile * BLOCK_N
    k_base, v_base = head_base(k, ks, b, kv_head, first_k), head_base(v, vs, b, kv_head, first_k)
    k_tile = load_tile(k_base, j0, len_k, ks, BLOCK_N, D, BLOCK_D, not EVEN, WIDE)
    v_tile = load_tile(v_base, j0, len_k, vs, BLOCK_N, DV, BLOCK_DV, not EVEN, WIDE)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    odd = 0
    for g in range(0, group):
        h = kv_head * group + g
        bh = b * heads + h
        q_base, do_base = head_base(q, qs, b, h, first_q), head_base(do, dos, b, h, first_q)
        at = offset64(b, stats[0]) + offset64(h, stats[1]) + first_q
        slope, bias_base = None, None
        if bias is not None:
            bias_base = bias + offset64(b, bias_strides[0]) + offset64(h, bias_strides[1])
        if alibi is not None:
            slope = head_slope(alibi, alibi_strides, b, h, qk_scale, UNIT)
        where, n_full, n_all, full, first = visits(
            b, h, tile, j0, len_k, len_q, len_q, len_k, lists, list_strides, m, REACH, BLOCK_N, BLOCK_M,
            bias is not None,
        )  # fmt: skip
        if not AT_ONCE:
            acc_k, acc_v, odd = add_rows(
                acc_k, acc_v, odd, k_tile, v_tile, q_base, do_base, qs, dos, lse, low, delta, at, b, h, bh, j0,
                0, n_full, lists, where, n_full, full, first, len_q, len_k,
                qk_scale, cap, bias_base, bias_strides, slope, rng, threshold, survivor_weight, m, KEEP, D, DV, BLOCK_M,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, CAREFUL, CAREFUL, CAREFUL,
                NEED_DK, NEED_DV, PAIRED,
            )  # fmt: skip
        acc_k, acc_v, odd = add_rows(
            acc_k, acc_v, odd, k_tile, v_tile, q_base, do_base, qs, dos, lse, low, delta, at, b, h, bh, j0,
            0 if AT_ONCE else n_full, n_all, lists, where, n_full, full, first, len_q, len_k,
            qk_scale, cap, bias_base, bias_strides, slope, rng, threshold, survivor_weight, m, KEEP, D, DV, BLOCK_M,
            EDGE, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, True,
            not EVEN, CAREFUL, NEED_DK, NEED_DV, PAIRED,
        )  # fmt: skip
    found = 0
    if not CAREFUL and (KEEP is not None or bias is not None):
        inside = j0 + tl.arange(0, BLOCK_N) < len_k
        found = any_odd(odd_rows(acc_k) + odd_rows(acc_v), inside)
    if NEED_DK:
        dk = head_base(dk, dks, b, kv_head, first_k)
        store_tile(dk, j0, len_k, dks, scaled(acc_k, scale), BLOCK_N, D, BLOCK_D, WIDE)
    if NEED_DV:
        dv = head_base(dv, dvs, b, kv_head, first_k)
        store_tile(dv, j0, len_k, dvs, acc_v * survivor_weight, BLOCK_N, DV, BLOCK_DV, WIDE)
    if CAREFUL:  # noqa: SIM102 - the outer one is decided when compiling
        if odd > 0:
            tl.debug_barrier()  # the rows are stored
            for row in tl.range(0, tl.minimum(BLOCK_N, len_k - j0), num_stages=1):
                more_k, more_v = add_odd_heads(
                    j0 + row, k_base, v_base, q, do, qs, ks, vs, dos, lse, low, delta, stats, first_q, b, kv_head, tile,
                    j0, len_q, len_k, heads, group, qk_scale, cap, bias, bias_strides, alibi, alibi_strides, rng,
                    threshold, survivor_weight, lists, list_strides, m, KEEP, REACH, D, DV, BLOCK_M, BLOCK_N, BLOCK_D,
                    BLOCK_DV, UNIT, SOFTCAP, WIDE,
                )  # fmt: skip
                if NEED_DK:
                    add_to_row(dk, j0 + row, dks, scaled(more_k, scale), D, BLOCK_D)
                if NEED_DV:
                    add_to_row(dv, j0 + row, dvs, more_v, DV, BLOCK_DV)
    return found


@triton.jit(do_not_specialize=["len_q", "len_k", "tiles", "pairs", "section", "threshold"])
def dkdv_kernel(
    q, k, v, do, lse, low, delta, dk, dv, odd, qs, ks, vs, dos, dks, dvs, stats, cu_q, cu_k, len_q, len_k, tiles, heads,
    group, pairs, section, scale, qk_scale, cap, bias, bias_strides, alibi, alibi_strides, rng, threshold,
    survivor_weight, lists, list_strides, m, KEEP: tl.constexpr, REACH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr, BY_HEAD: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    PAIRED: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a (key tile, key/value head, batch entry). odd (b, kv head, tile): which came out not finite."""
    follow(PDL)
    vs, dos = like(vs, ks), like(dos, qs)
    tile, kv_head, b = unflatten(tl.program_id(0), tiles, heads // group, pairs, section, False, BY_HEAD)
    first_q, len_q = sequence(b, cu_q, len_q)
    first_k, len_k = sequence(b, cu_k, len_k)
    if tile * BLOCK_N >= len_k:
        return
    found = dkdv_tile(
        tile, kv_head, b, q, k, v, do, lse, low, delta, dk, dv, qs, ks, vs, dos, dks, dvs, stats, first_q, first_k,
        len_q, len_k, heads, group, scale, qk_scale, cap, bias, bias_strides, alibi, alibi_strides, rng, threshold,
        survivor_weight, lists, list_strides, m, KEEP, REACH, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT,
        SOFTCAP, WIDE, UPCAST, PRECISION, PAIRED, EVEN, False,
    )  # fmt: skip
    if odd is not None:
        tl.store(odd + (b * (heads // group) + kv_head) * tiles + tile, found)


# --- dQ -------------------------------------------------------------------------------------------


@triton.jit
def add_cols(
    dq, dalibi, odd, q, do, k_base, v_base, ks, vs, row_lse, row_low, row_delta, b, h, bh, i0, t0, t1, lists, where,
    n_full, full, first, len_q, len_k, qk_scale, cap, bias, bias_strides, dbias, dbias_strides, slope, rng, threshold,
    survivor_weight, m, has_low: tl.constexpr, KEEP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, TAIL: tl.constexpr, CAREFUL: tl.constexpr, NEED_DQ: tl.constexpr, NEED_DALIBI: tl.constexpr,
):  # fmt: skip
    """What the keys of tiles t0 .. t1 add to dQ and to the gradient of the slope; and their tiles of dbias."""
    i = i0 + tl.arange(0, BLOCK_M)[:, None]
    n: tl.constexpr = TILE // BLOCK_N
    ahead = first  # of a list
    for t in tl.range(t0 * n, t1 * n, num_stages=1 if CAREFUL else None):
        j0 = visited(t // n, lists, ahead, n_full, full, first, CAREFUL or not MASKED, MASKED) * TILE + t % n * BLOCK_N
        ahead = listed((t + 1) // n, t1, lists, where)
        j = j0 + tl.arange(0, BLOCK_N)[None, :]
        k = load_tile(k_base, j0, len_k, ks, BLOCK_N, D, BLOCK_D, TAIL, WIDE)
        v = load_tile(v_base, j0, len_k, vs, BLOCK_N, DV, BLOCK_DV, TAIL, WIDE)
        s = dot(q, tl.trans(k), None, UPCAST, PRECISION)  # (M, N)
        dp = dot(do, tl.trans(v), None, UPCAST, PRECISION)  # (M, N)
        add = bias
        if bias is not None:
            add = load_bias(bias, i, j, i0, j0, len_q, len_k, bias_strides, MASKED, WIDE)
        alive = None
        if rng is not None:
            alive = survives(rng, threshold, bh, i0, j0, BLOCK_M, BLOCK_N)
        keep = kept(b, h, i, j, j < len_k, len_q, len_k, m, KEEP, TAIL) if MASKED else None
        _, ds_bias, ds, keep = grad_scores(
            s, dp, i, j, i0, j0, row_lse[:, None], row_low[:, None], row_delta[:, None], alive, keep, len_q, len_k,
            qk_scale, cap, add, slope, survivor_weight, has_low, UNIT, SOFTCAP,
            MASKED or not NEED_DQ,  # without dQ nothing tells of NaN
            t // n >= n_full if MASKED and not TAIL and NEED_DQ else None,
        )  # fmt: skip
        if dbias is not None:
            at = pair_ptrs(dbias, i, j, i0, j0, dbias_strides, WIDE)
            inside = (i < len_q) & (j < len_k) if MASKED else None
            tl.store(at, ds_bias.to(dbias.dtype.element_ty), mask=inside)
        if NEED_DALIBI:
            dalibi -= tl.sum(ds_bias * distance(i, j, i0, j0, len_q, len_k), 1)
        if NEED_DQ:
            if CAREFUL:
                k, found = cleaned(k, keep)
                odd = tl.maximum(odd, found)
            dq = dot(ds.to(k.dtype), k, dq, UPCAST, PRECISION)
    return dq, dalibi, odd


@triton.jit
def odd_keys(
    i, q_base, do_base, k_base, v_base, qs, ks, vs, dos, row_lse, row_low, row_delta, b, h, bh, j0, len_q, len_k,
    qk_scale, cap, bias, bias_strides, slope, rng, threshold, survivor_weight, m,
    has_low: tl.constexpr, KEEP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(D,): what keys that are not finite among j0 .. j0 + BLOCK_N add to dQ of row i."""
    j = j0 + tl.arange(0, BLOCK_N)[None, :]
    k = load_tile(k_base, j0, len_k, ks, BLOCK_N, D, BLOCK_D, True, WIDE)
    v = load_tile(v_base, j0, len_k, vs, BLOCK_N, DV, BLOCK_DV, True, WIDE)
    s = tl.sum(k.to(tl.float32) * load_row(q_base, i, len_q, qs, D, BLOCK_D), 1)[None, :]  # (1, N)
    dp = tl.sum(v.to(tl.float32) * load_row(do_base, i, len_q, dos, DV, BLOCK_DV), 1)[None, :]
    alive = None
    if rng is not None:
        alive = survives(rng, threshold, bh, i, j0, 1, BLOCK_N)
    at_i = i + tl.zeros([1, 1], tl.int32)
    add = bias
    if bias is not None:
        add = load_bias(bias, at_i, j, i, j0, len_q, len_k, bias_strides, True, WIDE)
    _, _, ds, keep = grad_scores(
        s, dp, at_i, j, i, j0, row_lse, row_low, row_delta, alive,
        kept(b, h, at_i, j, j < len_k, len_q, len_k, m, KEEP), len_q, len_k, qk_scale, cap, add, slope,
        survivor_weight, has_low, UNIT, SOFTCAP, True,
    )  # fmt: skip
    return odd_sum(ds, keep, k)


@triton.jit
def delta_rows(
    do, o, dlse, delta, lse, os, dlse_strides, at, b, h, tile, tiles, i0, first_q, len_q, heads, sinks, dsinks,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta of a tile of rows from its tile of dO, which is also stored. The sink is a key whose value is 0, so its dP
    is 0: dsinks (b, h, tile)."""
    rows = i0 + tl.arange(0, BLOCK_M)
    inside = rows < len_q
    x = load_tile(head_base(o, os, b, h, first_q), i0, len_q, os, BLOCK_M, DV, BLOCK_DV, True, WIDE)
    d = tl.sum(x.to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        from_lse = offset64(b, dlse_strides[0]) + offset64(h, dlse_strides[1]) + offset64(first_q, dlse_strides[2])
        d -= tl.load(dlse + from_lse + rows.to(tl.int64) * dlse_strides[2], mask=inside, other=0.0)
    tl.store(delta + at + rows, d, mask=inside)
    if dsinks is not None:
        natural, _ = lse_rows(lse, None, at, i0, len_q, BLOCK_M, NATURAL, True)
        ds = -tl.exp2((tl.load(sinks + h).to(tl.float32) - natural) * LOG2E) * d
        tl.store(dsinks + offset64(b * heads + h, tiles) + tile, tl.sum(tl.where(inside, ds, 0.0), 0))
    return d


@triton.jit
def dq_tile(
    tile, h, b, q, k, v, do, lse, low, o, dlse, delta, dq, qs, ks, vs, dos, os, dlse_strides, dqs, stats, first_q,
    first_k, len_q, len_k, tiles, heads, group, scale, qk_scale, cap, bias, bias_strides, dbias, dbias_strides, alibi,
    alibi_strides, dalibi, sinks, dsinks, rng, threshold, survivor_weight, lists, list_strides, m, KEEP: tl.constexpr,
    REACH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """dQ (M, D) of one tile of queries; dalibi (b, h, tile). Returns 1 if dQ came out not finite.

    o None: delta is stored already.
    """
    i0 = tile * BLOCK_M
    bh = b * heads + h
    k_base, v_base = head_base(k, ks, b, h // group, first_k), head_base(v, vs, b, h // group, first_k)
    slope = None
    if bias is not None:
        bias += offset64(b, bias_strides[0]) + offset64(h, bias_strides[1])
    if dbias is not None:
        dbias += offset64(b, dbias_strides[0]) + offset64(h, dbias_strides[1])
    if alibi is not None:
        slope = head_slope(alibi, alibi_strides, b, h, qk_scale, UNIT)
    where, n_full, n_all, full, first = visits(
        b, h, tile, i0, len_q, len_k, len_q, len_k, lists, list_strides, m, REACH, BLOCK_M, BLOCK_N, bias is not None
    )
    q_base, do_base = head_base(q, qs, b, h, first_q), head_base(do, dos, b, h, first_q)
    q_tile = load_tile(q_base, i0, len_q, qs, BLOCK_M, D, BLOCK_D, not EVEN, WIDE)
    do_tile = load_tile(do_base, i0, len_q, dos, BLOCK_M, DV, BLOCK_DV, not EVEN, WIDE)
    at = offset64(b, stats[0]) + offset64(h, stats[1]) + first_q
    row_lse, row_low = lse_rows(lse, low, at, i0, len_q, BLOCK_M, UNIT, True)
    if o is None:
        row_delta = load_stat(delta, at, i0, len_q, BLOCK_M, True)
    else:
        row_delta = delta_rows(
            do_tile, o, dlse, delta, lse, os, dlse_strides, at, b, h, tile, tiles, i0, first_q, len_q, heads, sinks,
            dsinks, DV, BLOCK_M, BLOCK_DV, WIDE,
        )  # fmt: skip
    if dq is None and dbias is None and dalibi is None:
        return 0
    EDGE: tl.constexpr = edge(BLOCK_N, bias, 32)
    AT_ONCE: tl.constexpr = EVEN or at_once(CAREFUL, EDGE, BLOCK_N)
    edge_first = first if AT_ONCE else first_masked(n_full, n_all, lists, where, first)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    da = tl.zeros([BLOCK_M], tl.float32)
    odd = 0
    if not AT_ONCE:
        acc, da, odd = add_cols(
            acc, da, odd, q_tile, do_tile, k_base, v_base, ks, vs, row_lse, row_low, row_delta, b, h, bh, i0,
            0, n_full, lists, where, n_full, full, first, len_q, len_k, qk_scale, cap, bias, bias_strides, dbias,
            dbias_strides, slope, rng, threshold, survivor_weight, m, low is not None, KEEP, D, DV, BLOCK_N, BLOCK_M,
            BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, CAREFUL, CAREFUL, CAREFUL,
            dq is not None, dalibi is not None,
        )  # fmt: skip
    acc, da, odd = add_cols(
        acc, da, odd, q_tile, do_tile, k_base, v_base, ks, vs, row_lse, row_low, row_delta, b, h, bh, i0,
        0 if AT_ONCE else n_full, n_all, lists, where, n_full, full, edge_first, len_q, len_k, qk_scale, cap,
        bias, bias_strides, dbias, dbias_strides, slope, rng, threshold, survivor_weight, m, low is not None, KEEP, D,
        DV, BLOCK_N, BLOCK_M, EDGE, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, True,
        not EVEN, CAREFUL, dq is not None, dalibi is not None,
    )  # fmt: skip
    inside = i0 + tl.arange(0, BLOCK_M) < len_q
    found = 0
    if not CAREFUL and (KEEP is not None or bias is not None):
        found = any_odd(odd_rows(acc), inside)
    if dq is not None:
        dq = head_base(dq, dqs, b, h, first_q)
        store_tile(dq, i0, len_q, dqs, scaled(acc, scale), BLOCK_M, D, BLOCK_D, WIDE)
    if dalibi is not None:
        tl.store(dalibi + offset64(bh, tiles) + tile, tl.sum(tl.where(inside, da, 0.0), 0))
    if CAREFUL and dq is not None:  # noqa: SIM102 - the outer one is decided when compiling
        if odd > 0:
            tl.debug_barrier()  # the rows are stored
            rows = tl.arange(0, BLOCK_M)
            for row in tl.range(0, tl.minimum(BLOCK_M, len_q - i0), num_stages=1):
                extra = tl.zeros([BLOCK_D], tl.float32)
                for t in tl.range(0, n_all * (BLOCK_N // 16), num_stages=1):
                    j0 = visited16(t, lists, where, n_full, full, first, BLOCK_N)
                    extra += odd_keys(
                        i0 + row, q_base, do_base, k_base, v_base, qs, ks, vs, dos, pick(row_lse, rows, row),
                        pick(row_low, rows, row), pick(row_delta, rows, row), b, h, bh, j0, len_q, len_k, qk_scale, cap,
                        bias, bias_strides, slope, rng, threshold, survivor_weight, m, low is not None, KEEP, D, DV, 16,
                        BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE,
                    )  # fmt: skip
                add_to_row(dq, i0 + row, dqs, scaled(extra, scale), D, BLOCK_D)
    return found


@triton.jit(do_not_specialize=["len_q", "len_k", "tiles", "pairs", "section", "threshold"])
def dq_kernel(
    q, k, v, do, lse, low, o, dlse, delta, dq, odd, qs, ks, vs, dos, os, dlse_strides, dqs, stats, cu_q, cu_k, len_q,
    len_k, tiles, heads, group, pairs, section, scale, qk_scale, cap, bias, bias_strides, dbias, dbias_strides, alibi,
    alibi_strides, dalibi, sinks, dsinks, rng, threshold, survivor_weight, lists, list_strides, m, KEEP: tl.constexpr,
    REACH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, REVERSE: tl.constexpr,
    BY_HEAD: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a (query tile, query head, batch entry). odd (b, h, tile): which came out not finite."""
    follow(PDL)
    vs, dos = like(vs, ks), like(dos, qs)
    tile, h, b = unflatten(tl.program_id(0), tiles, heads, pairs, section, REVERSE, BY_HEAD)
    first_q, len_q = sequence(b, cu_q, len_q)
    first_k, len_k = sequence(b, cu_k, len_k)
    if tile * BLOCK_M >= len_q:
        return
    found = dq_tile(
        tile, h, b, q, k, v, do, lse, low, o, dlse, delta, dq, qs, ks, vs, dos, os, dlse_strides, dqs, stats, first_q,
        first_k, len_q, len_k, tiles, heads, group, scale, qk_scale, cap, bias, bias_strides, dbias, dbias_strides,
        alibi, alibi_strides, dalibi, sinks, dsinks, rng, threshold, survivor_weight, lists, list_strides, m, KEEP,
        REACH, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, EVEN, False,
    )  # fmt: skip
    if odd is not None:
        tl.store(odd + (b * heads + h) * tiles + tile, found)


# --- the gradient of a broadcast bias --------------------------------------------------------------


@triton.jit
def shared_entry(n, b0, h0, n_b, n_h, heads, times):
    """(b, h) of the n-th of those that share a bias with (b0, h0), the last of them beyond the end."""
    n = tl.minimum(n, times - 1)
    each = heads // n_h
    return tl.where(n_b == 1, n // each, b0), tl.where(n_h == 1, n % each, h0)


@triton.jit
def bias_grad(
    q, k, v, do, lse, low, delta, qs, ks, vs, dos, stats, first_q, first_k, len_q, len_k, b, h, kv_head, heads, i, j,
    i0, j0, keep, qk_scale, cap, bias, rng, threshold, survivor_weight,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a tile of the pairs of (b, h) adds to dbias: dS before the softcap, (M, N)."""
    q_tile = load_tile(head_base(q, qs, b, h, first_q), i0, len_q, qs, BLOCK_M, D, BLOCK_D, MASKED, WIDE)
    k_tile = load_tile(head_base(k, ks, b, kv_head, first_k), j0, len_k, ks, BLOCK_N, D, BLOCK_D, MASKED, WIDE)
    s = dot(q_tile, tl.trans(k_tile), None, UPCAST, PRECISION)
    do_tile = load_tile(head_base(do, dos, b, h, first_q), i0, len_q, dos, BLOCK_M, DV, BLOCK_DV, MASKED, WIDE)
    v_tile = load_tile(head_base(v, vs, b, kv_head, first_k), j0, len_k, vs, BLOCK_N, DV, BLOCK_DV, MASKED, WIDE)
    dp = dot(do_tile, tl.trans(v_tile), None, UPCAST, PRECISION)
    at = offset64(b, stats[0]) + offset64(h, stats[1]) + first_q
    row_lse, row_low, row_delta = row_stats(lse, low, delta, at, i0, len_q, BLOCK_M, UNIT, MASKED)
    alive = None
    if rng is not None:
        alive = survives(rng, threshold, b * heads + h, i0, j0, BLOCK_M, BLOCK_N)
    _, ds, _, _ = grad_scores(
        s, dp, i, j, i0, j0, row_lse[:, None], row_low[:, None], row_delta[:, None], alive, keep, len_q, len_k,
        qk_scale, cap, bias, None, survivor_weight, low is not None, UNIT, SOFTCAP, MASKED,
    )  # fmt: skip
    return ds


@triton.jit
def masked_bias_grad(
    q, k, v, do, lse, low, delta, qs, ks, vs, dos, stats, cu_q, cu_k, max_q, max_k, b0, h0, n_b, n_h, heads, group,
    times, i0, j0, qk_scale, cap, add, rng, threshold, survivor_weight, m,
    KEEP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum of ``bias_grad`` over all that share the tile of the bias, 0 where a pair is hidden."""
    i = i0 + tl.arange(0, BLOCK_M)[:, None]
    j = j0 + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in tl.range(0, times):
        b, h = shared_entry(n, b0, h0, n_b, n_h, heads, times)
        first_q, len_q = sequence(b, cu_q, max_q)
        first_k, len_k = sequence(b, cu_k, max_k)
        keep = kept(b, h, i, j, (i < len_q) & (j < len_k), len_q, len_k, m, KEEP)
        # Under a condition nothing is loaded ahead, for which there are no registers at D = 256.
        if (KEEP is None and BLOCK_D <= 128) or tl.max(tl.max(tl.where(keep, 1, 0), 1), 0) > 0:
            acc += bias_grad(
                q, k, v, do, lse, low, delta, qs, ks, vs, dos, stats, first_q, first_k, len_q, len_k, b, h,
                h // group, heads, i, j, i0, j0, keep, qk_scale, cap, add, rng, threshold, survivor_weight, D, DV,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, True,
            )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["len_q", "len_k", "max_q", "max_k", "rows", "cols", "batch", "n_b", "n_h"])
def dbias_kernel(
    q, k, v, do, lse, low, delta, qs, ks, vs, dos, stats, cu_q, cu_k, max_q, max_k, rows, cols, heads, group, batch,
    qk_scale, cap, bias, bias_strides, dbias, n_b, n_h, rng, threshold, survivor_weight, m,
    KEEP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of dbias (n_b, n_h, max_q or rows, max_k or cols): summed over the batch and heads that share it, and
    over the tile's rows or columns where those are broadcast; the rest of that sum is PyTorch's."""
    follow(PDL)
    vs, dos = like(vs, ks), like(dos, qs)
    pid = tl.program_id(0)
    col, row, slot = pid % cols, (pid // cols) % rows, pid // cols // rows
    b0, h0 = slot // n_h, slot % n_h
    i0, j0 = row * BLOCK_M, col * BLOCK_N
    i = i0 + tl.arange(0, BLOCK_M)[:, None]
    j = j0 + tl.arange(0, BLOCK_N)[None, :]
    base = bias + offset64(b0, bias_strides[0]) + offset64(h0, bias_strides[1])  # strides are 0 where it is shared
    add = load_bias(base, i, j, i0, j0, max_q, max_k, bias_strides, True, WIDE)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    times = (batch // n_b) * (heads // n_h)
    odd = 1
    # Without masks, where all pairs exist: what a bias of -inf hides is 0, unless it is not a number. Then, once more.
    if KEEP is None and cu_q is None:  # noqa: SIM102 - the outer one is decided when compiling
        if (i0 + BLOCK_M <= max_q) & (j0 + BLOCK_N <= max_k):
            for n in tl.range(0, times):
                b, h = shared_entry(n, b0, h0, n_b, n_h, heads, times)
                acc += bias_grad(
                    q, k, v, do, lse, low, delta, qs, ks, vs, dos, stats, 0, 0, max_q, max_k, b, h, h // group, heads,
                    i, j, i0, j0, None, qk_scale, cap, add, rng, threshold, survivor_weight, D, DV, BLOCK_M, BLOCK_N,
                    BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, False,
                )  # fmt: skip
            odd = any_odd(odd_rows(acc), tl.arange(0, BLOCK_M) >= 0)
    if odd > 0:
        acc = masked_bias_grad(
            q, k, v, do, lse, low, delta, qs, ks, vs, dos, stats, cu_q, cu_k, max_q, max_k, b0, h0, n_b, n_h, heads,
            group, times, i0, j0, qk_scale, cap, add, rng, threshold, survivor_weight, m, KEEP, D, DV, BLOCK_M, BLOCK_N,
            BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION,
        )  # fmt: skip
    if SUM_ROWS and SUM_COLS:
        tl.store(dbias + pid, tl.sum(tl.sum(acc, 1), 0))
    elif SUM_ROWS:
        x = j0 + tl.arange(0, BLOCK_N)
        at = (offset64(slot, rows) + row) * max_k + x
        tl.store(dbias + at, tl.sum(acc, 0), mask=x < max_k)
    elif SUM_COLS:
        x = i0 + tl.arange(0, BLOCK_M)
        at = (offset64(slot, max_q) + x) * cols + col
        tl.store(dbias + at, tl.sum(acc, 1), mask=x < max_q)
    else:
        at = (offset64(slot, max_q) + i) * max_k + j
        tl.store(dbias + at, acc.to(dbias.dtype.element_ty), mask=(i < max_q) & (j < max_k))


# --- dQ and the gradient of a bias that is shared ---------------------------------------------------


@triton.jit
def add_shared_cols(
    dqs, q_tiles, do_tiles, k_bases, v_bases, ks, vs, lses, lows, deltas, exist, i0, t0, t1, len_q, len_k, qk_scale,
    bias, bias_strides, dbias, dbias_strides, partial, has_low: tl.constexpr, ENTRIES: tl.constexpr,
    LATER: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the keys of tiles t0 .. t1 add to dQ of each entry, and dbias of these tiles: the sum over the entries.

    partial: a sum of earlier entries with LATER, and where to leave it without LAST; tile by tile.
    """
    i = i0 + tl.arange(0, BLOCK_M)[:, None]
    own = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for t in tl.range(t0, t1):
        j0 = t * BLOCK_N
        j = j0 + tl.arange(0, BLOCK_N)[None, :]
        add = load_bias(bias, i, j, i0, j0, len_q, len_k, bias_strides, MASKED, WIDE)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if LATER:
            total = tl.load(partial + offset64(t, BLOCK_M * BLOCK_N) + own)
        sums: tl.tuple = ()
        for n in tl.static_range(ENTRIES):
            k = load_tile(k_bases[n], j0, len_k, ks, BLOCK_N, D, BLOCK_D, MASKED, WIDE)
            v = load_tile(v_bases[n], j0, len_k, vs, BLOCK_N, DV, BLOCK_DV, MASKED, WIDE)
            s = dot(q_tiles[n], tl.trans(k), None, UPCAST, PRECISION)  # (M, N)
            dp = dot(do_tiles[n], tl.trans(v), None, UPCAST, PRECISION)  # (M, N)
            keep = j < len_k if MASKED else None
            _, ds, _, _ = grad_scores(
                s, dp, i, j, i0, j0, lses[n][:, None], lows[n][:, None], deltas[n][:, None], None, keep, len_q, len_k,
                qk_scale, 0.0, add, None, 1.0, has_low, UNIT, False, MASKED,
            )  # fmt: skip
            total += tl.where(exist[n], ds, 0.0)
            if LATER and n == 0:  # never so: but what products wait for is loaded ahead, and without a change of layout
                ds = tl.where(total == float("nan"), 0.0, ds)
            sums += (dot(ds.to(k.dtype), k, dqs[n], UPCAST, PRECISION),)
        dqs = sums
        if LAST:
            inside = (i < len_q) & (j < len_k) if MASKED else None
            to = pair_ptrs(dbias, i, j, i0, j0, dbias_strides, WIDE)
            tl.store(to, total.to(dbias.dtype.element_ty), mask=inside)
        else:
            tl.store(partial + offset64(t, BLOCK_M * BLOCK_N) + own, total)
    return dqs


@triton.jit(do_not_specialize=["len_q", "len_k", "tiles", "first_tile", "first_entry", "times", "n_b", "n_h"])
def dq_dbias_kernel(
    q, k, v, do, lse, low, delta, dq, dbias, partial, odd, qs, ks, vs, dos, dqs, stats, len_q, len_k, tiles, first_tile,
    first_entry, times, heads, group, scale, qk_scale, bias, bias_strides, dbias_strides, n_b, n_h,
    ENTRIES: tl.constexpr, LATER: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a query tile of a bias (n_b, n_h, len_q, len_k) without broadcast rows or columns: dQ of so many of
    the (b, h) that share it, side by side, and what they add to dbias. odd (b, h, tile): as in ``dq_kernel``."""
    follow(PDL)
    vs, dos = like(vs, ks), like(dos, qs)
    pid = tl.program_id(0)
    slot, tile = (first_tile + pid) // tiles, (first_tile + pid) % tiles
    b0, h0 = slot // n_h, slot % n_h
    i0 = tile * BLOCK_M
    bias += offset64(b0, bias_strides[0]) + offset64(h0, bias_strides[1])
    dbias += offset64(b0, dbias_strides[0]) + offset64(h0, dbias_strides[1])
    if partial is not None:
        partial += offset64(pid, BLOCK_M * BLOCK_N) * tl.cdiv(len_k, BLOCK_N)
    none: tl.tuple = ()
    accs, q_tiles, do_tiles, k_bases, v_bases, exist = none, none, none, none, none, none
    lses, lows, deltas = none, none, none
    for n in tl.static_range(ENTRIES):
        b, h = shared_entry(first_entry + n, b0, h0, n_b, n_h, heads, times)
        k_bases += (head_base(k, ks, b, h // group, 0),)
        v_bases += (head_base(v, vs, b, h // group, 0),)
        at = offset64(b, stats[0]) + offset64(h, stats[1])
        row_lse, row_low = lse_rows(lse, low, at, i0, len_q, BLOCK_M, UNIT, True)
        lses += (row_lse,)
        lows += (row_low,)
        deltas += (load_stat(delta, at, i0, len_q, BLOCK_M, True),)
        q_tiles += (load_tile(head_base(q, qs, b, h, 0), i0, len_q, qs, BLOCK_M, D, BLOCK_D, True, WIDE),)
        do_tiles += (load_tile(head_base(do, dos, b, h, 0), i0, len_q, dos, BLOCK_M, DV, BLOCK_DV, True, WIDE),)
        accs += (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
        exist += (first_entry + n < times,)
    n_all = tl.cdiv(len_k, BLOCK_N)
    n_full = tl.where(i0 + BLOCK_M <= len_q, len_k // BLOCK_N, 0)
    accs = add_shared_cols(
        accs, q_tiles, do_tiles, k_bases, v_bases, ks, vs, lses, lows, deltas, exist, i0, 0, n_full, len_q, len_k,
        qk_scale, bias, bias_strides, dbias, dbias_strides, partial, low is not None, ENTRIES, LATER, LAST, D, DV,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, WIDE, UPCAST, PRECISION, False,
    )  # fmt: skip
    accs = add_shared_cols(
        accs, q_tiles, do_tiles, k_bases, v_bases, ks, vs, lses, lows, deltas, exist, i0, n_full, n_all, len_q, len_k,
        qk_scale, bias, bias_strides, dbias, dbias_strides, partial, low is not None, ENTRIES, LATER, LAST, D, DV,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, WIDE, UPCAST, PRECISION, True,
    )  # fmt: skip
    for n in tl.static_range(ENTRIES):  # an entry beyond the end is the last again, with the same dQ
        b, h = shared_entry(first_entry + n, b0, h0, n_b, n_h, heads, times)
        x = scaled(accs[n], scale)
        store_tile(head_base(dq, dqs, b, h, 0), i0, len_q, dqs, x, BLOCK_M, D, BLOCK_D, WIDE)
        found = any_odd(odd_rows(accs[n]), i0 + tl.arange(0, BLOCK_M) < len_q)
        tl.store(odd + (b * heads + h) * tiles + tile, found)


@triton.jit(do_not_specialize=["len_q", "len_k", "tiles", "times", "n_b", "n_h"])
def dbias_careful_kernel(
    q, k, v, do, lse, low, delta, dbias, odd, qs, ks, vs, dos, stats, len_q, len_k, tiles, times, heads, group,
    qk_scale, bias, bias_strides, dbias_strides, n_b, n_h, TILE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dbias of the query tiles of ``dq_dbias_kernel`` that came out odd in an entry, a program each."""
    follow(PDL)
    vs, dos = like(vs, ks), like(dos, qs)
    slot, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b0, h0 = slot // n_h, slot % n_h
    found = 0
    for n in tl.range(0, times, num_stages=1):
        b, h = shared_entry(n, b0, h0, n_b, n_h, heads, times)
        found = tl.maximum(found, tl.load(odd + (b * heads + h) * tiles + tile).to(tl.int32))
    if found > 0:
        bias += offset64(b0, bias_strides[0]) + offset64(h0, bias_strides[1])
        dbias += offset64(b0, dbias_strides[0]) + offset64(h0, dbias_strides[1])
        for i0 in tl.range(tile * TILE, tl.minimum((tile + 1) * TILE, len_q), BLOCK_M, num_stages=1):
            for j0 in tl.range(0, len_k, BLOCK_N, num_stages=1):
                i = i0 + tl.arange(0, BLOCK_M)[:, None]
                j = j0 + tl.arange(0, BLOCK_N)[None, :]
                total = masked_bias_grad(
                    q, k, v, do, lse, low, delta, qs, ks, vs, dos, stats, None, None, len_q, len_k, b0, h0, n_b, n_h,
                    heads, group, times, i0, j0, qk_scale, 0.0,
                    load_bias(bias, i, j, i0, j0, len_q, len_k, bias_strides, True, WIDE), None, 0, 1.0, None, None, D,
                    DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, False, WIDE, UPCAST, PRECISION,
                )  # fmt: skip
                to = pair_ptrs(dbias, i, j, i0, j0, dbias_strides, WIDE)
                tl.store(to, total.to(dbias.dtype.element_ty), mask=(i < len_q) & (j < len_k))


# --- once more, carefully --------------------------------------------------------------------------


@triton.jit(do_not_specialize=["len_q", "len_k", "tiles_q", "tiles_k", "total_q", "total_k", "threshold"])
def backward_careful_kernel(
    q, k, v, do, lse, low, delta, dq, dk, dv, odd_q, odd_k, qs, ks, vs, dos, dqs, dks, dvs, stats, cu_q, cu_k, len_q,
    len_k, tiles_q, tiles_k, total_q, total_k, heads, group, scale, qk_scale, cap, bias, bias_strides, dbias,
    dbias_strides, alibi, alibi_strides, dalibi, rng, threshold, survivor_weight, lists_q, list_strides_q, lists_k,
    list_strides_k, m, KEEP: tl.constexpr, REACH_K: tl.constexpr, REACH_Q: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, DQ_M: tl.constexpr, DQ_N: tl.constexpr, DKDV_M: tl.constexpr, DKDV_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tiles of dQ, and those of dK and dV, that are odd. Every so-many-th is a program's: neighbours are often odd
    together."""
    follow(PDL)
    vs, dos = like(vs, ks), like(dos, qs)
    first, step = tl.program_id(0), tl.num_programs(0)
    if odd_q is not None:  # noqa: SIM102 - the outer one is decided when compiling
        if flagged(odd_q, first, step, total_q, CHUNK) > 0:
            for at in tl.range(first, total_q, step, num_stages=1):
                tile, h, b = at % tiles_q, at // tiles_q % heads, at // tiles_q // heads
                first_q, own_q = sequence(b, cu_q, len_q)
                first_k, own_k = sequence(b, cu_k, len_k)
                if (tl.load(odd_q + at) > 0) & (tile * DQ_M < own_q):
                    dq_tile(
                        tile, h, b, q, k, v, do, lse, low, None, None, delta, dq, qs, ks, vs, dos, None, None, dqs,
                        stats, first_q, first_k, own_q, own_k, tiles_q, heads, group, scale, qk_scale, cap, bias,
                        bias_strides, dbias, dbias_strides, alibi, alibi_strides, dalibi, None, None, rng, threshold,
                        survivor_weight, lists_q, list_strides_q, m, KEEP, REACH_K, D, DV, DQ_M, DQ_N, BLOCK_D,
                        BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, False, True,
                    )  # fmt: skip
    if odd_k is not None:  # noqa: SIM102
        if flagged(odd_k, first, step, total_k, CHUNK) > 0:
            for at in tl.range(first, total_k, step, num_stages=1):
                tile, pair, kv_heads = at % tiles_k, at // tiles_k, heads // group
                b = pair // kv_heads
                first_q, own_q = sequence(b, cu_q, len_q)
                first_k, own_k = sequence(b, cu_k, len_k)
                if (tl.load(odd_k + at) > 0) & (tile * DKDV_N < own_k):
                    dkdv_tile(
                        tile, pair % kv_heads, b, q, k, v, do, lse, low, delta, dk, dv, qs, ks, vs, dos, dks, dvs,
                        stats, first_q, first_k, own_q, own_k, heads, group, scale, qk_scale, cap, bias, bias_strides,
                        alibi, alibi_strides, rng, threshold, survivor_weight, lists_k, list_strides_k, m, KEEP,
                        REACH_Q, D, DV, DKDV_M, DKDV_N, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION,
                        False, False, True,
                    )  # fmt: skip
