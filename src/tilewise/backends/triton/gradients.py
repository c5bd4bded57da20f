"""Launching the backward: which kernels the wanted gradients need, and the sums that are left to PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Grads, Saved
from ...request import Request
from .backward import dbias_kernel, delta_kernel, dkdv_kernel, dq_kernel
from .config import DBIAS, DELTA, DKDV, DQ
from .launch import Problem, decided_by, inputs, on_device
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
        self.dbias: Tensor | None = None
        self.dalibi: Tensor | None = None
        self.dsinks: Tensor | None = None
        self.stats = self.p.stat_strides(self.lse)

    def run(self) -> Buffers:
        r, needs = self.r, self.needs
        if "bias" in needs and r.bias is not None and not self._bias_is_shared():
            self.dbias = self.work.made(torch.empty_like(r.bias), 0.0)
        if r.batch * r.heads and r.len_q and needs:
            self._delta()
            if needs & {"k", "v"} and r.len_k:
                self._dkdv()
            if needs & {"q", "alibi"} or self.dbias is not None:
                self._dq()
        if "bias" in needs and r.bias is not None and self._bias_is_shared():
            self.dbias = self._shared_bias(r.bias)
        return Buffers(self.dq, self.dk, self.dv, self.dbias, self.dalibi, self.dsinks)

    def _bias_is_shared(self) -> bool:
        r = self.r
        assert r.bias is not None
        return tuple(r.bias.shape) != (r.batch, r.heads, r.len_q, r.len_k)

    # --- launches

    def _delta(self) -> None:
        r, p = self.r, self.p
        cfg = p.config(DELTA)
        tiles = -(-r.len_q // cfg.block_m)
        wants_sinks = "sinks" in self.needs
        self.dsinks = self._partial(tiles) if wants_sinks else None
        dlse = self.dlse
        dlse_strides = (0, 0, 0) if dlse is None else (0, *dlse.stride()) if p.ragged else dlse.stride()
        args = (
            self.out, self.dout, self.lse, dlse, self.delta, p.strides(self.out), p.strides(self.dout), self.stats,
            dlse_strides, p.cu_q, r.len_q, tiles, r.heads, r.sinks if wants_sinks else None, self.dsinks,
        )  # fmt: skip
        self.work.launch(
            delta_kernel, tiles * r.batch * r.heads, args, DV=r.dim_v, BLOCK_M=cfg.block_m, BLOCK_DV=p.block_dv,
            WIDE=p.wide(self.out, self.dout), **cfg.options(),
        )  # fmt: skip

    def _partial(self, tiles: int) -> Tensor:
        """One number for each tile of queries of each head; programs of a ragged batch may have nothing to write."""
        r = self.r
        x = torch.empty(r.batch, r.heads, tiles, dtype=torch.float32, device=r.device)
        return self.work.made(x, 0.0 if r.ragged is not None else None)

    def _constants(self) -> dict[str, Any]:
        r, p = self.r, self.p
        tensors = (r.q, r.k, r.v, self.dout, self.dq, self.dk, self.dv)
        return dict(  # noqa: C408
            KEEP=p.mask.keep, D=r.dim, DV=r.dim_v, BLOCK_D=p.block_d, BLOCK_DV=p.block_dv, UNIT=p.unit,
            SOFTCAP=r.softcap is not None, WIDE=p.wide(*tensors), UPCAST=p.upcast, PRECISION=p.precision,
        )  # fmt: skip

    def _inputs(self) -> tuple[Any, ...]:
        r = self.r
        return r.q, r.k, r.v, self.dout, self.lse, self.low, self.delta

    def _input_strides(self) -> tuple[Any, ...]:
        """Of q, k, v and dO; those of v and dO are mostly those of k and q, and then None."""
        q, k, v, dout = (self.p.strides(x) for x in (self.r.q, self.r.k, self.r.v, self.dout))
        return q, k, None if v == k else v, None if dout == q else dout

    def _dkdv(self) -> None:
        r, p = self.r, self.p
        cfg = p.config(DKDV)
        tiles, pairs = -(-r.len_k // cfg.block_n), r.batch * r.kv_heads
        lists, list_strides = p.lists(self.work, cfg, column=True)
        none = (0, 0, 0, 0)
        dk, dv = self.dk, self.dv
        args = (
            *self._inputs(), dk, dv, *self._input_strides(), none if dk is None else p.strides(dk),
            none if dv is None else p.strides(dv), self.stats, p.cu_q, p.cu_k, r.len_q, r.len_k, tiles, r.heads,
            r.group, pairs, min(p.section(r.group), pairs), r.scale, p.qk_scale, p.cap, *p.bias_args(),
            *p.alibi_args(), *p.dropout_args(), lists, list_strides,
        )  # fmt: skip
        self.work.launch(
            dkdv_kernel, tiles * pairs, args, (p.mask_args,), REACH=p.mask.reach_q, BLOCK_M=cfg.block_m,
            BLOCK_N=cfg.block_n, BY_HEAD=p.by_head, PAIRED=p.paired(), **self._constants(), **cfg.options(),
        )  # fmt: skip

    def _dq(self) -> None:
        r, p = self.r, self.p
        cfg = p.config(DQ)
        tiles, pairs = -(-r.len_q // cfg.block_m), r.batch * r.heads
        lists, list_strides = p.lists(self.work, cfg)
        none = (0, 0, 0, 0)
        self.dalibi = self._partial(tiles) if "alibi" in self.needs else None
        dq, dbias = self.dq, self.dbias
        args = (
            *self._inputs(), dq, *self._input_strides(), none if dq is None else p.strides(dq), self.stats, p.cu_q,
            p.cu_k, r.len_q, r.len_k, tiles, r.heads, r.group, pairs, min(p.section(), pairs), r.scale, p.qk_scale,
            p.cap, *p.bias_args(), dbias, none if dbias is None else dbias.stride(), *p.alibi_args(), self.dalibi,
            *p.dropout_args(), lists, list_strides,
        )  # fmt: skip
        self.work.launch(
            dq_kernel, tiles * pairs, args, (p.mask_args,), REACH=p.mask.reach_k, REVERSE=p.mask.longest_first,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, BY_HEAD=p.by_head, **self._constants(), **cfg.options(),
        )  # fmt: skip

    def _shared_bias(self, bias: Tensor) -> Tensor:
        """The gradient of a bias that several batch entries, heads, rows or columns share."""
        r, p = self.r, self.p
        cfg = p.config(DBIAS)
        rows, cols = -(-r.len_q // cfg.block_m), -(-r.len_k // cfg.block_n)
        n_b, n_h = bias.shape[:2]
        sum_rows, sum_cols = (bias.shape[d] == 1 and n != 1 for d, n in ((2, r.len_q), (3, r.len_k)))
        shape = (n_b, n_h, rows if sum_rows else r.len_q, cols if sum_cols else r.len_k)
        if 0 in (rows, cols, n_b, r.batch):
            return self.work.made(torch.empty_like(bias), 0.0)
        dtype = torch.float32 if sum_rows or sum_cols else bias.dtype
        part = self.work.made(torch.empty(shape, dtype=dtype, device=r.device))
        args = (
            *self._inputs(), *self._input_strides(), self.stats, p.cu_q, p.cu_k, r.len_q, r.len_k, rows, cols, r.heads,
            r.group, r.batch, p.qk_scale, p.cap, *p.bias_args(), part, n_b, n_h, *p.dropout_args(),
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
