"""The consumers of the backward where dK and dV have 256 columns: one owns dV of 64 keys, the other dK.

dK and dV of 64 keys are 128 registers a thread of one warp group each, so neither has room for both. The owner of dV
computes S and P, that of dK dP and dS: two products each, whose results feed the third as register operands. P crosses
to the owner of dK through shared memory, and dS back; of dQ = dS K each computes half of the columns, the owner of dV a
step later. Q is loaded a step ahead. dO has one buffer, and is loaded while dK, dQ and the next S are computed.
"""

# No ``from __future__ import annotations``: Gluon reads the annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .columns import (
    SUM_EMPTY,
    SUM_FULL,
    columns,
    fence_proxy,
    probabilities,
    publish,
    seen,
    store_keys,
    taken,
    tma_add,
    turn,
    unmasked,
    work,
)
from .gluon import tma_store
from .pipeline import (
    ROWS,
    await_full,
    halves,
    hidden_zero,
    is_odd,
    matrix,
    named_barrier,
    release,
    staged,
    wgmma_layout,
)

# Named barriers.
GIVEN = gl.constexpr(8)  # P is there for the owner of dK
RETURNED = gl.constexpr(9)  # that has read it, and its dS is there
FREE = gl.constexpr(10)  # the owner of dV reads K no more


@gluon.jit
def start_half(ds, k, it, W: gl.constexpr, COLS: gl.constexpr):
    """The product for half W of the columns of dQ of step it."""
    N: gl.constexpr = COLS // 2
    b = matrix(k.data, hidden_zero()).slice(W * N, N, dim=1)
    zeros = gl.zeros([ROWS, N], gl.float32, wgmma_layout(N))
    return warpgroup_mma(ds.index(it & 1).permute((1, 0)), b, zeros, use_acc=False, is_async=True)


@gluon.jit
def stage_piece(dq, sums, W: gl.constexpr):
    named_barrier("sync", SUM_EMPTY + W, 160)
    staged(sums.index(W), dq)
    named_barrier("arrive", SUM_FULL + W, 160)


@gluon.jit
def stage_half(dq, sums, W: gl.constexpr):
    """Hand half W of the columns of dQ to its writer, 64 at a time."""
    if dq.shape[1] == sums.shape[2]:
        stage_piece(dq, sums, W)
    else:
        left, right = halves(dq)
        stage_piece(left, sums, W)
        stage_piece(right, sums, W)


