"""The forward kernel: a tile of queries stays, tiles of keys and values stream past, as in ``tiled``.

One program a (query tile, query head, batch entry). Full tiles come first and take no mask arithmetic, then the
masked ones. Masked values are multiplied by a P of 0, which hides everything but NaN and inf; so a tile whose
accumulator ends up not finite is done again by ``forward_careful_kernel``, with a product that is careful (and slow).
What is usual pays one comparison a program for it, and the launch of a kernel that finds nothing to do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from ...dispatch import Output
from ...request import NEG_INF, Request
from .config import CHUNK, FORWARD
from .launch import Problem, decided_by, inputs, on_device
from .primitives import (
    FOLDED,
    INF,
    LN2,
    NATURAL,
    add_to_row,
    any_odd,
    at_once,
    cleaned,
    dot,
    edge,
    exp_natural,
    exp_scores,
    exp_unit,
    flagged,
    follow,
    head_base,
    head_slope,
    kept,
    listed,
    load_bias,
    load_row,
    load_tile,
    odd_rows,
    odd_sum,
    offset64,
    pick,
    scores,
    sequence,
    store_tile,
    survives,
    unflatten,
    visited,
    visited16,
    visits,
)
from .repeat import Work, repeated


@triton.jit
def fold(
    m_i, l_i, acc, odd, q, k_base, v_base, ks, vs, b, h, bh, i0, t0, t1, lists, where, n_full, full, first,
    len_q, len_k, qk_scale, cap, bias, bias_strides, slope, rng, threshold, m,
    KEEP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """``state.fold`` of the keys of tiles t0 .. t1: (m, l, acc); odd is 1 once a value that is kept is not finite."""
    i = i0 + tl.arange(0, BLOCK_M)[:, None]
    n: tl.constexpr = TILE // BLOCK_N
    ahead = listed(t0, t1, lists, where)
    for t in tl.range(t0 * n, t1 * n, num_stages=1 if CAREFUL else None):
        j0 = visited(t // n, lists, ahead, n_full, full, first, CAREFUL or not MASKED, MASKED) * TILE + t % n * BLOCK_N
        ahead = listed((t + 1) // n, t1, lists, where)
        j = j0 + tl.arange(0, BLOCK_N)[None, :]
        k = load_tile(k_base, j0, len_k, ks, BLOCK_N, D, BLOCK_D, MASKED, WIDE)
        s = dot(q, tl.trans(k), None, UPCAST, PRECISION)  # (M, N)
        add = bias
        if bias is not None:
            add = load_bias(bias, i, j, i0, j0, len_q, len_k, bias_strides, MASKED, WIDE)
        s, _ = scores(s, i, j, i0, j0, len_q, len_k, qk_scale, cap, add, slope, SOFTCAP, UNIT, MASKED)
        if MASKED:
            keep = kept(b, h, i, j, j < len_k, len_q, len_k, m, KEEP)
            s = tl.where(keep, s, -INF)

        top = tl.max(s, 1)
        if UNIT == FOLDED:
            top = top * qk_scale
        m_new = tl.maximum(m_i, top)
        base = tl.where(m_new == -INF, 0.0, m_new)  # finite pivot: a row without keys would give -inf - (-inf)
        alpha = exp_unit(m_i - base, UNIT)
        if UNIT == NATURAL and q.dtype != tl.float32:
            p = exp_natural(s, base)
        else:
            p = exp_scores(s, base[:, None], qk_scale, UNIT)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if rng is not None:  # the denominator is that of all keys
            p = tl.where(survives(rng, threshold, bh, i0, j0, BLOCK_M, BLOCK_N), p, 0.0)
        v = load_tile(v_base, j0, len_k, vs, BLOCK_N, DV, BLOCK_DV, MASKED, WIDE)
        if CAREFUL:
            if bias is not None:
                keep = keep & (s != -INF)
            v, found = cleaned(v, keep)
            odd = tl.maximum(odd, found)
        acc = dot(p.to(v.dtype), v, acc, UPCAST, PRECISION)
        m_i = m_new
    return m_i, l_i, acc, odd


@triton.jit
def odd_values(
    i, base, q_base, k_base, v_base, qs, ks, vs, b, h, bh, j0, len_q, len_k, qk_scale, cap, bias, bias_strides, slope,
    rng, threshold, m, KEEP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(Dv,): what values that are not finite among keys j0 .. j0 + BLOCK_N add to row i; base is the row's maximum."""
    j = j0 + tl.arange(0, BLOCK_N)[None, :]
    k = load_tile(k_base, j0, len_k, ks, BLOCK_N, D, BLOCK_D, True, WIDE)
    s = tl.sum(k.to(tl.float32) * load_row(q_base, i, len_q, qs, D, BLOCK_D), 1)[None, :]  # (1, N)
    at = i + tl.zeros([1, 1], tl.int32)
    add = bias
    if bias is not None:
        add = load_bias(bias, at, j, i, j0, len_q, len_k, bias_strides, True, WIDE)
    s, _ = scores(s, at, j, i, j0, len_q, len_k, qk_scale, cap, add, slope, SOFTCAP, UNIT, True)
    keep = kept(b, h, at, j, j < len_k, len_q, len_k, m, KEEP)
    if bias is not None:
        keep = keep & (s != -INF)
    p = tl.where(keep, exp_scores(s, base, qk_scale, UNIT), 0.0)
    if rng is not None:
        p = tl.where(survives(rng, threshold, bh, i, j0, 1, BLOCK_N), p, 0.0)
    v = load_tile(v_base, j0, len_k, vs, BLOCK_N, DV, BLOCK_DV, True, WIDE)
    return odd_sum(p, keep, v)


