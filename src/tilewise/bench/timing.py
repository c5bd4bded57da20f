"""Time of calls that take turns. ``benchmarks/cpu.py`` uses it too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

_TURN_S = 0.01  # a turn on a CPU repeats a call that is shorter than this
_MOST = 1000  # calls of a turn
_CUDA_WARMUP_MS, _CUDA_TURN_MS = 5, 25


@dataclass(frozen=True)
class Times:
    """Seconds of a call, as often as it was timed."""

    samples: tuple[float, ...]

    def quantile(self, p: float) -> float:
        return float(torch.tensor(self.samples, dtype=torch.float64).quantile(p))

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(p80 - p20) / median."""
        return (self.quantile(0.8) - self.quantile(0.2)) / self.median


def alternate(turns: Sequence[Callable[[], list[float]]], rounds: int) -> list[Times]:
    """Times of each kind of turn. They alternate, there and back, so that a change of clock hits all of them alike."""
    samples: list[list[float]] = [[] for _ in turns]
    for n in range(rounds):
        order = range(len(turns))
        for which in order if n % 2 else reversed(order):
            samples[which] += turns[which]()
    return [Times(tuple(s)) for s in samples]


def turn(call: Callable[[], object], device: torch.device | str = "cpu") -> list[float]:
    """Seconds of a call, warmed up first.

    On a CPU it is ``torch.utils.benchmark``'s, one number: the mean of so many calls that they last 10 ms. On CUDA it
    is Triton's ``do_bench``, a number for each call: events around it, and the cache emptied before it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        from triton.testing import do_bench

        with torch.cuda.device(device):
            return [ms / 1e3 for ms in do_bench(call, _CUDA_WARMUP_MS, _CUDA_TURN_MS, return_mode="all")]
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    once = timer.timeit(1).median
    number = min(_MOST, math.ceil(_TURN_S / once))
    return [once if number == 1 else timer.timeit(number).median]
