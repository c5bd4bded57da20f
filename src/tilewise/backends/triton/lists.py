"""Lists of the tiles to visit, made on the device: nothing waits for the host and memory is O(tiles).

``list_kernel`` turns each row of tiles (or column, or both) into

    n_full, n_partial, numbers of the full tiles ..., numbers of the partial tiles ...

Bands, lengths and documents are judged there, many tiles at once; of documents ``extremes_kernel`` writes first which
numbers a tile has. A mask that must be looked at pair by pair takes a program a tile: ``classify_kernel`` writes a
table of verdicts first.

Tiles that reach past the end of the matrix count as partial, so that full ones need no bounds either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import follow, offset64, sequence

BASE = tl.constexpr(16)  # numbers of which a table has the extremes: as many as the smallest tile has rows


@triton.jit
def extremes(table, batch_stride, b, first, last, BLOCK: tl.constexpr):
    """Smallest and largest number of tiles (T,) of BLOCK numbers, first .. last, from the table (batch, n, 2)."""
    at = tl.minimum(first[:, None] // BASE + tl.arange(0, BLOCK // BASE)[None, :], last[:, None] // BASE)
    at = table + b * batch_stride + at * 2
    return tl.min(tl.load(at), 1), tl.max(tl.load(at + 1), 1)


@triton.jit
def write_extremes(pid, table, ids, batch_stride, stride, length, T: tl.constexpr):
    """A table's entries of T times BASE numbers."""
    size = tl.cdiv(length, BASE)
    each = tl.cdiv(size, T)
    b, x = pid // each, pid % each * T + tl.arange(0, T)
    i = tl.minimum(x[:, None] * BASE + tl.arange(0, BASE)[None, :], length - 1)
    number = tl.load(ids + offset64(b, batch_stride) + i * stride)  # (T, BASE)
    at = table + (b * size + x) * 2
    tl.store(at, tl.min(number, 1), mask=x < size)
    tl.store(at + 1, tl.max(number, 1), mask=x < size)


