"""Bytes that DRAM really moved in one call, by Nsight Compute: the command line, and what it prints."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

from .cases import Case

_READ, _WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"


class Cell(NamedTuple):
    """What is run under ncu: one call of one backend."""

    case: Case
    backend: str
    direction: str
    device: str
    seed: int

    def to_json(self) -> str:
        return json.dumps({**self._asdict(), "case": self.case.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> Cell:
        fields = json.loads(text)
        return cls(**{**fields, "case": Case(**fields["case"])})


class Dram(NamedTuple):
    """Bytes over all kernels of the call."""

    read: int
    write: int


def program() -> str:
    """Where ncu is; ValueError if it is not."""
    found = shutil.which("ncu")
    if found is None:
        raise ValueError("--ncu needs ncu (Nsight Compute) on PATH; it comes with the CUDA toolkit")
    return found


def command(ncu: str, cell: Cell) -> list[str]:
    """The command that runs the cell once under ncu, with every other kernel left alone.

    ncu empties the caches before each kernel, so what one kernel leaves in the cache for the next counts as read.
    """
    return [
        ncu, "--csv", "--print-units", "base", "--profile-from-start", "off", "--metrics", f"{_READ},{_WRITE}",
        sys.executable, "-m", "tilewise.bench.once", cell.to_json(),
    ]  # fmt: skip


def dram(ncu: str, cell: Cell) -> Dram:
    """Run it. RuntimeError with what ncu said if it fails or counts nothing."""
    done = subprocess.run(command(ncu, cell), capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise RuntimeError(f"ncu ended with exit code {done.returncode}: {' '.join(said)}")
    return parse(done.stdout)


def parse(text: str) -> Dram:
    """Sums of the two counters in ncu's CSV, one row for each kernel and metric after lines of other text."""
    found: dict[str, list[int]] = {_READ: [], _WRITE: []}
    for row in csv.DictReader(_table(text)):
        if row["Metric Name"] in found:
            if row["Metric Unit"] != "byte":
                raise RuntimeError(f"ncu counted {row['Metric Name']} in {row['Metric Unit']!r}, expected 'byte'")
            found[row["Metric Name"]].append(int(float(row["Metric Value"].replace(",", ""))))
    if not all(found.values()):
        raise RuntimeError(f"ncu printed no {_READ} and {_WRITE}: {text.strip()[-300:]}")
    return Dram(sum(found[_READ]), sum(found[_WRITE]))


def _table(text: str) -> Iterable[str]:
    """From the header on, without the lines that ncu itself adds."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    return [line for line in lines[start:] if line.startswith('"')]
