"""Dropout's random numbers: Philox4x32-10, a function of position.

Whether score (b, h, i, j) is dropped depends on (seed, offset, b, h, i, j) and nothing else: not on
the tiling, the backend, the pass or how often it is recomputed. The counter of a group of four keys is

    (j // 4,  i,  b * H + h,  offset)      and key j takes word j % 4,

with the low and high half of the 64-bit seed as the Philox key. A pair is dropped when its 32-bit
word is below p * 2**32.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123). The Triton
kernels call ``tl.philox`` with the same counters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import Patch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(
    seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (held in int64) for each counter; the counters broadcast. seed: int64 scalar tensor."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(rounds):
        # 32 x 32 -> 64 bits: the product wraps as an int64, which leaves its bits right.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((high >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((low >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = high & _MASK, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """A word below this is a dropped pair; 2**32 when p is 1."""
    return round(p * 2**32)


def dropout_keep(rng: Tensor, p: float, patch: Patch, heads: int) -> Tensor:
    """Bool (nb, nh, m, n): which pairs of the patch survive dropout.

    rng: int64 (2,), seed and offset. heads: the number of query heads H of the whole call.
    """
    first, last = patch.cols.start // 4, (patch.cols.stop - 1) // 4
    groups = torch.arange(first, last + 1, device=patch.device).view(1, 1, 1, -1)
    seed, offset = rng.to(patch.device).unbind()
    words = philox(seed, groups, patch.i, patch.b * heads + patch.h, offset & _MASK)
    bits = torch.stack(torch.broadcast_tensors(*words), -1).flatten(-2)  # (nb, nh, m, 4 * groups)
    start = patch.cols.start - 4 * first
    return bits[..., start : start + patch.cols.stop - patch.cols.start] >= threshold(p)
