"""FlashAttention-4 (CuTe DSL): the package flash-attn-4, whose module is flash_attn.cute."""

from __future__ import annotations

from .flash import Flash


class FlashAttention4(Flash):
    name = "flash_attn_4"
    module = "flash_attn.cute"
    package = "flash-attn-4"
    unbounded = None