@triton.jit(do_not_specialize=["len_q", "len_k", "programs"])
def extremes_kernel(
    table_q, table_k, ids_q, ids_k, strides_q, strides_k, len_q, len_k, programs, T: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Tables of the numbers of documents: of queries by the first so many programs, of keys by the others."""
    follow(PDL)
    pid = tl.program_id(0)
    if pid < programs:
        write_extremes(pid, table_q, ids_q, strides_q[0], strides_q[1], len_q, T)
    else:
        write_extremes(pid - programs, table_k, ids_k, strides_k[0], strides_k[1], len_k, T)


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


@triton.jit
def judged(
    b, h, r, c, len_q, len_k, m, VERDICT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Verdicts (T,) of tiles (r, c), of which one is (T,) and the other (1,); 0 beyond the end. No length may be 0."""
    i0, j0 = r * BLOCK_M, c * BLOCK_N
    i1, j1 = tl.minimum(i0 + BLOCK_M, len_q) - 1, tl.minimum(j0 + BLOCK_N, len_k) - 1
    v = tl.where((i0 <= i1) & (j0 <= j1), VERDICT(b, h, i0, i1, j0, j1, len_q, len_k, m, BLOCK_M, BLOCK_N), 0)
    return tl.where((i0 + BLOCK_M > len_q) | (j0 + BLOCK_N > len_k), tl.minimum(v, 1), v)


@triton.jit(do_not_specialize=["len_q", "len_k", "rows", "cols", "heads"])
def classify_kernel(
    table, cu_q, cu_k, len_q, len_k, rows, cols, heads, m,
    VERDICT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """table (b, h, rows, cols) int8. One program a tile."""
    follow(PDL)
    pid = tl.program_id(0)
    one = tl.arange(0, 1)
    c, r, bh = pid % cols, (pid // cols) % rows, pid // cols // rows
    b, h = bh // heads, bh % heads
    _, len_q = sequence(b, cu_q, len_q)
    _, len_k = sequence(b, cu_k, len_k)
    v = tl.zeros([1], tl.int32)
    if (r * BLOCK_M < len_q) & (c * BLOCK_N < len_k):
        v = judged(b, h, r + one, c + one, len_q, len_k, m, VERDICT, BLOCK_M, BLOCK_N)
    tl.store(table + pid + one, tl.cast(v, tl.int8))


@triton.jit
def verdicts(
    table, b, h, own, x, cols, len_q, len_k, m,
    VERDICT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Verdicts (T,) of the tiles x (T,) of a list, from the table of its matrix where there is one."""
    own = own + tl.arange(0, 1)
    r, c = own, x
    if COLUMN:
        r, c = x, own
    if table is None:
        return judged(b, h, r, c, len_q, len_k, m, VERDICT, BLOCK_M, BLOCK_N)
    else:
        return tl.load(table + r * cols + c, mask=(r * BLOCK_M < len_q) & (c * BLOCK_N < len_k), other=0).to(tl.int32)


@triton.jit
def write_list(
    pid, lists, table, cu_q, cu_k, len_q, len_k, heads, pitch, m, VERDICT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A list of (b, h, rows or with COLUMN cols, pitch); tiles are judged, all but the first CHUNK of them twice, and
    never stored."""
    rows, cols = tl.cdiv(len_q, BLOCK_M), tl.cdiv(len_k, BLOCK_N)
    others = cols if COLUMN else rows
    own, bh = pid % others, pid // others
    b, h = bh // heads, bh % heads
    _, len_q = sequence(b, cu_q, len_q)
    _, len_k = sequence(b, cu_k, len_k)
    if COLUMN:
        n = tl.where(own * BLOCK_N < len_k, tl.cdiv(len_q, BLOCK_M), 0)
    else:
        n = tl.where(own * BLOCK_M < len_q, tl.cdiv(len_k, BLOCK_N), 0)
    if table is not None:
        table += offset64(bh, rows * cols)
    to = lists + offset64(pid, pitch)
    v = tl.zeros([CHUNK], tl.int32)
    if n > 0:  # no length may be 0 where tiles are judged
        v = verdicts(table, b, h, own, tl.arange(0, CHUNK), cols, len_q, len_k, m, VERDICT, BLOCK_M, BLOCK_N, COLUMN)
    n_full = tl.sum(tl.where(v == 2, 1, 0), 0)
    for x0 in range(CHUNK, n, CHUNK):
        x = x0 + tl.arange(0, CHUNK)
        w = verdicts(table, b, h, own, x, cols, len_q, len_k, m, VERDICT, BLOCK_M, BLOCK_N, COLUMN)
        n_full += tl.sum(tl.where(w == 2, 1, 0), 0)
    full, partial = 0, 0
    for x0 in range(0, n, CHUNK):
        x = x0 + tl.arange(0, CHUNK)
        if x0 > 0:
            v = verdicts(table, b, h, own, x, cols, len_q, len_k, m, VERDICT, BLOCK_M, BLOCK_N, COLUMN)
        is_full, is_partial = tl.where(v == 2, 1, 0), tl.where(v == 1, 1, 0)
        tl.store(to + 1 + full + tl.cumsum(is_full, 0), x, mask=v == 2)
        tl.store(to + 1 + n_full + partial + tl.cumsum(is_partial, 0), x, mask=v == 1)
        full += tl.sum(is_full, 0)
        partial += tl.sum(is_partial, 0)
    tl.store(to, n_full)
    tl.store(to + 1, partial)


@triton.jit(do_not_specialize=["len_q", "len_k", "heads", "pitch", "more_pitch", "programs"])
def list_kernel(
    lists, more, table, more_table, cu_q, cu_k, len_q, len_k, heads, pitch, more_pitch, programs, m,
    VERDICT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMN: tl.constexpr, MORE_M: tl.constexpr,
    MORE_N: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a list: of rows or with COLUMN of columns. Then those in more, if there are any, of columns: a
    backward wants both, and one launch of many short programs takes no longer than one of few."""
    follow(PDL)
    pid = tl.program_id(0)
    if pid < programs:
        write_list(
            pid, lists, table, cu_q, cu_k, len_q, len_k, heads, pitch, m, VERDICT, BLOCK_M, BLOCK_N, COLUMN, CHUNK
        )  # fmt: skip
    elif more is not None:
        write_list(
            pid - programs, more, more_table, cu_q, cu_k, len_q, len_k, heads, more_pitch, m, VERDICT, MORE_M, MORE_N,
            True, CHUNK,
        )  # fmt: skip
