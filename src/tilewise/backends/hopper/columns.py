"""What the partitions of the backward share: which tiles they work on, and what they hand to each other."""

# No ``from __future__ import annotations``: Gluon reads the annotations.

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.language.core import _aggregate as aggregate

from ..triton.primitives import quick_tanh
from . import config
from .pipeline import ROWS, place, sequence

columns = gluon.constexpr_function(config.columns)
# Named barriers.
SUM_FULL = gl.constexpr(6)  # dQ is staged: one of each writer
SUM_EMPTY = gl.constexpr(12)  # dQ may be staged: one of each writer and consumer

# --- which tiles ----------------------------------------------------------------------------------


@gluon.jit
def visits(
    j0, end, len_q, low, high, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
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
def turn(tile, i0, low, BLOCK_N: gl.constexpr, LEFT: gl.constexpr):
    """How many tiles of keys add to dQ of rows i0 .. before this one."""
    if LEFT:
        return tile - max(i0 + low, 0) // BLOCK_N
    else:
        return tile


@gluon.jit
def unmasked(j0, end, len_q, low, high, BLOCK_N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
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
def work(
    t, z, n_n, lengths, ragged, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    """Work item t: (tile of keys, batch entry, key head, end of the keys, and what it ``visits``); ``Sizes`` of its
    sequence; and where that begins: (first query, first key, first tile of queries, first of keys, each of a head).

    n_n: how many tiles of keys there are, of all sequences. Of a ragged batch they are on a list, which is read from
    the end: the longest sequences come first, and the tiles of each in order of their number.
    """
    back, pair = place(t, n_n, z.pairs, z.section, True)
    if ragged[2] is None:
        tile = n_n - 1 - back
        b = pair // z.heads
        kv = pair - b * z.heads
        first_q, first_k, own = sequence(b, z, ragged)
        start = 0, 0, b * z.heads * z.group * z.n_m, b * z.heads * n_n
    else:
        item = ragged[2] + 1 + 2 * back
        b, kv = gl.load(item), pair
        first_q, first_k, own = sequence(b, z, ragged)
        tile = (own.len_k + BLOCK_N - 1) // BLOCK_N - 1 - gl.load(item + 1)
        start = first_q, first_k, first_q // BLOCK_M + b, first_k // BLOCK_N + b
    end = own.len_k
    if lengths is not None:
        end = max(min(gl.load(lengths + b).to(gl.int32), end), 0)
    last, n = visits(tile * BLOCK_N, end, own.len_q, own.low, own.high, BLOCK_M, BLOCK_N, LEFT, RIGHT)
    return tile, b, kv, end, last, n, own, start


@aggregate
class Steps:
    """The buffers of the steps: a ring whose slots hold a tile of q, and lse and delta of its rows."""

    q: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, stats, full, empty):
        self.q, self.stats, self.full, self.empty = q, stats, full, empty


# --- P and gradients ------------------------------------------------------------------------------


@gluon.jit
def probabilities(
    s, lse, i0, j0, end, open_from, open_to, z, qk_scale, cap, LEFT: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    """P^T (64, 64) of keys from j0 and queries from i0 on, and what dP - delta is multiplied by for dS^T.

    cap: None, or as in the forward: the scores are softcap * tanh, whose derivative is 1 - tanh^2.
    """
    if cap is not None:
        s = quick_tanh(s, cap)
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
    slope = p
    if cap is not None:
        slope = p * (1 - s * s)
    return p, slope


# --- sums in order --------------------------------------------------------------------------------


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
