"""Attention tile by tile in plain PyTorch: the algorithm as one would explain it, and the CPU default.

Forward: a tile of queries stays, tiles of keys and values stream past, and the state (m, l, acc) of
the query rows takes them in. Backward: the probabilities of a tile are recomputed from the scores and
the saved log-sum-exp; with delta = rowsum(dO * O) - dlse,

    P = exp(S - lse)      dV += P^T dO      dP = dO V^T      dS = P * (dP - delta)
    dK += dS^T Q          dQ += dS K

A tile of keys stays and tiles of queries stream past, so dK and dV of a tile are finished before the next.

Several (batch, key/value head) pairs are computed at once, as one batched matrix product; the query
heads that share a key/value head are rows of the same product, so keys and values are never expanded.
A tile of scores is held transposed, keys by queries: the matrix products then read their operands in memory order,
which was measured to be a tenth faster; who computes them is the matter of ``products``. Tile arithmetic is fp32
(fp64 for fp64 inputs), but for what the last paragraph says. What one side needs is prepared for a strip of
neighbouring tiles, while the other side's strips stream past. Besides the outputs there exist a tile of scores over the
heads at work (two in the backward, one more under a softcap and where products are rounded), a strip of each side, and
the dQ of these heads.

exp is exp2, which is as exact and which PyTorch's CPU kernels compute several times faster. Where nothing is added to
the scores they are in units of log2: q comes scaled by scale * log2(e).

Gradients of bf16 on a CPU that multiplies it: P and dS are rounded to bf16, as kernels for GPUs do, for the three
products that sum them up (``_rounded``). S and dP stay fp32, as an error in them is one of P itself.

Source: Dao et al. 2022, "FlashAttention", algorithms 1-4; Dao 2023, "FlashAttention-2".
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import state
from ..dispatch import Backend, Grads, Output, Saved
from ..masks import PARTIAL, Band, Grid, Patch
from ..philox import dropout_keep
from ..request import NEG_INF, Request, Sequence, distance
from ..state import State
from ..tilemap import Tile, TileMap, tile_map
from . import products

# Elements of a tile of scores over all heads at work, for each thread: so many that an operation takes longer than its
# Python and than its threads' waiting for each other, so few that the tile stays in the caches from one pass over it to
# the next. Measured with benchmarks/cpu.py on two cores.
_SCORES = 2**19  # 2 MiB in fp32
_MOST_THREADS = 16  # that a tile grows with
_AT_ONCE = 2**16  # scores of all heads: with fewer, what tiles need beside the arithmetic takes longer than it
_STRIP = 4096  # queries or keys that are prepared at once
# Products of an fp32 tile that are added up in one chain: the error of a sum grows with its length. With so many the
# errors are those of PyTorch (the table of benchmarks/cpu.py). Chains of 128 in the forward would be 5 % faster, its
# error 6 % larger; chains of 64 in the backward a tenth slower, its errors 5 to 10 % smaller. PyTorch adds up fewer
# queries at once where there are fewer than 768: so does the sum of dK and dV, unless a call would be slower than it.
_CHAIN, _CHAIN_BACKWARD = 64, 128
_CHAIN_SHORT, _FEW_QUERIES = 32, range(256, 768)
_NEAR = 46.0  # how far a row's largest score may be from its m: exp(46) and exp(-46) are far from the ends of fp32
_LOG2E = math.log2(math.e)

Place = tuple[int, int, int]  # of a tile, relative to the diagonal, and its shape
Add = Callable[[Tensor, Tensor, Tensor], None]  # acc += a @ b
Keep = Callable[[], Tensor]  # makes the mask of a tile, broadcastable to (nb, nh, m, k): where 0 * NaN may not be NaN


class TiledBackend(Backend):
    name = "tiled"
    summary = "tile by tile in plain PyTorch, every feature, any device; the CPU default"
    tiles: tuple[int, int] | None = None  # (block_m, block_n) in place of the heuristic, for tests and pictures

    def forward(self, r: Request) -> Output:
        if self.tiles is None and _is_small_and_plain(r):
            return _at_once(r)
        top, low = (r.new_stats() if want else None for want in (r.want_max_logits, r.keeps_low))
        o = Output(r.new_out(), r.new_stats(), top, low)
        if r.ragged is not None:  # rows that belong to no sequence
            o.out.zero_()
            for x, empty in ((o.lse, NEG_INF), (o.max_logits, NEG_INF), (o.lse_low, 0.0)):
                if x is not None:
                    x.fill_(empty)
        near, blocks = _all_near_zero(r), self.blocks(r, backward=False)
        scratch = _Scratch(r, blocks, tiles=1 + (r.softcap is not None))
        with products.quick(r.device):
            for w in blocks:
                for strip in _strips(w.tiles.grid.len_q, w.tiles.grid.block_m):
                    _forward(w, strip, near, o, scratch)
        return o

    def backward(self, r: Request, saved: Saved, needs: frozenset[str]) -> Grads:
        grads = _Gradients(r, needs)
        blocks = self.blocks(r, backward=True)
        if grads.sinks is not None:
            for w in blocks:
                grads.add_sinks(w, saved)
        if not grads.any_scores:
            return grads.finish(r)
        near, scratch = _all_near_zero(r), _Scratch(r, blocks, tiles=2 + (r.softcap is not None) + _rounded(r))
        with products.quick(r.device):
            for w in blocks:
                _backward(w, near, saved, grads, scratch)
        return grads.finish(r)

    def block_shape(self, r: Request, seq: Sequence, backward: bool) -> tuple[int, int]:
        """Queries and keys of a tile. Small enough to skip much of a mask, large enough for the matrix product.

        Measured with benchmarks/cpu.py: a forward is faster with 256 queries, a backward with 512 queries and 1024
        keys, unless a mask hides keys on both sides: then half of that visits less of what is hidden. What is hidden on
        one side only weighs more in short sequences.
        """
        if self.tiles:
            return self.tiles
        one_sided = isinstance(r.mask, Band) and r.mask.left is None
        m, n = (512 if backward and (one_sided or r.mask is None) else 256), 512
        if backward and one_sided:
            m, n = (max(256, min(x, most)) for x, most in ((seq.len_q // 4, m), (seq.len_k // 4, 1024)))
        if backward and _chained(r):  # dK and dV are sums over the queries of a tile
            m = _CHAIN_BACKWARD
        if backward and _rounded(r):  # dQ is a sum over the keys of a tile
            n = 1024
        m = max(16, m // r.group)  # the rows of a group are stacked
        room = _room() // (max(1, min(m, seq.len_q)) * r.group)  # keys of a tile, over all heads at work
        if r.mask is None or (one_sided and room >= 1024 * r.batch * r.kv_heads):
            n = 1024
        if seq.len_q < m:  # few queries (decoding): longer tiles of keys for the same work
            n = max(n, room // 4 // _CHAIN_BACKWARD * _CHAIN_BACKWARD)
        return max(1, min(m, seq.len_q)), max(1, min(n, seq.len_k))

    def blocks(self, r: Request, backward: bool) -> list[Block]:
        """The work, in blocks of (batch, key/value head) pairs of a sequence that are computed together."""
        return [w for seq in r.sequences() for w in self._blocks(r, seq, backward)]

    def _blocks(self, r: Request, seq: Sequence, backward: bool) -> Iterator[Block]:
        m, n = self.block_shape(r, seq, backward)
        grid = Grid(r.batch, r.heads, seq.len_q, seq.len_k, m, n, r.device)
        tiles = tile_map(r.mask, grid)
        pairs = max(1, _room() // (m * n * r.group))
        kv_step = min(pairs, r.kv_heads)
        batch_step = max(1, pairs // r.kv_heads)
        same = tiles.block(seq.batch, slice(None)) if tiles.table.shape[:2] == (1, 1) else None
        for b in range(seq.batch.start, seq.batch.stop, batch_step):
            batch = slice(b, min(b + batch_step, seq.batch.stop))
            for h in range(0, r.kv_heads, kv_step):
                kv = slice(h, min(h + kv_step, r.kv_heads))
                heads = slice(kv.start * r.group, kv.stop * r.group)
                yield Block(r, seq, tiles, same or tiles.block(batch, heads), batch, kv)


def _unit(r: Request) -> float:
    """What a natural score is multiplied by, so that P is exp2 of it: log2(e); 1 where it must stay natural.

    A bias of finfo.min must stay finite, and ALiBi's and the largest scores as exact as they are: these are multiplied
    as late as in ``_exp_``.
    """
    return 1.0 if r.bias is not None or r.alibi is not None or r.want_max_logits else _LOG2E


def _chained(r: Request) -> bool:
    """Whether sums over a tile show in the results. MKL adds up several shorter ones by itself."""
    return r.dtype == torch.float32 and products.in_one_chain(r.device)


def _rounded(r: Request) -> bool:
    """Whether dQ, dK and dV are products of bf16. A product adds up in fp32, and rounds its result to bf16.

    So the sums of a tile are rounded once more, and tiles should be large. q, k and dO are what was given, as no factor
    of theirs is a bf16: the scale goes into dS. A bias needs dS without it, and dropout has a factor for dO.
    """
    plain = r.bias is None and r.alibi is None and r.dropout_p == 0
    return plain and r.dtype == torch.bfloat16 and products.quick_in_bf16(r.device)


def _factor_dtype(r: Request) -> torch.dtype:
    """Of what the gradients are products of."""
    return r.dtype if _rounded(r) else r.state_dtype


def _ds_scale(r: Request) -> float:
    """What dS is multiplied by as it is made; elsewhere dQ is in the end, and dK by q."""
    return r.scale if _rounded(r) else 1.0


def _room() -> int:
    return _SCORES * min(torch.get_num_threads(), _MOST_THREADS)


class Strip(NamedTuple):
    """Neighbouring tiles of one size, prepared together: they stay while the other side streams past once."""

    tiles: range
    at: slice  # their queries or keys


def _strips(length: int, block: int) -> Iterator[Strip]:
    whole, step = length // block, max(1, _STRIP // block)
    for i in range(0, whole, step):
        tiles = range(i, min(i + step, whole))
        yield Strip(tiles, slice(tiles.start * block, tiles.stop * block))
    if length % block:
        yield Strip(range(whole, whole + 1), slice(whole * block, length))


class Block(NamedTuple):
    """Some batch entries and key/value heads of a sequence, worked on together; n = their number."""

    r: Request
    seq: Sequence
    tiles: TileMap
    verdicts: list[list[int]]
    batch: slice
    kv: slice

    @property
    def heads(self) -> slice:
        return slice(self.kv.start * self.r.group, self.kv.stop * self.r.group)

    @property
    def pairs(self) -> int:
        return (self.batch.stop - self.batch.start) * (self.kv.stop - self.kv.start)

    @property
    def local(self) -> slice:
        return slice(self.batch.start - self.seq.batch.start, self.batch.stop - self.seq.batch.start)

    def queries(self, x: Tensor, strip: Strip, dtype: torch.dtype | None = None) -> Tensor:
        """The strip of a query-like (B, H, Lq, D) tensor as (t, n, group * m, D), in the state dtype or ``dtype``."""
        return self._gather(self._cut(self.seq.queries(x), self.heads, strip), dtype)

    def put_queries(self, x: Tensor, strip: Strip, value: Tensor) -> None:
        self._put(self.seq.queries(x), self.heads, strip, value)

    def keys(self, x: Tensor, strip: Strip, dtype: torch.dtype | None = None) -> Tensor:
        """The strip of a key-like (B, Hkv, Lk, D) tensor as (t, n, k, D), in the state dtype or ``dtype``."""
        return self._gather(self._cut(self.seq.keys(x), self.kv, strip), dtype)

    def put_keys(self, x: Tensor | None, strip: Strip, value: Tensor | None) -> None:
        if x is not None and value is not None:
            self._put(self.seq.keys(x), self.kv, strip, value)

    def _gather(self, cut: Tensor, dtype: torch.dtype | None) -> Tensor:
        """What ``_cut`` gives as (t, n, ..., D), copied at most once."""
        x = cut.to(dtype or self.r.state_dtype, memory_format=torch.contiguous_format)
        return x.reshape(len(cut), self.pairs, -1, cut.shape[-1])

    def stats(self, x: Tensor, strip: Strip) -> Tensor:
        """The strip of a statistic ((B, H, Lq), or (H, T) when ragged) as (t, n, group * m)."""
        return self._cut(self.seq.stats(x)[..., None], self.heads, strip).reshape(len(strip.tiles), self.pairs, -1)

    def put_stats(self, x: Tensor | None, strip: Strip, value: Tensor) -> None:
        if x is not None:
            self._put(self.seq.stats(x)[..., None], self.heads, strip, value[..., None])

    def _cut(self, x: Tensor, heads: slice, strip: Strip) -> Tensor:
        """The strip of a (B, H, L, D) tensor as a (t, nb, nkv, H / nkv, m, D) view, t tiles of m rows."""
        x = x[self.local, heads, strip.at].unflatten(1, (self.kv.stop - self.kv.start, -1))
        return x.unflatten(3, (len(strip.tiles), -1)).permute(3, 0, 1, 2, 4, 5)

    def _put(self, x: Tensor, heads: slice, strip: Strip, value: Tensor) -> None:
        """Write (t, n, ..., D) to where ``_cut`` would read it."""
        to = self._cut(x, heads, strip)
        to.copy_(value.unflatten(1, to.shape[1:3]).unflatten(3, to.shape[3:5]))

    def rows(self, strip: Strip) -> int:
        """Queries of each tile of a strip."""
        return (strip.at.stop - strip.at.start) // len(strip.tiles)

    def per_head(self, x: Tensor, m: int) -> Tensor:
        """A per-head number (H,) repeated to (n, group * m)."""
        nb = self.batch.stop - self.batch.start
        return x[self.heads].to(self.r.state_dtype).view(1, -1, 1).expand(nb, -1, m).reshape(self.pairs, -1)

    def patch(self, tile: Tile) -> Patch:
        return self.r.patch(self.seq, self.batch, self.heads, tile.rows, tile.cols)

    def by_head(self, s: Tensor, tile: Tile) -> Tensor:
        """Scores (n, k, group * m) seen as (nb, nkv, group, m, k), as masks and biases see them."""
        nb, nkv = self.batch.stop - self.batch.start, self.kv.stop - self.kv.start
        m = tile.rows.stop - tile.rows.start
        return s.view(nb, nkv, s.shape[1], self.r.group, m).permute(0, 1, 3, 4, 2)

    def masked(self, s: Tensor, tile: Tile) -> Tensor:
        """What of ``by_head`` needs the mask."""
        return self.by_head(s, tile)[..., tile.masked.start - tile.cols.start : tile.masked.stop - tile.cols.start]

    def split(self, x: Tensor) -> Tensor:
        """(nb or 1, nh or 1, m, k) as (nb or 1, nkv or 1, group or 1, m, k), to go with ``by_head``."""
        return x[:, :, None] if x.shape[1] == 1 else x.unflatten(1, (-1, self.r.group))

    def like_scores(self, keep: Tensor, tile: Tile, s: Tensor) -> Tensor:
        """A mask, broadcastable to (nb, nh, m, k), as (n, k, group * m)."""
        return self.split(keep).expand(self.by_head(s, tile).shape).permute(0, 1, 4, 2, 3).reshape(s.shape)


# --- forward --------------------------------------------------------------------------------------


def _is_small_and_plain(r: Request) -> bool:
    """And no backward follows: that counts on scores which are the same sums, in the same order."""
    if r.before_backward or r.want_max_logits or r.dropout_p > 0:
        return False
    plain = r.mask is r.bias is r.alibi is r.softcap is r.sinks is r.ragged is None
    return plain and 0 < r.batch * r.heads * r.len_q * r.len_k <= _AT_ONCE


def _at_once(r: Request) -> Output:
    """A single tile, whose state is that of the whole row."""
    # The query heads that share a key/value head are rows of one product.
    q, k, v = (x.reshape(r.batch * r.kv_heads, -1, x.shape[-1]).to(r.state_dtype) for x in (r.q, r.k, r.v))
    # out=: autocast would change the dtype
    s = torch.bmm(q * r.scale, k.mT, out=q.new_empty(*q.shape[:2], k.shape[1]))
    m = s.amax(-1, keepdim=True)
    p = s.sub_(m).exp_()
    l = p.sum(-1, keepdim=True)  # noqa: E741 - the field's name for it
    out = torch.bmm(p, v, out=q.new_empty(*q.shape[:2], r.dim_v)).div_(l).view(*r.q.shape[:3], r.dim_v)
    if out.dtype != r.dtype or not r.q.is_contiguous():
        out = r.new_out().copy_(out)
    return Output(out, m.add_(l.log_()).view(out.shape[:-1]))


class _Rows(NamedTuple):
    """A strip of queries, and what its rows have seen so far: (t, ...) as listed, or one tile of it without t.

    n = (batch, key/value head) pairs. All but q are updated in place.
    """

    q: Tensor  # (t, n, group * m, D), scaled, in ``_unit``, as all scores are
    high: Tensor  # (t, n, group * m), the largest score
    m: Tensor  # (t, n, group * m), what is taken off every score before exp: 0, or near ``high``
    acc: Tensor  # (t, n, Dv + 1, group * m), in memory transposed as the scores are; the last row is l


def _forward(w: Block, strip: Strip, near: bool, to: Output, scratch: _Scratch) -> None:
    """Fill the output and its statistics for a strip of the block's queries."""
    r, grid = w.r, w.tiles.grid
    seen = _nothing_seen(w, strip)
    rows = _unbind(seen)
    for keys in _strips(grid.len_k, grid.block_n):
        visits = [(c, list(w.tiles.col(w.verdicts, c, strip.tiles))) for c in keys.tiles]
        if not any(tiles for _, tiles in visits):
            continue
        k, v1 = w.keys(r.k, keys).contiguous(), _summed_over(r, w.keys(r.v, keys), 1.0 if r.dropout_p == 0 else 0.0)
        clean = not _hides(r) or _finite(v1)
        for (c, tiles), k_c, v_c in zip(visits, k.unbind(), v1.unbind(), strict=True):
            cols = grid.cols_of(c)
            for i, tile in tiles:
                x = rows[i - strip.tiles.start]
                s, keep, _ = _scores(w, tile, x.q, _part(k_c, tile, cols), near, scratch)
                _fold_(w, tile, x, s, _part(v_c, tile, cols), keep, scratch, near, clean)
    _finish(w, strip, seen, to)


