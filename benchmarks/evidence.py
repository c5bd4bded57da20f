"""Which GPU records there are, and whether the kernels have changed since: `python benchmarks/evidence.py`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def digest(backend: str) -> str:
    """SHA-256 of a backend's sources, file by file in order of name."""
    at = ROOT / "src" / "tilewise" / "backends"
    files = sorted((at / backend).glob("*.py")) if (at / backend).is_dir() else [at / f"{backend}.py"]
    whole = hashlib.sha256()
    for f in files:
        whole.update(f.name.encode() + b"\0" + f.read_bytes() + b"\0")
    return whole.hexdigest()


def table() -> str:
    """The records as a Markdown table."""
    lines = ["| record | problems | checks | failed | kernels since |", "|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*/*.json")):
        r = json.loads(path.read_text())
        c = r["correctness"]
        state = "unchanged" if r["digest"] == digest(r["backend"]) else "**changed: stale**"
        counts = f"{c['problems']} of {c['of']} | {c['checks']} | {len(c['failed'])}"
        lines.append(f"| {r['backend']} on {r['gpu']} | {counts} | {state} |")
    return "\n".join(lines)


def speeds() -> str:
    """TFLOP/s of the records as a Markdown table, forward / backward."""
    lines = []
    for path in sorted(RESULTS.glob("*/*.json")):
        r = json.loads(path.read_text())
        names = [n for n in r["speed_tflops"][0] if n not in ("dim", "length", "mask")]
        lines += [f"| {r['gpu']}, bf16 | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for row in r["speed_tflops"]:
            cells = (f"{row[n]['forward']:.0f} / {row[n]['backward']:.0f}" for n in names)
            lines.append(f"| D={row['dim']} L={row['length']} {row['mask']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), speeds(), sep="\n\n")
