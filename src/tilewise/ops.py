"""The operator boundary: two PyTorch operators and the autograd function that ties them together.

``tilewise::forward`` and ``tilewise::backward`` take a request flattened to tensors and numbers (the
mask as a small program of ints, see ``Mask.code``) and the name of the backend that runs it. To
torch.compile, FlopCounterMode and the profiler each is one opaque call with a known output shape.
This file imports no kernel.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import dispatch
from .masks import decode, holders
from .request import Ragged, Request
from .tilemap import backward_flops, forward_flops, visible_pairs

_LIB = torch.library.Library("tilewise", "DEF")
_COMMON = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi, Tensor? sinks, Tensor? rng, "
    "Tensor? cu_q, Tensor? cu_k, SymInt max_q, SymInt max_k, float scale, float softcap, float dropout_p, "
    "bool want_max_logits, bool before_backward, str backend, SymInt[] mask_code, Tensor[] mask_tensors"
)
_LIB.define(f"forward({_COMMON}) -> (Tensor out, Tensor lse, Tensor max_logits, Tensor lse_low)")
_LIB.define(
    f"backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor? lse_low, bool[] needs, {_COMMON}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi, Tensor dsinks)"
)
_INPUTS = dispatch.Grads._fields  # the differentiable inputs, in order


def _request(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi: Tensor | None, sinks: Tensor | None,
    rng: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, scale: float,
    softcap: float, dropout_p: float, want_max_logits: bool, before_backward: bool, backend: str,
    mask_code: list[int], mask_tensors: list[Tensor],
) -> tuple[Request, str]:  # fmt: skip
    ragged = None if cu_q is None or cu_k is None else Ragged(cu_q, cu_k, max_q, max_k)
    r = Request(
        q, k, v, scale, decode(mask_code, mask_tensors), bias, alibi, softcap or None, sinks, dropout_p, rng,
        ragged=ragged, want_lse=True, want_max_logits=want_max_logits, before_backward=before_backward,
    )  # fmt: skip
    return r, backend


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Operators return tensors: an empty one stands for None."""
    return like.new_empty(0) if x is None else x