def _nothing_seen(w: Block, strip: Strip) -> _Rows:
    q = w.queries(w.r.q, strip)
    q = torch.mul(q, _q_scale(w.r), out=q.new_empty(q.shape))  # in memory as listed, which not every layout becomes
    m = q.new_zeros(q.shape[:3])
    t, n, rows, d1 = *q.shape[:3], w.r.dim_v + 1
    acc = m.new_zeros(t, n, d1, rows) if w.r.bias is None else m.new_zeros(t, n, rows, d1).mT
    return _Rows(q, torch.full_like(m, NEG_INF), m, acc)


def _q_scale(r: Request) -> float:
    """What q is multiplied by. A softcap takes natural scores, and the unit after."""
    return r.scale * (_unit(r) if r.softcap is None else 1.0)


def _all_near_zero(r: Request) -> bool:
    """Whether it is certain, before any score is computed, that all are finite and within ``_NEAR`` of 0.

    |q k| <= |q| |k|. Then m stays 0 in every row, the largest score is not needed, and no exp under- or overflows.
    """
    if r.bias is not None or r.alibi is not None or r.want_max_logits:
        return False
    if r.len_q * r.group < 64 or not r.q.numel() or not r.k.numel():  # a pass over the keys costs more than it saves
        return False
    largest = [float(torch.linalg.vector_norm(x, dim=-1).amax()) for x in (r.q, r.k)]
    bound = largest[0] * largest[1] * abs(r.scale)  # NaN if something is, and so never below anything
    if r.softcap is not None and math.isfinite(bound):
        bound = min(bound, r.softcap)
    return bound * _unit(r) < 0.99 * _NEAR  # less what rounding may add: each norm of bf16 one part in 256


