"""The pages under docs/ are run: what a page tells its reader to type works.

Each line of a ```bash block runs by itself, all lines of a page in one empty directory where ``examples`` is the
repository's. A line must succeed, or end with the code that it announces: ``command  # exits with 1``. The ```python
blocks of a page then run there in order, as one program. ```console blocks (they need a GPU) are not run.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SCRIPTS = sysconfig.get_path("scripts")
CPU_SECONDS = 60  # of a page: twice what a page may take where it is written, as machines differ
PATIENCE = 600  # seconds until a line is taken to hang

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())


class Command(NamedTuple):
    line: str
    code: int


def blocks(text, language):
    """Contents of the fenced blocks of a language; those in a list may be indented."""
    found = re.findall(rf"^([ ]*)```{language}[ ]*\n(.*?)^[ ]*```[ ]*$", text, re.M | re.S)
    return [re.sub(rf"^{indent}", "", block, flags=re.M) for indent, block in found]


def commands(text):
    lines = [line.strip() for block in blocks(text, "bash") for line in block.splitlines()]
    found = []
    for line in lines:
        if line and not line.startswith("#"):
            announced = re.search(r"\s+# exits with (\d+)$", line)
            found.append(Command(line[: announced.start()], int(announced[1])) if announced else Command(line, 0))
    return found


def environment():
    return os.environ | {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def run(arguments, where, what):
    """The process that has ended, with its output; a failure says what was run."""
    try:
        return subprocess.run(
            arguments, cwd=where, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.fail(f"{what}: no end after {PATIENCE} s")


def told(done):
    return f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_there_are_pages():
    assert PAGES


def test_the_command_is_that_of_this_environment():
    found = shutil.which("tilewise", path=environment()["PATH"])
    assert found is not None, "no tilewise command: pip install -e '.[cli]'"
    assert Path(found).parent == Path(SCRIPTS)


@each_page
def test_what_a_page_says_to_run(page, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text, before = page.read_text(), cpu_seconds()
    for line, code in commands(text):
        done = run(["bash", "-euo", "pipefail", "-c", line], tmp_path, line)
        assert done.returncode == code, f"{line}\n{told(done)}"
    if program := "\n".join(blocks(text, "python")):
        done = run([sys.executable, "-c", program], tmp_path, "the python blocks")
        assert done.returncode == 0, f"the python blocks\n{told(done)}"
    used = cpu_seconds() - before
    assert used < CPU_SECONDS, f"{used:.0f} s of CPU time: a page may take {CPU_SECONDS}"


@each_page
def test_linked_files_exist(page):
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)\s#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_how_a_page_is_read():
    page = (
        "```bash\ntrue  # a comment\n\n# only a comment\nfalse  # exits with 1\n```\n"
        "* item\n\n  ```bash\n  echo hi\n  ```\n\n```console\nnvidia-smi\n```\n"
        "```python\nx = 1\n```\ntext\n```python\nif x:\n    print(x)\n```\n"
    )
    assert commands(page) == [("true  # a comment", 0), ("false", 1), ("echo hi", 0)]
    assert blocks(page, "python") == ["x = 1\n", "if x:\n    print(x)\n"]
