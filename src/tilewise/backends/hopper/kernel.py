"""The forward kernel in Gluon: a TMA producer warp, and two consumer warp groups of 64 queries each.

A program (one an SM) works on tiles of 128 queries. For each the producer loads Q and then streams blocks of keys and
values, from right to left, through rings of STAGES buffers in shared memory. The consumers multiply with ``wgmma`` and
keep scores, P and the accumulator in registers. What runs at the same time:

- loads and everything else: the producer runs ahead, into the next tile too, until the rings are full;
- within a consumer, the softmax of block t and P V of block t - 1, which is waited for after the exponentials;
- the softmax of one consumer and the products of the other: they take turns at starting products.

Where queries of a ragged batch are few, a tile holds those of HEADS query heads of one key head, head after head.

Scores are unscaled q k^T or, under a softcap, its tanh; maxima and exponents are in units of log2 (FOLDED in
``triton``'s kernels). Tiles have a power of two of columns: beyond the head dim TMA fills them with zeros.
"""

# No ``from __future__ import annotations``: Gluon reads the annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton.primitives import quick_tanh
from . import config
from .gluon import tma_store
from .pipeline import (
    ROWS,
    Sizes,
    await_empty,
    await_full,
    fetch,
    halves,
    hand_on,
    hidden_zero,
    is_odd,
    matrix,
    named_barrier,
    padded,
    place,
    plane,
    release,
    ring,
    rows_layout,
    sequence,
    staged,
    stored,
    taken,
    tiles,
    wgmma_layout,
)

BLOCK_M = gl.constexpr(config.BLOCK_M)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
# Where maxima start. Finite, so that a row without keys needs no test in the loops: -inf - (-inf) would be NaN.
LOWEST = gl.constexpr(-(2.0**100))
TURN = gl.constexpr(8)  # named barriers 8 and 9
DONE = gl.constexpr(10)


# --- which blocks ---------------------------------------------------------------------------------


