"""The backward kernel: dK and dV of a tile of keys stay in registers, tiles of queries stream past, dQ is added up.

A program (one an SM) works on tiles of keys, and for each on the tiles of queries that see them, of all query heads
of the key head. Scores are transposed: keys are rows, so that P^T and dS^T feed dV and dK as register operands. Each of
two consumer warp groups owns 64 of 128 keys. dS crosses to the other through shared memory, for dQ, a step later:
neither waits for the other. What runs beside the consumers:

- the producer warp loads K and V of a tile, and Q, dO, lse and delta of every step;
- two writer warps add dQ, one of even and one of odd steps, to fp32 sums in global memory, by TMA.

Sums are repeatable bit for bit: the tiles of keys that a tile of queries sees add in order of their number, and each
waits for its turn. Tiles are handed out in this order, and only to programs that run, so whoever has its turn is at
work. All go through the queries from the last to the first, a tile of all heads at a time, and start one after the
other: there is little to wait for. (Head after head, a causal mask would make all as slow as the first tile of keys,
which the most queries see.) The first stores instead of adding, so nothing needs zeros.

Beyond 128 columns dK and dV of 64 keys fill the registers of both consumers: one owns dK, one dV (``roles.py``). With
64 keys twice as much is added to dQ for as many products, and adding takes longer than computing S and dP once more:
there dQ has a kernel of its own, ``queries.py``.

Tiles have a power of two of columns; beyond the head dim TMA fills them with zeros, and stores nothing. Before it,
and after it where it adds up dQ, runs a kernel of ``around.py``. What a mask must hide and is not finite is left to
``careful.py``.
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

from .columns import (
    SUM_EMPTY,
    SUM_FULL,
    Steps,
    columns,
    fence_proxy,
    probabilities,
    publish,
    seen,
    tma_add,
    turn,
    unmasked,
    work,
)
from .gluon import tma_load, tma_store
from .pipeline import (
    ROWS,
    Sizes,
    await_empty,
    await_full,
    barriers,
    fetch,
    hidden_zero,
    is_odd,
    named_barrier,
    plane,
    release,
    ring,
    store_rows,
    take,
    taken,
    tiles,
    wgmma_layout,
)
from .roles import owner_of_keys, owner_of_values

CROSSED = gl.constexpr(8)  # a named barrier of each consumer, for even and for odd steps: the other's dS is there


# --- the producer ---------------------------------------------------------------------------------


@gluon.jit
def load_keys(
    k_desc, v_desc, k, v, b, kv, row, done, BLOCK_N: gl.constexpr, COLS: gl.constexpr, COLS_V: gl.constexpr
):  # fmt: skip
    """K and V of a tile, once the consumers have stored dK and dV of the last: they stage them there."""
    await_empty(k, done, 1)
    fetch(k_desc, b, kv, row, k, 0, BLOCK_N, COLS)
    await_empty(v, done, 1)
    fetch(v_desc, b, kv, row, v, 0, BLOCK_N, COLS_V)


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, do_desc, stats_desc, steps, do, k, v, ids, ticket, lengths, ragged, z, n_n, n_tiles,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = columns(D, DV)
    COLS_V: gl.constexpr = columns(DV, D)
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    t = take(ticket, ids, 0)
    while t < n_tiles:
        tile, b, kv, _end, last, n, _own, start = work(t, z, n_n, lengths, ragged, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        b = plane(b, ragged)
        row = start[1] + tile * BLOCK_N
        if n == 0:
            load_keys(k_desc, v_desc, k, v, b, kv, row, done - 1, BLOCK_N, COLS, COLS_V)
        for x in range(n):
            m = last - x
            for g in range(z.group):
                h = kv * z.group + g
                slot = it % STAGES
                await_empty(steps, it, STAGES)
                full = steps.full.index(slot)
                mbarrier.expect(full, BLOCK_M * (COLS + COLS_V) * 2 + 2 * BLOCK_M * 4)
                tma_load(q_desc, [b, h, start[0] + m * BLOCK_M, 0], full, steps.q.index(slot))
                at = (h * z.n_m + start[2] + m) * (2 * BLOCK_M)
                tma_load(stats_desc, [at], full, steps.stats.index(slot))
                if (g == 0) & (x == 0):  # the first Q comes before K is free
                    load_keys(k_desc, v_desc, k, v, b, kv, row, done - 1, BLOCK_N, COLS, COLS_V)
                tma_load(do_desc, [b, h, start[0] + m * BLOCK_M, 0], full, do.index(slot))
                it += 1
        t = take(ticket, ids, done)
        done += 1


# --- the writers ----------------------------------------------------------------------------------


@gluon.jit
def place_of(x, last, z):
    """Where the tile of queries of step x is among those of its key head."""
    return x % z.group * z.n_m + last - x // z.group


@gluon.jit
def writer(
    N: gl.constexpr, sum_desc, sums, ids, turns, lengths, ragged, z, n_n, n_tiles, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Add dQ of every other step, from step N on. Until it is published takes about as long as a step."""
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    for w in gl.static_range(2):
        named_barrier("arrive", SUM_EMPTY + 2 * N + w, 160)
    t = taken(ids, 0, 1)
    while t < n_tiles:
        tile, _b, kv, _end, last, n, own, start = work(t, z, n_n, lengths, ragged, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        now = gl.to_tensor(-1)
        first, total = kv * z.group * z.n_m + start[2], n * z.group
        for x in range((it + N) & 1, total, 2):
            slot = first + place_of(x, last, z)
            mine = turn(tile, (last - x // z.group) * BLOCK_M, own.low, BLOCK_N, LEFT)
            if now < 0:
                now = seen(turns + slot)
            while now < mine:
                now = seen(turns + slot)
            fence_proxy()
            named_barrier("sync", SUM_FULL + N, 288)
            if mine == 0:
                tma_store(sum_desc, [slot, 0, 0], sums.index(N))
            else:
                tma_add(sum_desc, [slot, 0, 0], sums.index(N))
            # That of the next is known by the time that it matters.
            now = seen(turns + first + place_of(min(x + 2, total - 1), last, z))
            tma.store_wait(0)  # it is read
            for w in gl.static_range(2):
                named_barrier("arrive", SUM_EMPTY + 2 * N + w, 160)
            publish(turns + slot, mine + 1)
        it += total
        t = taken(ids, done, 1)
        done += 1


# --- the consumers --------------------------------------------------------------------------------


@gluon.jit
def start_dq(
    ds, k, it, W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr
):  # fmt: skip
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
def by_thread(dq):
    """A tile (64, 64) in the order in which the threads of a warp group hold it, 32 numbers a row.

    A thread stores 16 bytes at a time and a warp 512 side by side; as a matrix it was 8, and two rows fell on the same
    banks. ``finish_kernel`` puts them back.
    """
    x = dq.reshape([4, 2, 8, 8, 4, 2])  # a row is a warp, a half of its rows, and 4 lanes; a column 8, a lane, and one
    return x.permute((3, 0, 2, 4, 1, 5)).reshape([ROWS * ROWS // 32, 32])


@gluon.jit
def stage_dq(dq, sums, it, W: gl.constexpr):
    """Put dQ of step it where its writer takes it."""
    named_barrier("sync", SUM_EMPTY + 2 * (it & 1) + W, 160)
    half: gl.constexpr = sums.shape[2] // 2
    stage = sums.index(it & 1).reshape([2 * half, sums.shape[3]]).slice(W * half, half, dim=0)
    stage.store(by_thread(dq))


@gluon.jit
def hand_dq(it):
    """It is there. Stores take a while, and the fence waits for them: let there be something else in between."""
    fence_async_shared()
    named_barrier("arrive", SUM_FULL + (it & 1), 288)


@gluon.jit
def step(
    dk, dv, it, i0, j0, end, open_from, open_to, steps, do_tiles, k, v, ds, sums, own, qk_scale, cap, W: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """What the tile of queries from row i0 on adds to dK and dV; and dQ of the step before.

    FIRST: of a tile of keys, where there is no step before. Products are waited for in the order of their start.
    """
    PARTS: gl.constexpr = BLOCK_M // ROWS
    LATE: gl.constexpr = cap is not None and PARTS == 1  # beside a tanh there are no registers for dP
    LAYOUT: gl.constexpr = wgmma_layout(ROWS)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wgmma_layout(D), k_width=2)
    zero = hidden_zero()
    k_w = k.data.index(zero).reshape([BLOCK_N, D]).slice(W * ROWS, ROWS, dim=0)
    v_w = v.data.index(zero).reshape([BLOCK_N, D]).slice(W * ROWS, ROWS, dim=0)
    slot = it % STAGES
    q = steps.q.index(slot).reshape([BLOCK_M, D])
    do = do_tiles.index(slot).reshape([BLOCK_M, D])
    stats = steps.stats.index(slot)
    crossing = ds.index(it & 1).slice(W * ROWS, ROWS, dim=0)
    dtype: gl.constexpr = q.dtype
    await_full(steps, it, STAGES)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    s_run = warpgroup_mma(k_w, q.slice(0, ROWS, dim=0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    do_first = do.slice(0, ROWS, dim=0).permute((1, 0))
    if not LATE:
        dp_run = warpgroup_mma(v_w, do_first, zeros, use_acc=False, is_async=True)
    for part in gl.static_range(PARTS):
        if part + 1 < PARTS:  # scores of the next part run beside the exponentials of this one
            q_next = q.slice((part + 1) * ROWS, ROWS, dim=0).permute((1, 0))
            s_next = warpgroup_mma(k_w, q_next, zeros, use_acc=False, is_async=True)
        lse = stats.slice(part * ROWS, ROWS, dim=0).load(gl.SliceLayout(0, LAYOUT))
        s = warpgroup_mma_wait(0 if LATE else PARTS, deps=[s_run])
        p, slope = probabilities(
            s, lse, i0 + part * ROWS, j0 + W * ROWS, end, open_from, open_to, own, qk_scale, cap, LEFT, RIGHT
        )  # fmt: skip
        if LATE:
            dp_run = warpgroup_mma(v_w, do_first, zeros, use_acc=False, is_async=True)
        do_part = do.slice(part * ROWS, ROWS, dim=0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), P_LAYOUT), do_part, dv, is_async=True)
        delta = stats.slice(BLOCK_M + part * ROWS, ROWS, dim=0).load(gl.SliceLayout(0, LAYOUT))
        dp = warpgroup_mma_wait(2 if part + 1 < PARTS else 1, deps=[dp_run])
        d_s = (slope * (dp - delta[None, :])).to(dtype)
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
        dq_run = start_dq(ds, k, it - 1, W, BLOCK_M, BLOCK_N, D)
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
        stage_dq(dq, sums, it - 1, W)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    release(steps, slot)
    if not FIRST:
        hand_dq(it - 1)
    return dk, dv


@gluon.jit
def consumer(
    W: gl.constexpr, dk_desc, dv_desc, steps, do, k, v, ds, sums, ids, odd, lengths, ragged, to_k, to_v, z, n_n, slots,
    n_tiles, scale, qk_scale, cap, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = columns(D, DV)
    LAYOUT: gl.constexpr = wgmma_layout(COLS)
    # This consumer's rows of V: nobody else reads them, and after its last dP nor does it.
    v_w = v.data.index(0).slice(W * ROWS, ROWS, dim=2)
    stage = v.data.index(0).reshape([BLOCK_N, COLS]).slice(W * ROWS, ROWS, dim=0)
    it = gl.to_tensor(0)
    done = gl.to_tensor(1)
    t = taken(ids, 0, 4)
    while t < n_tiles:
        tile, b, kv, end, last, n, own, start = work(t, z, n_n, lengths, ragged, BLOCK_M, BLOCK_N, LEFT, RIGHT)
        j0 = tile * BLOCK_N
        open_from, open_to = unmasked(j0, end, own.len_q, own.low, own.high, BLOCK_N, LEFT, RIGHT)
        dk = gl.zeros([ROWS, COLS], gl.float32, LAYOUT)
        dv = gl.zeros([ROWS, COLS], gl.float32, LAYOUT)
        await_full(k, done - 1, 1)
        await_full(v, done - 1, 1)
        if n > 0:
            dk, dv = step(
                dk, dv, it, last * BLOCK_M, j0, end, open_from, open_to, steps, do, k, v, ds, sums, own, qk_scale, cap,
                W, BLOCK_M, BLOCK_N, STAGES, COLS, LEFT, RIGHT, True,
            )  # fmt: skip
            for x in range(1, n * z.group):
                it += 1
                i0 = (last - x // z.group) * BLOCK_M
                dk, dv = step(
                    dk, dv, it, i0, j0, end, open_from, open_to, steps, do, k, v, ds, sums, own, qk_scale, cap, W,
                    BLOCK_M, BLOCK_N, STAGES, COLS, LEFT, RIGHT, False,
                )  # fmt: skip
        row = j0 + W * ROWS
        store_rows(dv_desc, v_w, stage, dv, b, kv, row, start[1], own.len_k, to_v, DV)
        if n > 0:
            named_barrier("sync", CROSSED + 2 * (it & 1) + W, 256)
            dq = warpgroup_mma_wait(0, deps=[start_dq(ds, k, it, W, BLOCK_M, BLOCK_N, COLS)])
            stage_dq(dq, sums, it, W)
            hand_dq(it)
            it += 1
        release(k, 0)
        if odd is not None:
            gl.store(odd + (kv * slots + start[3] + tile) * 2 + W, (is_odd(dk) | is_odd(dv)).to(gl.int8))
        tma.store_wait(0)
        store_rows(dk_desc, v_w, stage, dk * scale, b, kv, row, start[1], own.len_k, to_k, D)
        t = taken(ids, done, 4)
        tma.store_wait(0)
        release(v, 0)
        done += 1
    for n in gl.static_range(2):  # the writers' last
        named_barrier("sync", SUM_EMPTY + 2 * n + W, 160)


# The sizes are not specialised: a new length compiles nothing.
@gluon.jit(
    do_not_specialize=[
        "ticket", "odd", "lengths", "heads", "group", "len_q", "len_k", "n_m", "n_n", "pairs", "section", "low", "high",
        "cu_q", "cu_k", "items", "skew", "dk_h", "dk_l", "dv_h", "dv_l",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sum_desc, dk_desc, dv_desc, turns, ticket, odd, lengths, heads, group,
    len_q, len_k, n_m, n_n, pairs, section, low, high, scale, qk_scale, cap, cu_q, cu_k, items, skew, dk_ptr,
    dk_h: gl.int64, dk_l: gl.int64, dv_ptr, dv_h: gl.int64, dv_l: gl.int64, D: gl.constexpr, DV: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    COLS: gl.constexpr = columns(D, DV)
    COLS_V: gl.constexpr = columns(DV, D)
    stats = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], stats_desc.layout)
    steps = Steps(tiles(q_desc, STAGES, BLOCK_M, COLS), stats, barriers(STAGES, 1), barriers(STAGES, 2))
    do = tiles(do_desc, STAGES, BLOCK_M, COLS_V)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    crossing = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK_N, BLOCK_M], DS_LAYOUT)
    # Without ragged sequences None, and 0.
    ragged, to_k, to_v = (cu_q, cu_k, items, skew), (dk_ptr, dk_h, dk_l), (dv_ptr, dv_h, dv_l)
    slots = n_n  # for the tiles of keys of a head: of a ragged batch not all are used
    if items is not None:
        n_n = gl.load(items)
    n_tiles = n_n * pairs
    z = Sizes(heads, group, len_q, len_k, n_m, pairs, section, low, high)
    if sum_desc is None:
        k = ring(tiles(k_desc, 1, BLOCK_N, COLS), 1, 1)
        v = ring(tiles(v_desc, 1, BLOCK_N, COLS_V), 1, 1)
        ids = ring(gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), 2, 2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    owner_of_values,
                    (dv_desc, steps, do, k, v, crossing, ids, odd, lengths, ragged, to_v, z, n_n, slots, n_tiles,
                     qk_scale, cap, BLOCK_M, BLOCK_N, STAGES, DV, COLS_V, LEFT, RIGHT),
                ),
                (
                    owner_of_keys,
                    (dk_desc, steps, do, k, v, crossing, ids, odd, lengths, ragged, to_k, z, n_n, slots, n_tiles,
                     scale, BLOCK_M, BLOCK_N, STAGES, D, COLS, LEFT, RIGHT),
                ),
                (
                    producer,
                    (q_desc, k_desc, v_desc, do_desc, stats_desc, steps, do, k, v, ids, ticket, lengths, ragged, z,
                     n_n, n_tiles, BLOCK_M, BLOCK_N, STAGES, D, DV, LEFT, RIGHT),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        k = ring(tiles(k_desc, 1, BLOCK_N, COLS), 1, 2)
        v = ring(tiles(v_desc, 1, BLOCK_N, COLS_V), 1, 2)
        ids = ring(gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), 2, 4)
        sums = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_M * COLS // 32, 32], sum_desc.layout)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    consumer,
                    (0, dk_desc, dv_desc, steps, do, k, v, crossing, sums, ids, odd, lengths, ragged, to_k, to_v,
                     z, n_n, slots, n_tiles, scale, qk_scale, cap, BLOCK_M, BLOCK_N, STAGES, D, DV, LEFT, RIGHT),
                ),
                (
                    consumer,
                    (1, dk_desc, dv_desc, steps, do, k, v, crossing, sums, ids, odd, lengths, ragged, to_k, to_v,
                     z, n_n, slots, n_tiles, scale, qk_scale, cap, BLOCK_M, BLOCK_N, STAGES, D, DV, LEFT, RIGHT),
                ),
                (
                    producer,
                    (q_desc, k_desc, v_desc, do_desc, stats_desc, steps, do, k, v, ids, ticket, lengths, ragged, z, n_n,
                     n_tiles, BLOCK_M, BLOCK_N, STAGES, D, DV, LEFT, RIGHT),
                ),
                (
                    writer,
                    (0, sum_desc, sums, ids, turns, lengths, ragged, z, n_n, n_tiles, BLOCK_M, BLOCK_N, LEFT, RIGHT),
                ),
                (
                    writer,
                    (1, sum_desc, sums, ids, turns, lengths, ragged, z, n_n, n_tiles, BLOCK_M, BLOCK_N, LEFT, RIGHT),
                ),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )  # fmt: skip