def _scores(
    w: Block, tile: Tile, q: Tensor, k: Tensor, near: bool, scratch: _Scratch, finite: bool = False
) -> tuple[Tensor, Keep | None, Tensor | None]:
    """A tile of scores (n, k, group * m); what makes the mask of what is kept, None for all; tanh of the softcap.

    q (n, group * m, D) comes scaled, k is (n, k, D). What is masked is -inf, unless the scores are ``near`` 0:
    ``_exp_`` takes it out then. finite: q and k are known to be, and need no mask where the bias is -inf.
    """
    r, tanh = w.r, None
    if r.softcap is None:
        s = _product(k, q.mT, scratch.tile(0, len(k), k.shape[1], q.shape[1]))
    else:
        tanh = _product(k, q.mT, scratch.tile(-1, len(k), k.shape[1], q.shape[1])).div_(r.softcap).tanh_()
        s = torch.mul(tanh, r.softcap * _unit(r), out=scratch.tile(0, len(k), k.shape[1], q.shape[1]))
    if tile.verdict != PARTIAL and r.bias is None and r.alibi is None:
        return s, None, tanh
    by_head = w.by_head(s, tile)
    keep = partial(scratch.keep, w, tile) if tile.verdict == PARTIAL else None
    bias = r.bias_tile(w.patch(tile)) if r.bias is not None or r.alibi is not None else None
    if bias is not None:
        by_head.add_(w.split(bias))
        if not (finite or float(bias.amin()) > NEG_INF):  # -inf excludes as False does: not even a NaN shines through
            allowed = bias != NEG_INF
            by_head.masked_fill_(w.split(~allowed), NEG_INF)
            keep = partial(_both, allowed, keep)
    if tile.verdict == PARTIAL and not near:
        w.masked(s, tile).masked_fill_(w.split(~scratch.keep(w, tile.edge())), NEG_INF)
    return s, keep, tanh


