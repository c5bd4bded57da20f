"""Tile sizes, warps and pipeline depth: frozen configurations with the reason beside each.

What limits a configuration is the shared memory of an SM (tiles of all stages) and the 64k registers of its threads
(accumulators, and the tile of scores in fp32). ``tests/test_triton_aot.py`` compiles every configuration that ``choose``
can return for sm_80, sm_90 and gfx942 and demands that nothing spills.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch

FORWARD, DKDV, DQ, DBIAS = "forward", "dkdv", "dq", "dbias"
DIRECTIONS = (FORWARD, DKDV, DQ, DBIAS)
BUCKETS = (16, 32, 64, 128, 256, 512)  # head dims are padded to these inside the kernels
SM80, SM90, AMD, INTERPRETER = "sm_80", "sm_90", "gfx942", "interpreter"


@dataclass(frozen=True)
class Config:
    """How one kernel is cut up."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


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
def choose(direction: str, d: int, dv: int, half: bool, extra: bool, gpu: str) -> Config:
    """The configuration of a kernel.

    d, dv: bucketed head dims. half: fp16 or bf16. extra: a bias, a softcap or dropout, which need registers beside
    the scores.
    """
    wide = max(d, dv)
    if gpu == INTERPRETER:  # enough tiles to prove the loops, few enough to be quick
        return Config(16, 16, 4, 1)
    raise NotImplementedError
