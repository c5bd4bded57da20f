"""``tilewise.doctor()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .report import Report
from .watch import Watch

_watching: list[Watch] = []


@contextmanager
def doctor() -> Iterator[Report]:
    """Watch the block, on a CPU or a GPU, and report on its attention: ``with tilewise.doctor() as report: model(x)``.

    ``report.calls``: each attention call, identical ones together: shapes, dtype, mask, dropout, the kernel that ran,
    every reason why a faster one did not, and what SDPA would run on a CUDA GPU. ``report.findings``: the symptoms,
    with place, shortest check and fix. ``report.by_hand``: dense attention written out. ``report.step``: seconds by
    part. ``str(report)`` is for people, ``report.as_dict()`` for programs.

    Results and gradients keep their bits, and no tensor is kept alive. The block runs slower. Watched are the operators
    of this thread; attention calls of every thread. RuntimeError if a doctor is watching already.
    """
    if _watching:
        raise RuntimeError("a doctor is watching already: one report covers all that runs in its block")
    watch = Watch()
    _watching.append(watch)
    try:
        with watch:
            yield Report(watch)
    finally:
        _watching.pop()
