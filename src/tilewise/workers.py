"""Threads that each take whole pieces of work, in place of threads that share every operation.

A parallel loop inside an operation ends when its slowest thread does, thousands of times in one attention, and leaves
what lies between two operations to a single thread. Pieces that share nothing meet once, at the end: measured on two
cores, the same tiles took a fifth less time, and far less on busy ones (``benchmarks/cpu.py``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")

# Workers beyond these would wait for each other at the interpreter's lock, which a tile needs for about a tenth of its
# time: with more threads than that, each worker gives its operations several.
_MOST = 8
_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def count() -> int:
    """How many pieces are worked on at once: what ``torch.set_num_threads`` allows, up to ``_MOST``."""
    return min(torch.get_num_threads(), _MOST)


def run(pieces: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all pieces, in order. Nothing that one piece writes may be read or written by another."""
    if count() == 1 or len(pieces) < 2:
        return [piece() for piece in pieces]
    start = partial(_quietly, torch.is_inference_mode_enabled())
    return list(_pool().map(start, pieces))


def _quietly(inference: bool, piece: Callable[[], T]) -> T:
    """Run a piece as the caller would: modes belong to a thread. An operator's inside records no gradients."""
    with torch.inference_mode(inference), torch.no_grad():
        return piece()


def _pool() -> ThreadPoolExecutor:
    """The workers for this process (a fork has none of its parent's threads) and this number of threads."""
    threads, workers = torch.get_num_threads(), count()
    with _lock:
        if (os.getpid(), threads) not in _pools:
            ready = threading.Barrier(workers + 1)
            pool = ThreadPoolExecutor(workers, "tilewise", _give_threads, (threads // workers, ready))
            for _ in range(workers):  # each starts a thread
                pool.submit(int)
            ready.wait()
            torch.set_num_threads(threads)  # a thread's own number is also PyTorch's default for threads to come
            _pools[os.getpid(), threads] = pool
    return _pools[os.getpid(), threads]


def _give_threads(n: int, ready: threading.Barrier) -> None:
    torch.get_num_threads()  # the first question sets the default, which would undo what follows
    torch.set_num_threads(n)
    ready.wait()
