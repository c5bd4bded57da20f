"""Where a step's time goes, by part, from torch.profiler; and which lines of Python run while no operator does.

A step ends with an optimizer's step, or where there is none with the outermost call of a module in eval mode; without
either the whole block is one. The first is warm-up. One profile spans them, with a mark at each end: PyTorch crashes
when a range that one session saw begin, such as Optimizer.step, ends in the next.

The doctor's own time is inside the profile and is taken out: an operator that the watch hands on appears twice, one
inside the other, and what only the outer one has is the watch. On a GPU, which works on while the host is watched, that
does not give the step's length: there the next steps run alone, neither profiled nor watched, and theirs is taken.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .records import Place, place

ATTENTION, MATMUL, NORM, ELEMENTWISE = "attention", "matmul, linear, convolution", "norm", "elementwise"
MOVEMENT, LOADING, COMMUNICATION = "data movement", "data loading", "communication"
OPTIMIZER, OTHER, GAPS = "optimizer", "other operators", "no operator (Python, launches)"
PARTS = (ATTENTION, MATMUL, NORM, ELEMENTWISE, MOVEMENT, LOADING, COMMUNICATION, OPTIMIZER, OTHER, GAPS)
TRAINING, FORWARD, BLOCK = "training", "forward", "block"
DOCTOR, MARK = "tilewise doctor", "tilewise step"  # its own ranges in the profile

ENOUGH = 3  # steps, for a median that one interruption does not move
MOST_STEPS = 1 + ENOUGH  # profiled of a kind: the first is warm-up
MOST_OPERATORS = 50_000  # profiled: beyond, their events would fill the memory
_PERIOD = 0.004  # seconds between two looks at the Python stack

# A range of these names owns the time of all within it; any other event owns the time of its own.
_RANGES = (
    ("Optimizer.step", OPTIMIZER),
    ("enumerate(DataLoader)", LOADING),
    ("aten::scaled_dot_product_attention", ATTENTION),
    ("aten::_scaled_dot_product", ATTENTION),
    ("aten::_native_multi_head_attention", ATTENTION),
    ("ScaledDotProduct", ATTENTION),
    ("tilewise::", ATTENTION),
    ("nccl:", COMMUNICATION),
    ("gloo:", COMMUNICATION),
    ("c10d::", COMMUNICATION),
)
_WORDS = (
    (ATTENTION, r"softmax|attention"),
    (NORM, r"norm(_|$)"),
    (MATMUL, r"mm(_|$)|linear|matmul|conv|einsum|(^|_)(dot|mv)(_|$)"),
    (
        MOVEMENT,
        r"copy|clone|contiguous|memcpy|(^|_)(cat|stack|index|gather|scatter|embedding|repeat|roll|flip|pin)(_|$)",
    ),
    (
        ELEMENTWISE,
        r"(^|_)(add|sub|rsub|mul|div|addcmul|addcdiv|lerp|exp|log|pow|sqrt|rsqrt|neg|abs|gelu|relu|silu|sigmoid|tanh|where"
        r"|masked|dropout|bernoulli|clamp|threshold|fill|zero|zeros|ones|full|sin|cos|eq|ne|lt|gt|le|ge|bitwise|logical"
        r"|tril|triu)(_|$)",
    ),
)


class Step(NamedTuple):
    """Seconds of a step by part, the doctor's own left out."""

    kind: str  # TRAINING, FORWARD or BLOCK
    seconds: float
    parts: dict[str, float]

    def lasting(self, seconds: float) -> Step:
        """The same parts in a step of that length, or of their sum if that is more: what is left is a gap."""
        parts = {name: s for name, s in self.parts.items() if name != GAPS and s > 0}
        total = max(seconds, sum(parts.values()))
        return Step(self.kind, total, {**parts, GAPS: total - sum(parts.values())})


class StepTimes:
    """Profiles the first steps, and on a GPU times the ones after them alone."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.alone: list[float] = []  # seconds of the steps that ran without the doctor
        self.inflated = False  # the doctor's own time is in the steps
        self.notes: set[str] = set()
        self._operators = 0
        self._kinds: list[str] = []
        self._profile: profile | None = None
        self._events: list[Any] = []
        self._last = self._longest = 0.0  # the last mark, and the longest time between two

    def start(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            self.notes.add("the step's time: another profiler runs")
            return
        on = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=on)
        with _quiet():
            self._profile.__enter__()
        self._mark()

    def count(self) -> None:
        """One more operator ran."""
        self._operators += 1
        if self._operators == MOST_OPERATORS:
            self._stop()

    def cut(self, kind: str) -> bool:
        """A step ends here. Whether the next one should run alone."""
        if self._profile is None or self._kinds.count(kind) == MOST_STEPS:
            return False
        self._kinds.append(kind)
        self._mark()
        enough = self._kinds.count(kind) == MOST_STEPS
        if enough and (kind == TRAINING or on_gpu()):
            self._stop()
        return enough and on_gpu()

    def begin_alone(self) -> None:
        """A step that runs alone begins."""
        _wait()
        self._last = time.perf_counter()

    def cut_alone(self) -> bool:
        """A step that ran alone ends here. Whether the next one should, too."""
        _wait()
        self.alone.append(time.perf_counter() - self._last)
        return len(self.alone) < ENOUGH

    def overdue(self) -> bool:
        """Whether the step that runs alone takes longer than one with the doctor: no more steps of its kind come."""
        return time.perf_counter() - self._last > self._longest

    def finish(self) -> None:
        """The steps from the marks; what comes after the last mark is the block, if there was no other."""
        if self._profile is not None:
            if not self._kinds:
                self._kinds.append(BLOCK)
                self._mark()
            self._stop()
        if not self._kinds and not self.notes:
            self.notes.add(f"the step's time: it has more than {MOST_OPERATORS} operators")
        if self._kinds and not self._events:
            self.notes.add("the step's time: another profiler took over")
        self.steps = split(self._kinds, self._events)
        self._events = []
        if self.steps and not self.alone and on_gpu():
            self.inflated = True
            self.notes.add(
                "the step's length on a GPU without the doctor's own time: the step after the first "
                f"{MOST_STEPS} would show it"
            )

    def typical(self) -> Step | None:
        """The median step, as long as the median of those that ran alone if some did."""
        step = median(self.steps)
        return step.lasting(statistics.median(self.alone)) if step is not None and self.alone else step

    def _mark(self) -> None:
        _wait()
        now = time.perf_counter()
        self._last, self._longest = now, max(self._longest, now - self._last if self._last else 0.0)
        with record_function(MARK):
            pass

    def _stop(self) -> None:
        p, self._profile = self._profile, None
        if p is not None:
            p.__exit__(None, None, None)
            self._events = list(p.events() or ())


def on_gpu() -> bool:
    """Whether this process uses one."""
    return torch.cuda.is_initialized()


def _wait() -> None:
    if on_gpu():
        torch.cuda.synchronize()


@contextmanager
def _quiet() -> Iterator[None]:
    """torch 2.13's profiler announces every start and stop on stderr, unless it finds this when it first starts."""
    name = "KINETO_LOG_LEVEL"
    mine = name not in os.environ
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if mine:
            del os.environ[name]


