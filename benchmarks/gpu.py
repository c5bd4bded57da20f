"""GPU proof of a backend: speed beside PyTorch's kernels, the GPU suite, and the judge over all problems. `make gpu`.

Writes benchmarks/results/<gpu>/<backend>.json: what ran, with which versions, and a digest of the kernel sources, so
that evidence older than the kernels can be told (``python benchmarks/evidence.py``). The record is written anew as
results come in, in this order: whatever ends the run, what was done is kept, and the record says what was not.
Exit code 1 if a check fails.

    make gpu GPU_ARGS="--budget 300"       all of it within 300 seconds, of which speed takes 45 % at most
    make gpu GPU_ARGS="--sections proof"   only what proves results, beside the speed in the record that there is

Sections are kept only where the record has the same kernels, versions and kind of GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import gpu_speed
import gpu_suite
import torch
import triton
from crew import CUT, Done, crew
from evidence import RESULTS, digest

import tilewise
from tilewise import dispatch
from tilewise.testing import judge, problems

SECTIONS = ("speed", "proof")
DTYPES = ("float16", "bfloat16", "float32")
SPEED_SHARE = 0.45  # of the budget, at most
PROOF_LIMIT = 300.0  # seconds of one job: some families of random requests compile for half of it

Record = dict[str, Any]


# --- work of one process --------------------------------------------------------------------------


def device_of(number: int) -> torch.device:
    """The processes spread over the GPUs; memory that an earlier job left goes back for the others."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.empty_cache()
    return device


def proved(job: tuple[str, Any], number: int, backend: str) -> list[Any]:
    """The checks of a job of the suite, or the judge's verdicts on one problem in one dtype."""
    kind, what = job
    if kind == "suite":
        return gpu_suite.run(what, backend, device_of(number))
    name, dtype = what
    (problem,) = (p for p in problems() if p.name == name)
    return judge(problem, backend, getattr(torch, dtype), device_of(number))


Timed = gpu_speed.Cell | gpu_speed.Line


def timed(cell: Timed, number: int, backend: str, sizes: dict[str, int]) -> dict[str, Any]:
    return gpu_speed.measure(cell, backend, device_of(number), **sizes)


def compiled(cell: Timed, number: int, backend: str, sizes: dict[str, int]) -> None:
    """Each contestant once, so that its code is in the caches on disk, by GPU, when it is timed on the first."""
    gpu_speed.measure(cell, backend, device_of(0), once, **sizes)


def called(cell: gpu_speed.Cell, number: int, backend: str) -> dict[str, Any]:
    return gpu_speed.measure(cell, backend, device_of(number), gpu_speed.microseconds, **gpu_speed.SMALL)


def once(call: Any) -> float:
    call()
    return 0.0


# --- sections -------------------------------------------------------------------------------------


