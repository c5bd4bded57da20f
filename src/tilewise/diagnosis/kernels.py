"""SDPA's own constraints as rules: which kernel takes a call, every reason why another does not, and what to change.

PyTorch answers only for the device at hand, and with the first reason it meets. These rules answer for a CUDA GPU
from a CPU too, with all reasons, and each knows the change that would meet it: the call's description is changed so
and the rules are asked again, so that what is named is enough.

Source: the checks in aten/src/ATen/native/transformers/sdp_utils_cpp.{h,cpp} and cuda/sdp_utils.cpp of torch 2.9 to
2.14, for GPUs of sm_80 or newer. Where PyTorch can be asked about the device at hand, its answer comes first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dispatch import Reason

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FASTER = {"cpu": ("flash",), "cuda": ("flash", "cudnn", "efficient")}  # than math; on other devices nothing is known
_HALVES = (torch.float16, torch.bfloat16)
# SDPA itself gives three 3-D inputs a batch axis before it chooses a kernel (PyTorch's pull request 192271).
_BATCHES_3D = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 14)


@dataclass(frozen=True)
class Inputs:
    """What SDPA's constraints look at: shapes, dtypes and flags, no data."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    unit_strides: bool  # of the last axis of q, k, v and the mask
    grads: bool  # a backward has to serve q, k or v
    mask: tuple[int, ...] | None
    mask_grad: bool
    dropout_p: float
    is_causal: bool
    enable_gqa: bool


def inputs_of(args: dict[str, Any]) -> Inputs:
    """The description of a call, from SDPA's arguments by name."""
    q, k, v, mask = args["query"], args["key"], args["value"], args["attn_mask"]
    tensors: list[Tensor] = [q, k, v]
    call = Inputs(
        tuple(q.shape),
        tuple(k.shape),
        tuple(v.shape),
        (q.dtype, k.dtype, v.dtype),
        all(x.dim() == 0 or x.stride(-1) == 1 for x in [*tensors, *([] if mask is None else [mask])]),
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        None if mask is None else tuple(mask.shape),
        mask is not None and torch.is_grad_enabled() and mask.requires_grad,
        float(args["dropout_p"]),
        bool(args["is_causal"]),
        bool(args["enable_gqa"]),
    )
    return _batched(call) if _BATCHES_3D and all(x.dim() == 3 for x in tensors) else call


class Rule(NamedTuple):
    """``breaks`` says how a call breaks it ("" if it does not); ``mend`` is the call after the change ``fix``."""

    kernels: frozenset[tuple[str, str]]  # (device, kernel)
    breaks: Callable[[Inputs], str]
    fix: str
    mend: Callable[[Inputs], Inputs] | None = None


def why_not(device: str, kernel: str, call: Inputs) -> list[Reason]:
    """Every constraint of that kernel ("flash", "cudnn", "efficient", "math") on that device that the call breaks."""
    if kernel == "math":
        return []
    if kernel not in FASTER.get(device, ()):
        return [Reason(f"there is no {kernel} kernel on {device}")]
    return [Reason(why, rule.fix) for rule, why in _broken(device, kernel, call)]


def change(device: str, kernel: str, call: Inputs) -> list[str]:
    """The changes after which the kernel takes the call, in order; empty where no change is known."""
    done: list[str] = []
    for _ in RULES:
        broken = _broken(device, kernel, call)
        if not broken:
            return done
        rule = broken[0][0]
        if rule.mend is None:
            return []
        call = rule.mend(call)
        done.append(rule.fix)
    return []


def would_run(device: str, call: Inputs) -> str:
    """The first kernel in SDPA's order that the constraints allow."""
    order = [n for n in FASTER.get(device, ()) if n != "cudnn"]
    return next((n for n in order if not why_not(device, n, call)), "math")


