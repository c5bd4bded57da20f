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
which was measured to be a tenth faster. All tile arithmetic is fp32 (fp64 for fp64 inputs). Besides the outputs
there exist one tile of scores (two in the backward), the rows' statistics, and the dQ of the heads at work.

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
        top, low = (r.new_stats() if want else None for want in (r.want_max_logits, r.keeps_low))
        o = Output(r.new_out(), r.new_stats(), top, low)
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
        grads = _Gradients(r, needs)
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
        to.copy_(value.reshape(to.shape))

    def key_rows(self, x: Tensor, cols: slice) -> Tensor:
        """Rows of a key-like (B, Hkv, Lk, D) tensor as (n, k, D) in the state dtype."""
        x = x[self._local, self.kv, cols]
        return x.reshape(self.pairs, -1, x.shape[-1]).to(self.r.state_dtype)

    def put_key_rows(self, x: Tensor | None, cols: slice, value: Tensor | None) -> None:
        if x is not None and value is not None:
            to = self.seq.keys(x)[self._local, self.kv, cols]
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
        """Scores (n, k, group * m) seen as (nb, nkv, group, m, k), as masks and biases see them."""
        nb, nkv = self.batch.stop - self.batch.start, self.kv.stop - self.kv.start
        m = tile.rows.stop - tile.rows.start
        return s.view(nb, nkv, s.shape[1], self.r.group, m).permute(0, 1, 3, 4, 2)

    def split(self, x: Tensor) -> Tensor:
        """(nb or 1, nh or 1, m, k) as (nb or 1, nkv or 1, group or 1, m, k), to go with ``by_head``."""
        return x[:, :, None] if x.shape[1] == 1 else x.unflatten(1, (-1, self.r.group))

    def like_scores(self, keep: Tensor, tile: Tile, s: Tensor) -> Tensor:
        """A mask, broadcastable to (nb, nh, m, k), as (n, k, group * m)."""
        return self.split(keep).expand(self.by_head(s, tile).shape).permute(0, 1, 4, 2, 3).reshape(s.shape)


# --- forward --------------------------------------------------------------------------------------


def _forward(w: Block, to: Output) -> None:
    """Fill the block's rows of the output and its statistics."""
    r, grid = w.r, w.tiles.grid
    q_all, k_all, v_all, out = w.seq.queries(r.q), w.seq.keys(r.k), w.seq.keys(r.v), w.seq.queries(to.out)
    verdicts = w.tiles.block(w.batch, w.heads)
    scratch = _Scratch(w)
    for row in range(grid.rows):
        rows = slice(row * grid.block_m, min((row + 1) * grid.block_m, grid.len_q))
        q = _columns(w.query_rows(q_all, rows) * r.scale)  # (n, D, group * m)
        seen, top = _nothing_seen(w, q.shape[2])
        for tile in w.tiles.row(verdicts, row):
            k, v = w.key_rows(k_all, tile.cols), w.key_rows(v_all, tile.cols)
            s, keep, _ = _scores(w, tile, q, k, scratch)
            if to.max_logits is not None:
                top = torch.maximum(top, s.amax(1))
            seen = _fold_(w, tile, seen, s, v, keep)
        w.put_stats(to.max_logits, rows, top)
        if r.sinks is not None:
            seen = state.with_sink(seen, w.per_head(r.sinks, rows.stop - rows.start))
        o, lse = state.finish(seen)
        w.put_query_rows(out, rows, o if r.dropout_p == 0 else o * _survivor_weight(r))
        w.put_stats(to.lse, rows, lse)
        if to.lse_low is not None:
            w.put_stats(to.lse_low, rows, state.lse_low(seen, lse))


def _nothing_seen(w: Block, rows: int) -> tuple[State, Tensor]:
    """The empty state of (n, rows) rows, and their largest score so far.

    Its m is finite, lest ``_fold_`` compute exp(-inf - (-inf)); its acc lies transposed in memory, as the scores do.
    """
    shape = (w.pairs, rows)
    nothing = state.empty(shape, 0, dtype=w.r.state_dtype, device=w.r.device)
    acc = torch.zeros(w.pairs, w.r.dim_v, rows, dtype=w.r.state_dtype, device=w.r.device)
    return State(state.pivot(nothing.m), nothing.l, acc.mT), nothing.m


