"""What the doctor writes down: plain values, no tensors, so that nothing the model made is kept alive."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from .. import dispatch
from ..dispatch import Reason
from ..testing.judge import Measured

# The article's six symptoms, in its order.
REFUSED = "forced flash refused"
NAN_ROW = "a row of NaN"
RUN_TO_RUN = "inference differs from run to run"
QUADRATIC = "memory still grows as L²"
NOT_EQUAL = "not bit-equal to the baseline"
SLOW_STEP = "fast kernel, slow step"
SYMPTOMS = (REFUSED, NAN_ROW, RUN_TO_RUN, QUADRATIC, NOT_EQUAL, SLOW_STEP)

_OURS = tuple(str(Path(x).parent) + os.sep for x in (torch.__file__, dispatch.__file__))


class Place(NamedTuple):
    """A line of the code that called PyTorch."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        here = os.path.relpath(self.file)
        return f"{self.file if here.startswith('..') else here}:{self.line} in {self.function}"


def place(frame: FrameType | None = None) -> Place | None:
    """The innermost frame outside of PyTorch and tilewise."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(_OURS) or file.startswith("<frozen")):
            return Place(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


class Allocation(NamedTuple):
    """Where a tensor's memory was taken: by the watch (``place``), or before it as a module's ``buffer``."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    operator: str = ""
    place: Place | None = None
    buffer: str = ""


class MaskFacts(NamedTuple):
    """An attn_mask: its shape, its memory, and the tilewise mask that says the same, where one was recognised."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool
    memory: Allocation
    same_as: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" + (f" (the same as {self.same_as})" if self.same_as else "")


class NanRow(NamedTuple):
    """Rows of one attention output that are NaN: index tuples such as (batch, head, query)."""

    axes: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]  # the first ``MOST_ROWS``
    total: int
    masked: bool  # all keys of these rows are masked; else the NaN comes from the inputs


MOST_ROWS = 64


@dataclass
class Call:
    """Identical attention calls: same arguments but for the data, same line, same mode. ``modules`` counts them."""

    api: str
    place: Place | None
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    device: str
    ran: str | None = None  # the kernel or the tilewise backend; None: it raised
    mask: MaskFacts | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    grads: bool = False
    training: bool | None = None  # of the module that made the call; None: no module did
    allowed: tuple[str, ...] = ()  # SDPA kernels switched on
    error: str = ""
    reasons: dict[str, list[Reason]] = field(default_factory=dict)  # kernel or backend -> why it did not run here
    on_cuda: str = ""  # what SDPA would run on a CUDA GPU
    on_cuda_reasons: dict[str, list[Reason]] = field(default_factory=dict)
    changes: dict[str, list[str]] = field(default_factory=dict)  # refused kernel -> the changes that would do
    tilewise: str | None = None  # what tilewise.attention would run
    numerics: Measured | None = None  # a cut of the first output against fp64
    bit_equal: bool | None = None  # whether that cut has the bits of the dense computation in its dtype
    nan: NanRow | None = None
    note: str = ""
    modules: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.modules.values())

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query[-2], self.key[-2]


@dataclass
class ByHand:
    """A matmul, a softmax and a matmul of its result: dense attention written out. Places of the three."""

    scores: Place | None
    softmax: Place | None
    average: Place | None
    shape: tuple[int, ...]  # of the scores, (..., Lq, Lk)
    dtype: str
    tensors: int  # of that size, from the scores to the last product
    made_bytes: int
    alive_bytes: int  # of them at the last product: what a backward keeps is among these
    dropout_p: float = 0.0
    training: bool | None = None
    nan: NanRow | None = None
    modules: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.modules.values())


class Comparison(NamedTuple):
    """The user's code asked whether an attention output equals something bit for bit, and it does not."""

    place: Place | None
    operator: str
    call: Call | None  # whose output it was; None: of attention by hand
    times: int


class Finding(NamedTuple):
    """One symptom at one place: what was seen, its shortest check, and the change that would work."""

    symptom: str
    place: Place | None
    modules: tuple[str, ...]
    times: int
    seen: str
    check: str
    fix: str
    bytes: int = 0  # of the L x L tensors

    def as_dict(self) -> dict[str, Any]:
        where = None if self.place is None else self.place._asdict()
        return {**self._asdict(), "place": where, "modules": list(self.modules)}


def large(shape: tuple[int, ...]) -> bool:
    """Whether a (..., Lq, Lk) tensor is worth a word: 256 x 256 entries or more, and no row or column."""
    return len(shape) >= 2 and min(shape[-2:]) >= 64 and shape[-2] * shape[-1] >= 2**16


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size(n: float) -> str:
    """Bytes for people."""
    for unit, at in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= at:
            return f"{n / at:.1f} {unit}"
    return f"{n:.0f} B"