@triton.jit
def forward_tile(
    tile, h, b, q, k, v, o, lse, low, top, qs, ks, vs, os, stats, first_q, first_k, len_q, len_k, heads, group,
    qk_scale, cap, bias, bias_strides, alibi, alibi_strides, sinks, rng, threshold, survivor_weight, lists,
    list_strides, m, KEEP: tl.constexpr, REACH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """o (M, Dv) and the statistics of one tile of queries. Returns 1 if what it multiplied came out not finite."""
    i0 = tile * BLOCK_M
    bh = b * heads + h
    q_base = head_base(q, qs, b, h, first_q)
    k_base = head_base(k, ks, b, h // group, first_k)
    v_base = head_base(v, vs, b, h // group, first_k)
    slope = None
    if bias is not None:
        bias += offset64(b, bias_strides[0]) + offset64(h, bias_strides[1])
    if alibi is not None:
        slope = head_slope(alibi, alibi_strides, b, h, qk_scale, UNIT)

    where, n_full, n_all, full, first = visits(
        b, h, tile, i0, len_q, len_k, len_q, len_k, lists, list_strides, m, REACH, BLOCK_M, BLOCK_N, bias is not None
    )
    q_tile = load_tile(q_base, i0, len_q, qs, BLOCK_M, D, BLOCK_D, True, WIDE)  # (M, D)
    m_i = tl.full([BLOCK_M], -INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    odd = 0
    # Beside several changes of the scores ptxas would serialise wgmma.
    EDGE: tl.constexpr = edge(BLOCK_N, None if SOFTCAP or rng is not None else bias, 32)
    AT_ONCE: tl.constexpr = at_once(CAREFUL, EDGE, BLOCK_N)
    if not AT_ONCE:
        m_i, l_i, acc, odd = fold(
            m_i, l_i, acc, odd, q_tile, k_base, v_base, ks, vs, b, h, bh, i0, 0, n_full, lists, where, n_full, full,
            first, len_q, len_k, qk_scale, cap, bias, bias_strides, slope, rng, threshold, m, KEEP, D, DV, BLOCK_N,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, CAREFUL, CAREFUL,
        )  # fmt: skip
    m_i, l_i, acc, odd = fold(
        m_i, l_i, acc, odd, q_tile, k_base, v_base, ks, vs, b, h, bh, i0, 0 if AT_ONCE else n_full, n_all, lists,
        where, n_full, full, first, len_q, len_k, qk_scale, cap, bias, bias_strides, slope, rng, threshold, m, KEEP, D,
        DV, BLOCK_N, BLOCK_M, EDGE, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, True, CAREFUL,
    )  # fmt: skip
    rows = i0 + tl.arange(0, BLOCK_M)
    inside = rows < len_q
    found = 0
    if not CAREFUL and (KEEP is not None or bias is not None):
        found = any_odd(odd_rows(acc), inside)

    top_m = m_i
    to_natural = 1.0 if UNIT == NATURAL else LN2
    at = offset64(b, stats[0]) + offset64(h, stats[1]) + first_q + rows
    if top is not None:  # a maximum passes NaN by, the sum does not
        tl.store(top + at, tl.where((l_i != l_i) & (m_i != INF), l_i, m_i * to_natural), mask=inside)
    if sinks is not None:  # ``state.with_sink``: a key of this score whose value is 0
        sink = tl.load(sinks + h).to(tl.float32) / to_natural
        m_new = tl.maximum(m_i, sink)
        base = tl.where(m_new == -INF, 0.0, m_new)
        alpha = exp_unit(m_i - base, UNIT)
        l_i = l_i * alpha + exp_unit(sink - base, UNIT)
        acc = acc * alpha[:, None]
        m_i = m_new
    none = l_i == 0
    pivot = tl.where(m_i == -INF, 0.0, m_i)
    log_l = tl.log(tl.where(none, 1.0, l_i))
    # Of two products that are added the compiler fuses one or none, in the careful kernel maybe another: so it is said.
    row_lse = tl.where(none, -INF, tl.fma(pivot, tl.full(pivot.shape, to_natural, tl.float32), log_l))
    tl.store(lse + at, row_lse, mask=inside)
    if low is not None:
        rest = log_l - (row_lse - pivot * to_natural)
        fine = (tl.abs(row_lse) < INF) & (tl.abs(rest) < INF)
        tl.store(low + at, tl.where(fine, rest, 0.0), mask=inside)
    weight = survivor_weight / tl.where(none, 1.0, l_i)
    out = tl.where(none[:, None], 0.0, acc * weight[:, None])
    o_base = head_base(o, os, b, h, first_q)
    store_tile(o_base, i0, len_q, os, out, BLOCK_M, DV, BLOCK_DV, WIDE)
    if CAREFUL:  # noqa: SIM102 - the outer one is decided when compiling
        if odd > 0:
            tl.debug_barrier()  # the rows are stored
            for row in tl.range(0, tl.minimum(BLOCK_M, len_q - i0), num_stages=1):
                extra = tl.zeros([BLOCK_DV], tl.float32)
                for t in tl.range(0, n_all * (BLOCK_N // 16), num_stages=1):
                    j0 = visited16(t, lists, where, n_full, full, first, BLOCK_N)
                    extra += odd_values(
                        i0 + row, pick(tl.where(top_m == -INF, 0.0, top_m), rows, i0 + row), q_base, k_base, v_base, qs,
                        ks, vs, b, h, bh, j0, len_q, len_k, qk_scale, cap, bias, bias_strides, slope, rng, threshold, m,
                        KEEP, D, DV, 16, BLOCK_D, BLOCK_DV, UNIT, SOFTCAP, WIDE,
                    )  # fmt: skip
                add_to_row(o_base, i0 + row, os, extra, DV, BLOCK_DV)
    return found


@triton.jit(do_not_specialize=["len_q", "len_k", "tiles", "pairs", "section", "threshold"])
def forward_kernel(
    q, k, v, o, lse, low, top, odd, qs, ks, vs, os, stats, cu_q, cu_k, len_q, len_k, tiles, heads, group, pairs,
    section, qk_scale, cap, bias, bias_strides, alibi, alibi_strides, sinks, rng, threshold, survivor_weight, lists,
    list_strides, m, KEEP: tl.constexpr, REACH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr, BY_HEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a (query tile, query head, batch entry). odd (b, h, tile): which came out not finite."""
    follow(PDL)
    tile, h, b = unflatten(tl.program_id(0), tiles, heads, pairs, section, REVERSE, BY_HEAD)
    first_q, len_q = sequence(b, cu_q, len_q)
    first_k, len_k = sequence(b, cu_k, len_k)
    if tile * BLOCK_M >= len_q:
        return
    found = forward_tile(
        tile, h, b, q, k, v, o, lse, low, top, qs, ks, vs, os, stats, first_q, first_k, len_q, len_k, heads, group,
        qk_scale, cap, bias, bias_strides, alibi, alibi_strides, sinks, rng, threshold, survivor_weight,
        lists, list_strides, m, KEEP, REACH, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, False,
    )  # fmt: skip
    if odd is not None:
        tl.store(odd + (b * heads + h) * tiles + tile, found)


@triton.jit(do_not_specialize=["len_q", "len_k", "tiles", "pairs", "section", "threshold"])
def forward_careful_kernel(
    q, k, v, o, lse, low, top, odd, qs, ks, vs, os, stats, cu_q, cu_k, len_q, len_k, tiles, heads, group, pairs,
    section, qk_scale, cap, bias, bias_strides, alibi, alibi_strides, sinks, rng, threshold, survivor_weight, lists,
    list_strides, m, KEEP: tl.constexpr, REACH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The tiles that are odd. Every so-many-th is a program's: neighbours are often odd together."""
    follow(PDL)
    first, step, total = tl.program_id(0), tl.num_programs(0), pairs * tiles
    if flagged(odd, first, step, total, CHUNK) > 0:
        for at in tl.range(first, total, step, num_stages=1):
            tile, h, b = at % tiles, at // tiles % heads, at // tiles // heads
            first_q, own_q = sequence(b, cu_q, len_q)
            first_k, own_k = sequence(b, cu_k, len_k)
            if (tl.load(odd + at) > 0) & (tile * BLOCK_M < own_q):
                forward_tile(
                    tile, h, b, q, k, v, o, lse, low, top, qs, ks, vs, os, stats, first_q, first_k, own_q, own_k, heads,
                    group, qk_scale, cap, bias, bias_strides, alibi, alibi_strides, sinks, rng, threshold,
                    survivor_weight, lists, list_strides, m, KEEP, REACH, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                    UNIT, SOFTCAP, WIDE, UPCAST, PRECISION, True,
                )  # fmt: skip


def forward(r: Request) -> Output:
    """Launch the forward."""
    about = decided_by(r)
    with on_device(r):
        made = repeated(about and (FORWARD, *about), inputs(r), r.device, partial(_forward, r))
    return Output(*made)  # type: ignore[arg-type]


def _forward(r: Request, work: Work) -> Output:
    p = Problem(r)
    # Rows that belong to no sequence are written here.
    zero, nothing = (0.0, NEG_INF) if p.ragged else (None, None)
    out, lse = work.made(r.new_out(), zero), work.made(r.new_stats(), nothing)
    top = work.made(r.new_stats(), nothing) if r.want_max_logits else None
    low = work.made(r.new_stats(), zero) if r.keeps_low else None
    o = Output(out, lse, top, low)
    pairs = r.batch * r.heads
    if pairs == 0 or r.len_q == 0:
        return o
    cfg = p.config(FORWARD)
    tiles = -(-r.len_q // cfg.block_m)
    (lists, list_strides), _ = p.lists(work, cfg, None)
    odd = work.made(torch.empty(pairs * tiles, dtype=torch.int8, device=r.device)) if p.hides else None
    args = (
        r.q, r.k, r.v, out, lse, low, top, odd, p.strides(r.q), p.strides(r.k), p.strides(r.v), p.strides(out),
        p.stat_strides(lse), p.cu_q, p.cu_k, r.len_q, r.len_k, tiles, r.heads, r.group, pairs,
        min(p.section(), pairs), p.qk_scale, p.cap, *p.bias_args(), *p.alibi_args(), r.sinks, *p.dropout_args(),
        lists, list_strides,
    )  # fmt: skip
    constants: dict[str, Any] = dict(  # noqa: C408
        KEEP=p.mask.keep, REACH=p.mask.reach_k, D=r.dim, DV=r.dim_v, BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n,
        BLOCK_D=p.block_d, BLOCK_DV=p.block_dv, UNIT=p.unit, SOFTCAP=r.softcap is not None,
        WIDE=p.wide(r.q, r.k, r.v, out), UPCAST=p.upcast, PRECISION=p.precision, PDL=p.pdl,
    )  # fmt: skip
    work.launch(
        forward_kernel, tiles * pairs, args, (p.mask_args,), REVERSE=p.mask.longest_first, BY_HEAD=p.by_head,
        **constants, **cfg.options(),
    )  # fmt: skip
    if odd is not None:
        work.launch(
            forward_careful_kernel, -(-odd.numel() // CHUNK), args, (p.mask_args,), CHUNK=CHUNK, **constants,
            num_warps=cfg.num_warps,
        )  # fmt: skip
    return o
