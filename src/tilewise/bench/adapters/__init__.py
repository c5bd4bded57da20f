"""Everything the benchmark can run: the backends of ``dispatch`` by their names, and one file for each package."""

from __future__ import annotations

import torch

from ... import dispatch
from .backend import Backend
from .base import Adapter
from .flash_attn_2 import FlashAttention2
from .flash_attn_3 import FlashAttention3
from .flash_attn_4 import FlashAttention4
from .flex import Flex
from .xformers import XFormers

__all__ = ["PACKAGES", "Adapter", "get", "names", "usual"]

_PACKAGES: tuple[Adapter, ...] = (Flex(), FlashAttention2(), FlashAttention3(), FlashAttention4(), XFormers())
PACKAGES: dict[str, Adapter] = {a.name: a for a in _PACKAGES}


def names() -> tuple[str, ...]:
    return (*dispatch.BACKENDS, *PACKAGES)


def usual(device: str) -> tuple[str, ...]:
    """What a sweep runs if it is not told: all but those that store L x L matrices; on a CPU also without
    FlexAttention, which compiles there for every shape longer than the sweep takes."""
    slow = {"flex"} if torch.device(device).type == "cpu" else set()
    return tuple(n for n in names() if n not in slow and not get(n).stores_scores)


def get(name: str) -> Adapter:
    """The adapter of that name; ValueError lists the names there are."""
    if name not in names():
        raise ValueError(f"unknown backend {name!r}; there are {', '.join(names())}")
    return PACKAGES[name] if name in PACKAGES else Backend(name)
