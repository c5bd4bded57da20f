"""GPU proof of a backend: the judge over all problems, then speed beside PyTorch's kernels. `make gpu`.

Writes benchmarks/results/<gpu>/<backend>.json: what ran, with which versions, and a digest of the kernel sources, so
that evidence older than the kernels can be told (``python benchmarks/evidence.py``). Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
from evidence import RESULTS, digest
from triton.testing import do_bench

import tilewise
from tilewise import dispatch, masks
from tilewise.testing import judge, problems

DTYPES = ("float16", "bfloat16", "float32")
PEERS = ("torch_flash", "torch_cudnn")
TOKENS, WIDTH = 16384, 2048  # of a cell: batch * length, heads * D


def judged(job: tuple[str, str, str]) -> tuple[tuple[str, str, str], list[Any], str]:
    """One problem in one dtype, in a process of its own: compiling is most of the time."""
    backend, name, dtype = job
    (problem,) = (p for p in problems() if p.name == name)
    try:
        return job, judge(problem, backend, getattr(torch, dtype), "cuda"), ""
    except Exception as e:  # an error is a failed check with its text in the record, and the next one runs
        return job, [], f"{type(e).__name__}: {str(e)[:500]}"


def correctness(backend: str, dtypes: tuple[str, ...], workers: int, seconds: float) -> dict[str, Any]:
    """Verdicts of all problems, counted; failures and refusals in full."""
    jobs = [(backend, p.name, dtype) for dtype in dtypes for p in problems()]
    summary: dict[str, Any] = {"problems": 0, "of": len(jobs), "checks": 0, "refused": [], "failed": []}
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for job, verdicts, error in pool.imap_unordered(judged, jobs):
            summary["problems"] += 1
            if error:
                summary["failed"].append([*job[1:], error])
            for v in verdicts:
                summary["checks"] += v.quantity != "refused"
                if v.quantity == "refused":
                    summary["refused"].append([*job[1:], v.note])
                elif not v.ok:
                    summary["failed"].append([*job[1:], v.quantity, v.note])
            if time.time() - start > seconds:
                summary["stopped"] = f"after {seconds:.0f} s"
                pool.terminate()
                break
    summary["seconds"] = round(time.time() - start)
    return summary


def repeats(backend: str, times: int = 30) -> bool:
    """Whether forward and backward give the same bits every time."""
    q, k, v = (torch.randn(2, 8, 1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def once() -> list[torch.Tensor]:
        out = tilewise.attention(q, k, v, masks.causal() & masks.window(300, 0), softcap=20.0, backend=backend)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    first = once()
    return all(torch.equal(a, b) for _ in range(times - 1) for a, b in zip(first, once(), strict=True))


def speed(backend: str) -> list[dict[str, Any]]:
    """TFLOP/s, forward and backward alone, of the backend and its peers."""
    rows = []
    for dim, length, causal in ((d, n, c) for d in (64, 128) for n in (4096, 16384) for c in (False, True)):
        rows.append({"dim": dim, "length": length, "mask": "causal" if causal else "full"})
        rows[-1] |= cell((backend, *PEERS), dim, length, causal)
        print(*(x if not isinstance(x, dict) else [round(t) for t in x.values()] for x in rows[-1].values()))
    return rows


def cell(names: tuple[str, ...], dim: int, length: int, causal: bool) -> dict[str, dict[str, float]]:
    """One shape; the backends take turns, there and back, and the better of two medians counts."""
    shape = (TOKENS // length, WIDTH // dim, length, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    mask = masks.causal() if causal else None
    flops = 4 * TOKENS * WIDTH * length * (0.5 if causal else 1)

    def forward(name: str) -> torch.Tensor:
        return tilewise.attention(q, k, v, mask, backend=name)

    def times(name: str) -> tuple[float, float]:
        out = forward(name)
        with torch.no_grad():
            fwd = _time(lambda: forward(name))
        return fwd, _time(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))

    measured = [(name, times(name)) for name in (*names, *names[::-1])]
    best = {name: [min(t[n] for x, t in measured if x == name) for n in (0, 1)] for name in names}
    return {name: {"forward": flops / f / 1e9, "backward": 2.5 * flops / b / 1e9} for name, (f, b) in best.items()}


def _time(call: Any) -> float:
    """Median milliseconds on CUDA events."""
    return do_bench(call, warmup=10, rep=50, return_mode="median")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="triton", choices=sorted(dispatch.BACKENDS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--workers", type=int, default=max(1, (multiprocessing.cpu_count() or 2) - 1))
    parser.add_argument("--seconds", type=float, default=3600, help="stop judging after this time; the record says so")
    parser.add_argument("--results", type=Path, default=RESULTS)
    a = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    record = {
        "backend": a.backend,
        "gpu": gpu,
        "digest": digest(a.backend),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "tilewise": tilewise.__version__},
        "correctness": correctness(a.backend, tuple(a.dtypes.split(",")), a.workers, a.seconds),
        "same_bits_30_times": repeats(a.backend),
        "speed_tflops": speed(a.backend),
    }
    path = a.results / gpu.lower().replace(" ", "-") / f"{a.backend}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    c = record["correctness"]
    print(
        f"{c['problems']} of {c['of']} problems in {c['seconds']} s: {c['checks']} checks, {len(c['failed'])} failed,"
    )
    print(f"{len(c['refused'])} refused; same bits 30 times: {record['same_bits_30_times']}")
    for failure in c["failed"]:
        print("FAILED", *failure)
    return 1 if c["failed"] or not record["same_bits_30_times"] else 0


if __name__ == "__main__":
    sys.exit(main())
