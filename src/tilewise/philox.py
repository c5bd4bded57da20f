"""Dropout's random numbers: Philox4x32-7, a function of position.

Whether score (b, h, i, j) is dropped depends on (seed, offset, b, h, i, j) and nothing else: not on
the tiling, the backend, the pass or how often it is recomputed. The counter of a group of four keys is

    (j // 4,  i,  b * H + h,  offset)      and key j takes word j % 4,

with the low and high half of the 64-bit seed as the Philox key. A pair is dropped when its 32-bit
word is below p * 2**32.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123). With seven rounds it passes
BigCrush, and FlashAttention takes seven; ten are the authors' margin. The Triton kernels call ``tl.philox`` with the
same counters.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .masks import Patch

_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7


class Room(Protocol):
    """Memory to work in: fresh memory for every operation takes as long as the operations."""

    def integers(self, shape: torch.Size) -> list[Tensor]:
        """Six int64 tensors of that shape."""

    def survivors(self, shape: torch.Size) -> Tensor:
        """What ``dropout_keep`` writes ones and zeros to."""


def philox(
    seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, rounds: int = ROUNDS, room: list[Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (held in int64) for each counter; the counters broadcast. seed: int64 scalar tensor.

    room: six int64 tensors of the result's shape to work in, where fresh memory for every operation takes too long.
    The words are among them, then.
    """
    spare = [] if room is None else list(room)

    def take(shape: torch.Size) -> Tensor | None:
        return spare.pop() if spare and spare[0].shape == shape else None

    def give(*done: Tensor) -> None:
        spare.extend(x for x in done if any(x is mine for mine in room or ()))  # a counter may have the shape too

    def mixed(product: Tensor, other: Tensor, key: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(product.shape, other.shape)
        x = torch.bitwise_right_shift(product.expand(shape), 32, out=take(shape))
        return x.bitwise_xor_(other).bitwise_xor_(key).bitwise_and_(_MASK)

    number = torch.arange(rounds, device=seed.device)
    keys = (
        ((half & _MASK) + number * step).bitwise_and_(_MASK)
        for half, step in zip((seed, seed >> 32), WEYL, strict=True)
    )
    for k0, k1 in zip(*(k.unbind() for k in keys), strict=True):
        # 32 x 32 -> 64 bits: the product wraps as an int64, which leaves its bits right.
        low, high = (torch.mul(c, m, out=take(c.shape)) for c, m in zip((c0, c2), MULTIPLIERS, strict=True))
        give(c0, c2)
        c0, c2, used = mixed(high, c1, k0), mixed(low, c3, k1), (c1, c3)
        c1, c3 = high, low  # their upper halves are cut off where they have been used
        give(*used)
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def threshold(p: float) -> int:
    """A word below this is a dropped pair; 2**32 when p is 1."""
    return round(p * 2**32)


def dropout_keep(rng: Tensor, p: float, patch: Patch, heads: int, room: Room | None = None) -> Tensor:
    """(nb, nh, m, n): which pairs of the patch survive dropout. In memory the queries of a key lie side by side.

    rng: int64 (2,), seed and offset. heads: the number of query heads H of the whole call. Bool, or with ``room`` 1 and
    0 in what that gives.
    """
    from . import philox_loop

    first, last = patch.cols.start // 4, (patch.cols.stop - 1) // 4
    groups = torch.arange(first, last + 1, device=patch.device).view(1, 1, -1, 1)
    seed, offset = rng.to(patch.device).unbind()
    counters = groups, patch.i.mT, patch.b * heads + patch.h, offset & _MASK
    nb, nh, n, m = shape = torch.broadcast_shapes(*(c.shape for c in counters))
    by_word = torch.Size((nb, nh, n, 4, m))
    keep = torch.empty(by_word, dtype=torch.bool, device=patch.device) if room is None else room.survivors(by_word)
    if philox_loop.INSTALLED and patch.device.type == "cpu":
        philox_loop.survive(keep.flatten(0, 1), rng.cpu(), first, patch.rows.start, counters[2].flatten(), threshold(p))
    else:
        words = philox(seed, *counters, room=None if room is None else room.integers(shape))
        for at, word in enumerate(words):
            torch.ge(word.expand(shape), threshold(p), out=keep[:, :, :, at])
    start = patch.cols.start - 4 * first
    return keep.flatten(2, 3)[:, :, start : start + patch.cols.stop - patch.cols.start].mT
