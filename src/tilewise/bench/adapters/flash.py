"""What FlashAttention 2, 3 and 4 have in common: (B, L, H, D) tensors, and a window on the bottom-right diagonal."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from ...request import Request
from .base import Package, one_band


class Flash(Package):
    unbounded: ClassVar[int | None]  # what a window without an edge is written as
    largest_dim: ClassVar[int] = 256

    def limits(self, r: Request) -> list[str]:
        reasons = []
        band = one_band(r.mask, r.len_q, r.len_k)
        if band is None or band.align != r.len_k - r.len_q:
            reasons.append(f"takes one window on the bottom-right diagonal, not {r.mask!r}")
        if r.dim > self.largest_dim:
            reasons.append(f"takes head dims up to {self.largest_dim}, not {r.dim}")
        return reasons

    def prepare(self, r: Request) -> Callable[[], Tensor]:
        function = importlib.import_module(self.module).flash_attn_func
        band = one_band(r.mask, r.len_q, r.len_k)
        assert band is not None
        causal = band.left is None and band.right == 0
        edges = (None, None) if causal else (band.left, band.right)
        window = tuple(self.unbounded if n is None else n for n in edges)
        named: dict[str, Any] = {"softmax_scale": r.scale, "causal": causal, "window_size": window, **self.extra(r)}

        def call() -> Tensor:
            out = function(r.q.transpose(1, 2), r.k.transpose(1, 2), r.v.transpose(1, 2), **named)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # some versions return the lse too

        return call

    def extra(self, r: Request) -> dict[str, Any]:
        """Further arguments of this version's function."""
        return {}