class Run:
    """A run in progress: its record, written as results come in, and its clock."""

    def __init__(self, record: Record, path: Path, workers: int, budget: float):
        self.record, self.path, self.workers = record, path, workers
        self.start, self.budget = time.monotonic(), budget

    def save(self) -> None:
        self.record["seconds"] = round(time.monotonic() - self.start)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.record, indent=1) + "\n")

    def done(self, what: str) -> None:
        self.save()
        print(f"{time.monotonic() - self.start:5.0f} s  {what}", flush=True)

    def speed(self, cells: list[Timed], share: float = SPEED_SHARE, **sizes: int) -> None:
        """Compile side by side, for half of the time at most; then time one cell after the other.

        share: of the budget, at most.
        """
        backend, until = self.record["backend"], self.start + share * self.budget
        record = self.record["speed_tflops"], self.record["speed_ratios"], self.record["speed_lines"] = [], [], []
        half = (time.monotonic() + until) / 2
        for d in crew(partial(compiled, backend=backend, sizes=sizes), cells, self.workers, half):
            self.done(f"compiled {' '.join(map(str, d.job[:3]))} {d.error}")
        for d in crew(partial(timed, backend=backend, sizes=sizes), cells, 1, until, 60):
            if d.error == CUT:
                continue
            cell, found = d.job, d.result or {backend: {"error": d.error}}
            row = {"dim": cell.dim, "length": cell.length, "mask": cell.case}
            if isinstance(cell, gpu_speed.Line):
                record[2].append(row | found | {"beside": cell.other, "asked": cell.asked})
            else:
                record[cell.flex].append(row | (found if cell.flex else gpu_speed.tflops(cell, found)))
            self.done(f"timed {' '.join(map(str, cell[:3]))}")
        self.record["speed_cells"] = [sum(map(len, record)), len(cells)]

    def host(self, cells: list[gpu_speed.Cell]) -> None:
        """What a call costs on the host, one cell after the other."""
        backend, rows = self.record["backend"], []
        self.record["host_us"] = rows
        for d in crew(partial(called, backend=backend), cells, 1, self.start + self.budget, 60):
            cell, found = d.job, d.result or {backend: {"error": d.error}}
            rows.append({"dim": cell.dim, "length": cell.length, "mask": cell.case} | found)
            self.done(f"called {' '.join(map(str, cell[:3]))}")

    def prove(self, checks: list[gpu_suite.Job], jobs: list[tuple[str, str]]) -> None:
        """The suite, then the judge; what did not run is in the record too."""
        self.record["suite"] = []
        self.record["correctness"] = nothing_judged(len(jobs))
        self.proving, left = time.monotonic(), list(checks)
        every = [*(("suite", job) for job in checks), *(("judge", job) for job in jobs)]
        work = partial(proved, backend=self.record["backend"])
        for d in crew(work, every, self.workers, self.start + self.budget, PROOF_LIMIT):
            kind, job = d.job
            if d.error != CUT and kind == "suite":
                left.remove(job)
                self._checked(job, d)
            elif d.error != CUT:
                self._judged(job, d)
        self.record["suite"] += [gpu_suite.Check(*pair, None, 0, CUT)._asdict() for job in left for pair in job]
        c = self.record["correctness"]
        if c["problems"] < c["of"]:
            c["stopped"] = f"after {c.get('seconds', 0)} s"
        self.save()

    def _checked(self, job: gpu_suite.Job, d: Done) -> None:
        checks = d.result or [gpu_suite.Check(*pair, False, round(d.seconds, 2), d.error) for pair in job]
        self.record["suite"] += [c._asdict() for c in checks]
        words = {True: "ok", False: "FAILED", None: "not run"}
        self.done("; ".join(f"{c.name}, {c.case}: {words[c.ok]}" for c in checks))

    def _judged(self, job: tuple[str, str], d: Done) -> None:
        """Verdicts, counted; failures and refusals in full."""
        c = self.record["correctness"]
        c["problems"] += 1
        c["failed"] += [[*job, d.error]] if d.error else []
        for v in d.result or []:
            c["checks"] += v.quantity != "refused"
            if v.quantity == "refused":
                c["refused"].append([*job, reasons(v.note, self.record["backend"])])
            elif not v.ok:
                c["failed"].append([*job, v.quantity, v.note])
        c["seconds"] = round(time.monotonic() - self.proving)
        if c["problems"] % 50 == 0:
            self.done(f"judged {c['problems']} of {c['of']}")

    def failures(self) -> list[str]:
        r = self.record
        every = (
            x for section in ("speed_tflops", "speed_ratios", "speed_lines", "host_us") for x in r.get(section, [])
        )
        rows = [x for x in every if "error" in x[r["backend"]]]
        speed = [f"{x['mask']} D={x['dim']} L={x['length']}: {x[r['backend']]['error']}" for x in rows]
        suite = [f"{c['name']}, {c['case']}: {c['note']}" for c in r.get("suite", []) if c["ok"] is False]
        return speed + suite + [" ".join(map(str, x)) for x in r.get("correctness", {}).get("failed", [])]


def nothing_judged(of: int) -> Record:
    return {"problems": 0, "of": of, "checks": 0, "refused": [], "failed": []}


def continued(record: Record, path: Path) -> Record:
    """With the sections of the record that there is, if that is of the same kernels, versions and kind of GPU."""
    before = json.loads(path.read_text()) if path.exists() else {}
    same = all(before.get(k) == record[k] for k in ("backend", "gpu", "digest", "versions"))
    return {**before, **record} if same else record


def reasons(refusal: str, backend: str) -> str:
    """Those of one backend, of a refusal that lists all."""
    lines = iter(refusal.splitlines())
    for line in lines:
        if line.startswith(f"{backend}:"):
            return "; ".join(x.removeprefix("  - ") for x in takewhile(lambda x: x.startswith("  - "), lines))
    return refusal


def judge_jobs(dtypes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every problem once, in the dtypes by turns, before any problem for the second time."""
    every = problems()
    turns = range(len(dtypes))
    return [(p.name, dtypes[(n + turn) % len(dtypes)]) for turn in turns for n, p in enumerate(every)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton", choices=sorted(dispatch.BACKENDS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--workers", type=int, default=max(1, min(31, len(os.sched_getaffinity(0)) - 1)))
    parser.add_argument("--budget", type=float, default=3600, help="seconds of the whole run; the record says what ran")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which to run, by default all: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS)
    a = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):  # the processes are the threads
        os.environ.setdefault(name, "1")
    gpu = torch.cuda.get_device_name()
    record = {
        "backend": a.backend,
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        "digest": digest(a.backend),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "tilewise": tilewise.__version__},
    }
    path = a.results / gpu.lower().replace(" ", "-") / f"{a.backend}.json"
    sections = a.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"no such sections: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    run = Run(continued(record, path), path, a.workers, a.budget)
    if "speed" in sections:
        run.speed(gpu_speed.cells(a.backend), SPEED_SHARE if "proof" in sections else 1.0)
        run.host(gpu_speed.small_cells(a.backend))
    if "proof" in sections:
        run.prove(gpu_suite.jobs(a.backend), judge_jobs(tuple(a.dtypes.split(","))))
    c, checks = run.record.get("correctness", nothing_judged(0)), run.record.get("suite", [])
    print(f"judge: {c['problems']} of {c['of']} problems, {c['checks']} checks, {len(c['refused'])} refused")
    print(f"suite: {sum(x['ok'] is True for x in checks)} of {len(checks)}", end="; ")
    print(f"{sum(x['ok'] is None for x in checks)} not run; {run.record['seconds']} s in all")
    failed = run.failures()
    for text in failed:
        print("FAILED", text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