def takes(kernel: str, args: dict[str, Any]) -> bool:
    """PyTorch's own answer for these tensors on their device."""
    named = {n: args[n] for n in ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")}
    with sdpa_kernel(KERNELS[kernel]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            choice = torch._fused_sdp_choice(args["query"], args["key"], args["value"], **named)
        except RuntimeError:  # "No available kernel"
            return False
    return bool(choice == KERNELS[kernel].value)


def _broken(device: str, kernel: str, call: Inputs) -> list[tuple[Rule, str]]:
    """Rules on later sizes are asked only of 4-D inputs; the rank rule comes first."""
    found = []
    for rule in RULES:
        if (device, kernel) in rule.kernels and (why := rule.breaks(call)):
            found.append((rule, why))
            if rule is RULES[0]:
                break
    return found


# --- the rules ------------------------------------------------------------------------------------

_CPU, _FLASH, _CUDNN, _EFFICIENT = ("cpu", "flash"), ("cuda", "flash"), ("cuda", "cudnn"), ("cuda", "efficient")
_GPU = frozenset({_FLASH, _CUDNN, _EFFICIENT})
_ALL = _GPU | {_CPU}


def _rank(c: Inputs) -> str:
    ranks = (len(c.query), len(c.key), len(c.value))
    return "" if ranks == (4, 4, 4) else f"takes 4-D query, key and value, (B, H, L, D); these have {ranks} dims"


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    n = 1
    for size in shape[:-3]:
        n *= size
    return (n, *(1,) * (3 - len(shape)), *shape[-3:])


def _batched(c: Inputs) -> Inputs:
    """The call with four axes in q, k, v and a mask of more than two."""
    mask = c.mask if c.mask is None or len(c.mask) == 2 else _four(c.mask)
    return replace(c, query=_four(c.query), key=_four(c.key), value=_four(c.value), mask=mask)


def _dtypes(allowed: tuple[torch.dtype, ...]) -> Callable[[Inputs], str]:
    names = ", ".join(_name(d) for d in allowed)

    def breaks(c: Inputs) -> str:
        if len(set(c.dtypes)) > 1:
            return f"takes one dtype for all; these are {', '.join(map(_name, c.dtypes))}"
        return "" if c.dtypes[0] in allowed else f"does not take {_name(c.dtypes[0])} (it takes {names})"

    return breaks


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _batches(c: Inputs) -> str:
    sizes = (c.query[0], c.key[0], c.value[0])
    return "" if len(set(sizes)) == 1 else f"takes one batch size for all; these are {sizes}"


def _heads(c: Inputs) -> str:
    q, k, v = c.query[1], c.key[1], c.value[1]
    if q == k == v or (c.enable_gqa and k == v and k > 0 and q % k == 0):
        return ""
    wanted = "key/value heads that divide the query's" if c.enable_gqa else "equal heads without enable_gqa"
    return f"takes {wanted}; these are {q}, {k}, {v}"


def _same_dim(c: Inputs) -> str:
    q, k, v = c.query[-1], c.key[-1], c.value[-1]
    return "" if q == k == v else f"takes one head dim for query, key and value; these are {q}, {k}, {v}"


def _over(limit: int) -> Callable[[Inputs], str]:
    def breaks(c: Inputs) -> str:
        d = max(c.query[-1], c.value[-1])
        return "" if d <= limit else f"takes head dims up to {limit}; this is {d}"

    return breaks


def _multiple(half: int, full: int) -> Callable[[Inputs], str]:
    """The head dims are multiples of 16 bytes (cuDNN: of 8)."""

    def breaks(c: Inputs) -> str:
        n = half if c.dtypes[0] in _HALVES else full
        dims = (c.query[-1], c.value[-1])
        return (
            ""
            if not any(d % n or not d for d in dims)
            else f"takes head dims that are multiples of {n}; these are {dims}"
        )

    return breaks


def _mask_shape(c: Inputs) -> str:
    if c.mask is None:
        return ""
    (b, h, lq, _), lk = c.query, c.key[2]
    wanted = ((1, b), (1, h), (1, lq), (1, lk))
    fits = len(c.mask) in (2, 4) and all(n in ok for n, ok in zip(c.mask[::-1], wanted[::-1], strict=False))
    return "" if fits else f"takes an attn_mask of 2 or 4 dims that broadcasts to {(b, h, lq, lk)}; this is {c.mask}"


def _padded(n: int, to: int) -> int:
    return -(-n // to) * to


def _with_dims(c: Inputs, dim: int, dim_v: int) -> Inputs:
    return replace(c, query=(*c.query[:-1], dim), key=(*c.key[:-1], dim), value=(*c.value[:-1], dim_v))


def _with_heads(c: Inputs, heads: int) -> Inputs:
    key, value = ((x[0], heads, *x[2:]) for x in (c.key, c.value))
    return replace(c, key=key, value=value, enable_gqa=False)


RULES: tuple[Rule, ...] = (
    Rule(
        _ALL, _rank, "make q, k and v 4-D, (B, H, L, D): x[None], or flatten the leading dims", _batched
    ),
    Rule(
        frozenset({_FLASH, _CUDNN}), _dtypes(_HALVES),
        "compute it in bf16 or fp16: q, k, v .bfloat16(), or torch.autocast('cuda', torch.bfloat16)",
        lambda c: replace(c, dtypes=(torch.bfloat16,) * 3),
    ),
    Rule(
        frozenset({_EFFICIENT}), _dtypes((*_HALVES, torch.float32)), "cast q, k and v to fp32, bf16 or fp16",
        lambda c: replace(c, dtypes=(torch.float32,) * 3),
    ),
    Rule(
        frozenset({_CPU}), _dtypes((torch.float32, torch.float64, *_HALVES)), "cast q, k and v to one floating dtype",
        lambda c: replace(c, dtypes=(torch.float32,) * 3),
    ),
    Rule(
        frozenset({_FLASH}), lambda c: "" if c.mask is None else f"has no attn_mask; this call has one of {c.mask}",
        "leave attn_mask out: is_causal=True where the mask is the causal one, else tilewise.attention(mask=...)",
        lambda c: replace(c, mask=None, mask_grad=False),
    ),
    Rule(
        frozenset({_CPU}), lambda c: f"has no dropout; dropout_p is {c.dropout_p}" if c.dropout_p > 0 else "",
        "dropout_p=0.0 (at inference always: dropout_p=self.p if self.training else 0.0)",
        lambda c: replace(c, dropout_p=0.0),
    ),
    Rule(
        frozenset({_CPU, _CUDNN}), lambda c: "has no gradient of attn_mask" if c.mask_grad else "",
        "attn_mask.detach(), or tilewise.attention(bias=...) which has that gradient",
        lambda c: replace(c, mask_grad=False),
    ),
    Rule(
        frozenset({_CPU, _CUDNN}), _mask_shape, "give attn_mask 4 dims, (B or 1, H or 1, Lq or 1, Lk or 1)",
        lambda c: replace(c, mask=(c.query[0], c.query[1], c.query[2], c.key[2])),
    ),
    Rule(_ALL, _batches, "expand q, k and v to one batch size",
         lambda c: replace(c, key=(c.query[0], *c.key[1:]), value=(c.query[0], *c.value[1:]))),
    Rule(_ALL, _heads, "enable_gqa=True where the key/value heads divide the query heads, or repeat_interleave them",
         lambda c: _with_heads(c, c.query[1])),
    Rule(
        frozenset({_EFFICIENT}), lambda c: "takes no grouped heads (enable_gqa)" if c.enable_gqa else "",
        "repeat_interleave the key/value heads to the query heads and leave enable_gqa out",
        lambda c: _with_heads(c, c.query[1]),
    ),
    Rule(
        _ALL, lambda c: "takes no empty sequences" if 0 in (c.query[-2], c.key[-2]) else "",
        "skip the call when L is 0",
    ),
    Rule(
        frozenset({_CPU, _FLASH}), _same_dim,
        "pad the smaller of q, k and v to one head dim with zeros, keep scale=1/sqrt(D), and cut the output",
        lambda c: _with_dims(c, *(max(c.query[-1], c.value[-1]),) * 2),
    ),
    Rule(frozenset({_FLASH}), _over(256), "no PyTorch flash kernel goes beyond 256: tilewise.attention does"),
    Rule(frozenset({_CUDNN}), _over(128), "128 at most (256 on sm_90 and sm_100 with a recent cuDNN)"),
    Rule(
        frozenset({_EFFICIENT}), _multiple(8, 4),
        "pad q, k and v with zeros to that multiple, keep scale=1/sqrt(D), and cut the output",
        lambda c: _with_dims(c, _padded(c.query[-1], 8), _padded(c.value[-1], 8)),
    ),
    Rule(
        frozenset({_CUDNN}), _multiple(8, 8),
        "pad q, k and v with zeros to that multiple, keep scale=1/sqrt(D), and cut the output",
        lambda c: _with_dims(c, _padded(c.query[-1], 8), _padded(c.value[-1], 8)),
    ),
    Rule(
        frozenset({_FLASH}),
        lambda c: f"takes is_causal for Lq = Lk only; these are {c.query[-2]} and {c.key[-2]}"
        if c.is_causal and c.query[-2] != c.key[-2] else "",
        "say which diagonal: attn_mask=torch.nn.attention.bias.causal_lower_right(Lq, Lk), or "
        "tilewise.attention(mask=masks.causal(align=...))",
        lambda c: replace(c, is_causal=False),
    ),
    Rule(frozenset({_CUDNN}), lambda c: "takes no single key" if c.key[-2] == 1 else "", "another kernel for Lk = 1"),
    Rule(
        frozenset({_CUDNN}),
        lambda c: "" if (c.dropout_p * 16).is_integer() else "takes multiples of 1/16 as dropout_p",
        "round dropout_p to a multiple of 1/16", lambda c: replace(c, dropout_p=round(c.dropout_p * 16) / 16),
    ),
    Rule(
        _ALL, lambda c: "" if c.unit_strides else "takes a last axis of stride 1 in query, key, value and attn_mask",
        ".contiguous()", lambda c: replace(c, unit_strides=True),
    ),
)  # fmt: skip
