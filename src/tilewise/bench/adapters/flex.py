"""FlexAttention, compiled: torch.nn.attention.flex_attention with the mask as its block mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ...masks import All, Any, Band, Documents, Lengths, Mask, Not
from ...request import Request
from .base import Package

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, i, j) -> keep, all of them without dims


class Flex(Package):
    name = "flex"
    module = package = "torch"
    devices = ("cuda", "cpu")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    features = frozenset({"mask", "gqa", "dim_v"})

    def limits(self, r: Request) -> list[str]:
        reasons = []
        if r.device.type == "cpu" and any(r.grads().values()):
            reasons.append("FlexAttention has no backward on a CPU")
        if r.mask is not None and not _expressible(r.mask):
            reasons.append(f"is given bands, lengths and documents here, not {r.mask!r}")
        return reasons

    def prepare(self, r: Request) -> Callable[[], Tensor]:
        import torch._dynamo.config as dynamo  # seconds: not for those who do not run it
        import torch._functorch.config as functorch

        # A backward that is timed by itself runs again and again on one graph, so its buffers must stay. And a
        # sweep compiles more shapes than Dynamo expects; beyond its limit it would run FlexAttention uncompiled.
        functorch.donated_buffer = False
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 2**16
        block_mask = None
        if r.mask is not None:
            block_mask = create_block_mask(
                rule(r.mask, r), r.batch if r.mask.tensors() else None, None, r.len_q, r.len_k,
                device=r.device, _compile=r.device.type == "cuda",  # else it stores an (L, L) matrix on the way
            )  # fmt: skip
        compiled = torch.compile(flex_attention, dynamic=False)
        return partial(compiled, r.q, r.k, r.v, block_mask=block_mask, scale=r.scale, enable_gqa=r.group != 1)


def _expressible(mask: Mask) -> bool:
    if isinstance(mask, All | Any):
        return all(map(_expressible, mask.terms))
    return _expressible(mask.term) if isinstance(mask, Not) else isinstance(mask, Band | Lengths | Documents)


def rule(mask: Mask, r: Request) -> Rule:
    """The mask as FlexAttention's mask_mod: its meaning for one (b, h, i, j)."""
    if isinstance(mask, Band):
        return _band(mask, mask.offset(r.len_q, r.len_k))
    if isinstance(mask, Lengths):
        return _lengths(mask, mask.lengths.to(r.device), (r.len_q, r.len_k)[mask.axis])
    if isinstance(mask, Documents):
        q_ids, k_ids = (x.to(r.device).expand(r.batch, -1) for x in (mask.q_ids, mask.k_ids))
        return lambda b, h, i, j: q_ids[b, i] == k_ids[b, j]
    if isinstance(mask, Not):
        inner = rule(mask.term, r)
        return lambda b, h, i, j: ~inner(b, h, i, j)
    assert isinstance(mask, All | Any)
    terms = [rule(t, r) for t in mask.terms]
    join = torch.logical_and if isinstance(mask, All) else torch.logical_or
    return lambda b, h, i, j: reduce(join, [term(b, h, i, j) for term in terms])


def _band(mask: Band, offset: int) -> Rule:
    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = j >= 0
        if mask.left is not None:
            kept = kept & (j >= i + offset - mask.left)
        if mask.right is not None:
            kept = kept & (j <= i + offset + mask.right)
        return kept

    return keep


def _lengths(mask: Lengths, lengths: Tensor, whole: int) -> Rule:
    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = i if mask.axis == 0 else j
        return at < lengths[b] if mask.side == "right" else at >= whole - lengths[b]

    return keep
