"""The equation, written out: S, P and O as whole tensors. In fp64 it is the judge of all others.

    S = softcap(scale * Q K^T) + bias, -inf where masked
    P = softmax([S, sink])          O = dropout(P) V          lse = log sum exp [S, sink]

The matrix products are in the dtype of the inputs, the softmax in fp32 (fp64 for fp64 inputs). It is made
of differentiable PyTorch operations and nothing else: gradients, forward mode and double backward are
PyTorch's own, independent of the formulas in the other backends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import FEATURES, Backend, Output, Reason
from ..masks import Patch
from ..philox import dropout_keep
from ..request import NEG_INF, Request


class DenseBackend(Backend):
    name = "dense"
    summary = "the equation with whole L x L matrices; the judge in fp64; double backward and forward mode"
    composite = True
    features = FEATURES | {"jvp"}

    def limits(self, r: Request) -> list[Reason]:
        if torch.compiler.is_compiling():
            return [
                Reason("looks at values, which torch.compile cannot trace", "call it outside the compiled function")
            ]
        return []

    def forward(self, r: Request) -> Output:
        parts = [attend(r, *seq_args(r, seq)) for seq in r.sequences()]
        if r.ragged is None:
            return Output(*parts[0])
        return _pack(r, parts)


def seq_args(r: Request, seq) -> tuple[Tensor, Tensor, Tensor, Patch]:
    whole = r.patch(seq, seq.batch, slice(0, r.heads), slice(0, seq.len_q), slice(0, seq.len_k))
    return seq.queries(r.q), seq.keys(r.k), seq.keys(r.v), whole


def attend(r: Request, q: Tensor, k: Tensor, v: Tensor, patch: Patch) -> tuple[Tensor, Tensor, Tensor]:
    """One rectangular problem: out (B, H, Lq, Dv), lse and max_logits (B, H, Lq)."""
    shape = (q.shape[0], r.heads, q.shape[2], k.shape[2])
    bias = r.bias_tile(patch)
    keep = _keep(r, patch, bias)
    if keep is not None:
        keep = keep.expand(shape)
    k, v = k.repeat_interleave(r.group, 1), v.repeat_interleave(r.group, 1)  # (B, H, Lk, D)
    if keep is not None:  # padding may hold anything
        k, v = _cleared(k, keep.any(-2)), _cleared(v, keep.any(-2))
        q = _cleared(q, keep.any(-1))

    s = _scores(q, k, keep).to(r.state_dtype)
    if keep is not None:
        s = torch.where(keep, s, 0.0)  # before the scale, which may be NaN
    s = s * r.scale
    if r.softcap is not None:
        s = r.softcap * torch.tanh(s / r.softcap)
    if bias is not None:
        s = s + torch.where(bias == NEG_INF, 0.0, bias)
    if keep is not None:
        s = torch.where(keep, s, NEG_INF)
    max_logits = s.detach().amax(-1) if shape[-1] else s.new_full(shape[:-1], NEG_INF)
    if r.sinks is not None:
        s = torch.cat([s, r.sinks.to(s.dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)], -1)

    p, lse = _softmax(s)
    p = p[..., : shape[-1]].to(r.dtype)
    if keep is not None:
        p = torch.where(keep, p, 0.0)  # in a row that is NaN, too
    if r.dropout_p > 0:
        assert r.rng is not None
        survives = dropout_keep(r.rng, r.dropout_p, patch, r.heads)
        p = torch.where(survives, p / (1 - r.dropout_p), 0.0) if r.dropout_p < 1 else p * 0
    return _average(p, v, keep), lse, max_logits


def _keep(r: Request, patch: Patch, bias: Tensor | None) -> Tensor | None:
    """Bool, broadcastable to the patch: neither the mask nor a bias of -inf excludes the pair."""
    keep = None if r.mask is None else r.mask.keep(patch)
    if bias is not None and bool((bias == NEG_INF).any()):
        allowed = bias != NEG_INF
        keep = allowed if keep is None else keep & allowed
    return keep


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and log-sum-exp of the last axis; a row of -inf gives 0 and -inf, with zero gradients."""
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], NEG_INF)
    empty = (s == NEG_INF).all(-1, keepdim=True)
    s = torch.where(empty, 0.0, s)  # keeps NaN out of the gradients of empty rows
    m = s.detach().amax(-1, keepdim=True)
    # Not torch.logsumexp: its gradient, exp(s - lse), is 1 and not 1/n where all s are finfo.min.
    e = torch.exp(s - m)
    l = e.sum(-1, keepdim=True)  # noqa: E741
    return torch.where(empty, 0.0, e / l), torch.where(empty, NEG_INF, m + torch.log(l))[..., 0]


def _scores(q: Tensor, k: Tensor, keep: Tensor | None) -> Tensor:
    """Q K^T. Where a masked key is not finite, every row gets keys of its own, so that it cannot reach them."""
    if keep is None or (_finite(q) and _finite(k)):
        return q @ k.transpose(-1, -2)
    mine = torch.where(keep[..., None], k[:, :, None], 0.0)  # (B, H, Lq, Lk, D)
    rows = torch.where(keep[..., None], q[:, :, :, None], 0.0)
    return (rows * mine).sum(-1)


def _average(p: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """P V, with the same care: 0 * NaN is NaN."""
    if keep is None or _finite(v):
        return p @ v
    mine = torch.where(keep[..., None], v[:, :, None], 0.0)  # (B, H, Lq, Lk, Dv)
    return (p[..., None] * mine).sum(-2)


def _cleared(x: Tensor, seen: Tensor) -> Tensor:
    """Rows that take part in nothing, as zeros."""
    return torch.where(seen[..., None], x, 0.0)


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _pack(r: Request, parts: list[tuple[Tensor, Tensor, Tensor]]) -> Output:
    """Sequences laid end to end again; rows that belong to none are 0 (lse -inf)."""
    slack = r.q.shape[0] - sum(p[0].shape[2] for p in parts)
    out = torch.cat([*(p[0][0].transpose(0, 1) for p in parts), r.q.new_zeros(slack, r.heads, r.dim_v)])
    gap = torch.full((r.heads, slack), NEG_INF, dtype=r.state_dtype, device=r.device)
    lse, top = (torch.cat([*(p[n][0] for p in parts), gap], -1) for n in (1, 2))
    return Output(out, lse, top)


def backends() -> list[Backend]:
    return [DenseBackend()]