@gluon.jit
def span(r0, r1, end, low, high, BLOCK: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """The blocks of keys that rows r0 .. r1 visit: (last, right, full, n).

    Number t of n is block last - 1 - t. The first ``right`` of them and those from right + full on are masked. A key j
    < end is kept by row i where low <= j - i (if LEFT) and j - i <= high (if RIGHT). n is at least 1: rows without
    keys visit a block of which they keep nothing.
    """
    lo, full_lo, hi, full_hi = 0, 0, end, end
    if LEFT:
        lo, full_lo = max(r0 + low, 0), max(r1 + low, 0)
    if RIGHT:
        hi, full_hi = max(min(r1 + high + 1, end), 0), max(min(r0 + high + 1, end), 0)
    first = lo // BLOCK
    last = max((hi + BLOCK - 1) // BLOCK, first + 1)
    a = min((full_lo + BLOCK - 1) // BLOCK, last)
    b = max(full_hi // BLOCK, a)
    return last, last - b, b - a, last - first


@gluon.jit
def work(t, z, lengths, ragged, HEADS: gl.constexpr, BLOCK_N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Work item t as (first row, batch entry, head, end of the keys, and its ``span``)."""
    m, pair = place(t, z.n_m, z.pairs, z.section, RIGHT or ragged[2] is not None)
    if ragged[2] is None:
        b = pair // z.heads
        h = pair - b * z.heads
    else:
        item = ragged[2] + 1 + 2 * m
        b, m, h = gl.load(item), gl.load(item + 1), pair
    _first_q, _first_k, own = sequence(b, z, ragged)
    ROWS_: gl.constexpr = BLOCK_M // HEADS
    row = m * ROWS_
    end = own.len_k
    if lengths is not None:
        end = max(min(gl.load(lengths + b).to(gl.int32), end), 0)
    last, right, full, n = span(row, min(row + ROWS_, own.len_q) - 1, end, own.low, own.high, BLOCK_N, LEFT, RIGHT)
    return row, b, h, end, last, right, full, n


# --- turns --------------------------------------------------------------------------------------


@gluon.jit
def await_turn(W: gl.constexpr, TURNS: gl.constexpr):
    """Until the other consumer has handed over: its products are issued."""
    if TURNS:
        named_barrier("sync", TURN + W, 256)


@gluon.jit
def hand_over(W: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        named_barrier("arrive", TURN + 1 - W, 256)


# --- the producer ---------------------------------------------------------------------------------


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, q, k, v, ids, counter, lengths, ragged, z, n_tiles, HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):  # fmt: skip
    it = gl.to_tensor(0)
    done = gl.to_tensor(0)
    t = gl.program_id(0)
    while t < n_tiles:
        row, b, h, _end, last, _right, _full, n = work(t, z, lengths, ragged, HEADS, BLOCK_N, LEFT, RIGHT)
        first_q, first_k, _own = sequence(b, z, ragged)
        b = plane(b, ragged)
        for w in gl.static_range(2):
            mbarrier.wait(q.empty.index(w), (done & 1) ^ 1)
            fetch(q_desc, b, h * HEADS, first_q + row + w * (ROWS // HEADS), q, w, ROWS, padded(D))
        kv = h // z.group
        for j in range(n):
            slot = it % STAGES
            at = first_k + (last - 1 - j) * BLOCK_N
            await_empty(k, it, STAGES)
            fetch(k_desc, b, kv, at, k, slot, BLOCK_N, padded(D))
            await_empty(v, it, STAGES)
            fetch(v_desc, b, kv, at, v, slot, BLOCK_N, padded(DV))
            it += 1
        if counter is not None:
            t = gl.num_programs(0) + gl.atomic_add(counter, 1)
            hand_on(t, ids, done)
        else:
            t += gl.num_programs(0)
        done += 1
    if counter is not None:  # the last program leaves both counts at 0, for the next launch
        left = gl.atomic_add(counter + 1, 1)
        if left == gl.num_programs(0) - 1:
            gl.store(counter, 0)
            gl.store(counter + 1, 0)


# --- the consumers --------------------------------------------------------------------------------


@gluon.jit
def by_thread(s, BLOCK_N: gl.constexpr):
    """A tile of scores with the columns of one thread as axes of their own, the 4 lanes of a row as another."""
    return s.reshape([ROWS, BLOCK_N // 32, 4, 4, 2])


@gluon.jit
def row_max(s, BLOCK_N: gl.constexpr):
    """An axis at a time: over all at once it is one chain of dependent instructions."""
    m = gl.max(gl.max(gl.max(gl.max(by_thread(s, BLOCK_N), 4), 2), 1), 1)
    return gl.convert_layout(m, gl.SliceLayout(1, s.type.layout))


@gluon.jit
def row_sum(p, BLOCK_N: gl.constexpr):
    """Of the columns of each thread: the 4 lanes of a row are added once, at the end."""
    return gl.sum(gl.sum(gl.sum(by_thread(p, BLOCK_N), 4), 2), 1)


@gluon.jit
def kept(j, i, end, low, high, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Bool (M, N): keys j (N,) that rows i (M,) attend to."""
    keep = (j < end)[None, :]
    if RIGHT:
        keep = j[None, :] <= gl.minimum(i + high, end - 1)[:, None]
    if LEFT:
        keep = keep & (j[None, :] >= (i + low)[:, None])
    return keep


@gluon.jit
def rows_of(LAYOUT: gl.constexpr, HEADS: gl.constexpr):
    """(head, query) of each row of a tile, from its first on: HEADS heads, one after the other."""
    r = gl.arange(0, ROWS, LAYOUT)
    if HEADS == 1:
        return 0, r
    else:
        return r // (ROWS // HEADS), r % (ROWS // HEADS)


@gluon.jit
def mask(
    s, j0, i0, end, z, HEADS: gl.constexpr, BLOCK_N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    j = j0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
    _head, query = rows_of(gl.SliceLayout(1, s.type.layout), HEADS)
    i = i0 + query
    keep = kept(j, i, end, z.low, z.high, LEFT, RIGHT)
    return gl.where(keep, s, -INF)


@gluon.jit
def capped(s, cap):
    """The scores, or under a softcap their tanh. cap is what they are multiplied by within it."""
    if cap is not None:
        return quick_tanh(s, cap)
    else:
        return s


@gluon.jit
def crossing(p, dtype: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr):
    """P as it crosses from one round of the loop to the next: as its product takes it or, WIDE, in fp32."""
    if WIDE:
        return p
    else:
        return gl.convert_layout(p.to(dtype), LAYOUT)


@gluon.jit
def fold(
    acc, p_wide, l_i, m_i, it, t, n, masked, j0, i0, end, q, k, v, z, qk_scale, cap, W: gl.constexpr,
    HEADS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr, TURNS: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """P V of block t - 1, and of block t the scores, the maximum and P. it: number of block t - 1 in the rings."""
    S_LAYOUT: gl.constexpr = wgmma_layout(BLOCK_N)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    slot, following = it % STAGES, (it + 1) % STAGES
    p = gl.convert_layout(p_wide.to(q.dtype), P_LAYOUT)
    await_turn(W, TURNS)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    k_t = matrix(k.data, following).permute((1, 0))
    s_run = warpgroup_mma(q, k_t, zeros, use_acc=False, is_async=True)
    hand_over(W, TURNS)  # before P V: the other's Q K may run between the two
    acc_run = warpgroup_mma(p, matrix(v.data, slot), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_run])
    release(k, following)
    s = capped(s, cap)
    if LEFT or RIGHT:  # without, only the first block can have an end in it  # noqa: SIM102 - decided when compiling
        if masked:
            s = mask(s, j0, i0, end, z, HEADS, BLOCK_N, LEFT, RIGHT)
    m_new = gl.maximum(m_i, row_max(s, BLOCK_N) * qk_scale)
    alpha = gl.exp2(m_i - m_new)
    p_wide = gl.exp2(s * qk_scale - m_new[:, None])
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None] + row_sum(p_wide, BLOCK_N)
    # What the next turn needs is awaited here. Polling a barrier ends the basic block: else ptxas would move the
    # exponentials behind the wait for P V, and nothing would overlap.
    await_full(v, it + 1, STAGES)
    await_full(k, it + 2, STAGES, pred=t + 1 < n)
    acc, _p, p_wide = warpgroup_mma_wait(0, deps=[acc_run, p, p_wide])  # p: its registers are read until here
    p_wide = crossing(p_wide, q.dtype, P_LAYOUT, WIDE)
    release(v, slot)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, p_wide, l_i, m_new


# --- results --------------------------------------------------------------------------------------


@gluon.jit
def finished(m, sums, sink):
    """(log-sum-exp, what the accumulator is multiplied by) of rows with these maxima and sums of exponentials."""
    if sink is not None:  # ``state.with_sink``: a key of this score whose value is 0
        m = gl.where(sums == 0, -INF, m)
        m_new = gl.maximum(m, sink)
        base = gl.where(m_new == -INF, 0.0, m_new)
        alpha = gl.exp2(m - base)
        sums = sums * alpha + gl.exp2(sink - base)
        m = base
    none = sums == 0
    weight = 1.0 / gl.where(none, 1.0, sums)
    if sink is not None:
        weight = weight * alpha
    return gl.where(none, -INF, m * LN2 + gl.log(sums)), weight


@gluon.jit
def load_sink(sinks, h, LAYOUT: gl.constexpr, HEADS: gl.constexpr):
    """The sinks of the heads of a tile, for each of its rows, in the unit of maxima."""
    head, _query = rows_of(LAYOUT, HEADS)
    return gl.load(sinks + h * HEADS + head).to(gl.float32) / LN2


@gluon.jit
def store_part(
    o_desc, o_s, W: gl.constexpr, x, place, h, i0, column: gl.constexpr, own, ragged, DV: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """A tile of the output, from query i0 and a column on, once the buffer is free. place: (batch entry, first row)."""
    tma.store_wait(0)
    stage = staged(matrix(o_s, W), x.to(o_s.dtype))
    if ragged[2] is None:
        tma_store(o_desc, [place[0], h * HEADS, i0, column], o_s.index(W))
    elif i0 + ROWS // HEADS <= own.len_q:
        tma_store(o_desc, [0, h * HEADS, place[1] + i0, column], o_s.index(W))
    else:  # TMA would go on, into the next sequence
        out, o_h, o_l = ragged[5], ragged[6], ragged[7]
        LAYOUT: gl.constexpr = rows_layout(o_s.shape[4])
        head, query = rows_of(gl.SliceLayout(1, LAYOUT), HEADS)
        channels = column + gl.arange(0, o_s.shape[4], gl.SliceLayout(0, LAYOUT))
        at = (h * HEADS + head) * o_h + (place[1] + i0 + query).to(gl.int64) * o_l
        inside = (i0 + query < own.len_q)[:, None] & (channels < DV)[None, :]
        gl.store(out + at[:, None] + channels[None, :], stage.load(LAYOUT), mask=inside)


@gluon.jit
def store_out(o_desc, o_s, W: gl.constexpr, acc, place, h, i0, own, ragged, DV: gl.constexpr, HEADS: gl.constexpr):
    """A tile of the output, from query i0 on. Where not all columns fit the buffer it takes two turns."""
    if acc.shape[1] == o_s.shape[4]:
        store_part(o_desc, o_s, W, acc, place, h, i0, 0, own, ragged, DV, HEADS)
    else:
        left, right = halves(acc)
        store_part(o_desc, o_s, W, left, place, h, i0, 0, own, ragged, DV, HEADS)
        store_part(o_desc, o_s, W, right, place, h, i0, o_s.shape[4], own, ragged, DV, HEADS)


# --- beside things that are not numbers -----------------------------------------------------------
#
# 0 * NaN is NaN, so a value that is not finite reaches rows that do not attend to its key. As in ``triton``'s kernels,
# the fast products are taken anyway, and the accumulator is looked at once. A tile where it came out not finite is put
# on a list. Each consumer works through its list after its other tiles, 64 keys at a time, in buffers of Q, K and V
# that nobody else uses any more: with such values taken for 0, and then what they add to those who do attend to them.
# After, not between: beside the fast loops its registers would make them spill. The list is a chain of numbers, each in
# the place of the log-sum-exp of its tile's first row.


@gluon.jit
def load_rows(x, first, length, stride, head_stride, D: gl.constexpr, HEADS: gl.constexpr):
    """64 rows, from the first on, of (length, D) matrices of HEADS heads, 0 beyond their edges."""
    COLS: gl.constexpr = padded(D)
    LAYOUT: gl.constexpr = rows_layout(COLS)
    head, row = rows_of(gl.SliceLayout(1, LAYOUT), HEADS)
    rows = first + row
    channels = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    at = x + (rows.to(gl.int64) * stride + head * head_stride)[:, None] + channels[None, :]
    return gl.load(at, mask=(rows < length)[:, None] & (channels < D)[None, :], other=0.0)


@gluon.jit
def careful_scores(
    q, k, stage, j0, i0, k_stride, end, z, qk_scale, cap, LAYOUT: gl.constexpr, D: gl.constexpr,
    HEADS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Scaled scores of 64 keys from j0 on, -inf where not kept; and what is kept."""
    k_t = staged(stage, load_rows(k, j0, z.len_k, k_stride, 0, D, 1)).permute((1, 0))
    s = capped(warpgroup_mma(q, k_t, gl.zeros([ROWS, ROWS], gl.float32, LAYOUT), use_acc=False), cap)
    j = j0 + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    _head, query = rows_of(gl.SliceLayout(1, LAYOUT), HEADS)
    keep = kept(j, i0 + query, end, z.low, z.high, LEFT, RIGHT)
    return gl.where(keep, s * qk_scale, -INF), keep


@gluon.jit
def careful(
    q, k, v, q_stride, head_stride, k_stride, v_stride, q_s, k_s, v_s, i0, first, end, z, qk_scale, cap, sink,
    D: gl.constexpr, DV: gl.constexpr, HEADS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a tile from query i0 on, which keeps keys of first .. end."""
    S_LAYOUT: gl.constexpr = wgmma_layout(ROWS)
    O_LAYOUT: gl.constexpr = wgmma_layout(padded(DV))
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = v_s.dtype
    staged(q_s, load_rows(q, i0, z.len_q, q_stride, head_stride, D, HEADS))
    acc = gl.zeros([ROWS, padded(DV)], gl.float32, O_LAYOUT)
    m_i = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    odd = gl.to_tensor(0)
    for j0 in range(first, end, ROWS):
        s, _keep = careful_scores(q_s, k, k_s, j0, i0, k_stride, end, z, qk_scale, cap, S_LAYOUT, D, HEADS, LEFT, RIGHT)
        m_new = gl.maximum(m_i, gl.max(s, 1))
        alpha = gl.exp2(m_i - m_new)
        p = gl.exp2(s - m_new[:, None])
        l_i = l_i * alpha + gl.sum(p, 1)
        m_i = m_new
        x = load_rows(v, j0, z.len_k, v_stride, 0, DV, 1).to(gl.float32)
        odd = gl.where(is_odd(x), 1, odd)
        acc = acc * gl.convert_layout(alpha, ROW)[:, None]
        number = gl.where(gl.abs(x) < INF, x, 0.0).to(dtype)
        acc = warpgroup_mma(gl.convert_layout(p.to(dtype), P_LAYOUT), staged(v_s, number), acc)
    row_lse, weight = finished(gl.convert_layout(m_i, ROW), gl.convert_layout(l_i, ROW), sink)
    acc = acc * weight[:, None]
    if odd > 0:
        for kind in range(4):  # which rows keep, in each channel: a NaN; inf and -inf of a weight > 0, and of weight 0
            value = gl.where(kind == 1, INF, -INF)
            adds = gl.where((kind == 0) | (kind == 3), float("nan"), value)
            count = gl.zeros([ROWS, padded(DV)], gl.float32, O_LAYOUT)
            for j0 in range(first, end, ROWS):
                s, keep = careful_scores(
                    q_s, k, k_s, j0, i0, k_stride, end, z, qk_scale, cap, S_LAYOUT, D, HEADS, LEFT, RIGHT
                )  # fmt: skip
                no_weight = gl.exp2(s - m_i[:, None]) == 0
                keep = keep & ((kind == 0) | (no_weight == (kind == 3)))
                x = load_rows(v, j0, z.len_k, v_stride, 0, DV, 1).to(gl.float32)
                infinite = (x == value) | ((kind == 3) & (gl.abs(x) == INF))
                found = ((kind == 0) & (x != x)) | ((kind > 0) & infinite)
                one = gl.convert_layout(gl.where(keep, 1.0, 0.0).to(dtype), P_LAYOUT)
                count = warpgroup_mma(one, staged(v_s, gl.where(found, 1.0, 0.0).to(dtype)), count)
            acc = gl.where(count > 0, acc + adds, acc)
    return acc, row_lse


@gluon.jit
def row_stats(x, place, h, i0, z, ragged, HEADS: gl.constexpr):
    """Address of a tile's first row in a statistic (B, H, Lq), or (H, T) of a ragged batch."""
    if ragged[2] is None:
        return x + (place[0] * z.heads + h).to(gl.int64) * HEADS * z.len_q + i0
    else:
        return x + h.to(gl.int64) * HEADS * ragged[4] + place[1] + i0


@gluon.jit
def stat_rows(z, ragged, LAYOUT: gl.constexpr, HEADS: gl.constexpr):
    """Where a tile's rows are from the first on, and their queries."""
    head, query = rows_of(LAYOUT, HEADS)
    if ragged[2] is None:
        return head * z.len_q + query, query
    else:
        return head * ragged[4] + query, query


@gluon.jit
def again(
    chain, W: gl.constexpr, o_desc, q_ring, k_ring, v_ring, o_s, lse, sinks, lengths, ragged, z, qk_scale, cap,
    pointers, strides, HEADS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The tiles of a chain, carefully."""
    ROW: gl.constexpr = gl.SliceLayout(1, wgmma_layout(padded(DV)))
    q, k, v = pointers
    named_barrier("sync", DONE, 256)  # the other's last K and V are read
    mine = W
    if q_ring.data.shape[4] > 128:  # addresses of its own: those of the fast loops would be spilled for these here
        mine = W + hidden_zero()
    q_s = matrix(q_ring.data, mine)
    k_s = matrix(k_ring.data, mine).slice(0, ROWS, dim=0)
    v_s = matrix(v_ring.data, mine).slice(0, ROWS, dim=0)
    while chain > 0:
        row, b, h, end, last, _right, _full, n = work(chain - 1, z, lengths, ragged, HEADS, BLOCK_N, LEFT, RIGHT)
        first_q, first_k, own = sequence(b, z, ragged)
        place = plane(b, ragged), first_q
        i0 = row + W * (ROWS // HEADS)
        kv = h // z.group
        at = row_stats(lse, place, h, i0, z, ragged, HEADS)
        chain = gl.load(at).to(gl.int32, bitcast=True)
        sink = None
        if sinks is not None:
            sink = load_sink(sinks, h, ROW, HEADS)
        acc, row_lse = careful(
            q + place[0] * strides[0] + h * HEADS * strides[1] + first_q * strides[2],
            k + place[0] * strides[3] + kv * strides[4] + first_k * strides[5],
            v + place[0] * strides[6] + kv * strides[7] + first_k * strides[8], strides[2], strides[1], strides[5],
            strides[8], q_s, k_s, v_s, i0, (last - n) * BLOCK_N, gl.minimum(end, last * BLOCK_N), own, qk_scale, cap,
            sink, D, DV, HEADS, LEFT, RIGHT,
        )  # fmt: skip
        store_out(o_desc, o_s, W, acc, place, h, i0, own, ragged, DV, HEADS)
        rows, query = stat_rows(z, ragged, ROW, HEADS)
        gl.store(at + rows, row_lse, mask=i0 + query < own.len_q)


@gluon.jit
def consumer(
    W: gl.constexpr, o_desc, q_ring, k, v, o_s, ids, lse, top, sinks, lengths, ragged, z, n_tiles, qk_scale, cap,
    pointers, strides, HEADS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr,
    TURNS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    DYNAMIC: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = wgmma_layout(BLOCK_N)
    O_LAYOUT: gl.constexpr = wgmma_layout(padded(DV))
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q = matrix(q_ring.data, W)
    it = gl.to_tensor(0)
    done = gl.to_tensor(0)
    HIDES: gl.constexpr = LEFT or RIGHT or lengths is not None or ragged[2] is not None
    chain = gl.to_tensor(0)
    if W == 1:
        hand_over(1, TURNS)  # the first turn is that of consumer 0
    t = gl.program_id(0)
    first = t
    if ragged[2] is not None:  # there may be fewer tiles than programs
        first = gl.minimum(t, z.n_m * z.pairs - 1)
    row, b, h, end, last, right, full, n = work(first, z, lengths, ragged, HEADS, BLOCK_N, LEFT, RIGHT)
    while t < n_tiles:
        first_q, _first_k, own = sequence(b, z, ragged)
        place = plane(b, ragged), first_q
        i0 = row + W * (ROWS // HEADS)
        j0 = (last - 1) * BLOCK_N
        mbarrier.wait(q_ring.full.index(W), done & 1)
        # The first block has no P V beside it. It is masked whether it needs it or not.
        slot = it % STAGES
        await_full(k, it, STAGES)
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        await_turn(W, TURNS)
        s_run = warpgroup_mma(q, matrix(k.data, slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_run])
        hand_over(W, TURNS)
        release(k, slot)
        s = mask(capped(s, cap), j0, i0, end, own, HEADS, BLOCK_N, LEFT, RIGHT)
        m_i = gl.maximum(row_max(s, BLOCK_N) * qk_scale, LOWEST)
        p_wide = gl.exp2(s * qk_scale - m_i[:, None])
        l_i = row_sum(p_wide, BLOCK_N)
        p_wide = crossing(p_wide, q.dtype, P_LAYOUT, WIDE)
        acc = gl.zeros([ROWS, padded(DV)], gl.float32, O_LAYOUT)
        await_full(v, it, STAGES)
        await_full(k, it + 1, STAGES, pred=n > 1)

        for j in range(1, n):
            acc, p_wide, l_i, m_i = fold(
                acc, p_wide, l_i, m_i, it, j, n, (j < right) | (j >= right + full), j0 - j * BLOCK_N, i0, end, q, k, v,
                own, qk_scale, cap, W, HEADS, BLOCK_N, STAGES, WIDE, TURNS, LEFT, RIGHT,
            )  # fmt: skip
            it += 1

        slot = it % STAGES
        p = gl.convert_layout(p_wide.to(q.dtype), P_LAYOUT)
        mbarrier.arrive(q_ring.empty.index(W), count=1)
        acc_run = warpgroup_mma(p, matrix(v.data, slot), acc, is_async=True)
        # What comes next is found out meanwhile.
        sink = None
        if sinks is not None:
            sink = load_sink(sinks, h, ROW, HEADS)
        t_next = taken(ids, done, 4) if DYNAMIC else t + gl.num_programs(0)
        row, b_next, h_next, end, last, right, full, n = work(
            gl.minimum(t_next, n_tiles - 1), z, lengths, ragged, HEADS, BLOCK_N, LEFT, RIGHT
        )
        acc = warpgroup_mma_wait(0, deps=[acc_run])
        sums = gl.convert_layout(gl.sum(l_i, 1), ROW)
        release(v, slot)
        it += 1

        m = gl.convert_layout(m_i, ROW)
        rows, query = stat_rows(z, ragged, ROW, HEADS)
        inside = i0 + query < own.len_q
        row_lse, weight = finished(m, sums, sink)
        odd = i0 < 0
        if HIDES:
            odd = is_odd(acc) & (i0 < own.len_q)
            if odd:
                row_lse = gl.where(rows == 0, chain.to(gl.float32, bitcast=True), row_lse)
                chain = t + 1
        gl.store(row_stats(lse, place, h, i0, z, ragged, HEADS) + rows, row_lse, mask=inside)
        if top is not None:  # a maximum passes NaN by, the sum does not
            most = gl.where(sums == 0, -INF, gl.where((sums != sums) & (m != INF), sums, m * LN2))
            gl.store(row_stats(top, place, h, i0, z, ragged, HEADS) + rows, most, mask=inside)
        if not odd:
            store_out(o_desc, o_s, W, acc * weight[:, None], place, h, i0, own, ragged, DV, HEADS)

        t, b, h = t_next, b_next, h_next
        done += 1
    if HIDES:
        again(
            chain, W, o_desc, q_ring, k, v, o_s, lse, sinks, lengths, ragged, z, qk_scale, cap, pointers, strides,
            HEADS, BLOCK_N, D, DV, LEFT, RIGHT,
        )  # fmt: skip
    tma.store_wait(0)


# The sizes are not specialised: a new length compiles nothing.
@gluon.jit(
    do_not_specialize=[
        "lengths", "sinks", "counter", "heads", "group", "len_q", "len_k", "n_m", "pairs", "section", "n_tiles", "low",
        "high", "q_b", "q_h", "q_l", "k_b", "k_h", "k_l", "v_b", "v_h", "v_l", "cu_q", "cu_k", "items", "skew", "rows",
        "o_h", "o_l",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, top, sinks, lengths, counter, heads, group, len_q, len_k, n_m, pairs, section,
    n_tiles, low, high, qk_scale, cap, q_ptr, k_ptr, v_ptr, q_b: gl.int64, q_h: gl.int64, q_l: gl.int64,
    k_b: gl.int64, k_h: gl.int64, k_l: gl.int64, v_b: gl.int64, v_h: gl.int64, v_l: gl.int64, cu_q, cu_k,
    items, skew, rows, o_ptr, o_h: gl.int64, o_l: gl.int64, D: gl.constexpr, DV: gl.constexpr, HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WIDE: gl.constexpr, TURNS: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):  # fmt: skip
    q = ring(tiles(q_desc, 2, ROWS, padded(D), HEADS), 2, 1)
    k = ring(tiles(k_desc, STAGES, BLOCK_N, padded(D)), STAGES, 2)
    v = ring(tiles(v_desc, STAGES, BLOCK_N, padded(DV)), STAGES, 2)
    o_s = tiles(o_desc, 2, ROWS, stored(padded(DV)), HEADS)
    ids = ring(gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), 2, 2)
    fence_async_shared()
    ragged = cu_q, cu_k, items, skew, rows, o_ptr, o_h, o_l  # without ragged sequences None, and 0
    if items is not None:
        n_tiles = gl.load(items) * pairs
        n_m = gl.maximum(gl.load(items), 1)
    z = Sizes(heads, group, len_q, len_k, n_m, pairs, section, low, high)
    pointers, strides = (q_ptr, k_ptr, v_ptr), (q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l)
    gl.warp_specialize(
        [
            (
                consumer,
                (0, o_desc, q, k, v, o_s, ids, lse, top, sinks, lengths, ragged, z, n_tiles, qk_scale, cap, pointers,
                 strides, HEADS, BLOCK_N, STAGES, WIDE, TURNS, D, DV, LEFT, RIGHT, counter is not None),
            ),
            (
                consumer,
                (1, o_desc, q, k, v, o_s, ids, lse, top, sinks, lengths, ragged, z, n_tiles, qk_scale, cap, pointers,
                 strides, HEADS, BLOCK_N, STAGES, WIDE, TURNS, D, DV, LEFT, RIGHT, counter is not None),
            ),
            (
                producer,
                (q_desc, k_desc, v_desc, q, k, v, ids, counter, lengths, ragged, z, n_tiles, HEADS, BLOCK_N, STAGES, D,
                 DV, LEFT, RIGHT),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
