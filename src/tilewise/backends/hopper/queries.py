"""The kernel for dQ of wide heads: a tile of queries stays, blocks of keys and values stream past.

As in the forward, a program (one an SM) works on tiles of 128 queries, 64 of each of two consumer warp groups, and a
producer warp loads. Q and dO of a tile fill over half of the shared memory. So there are two buffers for 64 keys and
one for their values, which is free again once dP is there. The two consumers start products when they are ready: one's
run beside the other's exponentials.
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

from .columns import columns
from .gluon import tma_load
from .kernel import INF, capped, kept, work
from .pipeline import (
    ROWS,
    Sizes,
    await_empty,
    await_full,
    fetch,
    hidden_zero,
    is_odd,
    matrix,
    plane,
    release,
    ring,
    sequence,
    store_rows,
    take,
    taken,
    tiles,
    wgmma_layout,
)


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, do_desc, q, do, k, v, ids, ticket, lengths, ragged, z, n_tiles, STAGES: gl.constexpr,
    COLS: gl.constexpr, COLS_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    t = take(ticket, ids, 0)
    while t < n_tiles:
        row, b, h, _end, last, _right, _full, n = work(t, z, lengths, ragged, 1, ROWS, LEFT, RIGHT)
        first_q, first_k, _own = sequence(b, z, ragged)
        b = plane(b, ragged)
        for w in gl.static_range(2):
            mbarrier.wait(q.empty.index(w), done & 1)
            full = q.full.index(w)
            mbarrier.expect(full, ROWS * (COLS + COLS_V) * 2)
            tma_load(q_desc, [b, h, first_q + row + w * ROWS, 0], full, q.data.index(w))
            tma_load(do_desc, [b, h, first_q + row + w * ROWS, 0], full, do.index(w))
        kv = h // z.group
        for j in range(n):
            at = first_k + (last - 1 - j) * ROWS
            await_empty(k, it, STAGES)
            fetch(k_desc, b, kv, at, k, it % STAGES, ROWS, COLS)
            await_empty(v, it, 1)
            fetch(v_desc, b, kv, at, v, 0, ROWS, COLS_V)
            it += 1
        t = take(ticket, ids, done)
        done += 1


@gluon.jit
def fold(
    dq, it, masked, i0, j0, end, lse, delta, q_ring, do_tiles, k, v, own, qk_scale, cap, W: gl.constexpr,
    STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """What the block of keys from j0 on adds to dQ."""
    LAYOUT: gl.constexpr = wgmma_layout(ROWS)
    S_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq.type.layout, k_width=2)
    slot = it % STAGES
    zero = hidden_zero()
    q, do = matrix(q_ring.data, W + zero), matrix(do_tiles, W + zero)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    await_full(k, it, STAGES)
    s_run = warpgroup_mma(q, matrix(k.data, slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    await_full(v, it, 1)
    v_t = matrix(v.data, zero).permute((1, 0))
    if cap is None:
        dp_run = warpgroup_mma(do, v_t, zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_run])
    else:  # beside a tanh there are no registers for dP
        s = capped(warpgroup_mma_wait(0, deps=[s_run]), cap)
    p = gl.exp2(s * qk_scale - lse[:, None])
    if masked:
        j = j0 + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
        i = i0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        p = gl.where(kept(j, i, end, own.low, own.high, LEFT, RIGHT), p, 0.0)
    if cap is not None:
        p = p * (1 - s * s)
        dp_run = warpgroup_mma(do, v_t, zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(0, deps=[dp_run])
    release(v, 0)
    d_s = gl.convert_layout((p * (dp - delta[:, None])).to(q.dtype), S_LAYOUT)
    dq = warpgroup_mma(d_s, matrix(k.data, slot), dq, is_async=True)
    dq, _d_s = warpgroup_mma_wait(0, deps=[dq, d_s])
    release(k, slot)
    return dq


@gluon.jit
def consumer(
    W: gl.constexpr, dq_desc, q_ring, do_tiles, k, v, ids, stats, odd, lengths, ragged, to_q, z, slots, n_tiles, scale,
    qk_scale, cap, STAGES: gl.constexpr, D: gl.constexpr, COLS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = wgmma_layout(ROWS)
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    t = taken(ids, 0, 4)
    while t < n_tiles:
        row, b, h, end, last, right, full, n = work(t, z, lengths, ragged, 1, ROWS, LEFT, RIGHT)
        first_q, _first_k, own = sequence(b, z, ragged)
        i0 = row + W * ROWS
        slot = h * slots + i0 // ROWS
        if ragged[2] is None:
            slot += b * z.heads * slots
        else:
            slot += first_q // ROWS + b
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        inside = i0 + rows < own.len_q
        lse = gl.load(stats + slot * (2 * ROWS) + rows, mask=inside, other=INF)
        delta = gl.load(stats + slot * (2 * ROWS) + ROWS + rows, mask=inside, other=0.0)
        dq = gl.zeros([ROWS, COLS], gl.float32, wgmma_layout(COLS))
        mbarrier.wait(q_ring.full.index(W), (done & 1) ^ 1)
        for j in range(n):
            masked = (j < right) | (j >= right + full)
            dq = fold(
                dq, it, masked, i0, (last - 1 - j) * ROWS, end, lse, delta, q_ring, do_tiles, k, v, own, qk_scale, cap,
                W, STAGES, LEFT, RIGHT,
            )  # fmt: skip
            it += 1
        if odd is not None:
            gl.store(odd + slot, is_odd(dq).to(gl.int8), mask=i0 < own.len_q)
        view, stage = q_ring.data.index(W), matrix(q_ring.data, W)
        store_rows(dq_desc, view, stage, dq * scale, plane(b, ragged), h, i0, first_q, own.len_q, to_q, D)
        t = taken(ids, done, 4)
        tma.store_wait(0)
        mbarrier.arrive(q_ring.empty.index(W), count=1)
        done += 1


# The sizes are not specialised: a new length compiles nothing.
@gluon.jit(
    do_not_specialize=[
        "ticket", "odd", "lengths", "heads", "group", "len_q", "len_k", "n_m", "slots", "pairs", "section", "low",
        "high", "cu_q", "cu_k", "items", "skew", "dq_h", "dq_l",
    ]
)  # fmt: skip
def queries_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, stats, ticket, odd, lengths, heads, group, len_q, len_k, n_m, slots,
    pairs, section, low, high, scale, qk_scale, cap, cu_q, cu_k, items, skew, dq_ptr, dq_h: gl.int64, dq_l: gl.int64,
    D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = columns(D, DV)
    COLS_V: gl.constexpr = columns(DV, D)
    q = ring(tiles(q_desc, 2, ROWS, COLS), 2, 1)
    do = tiles(do_desc, 2, ROWS, COLS_V)
    k = ring(tiles(k_desc, STAGES, ROWS, COLS), STAGES, 2)
    v = ring(tiles(v_desc, 1, ROWS, COLS_V), 1, 2)
    ids = ring(gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), 2, 2)
    fence_async_shared()
    ragged, to_q = (cu_q, cu_k, items, skew), (dq_ptr, dq_h, dq_l)  # without ragged sequences None, and 0
    n_tiles = n_m * pairs
    if items is not None:
        n_tiles = gl.load(items) * pairs
        n_m = gl.maximum(gl.load(items), 1)
    z = Sizes(heads, group, len_q, len_k, n_m, pairs, section, low, high)
    gl.warp_specialize(
        [
            (
                consumer,
                (0, dq_desc, q, do, k, v, ids, stats, odd, lengths, ragged, to_q, z, slots, n_tiles, scale, qk_scale,
                 cap, STAGES, D, COLS, LEFT, RIGHT),
            ),
            (
                consumer,
                (1, dq_desc, q, do, k, v, ids, stats, odd, lengths, ragged, to_q, z, slots, n_tiles, scale, qk_scale,
                 cap, STAGES, D, COLS, LEFT, RIGHT),
            ),
            (
                producer,
                (q_desc, k_desc, v_desc, do_desc, q, do, k, v, ids, ticket, lengths, ragged, z, n_tiles, STAGES, COLS,
                 COLS_V, LEFT, RIGHT),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