def _both(allowed: Tensor, keep: Keep | None) -> Tensor:
    return allowed if keep is None else allowed & keep()


def _exp_(w: Block, tile: Tile, s: Tensor, keep: Keep | None, near: bool, scratch: _Scratch) -> Tensor:
    """exp(s) in place, 0 where masked. CPUs take up to a hundred times longer where the result is denormal or 0."""
    if _unit(w.r) == 1.0:
        s.mul_(_LOG2E)
    if not near:
        tiny = torch.finfo(s.dtype).tiny
        return torch.threshold_(s.clamp_(min=math.log2(1.5 * tiny)).exp2_(), 2 * tiny, 0.0)
    p = s.exp2_()
    if keep is not None:
        w.masked(p, tile).permute(0, 1, 4, 2, 3).mul_(scratch.factor(w, tile.edge()))
    return p


def _fold_(
    w: Block, tile: Tile, seen: _Rows, s: Tensor, v1: Tensor, keep: Keep | None, scratch: _Scratch,
    near: bool, clean: bool,
) -> None:  # fmt: skip
    """``state.fold`` in place: ``s`` becomes the tile's exp(s - m), and the sums take it in.

    v1 (n, k, Dv + 1) has ones in the last column: the product then also sums up l, for the price of a column.
    ``clean``: there is nothing in v1 that must not be multiplied by 0.
    """
    if not near:
        _move_m_(seen, s, torch.exp if _unit(w.r) == 1.0 else torch.exp2)
        s.sub_(seen.m[:, None])
    p = _exp_(w, tile, s, keep, near, scratch)
    if w.r.dropout_p > 0:  # l is that of all keys: here v1 ends in zeros
        seen.acc[:, -1].add_(p.sum(1))
        w.by_head(p, tile).mul_(_survivors(w, tile, scratch))
    add = partial(_add_sum_over_keys, _CHAIN, scratch)
    if keep is not None and not clean:
        add = partial(_add_kept_product, add, w.like_scores(keep(), tile, p).mT)
    add(seen.acc.mT, p.mT, v1)


def _move_m_(seen: _Rows, s: Tensor, exp: Callable[[Tensor], Tensor]) -> None:
    """Bring m back to the largest score wherever that has gone further than ``_NEAR`` from it, and rescale the sums.

    m need not be the largest score: softmax is the same for any m, exp(_NEAR) is far from overflow, and a float's
    precision is relative. Row by row, so that one row's scores change no bit of another, and from that row's
    scores alone, so that it makes no difference whether ``_all_near_zero`` was known before.
    """
    torch.maximum(seen.high, s.amax(1), out=seen.high)
    settled = ((seen.high - seen.m).abs() <= _NEAR) | (seen.high == NEG_INF)  # False for a NaN
    if not bool(settled.all()):
        m = torch.where(settled, seen.m, seen.high)
        # m falls only where the sums are still 0
        seen.acc.mul_(exp((seen.m - m).clamp(max=0))[:, None])
        seen.m.copy_(m)


