"""Attention tile by tile in plain PyTorch: the algorithm as one would explain it, and the CPU default.

Forward: a tile of queries stays, tiles of keys and values stream past, and the state (m, l, acc) of
the query rows takes them in. Backward: the probabilities of a tile are recomputed from the scores and
the saved log-sum-exp; with delta = rowsum(dO * O) - dlse,

    P = exp(S - lse)      dV += P^T dO      dP = dO V^T      dS = P * (dP - delta)
    dK += dS^T Q          dQ += dS K

A tile of keys stays and tiles of queries stream past, so dK and dV of a tile are finished before the next.

Several (batch, key/value head) pairs are computed at once, as one batched matrix product; the query
heads that share a key/value head are rows of the same product, so keys and values are never expanded.
All tile arithmetic is fp32 (fp64 for fp64 inputs). Besides the outputs there exist one tile of scores (two in
the backward), the rows' statistics, and the dQ of the heads at work.

Source: Dao et al. 2022, "FlashAttention", algorithms 1-4; Dao 2023, "FlashAttention-2".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import state
from ..dispatch import Backend, Grads, Output, Saved
from ..masks import PARTIAL, Grid, Patch
from ..philox import dropout_keep
from ..request import NEG_INF, Request, Sequence, distance
from ..state import State
from ..tilemap import Tile, TileMap, tile_map

# Elements of a tile of scores over all heads at work: 1 MiB in fp32, so that it stays in a core's cache from one
# pass over it to the next. Measured with benchmarks/cpu.py.
_SCORES = 2**19
_GROWTH = 10.0  # how far scores may exceed m before the sums are rescaled


class TiledBackend(Backend):
    name = "tiled"
    summary = "tile by tile in plain PyTorch, every feature, any device; the CPU default"
    tiles: tuple[int, int] | None = None  # (block_m, block_n) in place of the heuristic, for tests and pictures

    def forward(self, r: Request) -> Output:
        o = Output(
            r.new_out(), r.new_stats(), r.new_stats() if r.want_max_logits else None, r.new_stats() if r.keeps_low else None
        )
        if r.ragged is not None:  # rows that belong to no sequence
            o.out.zero_()
            for x, empty in ((o.lse, NEG_INF), (o.max_logits, NEG_INF), (o.lse_low, 0.0)):
                if x is not None:
                    x.fill_(empty)
        for seq in r.sequences():
            for work in self.blocks(r, seq):
                _forward(work, o)
        return o

    def backward(self, r: Request, saved: Saved, needs: frozenset[str]) -> Grads:
        grads = _Gradients.allocate(r, needs)
        for seq in r.sequences():
            for work in self.blocks(r, seq):
                _backward(work, saved, grads)
        return grads.finish(r)

    def block_shape(self, r: Request, seq: Sequence) -> tuple[int, int]:
        """Queries and keys of a tile. Small enough to skip much of a mask, large enough for the matrix product."""
        if self.tiles:
            return self.tiles
        m, n = (512, 512) if r.mask is None else (256, 256)
        m = max(16, m // r.group)  # the rows of a group are stacked
        if seq.len_q * r.group < m:  # few queries (decoding): longer tiles of keys for the same work
            n = max(n, _SCORES // (4 * max(seq.len_q * r.group, 1)))
        return max(1, min(m, seq.len_q)), max(1, min(n, seq.len_k))

    def blocks(self, r: Request, seq: Sequence) -> Iterator[Block]:
        """The work of a sequence, in blocks of (batch, key/value head) pairs that are computed together."""
        m, n = self.block_shape(r, seq)
        grid = Grid(r.batch, r.heads, seq.len_q, seq.len_k, m, n, r.device)
        tiles = tile_map(r.mask, grid)
        pairs = max(1, _SCORES // (m * n * r.group))
        kv_step = min(pairs, r.kv_heads)
        batch_step = max(1, pairs // r.kv_heads)
        for b in range(seq.batch.start, seq.batch.stop, batch_step):
            batch = slice(b, min(b + batch_step, seq.batch.stop))
            for h in range(0, r.kv_heads, kv_step):
                yield Block(r, seq, tiles, batch, slice(h, min(h + kv_step, r.kv_heads)))


class Block(NamedTuple):
    """Some batch entries and key/value heads of a sequence, worked on together; n = their number."""

    r: Request
    seq: Sequence
    tiles: TileMap
    batch: slice
    kv: slice

    @property
    def heads(self) -> slice:
        return slice(self.kv.start * self.r.group, self.kv.stop * self.r.group)

    @property
    def pairs(self) -> int:
        return (self.batch.stop - self.batch.start) * (self.kv.stop - self.kv.start)

    @property
    def _local(self) -> slice:
        return slice(self.batch.start - self.seq.batch.start, self.batch.stop - self.seq.batch.start)

    def query_rows(self, x: Tensor, rows: slice) -> Tensor:
        """Rows of a query-like (B, H, Lq, D) tensor as (n, group * m, D) in the state dtype."""
        x = x[self._local, self.heads, rows]
        return x.reshape(self.pairs, -1, x.shape[-1]).to(self.r.state_dtype)

    def put_query_rows(self, x: Tensor, rows: slice, value: Tensor) -> None:
        to = x[self._local, self.heads, rows]
        to.copy_(value.view(to.shape))

    def key_rows(self, x: Tensor, cols: slice) -> Tensor:
        """Rows of a key-like (B, Hkv, Lk, D) tensor as (n, k, D) in the state dtype."""
        x = x[self._local, self.kv, cols]
        return x.reshape(self.pairs, -1, x.shape[-1]).to(self.r.state_dtype)

    def put_key_rows(self, x: Tensor, cols: slice, value: Tensor) -> None:
        to = x[self._local, self.kv, cols]
        to.copy_(value.view(to.shape))

    def stats(self, x: Tensor, rows: slice) -> Tensor:
        """Rows of a statistic ((B, H, Lq), or (H, T) when ragged) as (n, group * m)."""
        return self.seq.stats(x)[self._local, self.heads, rows].reshape(self.pairs, -1)

    def put_stats(self, x: Tensor | None, rows: slice, value: Tensor) -> None:
        if x is not None:
            self.put_query_rows(self.seq.stats(x), rows, value)

    def per_head(self, x: Tensor, m: int) -> Tensor:
        """A per-head number (H,) repeated to (n, group * m)."""
        nb = self.batch.stop - self.batch.start
        return x[self.heads].to(self.r.state_dtype).view(1, -1, 1).expand(nb, -1, m).reshape(self.pairs, -1)

    def patch(self, tile: Tile) -> Patch:
        return self.r.patch(self.seq, self.batch, self.heads, tile.rows, tile.cols)

    def by_head(self, s: Tensor, tile: Tile) -> Tensor:
        """Scores (n, group * m, k) seen as (nb, nh, m, k), as masks and biases see them."""
        nb, nh = self.batch.stop - self.batch.start, self.heads.stop - self.heads.start
        return s.view(nb, nh, tile.rows.stop - tile.rows.start, s.shape[-1])

    def by_pair(self, keep: Tensor, tile: Tile, like: Tensor) -> Tensor:
        """A mask (broadcastable to (nb, nh, m, k)) as (n, group * m, k)."""
        return keep.expand(self.by_head(like, tile).shape).reshape(like.shape)


# --- forward --------------------------------------------------------------------------------------


def _forward(w: Block, to: Output) -> None:
    """Fill the block's rows of the output and its statistics."""
    r, grid = w.r, w.tiles.grid
    q_all, k_all, v_all = w.seq.queries(r.q), w.seq.keys(r.k), w.seq.keys(r.v)
    verdicts = w.tiles.block(w.batch, w.heads)
    scratch = _Scratch(w)
    for row in range(grid.rows):
        rows = slice(row * grid.block_m, min((row + 1) * grid.block_m, grid.len_q))
        q = w.query_rows(q_all, rows) * r.scale  # (n, group * m, D)
        s_ = state.empty(q.shape[:2], r.dim_v, dtype=r.state_dtype, device=r.device)
        top = s_.m
        s_ = s_._replace(m=state.pivot(s_.m))  # finite from the start: no exp(-inf - (-inf)) in _fold_
        for tile in w.tiles.row(verdicts, row):
            k, v = w.key_rows(k_all, tile.cols), w.key_rows(v_all, tile.cols)
            s, keep, _ = _scores(w, tile, q, k, scratch)
            if to.max_logits is not None:
                top = torch.maximum(top, s.amax(-1))
            s_ = _fold_(w, tile, s_, s, v, keep)
        w.put_stats(to.max_logits, rows, top)
        if r.sinks is not None:
            s_ = state.with_sink(s_, w.per_head(r.sinks, rows.stop - rows.start))
        o, row_lse = state.finish(s_)
        w.put_query_rows(w.seq.queries(to.out), rows, o if r.dropout_p == 0 else o * _survivor_weight(r))
        w.put_stats(to.lse, rows, row_lse)
        if to.lse_low is not None:
            w.put_stats(to.lse_low, rows, state.lse_low(s_, row_lse))


