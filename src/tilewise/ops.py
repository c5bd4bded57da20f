"""The operator boundary: two PyTorch operators and the autograd function that ties them together.

``tilewise::forward`` and ``tilewise::backward`` take a request flattened to tensors and numbers (the
mask as a small program of ints, see ``Mask.code``) and the name of the backend that runs it. To
torch.compile, FlopCounterMode and the profiler each is one opaque call with a known output shape.
This file imports no kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .masks import decode, holders
from .request import Ragged, Request

_LIB = torch.library.Library("tilewise", "DEF")
_COMMON = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi, Tensor? sinks, Tensor? rng, Tensor? cu_q, Tensor? cu_k, "
    "Tensor[] mask_tensors, SymInt[] mask_code, SymInt max_q, SymInt max_k, float scale, float softcap, "
    "float dropout_p, bool want_max_logits, str backend"
)
_LIB.define(f"forward({_COMMON}) -> (Tensor out, Tensor lse, Tensor max_logits)")
_LIB.define(
    f"backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, {_COMMON}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi, Tensor dsinks)"
)
_INPUTS = dispatch.Grads._fields  # the differentiable inputs, in order


def _request(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi: Tensor | None, sinks: Tensor | None,
    rng: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, mask_tensors: list[Tensor],
    mask_code: list[int], max_q: int, max_k: int, scale: float, softcap: float, dropout_p: float,
    want_max_logits: bool, backend: str,
) -> tuple[Request, str]:  # fmt: skip
    ragged = None if cu_q is None or cu_k is None else Ragged(cu_q, cu_k, max_q, max_k)
    r = Request(
        q, k, v, scale, decode(mask_code, mask_tensors), bias, alibi, softcap or None, sinks, dropout_p, rng,
        ragged=ragged, want_lse=True, want_max_logits=want_max_logits,
    )  # fmt: skip
    return r, backend


def flatten(r: Request, backend: str) -> tuple[Any, ...]:
    """The common arguments of both operators."""
    g = r.ragged
    mask_tensors, code = ([], []) if r.mask is None else (r.mask.tensors(), r.mask.code())
    return (
        r.q, r.k, r.v, r.bias, r.alibi, r.sinks, r.rng, g and g.cu_q, g and g.cu_k, mask_tensors, code,
        g.max_q if g else r.len_q, g.max_k if g else r.len_k, r.scale, r.softcap or 0.0, r.dropout_p,
        r.want_max_logits, backend,
    )  # fmt: skip


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    r, backend = _request(*args)
    out, lse, top = dispatch.get(backend).forward(r)
    assert lse is not None
    return out, lse, lse.new_empty(0) if top is None else top


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    r, _ = _request(*args)
    lse = r.new_stats()
    return r.new_out(), lse, torch.empty_like(lse) if r.want_max_logits else lse.new_empty(0)


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *args: Any):
    r, backend = _request(*args)
    wanted = frozenset(n for n, need in zip(_INPUTS, needs, strict=True) if need)
    grads = dispatch.get(backend).backward(r, dout, dlse, out, lse, wanted)
    return tuple(lse.new_empty(0) if g is None else g for g in grads)


def _backward_fake(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *args: Any):
    inputs = args[: len(_INPUTS)]
    return tuple(
        torch.empty_like(x) if need and x is not None else lse.new_empty(0) for x, need in zip(inputs, needs, strict=True)
    )


_LIB.impl("forward", _forward, "CompositeExplicitAutograd")
_LIB.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::forward", _forward_fake, lib=_LIB)
torch.library.register_fake("tilewise::backward", _backward_fake, lib=_LIB)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, bias, alibi, sinks, rest: tuple, keep_alive: tuple):
        rng, cu_q, cu_k, mask_tensors, *numbers = rest
        return torch.ops.tilewise.forward(q, k, v, bias, alibi, sinks, rng, cu_q, cu_k, mask_tensors, *numbers)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, rest, keep_alive = inputs
        rng, cu_q, cu_k, mask_tensors, *numbers = rest
        out, lse, max_logits = output
        ctx.mark_non_differentiable(max_logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, rng, cu_q, cu_k, out, lse, *mask_tensors)
        ctx.numbers, ctx.keep_alive = numbers, keep_alive

    @staticmethod
    def backward(ctx, dout, dlse, _):
        q, k, v, bias, alibi, sinks, rng, cu_q, cu_k, out, lse, *mask_tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 8
        if dout is None:
            dout = out.new_zeros(()).expand_as(out)
        needs = list(ctx.needs_input_grad[:6])
        grads = torch.ops.tilewise.backward(
            dout, dlse, out, lse, needs, q, k, v, bias, alibi, sinks, rng, cu_q, cu_k, mask_tensors, *ctx.numbers
        )
        if torch.is_grad_enabled():
            grads = _OnceDifferentiable.apply(ctx.numbers[-1], *grads)
        return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_use_dense("forward-mode differentiation (jvp)", ctx.numbers[-1]))


class _OnceDifferentiable(torch.autograd.Function):
    """Hands gradients through, and says so when someone differentiates them again."""

    @staticmethod
    def forward(backend: str, *grads):
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.backend = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(_use_dense("double backward", ctx.backend))


def _use_dense(what: str, backend: str) -> str:
    return (
        f"backend {backend!r} has no {what}; backend='dense' has (it stores the (Lq, Lk) matrices): "
        "call attention(..., backend='dense')"
    )


def run(r: Request, backend: str) -> dispatch.Output:
    """Run a request on an operator backend, differentiably."""
    q, k, v, bias, alibi, sinks, *rest = flatten(r, backend)
    out, lse, top = _Attention.apply(q, k, v, bias, alibi, sinks, tuple(rest), holders(r.mask))
    return dispatch.Output(out, lse, top if r.want_max_logits else None)
