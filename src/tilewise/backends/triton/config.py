"""Tile sizes, warps and pipeline depth: frozen configurations with the reason beside each.

What limits a configuration is the shared memory of an SM (tiles of all stages) and the 64k registers of its threads
(accumulators, and the tile of scores in fp32). ``tests/test_triton_aot.py`` compiles every configuration that
``choose`` can return for sm_80, sm_90 and gfx942. It demands that they fit and that no loop over tiles spills, but for
the careful kernels (see ``primitives``) and two rows of a table below, which says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

FORWARD, DKDV, DQ, DBIAS = "forward", "dkdv", "dq", "dbias"
DIRECTIONS = (FORWARD, DKDV, DQ, DBIAS)
RANGES, WINDOW, LISTS = "ranges", "window", "lists"  # how a mask says which tiles to visit
LIGHT, DROPOUT, BIAS, EXTRA = "light", "dropout", "bias", "extra"  # changes of the scores
BUCKETS = (16, 32, 64, 128, 256, 512)  # head dims are padded to these inside the kernels
SM80, SM90, AMD, INTERPRETER = "sm_80", "sm_90", "gfx942", "interpreter"


@dataclass(frozen=True)
class Config:
    """How one kernel is cut up.

    registers: of a thread, at most (NVIDIA): ptxas takes a few more than the loops need, and one program fewer fits an
    SM.
    one_loop: dK/dV take all tiles of documents in one loop, where no tile passes an end.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    one_loop: bool = False

    def options(self) -> dict[str, Any]:
        """As Triton takes them."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.registers}


def bucket(d: int) -> int:
    """The padded head dim: a power of two of at least 16, what a tensor core product takes."""
    return next(b for b in BUCKETS if d <= b)


def interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter (the variable is read as Triton reads it)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True", "on")


@lru_cache
def generation(device: torch.device) -> str:
    """The family of GPUs whose configurations suit this one."""
    if interpreting():
        return INTERPRETER
    if torch.version.hip is not None:
        return AMD
    major, minor = torch.cuda.get_device_capability(device)
    return SM90 if (major, minor) == (9, 0) else SM80


@lru_cache
def has_tf32(device: torch.device) -> bool:
    """Whether Triton multiplies in TF32 there: on NVIDIA from sm_80, on AMD from CDNA 3."""
    if interpreting() or torch.version.hip is None:
        return True
    return torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx942")


@dataclass(frozen=True)
class Row:
    """The configurations for head dims up to ``most``.

    Without a mask, with ranges, those of a window or lists of tiles, and, whatever the mask, with changes of the
    scores: ALiBi or a softcap alone (with lists apart), dropout alone, a bias alone, and several at once.
    """

    most: int
    plain: Config
    masked: Config
    window: Config
    lists: Config
    light: Config
    light_lists: Config
    dropout: Config
    bias: Config
    extra: Config


def row(
    most: int,
    plain: Config,
    masked: Config | None = None,
    extra: Config | None = None,
    window: Config | None = None,
    lists: Config | None = None,
    light: Config | None = None,
    light_lists: Config | None = None,
    dropout: Config | None = None,
    bias: Config | None = None,
) -> Row:
    """What is not given is as ``masked``, and that as ``plain``; one change as ``extra``, dropout as ``light``, and so
    is that with lists."""
    masked = masked or plain
    extra = extra or masked
    light = light or extra
    window = window or masked
    lists = lists or masked
    return Row(most, plain, masked, window, lists, light, light_lists or light, dropout or light, bias or extra, extra)


# One with extras has the least left for its tile. 4 warps of 168 registers let three programs run on an SM, 4 warps of
# 128 four, 8 of 128 two.

# NVIDIA, Hopper, 16 bits. wgmma takes 64 rows a warp group: two groups share 128 rows, so that a 128 x 128 tile of
# scores is 64 registers a thread. The stages are what fits 227 KB.
_SM90: dict[str, tuple[Row, ...]] = {
    FORWARD: (
        # Best of 12 shapes each, bf16 at L = 4096 on an H200; 128 x 128 was 19 % slower at D = 64. There four programs
        # of 64 x 64 take 5 % less than two of 128 x 64 if causal and 8 % less within a window; beside ALiBi three take
        # 17 % less than two, and 21 % less with documents, where four spill. At D = 128 three of 64 x 32 take 11 % less
        # than two of 64 x 64 with documents of 256 tokens, the same if they have 1024. A bias at D = 64: 11 % less than
        # 64 x 64 for 4 warps. At D = 128: 18 % less than 64 x 32.
        row(
            64, Config(128, 64, 8, 3), Config(64, 64, 4, 3, 128), Config(128, 64, 8, 3),
            window=Config(64, 64, 4, 2, 128), lists=Config(64, 64, 4, 2, 168), light=Config(64, 64, 4, 3, 168),
            light_lists=Config(64, 64, 4, 3), bias=Config(128, 64, 8, 3, 128),
        ),
        row(
            128, Config(128, 128, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 8, 2), lists=Config(64, 32, 4, 3, 168),
            light=Config(64, 64, 4, 3), dropout=Config(128, 64, 8, 3), bias=Config(128, 64, 8, 3),
        ),
        row(256, Config(128, 32, 8, 3), Config(64, 64, 8, 2), Config(64, 32, 8, 2), light=Config(64, 64, 8, 2)),
        row(512, Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 8, 1)),  # 64 rows would spill: mma.sync
    ),
    # K and V stay, dK and dV are the accumulators: many keys, as traffic on q and dO falls with their number. Few
    # queries, so that three stages fit: worth 20 % of the whole backward at D = 64, 9 % at D = 128.
    # Without a mask 64 x 128 takes 3 % less than 32 x 64 at D = 128; if causal four stages of the latter take 2 % less
    # than it and than their three, which take 8 % less within a window and 5 % less with documents. 64 keys have at
    # D = 64 the products a byte of q and dO that they have at D = 128. A window there: three programs an SM of 32
    # queries take 3 % less than two of 64. Documents of 256 tokens: 13 % less than two of 32. ALiBi: 12 % less; with
    # lists as well they spill.
    # One loop there: 16 % less with documents of 256 tokens, as a second one waits for its first tiles again; 1 % more
    # with 1024.
    # Beside ALiBi or a softcap at D = 128, 32 x 64 takes 26 and 31 % less than 32 x 128, which only with lists has to
    # be, as the other spills.
    # A bias, read as pairs: 32 x 128 takes as long as 32 x 64, which spills, at D = 128; at D = 64 64 x 64 takes 9 %
    # less than 64 x 128 and 20 % less than 32 x 128.
    DKDV: (
        row(
            64, Config(32, 128, 4, 3), Config(64, 64, 4, 3), Config(16, 64, 8, 2), window=Config(32, 64, 4, 3, 168),
            lists=Config(32, 64, 4, 2, 168), light=Config(32, 64, 4, 3, 168), light_lists=Config(32, 64, 4, 3),
            dropout=Config(32, 64, 4, 3), bias=Config(64, 64, 4, 3),
        ),
        row(
            128, Config(64, 128, 8, 3), Config(32, 64, 4, 4), Config(16, 64, 8, 1), window=Config(32, 64, 4, 3),
            lists=Config(32, 64, 4, 3, one_loop=True), light=Config(32, 64, 4, 3), light_lists=Config(32, 128, 8, 2),
            dropout=Config(16, 128, 8, 3), bias=Config(32, 128, 8, 3),
        ),
        row(256, Config(32, 64, 8, 2), Config(16, 64, 8, 3), Config(16, 32, 8, 1)),  # 64 keys would spill: mma.sync
        row(512, Config(16, 16, 8, 2), extra=Config(16, 16, 8, 1)),  # at one stage ptxas spills, but for this one
    ),
    # At D = 64 three programs an SM take 12 % less than two if causal, 13 % within a window and 10 % beside ALiBi; with
    # documents four of 64 x 32 take 10 % less than three of 64 x 64. At D = 128 two of 64 queries take 7 % less than
    # one of 128 within a window, and 10 % more if causal; with documents of 256 tokens three of 64 x 32 take 7 % less
    # than those. A bias: 29 and 20 % less than 128 x 32.
    DQ: (
        row(
            64, Config(64, 64, 4, 3), Config(64, 64, 4, 3, 168), Config(64, 64, 8, 2),
            lists=Config(64, 32, 4, 3, 128), light=Config(64, 64, 4, 3, 168), light_lists=Config(64, 64, 4, 3),
            dropout=Config(64, 64, 4, 3), bias=Config(64, 64, 4, 3),
        ),
        row(
            128, Config(128, 64, 8, 3), Config(128, 64, 8, 3), Config(64, 32, 8, 2), window=Config(64, 64, 4, 2),
            lists=Config(64, 32, 4, 2, 168, one_loop=True), light=Config(128, 64, 8, 3), bias=Config(128, 64, 8, 3),
        ),
        row(256, Config(64, 32, 8, 2), Config(64, 32, 8, 2), Config(64, 16, 8, 2), light=Config(64, 32, 8, 2)),
        row(512, Config(32, 16, 8, 1)),
    ),
    # Best of 9 shapes for a bias of the whole batch. What they read of q, k, v and dO is the limit at D = 128, where
    # 64 x 64 takes 40 % more; at D = 64 it is as much the arithmetic. 128 x 128 would read two thirds, and spills: the
    # bias, S, dP and the sum are 224 registers for 8 warps. S and dP in turns, three stages ahead, took 22 % more, half
    # the head dim at a time, so that two stages of 128 x 128 fit, 14 % or more. The sums of dQ's kernel, entry by entry
    # in fp32, took 20 % more than both kernels.
    DBIAS: (
        row(64, Config(64, 64, 4, 3)), row(128, Config(128, 64, 8, 2)), row(256, Config(64, 32, 8, 1)),
        row(512, Config(32, 16, 8, 1)),
    ),
}  # fmt: skip
# NVIDIA, Ampere and all others, 16 bits: mma.sync, 163 KB (99 KB on consumer cards, which D <= 128 fits).
_SM80: dict[str, tuple[Row, ...]] = {
    FORWARD: (
        row(64, Config(128, 64, 4, 3), Config(128, 64, 8, 3), Config(128, 32, 8, 3), light=Config(128, 64, 8, 3)),
        row(128, Config(128, 32, 8, 3)),
        row(256, Config(64, 32, 8, 2), extra=Config(32, 32, 8, 2)),
        row(512, Config(32, 32, 8, 1), Config(32, 16, 8, 1)),
    ),
    DKDV: (
        row(
            64,
            Config(64, 64, 4, 2),
            Config(32, 64, 8, 2),
            Config(32, 32, 8, 2),
            light=Config(32, 64, 8, 2),
            dropout=Config(32, 32, 8, 2),
        ),
        row(128, Config(32, 64, 8, 2), Config(32, 32, 8, 2)),
        row(256, Config(16, 64, 8, 2), Config(16, 32, 8, 2)),
        row(512, Config(16, 16, 8, 1)),
    ),
    DQ: (
        row(64, Config(64, 64, 4, 2), Config(64, 32, 8, 2)),
        row(128, Config(64, 32, 8, 2)),
        row(256, Config(32, 32, 8, 2)),
        row(512, Config(16, 16, 8, 1)),
    ),
    DBIAS: (
        row(64, Config(64, 64, 8, 1)),
        row(128, Config(64, 32, 8, 1)),
        row(256, Config(32, 32, 8, 1)),
        row(512, Config(16, 16, 8, 1)),
    ),
}
# AMD, CDNA 3, 16 bits: 64 KB of LDS, so no second stage of wide tiles.
_AMD: dict[str, tuple[Row, ...]] = {
    FORWARD: (
        row(128, Config(128, 64, 4, 1), Config(128, 64, 4, 1), Config(128, 32, 4, 1)),
        row(256, Config(64, 32, 4, 1)),
        row(512, Config(32, 16, 4, 1)),
    ),
    DKDV: (row(128, Config(32, 64, 4, 1)), row(256, Config(16, 32, 4, 1)), row(512, Config(16, 16, 4, 1))),
    DQ: (row(128, Config(64, 32, 4, 1)), row(256, Config(32, 16, 4, 1)), row(512, Config(16, 16, 4, 1))),
    DBIAS: (row(128, Config(32, 32, 4, 1)), row(256, Config(32, 16, 4, 1)), row(512, Config(16, 16, 4, 1))),
}
# fp32 is multiplied in IEEE precision, without tensor cores on NVIDIA: small tiles, as every operand passes through
# registers. In TF32 they are small for tensor cores, but fit.
_FP32: dict[str, tuple[Row, ...]] = {
    FORWARD: (
        row(64, Config(64, 32, 8, 1)),
        row(128, Config(32, 32, 8, 1)),
        row(256, Config(32, 16, 8, 1), Config(32, 16, 8, 1, 248), Config(32, 16, 8, 1)),  # with all 255 ptxas spills
        row(512, Config(16, 16, 8, 1)),
    ),
    DKDV: (row(64, Config(32, 32, 4, 1)), row(128, Config(32, 32, 8, 1)), row(512, Config(16, 16, 8, 1))),
    DQ: (row(64, Config(32, 32, 4, 1)), row(128, Config(32, 32, 8, 1)), row(512, Config(16, 16, 8, 1))),
    DBIAS: (row(64, Config(32, 32, 4, 1)), row(128, Config(32, 32, 8, 1)), row(512, Config(16, 16, 16, 1))),
}
_AMD_FP32: dict[str, tuple[Row, ...]] = {  # a warp is 64 threads
    FORWARD: (row(128, Config(32, 32, 4, 1)), row(256, Config(32, 16, 4, 1)), row(512, Config(16, 16, 4, 1))),
    # These two spill at D = 512: 16 rows of q, k, v and dO are 128 registers each.
    DKDV: (row(128, Config(32, 32, 4, 1)), row(512, Config(16, 16, 4, 1))),
    DQ: (row(128, Config(32, 32, 4, 1)), row(512, Config(16, 16, 4, 1))),
    DBIAS: (row(128, Config(32, 32, 4, 1)), row(512, Config(16, 16, 4, 1))),
}


@dataclass(frozen=True)
class Together:
    """dQ of so many of those that share a bias, side by side, with its gradient.

    programs: that run at a time. Sums that wait for further entries lie in scratch memory, a row of tiles each.
    """

    entries: int
    config: Config
    programs: int = 128


# S and dP are not computed again for the gradient of the bias, and a tile of it is loaded and stored once. H200, bf16,
# L = 4096, four batch entries: D = 64 3.1 ms in place of 5.3 for dQ's kernel and dbias'; D = 128 1.5 for two entries
# and 2.1 for the two that add to them, in place of 4.1, while what is added to was not loaded stages ahead yet.
# 16 keys leave room for three stages, without which it takes 30 % more, and nothing spills; 32 do not at D = 128.
SHARED: dict[int, tuple[Together, ...]] = {  # by the most channels; the first with as many entries, or the last
    64: (Together(2, Config(128, 32, 8, 5)), Together(4, Config(128, 16, 8, 3))),
    128: (Together(2, Config(128, 16, 8, 3)),),
}
CHUNK = 32  # tiles of which a program of the careful kernels sees whether they are odd


def tables(half: bool, gpu: str) -> dict[str, tuple[Row, ...]]:
    """The rows of each direction, for 16 bits or fp32."""
    halves, fp32 = {SM90: (_SM90, _FP32), SM80: (_SM80, _FP32), AMD: (_AMD, _AMD_FP32)}[gpu]
    return halves if half else fp32


@lru_cache
def choose(direction: str, d: int, dv: int, half: bool, mask: str | None, changes: str | None, gpu: str) -> Config:
    """The configuration of a kernel.

    d, dv: bucketed head dims. half: fp16 or bf16. mask: RANGES, WINDOW or LISTS. changes: of the scores, LIGHT,
    DROPOUT, BIAS or EXTRA.
    """
    if gpu == INTERPRETER:
        return _interpreted
    found = next(r for r in tables(half, gpu)[direction] if max(d, dv) <= r.most)
    if changes is not None:
        light = found.light_lists if mask == LISTS else found.light
        return {LIGHT: light, DROPOUT: found.dropout, BIAS: found.bias, EXTRA: found.extra}[changes]
    return {None: found.plain, RANGES: found.masked, WINDOW: found.window, LISTS: found.lists}[mask]


def together(
    d: int, dv: int, half: bool, entries: int, matrices: int, len_q: int, len_k: int, gpu: str
) -> Together | None:
    """How dQ and the gradient of a bias of so many matrices, which so many entries share, are computed at once.

    None: where no configuration fits, or fewer programs would run than could, or the scratch memory would be more than
    the gradient in 16 bits.
    """
    if entries < 2:
        return None
    if gpu == INTERPRETER:
        return Together(2, _interpreted, 3)
    rows = SHARED.get(max(d, dv, 64), ()) if gpu == SM90 and half else ()
    for x in rows:
        m, n = x.config.block_m, x.config.block_n
        if entries <= x.entries:
            return x if matrices * -(-len_q // m) >= x.programs else None
        if x is rows[-1]:
            return x if 4 * x.programs * m * -(-len_k // n) * n <= 2 * matrices * len_q * len_k else None
    return None


_interpreted = Config(16, 16, 4, 1, one_loop=True)  # enough tiles to prove the loops, few enough to be quick


def interpret_in_tiles(block_m: int, block_n: int) -> None:
    """For tests: the tile that the interpreter uses."""
    global _interpreted
    _interpreted = Config(block_m, block_n, 4, 1, one_loop=True)
    choose.cache_clear()
