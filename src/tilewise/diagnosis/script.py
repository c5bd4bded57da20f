"""A user's script, as it is, under the doctor."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from .context import doctor
from .report import Report


class Run(NamedTuple):
    report: Report
    error: str  # the script's traceback, or what it exited with; "" if it ended well


def run_script(path: str, args: list[str]) -> Run:
    """Run ``python path args...`` in this process and watch it, to its end or its error.

    ValueError: there is no such file.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path} is not a file; give the path of a Python script")
    argv, search = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [path, *args], [str(file.resolve().parent)]
    error = ""
    try:
        with doctor() as report:
            runpy.run_path(path, run_name="__main__")
    except SystemExit as e:
        error = "" if e.code in (None, 0) else f"the script exited with {e.code}"
    except (Exception, KeyboardInterrupt) as e:
        error = "".join(traceback.format_exception(type(e), e, _of_script(e.__traceback__, path)))
    finally:
        sys.argv, sys.path[:] = argv, search
    return Run(report, error)


def _of_script(tb: TracebackType | None, path: str) -> TracebackType | None:
    """The traceback from the script on, without the frames that started it."""
    start = tb
    while start is not None and not _same(start.tb_frame.f_code.co_filename, path):
        start = start.tb_next
    return start or tb


def _same(a: str, b: str) -> bool:
    return os.path.abspath(a) == os.path.abspath(b)
