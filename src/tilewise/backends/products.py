"""Who multiplies fp32 matrices on a CPU, and whether with all their digits.

PyTorch gives fp32 products to MKL. On CPUs of AMD, MKL runs code for AVX2; oneDNN, the other library inside PyTorch,
has kernels for AVX-512 that are twice as fast there (benchmarks/cpu.py). PyTorch gives it fp32 products where
``torch.backends.mkldnn.matmul.fp32_precision`` is "bf16". That is a permission to round the operands, of which oneDNN
makes use where the CPU has AMX and nowhere else: whether it does is asked with a product before it is ever relied on.

The setting holds for the whole process. What other threads multiply meanwhile is computed by oneDNN too: with all
digits, in another order of additions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

_FULL = ("none", "ieee")  # settings that permit no rounding
_lock = threading.Lock()
_users = 0
_before = ""


@contextmanager
def quick(device: torch.device) -> Iterator[None]:
    """Within the block fp32 products on this device are computed by the faster library, if that is exact."""
    if not in_one_chain(device):
        yield
        return
    with _onednn():
        yield


def exact(device: torch.device) -> bool:
    """Whether fp32 products on this device keep all digits, as things are set. False where it is not known."""
    if device.type == "cuda":
        return torch.backends.cuda.matmul.fp32_precision in _FULL
    if device.type != "cpu":
        return False
    return _setting().fp32_precision in _FULL or _onednn_is_better()


@lru_cache
def quick_in_bf16(device: torch.device) -> bool:
    """Whether products of bf16, which add up in fp32 and round the result, are far quicker than those of fp32."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and _capabilities().get("avx512_bf16", False)


def _capabilities() -> dict[str, Any]:
    about: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of PyTorch do not say
    return about


def _setting() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def in_one_chain(device: torch.device) -> bool:
    """Whether ``quick`` products add up their sums one product after the other, as oneDNN does."""
    return device.type == "cpu" and _onednn_is_better()


@contextmanager
def _onednn() -> Iterator[None]:
    """The setting, while anybody is within the block; then what it was before."""
    global _users, _before
    matmul = _setting()
    with _lock:
        if _users == 0:
            _before = matmul.fp32_precision
            matmul.fp32_precision = "bf16"
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                matmul.fp32_precision = "none"  # what holds for all of PyTorch: the usual case, where it says the same
                if matmul.fp32_precision != _before:
                    matmul.fp32_precision = _before


@lru_cache
def _onednn_is_better() -> bool:
    """Whether this is a CPU on which oneDNN is faster than MKL, and whether it keeps all digits there."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    about = _capabilities()
    if not ("AMD" in about.get("cpu_name", "") and about.get("avx512_f")):
        return False
    x = torch.full((1, 64, 64), 1 + 2.0**-20)
    with _onednn():
        return torch.equal(torch.bmm(x, torch.eye(64)[None]), x)
