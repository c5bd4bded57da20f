"""tilewise's own backends and PyTorch's SDPA kernels: every name that ``dispatch`` knows, called as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ... import dispatch
from ...api import attention
from ...request import Request


@dataclass(frozen=True)
class Backend:
    name: str

    @property
    def stores_scores(self) -> bool:
        return self.name in ("dense", "torch_math")

    def available(self) -> str | None:
        return None

    def version(self) -> str | None:
        return None

    def why_not(self, r: Request) -> str | None:
        return "; ".join(map(str, dispatch.get(self.name).why_not(r))) or None

    def prepare(self, r: Request) -> Callable[[], Tensor]:
        seed = None if r.rng is None or not r.seeded else int(r.rng[0])
        return partial(
            attention, r.q, r.k, r.v, r.mask,
            scale=r.scale, dropout_p=r.dropout_p, seed=seed, backend=self.name,
        )  # fmt: skip
