"""The backward kernels: dK and dV of a tile of keys stay in registers, tiles of queries stream past, dQ is added up.

A program (one an SM) works on tiles of 128 keys, and for each on the tiles of queries that see them, of all query heads
of the key head. Scores are transposed: each of two consumer warp groups owns 64 keys, so that P^T
and dS^T feed dV and dK as register operands. dS crosses to the other consumer through shared memory, for dQ, a step
later: neither waits for the other. What runs beside the consumers:

- the producer warp loads K and V of a tile, and Q, dO, lse and delta of every step;
- two writer warps add dQ, one of even and one of odd steps, to fp32 sums in global memory, by TMA.

Sums are repeatable bit for bit: the tiles of keys that a tile of queries sees add in order of their number, and each
waits for its turn. Tiles are handed out in this order, and only to programs that run, so whoever has its turn is at
work. All go through the queries from the last to the first, and start one after the other: there is little to wait for.
The first stores instead of adding, so nothing needs zeros.

Before, ``prepare_kernel`` takes delta and lse; after, ``finish_kernel`` rounds dQ. What a mask must hide and is not
finite is left to ``careful.py``.
"""

# No ``from __future__ import annotations``: Gluon reads the annotations.

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from . import config
from .gluon import tma_load, tma_store
from .pipeline import (
    Sizes,
    await_empty,
    await_full,
    barriers,
    fetch,
    is_odd,
    named_barrier,
    place,
    release,
    ring,
    staged,
    tiles,
    wgmma_layout,
)

ROWS = gl.constexpr(config.ROWS)
BLOCK_N = gl.constexpr(config.BLOCK_N)
INF = gl.constexpr(float("inf"))
LOG2E = gl.constexpr(1.4426950408889634)
# Named barriers, each of them two, for steps of an even and an odd number; CROSSED and SUM_EMPTY two of consumer w.
SUM_FULL = gl.constexpr(6)  # dQ of both consumers is staged
CROSSED = gl.constexpr(8)  # the other consumer's dS is there
SUM_EMPTY = gl.constexpr(12)  # it may stage its dQ


# --- which tiles ----------------------------------------------------------------------------------