def _scores(
    w: Block, tile: Tile, q: Tensor, k: Tensor, scratch: _Scratch
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A tile of scores (n, k, group * m), -inf where masked; what is kept of it; tanh of the softcap.

    q (n, D, group * m) comes scaled, k is (n, k, D). ``keep`` is None when every pair is kept.
    """
    r, tanh = w.r, None
    if r.softcap is None:
        s = torch.bmm(k, q, out=scratch.tile(0, k.shape[1], q.shape[2]))
    else:
        tanh = torch.bmm(k, q, out=scratch.tile(2, k.shape[1], q.shape[2])).div_(r.softcap).tanh_()
        s = torch.mul(tanh, r.softcap, out=scratch.tile(0, k.shape[1], q.shape[2]))
    if tile.verdict != PARTIAL and r.bias is None and r.alibi is None:
        return s, None, tanh
    patch, by_head = w.patch(tile), w.by_head(s, tile)
    keep = r.mask.keep(patch) if r.mask is not None and tile.verdict == PARTIAL else None
    bias = r.bias_tile(patch)
    if bias is not None:
        by_head.add_(w.split(bias))
        allowed = bias != NEG_INF  # -inf excludes as False does: not even a NaN shines through
        if not bool(allowed.all()):
            keep = allowed if keep is None else keep & allowed
    if keep is not None:
        by_head.masked_fill_(w.split(~keep), NEG_INF)
    return s, keep, tanh


def _fold_(w: Block, tile: Tile, old: State, s: Tensor, v: Tensor, keep: Tensor | None) -> State:
    """``state.fold`` in place: ``s`` becomes the tile's exp(s - m), and the old sums are updated.

    Here m need not be the largest score, only near it: a row is rescaled once it outgrows its m by ``_GROWTH``, which
    after the first tile is rare. exp(_GROWTH) is far from overflow, and a float's precision is relative.
    """
    m, sums, acc = old
    top = s.amax(1)
    settled = top - m <= _GROWTH  # False for a NaN
    if not bool(settled.all()):
        m = torch.where(settled, m, torch.maximum(m, top))  # row by row: one row's scores change no bit of another
        alpha = torch.exp(old.m - m)
        sums.mul_(alpha)
        acc.mul_(alpha[..., None])
    p = s.sub_(m[:, None]).exp_()
    sums.add_(p.sum(1))
    if w.r.dropout_p > 0:  # the denominator is that of all keys
        w.by_head(p, tile).masked_fill_(w.split(_dropped(w, tile)), 0)
    if keep is None or _finite(v):
        _add_product(acc, p.mT, v)
    else:
        _add_kept_product(acc, p.mT, v, w.like_scores(keep, tile, p).mT)
    return State(m, sums, acc)


def _dropped(w: Block, tile: Tile) -> Tensor:
    assert w.r.rng is not None
    return ~dropout_keep(w.r.rng, w.r.dropout_p, w.patch(tile), w.r.heads)


def _survivor_weight(r: Request) -> float:
    return 1 / (1 - r.dropout_p) if r.dropout_p < 1 else 0.0


# --- backward -------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """What the backward needs of a tile of queries, beside Q and dO; all (n, group * m)."""

    lse: Tensor  # finite also for a row without a key
    delta: Tensor  # rowsum(dO * O) - dlse
    weight: Tensor | None  # of the row in dO and delta: exp(-lse_low)


def _backward(w: Block, saved: Saved, grads: _Gradients) -> None:
    r, grid = w.r, w.tiles.grid
    slices = [slice(i, min(i + grid.block_m, grid.len_q)) for i in range(0, grid.len_q, grid.block_m)]
    rows = [_rows(w, x, saved) for x in slices]
    if grads.sinks is not None:
        for x, row in zip(slices, rows, strict=True):
            grads.add_sinks(w, x, row)
    if not grads.any_scores:
        return
    k_all, v_all, q_grad = w.seq.keys(r.k), w.seq.keys(r.v), None if grads.q is None else w.seq.queries(grads.q)
    dq = [None if q_grad is None else _zeros(w, r.dim, x.lse.shape[1]).mT for x in rows]
    verdicts = w.tiles.block(w.batch, w.heads)
    scratch = _Scratch(w)
    for c in range(grid.cols):
        cols = slice(c * grid.block_n, min((c + 1) * grid.block_n, grid.len_k))
        k, v = _with_ones(w.key_rows(k_all, cols)), _with_ones(w.key_rows(v_all, cols))
        dk = _zeros(w, k.shape[1], r.dim) if grads.k is not None else None
        dv = _zeros(w, k.shape[1], r.dim_v) if grads.v is not None else None
        for tile in w.tiles.col(verdicts, c):
            row = tile.rows.start // grid.block_m
            part = slice(tile.cols.start - cols.start, tile.cols.stop - cols.start)
            to = (dq[row], *(None if x is None else x[:, part] for x in (dk, dv)))
            _backward_tile(w, tile, rows[row], saved, k[:, part], v[:, part], scratch, to, grads)
        w.put_key_rows(grads.k, cols, dk)
        w.put_key_rows(grads.v, cols, dv)
    for x, d in zip(slices, dq, strict=True):
        if q_grad is not None and d is not None:
            w.put_query_rows(q_grad, x, d.mul_(r.scale))


def _rows(w: Block, rows: slice, saved: Saved) -> _Rows:
    dout, out = w.query_rows(w.seq.queries(saved.dout), rows), w.query_rows(w.seq.queries(saved.out), rows)
    delta = (dout * out).sum(-1)
    if saved.dlse is not None:
        delta = delta - w.stats(saved.dlse, rows)
    # P = exp(S - lse) * exp(-lse_low). The second factor belongs to a row, so it goes into that row of dO and delta.
    weight = None if saved.lse_low is None else torch.exp(-w.stats(saved.lse_low, rows))
    return _Rows(state.pivot(w.stats(saved.lse, rows)), delta, weight)


def _backward_tile(
    w: Block, tile: Tile, row: _Rows, saved: Saved, k1: Tensor, v1: Tensor, scratch: _Scratch,
    to: tuple[Tensor | None, Tensor | None, Tensor | None], grads: _Gradients,
) -> None:  # fmt: skip
    """Add a tile's part of dQ (n, group * m, D), dK (n, k, D) and dV (n, k, Dv), and of the bias.

    k1 and v1 carry a last column of ones: with -lse as a last row of Q the product is S - lse, and dP - delta
    likewise. A pass over the tile would cost far more than a column of the product.
    """
    r = w.r
    q, do = w.query_rows(w.seq.queries(r.q), tile.rows) * r.scale, w.query_rows(w.seq.queries(saved.dout), tile.rows)
    k, v, delta = k1[..., :-1], v1[..., :-1], row.delta
    if row.weight is not None:
        do, delta = do * row.weight[..., None], delta * row.weight
    if r.softcap is None:
        p, keep, tanh = _scores(w, tile, _columns(q, -row.lse), k1, scratch)
    else:
        p, keep, tanh = _scores(w, tile, _columns(q), k, scratch)
        p.sub_(row.lse[:, None])
    p.exp_()
    # Where nothing is NaN or infinite, what is masked is 0 by itself.
    guarded = keep is not None and not _finite(q, k, v, do, row.lse, delta)
    kept = w.like_scores(keep, tile, p) if guarded and keep is not None else None
    if kept is not None:
        p.masked_fill_(~kept, 0)
        if tanh is not None:
            tanh.masked_fill_(~kept, 0)
    dropped = w.split(_dropped(w, tile)) if r.dropout_p > 0 else None
    ds = _dscores(w, tile, p, _columns(do), v1, delta, dropped, scratch)
    if kept is not None:
        ds.masked_fill_(~kept, 0)
    grads.add_bias(w, tile, ds)
    if tanh is not None:
        ds.mul_(1 - tanh * tanh)
    if dropped is not None:
        w.by_head(p, tile).masked_fill_(dropped, 0).mul_(_survivor_weight(r))
    for acc, a, b, keeps in ((to[0], ds.mT, k, _t(kept)), (to[1], ds, q, kept), (to[2], p, do, kept)):
        if acc is not None and keeps is None:
            _add_product(acc, a, b)
        elif acc is not None and keeps is not None:
            _add_kept_product(acc, a, b, keeps)


def _dscores(
    w: Block, tile: Tile, p: Tensor, do: Tensor, v1: Tensor, delta: Tensor, dropped: Tensor | None, scratch: _Scratch
) -> Tensor:
    """dS = P * (dP - delta), before the softcap, (n, k, group * m); do is (n, Dv, group * m)."""
    room = scratch.tile(1, v1.shape[1], do.shape[2])
    if dropped is None:
        return torch.bmm(v1, torch.cat([do, -delta[:, None]], 1), out=room).mul_(p)
    ds = torch.bmm(v1[..., :-1], do, out=room)
    w.by_head(ds, tile).masked_fill_(dropped, 0).mul_(_survivor_weight(w.r))
    return ds.sub_(delta[:, None]).mul_(p)


def _t(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep.mT


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
            once = name == "bias" and not _broadcast_dims(r, x)  # every element written once: no need to sum in fp32
            return torch.zeros_like(x, dtype=None if once else r.state_dtype)

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
            w.split(patch.take(self.bias)).add_(by_head.sum(over, keepdim=True) if over else by_head)
        if self.alibi is not None:
            per_head = -(by_head * distance(patch)).sum((3, 4)).flatten(1)  # (nb, nh)
            to = patch.take(self.alibi[:, :, None, None])[:, :, 0, 0]
            to.add_(per_head if to.shape[0] == per_head.shape[0] else per_head.sum(0, keepdim=True))

    def add_sinks(self, w: Block, rows: slice, row: _Rows) -> None:
        """A sink is a key whose value is 0: its dP is 0."""
        assert w.r.sinks is not None
        assert self.sinks is not None
        sink = w.per_head(w.r.sinks, rows.stop - rows.start)
        ds = -torch.exp(sink - row.lse) * row.delta  # (n, group * m)
        ds = ds if row.weight is None else ds * row.weight
        nb, nh = w.batch.stop - w.batch.start, w.heads.stop - w.heads.start
        self.sinks[w.heads].add_(ds.view(nb, nh, -1).sum((0, 2)))

    def finish(self, r: Request) -> Grads:
        def cast(g: Tensor | None, x: Tensor | None) -> Tensor | None:
            return None if g is None or x is None else g.to(x.dtype)

        others = (cast(g, x) for g, x in ((self.bias, r.bias), (self.alibi, r.alibi), (self.sinks, r.sinks)))
        return Grads(self.q, self.k, self.v, *others)


def _broadcast_dims(r: Request, bias: Tensor) -> list[int]:
    return [d for d, n in enumerate((r.batch, r.heads, r.len_q, r.len_k)) if bias.shape[d] == 1 and n != 1]


# --- shared ---------------------------------------------------------------------------------------


class _Scratch:
    """Room for the tiles of scores, allocated once a block: fresh memory would be paged in for every tile."""

    def __init__(self, w: Block):
        self.w = w
        self.buffers: dict[int, Tensor] = {}

    def tile(self, which: int, rows: int, cols: int) -> Tensor:
        """An uninitialised (n pairs, rows, cols) tensor."""
        size = self.w.pairs * rows * cols
        if which not in self.buffers or self.buffers[which].numel() < size:
            self.buffers[which] = torch.empty(size, dtype=self.w.r.state_dtype, device=self.w.r.device)
        return self.buffers[which][:size].view(self.w.pairs, rows, cols)


def _zeros(w: Block, *shape: int) -> Tensor:
    return torch.zeros(w.pairs, *shape, dtype=w.r.state_dtype, device=w.r.device)


def _columns(x: Tensor, last: Tensor | None = None) -> Tensor:
    """(n, m, d) as a contiguous (n, d, m), with ``last`` (n, m) as a further row."""
    return x.mT.contiguous() if last is None else torch.cat([x.mT, last[:, None]], 1)


def _with_ones(x: Tensor) -> Tensor:
    """(n, k, d) with a last column of ones, (n, k, d + 1)."""
    return torch.nn.functional.pad(x, (0, 1), value=1.0)


def _finite(*xs: Tensor) -> bool:
    """Whether nothing in them is NaN or infinite. A sum that overflows says no, which costs time and nothing else."""
    total = xs[0].sum()
    for x in xs[1:]:
        total = total + x.sum()
    return bool(torch.isfinite(total))


def _add_product(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc += a @ b for a (n, i, j), b (n, j, d), in the memory order of acc."""
    if acc.mT.is_contiguous():
        acc.mT.baddbmm_(b.mT, a.mT)
    else:
        acc.baddbmm_(a, b)


def _add_kept_product(acc: Tensor, a: Tensor, b: Tensor, keep: Tensor) -> None:
    """acc += a @ b where ``a`` is 0 wherever ``keep`` (n, i, j) is False, and b may hold NaN and infinities.

    0 * NaN is NaN, but a pair that is not kept must add nothing: such rows of b are multiplied element by element.
    """
    finite = torch.isfinite(b)
    _add_product(acc, a, torch.where(finite, b, 0.0))
    odd = torch.where(finite, 0.0, b)
    for j in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        if bool(keep[:, :, j].any()):
            acc.add_(torch.where(keep[:, :, j, None], a[:, :, j, None] * odd[:, None, j], 0.0))


def backends() -> list[Backend]:
    return [TiledBackend()]
