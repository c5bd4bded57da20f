"""FlashAttention-2: the package flash-attn."""

from __future__ import annotations

from typing import Any

from ...request import Request
from .flash import Flash


class FlashAttention2(Flash):
    name = "flash_attn_2"
    module = "flash_attn.flash_attn_interface"  # flash_attn alone may be FlashAttention-4's
    package = "flash-attn"
    features = Flash.features | {"dropout"}
    unbounded = -1

    def extra(self, r: Request) -> dict[str, Any]:
        return {"dropout_p": r.dropout_p}
