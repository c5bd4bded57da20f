"""Which GPU records there are, and whether the kernels have changed since: `python benchmarks/evidence.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Record = dict[str, Any]


def digest(backend: str) -> str:
    """SHA-256 of a backend's sources, file by file in order of name."""
    at = ROOT / "src" / "tilewise" / "backends"
    files = sorted((at / backend).glob("*.py")) if (at / backend).is_dir() else [at / f"{backend}.py"]
    whole = hashlib.sha256()
    for f in files:
        whole.update(f.name.encode() + b"\0" + f.read_bytes() + b"\0")
    return whole.hexdigest()


def records() -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/*.json"))]


def state(r: Record) -> str:
    return "unchanged" if r["digest"] == digest(r["backend"]) else "**changed: stale**"


def table() -> str:
    """The records as a Markdown table."""
    lines = ["| record | problems | refused | checks | failed | kernels since |", "|---|---|---|---|---|---|"]
    for r in records():
        nothing: Record = {"problems": 0, "of": 0, "refused": [], "checks": 0, "failed": []}  # a run may be cut off
        c = r.get("correctness", nothing)
        counts = f"{c['problems']} of {c['of']} | {len(c['refused'])} | {c['checks']} | {len(c['failed'])}"
        lines.append(f"| {r['backend']} on {r['gpu']} | {counts} | {state(r)} |")
    return "\n".join(lines)


def speeds() -> str:
    """TFLOP/s of the records as Markdown tables, forward / backward. Empty without them."""
    return _numbers("speed_tflops", lambda r: f"record of {r['backend']}, {r['gpu']}, bf16, {state(r)}")


def hosts() -> str:
    """Microseconds that a call takes on the host, as ``speeds``."""
    return _numbers("host_us", lambda r: f"{r['backend']}, host of the {r['gpu']}, {state(r)}: microseconds")


def ratios() -> str:
    """How many times as long the peers take, forward / backward, as Markdown tables. Empty without them."""
    tables = []
    for r in records():
        ours, rows = r["backend"], r.get("speed_ratios", [])
        if names := [n for n in _contestants(rows) if n != ours]:
            lines = [_row(row, [_ratio(row.get(n), row[ours]) for n in names]) for row in rows]
            title = f"{r['gpu']}, bf16, {state(r)}: time / time of {ours}"
            tables.append("\n".join([*_header(title, names), *lines]))
    return "\n\n".join(tables)


def lines() -> str:
    """How many times as long another call takes, forward / backward, as Markdown tables. Empty without them."""
    tables = []
    for r in records():
        ours, rows = r["backend"], r.get("speed_lines")
        if rows:
            head = f"| {ours}, {r['gpu']}, bf16, {state(r)} | beside | time / time of {ours} | asked |"
            cells = ([n := row["beside"], _ratio(row[n], row[ours]), f"{row['asked']:.2f}"] for row in rows)
            body = [_row(row, c) for row, c in zip(rows, cells, strict=True)]
            tables.append("\n".join([head, "|---" * 4 + "|", *body]))
    return "\n\n".join(tables)


def suite() -> str:
    """The checks of the GPU suite as Markdown tables. Empty without them."""
    tables = []
    for r in records():
        if checks := r.get("suite"):
            lines = [
                f"| {r['backend']} on {r['gpu']}, {state(r)} | passed | not run | what was found |",
                "|---" * 4 + "|",
            ]
            for name, group in groupby(sorted(checks, key=lambda c: c["name"]), key=lambda c: c["name"]):
                lines.append(f"| {name} | {_counts(list(group))} |")
            tables.append("\n".join(lines))
    return "\n\n".join(tables)


def failures() -> str:
    """Every check of the GPU suite that failed, as a Markdown list. Empty where none did."""
    return "\n".join(
        f"- {r['backend']} on {r['gpu']}: {c['name']}, {c['case']}: {' '.join(c['note'].split())}"
        for r in records()
        for c in r.get("suite", [])
        if c["ok"] is False
    )


def _counts(checks: list[Record]) -> str:
    """Passed of those that ran, those that did not, and what a check of one case, or the first of several, found."""
    ran = [c for c in checks if c["ok"] is not None]
    absent = len(checks) - len(ran)
    found = next((c for c in checks if c["ok"] is False), (ran or checks)[0])
    note = found["note"] if len(checks) == 1 else f"{found['case']}: {found['note']}"
    return f"{sum(c['ok'] for c in ran)} of {len(ran)} | {absent or ''} | {' '.join(note.split()).replace('|', '/')}"


def _contestants(rows: list[Record]) -> list[str]:
    return list(dict.fromkeys(n for row in rows for n in row if n not in ("dim", "length", "mask")))


def _numbers(section: str, title: Callable[[Record], str]) -> str:
    """A section of the records in whole numbers."""
    tables = []
    for r in records():
        if rows := r.get(section):
            names = _contestants(rows)
            lines = [_row(row, [_pair(row.get(n), lambda x: f"{x:.0f}") for n in names]) for row in rows]
            tables.append("\n".join([*_header(title(r), names), *lines]))
    return "\n\n".join(tables)


def _header(title: str, names: list[str]) -> list[str]:
    return [f"| {title} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]


def _row(row: Record, cells: list[str]) -> str:
    return f"| D={row['dim']} L={row['length']} {row['mask']} | {' | '.join(cells)} |"


def _pair(x: Record | None, show: Any) -> str:
    """Forward / backward; a dash for what did not run (the record has the reason)."""
    return "–" if x is None or "error" in x else f"{show(x['forward'])} / {show(x['backward'])}"


def _ratio(x: Record | None, ours: Record) -> str:
    if x is None or "error" in x or "error" in ours:
        return "–"
    return _pair({k: x[k] / ours[k] for k in ("forward", "backward")}, lambda t: f"{t:.2f}")


if __name__ == "__main__":
    print(*filter(None, (table(), suite(), failures(), speeds(), lines(), ratios(), hosts())), sep="\n\n")