def _finish(w: Block, strip: Strip, seen: _Rows, to: Output) -> None:
    """Write the strip's output and statistics."""
    r, total = w.r, _in_natural_units(w.r, State(seen.m, seen.acc[:, :, -1], seen.acc[:, :, :-1].mT))
    w.put_stats(to.max_logits, strip, seen.high)
    if r.sinks is not None:
        total = state.with_sink(total, w.per_head(r.sinks, w.rows(strip)))
    o, lse = state.finish(total)
    w.put_queries(to.out, strip, o if r.dropout_p == 0 else o * _survivor_weight(r))
    w.put_stats(to.lse, strip, lse)
    if to.lse_low is not None:
        w.put_stats(to.lse_low, strip, state.lse_low(total, lse))


def _in_natural_units(r: Request, x: State) -> State:
    """The same state for exp: what rounds off m goes into the sums."""
    if _unit(r) == 1.0 or not bool(x.m.any()):
        return x
    m = x.m / _LOG2E
    rest = torch.exp2(x.m.double() - m.double() * _LOG2E).to(m.dtype)
    return State(m, x.l * rest, x.acc * rest[..., None])


def _survivors(w: Block, tile: Tile, scratch: _Scratch) -> Tensor:
    """1 where a pair survives dropout, else 0: as ``Block.by_head`` has it."""
    assert w.r.rng is not None
    return w.split(dropout_keep(w.r.rng, w.r.dropout_p, w.patch(tile), w.r.heads, scratch))


def _drop_(w: Block, tile: Tile, x: Tensor, survivors: Tensor, clean: bool) -> None:
    """x (n, k, group * m) is 0 where a pair is dropped; ``clean``: by a product, which takes a tenth of the time."""
    if clean:
        w.by_head(x, tile).mul_(survivors)
    else:
        w.by_head(x, tile).masked_fill_(survivors == 0, 0)


def _survivor_weight(r: Request) -> float:
    return 1 / (1 - r.dropout_p) if r.dropout_p < 1 else 0.0


# --- backward -------------------------------------------------------------------------------------


class _Queries(NamedTuple):
    """What the backward needs of a strip of queries, or of one tile of it without t.

    With ones in the last columns of k1 and v1, the last columns here make the products S - lse and dP - delta. A pass
    over the tile would cost far more than a column of the product.
    """

    q1: Tensor  # (t, n, group * m, D + 1): q, scaled as the forward has it, and -lse
    do1: Tensor  # (t, n, group * m, Dv + 1): dO, and -delta = dlse - rowsum(dO * O), both times ``_ds_scale``
    q: Tensor  # (t, n, group * m, D), what dS is multiplied with: that of q1, or the given one in bf16
    do: Tensor  # (t, n, group * m, Dv), what P is multiplied with: that of do1, or the given one in bf16
    lse: Tensor | None  # (t, n, group * m): where it is taken off apart, and the last column of q1 is 0
    delta: Tensor | None  # likewise, with that of do1


class _Keys(NamedTuple):
    """A strip of keys and their gradients, or one tile of it without t."""

    k: Tensor  # (t, n, k, D), what dS is multiplied with, in the memory order that is quickest
    k1: Tensor  # (t, n, k, D + 1), with ones
    v1: Tensor  # (t, n, k, Dv + 1), with ones
    dk: Tensor | None
    dv: Tensor | None


def _backward(w: Block, near: bool, saved: Saved, grads: _Gradients, scratch: _Scratch) -> None:
    """Write dQ, dK and dV of the block, and add to what else is asked for."""
    grid = w.tiles.grid
    strips = list(_strips(grid.len_q, grid.block_m))
    dq = [] if grads.q is None else [_no_dq(w, strip) for strip in strips]
    for keys in _strips(grid.len_k, grid.block_n):
        y = _no_dkdv(w, keys, grads)
        ys, clean_y = _unbind(y), not _hides(w.r) or _finite(y.k1, y.v1)
        for b, strip in enumerate(strips):
            visits = [list(w.tiles.row(w.verdicts, i, keys.tiles)) for i in strip.tiles]
            if not any(visits):
                continue
            x = _queries(w, strip, saved)
            clean = clean_y and (not _hides(w.r) or _finite(x.q1, x.do1))
            for n, (x_i, tiles) in enumerate(zip(_unbind(x), visits, strict=True)):
                for c, tile in tiles:
                    y_c, cols = ys[c - keys.tiles.start], grid.cols_of(c)
                    if tile.cols != cols:
                        y_c = _Keys(*(_part(f, tile, cols) for f in y_c))
                    _backward_tile(w, tile, x_i, y_c, dq[b][n] if dq else None, grads, scratch, near, clean)
        if y.dk is not None and w.r.softcap is None and not _rounded(w.r):
            y.dk.div_(_unit(w.r))
        w.put_keys(grads.k, keys, y.dk)
        w.put_keys(grads.v, keys, y.dv)
    if grads.q is not None:
        for strip, part in zip(strips, dq, strict=True):
            w.put_queries(grads.q, strip, part if _rounded(w.r) else part.mul_(w.r.scale))


def _no_dq(w: Block, strip: Strip) -> Tensor:
    """dQ of a strip, (t, n, group * m, D)."""
    t, n, m, d = len(strip.tiles), w.pairs, w.r.group * w.rows(strip), w.r.dim
    if _dq_as_listed(w.r):
        return torch.zeros(t, n, m, d, dtype=w.r.state_dtype, device=w.r.device)
    return torch.zeros(t, n, d, m, dtype=w.r.state_dtype, device=w.r.device).mT


def _dq_as_listed(r: Request) -> bool:
    """Whether dQ lies in memory as it is listed. In fp32 it is transposed where the scores are."""
    return _rounded(r) or r.bias is not None


