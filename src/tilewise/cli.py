"""The ``tilewise`` command: what each subcommand finds out, as plain data.

``main`` starts it; the options and the tables are in ``console.py``, which needs the extra ``cli`` (typer and rich).
Nothing here does, and nothing in tilewise imports either.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from . import __version__, api, dispatch, iomodel
from .api import AuxRequest
from .maskexpr import parse_mask
from .testing import Problem, Verdict, judge, problems

Facts = dict[str, Any]
Track = Callable[[list], Iterable]  # hands a list through, and may show progress


def main() -> None:
    """Entry point of the console script."""
    if not (importlib.util.find_spec("typer") and importlib.util.find_spec("rich")):
        print("the tilewise command needs typer and rich: pip install 'tilewise[cli]'", file=sys.stderr)
        raise SystemExit(1)
    # torch 2.13's profiler, which measures memory for the demo, announces every start and stop on stderr
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    importlib.import_module("tilewise.console").app()


# --- info -----------------------------------------------------------------------------------------


def info() -> Facts:
    """Versions, devices, and which backend can run a plain call on which device."""
    plain = {device: plain_call(device) for device in devices()}
    backends = {
        name: {
            "summary": backend.summary,
            "devices": {device: [r._asdict() for r in answer.reasons[name]] for device, answer in plain.items()},
        }
        for name, backend in dispatch.BACKENDS.items()
    }
    return {
        "versions": versions(),
        "devices": devices(),
        "plain_call": {device: answer.request.splitlines()[0] for device, answer in plain.items()},
        "automatic": {device: answer.chosen for device, answer in plain.items()},
        "backends": backends,
        "TILEWISE_BACKEND": os.environ.get("TILEWISE_BACKEND"),
    }


def versions() -> dict[str, str | None]:
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None
    return {"tilewise": __version__, "torch": torch.__version__, "triton": triton, "python": platform.python_version()}


def devices() -> dict[str, Facts]:
    """Name, capability and size of the CPU and of each CUDA device."""
    cpu = {
        "name": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    return {"cpu": cpu} | {f"cuda:{n}": _cuda_device(n) for n in range(torch.cuda.device_count())}


def _cuda_device(n: int) -> Facts:
    p = torch.cuda.get_device_properties(n)
    return {"name": p.name, "capability": f"sm_{p.major}{p.minor}", "memory_bytes": p.total_memory}


def plain_call(device: str, dtype: torch.dtype | None = None) -> dispatch.Explanation:
    """What runs attention(q, k, v) without options, by AUTO's order; the reasons are those of all backends."""
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    x = torch.empty(1, 8, 1024, 64, dtype=dtype, device=device)
    return api.explain(x, x, x, backend=dispatch.AUTO)


# --- explain --------------------------------------------------------------------------------------


class Described(NamedTuple):
    """A call described on the command line."""

    shape: str
    kv: str | None = None
    dtype: str = "fp32"
    device: str = "cpu"
    mask: str | None = None
    softcap: float | None = None
    dropout: float = 0.0
    sinks: bool = False
    bias: str | None = None
    grad: bool = False
    lse: bool = False
    backend: str | None = None


def explain(call: Described) -> dispatch.Explanation:
    """``tilewise.explain`` of that call; ValueError for what cannot be read or does not fit together."""
    return api.explain(**_arguments(call))


def _arguments(call: Described) -> Facts:
    """The arguments of ``attention`` for that call."""
    b, heads, len_q, dim = shape = parse_shape("--shape B,Hq,Lq,D", call.shape)
    kv = shape if call.kv is None else parse_shape("--kv B,Hkv,Lk,Dv", call.kv)
    check_device(call.device)

    def room(*sizes: int) -> torch.Tensor:
        try:
            return torch.empty(sizes, dtype=parse_dtype(call.dtype), device=call.device, requires_grad=call.grad)
        except RuntimeError as e:
            raise ValueError(f"{sizes} does not fit on {call.device}; --device meta needs no memory ({e})") from None

    return {
        "query": room(b, heads, len_q, dim),
        "key": room(*kv[:3], dim),
        "value": room(*kv),
        "mask": None if call.mask is None else parse_mask(call.mask),
        "bias": None if call.bias is None else room(*parse_shape("--bias B,H,Lq,Lk", call.bias)),
        "softcap": call.softcap,
        "sinks": room(heads) if call.sinks else None,
        "dropout_p": call.dropout,
        "backend": call.backend,
        "return_aux": AuxRequest(lse=True) if call.lse else None,
    }


