"""Pieces that the forward and the backward kernels share: tiles, scores, masks, dropout, careful products.

Index tiles ``i`` (queries) and ``j`` (keys) come in either orientation,
(M, 1) and (1, N) or, in the dK/dV kernel, (1, M) and (N, 1): everything here is element-wise in them.

Units of the scores, a constexpr:
    FOLDED   s is unscaled; exp2(s * qk_scale - m) is one multiply-add (needs qk_scale > 0). s is q k^T, less the
             distance times slope / qk_scale under ALiBi; under a softcap it is the tanh, qk_scale the cap in units of
             log2, and cap what q k^T is multiplied by within the tanh
    LOG2     s is scaled, in units of log2
    NATURAL  s is scaled, in natural units; exp2((s - m) * log2(e)) rounds after the difference, and a
             bias of finfo.min stays finite
m is in the unit of the scaled scores; lse is always natural.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FOLDED = tl.constexpr(0)
LOG2 = tl.constexpr(1)
NATURAL = tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


# --- one kernel after another ---------------------------------------------------------------------


@triton.jit
def follow(PDL: tl.constexpr):
    """Waits for the kernel before this one, and lets the one after it start, which waits here as well. So the launch of
    a kernel overlaps with the end of the one before (programmatic dependent launch); all that is read is written by
    then. First of all in every kernel that is launched so: what the next one reads was then complete before it began.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


# --- where things are -----------------------------------------------------------------------------


@triton.jit
def offset64(index, stride):
    """index * stride without overflow, whatever the sizes."""
    return tl.cast(index, tl.int64) * stride


@triton.jit
def sequence(b, cu, length):
    """First row and length of sequence b: the whole tensor's, or those of a ragged batch."""
    if cu is None:
        return 0, length
    else:
        first = tl.load(cu + b)
        return first, tl.load(cu + b + 1) - first


@triton.jit
def head_base(x, strides, b, h, first):
    """Address of row ``first`` of (b, h) in x; strides (batch, head, row, channel)."""
    return x + offset64(b, strides[0]) + offset64(h, strides[1]) + offset64(first, strides[2])


@triton.jit
def like(strides, others):
    """strides, where None says that they are the others: the compiler then knows, and has one set of addresses."""
    if strides is None:
        return others
    else:
        return strides


