"""GPU evidence is shown with its age: the README holds what ``benchmarks/evidence.py`` prints."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def evidence():
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_the_records_and_their_age():
    e, readme = evidence(), (ROOT / "README.md").read_text()
    assert list(e.RESULTS.glob("*/*.json"))
    assert e.table() in readme, "run `python benchmarks/evidence.py` and put its tables into the README"
    assert e.speeds() in readme


def test_no_record_holds_a_failure():
    for path in evidence().RESULTS.glob("*/*.json"):
        record = json.loads(path.read_text())
        assert record["correctness"]["failed"] == []
        assert record["same_bits_30_times"]


def test_the_digest_follows_the_sources(tmp_path, monkeypatch):
    e = evidence()
    at = tmp_path / "src" / "tilewise" / "backends" / "mine"
    at.mkdir(parents=True)
    monkeypatch.setattr(e, "ROOT", tmp_path)
    (at / "a.py").write_text("x = 1\n")
    before = e.digest("mine")
    (at / "a.py").write_text("x = 2\n")
    assert e.digest("mine") != before
