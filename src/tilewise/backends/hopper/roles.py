"""The consumers of the backward where dK and dV have 256 columns: one owns dV of 64 keys, the other dK.

dK and dV of 64 keys are 128 registers a thread of one warp group each, so neither has room for both. The owner of dV
computes S and P, that of dK dP and dS: the result of the first of its two products feeds the second as a register
operand. P, under a softcap times its slope, crosses to the owner of dK through shared memory.
"""

# No ``from __future__ import annotations``: Gluon reads the annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from .columns import probabilities, unmasked, work
from .pipeline import (
    ROWS,
    await_full,
    hidden_zero,
    is_odd,
    matrix,
    named_barrier,
    release,
    store_rows,
    taken,
    wgmma_layout,
)

# Named barriers, each of them two: for even and for odd steps, and for the places of V and of K.
GIVEN = gl.constexpr(8)  # P is there
READ = gl.constexpr(10)  # and was read
FREE = gl.constexpr(12)  # the other consumer has read V, or K, for the last time


# --- the owner of dV ------------------------------------------------------------------------------


@gluon.jit
def step_of_values(
    dv, it, i0, j0, end, open_from, open_to, steps, do, k, crossing, own, qk_scale, cap, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """P of the tile of queries from row i0 on, and what it adds to dV."""
    LAYOUT: gl.constexpr = wgmma_layout(ROWS)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv.type.layout, k_width=2)
    slot = it % STAGES
    dtype: gl.constexpr = crossing.dtype
    await_full(steps, it, STAGES)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    q_t = matrix(steps.q, slot).permute((1, 0))
    s_run = warpgroup_mma(matrix(k.data, hidden_zero()), q_t, zeros, use_acc=False, is_async=True)
    lse = steps.stats.index(slot).slice(0, ROWS, dim=0).load(gl.SliceLayout(0, LAYOUT))
    s = warpgroup_mma_wait(0, deps=[s_run])
    p, slope = probabilities(s, lse, i0, j0, end, open_from, open_to, own, qk_scale, cap, LEFT, RIGHT)
    p = gl.convert_layout(p.to(dtype), P_LAYOUT)
    dv = warpgroup_mma(p, matrix(do, slot), dv, is_async=True)
    named_barrier("sync", READ + (it & 1), 256)
    crossing.index(it & 1).store(slope.to(dtype))
    named_barrier("arrive", GIVEN + (it & 1), 256)
    dv, _p = warpgroup_mma_wait(0, deps=[dv, p])
    release(steps, slot)
    return dv


@gluon.jit
def owner_of_values(
    dv_desc, steps, do, k, v, crossing, ids, odd, lengths, ragged, to_v, z, n_n, slots, n_tiles, qk_scale, cap,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DV: gl.constexpr, COLS: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    t = taken(ids, 0, 4)
    while t < n_tiles:
        tile, b, kv, end, last, n, own, start = work(t, z, n_n, lengths, ragged, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        j0 = tile * BLOCK_N
        open_from, open_to = unmasked(j0, end, own.len_q, own.low, own.high, BLOCK_N, LEFT, RIGHT)
        dv = gl.zeros([ROWS, COLS], gl.float32, wgmma_layout(COLS))
        await_full(k, done - 1, 1)
        for x in range(n * z.group):
            i0 = (last - x // z.group) * BLOCK_M
            dv = step_of_values(
                dv, it, i0, j0, end, open_from, open_to, steps, do, k, crossing, own, qk_scale, cap, STAGES, LEFT,
                RIGHT,
            )  # fmt: skip
            it += 1
        named_barrier("arrive", FREE + 1, 256)
        await_full(v, done - 1, 1)
        named_barrier("sync", FREE, 256)
        store_rows(dv_desc, v.data.index(0), matrix(v.data, 0), dv, b, kv, j0, start[1], own.len_k, to_v, DV)
        if odd is not None:
            gl.store(odd + (kv * slots + start[3] + tile) * 2, is_odd(dv).to(gl.int8))
        t = taken(ids, done, 4)
        tma.store_wait(0)
        release(v, 0)
        done += 1
    for side in gl.static_range(2):  # the other's last
        named_barrier("sync", READ + side, 256)


# --- the owner of dK ------------------------------------------------------------------------------


@gluon.jit
def step_of_keys(dk, it, steps, do, v, crossing, STAGES: gl.constexpr):
    """dS of a step, and what it adds to dK."""
    LAYOUT: gl.constexpr = wgmma_layout(ROWS)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    slot = it % STAGES
    dtype: gl.constexpr = crossing.dtype
    await_full(steps, it, STAGES)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    do_t = matrix(do, slot).permute((1, 0))
    dp_run = warpgroup_mma(matrix(v.data, hidden_zero()), do_t, zeros, use_acc=False, is_async=True)
    delta = steps.stats.index(slot).slice(ROWS, ROWS, dim=0).load(gl.SliceLayout(0, LAYOUT))
    dp = warpgroup_mma_wait(0, deps=[dp_run])
    named_barrier("sync", GIVEN + (it & 1), 256)
    slope = crossing.index(it & 1).load(LAYOUT).to(gl.float32)
    named_barrier("arrive", READ + (it & 1), 256)
    d_s = gl.convert_layout((slope * (dp - delta[None, :])).to(dtype), P_LAYOUT)
    dk = warpgroup_mma(d_s, matrix(steps.q, slot), dk, is_async=True)
    dk, _d_s = warpgroup_mma_wait(0, deps=[dk, d_s])
    release(steps, slot)
    return dk


@gluon.jit
def owner_of_keys(
    dk_desc, steps, do, k, v, crossing, ids, odd, lengths, ragged, to_k, z, n_n, slots, n_tiles, scale,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, COLS: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    for side in gl.static_range(2):
        named_barrier("arrive", READ + side, 256)
    t = taken(ids, 0, 4)
    while t < n_tiles:
        tile, b, kv, _end, _last, n, own, start = work(t, z, n_n, lengths, ragged, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        dk = gl.zeros([ROWS, COLS], gl.float32, wgmma_layout(COLS))
        await_full(v, done - 1, 1)
        for _ in range(n * z.group):
            dk = step_of_keys(dk, it, steps, do, v, crossing, STAGES)
            it += 1
        named_barrier("arrive", FREE, 256)
        await_full(k, done - 1, 1)
        named_barrier("sync", FREE + 1, 256)
        store_rows(
            dk_desc, k.data.index(0), matrix(k.data, 0), dk * scale, b, kv, tile * BLOCK_N, start[1], own.len_k, to_k, D
        )  # fmt: skip
        if odd is not None:
            gl.store(odd + (kv * slots + start[3] + tile) * 2 + 1, is_odd(dk).to(gl.int8))
        t = taken(ids, done, 4)
        tma.store_wait(0)
        release(k, 0)
        done += 1