def split(kinds: list[str], events: list[Any]) -> list[Step]:
    """The steps between the marks in a profile's events."""
    tops = list(_tops(e for e in events if e.cpu_parent is None and e.device_type == torch.autograd.DeviceType.CPU))
    marks = sorted(e.time_range.start for e in events if e.name == MARK)
    steps = []
    for kind, begin, end in zip(kinds, marks, marks[1:], strict=False):
        mine = [e for e in tops if begin <= e.time_range.start < end and e.name != MARK]
        steps.append(fold(kind, (end - begin) * 1e-6, mine))
    return steps


def _tops(events: Iterable[Any]) -> Iterator[Any]:
    """Without the user's own labels, which may span many steps: what is in them."""
    for e in events:
        if _is_label(e):
            yield from _tops(e.cpu_children)
        else:
            yield e


def _is_label(event: Any) -> bool:
    return event.is_user_annotation and event.name not in (DOCTOR, MARK) and _range(event.name) is None


def _range(name: str) -> str | None:
    return next((part for prefix, part in _RANGES if name.startswith(prefix)), None)


def fold(kind: str, seconds: float, events: Iterable[Any]) -> Step:
    """A step from its outermost events. On a GPU the parts are device time, and the host's time beyond it is a gap."""
    host: dict[str, float] = defaultdict(float)
    device: dict[str, float] = defaultdict(float)
    for event in events:
        _descend(event, host, device)
    own, busy = host.pop(DOCTOR, 0.0), sum(device.values())
    found = {**device, LOADING: host[LOADING]} if busy > 0 else host
    return Step(kind, 0.0, {name: found[name] for name in PARTS if name in found}).lasting(seconds - own)


def _descend(top: Any, host: dict[str, float], device: dict[str, float]) -> None:
    """Adds the seconds of an event and of all events in it to their parts."""
    todo: list[tuple[Any, str | None]] = [(top, None)]
    while todo:
        event, owner = todo.pop()
        if event.name == DOCTOR:
            host[DOCTOR] += event.cpu_time_total * 1e-6
            continue
        owner = owner or _range(event.name)
        part = owner or part_of(event.name)
        if any(c.name == event.name for c in event.cpu_children):  # the watch handed it on
            host[DOCTOR] += event.self_cpu_time_total * 1e-6
        elif owner is not None or not event.is_user_annotation:  # a label's own time is a gap
            host[part] += event.self_cpu_time_total * 1e-6
        device[part] += event.self_device_time_total * 1e-6
        todo += [(c, owner) for c in event.cpu_children]


def part_of(name: str) -> str:
    """The part that an operator's own time belongs to."""
    space, _, word = name.rpartition("::")
    if not space or " " in word:  # a node or a function of the autograd engine: what it runs has names of its own
        return OTHER
    return next((part for part, pattern in _WORDS if re.search(pattern, word.strip("_"))), OTHER)


def of_one_kind(steps: list[Step]) -> list[Step]:
    """The training steps; without any, the forward ones, or the block."""
    kinds = [[s for s in steps if s.kind == kind] for kind in (TRAINING, FORWARD, BLOCK)]
    return next((mine for mine in kinds if mine), [])


def median(steps: list[Step]) -> Step | None:
    """The typical step: medians by part over the steps of one kind after the first, which is warm-up."""
    mine = of_one_kind(steps)
    if not mine:
        return None
    after = mine[1:] or mine
    parts = {p: statistics.median(s.parts.get(p, 0.0) for s in after) for p in PARTS}
    return Step(mine[0].kind, statistics.median(s.seconds for s in after), {p: x for p, x in parts.items() if x > 0})


class Sampler(threading.Thread):
    """Looks at the watched thread's Python stack now and then, and counts its line where no operator runs."""

    def __init__(self, busy: Any) -> None:
        super().__init__(name="tilewise doctor", daemon=True)
        self.lines: Counter[Place] = Counter()
        self._busy, self._watched, self._over = busy, threading.get_ident(), threading.Event()

    def run(self) -> None:
        while not self._over.wait(_PERIOD):
            if not self._busy() and (frame := sys._current_frames().get(self._watched)) is not None:
                if (where := place(frame)) is not None:
                    self.lines[where] += 1
                del frame  # a frame kept here would keep its tensors

    def stop(self) -> None:
        self._over.set()
        self.join()
