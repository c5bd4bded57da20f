"""The kernels around the backward: before it delta and lse of each row, after it dQ, rounded. Plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.primitives import INF, LOG2E
from .ragged import located


@triton.jit
def head_at(x, strides, pair, heads):
    """Address of head pair % heads of batch entry pair // heads."""
    return x + (pair // heads).to(tl.int64) * strides[0] + (pair % heads).to(tl.int64) * strides[1]


@triton.jit(do_not_specialize=["ticket", "heads", "sequences", "rows", "n_m"])
def prepare_kernel(
    out, dout, lse, dlse, stats, delta, turns, ticket, out_strides, dout_strides, dlse_strides, cu_q, sequences, heads,
    rows, n_m, DV: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """stats of a tile of rows: lse in units of log2, then delta = rowsum(dO * O) - dlse. Nobody has had its turn.

    Rows that there are not, and those without keys, get an lse of inf: P = exp2(S - lse) is 0. rows: of a head in lse.
    """
    pid = tl.program_id(0)
    pair = pid // n_m
    first, tile, len_q, _ = located(cu_q, pid % n_m, sequences, rows, BLOCK_M)
    own = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, COLS)[None, :]
    i = tile * BLOCK_M + own
    inside = i < len_q
    far = (first + i).to(tl.int64)
    at_o = head_at(out, out_strides, pair, heads) + far[:, None] * out_strides[2] + channels
    at_do = head_at(dout, dout_strides, pair, heads) + far[:, None] * dout_strides[2] + channels
    there = inside[:, None] & (channels < DV)
    o = tl.load(at_o, mask=there, other=0.0).to(tl.float32)
    do = tl.load(at_do, mask=there, other=0.0).to(tl.float32)
    d = tl.sum(o * do, 1)
    if dlse is not None:
        d -= tl.load(head_at(dlse, dlse_strides, pair, heads) + far * dlse_strides[2], mask=inside, other=0.0)
    at = pair.to(tl.int64) * rows + first + i
    row_lse = tl.load(lse + at, mask=inside, other=-INF)
    at_stats = stats + pid.to(tl.int64) * (2 * BLOCK_M) + own
    tl.store(at_stats, tl.where(row_lse == -INF, INF, row_lse * LOG2E))
    tl.store(at_stats + BLOCK_M, d)
    if delta is not None:
        tl.store(delta + at, d, mask=inside)
    if turns is not None:
        tl.store(turns + pid, 0)
    if pid == 0:
        tl.store(ticket, 0)
        tl.store(ticket + 1, 0)


@triton.jit(do_not_specialize=["sequences", "heads", "len_q", "n_m", "tiles"])
def finish_kernel(
    sums, turns, dq, odd, dq_strides, cu_q, sequences, heads, len_q, n_m, tiles, scale, D: tl.constexpr,
    COLS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dQ of one of the tiles of ROWS queries, 0 where nothing was added; and whether it is not finite."""
    pid = tl.program_id(0)
    pair = pid // tiles
    first, tile, len_q, b = located(cu_q, pid % tiles, sequences, len_q, ROWS)
    own = tl.arange(0, ROWS)[:, None]
    i = tile * ROWS + own
    channels = tl.arange(0, COLS)[None, :]
    slot = pair * n_m + tile * ROWS // BLOCK_M
    if cu_q is not None:
        slot += first // BLOCK_M + b
    inside = (i < len_q) & (channels < D)
    # Of a ragged batch there are fewer tiles than programs.
    added = tl.load(turns + slot, mask=tile * ROWS < len_q, other=0) > 0
    # ``by_thread``: halves of 64 rows and 64 columns, side by side or one below the other.
    SIDES: tl.constexpr = COLS // ROWS
    own = tile * ROWS % BLOCK_M * COLS + tl.arange(0, ROWS * COLS)
    x = tl.load(sums + slot.to(tl.int64) * (BLOCK_M * D) + own, mask=(own < BLOCK_M * D) & added, other=0.0)
    x = tl.permute(tl.reshape(x, (SIDES, 8, 4, 8, 4, 2, 2)), (2, 5, 3, 0, 1, 4, 6))
    x = tl.where(inside, tl.reshape(x, (ROWS, COLS)), 0.0)
    at = head_at(dq, dq_strides, pair, heads) + (first + i).to(tl.int64) * dq_strides[2] + channels
    tl.store(at, (x * scale).to(dq.dtype.element_ty), mask=inside)
    if odd is not None:
        total = tl.sum(tl.sum(x * 0.0, 1), 0)
        tl.store(odd + pid, (total != total).to(tl.int8))
