"""What the benchmark asks of an implementation of attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ...masks import All, Band, Mask
from ...request import Request


class Adapter(Protocol):
    """One implementation. A reason is text for people; None means that there is none."""

    @property
    def name(self) -> str: ...

    @property
    def stores_scores(self) -> bool:
        """Whether it stores L x L matrices: which pipeline of ``iomodel`` it is."""

    def available(self) -> str | None:
        """Why it is not here at all: a package that is not installed, for example."""

    def version(self) -> str | None:
        """Version of the package it comes from; None where it is not known, or torch's or tilewise's."""

    def why_not(self, r: Request) -> str | None:
        """Every reason why it cannot run this request."""

    def prepare(self, r: Request) -> Callable[[], Tensor]:
        """A call without arguments that computes out (B, Hq, Lq, Dv), differentiable in r.q, r.k and r.v.

        What a training loop would do once (compiling, turning a mask into blocks) is done here and is not timed.
        """


class Package:
    """An implementation from a package of its own. Capabilities are plain class attributes, as in ``dispatch``."""

    name: ClassVar[str]
    module: ClassVar[str]  # what is imported
    package: ClassVar[str]  # what is installed
    source: ClassVar[str] = "pip install {package}"  # how
    stores_scores: ClassVar[bool] = False
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    features: ClassVar[frozenset[str]] = frozenset({"mask", "gqa"})

    def available(self) -> str | None:
        if importable(self.module):
            return None
        return f"{self.package} is not installed: {self.source.format(package=self.package)}"

    def version(self) -> str | None:
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:  # built from source under another name
            return None

    def why_not(self, r: Request) -> str | None:
        reasons = []
        if r.device.type not in self.devices:
            reasons.append(f"runs on {' or '.join(self.devices)}, the tensors are on {r.device.type}")
        if r.dtype not in self.dtypes:
            reasons.append(f"does not take {_word(r.dtype)}, only {' and '.join(map(_word, self.dtypes))}")
        reasons += [f"does not take {words}" for feature, words in r.features().items() if feature not in self.features]
        if r.seeded:
            reasons.append("draws its own dropout mask and cannot honour a seed")
        return "; ".join(reasons + self.limits(r)) or None

    def limits(self, r: Request) -> list[str]:
        """Reasons beyond the declared capabilities."""
        return []


def importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def one_band(mask: Mask | None, len_q: int, len_k: int) -> Band | None:
    """The mask as a single band lo <= j - i - offset <= hi with its offset as a number; None if it is not one."""
    if mask is None:
        return Band(None, None, len_k - len_q)
    if isinstance(mask, Band):
        return Band(mask.left, mask.right, mask.offset(len_q, len_k))
    if not isinstance(mask, All):
        return None
    bands = [one_band(term, len_q, len_k) for term in mask.terms]
    given = [b for b in bands if b is not None]
    if len(given) < len(bands) or len({b.align for b in given}) != 1:
        return None
    left = min((b.left for b in given if b.left is not None), default=None)
    right = min((b.right for b in given if b.right is not None), default=None)
    return Band(left, right, given[0].align)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
