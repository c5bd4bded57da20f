"""Blocks and pipeline depth of the kernels: frozen configurations with the reason beside each value."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS = (64, 96, 128, 192, 256)
ROWS = 64  # of a consumer: what one warp group of wgmma takes
BLOCK_M = 2 * ROWS
LARGEST_CAP = 128.0  # of a softcap: beyond, the 5e-7 of ``quick_tanh`` times it is more than the rounding of 16 bits
L2_BYTES = 32 * 2**20  # keys and values of the heads that are worked on at a time: what is reused of the 50 MB


@dataclass(frozen=True)
class Config:
    """How the forward kernel is cut up."""

    block_n: int
    stages: int
    wide: bool
    turns: bool


def padded(dim: int) -> int:
    """The columns of a tile: a power of two. TMA fills what is beyond the head dim with zeros, which add nothing."""
    return 64 if dim <= 64 else 128 if dim <= 128 else 256


def stored(columns: int) -> int:
    """How many columns of the output go to memory at a time: beside 256 of Q, K and V there is no room for more."""
    return min(columns, 128)


MOST_PACKED = {"ragged": 2, "padded": 1}  # heads in a tile. The kernel takes up to 64; no GPU has run more than these


def packed(len_q: int, group: int, batch: str) -> int:
    """How many query heads of a key head share a tile. As many as make the tiles a tenth fewer: where heads have tiles
    of their own, most rows of those are beyond the last query if there are few, and each reads keys and values again.
    """
    some = [p for p in (1, 2, 4, 8, 16, 32, 64) if group % p == 0 and p <= MOST_PACKED[batch]]
    tiles = {p: -(-len_q * p // BLOCK_M) * (group // p) for p in some}
    best = min(tiles, key=lambda p: (tiles[p], p))
    return best if tiles[best] < 0.9 * tiles[1] else 1


def choose(dim: int, dim_v: int, masked: bool, left: bool) -> Config:
    """The configuration for head dims; masked: there is a mask; left: one with an end on the left, a window.

    block_n: 128 keys, so that the scores are 64 registers a thread; with 256 they would spill. 64 beside 256 columns:
    of an accumulator, 128 registers a thread, or of keys, of which no more fit. stages: what fits the 227 KB; with 128
    keys at D = 128 FlashAttention-3 has two as well. wide: P crosses the loop in fp32. Beside the branch of a mask
    ptxas otherwise takes pairs of 16 bits apart and packs them again, 32 instructions a block. Without a mask it does
    not, and fp32 would spill: between tiles there, in the loop beside a window at D = 128. turns: whether the consumers
    take turns at starting products. At D = 256, where products of 64 keys are short beside P V, it is up to 1 % slower.

    At D = 256 on an H200, TFLOP/s of 4096 and 16384 tokens, full: 675 and 691, cuDNN 640 and 662. Slower there: 128
    keys in one stage, a product at a time (616 and 643); V awaited after the product for the scores is started (672 and
    686; with causal it spills).
    """
    columns = max(padded(dim), padded(dim_v))
    wide = masked and not (left and columns == 128)
    return Config(block_n=64 if columns == 256 else 128, stages=2, wide=wide, turns=columns < 256)


@dataclass(frozen=True)
class Backward:
    """How the backward kernel is cut up."""

    block_m: int
    block_n: int
    stages: int

    @property
    def sums(self) -> bool:
        """Whether the kernel for dK and dV adds up dQ. Else that has a kernel of its own.

        With 64 keys a step adds twice as much for as many products, which holds up the rest: at D = 256 on an H200,
        4096 tokens, full, 369 TFLOP/s, cuDNN 391; with two kernels, of seven products in place of five, 502 to 394.
        """
        return self.block_n > ROWS


def columns(dim: int, other: int) -> int:
    """The columns of a tile of the backward; other: the head dim of the values, if dim is that of the keys, and back.

    Up to 128 those of both are as many: dK and dV go to memory from the same place.
    """
    return 64 if max(dim, other) <= 64 else 128 if dim <= 128 else 256


def choose_backward(dim: int, dim_v: int) -> Backward:
    """The configuration for head dims.

    block_n: of 128 keys dK and dV fit the registers up to 128 columns, of 64 up to 256. block_m: beside dK and dV a
    consumer's registers hold scores of 64 queries at 128 columns and beyond, and at 64 the next 64 as well. stages:
    what fits the 227 KB; a third in place of a second buffer for dQ is no faster at 64 and 128.
    """
    columns = max(padded(dim), padded(dim_v))
    return Backward(block_m=128 if columns == 64 else 64, block_n=2 * ROWS if columns <= 128 else ROWS, stages=2)


def section(dim: int, len_q: int, group: int) -> int:
    """How many key heads are worked on at a time. So that Q, dO and the sums of dQ of their query heads fit the L2, but
    four at least: with fewer the programs of a head, one for each tile of keys, wait long for their first turn.
    """
    return max(4, L2_BYTES // (8 * len_q * dim * group))
