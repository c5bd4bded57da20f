"""The README's Python runs, in order, as one program."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_python_blocks(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 6
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "runs: tiled" in capsys.readouterr().out


def test_linked_files_exist():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / path).exists(), path


def test_counts_are_those_of_the_suite():
    from test_requests import test_random_requests

    from tilewise.testing import problems

    assert f"{len(problems())} problems" in README
    assert "2,240 in all" in test_random_requests.__doc__
    assert "2,240 random requests" in README