@gluon.jit
def writer_of_half(
    W: gl.constexpr, sum_desc, sums, ids, turns, lengths, ragged, z, n_n, n_tiles, COLS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Add half W of the columns of dQ of every step. Each half has turns of its own."""
    PIECE: gl.constexpr = sums.shape[2]
    PIECES: gl.constexpr = COLS // 2 // PIECE
    done = gl.to_tensor(1)
    named_barrier("arrive", SUM_EMPTY + W, 160)
    t = taken(ids, 0, 1)
    while t < n_tiles:
        tile, _b, kv, _end, last, n, own, start = work(t, z, n_n, lengths, ragged, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        for g in range(z.group):
            head = (kv * z.group + g) * z.n_m + start[2]
            now = gl.to_tensor(-1)
            for x in range(n):
                m = last - x
                at = turns + 2 * (head + m) + W
                mine = turn(tile, m * BLOCK_M, own.low, BLOCK_N, LEFT)
                if now < 0:
                    now = seen(at)
                while now < mine:
                    now = seen(at)
                fence_proxy()
                for piece in gl.static_range(PIECES):
                    place = [(head + m) * BLOCK_M, W * (COLS // 2) + piece * PIECE]
                    named_barrier("sync", SUM_FULL + W, 160)
                    if mine == 0:
                        tma_store(sum_desc, place, sums.index(W))
                    else:
                        tma_add(sum_desc, place, sums.index(W))
                    if piece == PIECES - 1:
                        now = seen(turns + 2 * (head + max(m - 1, 0)) + W)  # for the next
                    tma.store_wait(0)  # it is read
                    named_barrier("arrive", SUM_EMPTY + W, 160)
                publish(at, mine + 1)
        t = taken(ids, done, 1)
        done += 1


# --- the owner of dV ------------------------------------------------------------------------------


@gluon.jit
def step_of_values(
    dv, it, i0, j0, end, open_from, open_to, steps, do, k, ps, ds, sums, own, qk_scale, cap, STAGES: gl.constexpr,
    COLS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """P of a step and what it adds to dV; and half of dQ of the step before. FIRST: there is none."""
    LAYOUT: gl.constexpr = wgmma_layout(ROWS)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv.type.layout, k_width=2)
    slot = it % STAGES
    await_full(steps, it, STAGES)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    q_t = matrix(steps.q, slot).permute((1, 0))
    s_run = warpgroup_mma(matrix(k.data, hidden_zero()), q_t, zeros, use_acc=False, is_async=True)
    lse = steps.stats.index(slot).slice(0, ROWS, dim=0).load(gl.SliceLayout(0, LAYOUT))
    s = warpgroup_mma_wait(0, deps=[s_run])
    p, slope = probabilities(s, lse, i0, j0, end, open_from, open_to, own, qk_scale, cap, LEFT, RIGHT)
    operand, slope = gl.convert_layout(p.to(ps.dtype), P_LAYOUT), slope.to(ps.dtype)
    if not FIRST:
        named_barrier("sync", RETURNED, 256)
    ps.store(slope)
    named_barrier("arrive", GIVEN, 256)
    if not FIRST:
        dq_run = start_half(ds, k, it - 1, 0, COLS)
    await_full(do, it, 1)
    dv = warpgroup_mma(operand, matrix(do.data, hidden_zero()), dv, is_async=True)
    if not FIRST:
        dq, dv = warpgroup_mma_wait(1, deps=[dq_run, dv])
        stage_half(dq, sums, 0)
    dv, _operand = warpgroup_mma_wait(0, deps=[dv, operand])
    release(do, 0)
    release(steps, slot)
    return dv


@gluon.jit
def owner_of_values(
    dv_desc, steps, do, k, v, ps, ds, sums, ids, odd, lengths, ragged, z, n_n, slots, n_tiles, qk_scale, cap,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = columns(D, DV)
    COLS_V: gl.constexpr = columns(DV, D)
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    t = taken(ids, 0, 4)
    while t < n_tiles:
        tile, b, kv, end, last, n, own, start = work(t, z, n_n, lengths, ragged, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        j0 = tile * BLOCK_N
        i_last, i_first = last * BLOCK_M, (last + 1 - n) * BLOCK_M
        open_from, open_to = unmasked(j0, end, own.len_q, own.low, own.high, BLOCK_N, LEFT, RIGHT)
        total = n * z.group
        dv = gl.zeros([ROWS, COLS_V], gl.float32, wgmma_layout(COLS_V))
        await_full(k, done - 1, 1)
        if total > 0:
            i0 = i_last
            dv = step_of_values(
                dv, it, i0, j0, end, open_from, open_to, steps, do, k, ps, ds, sums, own, qk_scale, cap, STAGES, COLS,
                LEFT, RIGHT, True,
            )  # fmt: skip
            for _ in range(1, total):
                i0 = gl.where(i0 == i_first, i_last, i0 - BLOCK_M)
                it += 1
                dv = step_of_values(
                    dv, it, i0, j0, end, open_from, open_to, steps, do, k, ps, ds, sums, own, qk_scale, cap, STAGES,
                    COLS, LEFT, RIGHT, False,
                )  # fmt: skip
            named_barrier("sync", RETURNED, 256)
            dq = warpgroup_mma_wait(0, deps=[start_half(ds, k, it, 0, COLS)])
            stage_half(dq, sums, 0)
            it += 1
        named_barrier("arrive", FREE, 256)
        await_full(v, done - 1, 1)  # whose place dV takes: the last dP is there
        view = v.data.index(0)
        store_keys(
            dv_desc, view, matrix(v.data, 0), dv, b, kv, j0, own, start, ragged, ragged[7], ragged[8], ragged[9], DV
        )  # fmt: skip
        if odd is not None:
            gl.store(odd + (kv * slots + start[3] + tile) * 2, is_odd(dv).to(gl.int8))
        t = taken(ids, done, 4)
        tma.store_wait(0)
        release(v, 0)
        done += 1
    named_barrier("sync", SUM_EMPTY, 160)  # the writer's last


# --- the owner of dK ------------------------------------------------------------------------------


@gluon.jit
def step_of_keys(
    dk, it, steps, do, k, v, ps, ds, sums, STAGES: gl.constexpr, COLS: gl.constexpr
):  # fmt: skip
    """dS of a step, what it adds to dK, and half of its dQ."""
    LAYOUT: gl.constexpr = wgmma_layout(ROWS)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    slot = it % STAGES
    await_full(do, it, 1)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    do_t = matrix(do.data, hidden_zero()).permute((1, 0))
    dp_run = warpgroup_mma(matrix(v.data, hidden_zero()), do_t, zeros, use_acc=False, is_async=True)
    await_full(steps, it, STAGES)
    delta = steps.stats.index(slot).slice(ROWS, ROWS, dim=0).load(gl.SliceLayout(0, LAYOUT))
    dp = warpgroup_mma_wait(0, deps=[dp_run])
    release(do, 0)
    named_barrier("sync", GIVEN, 256)
    d_s = (ps.load(LAYOUT).to(gl.float32) * (dp - delta[None, :])).to(ps.dtype)
    ds.index(it & 1).store(d_s)
    fence_async_shared()
    named_barrier("arrive", RETURNED, 256)
    operand = gl.convert_layout(d_s, P_LAYOUT)
    dq_run = start_half(ds, k, it, 1, COLS)
    dk = warpgroup_mma(operand, matrix(steps.q, slot), dk, is_async=True)
    dq, dk = warpgroup_mma_wait(1, deps=[dq_run, dk])
    stage_half(dq, sums, 1)
    dk, _operand = warpgroup_mma_wait(0, deps=[dk, operand])
    release(steps, slot)
    return dk


@gluon.jit
def owner_of_keys(
    dk_desc, steps, do, k, v, ps, ds, sums, ids, odd, lengths, ragged, z, n_n, slots, n_tiles, scale,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = columns(D, DV)
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    t = taken(ids, 0, 4)
    while t < n_tiles:
        tile, b, kv, _end, _last, n, own, start = work(t, z, n_n, lengths, ragged, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        dk = gl.zeros([ROWS, COLS], gl.float32, wgmma_layout(COLS))
        await_full(k, done - 1, 1)
        await_full(v, done - 1, 1)
        for _ in range(n * z.group):
            dk = step_of_keys(dk, it, steps, do, k, v, ps, ds, sums, STAGES, COLS)
            it += 1
        named_barrier("sync", FREE, 256)  # dK takes the place of K
        store_keys(
            dk_desc, k.data.index(0), matrix(k.data, 0), dk * scale, b, kv, tile * BLOCK_N, own, start, ragged,
            ragged[4], ragged[5], ragged[6], D,
        )  # fmt: skip
        if odd is not None:
            gl.store(odd + (kv * slots + start[3] + tile) * 2 + 1, is_odd(dk).to(gl.int8))
        t = taken(ids, done, 4)
        tma.store_wait(0)
        release(k, 0)
        done += 1
    named_barrier("sync", SUM_EMPTY + 1, 160)
