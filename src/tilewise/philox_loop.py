"""``philox.py`` for a CPU as one loop, compiled by numba: the same words, in a twentieth of the time.

PyTorch has no operation for the upper half of a product, so that ``philox`` takes some hundred operations, each of
which reads and writes memory. Needs the extra ``fast``; without it dropout is the same, and slower.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from .philox import MULTIPLIERS, ROUNDS, WEYL

INSTALLED = importlib.util.find_spec("numba") is not None


def survive(keep: Tensor, rng: Tensor, group: int, row: int, pairs: Tensor, threshold: int) -> None:
    """Write 1 where word >= threshold, else 0.

    keep: (n, groups, 4, m), of any dtype. rng: int64 (2,). group, row: the first of each. pairs: (n,) b * H + h.
    """
    if threshold > _LOW:
        keep.zero_()
        return
    seed, offset = (x & (2**64 - 1) for x in rng.tolist())
    _loop()(keep.numpy(), seed & _LOW, seed >> 32, offset & _LOW, group, row, pairs.numpy(), threshold)


_LOW = 0xFFFFFFFF


@lru_cache
def _loop() -> Callable[..., None]:
    import numba
    from numba import uint32, uint64

    m0, m1 = (uint64(x) for x in MULTIPLIERS)
    w0, w1 = (uint32(x) for x in WEYL)

    @numba.njit(nogil=True)
    def loop(keep: Any, key0: Any, key1: Any, offset: Any, group: Any, row: Any, pairs: Any, threshold: Any) -> None:
        least = uint32(threshold)
        for n in range(keep.shape[0]):
            for g in range(keep.shape[1]):
                to, first0, first2 = keep[n, g], uint32(group + g), uint32(pairs[n])
                for x in range(to.shape[1]):  # what numba turns into vector instructions
                    c0, c1, c2, c3 = first0, uint32(row + x), first2, uint32(offset)
                    k0, k1 = uint32(key0), uint32(key1)
                    for _ in range(ROUNDS):
                        low, high = uint64(c0) * m0, uint64(c2) * m1
                        c0, c1 = uint32(high >> uint64(32)) ^ c1 ^ k0, uint32(high)
                        c2, c3 = uint32(low >> uint64(32)) ^ c3 ^ k1, uint32(low)
                        k0, k1 = uint32(k0 + w0), uint32(k1 + w1)
                    to[0, x], to[1, x], to[2, x], to[3, x] = c0 >= least, c1 >= least, c2 >= least, c3 >= least

    return loop