def _no_dkdv(w: Block, strip: Strip, grads: _Gradients) -> _Keys:
    r = w.r
    k, v = (w.keys(x, strip, _factor_dtype(r)) for x in (r.k, r.v))
    dk, dv = (None if g is None else x.new_zeros(x.shape, dtype=r.state_dtype) for g, x in ((grads.k, k), (grads.v, v)))
    return _Keys(k if _rounded(r) else _summed_over(r, k), _with(k, 1.0), _with(v, 1.0), dk, dv)


def _queries(w: Block, strip: Strip, saved: Saved) -> _Queries:
    r = w.r
    q, do = (w.queries(x, strip, _factor_dtype(r)) for x in (r.q, saved.dout))
    lse, delta, weight = _row_stats(w, strip, saved, do, _unit(r))
    # Rounded to fewer digits -lse would be another one. A score is small beside lse, so a bias comes before it.
    exact = r.state_dtype == torch.float64 or products.exact(r.device)
    with_lse, with_delta = exact and r.softcap is None and r.bias is None, exact and r.dropout_p == 0
    delta = delta * _ds_scale(r)
    q1 = _with(q, -lse if with_lse else 0.0, _q_scale(r))
    # the weight of survivors is that of P in dV and of dP in dS
    do1 = _with(do, -delta if with_delta else 0.0, _survivor_weight(r) if r.dropout_p > 0 else _ds_scale(r))
    if weight is not None:
        do1.mul_(weight[..., None])
        delta = delta * weight
    return _Queries(
        q1,
        do1,
        q if _rounded(r) else q1[..., :-1],
        do if _rounded(r) else do1[..., :-1],
        None if with_lse else lse,
        None if with_delta else delta,
    )


def _row_stats(w: Block, strip: Strip, saved: Saved, do: Tensor, unit: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """lse * unit, delta = rowsum(dO * O) - dlse, and the weight of the rows in dO and delta, each (t, n, group * m).

    P = exp(S - lse) * exp(-lse_low). The second factor belongs to a row, so it goes into that row of dO and delta; and
    with it what rounds off lse * unit.
    """
    delta = (do * w.queries(saved.out, strip)).sum(-1)
    if saved.dlse is not None:
        delta = delta - w.stats(saved.dlse, strip)
    weight = None if saved.lse_low is None else torch.exp(-w.stats(saved.lse_low, strip))
    lse = w.stats(saved.lse, strip)
    lse = torch.where(lse == NEG_INF, 0.0, lse)
    if weight is None:
        return lse * unit, delta, None
    exact = lse.double() * unit
    lse = exact.to(lse.dtype)
    return lse, delta, weight * torch.exp2(lse - exact).to(lse.dtype)


def _backward_tile(
    w: Block, tile: Tile, x: _Queries, y: _Keys, dq: Tensor | None, grads: _Gradients, scratch: _Scratch,
    near: bool, clean: bool,
) -> None:  # fmt: skip
    """Add a tile's part of dQ (n, D, group * m), dK (n, k, D) and dV (n, k, Dv), and of the bias.

    ``clean``: nothing in x and y is NaN or infinite, and so what is masked is 0 by itself.
    """
    r = w.r
    s, keep, tanh = _scores(w, tile, x.q1, y.k1, near, scratch, clean)
    if x.lse is not None:
        s.sub_(x.lse[:, None])
    p = _exp_(w, tile, s, keep, near, scratch)
    kept = None if keep is None or clean else w.like_scores(keep(), tile, p)
    if kept is not None:
        p.masked_fill_(~kept, 0)
        if tanh is not None:
            tanh.masked_fill_(~kept, 0)
    survivors = _survivors(w, tile, scratch) if r.dropout_p > 0 else None
    ds = _dscores(w, tile, p, x, y.v1, survivors, scratch, clean)
    if kept is not None:
        ds.masked_fill_(~kept, 0)
    grads.add_bias(w, tile, ds)
    if tanh is not None:
        ds.mul_(1 - tanh * tanh)
    if survivors is not None:
        _drop_(w, tile, p, survivors, clean)
    if _rounded(r):
        p, ds = scratch.rounded(2, p), scratch.rounded(0, ds)  # dS where P was
    over_keys = _add_product if _dq_as_listed(r) else partial(_add_sum_over_keys, _CHAIN_BACKWARD, scratch)
    over_queries = _sum_over_queries(r, w.seq)
    if kept is not None:
        over_keys = partial(_add_kept_product, over_keys, kept.mT)
        over_queries = partial(_add_kept_product, over_queries, kept)
    if dq is not None:
        over_keys(dq, ds.mT, y.k)
    if y.dk is not None:
        over_queries(y.dk, ds, x.q)
    if y.dv is not None:
        over_queries(y.dv, p, x.do)


def _dscores(
    w: Block, tile: Tile, p: Tensor, x: _Queries, v1: Tensor, survivors: Tensor | None, scratch: _Scratch,
    clean: bool,
) -> Tensor:  # fmt: skip
    """dS = P * (dP - delta), before the softcap, (n, k, group * m)."""
    room = scratch.tile(1, *p.shape)
    ds = _product(v1, x.do1.mT, room)
    if survivors is not None:
        _drop_(w, tile, ds, survivors, clean)
    if x.delta is not None:
        ds.sub_(x.delta[:, None])
    return ds.mul_(p)


class _Gradients:
    """The gradients asked for, as they are written or summed up."""

    def __init__(self, r: Request, needs: frozenset[str]):
        def written(name: str, x: Tensor) -> Tensor | None:
            if name not in needs:
                return None
            return torch.zeros_like(x) if r.ragged is not None else torch.empty_like(x)

        def summed(name: str, x: Tensor | None) -> Tensor | None:
            if name not in needs or x is None:
                return None
            if name == "bias" and not _broadcast_dims(r, x):  # every element is written once, or if masked not at all
                g = _in_huge_pages(torch.empty_like(x))
                return g if r.mask is None and r.ragged is None else g.zero_()
            return torch.zeros_like(x, dtype=r.state_dtype)

        self.q, self.k, self.v = written("q", r.q), written("k", r.k), written("v", r.v)
        self.bias, self.alibi, self.sinks = (
            summed(n, x) for n, x in (("bias", r.bias), ("alibi", r.alibi), ("sinks", r.sinks))
        )
        self.any_scores = any(g is not None for g in (self.q, self.k, self.v, self.bias, self.alibi))

    def add_bias(self, w: Block, tile: Tile, ds: Tensor) -> None:
        if self.bias is None and self.alibi is None:
            return
        patch, by_head = w.patch(tile), w.by_head(ds, tile)
        if self.bias is not None:
            over = [x for d in _broadcast_dims(w.r, self.bias) for x in ((0,), (1, 2), (3,), (4,))[d]]
            to = w.split(patch.take(self.bias))
            if over:
                to.add_(by_head.sum(over, keepdim=True))
            else:
                to.copy_(by_head)
        if self.alibi is not None:
            per_head = -(by_head * distance(patch)).sum((3, 4)).flatten(1)  # (nb, nh)
            to = patch.take(self.alibi[:, :, None, None])[:, :, 0, 0]
            to.add_(per_head if to.shape[0] == per_head.shape[0] else per_head.sum(0, keepdim=True))

    def add_sinks(self, w: Block, saved: Saved) -> None:
        """A sink is a key whose value is 0: its dP is 0."""
        assert w.r.sinks is not None
        assert self.sinks is not None
        nb, nh = w.batch.stop - w.batch.start, w.heads.stop - w.heads.start
        for strip in _strips(w.tiles.grid.len_q, w.tiles.grid.block_m):
            lse, delta, weight = _row_stats(w, strip, saved, w.queries(saved.dout, strip), 1.0)
            ds = -torch.exp(w.per_head(w.r.sinks, w.rows(strip)) - lse) * delta  # (t, n, group * m)
            ds = ds if weight is None else ds * weight
            self.sinks[w.heads].add_(ds.view(len(strip.tiles), nb, nh, -1).sum((0, 1, 3)))

    def finish(self, r: Request) -> Grads:
        def cast(g: Tensor | None, x: Tensor | None) -> Tensor | None:
            return None if g is None or x is None else g.to(x.dtype)

        others = (cast(g, x) for g, x in ((self.bias, r.bias), (self.alibi, r.alibi), (self.sinks, r.sinks)))
        return Grads(self.q, self.k, self.v, *others)


def _broadcast_dims(r: Request, bias: Tensor) -> list[int]:
    return [d for d, n in enumerate((r.batch, r.heads, r.len_q, r.len_k)) if bias.shape[d] == 1 and n != 1]


# --- shared ---------------------------------------------------------------------------------------


@lru_cache
def _have_malloc_keep_memory() -> None:
    """Free one piece of nearly 32 MiB, of which no page was used.

    glibc gives what is freed back to the system, to be paged in anew by the next call, beyond twice the largest piece
    that was ever freed, larger ones than 32 MiB aside. Any program that has freed such a tensor has done this.
    """
    bytearray(2**25 - 2**16)


def _in_huge_pages(x: Tensor) -> Tensor:
    """Ask for huge pages under a large tensor of which no page was used, where the system gives them on request.

    To page in 4 KiB at a time takes longer than to compute what is written there, in a virtual machine five times as
    long. malloc maps larger pieces than 32 MiB apart from others: the advice goes when the tensor is freed.
    """
    advice, size = getattr(mmap, "MADV_HUGEPAGE", None), x.numel() * x.element_size()
    if x.device.type == "cpu" and advice is not None and size > 2**25:
        start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(x.data_ptr() + size - start), ctypes.c_int(advice))
    return x


