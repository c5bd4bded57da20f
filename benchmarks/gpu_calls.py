"""The calls that the GPU suite repeats, and how a check says what it found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tilewise
from tilewise import masks
from tilewise.request import alibi

Device = torch.device


class Failed(Exception):
    """A check found something wrong: the text says what."""


class Absent(Exception):
    """A check could not run: the text says what the machine has not got."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Failed(text)


@dataclass(frozen=True)
class Repeatable:
    """A call and its differentiable tensors; the same numbers on every device."""

    call: Callable[..., Tensor]  # of the tensors, and backend=
    tensors: tuple[Tensor, ...]
    dout: Tensor
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(self, backend: str) -> list[Tensor]:
        """The output and the gradients of all tensors."""
        with self.within():
            out = self.call(*self.tensors, backend=backend)
            return [out.detach(), *torch.autograd.grad(out, self.tensors, self.dout)]

    def to(self, dtype: torch.dtype) -> Repeatable:
        leaves = tuple(x.detach().to(dtype).requires_grad_() for x in self.tensors)
        return replace(self, tensors=leaves, dout=self.dout.to(dtype))


def by_few_programs() -> AbstractContextManager[Any]:
    """The gradient of a shared bias beside dQ, which few queries would not have: no GPU would be full."""
    from tilewise.backends.triton import config, gradients

    def whatever_size(*given: Any) -> Any:
        *about, _matrices, _len_q, _len_k, gpu = given
        found = config.together(*about, 2**20, 2**10, 2**10, gpu)
        return found and replace(found, programs=1)

    return mock.patch.object(gradients, "together", whatever_size)


REPEATABLE = (
    "causal", "window, softcap, sinks", "documents", "padding", "dense mask", "predicate", "alibi", "shared bias",
    "own bias", "bias of all", "dropout", "ragged",
)  # fmt: skip


def repeatable(
    name: str, device: Device, length: int, dtype: torch.dtype = torch.bfloat16, dim: int = 64
) -> Repeatable:  # fmt: skip
    """B = 2, 4 query heads on 2 key heads; what is given beside q, k, v is on the device already."""
    g = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(device, dtype).requires_grad_()

    if name == "ragged":
        cu = torch.tensor([0, length // 3, length // 3, length], dtype=torch.int32, device=device)
        q, k, v = randn(length, 4, dim), randn(length, 2, dim), randn(length, 2, dim)
        call: Any = partial(_varlen, cu=cu, longest=length - length // 3, mask=masks.causal())
        return Repeatable(call, (q, k, v), randn(length, 4, dim).detach())
    q, k, v = randn(2, 4, length, dim), randn(2, 2, length, dim), randn(2, 2, length, dim)
    dout = randn(2, 4, length, dim).detach()
    causal, at = masks.causal(), torch.arange(length, device=device)
    extra: tuple[Tensor, ...] = ()
    call = partial(tilewise.attention, mask=causal)
    if name == "window, softcap, sinks":
        extra = (randn(4),)
        call = partial(with_extra, names=("sinks",), mask=causal & masks.window(length // 4, 0), softcap=20.0)
    elif name == "documents":
        call = partial(tilewise.attention, mask=causal & masks.documents(at // (length // 5 + 1)))
    elif name == "padding":
        call = partial(tilewise.attention, mask=masks.key_lengths(torch.tensor([length, length // 3], device=device)))
    elif name == "dense mask":
        keep = torch.rand(length, length, generator=g) < 0.5
        call = partial(tilewise.attention, mask=masks.dense(keep.to(device)))
    elif name == "predicate":
        call = partial(tilewise.attention, mask=masks.predicate(lambda b, h, i, j: (i - j) % 3 != 1))
    elif name == "alibi":
        extra = (torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device, dtype=dtype, requires_grad=True),)
        call = partial(with_extra, names=("alibi",), mask=causal)
    elif name in ("shared bias", "own bias"):
        extra = (randn(1 if name == "shared bias" else 2, 4, length, length),)
        call = partial(with_extra, names=("bias",), mask=causal)
    elif name == "bias of all":
        bias = randn(1, 1, length, length)
        return Repeatable(partial(with_extra, names=("bias",)), (q, k, v, bias), dout, by_few_programs)
    elif name == "dropout":
        call = partial(tilewise.attention, mask=causal, dropout_p=0.2)
    elif name != "causal":
        raise ValueError(f"no such call {name!r}; there are {', '.join(REPEATABLE)}")
    return Repeatable(call, (q, k, v, *extra), dout)


def _varlen(q: Tensor, k: Tensor, v: Tensor, *, cu: Tensor, longest: int, **options: Any) -> Tensor:
    return tilewise.attention_varlen(q, k, v, cu, cu, longest, longest, **options)


def with_extra(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, names: tuple[str, ...], **options: Any) -> Tensor:
    given: dict[str, Any] = dict(zip(names, rest, strict=True))
    if "alibi" in given:
        given["bias"] = alibi(given.pop("alibi"))
    return tilewise.attention(q, k, v, **given, **options)


def same_bits(a: list[Tensor], b: list[Tensor], what: str) -> None:
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        name = "the output" if n == 0 else f"gradient {n} of {len(a) - 1}"
        different = int((x.to(y.device) != y).sum())
        require(torch.equal(x.to(y.device), y), f"{what}: {different} of {y.numel()} numbers of {name} differ")
