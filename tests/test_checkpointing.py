"""examples/checkpointing.py says what is true: small sizes, its own table."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parent.parent / "examples" / "checkpointing.py"
spec = importlib.util.spec_from_file_location("checkpointing", FILE)
checkpointing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checkpointing)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpointing") / "rows.json"
    checkpointing.main(["--length", "768", "--layers", "3", "--window", "32", "--json", str(path)])
    return json.loads(path.read_text())


@pytest.fixture
def rows(facts):
    return {row["way"]: row for row in facts["rows"]}


def test_every_way_of_the_docstring_is_measured(rows):
    assert list(rows) == ["dense", "dense + checkpoint", "tiled", "tiled + checkpoint", "tiled + window"]
    for name, row in rows.items():
        assert f"\n    {name}  " in checkpointing.__doc__
        assert row["seconds"] > 0


def test_who_keeps_what(facts, rows):
    one, layers = facts["score_matrix_bytes"], facts["layers"]
    assert one == 2 * 768 * 768 * 4
    kept = {name: row["kept_bytes"] for name, row in rows.items()}
    assert kept["dense"] - kept["tiled"] >= layers * one  # at least one matrix a layer is kept by dense
    assert kept["tiled"] - kept["tiled + checkpoint"] > layers * 768 * 128 * 4  # what the rest of a layer keeps
    inputs = layers * 768 * 128 * 4  # of each layer but the first, and the output
    for name in ("dense + checkpoint", "tiled + checkpoint"):
        assert inputs <= kept[name] < inputs + 2**16  # and the state of the random numbers


def test_whose_peak_is_higher(facts, rows):
    one = facts["score_matrix_bytes"]
    peak = {name: row["peak_bytes"] for name, row in rows.items()}
    assert peak["dense"] > peak["dense + checkpoint"] + one
    assert peak["dense + checkpoint"] > peak["tiled"] + one  # one layer's matrices are still there, whole
    assert peak["tiled"] > peak["tiled + checkpoint"]
    assert peak["tiled + window"] <= 1.1 * peak["tiled"]
    for name, row in rows.items():
        assert peak[name] > row["kept_bytes"]


def test_all_but_the_window_are_the_same_function(rows):
    far = {name: row["difference_from_dense"] for name, row in rows.items()}
    assert far.pop("tiled + window") > 1e-2
    assert far.pop("dense") == 0
    assert max(far.values()) < 1e-5


def test_a_window_of_the_whole_length_is_no_window():
    found = checkpointing.compare(checkpointing.Sizes(64, layers=1), window=64, device="cpu")
    assert found["rows"][-1]["difference_from_dense"] < 1e-5
    found = checkpointing.compare(checkpointing.Sizes(64, layers=1), window=63, device="cpu")
    assert found["rows"][-1]["difference_from_dense"] > 1e-5


def test_a_difference_is_that_of_the_worst_tensor():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    assert checkpointing.difference([a, b], [a, b]) == 0
    assert checkpointing.difference([a, b], [a, b + torch.tensor([0.0, 5.0])]) == pytest.approx(5 / 25)


def test_the_table_shows_the_rows(facts):
    text = checkpointing.table(facts)
    for row in facts["rows"]:
        (line,) = (x for x in text.splitlines() if x.startswith(row["way"] + "  "))
        assert f"{row['peak_bytes'] / 2**20:.1f} MiB" in line
        assert f"{row['kept_bytes'] / 2**20:.1f} MiB" in line
    assert "S of one layer: 4.5 MiB" in text


def test_the_picture(facts, tmp_path):
    pytest.importorskip("matplotlib")
    checkpointing.draw(facts, str(tmp_path / "memory.png"))
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_must_be_positive(capsys):
    with pytest.raises(SystemExit) as exit_:
        checkpointing.main(["--length", "0"])
    assert exit_.value.code == 2
    assert "must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    found = checkpointing.compare(checkpointing.Sizes(1024, layers=2), window=128, device="cuda")
    peak = {row["way"]: row["peak_bytes"] for row in found["rows"]}
    assert peak["dense"] > peak["dense + checkpoint"] > peak["tiled"]
