"""FlashAttention-3 (Hopper): the package flash-attn-3, whose module is flash_attn_interface."""

from __future__ import annotations

from .flash import Flash


class FlashAttention3(Flash):
    name = "flash_attn_3"
    module = "flash_attn_interface"
    package = "flash-attn-3"
    source = "build it from the folder hopper of github.com/Dao-AILab/flash-attention"
    unbounded = -1
