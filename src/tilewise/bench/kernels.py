"""What really ran, by torch.profiler: kernels on CUDA and the gaps between them, PyTorch's operators on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_CALLS = 3  # profiled on CUDA: the gap between one call and the next counts too
_SHOWN = 8  # operators of a CPU call


class Span(NamedTuple):
    """One kernel's run, in nanoseconds."""

    name: str
    start: int
    end: int


class Profile(NamedTuple):
    """Names with calls and seconds in one call, the longest first; gap is the share of time without a kernel."""

    kernels: list[dict[str, Any]]
    gap: float | None


def profiled(call: Callable[[], object], device: torch.device | str) -> Profile:
    """Kernels of a call that has run before. The profiler itself delays launches: gaps are an upper bound."""
    if torch.device(device).type != "cuda":
        with profile(activities=[ProfilerActivity.CPU]) as p:
            call()
        return Profile(_operators(p), None)
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(_CALLS):
            call()
        torch.cuda.synchronize(device)
    spans = _spans(p)
    return Profile(by_name(spans, _CALLS), gap_share(spans))


def _spans(p: profile) -> list[Span]:
    assert p.profiler is not None
    results: Any = p.profiler.kineto_results
    cuda = torch.autograd.DeviceType.CUDA
    return [
        Span(e.name(), e.start_ns(), e.start_ns() + e.duration_ns())
        for e in results.events()
        if e.device_type() == cuda and not e.is_user_annotation()
    ]


def by_name(spans: Iterable[Span], calls: int) -> list[dict[str, Any]]:
    """Calls and seconds of each kernel name in one of ``calls`` calls, the longest first."""
    found: dict[str, list[int]] = {}
    for s in spans:
        found.setdefault(s.name, []).append(s.end - s.start)
    rows = [{"name": n, "calls": len(t) / calls, "seconds": sum(t) / calls / 1e9} for n, t in found.items()]
    return sorted(rows, key=lambda row: -row["seconds"])


def gap_share(spans: Iterable[Span]) -> float | None:
    """Of the time from the first start to the last end, the share in which nothing ran. None without kernels."""
    ordered = sorted(spans, key=lambda s: s.start)
    if not ordered:
        return None
    busy, reached = 0, ordered[0].start
    for s in ordered:
        busy += max(0, s.end - max(s.start, reached))
        reached = max(reached, s.end)
    whole = reached - ordered[0].start
    return 1 - busy / whole if whole else 0.0


def _operators(p: profile) -> list[dict[str, Any]]:
    """PyTorch's operators by the time they took themselves."""
    events = sorted(p.key_averages(), key=lambda e: -e.self_cpu_time_total)
    rows = [{"name": e.key, "calls": e.count, "seconds": e.self_cpu_time_total / 1e6} for e in events]
    return [row for row in rows if row["seconds"] > 0][:_SHOWN]
