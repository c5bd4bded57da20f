"""Choosing a backend, and saying why not the others.

Every backend answers ``why_not(request)`` with all the reasons it cannot run it; none left means it
can. Without a choice the first of ``AUTO`` that can is taken. A choice (argument, ``use_backend``,
the environment variable TILEWISE_BACKEND, in this order) is kept to: nothing outside it ever runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .request import Request

AUTO = ("hopper", "triton", "tiled")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FEATURES = frozenset({
    "mask", "predicate", "bias", "bias_grad", "alibi", "softcap", "sinks", "dropout", "lse", "max_logits",
    "gqa", "dim_v", "varlen",
})  # fmt: skip


_HINTS = {"jvp": "backend='dense'"}


class Reason(NamedTuple):
    """Why a backend cannot run a request and, where there is one, the change that would work."""

    why: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.why} (fix: {self.fix})" if self.fix else self.why


class Output(NamedTuple):
    """What a backend returns. lse and max_logits may be None where they were not wanted.

    lse_low is for the backward of fp32, fp64 and of requests with a bias: see ``state.lse_low``.
    """

    out: Tensor
    lse: Tensor | None = None
    max_logits: Tensor | None = None
    lse_low: Tensor | None = None


class Saved(NamedTuple):
    """What a backward gets beside the request: the gradients of the outputs, and the forward's results."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    lse_low: Tensor | None


class Grads(NamedTuple):
    """Gradients of the differentiable inputs; None where not needed."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None


class Backend:
    """What a backend declares and does. Capabilities are plain class attributes.

    A ``composite`` backend is made of differentiable PyTorch calls and is called as it is;
    any other brings its own backward and is called through the operators of ``ops.py``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    composite: ClassVar[bool] = False
    devices: ClassVar[tuple[str, ...] | None] = None  # None: any
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    features: ClassVar[frozenset[str]] = FEATURES
    hints: ClassVar[dict[str, str]] = {}  # feature -> the change that would do without it

    def why_not(self, r: Request) -> list[Reason]:
        """All reasons, in the order: device, dtype, features, and what the backend itself adds."""
        return list(self._reasons(r))

    def can(self, r: Request) -> bool:
        """Whether there is no reason."""
        return next(self._reasons(r), None) is None

    def _reasons(self, r: Request) -> Iterator[Reason]:
        if self.devices is not None and r.device.type not in self.devices:
            yield Reason(f"runs on {' or '.join(self.devices)}, the tensors are on {r.device.type}")
        if r.dtype not in self.dtypes:
            names = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            yield Reason(f"does not take {str(r.dtype).removeprefix('torch.')}", f"cast q, k, v to one of {names}")
        for feature in r.asked():
            if feature not in self.features:
                fix = self.hints.get(feature) or _HINTS.get(feature, "")
                yield Reason(f"does not take {r.words(feature)}", fix)
        yield from self.limits(r)

    def limits(self, r: Request) -> Iterable[Reason]:
        """Reasons beyond the declared capabilities."""
        return ()

    def forward(self, r: Request) -> Output:
        raise NotImplementedError

    def backward(self, r: Request, saved: Saved, needs: frozenset[str]) -> Grads:
        raise NotImplementedError


BACKENDS: dict[str, Backend] = {}  # filled by tilewise.backends


def register(backend: Backend) -> None:
    """Make a backend known under its name."""
    BACKENDS[backend.name] = backend


def get(name: str) -> Backend:
    """The backend of that name; ValueError lists the names there are."""
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[name]


_chosen: list[tuple[str, ...]] = []


def _names(choice: str | Sequence[str]) -> tuple[str, ...]:
    names = tuple(n.strip() for n in choice.split(",")) if isinstance(choice, str) else tuple(choice)
    for n in names:
        get(n)
    if not names:
        raise ValueError(f"backend= was given an empty list; name at least one of {', '.join(BACKENDS)}")
    return names


@contextmanager
def use_backend(choice: str | Sequence[str]) -> Iterator[None]:
    """Within the block, attention runs on this backend, or on the first of this list that can.

    An argument ``backend=`` still comes first. As with ``torch.nn.attention.sdpa_kernel`` the choice holds for the
    whole process, not for one thread. Raises ValueError for an unknown name.
    """
    _chosen.append(_names(choice))
    try:
        yield
    finally:
        _chosen.pop()


def candidates(choice: str | Sequence[str] | None) -> tuple[str, ...]:
    """The backends that may run a call, in order."""
    if choice is not None:
        return _names(choice)
    if _chosen:
        return _chosen[-1]
    if env := os.environ.get("TILEWISE_BACKEND"):
        return _names(env)
    return AUTO


def select(r: Request, choice: str | Sequence[str] | None = None) -> Backend:
    """The first candidate that can run the request; NotImplementedError with every reason if none can."""
    names = candidates(choice)
    for name in names:
        backend = get(name)
        if backend.can(r):
            return backend
    raise NotImplementedError(refusal(r, names))


def refusal(r: Request, names: tuple[str, ...]) -> str:
    """The error of a request that no candidate can run: the request, then each backend's reasons."""
    asked = "none of the chosen backends" if len(names) > 1 else f"backend {names[0]!r}"
    lines = [f"{asked} cannot run this call:" if len(names) == 1 else f"{asked} can run this call:"]
    lines += ["  " + line for line in r.describe().splitlines()]
    able = []
    for name in dict.fromkeys((*names, *BACKENDS)):
        reasons = get(name).why_not(r)
        if not reasons:
            able.append(name)
        lines += [f"{name}: " + ("can run it" if not reasons else "")] + [f"  - {x}" for x in reasons]
    if able:
        left_out = ", or leave backend= out" if set(able) & set(AUTO) else ""
        lines.append(f"To run it: backend={able[0]!r}{left_out}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What a call would run and why: ``explain()``'s answer. ``str()`` for people, ``to_dict()`` for programs."""

    request: str
    candidates: tuple[str, ...]
    chosen: str | None
    reasons: dict[str, list[Reason]]
    tiles: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "request": self.request.splitlines(),
            "candidates": list(self.candidates),
            "chosen": self.chosen,
            "backends": {n: [r._asdict() for r in rs] for n, rs in self.reasons.items()},
            "tiles": self.tiles,
        }

    def __str__(self) -> str:
        nothing = f"nothing: {', '.join(self.candidates)} cannot (see the reasons)"
        lines = [self.request, f"runs: {self.chosen or nothing}"]
        if self.tiles:
            t = self.tiles
            lines.append(
                f"tiles of {t['block_m']} x {t['block_n']}: {t['total']} in all, {t['empty']} skipped, "
                f"{t['full']} without a mask, {t['partial']} masked"
            )
        for name, reasons in self.reasons.items():
            lines.append(f"{name}: " + ("can run it" if not reasons else "cannot"))
            lines += [f"  - {r}" for r in reasons]
        return "\n".join(lines)
