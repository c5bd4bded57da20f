"""Lists of the tiles to visit, made on the device: nothing waits for the host and memory is O(tiles).

``classify`` writes the verdict of every tile; ``compact`` turns each row of verdicts (or column, by strides) into

    n_full, n_partial, numbers of the full tiles ..., numbers of the partial tiles ...

Tiles that reach past the end of the matrix count as partial, so that full ones need no bounds either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import offset64, sequence


@triton.jit
def extremes(ids, stride, first, last, BLOCK: tl.constexpr):
    """Smallest and largest of ids[first .. last], at most BLOCK of them."""
    x = tl.load(ids + tl.minimum(first + tl.arange(0, BLOCK), last) * stride)
    return tl.min(x, 0), tl.max(x, 0)


@triton.jit
def whole(inside, keep):
    """The verdict of a tile of which every pair is at hand."""
    every = tl.min(tl.min(tl.where(keep | (inside == 0), 1, 0), 1), 0)
    some = tl.max(tl.max(tl.where(keep & inside, 1, 0), 1), 0)
    return every * some + some


@triton.jit
def floordiv(a, b):
    """Integer division that rounds down, as in Python and PyTorch."""
    q = a // b
    return tl.where((a - q * b != 0) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def mod(a, b):
    """Remainder with the sign of the divisor, as in Python and PyTorch."""
    return a - floordiv(a, b) * b


@triton.jit(do_not_specialize=["len_q", "len_k", "rows", "cols", "heads"])
def classify_kernel(
    table, cu_q, cu_k, len_q, len_k, rows, cols, heads, m,
    VERDICT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """table (b, h, rows, cols) int8. One program a tile."""
    pid = tl.program_id(0)
    c, r, bh = pid % cols, (pid // cols) % rows, pid // cols // rows
    b, h = bh // heads, bh % heads
    _, len_q = sequence(b, cu_q, len_q)
    _, len_k = sequence(b, cu_k, len_k)
    i0, j0 = r * BLOCK_M, c * BLOCK_N
    i1, j1 = tl.minimum(i0 + BLOCK_M, len_q) - 1, tl.minimum(j0 + BLOCK_N, len_k) - 1
    v = 0
    if (i0 <= i1) & (j0 <= j1):
        v = tl.cast(VERDICT(b, h, i0, i1, j0, j1, len_q, len_k, m, BLOCK_M, BLOCK_N), tl.int32)
        v = tl.where((i0 + BLOCK_M > len_q) | (j0 + BLOCK_N > len_k), tl.minimum(v, 1), v)
    tl.store(table + pid, tl.cast(v, tl.int8))


@triton.jit(do_not_specialize=["n", "others", "step", "row_step"])
def compact_kernel(table, lists, n, others, step, row_step, CHUNK: tl.constexpr):
    """One program a list. Verdict x of list r lies at r * row_step + x * step of its (others, n) matrix."""
    pid = tl.program_id(0)
    matrix, r = pid // others, pid % others
    verdicts = table + offset64(matrix, n * others) + r * row_step
    to = lists + offset64(pid, n + 2)
    n_full = 0
    for x0 in range(0, n, CHUNK):
        x = x0 + tl.arange(0, CHUNK)
        v = tl.load(verdicts + x * step, mask=x < n, other=0).to(tl.int32)
        n_full += tl.sum(tl.where(v == 2, 1, 0), 0)
    full, partial = 0, 0
    for x0 in range(0, n, CHUNK):
        x = x0 + tl.arange(0, CHUNK)
        v = tl.load(verdicts + x * step, mask=x < n, other=0).to(tl.int32)
        is_full, is_partial = tl.where(v == 2, 1, 0), tl.where(v == 1, 1, 0)
        tl.store(to + 1 + full + tl.cumsum(is_full, 0), x, mask=v == 2)
        tl.store(to + 1 + n_full + partial + tl.cumsum(is_partial, 0), x, mask=v == 1)
        full += tl.sum(is_full, 0)
        partial += tl.sum(is_partial, 0)
    tl.store(to, n_full)
    tl.store(to + 1, partial)