class _Scratch:
    """Room for tiles of scores, allocated once a call: to page in fresh memory takes as long as to compute a tile."""

    def __init__(self, r: Request, blocks: list[Block], tiles: int):
        self.r = r
        size = max((w.pairs * r.group * w.tiles.grid.block_m * w.tiles.grid.block_n for w in blocks), default=0)
        if r.device.type == "cpu" and size > _AT_ONCE:
            _have_malloc_keep_memory()
        self.room = torch.empty(tiles, size, dtype=r.state_dtype, device=r.device)
        self.sums = self.room.new_empty(0)
        self.words: dict[torch.Size, list[Tensor]] = {}
        self.lives: Tensor | None = None
        self.lengths = (0, 0)
        self.keeps: dict[Place, Tensor] = {}
        self.factors: dict[Place, Tensor] = {}

    def tile(self, which: int, n: int, rows: int, cols: int) -> Tensor:
        """An uninitialised (n pairs, rows, cols) tensor."""
        return self._view(self.room[which], n, rows, cols)

    def rounded(self, which: int, x: Tensor) -> Tensor:
        """x in bf16, where a tile may have been that is not needed any more."""
        return self._view(self.room[which].view(torch.bfloat16), *x.shape).copy_(x)

    def _view(self, room: Tensor, n: int, rows: int, cols: int) -> Tensor:
        room = room[: n * rows * cols]
        # A bias is read, and its gradient written, in the order of its memory: queries by keys.
        return room.view(n, rows, cols) if self.r.bias is None else room.view(n, cols, rows).mT

    def parts(self, c: int, n: int, d: int, m: int) -> tuple[Tensor, Tensor]:
        """Uninitialised (c * n, d, m), for sums over c parts of a tile, and (n, d, m), for their sum."""
        if self.sums.numel() < (c + 1) * n * d * m:
            self.sums = torch.empty((c + 1) * n * d * m, dtype=self.r.state_dtype, device=self.r.device)
        parts = self.sums[: (c + 1) * n * d * m].view(-1, d, m)
        return parts[n:], parts[:n]

    def integers(self, shape: torch.Size) -> list[Tensor]:
        """Six int64 tensors."""
        if shape not in self.words:
            self.words = {shape: [torch.empty(shape, dtype=torch.int64, device=self.r.device) for _ in range(6)]}
        return self.words[shape]

    def survivors(self, shape: torch.Size) -> Tensor:
        """For dropout's ones and zeros."""
        if self.lives is None or self.lives.shape != shape:
            self.lives = torch.empty(shape, dtype=self.r.state_dtype, device=self.r.device)
        return self.lives

    def keep(self, w: Block, tile: Tile) -> Tensor:
        """What the mask keeps of a tile, broadcastable to (nb, nh, m, k)."""
        assert self.r.mask is not None
        mask, patch = self.r.mask, w.patch(tile)
        return self._alike(self.keeps, w, tile, lambda: mask.keep(patch))

    def factor(self, w: Block, tile: Tile) -> Tensor:
        """``keep`` as 1 and 0 in the memory order of the scores, broadcastable to (nb, nkv, k, group, m)."""
        kept = w.split(self.keep(w, tile)).permute(0, 1, 4, 2, 3)
        return self._alike(
            self.factors, w, tile, lambda: kept.to(self.r.state_dtype, memory_format=torch.contiguous_format)
        )

    def _alike(self, known: dict[Place, Tensor], w: Block, tile: Tile, make: Callable[[], Tensor]) -> Tensor:
        """What is made for a tile; that of bands is alike along diagonals, and made once for a sequence's blocks."""
        if self.r.mask is None or not self.r.mask.relative():
            return make()
        if self.lengths != (w.seq.len_q, w.seq.len_k):  # they say where the diagonal is
            self.lengths = w.seq.len_q, w.seq.len_k
            self.keeps.clear()
            self.factors.clear()
        rows, cols = tile.rows, tile.cols
        place = rows.start - cols.start, rows.stop - rows.start, cols.stop - cols.start
        if place not in known:
            known[place] = make()
        return known[place]