def _forward(*args: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled():  # asked, as inference is called often and switching takes its time
        with torch.no_grad():
            return _forward(*args)
    r, backend = _request(*args)
    o = dispatch.get(backend).forward(r)
    assert o.lse is not None
    return o.out, o.lse, _or_empty(o.max_logits, o.lse), _or_empty(o.lse_low, o.lse)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    r, _ = _request(*args)
    lse = r.new_stats()
    return r.new_out(), lse, *(r.new_stats() if want else lse.new_empty(0) for want in (r.want_max_logits, r.keeps_low))


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, low: Tensor | None, needs: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _backward(dout, dlse, out, lse, low, needs, *args)
    r, backend = _request(*args)
    wanted = frozenset(n for n, need in zip(_INPUTS, needs, strict=True) if need)
    saved = dispatch.Saved(dout, dlse, out, lse, low if r.keeps_low else None)
    return tuple(_or_empty(g, lse) for g in dispatch.get(backend).backward(r, saved, wanted))


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, low: Tensor | None, needs: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    inputs = args[: len(_INPUTS)]
    wanted = (x if need else None for x, need in zip(inputs, needs, strict=True))
    return tuple(lse.new_empty(0) if x is None else torch.empty_like(x) for x in wanted)


_LIB.impl("forward", _forward, "CompositeExplicitAutograd")
_LIB.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::forward", _forward_fake, lib=_LIB)
torch.library.register_fake("tilewise::backward", _backward_fake, lib=_LIB)


def _vmap(op: Any, info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """One call after another: mask, bias and dropout keep their meaning of b and h."""

    def entry(x: Any, dim: Any, n: int) -> Any:
        if isinstance(dim, (list, tuple)):
            return [entry(y, d, n) for y, d in zip(x, dim, strict=True)]
        return x if dim is None else x.select(dim, n)

    calls = [op(*(entry(x, d, n) for x, d in zip(args, in_dims, strict=True))) for n in range(info.batch_size)]
    stacked = tuple(torch.stack(x) for x in zip(*calls, strict=True))
    return stacked, (0,) * len(stacked)


for _name in ("forward", "backward"):
    _op = getattr(torch.ops.tilewise, _name).default
    torch.library.register_vmap(_op, partial(_vmap, _op), lib=_LIB)


@register_flop_formula(torch.ops.tilewise.forward, get_raw=True)
def _forward_flops(*args: Any, out_val: Any = None, **_: Any) -> int:
    r, _name = _request(*args)
    return forward_flops(visible_pairs(r), r.dim, r.dim_v)


@register_flop_formula(torch.ops.tilewise.backward, get_raw=True)
def _backward_flops(dout: Any, dlse: Any, out: Any, lse: Any, low: Any, needs: Any, *args: Any, **_: Any) -> int:
    r, _name = _request(*args)
    return backward_flops(visible_pairs(r), r.dim, r.dim_v)


class _Attention(torch.autograd.Function):
    """Saves what the backward recomputes from: the inputs, the output and the log-sum-exp."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, bias, alibi, sinks, rng, cu_q, cu_k, numbers, keep_alive, *mask_tensors):
        tensors = (q, k, v, bias, alibi, sinks, rng, cu_q, cu_k)
        return torch.ops.tilewise.forward(*tensors, *numbers, mask_tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, numbers, keep_alive = inputs[:11]
        out, lse, max_logits, lse_low = output
        ctx.mark_non_differentiable(max_logits, lse_low)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, lse_low, *tensors, *inputs[11:])
        ctx.numbers, ctx.keep_alive = numbers, keep_alive

    @staticmethod
    def backward(ctx, dout, dlse, *_):
        out, lse, low, *saved = ctx.saved_tensors
        tensors, mask_tensors = saved[:9], saved[9:]
        nothing = (None,) * (5 + len(mask_tensors))
        if dout is None and dlse is None:
            return (None,) * 6 + nothing
        if dout is None:
            dout = out.new_zeros(()).expand_as(out)
        needs = list(ctx.needs_input_grad[:6])
        grads = torch.ops.tilewise.backward(dout, dlse, out, lse, low, needs, *tensors, *ctx.numbers, mask_tensors)
        if torch.is_grad_enabled():
            grads = _OnceDifferentiable.apply(_backend_of(ctx.numbers), *grads)
        return tuple(g if need else None for g, need in zip(grads, needs, strict=True)) + nothing


class _AllGiven(inspect.Signature):
    """A signature of positional arguments without defaults, all of which are given.

    apply() asks for the signature at every call and binds the arguments to it, which takes as long as several kernels.
    """

    def bind(self, *args: Any, **_: Any) -> Any:
        return _Bound(args)


class _Bound(NamedTuple):
    args: tuple

    @property
    def kwargs(self) -> dict[str, Any]:
        return {}

    def apply_defaults(self) -> None:
        pass


_parameters = inspect.signature(_Attention.forward).parameters.values()
_Attention.forward.__signature__ = _AllGiven(list(_parameters))  # type: ignore[attr-defined]


class _OnceDifferentiable(torch.autograd.Function):
    """Hands gradients through, and says so when someone differentiates them again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *grads):
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.backend = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            f"backend {ctx.backend!r} has no double backward; backend='dense' has (it stores the (Lq, Lk) matrices): "
            "call attention(..., backend='dense')"
        )


def _backend_of(numbers: tuple) -> str:
    return numbers[7]


def run(r: Request, backend: str) -> dispatch.Output:
    """Run a request on an operator backend, differentiably."""
    g, mask = r.ragged, r.mask
    cu_q, cu_k, max_q, max_k = (None, None, r.len_q, r.len_k) if g is None else (g.cu_q, g.cu_k, g.max_q, g.max_k)
    code, mask_tensors = ([], []) if mask is None else (mask.code(), mask.tensors())
    grads = any(r.grads().values())
    numbers = (max_q, max_k, r.scale, r.softcap or 0.0, r.dropout_p, r.want_max_logits, grads, backend, code)
    tensors = (r.q, r.k, r.v, r.bias, r.alibi, r.sinks, r.rng, cu_q, cu_k)
    if grads:
        out, lse, top, _ = _Attention.apply(*tensors, numbers, holders(mask), *mask_tensors)
    else:
        out, lse, top, _ = torch.ops.tilewise.forward(*tensors, *numbers, mask_tensors)
    return dispatch.Output(out, lse, top if r.want_max_logits else None)
