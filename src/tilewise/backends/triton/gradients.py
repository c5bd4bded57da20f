"""Launching the backward: which kernels the wanted gradients need, and the sums that are left to PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Grads, Saved
from ...request import Request
from .backward import (
    backward_careful_kernel,
    dbias_careful_kernel,
    dbias_kernel,
    dkdv_kernel,
    dq_dbias_kernel,
    dq_kernel,
)
from .config import CHUNK, DBIAS, DKDV, DQ, Config, Together, together
from .launch import NO_LISTS, Lists, Problem, decided_by, inputs, on_device
from .repeat import Work, repeated


class Buffers(NamedTuple):
    """What the kernels write."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None  # rows and columns that share one are sums of a tile each
    alibi: Tensor | None = None  # (B, H, tiles of queries)
    sinks: Tensor | None = None  # (B, H, tiles of queries)


def backward(r: Request, saved: Saved, needs: frozenset[str]) -> Grads:
    """The gradients asked for."""
    about = decided_by(r)
    low = saved.lse_low if saved.lse_low is None else saved.lse_low.contiguous()
    saved = saved._replace(lse=saved.lse.contiguous(), lse_low=low)
    with on_device(r):
        of_this = partial(_run, r, saved, needs)
        made = repeated(about and ("backward", needs, *about), (*inputs(r), *saved), r.device, of_this)
        return _summed(r, needs, Buffers(*made))


def _run(r: Request, saved: Saved, needs: frozenset[str], work: Work) -> Buffers:
    return _Backward(r, saved, needs, work).run()


