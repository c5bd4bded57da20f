"""The sweep: each backend is asked, checked, timed in turns with the others, and looked into. One row a measurement.

Nothing that a backend does ends a sweep: what it raises is the reason in its row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import cli, iomodel
from ..memory import PeakMemory
from . import adapters, ncu
from .adapters import Adapter
from .cases import Case, Inputs, checkable, inputs, leaves
from .check import Check, judged
from .kernels import Profile, profiled
from .timing import Times, alternate, turn

Row = dict[str, Any]
Call = Callable[[], object]
Say = Callable[[str], None]

WRONG = "wrong result, so it is not timed"
_LONGEST_REASON = 600


class Settings(NamedTuple):
    """How a sweep measures; what it measures are the cases."""

    device: str
    backends: tuple[str, ...]
    directions: tuple[str, ...]
    rounds: int = 5
    seed: int = 0
    ncu: str | None = None  # the program, to count the bytes that DRAM moved


@dataclass
class Entry:
    """One backend in one direction, on its way to a row."""

    adapter: Adapter
    direction: str
    reason: str | None = None
    check: Check | None = None
    call: Call | None = None
    times: Times | None = None
    peak: int | None = None
    profile: Profile | None = None
    dram: ncu.Dram | None = None
    dram_reason: str | None = None

    def attempt(self, step: Callable[[], object]) -> None:
        """Take a step, unless one has failed before; what it raises is the reason."""
        if self.reason is None:
            try:
                step()
            except Exception as e:  # the row says so, and the sweep goes on
                self.reason = words(e)
                if isinstance(e, torch.OutOfMemoryError):
                    torch.cuda.empty_cache()

    def turn(self, device: str) -> list[float]:
        """Times of one turn; none after a failure."""
        seconds: list[float] = []
        call = self.call
        if call is not None:
            self.attempt(lambda: seconds.extend(turn(call, device)))
        return seconds


def words(e: Exception) -> str:
    return f"{type(e).__name__}: {e}"[:_LONGEST_REASON]


def sweep(cases: Sequence[Case], how: Settings, say: Say = lambda _: None) -> Iterator[Row]:
    """Rows in the order of the cases, the backends and the directions; all have the same keys."""
    about = surroundings(how)
    ceilings = {}
    for dtype in dict.fromkeys(case.dtype for case in cases):
        say(f"what a {dtype} matmul and a copy reach")
        ceilings[dtype] = iomodel.measure_ceilings(how.device, getattr(torch, dtype))
    for case in cases:
        for row in _measure(case, how, ceilings[case.dtype], say):
            yield {**row, **about, "measured_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def surroundings(how: Settings) -> Row:
    """What is the same for the whole sweep."""
    device = torch.device(how.device)
    cuda = torch.device("cuda", device.index or 0)
    found = cli.devices()[str(cuda) if device.type == "cuda" else "cpu"]
    versions = cli.versions() | {"cuda": torch.version.cuda}
    for name in how.backends:
        adapter = adapters.get(name)
        if adapter.available() is None and (version := adapter.version()):
            versions[name] = version
    return {"device": how.device, "device_facts": found, "versions": versions, "seed": how.seed, "rounds": how.rounds}


def _measure(case: Case, how: Settings, ceilings: iomodel.Ceilings, say: Say) -> Iterator[Row]:
    entries = [Entry(adapters.get(n), d) for n in how.backends for d in _timed(how.directions)]
    try:
        made = inputs(case, how.device, how.seed)
        counted = iomodel.cost(made.request)
    except Exception as e:  # a mask of another length, or no memory: the same for every backend
        for entry in entries:
            if entry.direction in how.directions:
                yield row_of(case, replace(entry, reason=words(e)), None, None, ceilings)
        return
    _prepare(entries, made, lambda name: say(f"{case}: is {name} right?"))
    for direction in _timed(how.directions):
        running = [e for e in entries if e.direction == direction and e.reason is None]
        say(f"{case}: {direction} of {', '.join(e.adapter.name for e in running)}")
        times = alternate([partial(e.turn, how.device) for e in running], how.rounds)
        for entry, t in zip(running, times, strict=True):
            entry.times = t
            if direction in how.directions:
                entry.attempt(partial(_look_into, entry, case, how))
    steps = {e.adapter.name: e.times for e in entries if e.direction == "both" and e.reason is None}
    for entry in entries:
        if entry.direction in how.directions:
            yield row_of(case, entry, counted, steps.get(entry.adapter.name), ceilings)


def _timed(directions: tuple[str, ...]) -> tuple[str, ...]:
    """Whoever asks for a backward is told the time of a whole step too."""
    return directions if set(directions) <= {"forward", "both"} else tuple(dict.fromkeys((*directions, "both")))


# --- before it is timed -----------------------------------------------------------------------------


class Prepared(NamedTuple):
    forward: Callable[[], Tensor]
    check: Check


def _prepare(entries: list[Entry], made: Inputs, say: Say) -> None:
    """Give each entry its call, or the reason why it has none."""
    trained = Inputs(leaves(made.request), made.dout)
    done: dict[tuple[str, bool], Prepared] = {}

    def step(entry: Entry) -> None:
        grad = entry.direction != "forward"
        key = entry.adapter.name, grad
        given = trained if grad else made
        if key not in done:
            reason = entry.adapter.available() or entry.adapter.why_not(given.request)
            if reason is not None:
                entry.reason = reason
                return
            done[key] = _checked(entry.adapter, given)
        entry.check = done[key].check
        if entry.check.wrong:
            entry.reason = f"{WRONG}: {entry.check.wrong}"
        else:
            entry.call = _call(done[key].forward, given, entry.direction)

    for entry in entries:
        say(entry.adapter.name)
        entry.attempt(partial(step, entry))


def _checked(adapter: Adapter, given: Inputs) -> Prepared:
    r = given.request
    known = checkable(r, adapter.why_not(replace(r, seeded=True)) is None)
    forward = adapter.prepare(r)
    return Prepared(forward, judged(known, given.dout, forward if known is r else adapter.prepare(known)))


def _call(forward: Callable[[], Tensor], given: Inputs, direction: str) -> Call:
    """What is timed. forward: without gradients; backward: alone, on one graph; both: a training step."""
    if direction == "forward":
        return forward
    wanted = (given.request.q, given.request.k, given.request.v)
    if direction == "both":
        return lambda: torch.autograd.grad(forward(), wanted, given.dout)
    out = forward()
    return lambda: torch.autograd.grad(out, wanted, given.dout, retain_graph=True)


def call_of(cell: ncu.Cell) -> Call:
    """The call of a cell alone, not checked: for a profiler."""
    given = inputs(cell.case, cell.device, cell.seed)
    if cell.direction != "forward":
        given = given._replace(request=leaves(given.request))
    return _call(adapters.get(cell.backend).prepare(given.request), given, cell.direction)


# --- after it is timed ------------------------------------------------------------------------------


def _look_into(entry: Entry, case: Case, how: Settings) -> None:
    assert entry.call is not None
    with PeakMemory(how.device) as memory:
        kept = entry.call()
    del kept
    entry.peak = memory.peak
    entry.profile = profiled(entry.call, how.device)
    if how.ncu is not None:
        cell = ncu.Cell(case, entry.adapter.name, entry.direction, how.device, how.seed)
        try:
            entry.dram = ncu.dram(how.ncu, cell)
        except RuntimeError as e:  # the time stands without it
            entry.dram_reason = str(e)[:_LONGEST_REASON]


def row_of(case: Case, e: Entry, counted: iomodel.Cost | None, step: Times | None, ceilings: iomodel.Ceilings) -> Row:
    """A row; None stands for what was not measured. Units are in the names (docs/bench.md has them all)."""
    times = e.times if e.reason is None else None
    row: Row = {
        **case.to_dict(),
        "backend": e.adapter.name,
        "direction": e.direction,
        "reason": e.reason,
        "check": None if e.check is None else e.check.to_dict(),
        "samples": None if times is None else len(times.samples),
        "p20_s": None if times is None else times.quantile(0.2),
        "p50_s": None if times is None else times.median,
        "p80_s": None if times is None else times.quantile(0.8),
        "spread": None if times is None else times.spread,
        "step_s": None if times is None or step is None else step.median,
        "peak_bytes": e.peak,
        "kernels": None if e.profile is None else e.profile.kernels,
        "gap_share": None if e.profile is None else e.profile.gap,
        "dram_bytes": None if e.dram is None else e.dram.read + e.dram.write,
        "dram_reason": e.dram_reason,
        "matmul_ceiling_tflops": ceilings.matmul_flops_per_s / 1e12,
        "copy_ceiling_gb_per_s": ceilings.copy_bytes_per_s / 1e9,
    }
    return row | _model(case, e, counted, times, ceilings)


def _model(case: Case, e: Entry, counted: iomodel.Cost | None, times: Times | None, ceilings: iomodel.Ceilings) -> Row:
    """What follows from FLOPs and bytes counted by ``iomodel``, and from the time."""
    names = (
        "flops", "model_bytes", "intensity", "predicted_s", "tflops", "tokens_per_s", "matmul_share", "copy_share",
        "predicted_to_measured",
    )  # fmt: skip
    if counted is None:
        return dict.fromkeys(names)
    flops = sum(w.flops for w in _passes(counted.tiled, e.direction))  # what the mask keeps, whoever computes it
    passes = _passes(counted.standard if e.adapter.stores_scores else counted.tiled, e.direction)
    moved = sum(w.bytes for w in passes)
    predicted = sum(iomodel.predicted_seconds(w, ceilings) for w in passes)
    found = (flops, moved, flops / moved if moved else None, predicted)
    if times is None:
        return dict.fromkeys(names) | dict(zip(names, found, strict=False))
    s = times.median
    measured = (
        flops / s / 1e12, case.batch * case.length / s, flops / s / ceilings.matmul_flops_per_s,
        moved / s / ceilings.copy_bytes_per_s, predicted / s,
    )  # fmt: skip
    return dict(zip(names, found + measured, strict=True))


def _passes(p: iomodel.Pipeline, direction: str) -> tuple[iomodel.Work, ...]:
    return {"forward": (p.forward,), "backward": (p.backward,), "both": (p.forward, p.backward)}[direction]
