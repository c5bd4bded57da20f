"""One call of one cell, marked for a profiler: ``python -m tilewise.bench.once CELL``, CELL as ``Cell.to_json``."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch

from .ncu import Cell
from .runner import call_of


def main(text: str) -> None:
    cell = Cell.from_json(text)
    call = call_of(cell)
    call()  # compiles what has to be compiled
    with torch.cuda.profiler.profile() if torch.device(cell.device).type == "cuda" else nullcontext():
        call()


if __name__ == "__main__":
    main(sys.argv[1])