def _summed_over(r: Request, x: Tensor, last: float | None = None) -> Tensor:
    """A strip of keys or values (t, n, k, d), and a last column, in the memory order that sums over k read quickest."""
    if _chained(r):
        return x.contiguous() if last is None else _with(x, last)
    columns = x.new_empty(*x.shape[:2], x.shape[3] + (last is not None), x.shape[2])
    columns[:, :, : x.shape[3]] = x.mT
    if last is not None:
        columns[:, :, -1] = last
    return columns.mT


def _with(x: Tensor, last: Tensor | float, scale: float = 1.0) -> Tensor:
    """(..., d) times scale, and a last column, (..., d + 1), in the state dtype."""
    wider = x.new_empty(*x.shape[:-1], x.shape[-1] + 1, dtype=torch.promote_types(x.dtype, torch.float32))
    wider[..., :-1] = x
    if scale != 1.0:
        wider[..., :-1].mul_(scale)
    wider[..., -1] = last
    return wider


def _part(x: Any, tile: Tile, cols: slice) -> Any:
    """The rows (n, k, ...) of a tile, which may be narrower than its column; None stays None."""
    return x if x is None or tile.cols == cols else x[:, tile.cols.start - cols.start : tile.cols.stop - cols.start]


def _unbind(x: Any) -> list[Any]:
    """A named tuple of (t, ...) tensors as t named tuples of their parts; None stays None."""
    t = next(len(f) for f in x if f is not None)
    return [type(x)(*fields) for fields in zip(*([None] * t if f is None else f.unbind() for f in x), strict=True)]


def _hides(r: Request) -> bool:
    """Whether a pair may count for nothing, though a product has it as a factor of 0."""
    return r.mask is not None or r.bias is not None or r.dropout_p > 0


def _finite(*xs: Tensor) -> bool:
    """Whether nothing in them is NaN or infinite. A sum that overflows says no, which costs time and nothing else."""
    return math.isfinite(sum(float(x.sum()) for x in xs))


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b in ``out``, in the order of its memory: the other one would be copied to it."""
    if out.is_contiguous():
        return torch.bmm(a, b, out=out)
    torch.bmm(b.mT, a.mT, out=out.mT)
    return out


def _add_product(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc += a @ b for a (n, i, j), b (n, j, d), of the dtype of acc or both of bf16."""
    if a.dtype == acc.dtype:
        acc.baddbmm_(a, b)
    else:
        part = a.new_empty(acc.shape)  # out=: autocast would change the dtype
        acc.add_(torch.bmm(a, b, out=part))


@lru_cache
def _chains(k: int, longest: int) -> int:
    """In how many equal parts k keys are added up: of at most ``longest`` and not below half of it, else in one."""
    return next((c for c in range(-(-k // longest), 2 * k // longest + 1) if c and k % c == 0), 1)


def _add_sum_over_keys(longest: int, scratch: _Scratch, acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc (n, m, d) += a b for a (n, m, k) and b (n, k, d), in ``_chains``; beside a bias twice as long ones."""
    (n, m, d), k = acc.shape, a.shape[2]
    if not _chained(scratch.r):
        _add_product(acc.mT, b.mT, a.mT)
    elif scratch.r.bias is not None:
        _add_in_parts(k // _chains(k, 2 * longest), acc, a, b)
    elif (c := _chains(k, longest)) == 1:
        _add_product(acc.mT, b.mT, a.mT)
    else:
        parts, total = scratch.parts(c, n, d, m)
        torch.bmm(b.reshape(-1, k // c, d).mT, a.mT.view(-1, k // c, m), out=parts)
        acc.mT.add_(torch.sum(parts.view(n, -1, d, m), 1, out=total))


def _add_in_parts(longest: int, acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc (n, i, d) += a b for a (n, i, j) and b (n, j, d), of which at most ``longest`` are added up in one chain."""
    for j in range(0, a.shape[2], longest):
        _add_product(acc, a[:, :, j : j + longest], b[:, j : j + longest])


def _sum_over_queries(r: Request, seq: Sequence) -> Add:
    """How dK and dV add up their products."""
    few = seq.len_q in _FEW_QUERIES and r.bias is None
    return partial(_add_in_parts, _CHAIN_SHORT) if few and _chained(r) else _add_product


def _add_kept_product(add: Add, keep: Tensor, acc: Tensor, a: Tensor, b: Tensor) -> None:
    """``add`` a @ b to acc where ``a`` is 0 wherever ``keep`` (n, i, j) is False, and b may hold NaN and infinities.

    0 * NaN is NaN, but a pair that is not kept must add nothing: such rows of b are multiplied element by element.
    """
    finite = torch.isfinite(b)
    whole = torch.where(finite, b, 0.0)
    add(acc, a, whole)  # the same bits as where all is finite
    odd = torch.where(finite, 0.0, b)
    for j in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        if bool(keep[:, :, j].any()):
            acc.add_(torch.where(keep[:, :, j, None], a[:, :, j, None] * odd[:, None, j], 0.0))


def backends() -> list[Backend]:
    return [TiledBackend()]
