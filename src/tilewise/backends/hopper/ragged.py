"""Before the kernel for a ragged batch: a list of its tiles, and results for rows of no sequence.

The lengths are on the GPU, and the host does not wait for them: it launches for as many tiles as there can be.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 256  # sequences that are looked at at a time
ROWS = 64  # of no sequence, that one program writes


@triton.jit
def extents(cu, n, inside):
    """The lengths of sequences n."""
    return tl.load(cu + n + 1, mask=inside, other=0) - tl.load(cu + n, mask=inside, other=0)


@triton.jit
def located(cu, x, sequences, rows, BLOCK: tl.constexpr):
    """Tile x of BLOCK rows: (first row of its sequence, its number there, rows of the sequence, which that is).

    Those of sequence b begin at cu[b] // BLOCK + b, so that each has room and none needs to know the others' lengths.
    Some are of no rows. Without cu there is one sequence.
    """
    if cu is None:
        return 0, x, rows, 0
    else:
        low, high = 0, sequences - 1
        while low < high:
            middle = (low + high + 1) // 2
            before = tl.load(cu + middle) // BLOCK + middle <= x
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle - 1)
        first = tl.load(cu + low)
        return first, x - (first // BLOCK + low), tl.load(cu + low + 1) - first, low


@triton.jit
def outside(cu, i, rows, sequences):
    """Whether rows i are there, and of no sequence."""
    return (i < rows) & ((i < tl.load(cu)) | (i >= tl.load(cu + sequences)))


@triton.jit
def blank(x, strides, i, which, heads, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Zeros in those of rows i of all heads. strides: of rows, then of heads."""
    channels = tl.arange(0, BLOCK_D)[None, :]
    for h in range(0, heads):
        at = x + i.to(tl.int64)[:, None] * strides[0] + h * strides[1] + channels
        nothing = tl.zeros([i.shape[0], BLOCK_D], x.dtype.element_ty)
        tl.store(at, nothing, mask=which[:, None] & (channels < D))


@triton.jit(do_not_specialize=["sequences", "rows", "keys", "heads", "kv_heads"])
def blank_kernel(
    cu_q, cu_k, dq, dk, dv, dqs, dks, dvs, sequences, rows, keys, heads, kv_heads, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of ROWS queries, keys and values of no sequence."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    which = outside(cu_q, i, rows, sequences)
    if tl.max(which.to(tl.int32), 0) > 0:
        blank(dq, dqs, i, which, heads, D, BLOCK_D)
    which = outside(cu_k, i, keys, sequences)
    if tl.max(which.to(tl.int32), 0) > 0:
        blank(dk, dks, i, which, kv_heads, D, BLOCK_D)
        blank(dv, dvs, i, which, kv_heads, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["sequences", "rows", "heads"])
def items_kernel(
    cu_q, cu_k, items, out, lse, top, sequences, rows, heads, strides, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """items: how many there are, then (sequence, tile) of each, those of few rows on the other side first.

    One program a sequence, then one for each ROWS rows of out. Each finds its place by itself: the tiles of sequences
    that come before its own.
    """
    pid = tl.program_id(0)
    if pid < sequences:
        keys = tl.load(cu_k + pid + 1) - tl.load(cu_k + pid)
        first, total = 0, 0
        for c in range(0, sequences, CHUNK):
            n = c + tl.arange(0, CHUNK)
            inside = n < sequences
            tiles = (extents(cu_q, n, inside) + BLOCK_M - 1) // BLOCK_M
            length = extents(cu_k, n, inside)
            before = (length < keys) | ((length == keys) & (n < pid))
            first += tl.sum(tl.where(inside & before, tiles, 0), 0)
            total += tl.sum(tiles, 0)
        mine = (tl.load(cu_q + pid + 1) - tl.load(cu_q + pid) + BLOCK_M - 1) // BLOCK_M
        for c in range(0, mine, CHUNK):
            tile = c + tl.arange(0, CHUNK)
            at = items + 1 + 2 * (first + tile)
            tl.store(at, pid + tl.zeros([CHUNK], tl.int32), mask=tile < mine)
            tl.store(at + 1, tile, mask=tile < mine)
        if pid == 0:
            tl.store(items, total)
            if total == 0:  # a program reads the first before it knows
                tl.store(items + 1, 0)
                tl.store(items + 2, 0)
    elif out is not None:
        i = (pid - sequences) * ROWS + tl.arange(0, ROWS)
        which = outside(cu_q, i, rows, sequences)
        if tl.max(which.to(tl.int32), 0) > 0:
            blank(out, strides, i, which, heads, DV, BLOCK_DV)
            for h in range(0, heads):
                stat = tl.cast(h, tl.int64) * rows + i
                tl.store(lse + stat, tl.full([ROWS], -float("inf"), tl.float32), mask=which)
                if top is not None:
                    tl.store(top + stat, tl.full([ROWS], -float("inf"), tl.float32), mask=which)