def _scores(
    w: Block, tile: Tile, q: Tensor, k: Tensor, scratch: _Scratch, minus: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A tile of scores (n, group * m, k), -inf where masked; what is kept of it; tanh of the softcap.

    ``keep`` is None when every pair is kept. q comes scaled. ``minus`` (n, group * m) is taken off each row.
    """
    r, tanh = w.r, None
    if r.softcap is None:
        s = _product_minus(q, k, minus, scratch.tile(0, q.shape[1], k.shape[1]))
    else:
        tanh = torch.bmm(q, k.mT, out=scratch.tile(2, q.shape[1], k.shape[1])).div_(r.softcap).tanh_()
        s = torch.mul(tanh, r.softcap, out=scratch.tile(0, q.shape[1], k.shape[1]))
        if minus is not None:
            s.sub_(minus[..., None])
    if tile.verdict != PARTIAL and r.bias is None and r.alibi is None:
        return s, None, tanh
    patch, by_head = w.patch(tile), w.by_head(s, tile)
    keep = r.mask.keep(patch) if r.mask is not None and tile.verdict == PARTIAL else None
    bias = r.bias_tile(patch)
    if bias is not None:
        by_head.add_(bias)
        allowed = bias != NEG_INF  # -inf excludes as False does: not even a NaN shines through
        if not bool(allowed.all()):
            keep = allowed if keep is None else keep & allowed
    if keep is not None:
        by_head.masked_fill_(~keep, NEG_INF)
    return s, keep, tanh


def _fold_(w: Block, tile: Tile, old: State, s: Tensor, v: Tensor, keep: Tensor | None) -> State:
    """``state.fold`` in place: ``s`` becomes the tile's exp(s - m), and the old sums are updated.

    Here m need not be the largest score, only near it: the sums are rescaled once a row outgrows it by ``_GROWTH``,
    which after the first tile is rare. exp(_GROWTH) is far from overflow, and a float's precision is relative.
    """
    m, l, acc = old
    top = s.amax(-1)
    if not bool((top - m).max() <= _GROWTH):  # "not <=", so that a NaN is no reason to leave the other rows be
        m = torch.maximum(m, top)
        alpha = torch.exp(old.m - m)
        l.mul_(alpha)
        acc.mul_(alpha[..., None])
    p = s.sub_(m[..., None]).exp_()
    l.add_(p.sum(-1))
    if w.r.dropout_p > 0:  # the denominator is that of all keys
        w.by_head(p, tile).masked_fill_(_dropped(w, tile), 0)
    _add_product(acc, p, v, None if keep is None else w.by_pair(keep, tile, p))
    return State(m, l, acc)


def _dropped(w: Block, tile: Tile) -> Tensor:
    assert w.r.rng is not None
    return ~dropout_keep(w.r.rng, w.r.dropout_p, w.patch(tile), w.r.heads)


def _survivor_weight(r: Request) -> float:
    return 1 / (1 - r.dropout_p) if r.dropout_p < 1 else 0.0


# --- backward -------------------------------------------------------------------------------------


def _backward(w: Block, saved: Saved, grads: _Gradients) -> None:
    r, grid = w.r, w.tiles.grid
    rows = [slice(i, min(i + grid.block_m, grid.len_q)) for i in range(0, grid.len_q, grid.block_m)]
    lse = [state.pivot(w.stats(saved.lse, row)) for row in rows]
    delta = [_delta(w, row, saved) for row in rows]
    if grads.sinks is not None:
        for row, x, d in zip(rows, lse, delta, strict=True):
            grads.add_sinks(w, row, x, d)
    if not grads.any_scores:
        return

    # P = exp(S - lse) * exp(-lse_low). The second factor belongs to a row, so it goes into that row of dO and delta.
    fix = None if saved.lse_low is None else [torch.exp(-w.stats(saved.lse_low, row)) for row in rows]
    if fix is not None:
        delta = [d * f for d, f in zip(delta, fix, strict=True)]
    q_all, k_all, v_all, dout = w.seq.queries(r.q), w.seq.keys(r.k), w.seq.keys(r.v), w.seq.queries(saved.dout)
    dq = [q_all.new_zeros(*d.shape, r.dim, dtype=r.state_dtype) for d in delta] if grads.q is not None else None
    verdicts = w.tiles.block(w.batch, w.heads)
    scratch = _Scratch(w)
    for c in range(grid.cols):
        cols = slice(c * grid.block_n, min((c + 1) * grid.block_n, grid.len_k))
        k_col, v_col = w.key_rows(k_all, cols), w.key_rows(v_all, cols)
        dk_col = torch.zeros_like(k_col) if grads.k is not None else None
        dv_col = torch.zeros_like(v_col) if grads.v is not None else None
        for tile in w.tiles.col(verdicts, c):
            row = tile.rows.start // grid.block_m
            part = slice(tile.cols.start - cols.start, tile.cols.stop - cols.start)
            q = w.query_rows(q_all, tile.rows) * r.scale
            k, v, do = k_col[:, part], v_col[:, part], w.query_rows(dout, tile.rows)
            do = do if fix is None else do * fix[row][..., None]
            p, keep, tanh = _scores(w, tile, q, k, scratch, minus=lse[row])
            p.exp_()
            if keep is not None:
                w.by_head(p, tile).masked_fill_(~keep, 0)  # a row that is NaN must not reach what it does not see
            pair_keep = None if keep is None else w.by_pair(keep, tile, p)
            dropped = _dropped(w, tile) if r.dropout_p > 0 else None
            if dv_col is not None:
                _add_product(dv_col[:, part], _survivors(w, tile, p, dropped).mT, do, _t(pair_keep))
            ds = _dscores(w, tile, p, do, v, delta[row], keep, dropped, scratch)
            grads.add_bias(w, tile, ds)
            if tanh is not None:
                ds.mul_(1 - tanh * tanh)
            if dk_col is not None:
                _add_product(dk_col[:, part], ds.mT, q, _t(pair_keep))
            if dq is not None:
                _add_product(dq[row], ds, k, pair_keep)
        if grads.k is not None:
            w.put_key_rows(w.seq.keys(grads.k), cols, dk_col)
        if grads.v is not None:
            w.put_key_rows(w.seq.keys(grads.v), cols, dv_col)
    if grads.q is not None and dq is not None:
        for row, x in zip(rows, dq, strict=True):
            w.put_query_rows(w.seq.queries(grads.q), row, x.mul_(r.scale))


def _delta(w: Block, rows: slice, saved: Saved) -> Tensor:
    """rowsum(dO * O) - dlse, (n, group * m): what every score's gradient shares."""
    dout, out = w.seq.queries(saved.dout), w.seq.queries(saved.out)
    delta = (w.query_rows(dout, rows) * w.query_rows(out, rows)).sum(-1)
    return delta if saved.dlse is None else delta - w.stats(saved.dlse, rows)


def _survivors(w: Block, tile: Tile, p: Tensor, dropped: Tensor | None) -> Tensor:
    """P after dropout, as the forward multiplied it with V."""
    if dropped is None:
        return p
    kept = w.by_head(p, tile).masked_fill(dropped, 0).mul_(_survivor_weight(w.r))
    return kept.view(p.shape)


def _dscores(
    w: Block, tile: Tile, p: Tensor, do: Tensor, v: Tensor, delta: Tensor, keep: Tensor | None,
    dropped: Tensor | None, scratch: _Scratch,
) -> Tensor:  # fmt: skip
    """dS = P * (dP - delta), before the softcap; 0 where masked, whatever stands there."""
    room = scratch.tile(1, do.shape[1], v.shape[1])
    if dropped is None:
        ds = _product_minus(do, v, delta, room)
    else:
        ds = torch.bmm(do, v.mT, out=room)
        w.by_head(ds, tile).masked_fill_(dropped, 0).mul_(_survivor_weight(w.r))
        ds.sub_(delta[..., None])
    ds.mul_(p)
    if keep is not None:
        w.by_head(ds, tile).masked_fill_(~keep, 0)
    return ds


def _t(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep.mT


class _Gradients:
    """The gradients asked for, as they are written or summed up."""

    def __init__(self, q: Tensor | None, k: Tensor | None, v: Tensor | None, bias: Tensor | None, alibi: Tensor | None, sinks: Tensor | None):
        self.q, self.k, self.v, self.bias, self.alibi, self.sinks = q, k, v, bias, alibi, sinks
        self.any_scores = any(g is not None for g in (q, k, v, bias, alibi))

    @classmethod
    def allocate(cls, r: Request, needs: frozenset[str]) -> _Gradients:
        def written(name: str, x: Tensor) -> Tensor | None:
            if name not in needs:
                return None
            return torch.zeros_like(x) if r.ragged is not None else torch.empty_like(x)

        def summed(name: str, x: Tensor | None) -> Tensor | None:
            return torch.zeros_like(x, dtype=r.state_dtype) if name in needs and x is not None else None

        if r.bias is not None and "bias" in needs and not _broadcast_dims(r, r.bias):
            bias: Tensor | None = torch.zeros_like(r.bias)  # every element is written once: no need to sum in fp32
        else:
            bias = summed("bias", r.bias)
        qkv = (written("q", r.q), written("k", r.k), written("v", r.v))
        return cls(*qkv, bias, summed("alibi", r.alibi), summed("sinks", r.sinks))

    def add_bias(self, w: Block, tile: Tile, ds: Tensor) -> None:
        if self.bias is None and self.alibi is None:
            return
        patch, ds = w.patch(tile), w.by_head(ds, tile)
        if self.bias is not None:
            over = _broadcast_dims(w.r, self.bias)
            patch.take(self.bias).add_(ds.sum(over, keepdim=True) if over else ds)
        if self.alibi is not None:
            per_head = -(ds * distance(patch)).sum((2, 3))  # (nb, nh)
            to = patch.take(self.alibi[:, :, None, None])[:, :, 0, 0]
            to.add_(per_head if to.shape[0] == per_head.shape[0] else per_head.sum(0, keepdim=True))

    def add_sinks(self, w: Block, rows: slice, lse: Tensor, delta: Tensor) -> None:
        """A sink is a key whose value is 0: its dP is 0."""
        sink = w.per_head(w.r.sinks, rows.stop - rows.start)  # type: ignore[arg-type]
        ds = -torch.exp(sink - lse) * delta  # (n, group * m)
        nb, nh = w.batch.stop - w.batch.start, w.heads.stop - w.heads.start
        self.sinks[w.heads].add_(ds.view(nb, nh, -1).sum((0, 2)))  # type: ignore[index]

    def finish(self, r: Request) -> Grads:
        def cast(g: Tensor | None, x: Tensor | None) -> Tensor | None:
            return None if g is None or x is None else g.to(x.dtype)

        return Grads(self.q, self.k, self.v, cast(self.bias, r.bias), cast(self.alibi, r.alibi), cast(self.sinks, r.sinks))


def _broadcast_dims(r: Request, bias: Tensor) -> list[int]:
    return [d for d, n in enumerate((r.batch, r.heads, r.len_q, r.len_k)) if bias.shape[d] == 1 and n != 1]


# --- shared ---------------------------------------------------------------------------------------


def _product_minus(a: Tensor, b: Tensor, row: Tensor | None, out: Tensor) -> Tensor:
    """a @ b^T - row for a (n, i, d), b (n, j, d), row (n, i): the subtraction rides along as one more column.

    A pass over the tile costs more than a column of the product (measured: 35 of 230 us at 512 x 512, d = 64).
    """
    if row is None:
        return torch.bmm(a, b.mT, out=out)
    a = torch.cat([a, -row[..., None]], -1)
    b = torch.nn.functional.pad(b, (0, 1), value=1.0)
    return torch.bmm(a, b.mT, out=out)


class _Scratch:
    """Room for the tiles of scores, allocated once a block: fresh memory would be paged in for every tile."""

    def __init__(self, w: Block):
        self.w = w
        self.buffers: dict[int, Tensor] = {}

    def tile(self, which: int, m: int, n: int) -> Tensor:
        """An uninitialised (n pairs, m, n) tensor."""
        size = self.w.pairs * m * n
        if which not in self.buffers or self.buffers[which].numel() < size:
            self.buffers[which] = torch.empty(size, dtype=self.w.r.state_dtype, device=self.w.r.device)
        return self.buffers[which][:size].view(self.w.pairs, m, n)


def _add_product(acc: Tensor, a: Tensor, b: Tensor, keep: Tensor | None) -> None:
    """acc += a @ b for a (n, i, j), b (n, j, d), where ``a`` is 0 wherever ``keep`` is False.

    0 * NaN is NaN: where b is not finite, a pair that is not kept must still add nothing, so these
    rows of b are multiplied element by element.
    """
    if keep is None or bool(torch.isfinite(b.sum())):
        acc.baddbmm_(a, b)
        return
    finite = torch.isfinite(b)
    acc.baddbmm_(a, torch.where(finite, b, 0.0))
    odd = torch.where(finite, 0.0, b)
    for j in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        if bool(keep[:, :, j].any()):
            acc.add_(torch.where(keep[:, :, j, None], a[:, :, j, None] * odd[:, None, j], 0.0))


def backends() -> list[Backend]:
    return [TiledBackend()]
