"""JSONL rows on disk, and the ways to group and word them that the plots, the report and the table share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import cli

Row = dict[str, Any]
CASE = ("batch", "heads", "kv_heads", "length", "dim", "dtype", "mask", "dropout")  # the fields of ``Case``
_NEEDED = (*CASE, "backend", "direction", "reason", "p50_s")


def append(path: Path, row: Row) -> None:
    """Add a row. One write of a whole line: whoever stops the sweep leaves no half of it."""
    line = json.dumps(cli.plain(row), allow_nan=False) + "\n"
    with path.open("ab", buffering=0) as f:
        f.write(line.encode())


def read(path: Path) -> list[Row]:
    """Rows of a file, the last measurement of each cell. ValueError if it has none, or a line that is not a row."""
    try:
        lines = path.read_text().splitlines()
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    rows: dict[tuple, Row] = {}
    for n, line in enumerate(lines, 1):
        row = _row(path, n, line)
        rows[cell(row)] = row
    if not rows:
        raise ValueError(f"{path} has no rows; tilewise bench --out {path} writes them")
    return list(rows.values())


def _row(path: Path, n: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}, line {n} is not JSON: {e}") from None
    missing = [name for name in _NEEDED if not isinstance(row, dict) or name not in row]
    if missing:
        raise ValueError(f"{path}, line {n} is not a row of tilewise bench: it has no {', '.join(missing)}")
    return row


def cell(row: Row) -> tuple:
    """What a row measures; a later row of the same cell replaces it."""
    return (*(row[name] for name in CASE), row["backend"], row["direction"], machine(row))


def machine(row: Row) -> str:
    facts = row.get("device_facts", {})
    return ", ".join(str(x) for x in (facts.get("name"), facts.get("capability")) if x)


def panel(row: Row) -> tuple:
    """Rows that belong into one picture: everything the same but the length and the backend."""
    return (machine(row), row["direction"], *(row[name] for name in CASE if name != "length"))


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by key, in order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def title(row: Row, length: bool = False) -> str:
    """A row's case in a few words, with or without its length; a direction comes with it."""
    heads = f"H={row['heads']}" + ("" if row["kv_heads"] == row["heads"] else f"/{row['kv_heads']}")
    words = [
        row["direction"], row["dtype"], row["mask"], f"B={row['batch']}", heads,
        *([f"L={row['length']}"] if length else []), f"D={row['dim']}",
        *([f"dropout {row['dropout']}"] if row["dropout"] else []),
    ]  # fmt: skip
    return " ".join(words)


def timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["p50_s"] is not None]


# --- a row in words ---------------------------------------------------------------------------------


def _ms(s: float) -> str:
    return f"{1e3 * s:.3g}"


def _mib(n: float) -> str:
    return f"{n / 2**20:.4g}"


def _percent(x: float) -> str:
    return f"{100 * x:.3g} %"


COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # heading, key, how it is written
    ("ms", "p50_s", _ms),
    ("p20", "p20_s", _ms),
    ("p80", "p80_s", _ms),
    ("spread", "spread", _percent),
    ("TFLOP/s", "tflops", "{:.3g}".format),
    ("of matmul", "matmul_share", _percent),
    ("of copy", "copy_share", _percent),
    ("tokens/s", "tokens_per_s", "{:.3g}".format),
    ("step ms", "step_s", _ms),
    ("peak MiB", "peak_bytes", _mib),
    ("gaps", "gap_share", _percent),
    ("model MiB", "model_bytes", _mib),
    ("DRAM MiB", "dram_bytes", _mib),
    ("predicted / measured", "predicted_to_measured", "{:.2g}".format),
)


def worded(row: Row) -> dict[str, str]:
    """Each column of a row as text; empty where nothing was measured."""
    return {heading: "" if row.get(key) is None else write(row[key]) for heading, key, write in COLUMNS}