class _Backward:
    """One backward pass: its buffers and its launches."""

    def __init__(self, r: Request, saved: Saved, needs: frozenset[str], work: Work):
        self.r, self.p, self.needs, self.work = r, Problem(r), needs, work
        self.dout, self.dlse, self.out, self.lse, self.low = saved
        self.delta = work.made(torch.empty_like(self.lse))
        # Rows that belong to no sequence, and keys without queries, are written here.
        fresh = 0.0 if r.ragged is not None or r.batch * r.heads * r.len_q == 0 else None
        self.dq, self.dk, self.dv = (
            work.made(torch.empty_like(x), fresh) if name in needs else None
            for name, x in (("q", r.q), ("k", r.k), ("v", r.v))
        )
        self.dbias: Tensor | None = None  # of a bias that nothing shares
        self.dalibi: Tensor | None = None
        self.dsinks: Tensor | None = None
        self.odd_q: Tensor | None = None
        self.odd_k: Tensor | None = None
        self.lists_q: Lists = NO_LISTS
        self.lists_k: Lists = NO_LISTS
        self.stats = self.p.stat_strides(self.lse)
        self.of_dq: Config = self.p.config(DQ)  # how the tiles of dQ are cut
        self.of_dkdv: Config = self.p.config(DKDV)

    def run(self) -> Buffers:
        r, needs = self.r, self.needs
        if "bias" in needs and r.bias is not None and not self._bias_is_shared():
            self.dbias = self.work.made(torch.empty_like(r.bias), 0.0)
        shared: Tensor | None = None
        both = self._together()
        if r.batch * r.heads and r.len_q and needs:
            rows = self.dq is not None or self.dbias is not None or "alibi" in needs
            cols = bool(needs & {"k", "v"}) and r.len_k > 0
            self.lists_q, self.lists_k = self.p.lists(
                self.work, self.of_dq if rows else None, self.of_dkdv if cols else None
            )
            self._dq(None if both else self.dq)
            if both:
                shared = self._dq_dbias(both)
            if cols:
                self._dkdv()
            if self.odd_q is not None or self.odd_k is not None:
                self._careful()
        if "bias" in needs and r.bias is not None and self.dbias is None and shared is None:
            shared = self._shared_bias(r.bias)
        return Buffers(self.dq, self.dk, self.dv, self.dbias if shared is None else shared, self.dalibi, self.dsinks)

    def _bias_is_shared(self) -> bool:
        r = self.r
        assert r.bias is not None
        return tuple(r.bias.shape) != (r.batch, r.heads, r.len_q, r.len_k)

    def _sharing(self) -> tuple[int, int, int]:
        """Batch size and heads of the bias, and how many (b, h) share each of its matrices."""
        r = self.r
        assert r.bias is not None
        n_b, n_h = r.bias.shape[:2]
        return n_b, n_h, (r.batch // max(n_b, 1)) * (r.heads // max(n_h, 1))

    def _together(self) -> Together | None:
        """How dQ and the gradient of the bias are one kernel's, where they are."""
        r, p = self.r, self.p
        if self.dq is None or "bias" not in self.needs or r.bias is None or not self._bias_is_shared():
            return None
        if r.bias.shape[2:] != (r.len_q, r.len_k):
            return None
        others = (r.mask, r.alibi, r.softcap, r.ragged)
        if r.dropout_p > 0 or any(x is not None for x in others) or r.len_k == 0:
            return None
        n_b, n_h, entries = self._sharing()
        return together(p.block_d, p.block_dv, p.half, entries, n_b * n_h, r.len_q, r.len_k, p.gpu)

    # --- launches

    def _partial(self, tiles: int) -> Tensor:
        """One number for each tile of queries of each head; programs of a ragged batch may have nothing to write."""
        r = self.r
        x = torch.empty(r.batch, r.heads, tiles, dtype=torch.float32, device=r.device)
        return self.work.made(x, 0.0 if r.ragged is not None else None)

    def _flags(self, tiles: int) -> Tensor | None:
        """Whether each tile came out not finite, where that may be what a mask or a bias hides."""
        r = self.r
        return self.work.made(torch.empty(tiles, dtype=torch.int8, device=r.device)) if self.p.hides else None

    def _constants(self) -> dict[str, Any]:
        r, p = self.r, self.p
        tensors = (r.q, r.k, r.v, self.out, self.dout, self.dq, self.dk, self.dv)
        return dict(  # noqa: C408
            KEEP=p.mask.keep, D=r.dim, DV=r.dim_v, BLOCK_D=p.block_d, BLOCK_DV=p.block_dv, UNIT=p.unit,
            SOFTCAP=r.softcap is not None, WIDE=p.wide(*tensors), UPCAST=p.upcast, PRECISION=p.precision,
            PDL=p.pdl,
        )  # fmt: skip

    def _inputs(self) -> tuple[Any, ...]:
        r = self.r
        return r.q, r.k, r.v, self.dout, self.lse, self.low

    def _input_strides(self) -> tuple[Any, ...]:
        """Of q, k, v and dO; those of v and dO are mostly those of k and q, and then None."""
        q, k, v, dout = (self.p.strides(x) for x in (self.r.q, self.r.k, self.r.v, self.dout))
        return q, k, None if v == k else v, None if dout == q else dout

    def _strides(self, *xs: Tensor | None) -> tuple[tuple[int, ...], ...]:
        return tuple((0, 0, 0, 0) if x is None else self.p.strides(x) for x in xs)

    def _sizes(self) -> tuple[Any, ...]:
        r, p = self.r, self.p
        return self.stats, p.cu_q, p.cu_k, r.len_q, r.len_k

    def _changes(self) -> tuple[Any, ...]:
        """What is done to the scores; the bias with its gradient, if that is not a sum."""
        r, p, dbias = self.r, self.p, self.dbias
        grad = dbias, (0, 0, 0, 0) if dbias is None else dbias.stride()
        return r.scale, p.qk_scale, p.cap, *p.bias_args(), *grad, *p.alibi_args()

    def _dq(self, dq: Tensor | None) -> None:
        """With delta: this kernel is launched, and first, whatever is needed."""
        r, p, cfg = self.r, self.p, self.of_dq
        tiles, pairs = -(-r.len_q // cfg.block_m), r.batch * r.heads
        self.dalibi = self._partial(tiles) if "alibi" in self.needs else None
        self.dsinks = self._partial(tiles) if "sinks" in self.needs else None
        self.odd_q = self._flags(tiles * pairs) if dq is not None else None
        dlse = self.dlse
        dlse_strides = (0, 0, 0) if dlse is None else (0, *dlse.stride()) if p.ragged else dlse.stride()
        args = (
            *self._inputs(), self.out, dlse, self.delta, dq, self.odd_q, *self._input_strides(),
            p.strides(self.out), dlse_strides, *self._strides(dq), *self._sizes(), tiles, r.heads, r.group, pairs,
            min(p.section(), pairs), *self._changes(), self.dalibi, None if self.dsinks is None else r.sinks,
            self.dsinks, *p.dropout_args(), *self.lists_q,
        )  # fmt: skip
        self.work.launch(
            dq_kernel, tiles * pairs, args, (p.mask_args,), REACH=p.mask.reach_k, REVERSE=p.mask.longest_first,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, BY_HEAD=p.by_head, EVEN=p.even(cfg), **self._constants(),
            **cfg.options(),
        )  # fmt: skip

    def _dq_dbias(self, both: Together) -> Tensor:
        """Launch after launch: entries that follow others add to what those left in scratch memory."""
        r, p, cfg = self.r, self.p, both.config
        assert r.bias is not None
        n_b, n_h, entries = self._sharing()
        tiles = -(-r.len_q // cfg.block_m)
        programs = n_b * n_h * tiles
        self.of_dq = cfg
        self.odd_q = self._flags(tiles * r.batch * r.heads)
        dbias = self.work.made(torch.empty(r.bias.shape, dtype=r.bias.dtype, device=r.device))
        at_once, partial = programs, None
        if entries > both.entries:
            at_once = min(programs, both.programs)
            size = at_once * cfg.block_m * -(-r.len_k // cfg.block_n) * cfg.block_n
            partial = self.work.made(torch.empty(size, dtype=torch.float32, device=r.device))
        inputs, strides, (bias, bias_strides) = (*self._inputs(), self.delta), self._input_strides(), p.bias_args()
        sums = bias_strides, dbias.stride(), n_b, n_h
        constants = {n: x for n, x in self._constants().items() if n not in ("KEEP", "SOFTCAP")}
        for first in range(0, programs, at_once):
            for entry in range(0, entries, both.entries):
                args = (
                    *inputs, self.dq, dbias, partial, self.odd_q, *strides, *self._strides(self.dq), self.stats,
                    r.len_q, r.len_k, tiles, first, entry, entries, r.heads, r.group, r.scale, p.qk_scale, bias, *sums,
                )  # fmt: skip
                self.work.launch(
                    dq_dbias_kernel, min(at_once, programs - first), args, ENTRIES=both.entries, LATER=entry > 0,
                    LAST=entry + both.entries >= entries, BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, **constants,
                    **cfg.options(),
                )  # fmt: skip
        args = (
            *inputs, dbias, self.odd_q, *strides, self.stats, r.len_q, r.len_k, tiles, entries, r.heads, r.group,
            p.qk_scale, bias, *sums,
        )  # fmt: skip
        rest = p.config(DBIAS)
        self.work.launch(
            dbias_careful_kernel, programs, args, TILE=cfg.block_m, BLOCK_M=rest.block_m, BLOCK_N=rest.block_n,
            **constants, **rest.options(),
        )  # fmt: skip
        return dbias

    def _dkdv(self) -> None:
        r, p = self.r, self.p
        cfg = self.of_dkdv
        tiles, pairs = -(-r.len_k // cfg.block_n), r.batch * r.kv_heads
        self.odd_k = self._flags(tiles * pairs)
        scale, qk_scale, cap, bias, bias_strides, _, _, *alibi = self._changes()
        args = (
            *self._inputs(), self.delta, self.dk, self.dv, self.odd_k, *self._input_strides(),
            *self._strides(self.dk, self.dv), *self._sizes(), tiles, r.heads, r.group, pairs,
            min(p.section(r.group), pairs), scale, qk_scale, cap, bias, bias_strides, *alibi, *p.dropout_args(),
            *self.lists_k,
        )  # fmt: skip
        self.work.launch(
            dkdv_kernel, tiles * pairs, args, (p.mask_args,), REACH=p.mask.reach_q, BLOCK_M=cfg.block_m,
            BLOCK_N=cfg.block_n, BY_HEAD=p.by_head, PAIRED=p.paired(), EVEN=p.even(cfg), **self._constants(),
            **cfg.options(),
        )  # fmt: skip

    def _careful(self) -> None:
        r, p = self.r, self.p
        dq, dkdv = self.of_dq, self.of_dkdv
        totals = tuple(0 if x is None else x.numel() for x in (self.odd_q, self.odd_k))
        args = (
            *self._inputs(), self.delta, self.dq, self.dk, self.dv, self.odd_q, self.odd_k, *self._input_strides(),
            *self._strides(self.dq, self.dk, self.dv), *self._sizes(), -(-r.len_q // dq.block_m),
            -(-r.len_k // dkdv.block_n), *totals, r.heads, r.group, *self._changes(), self.dalibi, *p.dropout_args(),
            *self.lists_q, *self.lists_k,
        )  # fmt: skip
        self.work.launch(
            backward_careful_kernel, -(-max(totals) // CHUNK), args, (p.mask_args,), REACH_K=p.mask.reach_k,
            REACH_Q=p.mask.reach_q, DQ_M=dq.block_m, DQ_N=dq.block_n, DKDV_M=dkdv.block_m, DKDV_N=dkdv.block_n,
            CHUNK=CHUNK, **self._constants(), num_warps=dq.num_warps,
        )  # fmt: skip

    def _shared_bias(self, bias: Tensor) -> Tensor:
        """The gradient of a bias that several batch entries, heads, rows or columns share."""
        r, p = self.r, self.p
        cfg = p.config(DBIAS)
        rows, cols = -(-r.len_q // cfg.block_m), -(-r.len_k // cfg.block_n)
        n_b, n_h, _ = self._sharing()
        sum_rows, sum_cols = (bias.shape[d] == 1 and n != 1 for d, n in ((2, r.len_q), (3, r.len_k)))
        shape = (n_b, n_h, rows if sum_rows else r.len_q, cols if sum_cols else r.len_k)
        if 0 in (rows, cols, n_b, r.batch):
            return self.work.made(torch.empty_like(bias), 0.0)
        dtype = torch.float32 if sum_rows or sum_cols else bias.dtype
        part = self.work.made(torch.empty(shape, dtype=dtype, device=r.device))
        args = (
            *self._inputs(), self.delta, *self._input_strides(), *self._sizes(), rows, cols, r.heads, r.group,
            r.batch, p.qk_scale, p.cap, *p.bias_args(), part, n_b, n_h, *p.dropout_args(),
        )  # fmt: skip
        self.work.launch(
            dbias_kernel, n_b * n_h * rows * cols, args, (p.mask_args,), BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n,
            SUM_ROWS=sum_rows, SUM_COLS=sum_cols, **self._constants(), **cfg.options(),
        )  # fmt: skip
        return part


def _summed(r: Request, needs: frozenset[str], made: Buffers) -> Grads:
    """The sums that are left to PyTorch."""
    bias, alibi, sinks = made.bias, made.alibi, made.sinks
    if bias is not None and r.bias is not None:
        over = [d for d in (2, 3) if bias.shape[d] != r.bias.shape[d]]
        bias = (bias.sum(over, keepdim=True) if over else bias).to(r.bias.dtype)
    if r.alibi is not None and "alibi" in needs:
        alibi = torch.zeros_like(r.alibi) if alibi is None else alibi.sum(-1)
        if alibi.shape[0] != r.alibi.shape[0]:
            alibi = alibi.sum(0, keepdim=True)
        alibi = alibi.to(r.alibi.dtype)
    if r.sinks is not None and "sinks" in needs:
        sinks = torch.zeros_like(r.sinks) if sinks is None else sinks.sum((0, 2)).to(r.sinks.dtype)
    return Grads(made.q, made.k, made.v, bias, alibi, sinks)