@triton.jit
def tile_ptrs(base, start, strides, N: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """Addresses (N, C) of rows start .. start + N. The start is a 64-bit scalar, the tile's own offsets are 32-bit."""
    rows, channels = tl.arange(0, N)[:, None], tl.arange(0, C)[None, :]
    if WIDE:
        rows, channels = rows.to(tl.int64), channels.to(tl.int64)
    return base + offset64(start, strides[2]) + (rows * strides[2] + channels * strides[3])


@triton.jit
def load_tile(
    base, start, length, strides, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr, TAIL: tl.constexpr, WIDE:
    tl.constexpr
):  # fmt: skip
    """Rows start .. start + N of a (length, D) matrix as (N, C), 0 beyond its edges. TAIL: rows may pass the end."""
    at = tile_ptrs(base, start, strides, N, C, WIDE)
    if TAIL:
        inside = (start + tl.arange(0, N) < length)[:, None]
        if D != C:
            inside = inside & (tl.arange(0, C) < D)[None, :]
        return tl.load(at, mask=inside, other=0.0)
    elif D != C:
        return tl.load(at, mask=(tl.arange(0, C) < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_tile(
    base, start, length, strides, x, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The rows of x (N, C) that lie in a (length, D) matrix."""
    inside = (start + tl.arange(0, N) < length)[:, None] & (tl.arange(0, C) < D)[None, :]
    tl.store(tile_ptrs(base, start, strides, N, C, WIDE), x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def unflatten(pid, tiles, heads, pairs, section, REVERSE: tl.constexpr, BY_HEAD: tl.constexpr):
    """(tile, h, b) of a program. A section of (b, h) pairs, whose keys fit the L2 cache, has its longest rows first.
    BY_HEAD: the pairs of a head are neighbours, not those of a batch entry."""
    whole = section * tiles
    first = (pid // whole) * section
    rest = pid % whole
    n = tl.minimum(section, pairs - first)
    tile, pair = rest // n, first + rest % n
    if REVERSE:
        tile = tiles - 1 - tile
    if BY_HEAD:
        batch = pairs // heads
        return tile, pair // batch, pair % batch
    else:
        return tile, pair % heads, pair // heads


# --- which tiles ----------------------------------------------------------------------------------


@triton.jit
def visits(
    b, h, tile, start, size, length, len_q, len_k, lists, list_strides, m,
    REACH: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """The tiles along the other axis that this one takes part in.

    Returns (where, n_full, n_all, full, first): tile number t of n_all is ``visited(...)`` of these. The first n_full
    need no mask. From lists, which ``lists.py`` made, or from the arithmetic of ``REACH``. size: of the own
    axis; length: of the other. INSIDE: none is full if this one reaches past the end, as in lists. Of a list, first is
    its first tile, or what stands there if it has none: loaded beside the counts, not after them.
    """
    if lists is not None:
        row = offset64(b, list_strides[0]) + offset64(h, list_strides[1]) + offset64(tile, list_strides[2])
        n_full, n_partial = tl.load(lists + row), tl.load(lists + row + 1)
        return row + 2, n_full, n_full + n_partial, 0, tl.load(lists + row + 2)
    else:
        lo, hi, full_lo, full_hi = 0, length, 0, length
        if REACH is not None:
            lo, hi, full_lo, full_hi = REACH(b, start, tl.minimum(start + BLOCK, size) - 1, len_q, len_k, m)
            lo, hi = tl.maximum(lo, 0), tl.minimum(hi, length)
            full_lo, full_hi = tl.maximum(full_lo, lo), tl.minimum(full_hi, hi)
        if INSIDE:
            full_hi = tl.where(start + BLOCK > size, 0, full_hi)
        first = lo // OTHER
        last = tl.maximum(tl.cdiv(hi, OTHER), first)
        last = tl.where(hi > lo, last, first)
        full = tl.minimum(tl.cdiv(full_lo, OTHER), last)
        n_full = tl.maximum(tl.where(full_hi > full_lo, full_hi, 0) // OTHER - full, 0)
        full = tl.where(n_full > 0, full, last)
        return 0, n_full, last - first, full, first


@triton.jit
def visited(t, lists, listed, n_full, full, first, FULL: tl.constexpr, MASKED: tl.constexpr):
    """Number of the t-th tile to visit; the full ones come first. FULL, MASKED: which of the two t may be. listed: the
    answer, where there are lists."""
    if lists is not None:
        return listed
    else:
        t = tl.cast(t, tl.int32)
        tile = full + t
        if MASKED:
            masked = t - n_full
            before = full - first  # masked tiles to the left of the full ones
            other = first + masked + tl.where(masked < before, 0, n_full)
            tile = tl.where(t < n_full, tile, other) if FULL else other
        return tile


@triton.jit
def listed(t, t1, lists, where):
    """The t-th tile of a list, below t1. Loops load it a tile ahead: a load whose address is loaded in the same turn
    waits for that one, and there would be one stage less for keys and queries."""
    if lists is not None:
        return tl.load(lists + where + t, mask=t < t1, other=0)
    else:
        return 0


@triton.jit
def first_masked(n_full, n_all, lists, where, first):
    """The first tile of a list that is masked; without lists, first."""
    if lists is not None:
        return listed(n_full, n_all, lists, where)
    else:
        return first


@triton.constexpr_function
def edge(block, bias, most):
    """How much of a masked tile is taken at a time: a bias has masks and addresses of each element there, which fill
    the registers. most: what ptxas puts up with."""
    return block if bias is None else min(block, most)


@triton.constexpr_function
def at_once(careful, edge, block):
    """Whether one loop is for full and masked tiles alike: what is done again with care is summed in the pieces of the
    first time, so that the bits are the same."""
    return careful and edge == block


@triton.jit
def visited16(t, lists, where, n_full, full, first, BLOCK: tl.constexpr):
    """First position of the t-th group of 16 of the tiles to visit."""
    n = BLOCK // 16
    at = listed(t // n, t // n + 1, lists, where)
    return visited(t // n, lists, at, n_full, full, first, True, True) * BLOCK + t % n * 16


# --- scores ---------------------------------------------------------------------------------------


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b in fp32. UPCAST: the interpreter cannot multiply bf16."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    elif a.dtype == tl.float32 and PRECISION == "ieee":
        tl.debug_barrier()  # without tensor cores operands pass through registers: of one product at a time
    if acc is None:
        return tl.dot(a, b, input_precision=PRECISION)
    elif a.dtype == tl.float32 and PRECISION == "ieee":
        # Added as a whole: one chain of additions over all keys would round each of their products to the size of the
        # sum. As an fma, since the compiler makes of a sum with a product just that chain.
        product = tl.dot(a, b, input_precision=PRECISION)
        return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tanh(x):
    """To fp32's precision: a polynomial near 0, where 1 - exp loses digits (Cephes tanhf)."""
    z = x * x
    poly = -5.70498872745e-3
    poly = poly * z + 2.06390887954e-2
    poly = poly * z - 5.37397155531e-2
    poly = poly * z + 1.33314422036e-1
    poly = poly * z - 3.33332819422e-1
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    big = (1 - e) / (1 + e)
    big = tl.where(x < 0, -big, big)
    return tl.where(tl.abs(x) < 0.625, x + x * z * poly, big)


@triton.jit
def quick_tanh(s, factor):
    """tanh(s * factor / log2(e) / 2) to about 5e-7, whatever its size: 1 - 2 / (1 + exp(2 x)). A square of rsqrt is the
    quickest reciprocal."""
    r = tl.rsqrt(1 + tl.exp2(s * factor))
    return 1 - 2 * (r * r)


@triton.jit
def head_slope(alibi, strides, b, h, qk_scale, UNIT: tl.constexpr):
    """The ALiBi slope of a head in the unit of the scores."""
    slope = tl.load(alibi + b * strides[0] + h * strides[1]).to(tl.float32)
    if UNIT != NATURAL:
        slope = slope * LOG2E
    if UNIT == FOLDED:
        slope = slope / qk_scale
    return slope


@triton.jit
def distance(i, j, i0, j0, len_q, len_k):
    """|i + len_k - len_q - j| in fp32, exact below 2**24. i0, j0: the first of i and j. Of each pair it is one
    subtraction of what the rows and the columns of a tile have in fp32, and only i0 and j0 change in a loop."""
    x, y = (i - i0).to(tl.float32), (j - j0).to(tl.float32)
    base = (i0 + (len_k - len_q) - j0).to(tl.float32)
    if i.shape[1] == 1:  # a tile's rows are fewer a thread
        x = x + base
    else:
        y = y - base
    return tl.abs(x - y)


@triton.jit
def pair_ptrs(base, i, j, i0, j0, strides, WIDE: tl.constexpr):
    """Addresses of pairs in a (batch, head, row, column) tensor from that of its (b, h), as in ``tile_ptrs``."""
    rows, cols = i - i0, j - j0
    if WIDE:
        rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    return base + (offset64(i0, strides[2]) + offset64(j0, strides[3])) + (rows * strides[2] + cols * strides[3])


@triton.jit
def load_bias(bias, i, j, i0, j0, len_q, len_k, strides, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """The bias of pairs, 0 beyond the edges, in its own dtype. MASKED: some may pass the end; each element then has its
    address, and those from i0 and j0 on would be kept from tile to tile, in registers that loops do not have."""
    if MASKED:
        at = bias + (i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3])
        return tl.load(at, mask=(i < len_q) & (j < len_k), other=0.0)
    else:
        return tl.load(pair_ptrs(bias, i, j, i0, j0, strides, WIDE))


@triton.jit
def load_bias_pairs(bias, i0, j0, strides, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bias of a tile that lies within the matrix, (N / 2, M): two keys are an int32. Of 16 bits and transposed, the
    compiler would load it into registers a turn or two ahead; numbers of 32 bits wait in shared memory."""
    at = (bias + (offset64(i0, strides[2]) + j0)).to(tl.pointer_type(tl.int32))
    return tl.load(at + (tl.arange(0, BLOCK_N // 2)[:, None] + tl.arange(0, BLOCK_M)[None, :] * (strides[2] // 2)))


@triton.jit
def unpaired(pairs, dtype: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The (N, M) numbers of ``load_bias_pairs``."""
    both = tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))  # (N / 2, M, 2)
    return tl.reshape(tl.trans(both, (0, 2, 1)), [BLOCK_N, BLOCK_M]).to(dtype, bitcast=True)


@triton.jit
def scores(
    s, i, j, i0, j0, len_q, len_k, qk_scale, cap, bias, slope,
    SOFTCAP: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores from s = q k^T: scale, softcap, bias; and the tanh of the softcap.

    i0, j0: the first of i and j. bias: its tile. MASKED: a score is -inf where the bias is, even on NaN; in other tiles
    that NaN stays, and the program finds it at its end.
    """
    t = s
    if UNIT != FOLDED:
        s = s * qk_scale
    if SOFTCAP:
        if UNIT == FOLDED:
            t = quick_tanh(s, cap)
            s = t
        else:
            t = tanh(s)
            s = t * cap
    if slope is not None:
        s -= slope * distance(i, j, i0, j0, len_q, len_k)
    if bias is not None:
        add = bias.to(tl.float32)
        s = tl.where(add == -INF, -INF, s + add) if MASKED else s + add
    return s, t


@triton.jit
def kept(b, h, i, j, inside, len_q, len_k, m, KEEP: tl.constexpr, TAIL: tl.constexpr = True):
    """Bool, broadcastable: which pairs of a masked tile are attended. inside: which exist, as far as that matters.
    Without TAIL all do."""
    if KEEP is not None:
        return KEEP(b, h, i, j, len_q, len_k, m, TAIL)
    else:
        return inside


@triton.jit
def load_number(x, at, length, batch_offset, stride, TAIL: tl.constexpr):
    """The numbers of documents at these positions, 0 beyond the last."""
    if TAIL:
        return tl.load(x + batch_offset + at * stride, mask=at < length, other=0)
    else:
        return tl.load(x + batch_offset + at * stride)


@triton.jit
def exponent(s, m, qk_scale, UNIT: tl.constexpr):
    """score - m in units of log2, for m that broadcasts to s."""
    if UNIT == FOLDED:
        return s * qk_scale - m
    elif UNIT == LOG2:
        return s - m
    else:
        return (s - m) * LOG2E


@triton.jit
def exp_scores(s, m, qk_scale, UNIT: tl.constexpr):
    """exp(score - m)."""
    return tl.exp2(exponent(s, m, qk_scale, UNIT))


@triton.jit
def exp_natural(s, m):
    """exp(s - m) of scores in natural units and a number for each row, in a multiply-add instead of a difference and a
    product. That rounds m: as much as s is rounded, too much for fp32. Where m times log2(e) is infinite, scores differ
    by nothing or by so much that any factor will do."""
    factor = tl.where(tl.abs(m) > 1e37, 0.5, LOG2E)
    return tl.exp2(s * factor[:, None] - (m * factor)[:, None])


@triton.jit
def exp_unit(x, UNIT: tl.constexpr):
    """exp of a difference of scaled scores, each row's own."""
    if UNIT == NATURAL:
        return tl.exp2(x * LOG2E)
    else:
        return tl.exp2(x)


@triton.jit
def survives(rng, threshold, bh, i0, j0, M: tl.constexpr, N: tl.constexpr):
    """Bool (M, N): which pairs outlive dropout. The words of ``philox.py``: one counter for four keys."""
    seed, offset = tl.load(rng), tl.load(rng + 1)
    groups = (j0 // 4 + tl.arange(0, N // 4))[None, :]
    rows = (i0 + tl.arange(0, M))[:, None]
    zero = tl.zeros([M, N // 4], tl.int32)
    c3 = (offset & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    w0, w1, w2, w3 = tl.philox(seed, groups + zero, rows + zero, bh + zero, c3 + zero, n_rounds=7)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (M, N / 4, 2, 2): key 4 g + 2 x + y
    return tl.reshape(words, [M, N]) >= threshold.to(tl.uint32, bitcast=True)


# --- products beside things that are not numbers ---------------------------------------------------
#
# 0 * NaN is NaN, so a product a b lets a row of b that is not finite reach rows of a that are 0 there because they do
# not keep it. Fast products are taken anyway, and looked at once, at the end. Only where they came out as
# NaN or inf a program does them again with these rows ``cleaned`` to 0: the same sum, bit for bit, as if they were
# numbers. Should one of them be kept by somebody, what it adds is then added to the result, row by row (``odd_sum``).
#
# Doing it again is the function of the tile in a kernel of its own, with CAREFUL: beside the fast products it would
# take all registers and keep addresses in them. Of each tile the fast kernel says whether it is odd, and where none is,
# the careful one has read that and nothing else.


@triton.jit
def odd_rows(x):
    """For each row of x a number that is 0 unless one of the row's is NaN or infinite: then it is NaN."""
    return tl.sum(x * 0.0, 1)


@triton.jit
def any_odd(x, rows):
    """1 if one of these rows is not 0, else 0, for x of ``odd_rows``."""
    return tl.max(tl.where(rows & (x != 0), 1, 0), 0)


@triton.jit
def flagged(odd, first, step, total, CHUNK: tl.constexpr):
    """1 if any of odd[first], odd[first + step], ... below total is set, at most CHUNK of them, else 0."""
    at = first + tl.arange(0, CHUNK) * step
    return tl.max(tl.load(odd + at, mask=at < total, other=0).to(tl.int32), 0)


@triton.jit
def cleaned(b, keep):
    """b (K, C) with 0 for what is not finite; 1 if a row with such is kept by one of the rows of keep (M, K)."""
    wide = b.to(tl.float32)
    finite = tl.abs(wide) < INF
    odd = tl.max(tl.where(finite, 0, 1), 1)
    kept_by = tl.max(tl.where(keep, 1, 0), 0)
    return tl.where(finite, wide, 0.0).to(b.dtype), tl.max(odd * kept_by, 0)


@triton.jit
def odd_sum(a, keep, b):
    """(C,): what the rows of b (K, C) that are not finite add to one row of a b; a and keep (1, K)."""
    wide = b.to(tl.float32)
    finite = tl.abs(wide) < INF
    factor, kept_by = tl.sum(a, 0), tl.max(tl.where(keep, 1, 0), 0) > 0
    return tl.sum(tl.where(kept_by[:, None] & ~finite, factor[:, None] * wide, 0.0), 0)


@triton.jit
def pick(x, rows, row):
    """x (M,) at one of its rows, a scalar."""
    return tl.sum(tl.where(rows == row, x, 0.0), 0)


@triton.jit
def add_to_row(base, row, strides, x, D: tl.constexpr, C: tl.constexpr):
    """x (C,), NaN or inf where it is not 0, added to a row of a (length, D) matrix in memory."""
    at = tile_ptrs(base, row, strides, 1, C, True)
    inside = (tl.arange(0, C) < D)[None, :] & (x != 0)[None, :]
    old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (old + x[None, :]).to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_row(base, row, length, strides, D: tl.constexpr, C: tl.constexpr):
    """One row of a (length, D) matrix as fp32 (1, C)."""
    return load_tile(base, row, length, strides, 1, D, C, True, True).to(tl.float32)
