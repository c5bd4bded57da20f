"""Jobs in processes of their own: one that hangs, dies or breaks its CUDA context is an answer, and the next one runs.

Compiling kernels is most of the time of a check, and processes compile side by side.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

CUT = "the time was up"  # the error of a job that was running when all time was over


class Done(NamedTuple):
    """A job's result, or the error it ended with."""

    job: Any
    result: Any
    error: str
    seconds: float


def crew(
    work: Callable[[Any, int], Any], jobs: Iterable[Any], workers: int, until: float, limit: float = 150.0
) -> Iterator[Done]:
    """work(job, number of the process) of all jobs, as they end. work and jobs must pickle.

    until: the end of all time, on ``time.monotonic``; a job that runs then ends with the error ``CUT``, and those
    not begun are left out. limit: seconds of one job.
    """
    todo, done = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    for job in jobs:
        todo.put(job)

    def serve(number: int) -> None:
        member = None
        while time.monotonic() < until:
            try:
                job = todo.get_nowait()
            except queue.Empty:
                break
            member = member or _Member(work, number)
            start = time.monotonic()
            result, error, healthy = member.ask(job, min(limit, max(until - start, 0)))
            end = time.monotonic()
            done.put(Done(job, result, CUT if end >= until and not healthy else error, end - start))
            if not healthy:
                member.end()
                member = None
        if member is not None:
            member.end()
        done.put(None)

    threads = [threading.Thread(target=serve, args=(n,), daemon=True) for n in range(workers)]
    for t in threads:
        t.start()
    running = len(threads)
    while running:
        item = done.get()
        if item is None:
            running -= 1
        else:
            yield item


class _Member:
    """A process that takes one job at a time."""

    def __init__(self, work: Callable[[Any, int], Any], number: int):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work, number), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, job: Any, seconds: float) -> tuple[Any, str, bool]:
        """(result, error, whether the process can take another job)."""
        self.pipe.send(job)
        try:
            if not self.pipe.poll(seconds):
                return None, f"stopped after {seconds:.0f} s", False
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return None, f"the process ended with code {self.process.exitcode}", False

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Any, work: Callable[[Any, int], Any], number: int) -> None:
    while True:
        job = pipe.recv()
        try:
            result, error = work(job, number), ""
        except Exception as e:
            result, error = None, told(e)
        pipe.send((result, error, _healthy()))


def told(e: Exception) -> str:
    """An error in a line or two, for a record."""
    return f"{type(e).__name__}: {str(e)[:500]}"


def _healthy() -> bool:
    """Whether this process can go on: after an illegal access every CUDA call of it fails."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