def cost(call: Described) -> Facts:
    """``iomodel.cost`` of that call and, but on meta, the ceilings measured now and the least time they allow."""
    a = _arguments(call)
    r = api._request(
        a["query"], a["key"], a["value"], a["mask"], a["bias"], None, a["softcap"], a["sinks"], None,
        aux=a["return_aux"], dropout=(a["dropout_p"], None, None),
    )  # fmt: skip
    counted = iomodel.cost(r)
    ceilings = None if r.device.type == "meta" else iomodel.measure_ceilings(r.device, r.dtype)

    def work(w: iomodel.Work) -> Facts:
        seconds = None if ceilings is None else iomodel.predicted_seconds(w, ceilings)
        return {**w._asdict(), "intensity": w.intensity, "predicted_seconds": seconds}

    return {
        **counted._asdict(),
        **{name: {x: work(w) for x, w in getattr(counted, name)._asdict().items()} for name in ("standard", "tiled")},
        "machine": counted.machine._asdict(),
        "ceilings": None if ceilings is None else ceilings._asdict(),
    }


def parse_shape(option: str, text: str) -> tuple[int, int, int, int]:
    """Four sizes; ValueError names the option that they belong to."""
    words = [w.strip() for w in text.split(",")]
    if len(words) != 4 or not all(w.isdecimal() for w in words):
        raise ValueError(f"{option} takes four sizes, such as 1,8,1024,64; got {text!r}")
    b, h, n, d = map(int, words)
    return b, h, n, d


_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_dtype(text: str) -> torch.dtype:
    """fp32, bf16, ... or PyTorch's own name."""
    names = _DTYPES | {str(d).removeprefix("torch."): d for d in _DTYPES.values()}
    if text not in names:
        raise ValueError(f"unknown dtype {text!r}; there are {', '.join(names)}")
    return names[text]


def check_device(text: str) -> None:
    """ValueError unless tensors can be made there."""
    kind = text.partition(":")[0]
    if kind not in ("cpu", "cuda", "meta"):
        raise ValueError(f"unknown device {text!r}; there are cpu, cuda and meta")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; meta answers all that does not depend on one")


# --- verify ---------------------------------------------------------------------------------------


class Job(NamedTuple):
    problem: Problem
    backend: str
    dtype: torch.dtype


def jobs(backends: list[str], dtypes: list[str], quick: bool, device: str) -> list[Job]:
    """Every problem for each backend and dtype; empty lists mean the usual ones. ValueError for unknown names."""
    check_device(device)
    if torch.device(device).type == "meta":
        raise ValueError("there is nothing to judge on meta: nothing is computed there")
    chosen = [parse_dtype(d) for d in dtypes or _DTYPES]
    names = [dispatch.get(n).name for n in backends] or automatic(device, chosen)
    return [Job(problem, name, dtype) for name in names for dtype in chosen for problem in problems(quick)]


def verify(todo: list[Job], device: str, track: Track = iter) -> Facts:
    """The judge's summary of these jobs."""
    return {"device": device, **summary([v for j in track(todo) for v in judge(j.problem, j.backend, j.dtype, device)])}


def automatic(device: str, dtypes: Iterable[torch.dtype]) -> list[str]:
    """The backends of AUTO that can run a plain call on this device in one of these dtypes."""
    answers = [plain_call(device, dtype) for dtype in dtypes]
    return [name for name in dispatch.AUTO if any(not answer.reasons[name] for answer in answers)]


def summary(verdicts: list[Verdict]) -> Facts:
    """A row for each backend, dtype and family, the failures in full, and whether all is well."""
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for v in verdicts:
        groups.setdefault((v.backend, v.dtype, v.family), []).append(v)
    rows = [_row(group) for group in groups.values()]
    failures = [v._asdict() for v in verdicts if not v.ok]
    checks = sum(row["checks"] for row in rows)
    return {
        "ok": checks > 0 and not failures,  # if everything was refused, nothing is proven
        "checks": checks,
        "rows": rows,
        "failures": failures,
        "refused": [v._asdict() for v in verdicts if v.quantity == "refused"],
    }


def _row(group: list[Verdict]) -> Facts:
    """``error`` and ``dense_error`` are those of the check with the largest error, ``worst``."""
    checks = [v for v in group if v.quantity != "refused"]
    worst = max(checks, key=lambda v: _ordered(v.error), default=None)
    return {
        "backend": group[0].backend,
        "dtype": group[0].dtype,
        "family": group[0].family,
        "checks": len(checks),
        "refused": len(group) - len(checks),
        "worst": None if worst is None else f"{worst.problem}: {worst.quantity}",
        "error": None if worst is None else worst.error,
        "dense_error": None if worst is None else worst.dense_error,
        "ratio": max((_ratio(v) for v in checks), default=None),
        "ok": all(v.ok for v in group),
    }


def _ordered(x: float) -> float:
    return math.inf if math.isnan(x) else x


def _ratio(v: Verdict) -> float:
    """Error over limit; a limit of 0 is met by an error of 0 only."""
    return 0.0 if v.error == 0 else math.inf if v.limit == 0 else _ordered(v.error / v.limit)


# --- JSON -----------------------------------------------------------------------------------------


def plain(x: Any) -> Any:
    """``x`` with what JSON has no number for ("nan", "inf", "-inf") as text."""
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


if __name__ == "__main__":
    main()
