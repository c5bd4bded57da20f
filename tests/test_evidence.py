"""GPU evidence is shown with its age: the README holds what ``benchmarks/evidence.py`` prints."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def evidence():
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_the_records_and_their_age():
    e, readme = evidence(), (ROOT / "README.md").read_text()
    assert list(e.RESULTS.glob("*/*.json"))
    for table in (e.table(), e.suite(), e.failures(), e.speeds(), e.lines(), e.ratios(), e.hosts()):
        assert table in readme, "run `python benchmarks/evidence.py` and put its tables into the README"


def test_the_judge_failed_nothing_on_a_gpu():
    """What the suite found beside it is in the README, word by word (``failures``)."""
    for record in evidence().records():
        assert record["correctness"]["failed"] == []


def test_the_digest_follows_the_sources(tmp_path, monkeypatch):
    e = evidence()
    at = tmp_path / "src" / "tilewise" / "backends" / "mine"
    at.mkdir(parents=True)
    monkeypatch.setattr(e, "ROOT", tmp_path)
    (at / "a.py").write_text("x = 1\n")
    before = e.digest("mine")
    (at / "a.py").write_text("x = 2\n")
    assert e.digest("mine") != before


MS = {"forward": 2.0, "backward": 6.0}
RECORD = {
    "backend": "tiled",
    "gpu": "Some GPU",
    "digest": "old",
    "correctness": {"problems": 5, "of": 9, "refused": ["one"], "checks": 30, "failed": []},
    "speed_tflops": [{"dim": 64, "length": 4096, "mask": "full", "tiled": MS, "torch_flash": {"error": "refused"}}],
    "speed_ratios": [
        {"dim": 64, "length": 4096, "mask": "causal", "tiled": MS, "flex": {"forward": 3.0, "backward": 3.0}},
        {"dim": 64, "length": 4096, "mask": "bias", "tiled": MS, "torch_efficient": MS, "flex": {"error": "no"}},
    ],
    "speed_lines": [
        {"dim": 64, "length": 4096, "mask": "GQA", "tiled": MS, "MHA": {"forward": 2.2, "backward": 6.0}}
        | {"beside": "MHA", "asked": 1}
    ],
    "host_us": [{"dim": 64, "length": 128, "mask": "causal", "tiled": {"forward": 41.6, "backward": 7.0}}],
    "suite": [
        {"name": "CUDA graph", "case": "causal", "ok": True, "seconds": 1, "note": "3 replays"},
        {"name": "CUDA graph", "case": "dropout", "ok": False, "seconds": 1, "note": "the same | mask"},
        {"name": "another device", "case": "causal", "ok": None, "seconds": 0, "note": "needs two GPUs"},
        {"name": "training", "case": "ten steps", "ok": True, "seconds": 9, "note": "loss 5.5 to 3.4"},
    ],
}


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """The tables of one record."""

    def show(record):
        e = evidence()
        (tmp_path / "gpu").mkdir(exist_ok=True)
        (tmp_path / "gpu" / "tiled.json").write_text(json.dumps(record))
        monkeypatch.setattr(e, "RESULTS", tmp_path)
        return {name: getattr(e, name)() for name in ("table", "suite", "speeds", "lines", "ratios", "hosts")}

    return show


def test_a_record_as_tables(shown):
    tables = shown(RECORD)
    assert "| tiled on Some GPU | 5 of 9 | 1 | 30 | 0 | **changed: stale** |" in tables["table"]
    assert tables["speeds"].splitlines()[::2] == [
        "| record of tiled, Some GPU, bf16, **changed: stale** | tiled | torch_flash |",
        "| D=64 L=4096 full | 2 / 6 | – |",
    ]
    assert tables["hosts"].splitlines()[::2] == [
        "| tiled, host of the Some GPU, **changed: stale**: microseconds | tiled |",
        "| D=64 L=128 causal | 42 / 7 |",
    ]
    assert tables["lines"].splitlines()[::2] == [
        "| tiled, Some GPU, bf16, **changed: stale** | beside | time / time of tiled | asked |",
        "| D=64 L=4096 GQA | MHA | 1.10 / 1.00 | 1.00 |",
    ]
    assert tables["ratios"].splitlines() == [
        "| Some GPU, bf16, **changed: stale**: time / time of tiled | flex | torch_efficient |",
        "|---|---|---|",
        "| D=64 L=4096 causal | 1.50 / 0.50 | – |",
        "| D=64 L=4096 bias | – | 1.00 / 1.00 |",
    ]
    assert tables["suite"].splitlines() == [
        "| tiled on Some GPU, **changed: stale** | passed | not run | what was found |",
        "|---|---|---|---|",
        "| CUDA graph | 1 of 2 |  | dropout: the same / mask |",
        "| another device | 0 of 0 | 1 | needs two GPUs |",
        "| training | 1 of 1 |  | loss 5.5 to 3.4 |",
    ]


def test_a_record_of_kernels_that_did_not_change(shown):
    tables = shown({**RECORD, "digest": evidence().digest("tiled")})
    assert "stale" not in "".join(tables.values())


def test_records_from_before_the_suite_and_of_a_run_cut_off(shown):
    old = {k: v for k, v in RECORD.items() if k not in ("suite", "speed_lines", "speed_ratios", "host_us")}
    tables = shown(old)
    assert tables["suite"] == tables["lines"] == tables["ratios"] == tables["hosts"] == ""
    assert tables["speeds"]
    cut = {k: RECORD[k] for k in ("backend", "gpu", "digest")}
    assert "0 of 0" in shown(cut)["table"]
    assert shown({**cut, "speed_ratios": []})["ratios"] == ""
