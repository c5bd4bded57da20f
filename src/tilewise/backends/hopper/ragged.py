"""Before the forward of a ragged batch: a list of its tiles of queries, and results for rows of no sequence.

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


@triton.jit(do_not_specialize=["sequences", "rows", "heads"])
def items_kernel(
    cu_q, cu_k, items, out, lse, top, sequences, rows, heads, strides, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """items: how many there are, then (sequence, tile) of each, those of few keys first. One program a sequence, then
    one for each ROWS rows. Each finds its place by itself: the tiles of sequences that come before its own.
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
    else:
        i = (pid - sequences) * ROWS + tl.arange(0, ROWS)
        outside = (i < rows) & ((i < tl.load(cu_q)) | (i >= tl.load(cu_q + sequences)))
        if tl.max(outside.to(tl.int32), 0) > 0:
            channels = tl.arange(0, BLOCK_DV)[None, :]
            nothing = tl.zeros([ROWS, BLOCK_DV], out.dtype.element_ty)
            for h in range(0, heads):
                at = out + i.to(tl.int64)[:, None] * strides[0] + h * strides[1] + channels
                tl.store(at, nothing, mask=outside[:, None] & (channels < DV))
                stat = tl.cast(h, tl.int64) * rows + i
                tl.store(lse + stat, tl.full([ROWS], -float("inf"), tl.float32), mask=outside)
                if top is not None:
                    tl.store(top + stat, tl.full([ROWS], -float("inf"), tl.float32), mask=outside)
