"""The points of a sweep, and their random inputs."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..maskexpr import parse_mask
from ..request import Request

DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Case:
    """One call to attention: q (batch, heads, length, dim), k and v (batch, kv_heads, length, dim)."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    dtype: str  # torch's name
    mask: str  # an expression of ``maskexpr``, or "full"
    dropout: float

    def __str__(self) -> str:
        heads = f"H={self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        drop = f" dropout {self.dropout}" if self.dropout else ""
        return f"B={self.batch} {heads} L={self.length} D={self.dim} {self.dtype} {self.mask}{drop}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Axes:
    """What a sweep goes through: every combination. kv_heads () is as many as heads; causal () is as the mask says."""

    batch: tuple[int, ...] = (1,)
    heads: tuple[int, ...] = (8,)
    kv_heads: tuple[int, ...] = ()
    length: tuple[int, ...] = (256, 1024)
    dim: tuple[int, ...] = (64,)
    dtype: tuple[str, ...] = ("float32",)
    mask: tuple[str, ...] = ("full",)
    causal: tuple[bool, ...] = (False,)
    dropout: tuple[float, ...] = (0.0,)

    def cases(self) -> list[Case]:
        """In the order of the fields, the last changing first. Equal cases come once."""
        every = itertools.product(
            self.batch, self.heads, self.kv_heads or (None,), self.length, self.dim, self.dtype, self.mask,
            self.causal, self.dropout,
        )  # fmt: skip
        cases = (
            Case(b, h, h if kv is None else kv, n, d, dtype, mask_text(mask, causal), p)
            for b, h, kv, n, d, dtype, mask, causal, p in every
        )
        return list(dict.fromkeys(cases))


def mask_text(mask: str, causal: bool) -> str:
    """The expression of a mask, joined with ``causal``."""
    if not causal:
        return mask
    return "causal" if mask == "full" else f"causal & ({mask})"


class Inputs(NamedTuple):
    request: Request
    dout: Tensor  # (B, Hq, L, D)


def inputs(case: Case, device: str, seed: int) -> Inputs:
    """Standard normal q, k, v and dout, without gradients. ValueError if the case cannot be meant."""
    if case.kv_heads < 1 or case.heads % case.kv_heads:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {case.heads} and {case.kv_heads}")
    mask = None if case.mask == "full" else parse_mask(case.mask)
    if mask is not None:
        mask.check(case.batch, case.heads, case.length, case.length)
    generator = torch.Generator(device).manual_seed(seed)

    def randn(heads: int) -> Tensor:
        shape = (case.batch, heads, case.length, case.dim)
        return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, case.dtype))

    q, k, v, dout = (randn(h) for h in (case.heads, case.kv_heads, case.kv_heads, case.heads))
    rng = torch.tensor([seed, 0], device=device) if case.dropout > 0 else None
    return Inputs(Request(q, k, v, scale=case.dim**-0.5, mask=mask, dropout_p=case.dropout, rng=rng), dout)


def leaves(r: Request) -> Request:
    """The same numbers as leaves that require a gradient."""
    q, k, v = (x.detach().requires_grad_() for x in (r.q, r.k, r.v))
    return replace(r, q=q, k=k, v=v)


def checkable(r: Request, honours_seed: bool) -> Request:
    """The request whose result is known beforehand: its dropout mask is that of the seed, or there is no dropout."""
    if not r.dropout_p:
        return r
    return replace(r, seeded=True) if honours_seed else replace(r, dropout_p=0.0, rng=None)
