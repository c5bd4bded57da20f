"""Peak memory of a block of code: what tests and ``tilewise demo`` mean by "linear in the length"."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class PeakMemory:
    """Within the block, the most bytes of tensor storage alive at once beyond those alive at its start.

        with PeakMemory() as memory:
            attention(q, k, v)
        memory.peak, memory.kept  # bytes; kept is what was still there at the end

    On a CPU every allocation of PyTorch's allocator is counted to the byte, by torch.profiler: also those inside an
    operator such as ``tilewise::forward``, which a TorchDispatchMode does not see. Not counted are buffers that a
    BLAS takes from the system, and allocations of other threads; so within the block PyTorch has one thread. With
    more, ``tiled`` works on as many tiles at once, each with a few MiB of its own.
    The profiler slows small operations, so take times without the meter, and do not nest it in another profiler.

    On CUDA it is the allocator's own count, which is the whole process's. Keep tensors from before the block alive
    within it: releasing one lowers the count on CUDA, and on a CPU too if it was allocated in an earlier block.
    What only the garbage collector would release is released before the start, so that it does not do so within.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"PeakMemory measures on cpu and cuda, got {self.device}")
        self.peak = self.kept = 0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(1)
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._start
            self.kept = torch.cuda.memory_allocated(self.device) - self._start
        else:
            self._profile.__exit__(*error)
            torch.set_num_threads(self._threads)
            self.peak, self.kept = peak_of(_changes(self._profile))
            del self._profile  # its events are far larger than what they tell


def peak_of(changes: Iterable[int]) -> tuple[int, int]:
    """The highest and the last value of a running sum that starts at 0."""
    levels = list(accumulate(changes, initial=0))
    return max(levels), levels[-1]


def _changes(p: profile) -> list[int]:
    """Bytes of each allocation (positive) and release (negative) on the CPU, in order of time."""
    assert p.profiler is not None
    results: Any = p.profiler.kineto_results  # the type stubs do not know the fields of an allocation
    events = results.events()
    memory = [e for e in events if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU]
    return [e.nbytes() for e in sorted(memory, key=lambda e: e.start_ns())]
