"""Autotuning, opt-in: with TILEWISE_AUTOTUNE=1 a class of launches gets the fastest of a few configurations.

A class is what ``config.choose`` is asked with (direction, head dims, dtype, mask, changes of the scores, generation of
the GPU), on one GPU model. Its first call runs with the table's configuration and is answered with that result. Then
each neighbour of that configuration runs the same call. One that does not fit the GPU, or whose results are not the
same numbers by the judge's budget, is out; only then is it timed. The winner is kept in memory and in a file under the
user's cache directory, keyed by the GPU, Triton's version and a digest of the kernels. Idea: Helion's tuner, which
checks before it times.

Unless TILEWISE_AUTOTUNE is set, ``Problem.config`` reads one bool and this module does nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from . import config
from .config import Config

ENABLED = os.environ.get("TILEWISE_AUTOTUNE", "0") == "1"

Results = Sequence[Tensor | None]
Timer = Callable[[Callable[[], object]], float]


class Class(NamedTuple):
    """Launches that share a configuration: the GPU's model and the arguments of ``config.choose``."""

    model: str
    asked: tuple[Any, ...]

    def heuristic(self) -> Config:
        return config.choose(*self.asked)

    def name(self) -> str:
        return " ".join(map(str, self.asked))


_chosen: dict[Class, Config] = {}
_tuning = threading.Lock()


class _Here(threading.local):
    """Of one thread: the classes that its calls met untuned, and the configuration on trial."""

    def __init__(self) -> None:
        self.untuned: dict[Class, None] = {}
        self.trial: tuple[Class, Config] | None = None


_here = _Here()


def choose(device: torch.device, *asked: Any) -> Config:
    """``config.choose(*asked)``, tuned: that on trial, the winner, or the table's, which is noted as untuned."""
    key = Class(model(device), asked)
    if _here.trial is not None and _here.trial[0] == key:
        return _here.trial[1]
    if key not in _chosen:
        found = _stored(key.model).get(key.name())
        if found is None:
            _here.untuned[key] = None
            return key.heuristic()
        _chosen[key] = found
    return _chosen[key]


def milliseconds(run: Callable[[], object]) -> float:
    """Median on CUDA events."""
    return triton.testing.do_bench(run, warmup=5, rep=25, return_mode="median")


def settle(run: Callable[[], Results], results: Results, timer: Timer = milliseconds) -> None:
    """Tune the classes that the call which gave ``results`` met untuned; run() repeats that call."""
    keys, _here.untuned = list(_here.untuned), {}
    if not keys or _capturing():
        return
    with _tuning:
        for key in keys:
            if key not in _chosen:
                _chosen[key] = _fastest(key, run, results, timer)
                _store(key.model, key.name(), _chosen[key])
    _here.untuned = {}


def _fastest(key: Class, run: Callable[[], Results], results: Results, timer: Timer) -> Config:
    first = key.heuristic()
    best, least = first, _time(key, first, run, timer)
    for candidate in neighbours(first):
        if _agrees(key, candidate, run, results) and (t := _time(key, candidate, run, timer)) < least:
            best, least = candidate, t
    return best


def neighbours(c: Config) -> list[Config]:
    """Configurations that differ in one number, half or double of it, or in one stage."""
    changes: list[dict[str, Any]] = [{"block_m": m} for m in (c.block_m // 2, c.block_m * 2) if 16 <= m <= 256]
    changes += [{"block_n": n} for n in (c.block_n // 2, c.block_n * 2) if 16 <= n <= 256]
    changes += [{"num_warps": w} for w in (4, 8) if w != c.num_warps]
    changes += [{"num_stages": s} for s in (c.num_stages - 1, c.num_stages + 1) if 1 <= s <= 4]
    return [replace(c, **change) for change in changes]


def _agrees(key: Class, candidate: Config, run: Callable[[], Results], results: Results) -> bool:
    """Whether a candidate fits the GPU and gives the same numbers."""
    from ...testing.judge import compare

    _here.trial = key, candidate
    try:
        mine = run()
    except TritonError:  # more shared memory than there is, or nothing that compiles
        return False
    finally:
        _here.trial = None
    for x, expected in zip(mine, results, strict=True):
        if x is None or expected is None:
            continue
        exact = expected.double()
        if not compare(x.double(), exact, exact, expected.dtype).ok:
            return False
    return True


def _time(key: Class, c: Config, run: Callable[[], Results], timer: Timer) -> float:
    _here.trial = key, c
    try:
        return timer(run)
    finally:
        _here.trial = None


def _capturing() -> bool:
    """Whether a CUDA graph is being captured: nothing can be timed then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@lru_cache
def model(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# --- the file -------------------------------------------------------------------------------------


def cache_file(model: str) -> Path:
    """One file for a GPU model, a version of Triton and a state of the kernels."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"{model.lower().replace(' ', '-')}-triton-{triton.__version__}-{_digest()[:16]}.json"
    return Path(base) / "tilewise" / "autotune" / name


@lru_cache
def _digest() -> str:
    """Of the kernels and their tables, this file left out: how they are tuned changes none of them."""
    sources = sorted(f for f in Path(__file__).parent.glob("*.py") if f.name != Path(__file__).name)
    return hashlib.sha256(b"\0".join(f.name.encode() + b"\0" + f.read_bytes() for f in sources)).hexdigest()


@lru_cache
def _stored(model: str) -> dict[str, Config]:
    """What earlier processes chose, read once; ValueError for a file that is not one of ours."""
    path = cache_file(model)
    if not path.exists():
        return {}
    try:
        return {name: Config(**c) for name, c in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(f"{path} does not hold configurations ({e}): delete it, and it is made anew") from None


def _store(model: str, name: str, c: Config) -> None:
    """Add one to the file, whole or not at all: another process may read it."""
    path = cache_file(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    every = {**(json.loads(path.read_text()) if path.exists() else {}), name: asdict(c)}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
        json.dump(every, f, indent=1)
    os.replace(f.name, path)