@gluon.jit
def visits(j0, end, len_q, low, high, BLOCK_M: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """The tiles of queries that see keys j0 .. j0 + BLOCK_N, of which those from end on are hidden: (last, n).

    low, high: as in the forward's ``span``.
    """
    first, stop = 0, len_q
    if RIGHT:
        first = max(j0 - high, 0) // BLOCK_M
    if LEFT:
        stop = max(min(min(j0 + BLOCK_N, end) - low, len_q), 0)
    last = (stop + BLOCK_M - 1) // BLOCK_M - 1
    n = max(last + 1 - first, 0)
    if j0 >= end:
        n = 0
    return last, n


@gluon.jit
def turn(tile, i0, low, LEFT: gl.constexpr):
    """How many tiles of keys add to dQ of rows i0 .. before this one."""
    if LEFT:
        return tile - max(i0 + low, 0) // BLOCK_N
    else:
        return tile


@gluon.jit
def unmasked(j0, end, len_q, low, high, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """64 queries that start at least and at most there see all of keys j0 .. j0 + BLOCK_N, and there are as many."""
    lo, hi = 0, len_q - ROWS
    if RIGHT:
        lo = j0 + BLOCK_N - 1 - high
    if LEFT:
        hi = min(hi, j0 + 1 - ROWS - low)
    if j0 + BLOCK_N > end:
        hi = -1
    return lo, hi


@gluon.jit
def work(t, z, lengths, BLOCK_M: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Work item t as (tile of keys, batch entry and key head, end of the keys, and what it ``visits``)."""
    n_n = (z.len_k + BLOCK_N - 1) // BLOCK_N
    back, pair = place(t, n_n, z.pairs, z.section, True)
    tile = n_n - 1 - back
    end = z.len_k
    if lengths is not None:
        end = max(min(gl.load(lengths + pair // z.heads).to(gl.int32), end), 0)
    last, n = visits(tile * BLOCK_N, end, z.len_q, z.low, z.high, BLOCK_M, LEFT, RIGHT)
    return tile, pair, end, last, n


@aggregate
class Steps:
    """The buffers of the steps: a ring whose slots hold a tile of q, one of dO, and lse and delta of its rows."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, do, stats, full, empty):
        self.q, self.do, self.stats, self.full, self.empty = q, do, stats, full, empty


# --- the producer ---------------------------------------------------------------------------------


@gluon.jit
def load_keys(k_desc, v_desc, k, v, b, kv, tile, done, D: gl.constexpr):
    """K and V of a tile, once the consumers have stored dK and dV of the last: they stage them in the place of V."""
    await_empty(k, done, 1)
    fetch(k_desc, b, kv, tile * BLOCK_N, k, 0, BLOCK_N, D)
    await_empty(v, done, 1)
    fetch(v_desc, b, kv, tile * BLOCK_N, v, 0, BLOCK_N, D)


@gluon.jit
def take(ticket, ids, done):
    """The next work item, handed on to the other partitions."""
    t = gl.atomic_add(ticket, 1)
    await_empty(ids, done, 2)
    ids.data.index(done & 1).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(ids.full.index(done & 1), count=1)
    return t


@gluon.jit
def taken(ids, done, WARPS: gl.constexpr):
    await_full(ids, done, 2)
    t = gl.max(ids.data.index(done & 1).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    release(ids, done & 1)
    return t


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, do_desc, stats_desc, steps, k, v, ids, ticket, lengths, z, n_tiles, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    t = take(ticket, ids, 0)
    while t < n_tiles:
        tile, pair, _end, last, n = work(t, z, lengths, BLOCK_M, LEFT, RIGHT)
        b = pair // z.heads
        kv = pair - b * z.heads
        if n == 0:
            load_keys(k_desc, v_desc, k, v, b, kv, tile, done - 1, D)
        for g in range(z.group):
            h = kv * z.group + g
            for x in range(n):
                m = last - x
                slot = it % STAGES
                await_empty(steps, it, STAGES)
                full = steps.full.index(slot)
                mbarrier.expect(full, 2 * BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
                tma_load(q_desc, [b, h, m * BLOCK_M, 0], full, steps.q.index(slot))
                if (g == 0) & (x == 0):  # the first Q comes before K is free
                    load_keys(k_desc, v_desc, k, v, b, kv, tile, done - 1, D)
                tma_load(do_desc, [b, h, m * BLOCK_M, 0], full, steps.do.index(slot))
                at = ((pair * z.group + g) * z.n_m + m) * (2 * BLOCK_M)
                tma_load(stats_desc, [at], full, steps.stats.index(slot))
                it += 1
        t = take(ticket, ids, done)
        done += 1


# --- the writers ----------------------------------------------------------------------------------


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to one in global memory. Gluon 3.6 has the operation, but no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def seen(at):
    """How many have added, and all that they wrote before they said so."""
    asm: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    return gl.inline_asm_elementwise(asm, "=r,l", [at.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_proxy():
    """Between what is seen and what TMA does next."""
    asm: gl.constexpr = "fence.proxy.async; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def publish(at, value):
    """Once all that TMA wrote for this warp is written."""
    asm: gl.constexpr = (
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;"
    )
    gl.inline_asm_elementwise(asm, "=r,l,r", [at.to(gl.int64), value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def writer(
    N: gl.constexpr, sum_desc, sums, ids, turns, lengths, z, n_tiles, BLOCK_M: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):  # fmt: skip
    """Add dQ of every other step, from step N on. Until it is published takes about as long as a step."""
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    for w in gl.static_range(2):
        named_barrier("arrive", SUM_EMPTY + 2 * N + w, 160)
    t = taken(ids, 0, 1)
    while t < n_tiles:
        tile, pair, _end, last, n = work(t, z, lengths, BLOCK_M, LEFT, RIGHT)
        for g in range(z.group):
            head = (pair * z.group + g) * z.n_m
            now = gl.to_tensor(-1)
            for x in range((it + N) & 1, n, 2):
                m = last - x
                mine = turn(tile, m * BLOCK_M, z.low, LEFT)
                if now < 0:
                    now = seen(turns + head + m)
                while now < mine:
                    now = seen(turns + head + m)
                fence_proxy()
                named_barrier("sync", SUM_FULL + N, 288)
                if mine == 0:
                    tma_store(sum_desc, [(head + m) * BLOCK_M, 0], sums.index(N))
                else:
                    tma_add(sum_desc, [(head + m) * BLOCK_M, 0], sums.index(N))
                now = seen(turns + head + max(m - 2, 0))  # for the next: it is known by the time that it matters
                tma.store_wait(0)  # it is read
                for w in gl.static_range(2):
                    named_barrier("arrive", SUM_EMPTY + 2 * N + w, 160)
                publish(turns + head + m, mine + 1)
            it += n
        t = taken(ids, done, 1)
        done += 1


# --- the consumers --------------------------------------------------------------------------------


@gluon.jit
def hidden_zero():
    """A zero that the compiler does not see: what is indexed by it is not hoisted out of the loop, to be spilled."""
    zero = gl.to_tensor(0)
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_dq(ds, k, it, W: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """The product for dQ of step it: this consumer's half, of the rows where there are 128, else of the channels."""
    COLS: gl.constexpr = D if BLOCK_M == 2 * ROWS else D // 2
    a = ds.index(it & 1)
    b = k.data.index(hidden_zero()).reshape([BLOCK_N, D])
    if BLOCK_M == 2 * ROWS:
        a = a.slice(W * ROWS, ROWS, dim=1)
    else:
        b = b.slice(W * COLS, COLS, dim=1)
    zeros = gl.zeros([ROWS, COLS], gl.float32, wgmma_layout(COLS))
    return warpgroup_mma(a.permute((1, 0)), b, zeros, use_acc=False, is_async=True)


@gluon.jit
def stage_dq(dq, sums, it, W: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """Hand dQ of step it to its writer."""
    named_barrier("sync", SUM_EMPTY + 2 * (it & 1) + W, 160)
    stage = sums.index(it & 1)
    if BLOCK_M == 2 * ROWS:
        staged(stage.slice(W * ROWS, ROWS, dim=0), dq)
    else:
        staged(stage.slice(W * (D // 2), D // 2, dim=1), dq)
    named_barrier("arrive", SUM_FULL + (it & 1), 288)


@gluon.jit
def probabilities(s, lse, i0, j0, end, open_from, open_to, z, qk_scale, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """P^T (64, 64) of keys from j0 and queries from i0 on."""
    p = gl.exp2(s * qk_scale - lse[None, :])
    if (i0 < open_from) | (i0 > open_to):
        j = j0 + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
        i = i0 + gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
        keep = (j < end)[:, None] & (i < z.len_q)[None, :]
        if RIGHT:
            keep = keep & (j[:, None] <= (i + z.high)[None, :])
        if LEFT:
            keep = keep & (j[:, None] >= (i + z.low)[None, :])
        p = gl.where(keep, p, 0.0)
    return p


@gluon.jit
def step(
    dk, dv, it, i0, j0, end, open_from, open_to, steps, k, v, ds, sums, z, qk_scale, W: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    """What the tile of queries from row i0 on adds to dK and dV; and dQ of the step before.

    FIRST: of a tile of keys, where there is no step before. Products are waited for in the order of their start.
    """
    PARTS: gl.constexpr = BLOCK_M // ROWS
    LAYOUT: gl.constexpr = wgmma_layout(ROWS)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(D), k_width=2)
    zero = hidden_zero()
    k_w = k.data.index(zero).reshape([BLOCK_N, D]).slice(W * ROWS, ROWS, dim=0)
    v_w = v.data.index(zero).reshape([BLOCK_N, D]).slice(W * ROWS, ROWS, dim=0)
    slot = it % STAGES
    q = steps.q.index(slot).reshape([BLOCK_M, D])
    do = steps.do.index(slot).reshape([BLOCK_M, D])
    stats = steps.stats.index(slot)
    crossing = ds.index(it & 1).slice(W * ROWS, ROWS, dim=0)
    dtype: gl.constexpr = q.dtype
    await_full(steps, it, STAGES)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    s_run = warpgroup_mma(k_w, q.slice(0, ROWS, dim=0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp_run = warpgroup_mma(v_w, do.slice(0, ROWS, dim=0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    for part in gl.static_range(PARTS):
        if part + 1 < PARTS:  # scores of the next part run beside the exponentials of this one
            q_next = q.slice((part + 1) * ROWS, ROWS, dim=0).permute((1, 0))
            s_next = warpgroup_mma(k_w, q_next, zeros, use_acc=False, is_async=True)
        lse = stats.slice(part * ROWS, ROWS, dim=0).load(gl.SliceLayout(0, LAYOUT))
        s = warpgroup_mma_wait(PARTS, deps=[s_run])
        p = probabilities(
            s, lse, i0 + part * ROWS, j0 + W * ROWS, end, open_from, open_to, z, qk_scale, LEFT, RIGHT
        )  # fmt: skip
        do_part = do.slice(part * ROWS, ROWS, dim=0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), P_LAYOUT), do_part, dv, is_async=True)
        delta = stats.slice(BLOCK_M + part * ROWS, ROWS, dim=0).load(gl.SliceLayout(0, LAYOUT))
        dp = warpgroup_mma_wait(2 if part + 1 < PARTS else 1, deps=[dp_run])
        d_s = (p * (dp - delta[None, :])).to(dtype)
        if part == 0 and not FIRST:
            named_barrier("sync", CROSSED + 2 * ((it - 1) & 1) + W, 256)
        if part + 1 < PARTS:
            do_next = do.slice((part + 1) * ROWS, ROWS, dim=0).permute((1, 0))
            dp_run = warpgroup_mma(v_w, do_next, zeros, use_acc=False, is_async=True)
            s_run = s_next
            first = d_s
            crossing.slice(0, ROWS, dim=1).store(first)
    if PARTS > 1:
        crossing = crossing.slice(ROWS, ROWS, dim=1)
    crossing.store(d_s)
    if not FIRST:
        dq_run = start_dq(ds, k, it - 1, W, BLOCK_M, D)
    if PARTS > 1:
        dk = warpgroup_mma(gl.convert_layout(first, P_LAYOUT), q.slice(0, ROWS, dim=0), dk, is_async=True)
    q_last = q.slice((PARTS - 1) * ROWS, ROWS, dim=0)
    dk = warpgroup_mma(gl.convert_layout(d_s, P_LAYOUT), q_last, dk, is_async=True)
    fence_async_shared()  # of the store, beside the products
    if FIRST:
        named_barrier("arrive", CROSSED + 2 * (it & 1) + 1 - W, 256)
    else:
        dq, dv = warpgroup_mma_wait(PARTS, deps=[dq_run, dv])
        # Only now: dS of the step after goes where that of the step before was read.
        named_barrier("arrive", CROSSED + 2 * (it & 1) + 1 - W, 256)
        stage_dq(dq, sums, it - 1, W, BLOCK_M, D)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    release(steps, slot)
    return dk, dv


@gluon.jit
def consumer(
    W: gl.constexpr, dk_desc, dv_desc, steps, k, v, ds, sums, ids, odd, lengths, z, n_tiles, scale, qk_scale,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = wgmma_layout(D)
    # This consumer's rows of V: nobody else reads them, and after its last dP nor does it.
    v_w = v.data.index(0).slice(W * ROWS, ROWS, dim=2)
    stage = v.data.index(0).reshape([BLOCK_N, D]).slice(W * ROWS, ROWS, dim=0)
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    t = taken(ids, 0, 4)
    while t < n_tiles:
        tile, pair, end, last, n = work(t, z, lengths, BLOCK_M, LEFT, RIGHT)
        b = pair // z.heads
        kv = pair - b * z.heads
        j0 = tile * BLOCK_N
        i_last, i_first = last * BLOCK_M, (last + 1 - n) * BLOCK_M
        open_from, open_to = unmasked(j0, end, z.len_q, z.low, z.high, LEFT, RIGHT)
        total = n * z.group
        dk = gl.zeros([ROWS, D], gl.float32, LAYOUT)
        dv = gl.zeros([ROWS, D], gl.float32, LAYOUT)
        await_full(k, done - 1, 1)
        await_full(v, done - 1, 1)
        if total > 0:
            i0 = i_last
            dk, dv = step(
                dk, dv, it, i0, j0, end, open_from, open_to, steps, k, v, ds, sums, z, qk_scale, W, BLOCK_M, STAGES,
                D, LEFT, RIGHT, True,
            )  # fmt: skip
            for _ in range(1, total):
                i0 = gl.where(i0 == i_first, i_last, i0 - BLOCK_M)
                it += 1
                dk, dv = step(
                    dk, dv, it, i0, j0, end, open_from, open_to, steps, k, v, ds, sums, z, qk_scale, W, BLOCK_M,
                    STAGES, D, LEFT, RIGHT, False,
                )  # fmt: skip
        staged(stage, dv.to(stage.dtype))
        tma_store(dv_desc, [b, kv, j0 + W * ROWS, 0], v_w)
        if total > 0:
            named_barrier("sync", CROSSED + 2 * (it & 1) + W, 256)
            dq = warpgroup_mma_wait(0, deps=[start_dq(ds, k, it, W, BLOCK_M, D)])
            stage_dq(dq, sums, it, W, BLOCK_M, D)
            it += 1
        release(k, 0)
        if odd is not None:
            gl.store(odd + (pair * gl.cdiv(z.len_k, BLOCK_N) + tile) * 2 + W, (is_odd(dk) | is_odd(dv)).to(gl.int8))
        tma.store_wait(0)
        staged(stage, (dk * scale).to(stage.dtype))
        tma_store(dk_desc, [b, kv, j0 + W * ROWS, 0], v_w)
        t = taken(ids, done, 4)
        tma.store_wait(0)
        release(v, 0)
        done += 1
    for n in gl.static_range(2):  # the writers' last
        named_barrier("sync", SUM_EMPTY + 2 * n + W, 160)


# The sizes are not specialised: a new length compiles nothing.
@gluon.jit(
    do_not_specialize=[
        "ticket", "odd", "lengths", "heads", "group", "len_q", "len_k", "n_m", "pairs", "section", "n_tiles", "low",
        "high",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sum_desc, dk_desc, dv_desc, turns, ticket, odd, lengths, heads, group,
    len_q, len_k, n_m, pairs, section, n_tiles, low, high, scale, qk_scale, D: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    steps = Steps(
        tiles(q_desc, STAGES, BLOCK_M, D), tiles(do_desc, STAGES, BLOCK_M, D),
        gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], stats_desc.layout), barriers(STAGES, 1),
        barriers(STAGES, 2),
    )  # fmt: skip
    k = ring(tiles(k_desc, 1, BLOCK_N, D), 1, 2)
    v = ring(tiles(v_desc, 1, BLOCK_N, D), 1, 2)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    ds = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK_N, BLOCK_M], DS_LAYOUT)
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, D], sum_desc.layout)
    ids = ring(gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), 2, 4)
    fence_async_shared()
    z = Sizes(heads, group, len_q, len_k, n_m, pairs, section, low, high)
    gl.warp_specialize(
        [
            (
                consumer,
                (0, dk_desc, dv_desc, steps, k, v, ds, sums, ids, odd, lengths, z, n_tiles, scale, qk_scale,
                 BLOCK_M, STAGES, D, LEFT, RIGHT),
            ),
            (
                consumer,
                (1, dk_desc, dv_desc, steps, k, v, ds, sums, ids, odd, lengths, z, n_tiles, scale, qk_scale,
                 BLOCK_M, STAGES, D, LEFT, RIGHT),
            ),
            (
                producer,
                (q_desc, k_desc, v_desc, do_desc, stats_desc, steps, k, v, ids, ticket, lengths, z, n_tiles, BLOCK_M,
                 STAGES, D, LEFT, RIGHT),
            ),
            (writer, (0, sum_desc, sums, ids, turns, lengths, z, n_tiles, BLOCK_M, LEFT, RIGHT)),
            (writer, (1, sum_desc, sums, ids, turns, lengths, z, n_tiles, BLOCK_M, LEFT, RIGHT)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip


# --- before and after -----------------------------------------------------------------------------


@triton.jit
def head_at(x, strides, pair, heads):
    """Address of head pair % heads of batch entry pair // heads."""
    return x + (pair // heads).to(tl.int64) * strides[0] + (pair % heads).to(tl.int64) * strides[1]


@triton.jit(do_not_specialize=["ticket", "heads", "len_q", "n_m"])
def prepare_kernel(
    out, dout, lse, dlse, stats, delta, turns, ticket, out_strides, dout_strides, dlse_strides, heads, len_q, n_m,
    D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """stats of a tile of rows: lse in units of log2, then delta = rowsum(dO * O) - dlse. Nobody has had its turn.

    Rows that there are not, and those without keys, get an lse of inf: P = exp2(S - lse) is 0.
    """
    pid = tl.program_id(0)
    pair = pid // n_m
    rows = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, D)[None, :]
    i = pid % n_m * BLOCK_M + rows
    far = i.to(tl.int64)
    inside = i < len_q
    at_o = head_at(out, out_strides, pair, heads) + far[:, None] * out_strides[2] + channels
    at_do = head_at(dout, dout_strides, pair, heads) + far[:, None] * dout_strides[2] + channels
    o = tl.load(at_o, mask=inside[:, None], other=0.0).to(tl.float32)
    do = tl.load(at_do, mask=inside[:, None], other=0.0).to(tl.float32)
    d = tl.sum(o * do, 1)
    if dlse is not None:
        d -= tl.load(head_at(dlse, dlse_strides, pair, heads) + far * dlse_strides[2], mask=inside, other=0.0)
    at = pair.to(tl.int64) * len_q + i
    row_lse = tl.load(lse + at, mask=inside, other=-INF)
    at_stats = stats + pid.to(tl.int64) * (2 * BLOCK_M) + rows
    tl.store(at_stats, tl.where(row_lse == -INF, INF, row_lse * LOG2E))
    tl.store(at_stats + BLOCK_M, d)
    if delta is not None:
        tl.store(delta + at, d, mask=inside)
    tl.store(turns + pid, 0)
    if pid == 0:
        tl.store(ticket, 0)


@triton.jit(do_not_specialize=["heads", "len_q", "n_m", "tiles"])
def finish_kernel(
    sums, turns, dq, odd, dq_strides, heads, len_q, n_m, tiles, scale, D: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dQ of one of the tiles of ROWS queries, 0 where nothing was added; and whether it is not finite."""
    pid = tl.program_id(0)
    pair = pid // tiles
    i = pid % tiles * ROWS + tl.arange(0, ROWS)[:, None]
    channels = tl.arange(0, D)[None, :]
    first = pair * n_m + pid % tiles * ROWS // BLOCK_M
    row = pair.to(tl.int64) * (n_m * BLOCK_M) + i
    added = tl.load(turns + first) > 0
    x = tl.load(sums + row * D + channels, mask=(i < len_q) & added, other=0.0)
    at = head_at(dq, dq_strides, pair, heads) + i.to(tl.int64) * dq_strides[2] + channels
    tl.store(at, (x * scale).to(dq.dtype.element_ty), mask=i < len_q)
    if odd is not None:
        total = tl.sum(tl.sum(x * 0.0, 1), 0)
        tl.store(odd + pid, (total != total).to(tl.int8))
