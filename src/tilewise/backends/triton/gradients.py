"""Launching the backward: which kernels the wanted gradients need, and the sums that are left to PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import Grads, Saved
from ...request import Request
from .backward import dbias_kernel, delta_kernel, dkdv_kernel, dq_kernel
from .config import DBIAS, DELTA, DKDV, DQ
from .launch import Problem, on_device
from .start import launch


def backward(r: Request, saved: Saved, needs: frozenset[str]) -> Grads:
    """The gradients asked for."""
    work = _Backward(r, saved, needs)
    with on_device(r):
        work.run()
    return work.grads()


class _Backward:
    """One backward pass: its buffers and its launches."""

    def __init__(self, r: Request, saved: Saved, needs: frozenset[str]):
        self.r, self.p, self.needs = r, Problem(r), needs
        self.dout, self.out = saved.dout, saved.out
        self.lse, self.dlse = saved.lse.contiguous(), saved.dlse
        self.low = None if saved.lse_low is None else saved.lse_low.contiguous()
        self.delta = torch.empty_like(self.lse)
        fresh = torch.zeros_like if r.ragged is not None else torch.empty_like  # rows that belong to no sequence
        self.dq, self.dk, self.dv = (fresh(x) if n in needs else None for n, x in (("q", r.q), ("k", r.k), ("v", r.v)))
        self.dbias: Tensor | None = None
        self.dalibi: Tensor | None = None
        self.dsinks: Tensor | None = None
        self.stats = self.p.stat_strides(self.lse)

    def run(self) -> None:
        r, needs = self.r, self.needs
        if "bias" in needs and r.bias is not None and not self._bias_is_shared():
            self.dbias = torch.zeros_like(r.bias)
        if r.batch * r.heads and r.len_q and needs:
            self._delta()
            if needs & {"k", "v"} and r.len_k:
                self._dkdv()
            if needs & {"q", "alibi"} or self.dbias is not None:
                self._dq()
        elif needs & {"k", "v"}:  # keys without queries
            for x in (self.dk, self.dv):
                if x is not None:
                    x.zero_()
        if "bias" in needs and r.bias is not None and self._bias_is_shared():
            self.dbias = self._shared_bias(r.bias)

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
        launch(
            delta_kernel, tiles * r.batch * r.heads, args, DV=r.dim_v, BLOCK_M=cfg.block_m, BLOCK_DV=p.block_dv,
            WIDE=p.wide(self.out, self.dout), num_warps=cfg.num_warps, num_stages=cfg.num_stages,
        )  # fmt: skip

    def _partial(self, tiles: int) -> Tensor:
        """One number for each tile of queries of each head; programs of a ragged batch may have nothing to write."""
        r = self.r
        make = torch.zeros if r.ragged is not None else torch.empty
        return make(r.batch, r.heads, tiles, dtype=torch.float32, device=r.device)

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
        lists, list_strides = p.lists(cfg, column=True)
        none = (0, 0, 0, 0)
        dk, dv = self.dk, self.dv
        args = (
            *self._inputs(), dk, dv, *self._input_strides(), none if dk is None else p.strides(dk),
            none if dv is None else p.strides(dv), self.stats, p.cu_q, p.cu_k, r.len_q, r.len_k, tiles, r.heads,
            r.group, pairs, min(p.section(r.group), pairs), r.scale, p.qk_scale, p.cap, *p.bias_args(),
            *p.alibi_args(), *p.dropout_args(), lists, list_strides,
        )  # fmt: skip
        launch(
            dkdv_kernel, tiles * pairs, args, (p.mask_args,), REACH=p.mask.reach_q, BLOCK_M=cfg.block_m,
            BLOCK_N=cfg.block_n, BY_HEAD=p.by_head, **self._constants(), num_warps=cfg.num_warps,
            num_stages=cfg.num_stages,
        )  # fmt: skip

    def _dq(self) -> None:
        r, p = self.r, self.p
        cfg = p.config(DQ)
        tiles, pairs = -(-r.len_q // cfg.block_m), r.batch * r.heads
        lists, list_strides = p.lists(cfg)
        none = (0, 0, 0, 0)
        self.dalibi = self._partial(tiles) if "alibi" in self.needs else None
        dq, dbias = self.dq, self.dbias
        args = (
            *self._inputs(), dq, *self._input_strides(), none if dq is None else p.strides(dq), self.stats, p.cu_q,
            p.cu_k, r.len_q, r.len_k, tiles, r.heads, r.group, pairs, min(p.section(), pairs), r.scale, p.qk_scale,
            p.cap, *p.bias_args(), dbias, none if dbias is None else dbias.stride(), *p.alibi_args(), self.dalibi,
            *p.dropout_args(), lists, list_strides,
        )  # fmt: skip
        launch(
            dq_kernel, tiles * pairs, args, (p.mask_args,), REACH=p.mask.reach_k, REVERSE=p.mask.longest_first,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, BY_HEAD=p.by_head, **self._constants(), num_warps=cfg.num_warps,
            num_stages=cfg.num_stages,
        )  # fmt: skip

    def _shared_bias(self, bias: Tensor) -> Tensor:
        """The gradient of a bias that several batch entries, heads, rows or columns share."""
        r, p = self.r, self.p
        cfg = p.config(DBIAS)
        rows, cols = -(-r.len_q // cfg.block_m), -(-r.len_k // cfg.block_n)
        n_b, n_h = bias.shape[:2]
        sum_rows, sum_cols = (bias.shape[d] == 1 and n != 1 for d, n in ((2, r.len_q), (3, r.len_k)))
        shape = (n_b, n_h, rows if sum_rows else r.len_q, cols if sum_cols else r.len_k)
        whole = not (sum_rows or sum_cols)
        part = torch.empty(shape, dtype=bias.dtype if whole else torch.float32, device=r.device)
        if 0 in (rows, cols, n_b, r.batch):
            return torch.zeros_like(bias)
        args = (
            *self._inputs(), *self._input_strides(), self.stats, p.cu_q, p.cu_k, r.len_q, r.len_k, rows, cols, r.heads,
            r.group, r.batch, p.qk_scale, p.cap, *p.bias_args(), part, n_b, n_h, *p.dropout_args(),
        )  # fmt: skip
        launch(
            dbias_kernel, n_b * n_h * rows * cols, args, (p.mask_args,), BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n,
            SUM_ROWS=sum_rows, SUM_COLS=sum_cols, **self._constants(), num_warps=cfg.num_warps,
            num_stages=cfg.num_stages,
        )  # fmt: skip
        over = [d for d, on in ((2, sum_rows), (3, sum_cols)) if on]
        return part.sum(over, keepdim=True).to(bias.dtype) if over else part

    # --- results

    def grads(self) -> Grads:
        return Grads(self.dq, self.dk, self.dv, self.dbias, self._alibi(), self._sinks())

    def _alibi(self) -> Tensor | None:
        slopes = self.r.alibi
        if slopes is None or "alibi" not in self.needs:
            return None
        if self.dalibi is None:
            return torch.zeros_like(slopes)
        total = self.dalibi.sum(-1)
        if slopes.shape[0] != total.shape[0]:
            total = total.sum(0, keepdim=True)
        return total.to(slopes.dtype)

    def _sinks(self) -> Tensor | None:
        sinks = self.r.sinks
        if sinks is None or "sinks" not in self.needs:
            return None
        return torch.zeros_like(sinks) if self.dsinks is None else self.dsinks.sum((0, 2)).to(sinks.dtype)
