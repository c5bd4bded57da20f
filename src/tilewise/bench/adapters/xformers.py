"""xFormers' memory_efficient_attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...request import Request
from .base import Package, one_band


class XFormers(Package):
    name = module = package = "xformers"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    features = frozenset({"mask", "dropout"})  # grouped heads need its five-dim layout

    def limits(self, r: Request) -> list[str]:
        band = one_band(r.mask, r.len_q, r.len_k)
        if r.mask is None or (band is not None and (band.left, band.right, band.align) == (None, 0, 0)):
            return []
        return [f"is given no mask or causal() here, not {r.mask!r}"]

    def prepare(self, r: Request) -> Callable[[], Tensor]:
        from xformers.ops import LowerTriangularMask, memory_efficient_attention

        bias = None if r.mask is None else LowerTriangularMask()

        def call() -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (r.q, r.k, r.v))  # (B, L, H, D)
            return memory_efficient_attention(q, k, v, bias, r.dropout_p, scale=r.scale).transpose(1, 2)

        return call
