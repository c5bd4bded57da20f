"""A result against the judge's error budget, before anyone times it.

Large shapes are judged on a cut: some rows of queries, spread over the batch and the length, with all their keys.
The gradient of the output is zero in the other rows, so that dK and dV are sums over the cut too: they are judged
whole, at every key, at the cost of the cut. The kernel under test runs on the full shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.dense import attend
from ..request import Request
from ..testing.judge import Measured, compare

SCORES = 2**22  # (query, key) pairs of a cut, over all heads: fp64 matrices of 32 MiB
_ROWS = 16  # of a piece of the cut


class Piece(NamedTuple):
    batch: int
    rows: slice


def pieces(batch: int, heads: int, len_q: int, len_k: int, scores: int = SCORES) -> list[Piece]:
    """Rows to judge: all of them if they have no more than ``scores`` pairs, else pieces at equal distances."""
    affordable = scores // max(heads * len_k, 1)
    if batch * len_q <= affordable:
        return [Piece(b, slice(0, len_q)) for b in range(batch)]
    size = min(_ROWS, len_q)
    count = max(affordable // size, 2)
    starts = {round(n * (batch * len_q - size) / (count - 1)) for n in range(count)}
    cut = {(b, min(i, len_q - size)) for b, i in (divmod(start, len_q) for start in starts)}
    return _joined([Piece(b, slice(i, i + size)) for b, i in sorted(cut)])


def _joined(found: list[Piece]) -> list[Piece]:
    """Pieces that overlap or touch as one: no row counts twice."""
    merged: list[Piece] = []
    for p in found:
        last = merged[-1] if merged else None
        if last is not None and last.batch == p.batch and p.rows.start <= last.rows.stop:
            merged[-1] = Piece(p.batch, slice(last.rows.start, p.rows.stop))
        else:
            merged.append(p)
    return merged


class Check(NamedTuple):
    """Each quantity (out, dq, dk, dv) with its error, what the budget allows, and the cut that was judged."""

    measured: dict[str, Measured]
    rows: int  # of ``of`` rows of queries, over the batch
    of: int
    dropout_p: float

    @property
    def wrong(self) -> str:
        """What is wrong; empty if nothing is."""
        return "; ".join(f"{name}: {m.note}" for name, m in self.measured.items() if not m.ok)

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "measured": {name: m._asdict() for name, m in self.measured.items()}}


def judged(r: Request, dout: Tensor, run: Callable[[], Tensor], scores: int = SCORES) -> Check:
    """The output of a request and, if r.q, r.k and r.v require them, the gradients.

    r: with a dropout mask that is known (``seeded``) or none. dout (B, Hq, Lq, Dv). run: computes out of r.
    scores: how many (query, key) pairs the cut may have.
    """
    cut = pieces(r.batch, r.heads, r.len_q, r.len_k, scores)
    rows = sum(p.rows.stop - p.rows.start for p in cut)
    return Check(_measured(r, dout, run, cut), rows, r.batch * r.len_q, r.dropout_p)


def _measured(r: Request, dout: Tensor, run: Callable[[], Tensor], cut: list[Piece]) -> dict[str, Measured]:
    grad = any(r.grads().values())
    dout = _only(cut, dout)
    mine = _results(r, dout, run, cut, grad)
    exact = _dense(r, dout, cut, torch.float64, grad)
    dense = _dense(r, dout, cut, r.dtype, grad)
    sizes = _cancelled(r, dout, exact, cut) if grad else {}
    return {name: compare(x, dense[name], exact[name], r.dtype, sizes.get(name, 0.0)) for name, x in mine.items()}


def _only(cut: list[Piece], x: Tensor) -> Tensor:
    """x (B, H, Lq, D) with zeros outside the cut."""
    kept = torch.zeros_like(x)
    for b, rows in cut:
        kept[b, :, rows] = x[b, :, rows]
    return kept


def _rows(x: Tensor, cut: list[Piece]) -> Tensor:
    """The cut of x (B, H, Lq, D) as (H, rows, D), in fp64."""
    return torch.cat([x.detach()[b, :, rows] for b, rows in cut], 1).double()


def _results(r: Request, dout: Tensor, run: Callable[[], Tensor], cut: list[Piece], grad: bool) -> dict[str, Tensor]:
    out = run()
    found = {"out": _rows(out, cut)}
    if grad:
        dq, dk, dv = torch.autograd.grad(out, (r.q, r.k, r.v), dout)
        found |= {"dq": _rows(dq, cut), "dk": dk.double(), "dv": dv.double()}
    return found


def _dense(r: Request, dout: Tensor, cut: list[Piece], dtype: torch.dtype, grad: bool) -> dict[str, Tensor]:
    """The cut by ``dense`` in ``dtype``; sums over pieces are in fp64 and rounded once, as a whole would be."""
    outs, dqs = [], []
    dk, dv = (torch.zeros_like(x, dtype=torch.float64, requires_grad=False) for x in (r.k, r.v))
    for b, rows in cut:
        q, k, v = (x.detach()[b : b + 1].to(dtype) for x in (r.q[:, :, rows], r.k, r.v))
        leaves = [x.requires_grad_(grad) for x in (q, k, v)]
        with torch.set_grad_enabled(grad):
            request = replace(r, q=q, k=k, v=v)
            (whole,) = r.sequences()
            patch = r.patch(whole, slice(b, b + 1), slice(0, r.heads), rows, slice(0, r.len_k))
            out, _, _ = attend(request, q, k, v, patch)
        outs.append(out.detach()[0].double())
        if grad:
            gq, gk, gv = torch.autograd.grad(out, leaves, dout[b : b + 1, :, rows].to(dtype))
            dqs.append(gq[0].double())
            dk[b] += gk[0]
            dv[b] += gv[0]
    found = {"out": torch.cat(outs, 1)}
    return found | ({"dq": torch.cat(dqs, 1), "dk": dk.to(dtype).double(), "dv": dv.to(dtype).double()} if grad else {})


def _cancelled(r: Request, dout: Tensor, exact: dict[str, Tensor], cut: list[Piece]) -> dict[str, float]:
    """The size of P * delta in dq and dk, which the budget counts where dP - delta cancels to nothing."""
    delta = _rms((_rows(dout, cut) * exact["out"]).sum(-1))
    per_key = (exact["out"].shape[1] * r.heads / (r.batch * r.kv_heads * r.len_k)) ** 0.5
    return {"dq": r.scale * delta * _rms(r.k.detach()), "dk": r.scale * delta * _rms(r.q.detach()) * per_key}


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
