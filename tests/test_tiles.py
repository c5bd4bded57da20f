"""``tilewise tiles``: counts and shares against the mask written out, the pictures, and the command."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
from typer.testing import CliRunner

from tilewise import tiles
from tilewise.console import app
from tilewise.maskexpr import parse_mask
from tilewise.masks import Patch


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def run(line):
    return CliRunner().invoke(app, shlex.split(line))


def facts(line, code=0):
    result = run(line + " --json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_a_band_of_one_and_two_tiles():
    """Tiles of 2 x 2 of an 8 x 8 causal window of 3 keys, drawn by hand."""
    found = tiles.tile_facts("causal & window(2, 0)", 8, 8, 2, 2)
    assert found["maps"] == [["PEEE", "PPEE", "EPPE", "EEPP"]]
    assert (found["total"], found["empty"], found["partial"], found["full"]) == (16, 9, 7, 0)
    assert found["share_visited"] == 7 * 4 / 64
    assert found["share_visible"] == (1 + 2 + 6 * 3) / 64
    assert tiles.tile_facts("causal", 5, 5, 2, 2)["maps"] == [["PEE", "FPE", "FFF"]]  # the last query sees all


MASKS = [
    "causal",
    "causal & window(9, 0)",
    "window(3, 5) | causal(align='bottom_right')",
    "~causal",
    "key_lengths([0, 13, 50])",
    "key_lengths([13, 40], padding='left') & causal",
    "query_lengths([20])",
    "prefix_lm([4, 30])",
    "documents([0] * 17 + [1] * 20 + [3] * 13) & causal",
    "documents([[0] * 25 + [1] * 25, [0] * 50])",
]


@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize("block", [(8, 16), (7, 3), (64, 64)], ids=str)
def test_against_the_mask_written_out(text, block):
    mask, length = parse_mask(text), 50
    found = tiles.tile_facts(text, length, length, *block)
    whole = slice(0, length)
    patch = Patch(slice(0, found["batch"]), slice(0, 1), whole, whole, length, length, torch.device("cpu"))
    keep = mask.keep(patch).expand(found["batch"], 1, length, length)[:, 0]
    seen = dict.fromkeys("EPF", 0)
    pairs = 0
    for kept, lines in zip(keep, found["maps"], strict=True):
        for strip, line in zip(kept.split(block[0], 0), lines, strict=True):
            for tile, letter in zip(strip.split(block[1], 1), line, strict=True):
                seen[letter] += 1
                assert letter != "E" or not tile.any()
                assert letter != "F" or tile.all()
                if not any(x in text for x in ("&", "|", "prefix_lm")):
                    assert letter != "P" or (tile.any() and not tile.all())  # of one term the verdict is exact
                pairs += tile.numel() if letter != "E" else 0
    assert (found["empty"], found["partial"], found["full"]) == tuple(seen[x] for x in "EPF")
    assert found["total"] == sum(seen.values())
    assert found["share_visible"] == int(keep.sum()) / keep.numel()
    assert found["share_visited"] == pairs / keep.numel()


def test_a_long_map_is_shrunk_and_says_so():
    lines = ["F" * 40 + "E" * 40] * 3 + ["E" * 80]
    small, scale = tiles.shrink(lines, most=4)
    assert scale == (1, 20)
    assert small == ["FFEE"] * 3 + ["EEEE"]
    assert tiles.shrink(lines, most=3) == (["FPE", "PPE"], (2, 27))  # mixed tiles are P, the ends are their own
    assert tiles.shrink(["PF"], most=32) == (["PF"], (1, 1))


def test_the_picture_in_a_terminal():
    text = run("tiles --mask 'causal & window(256,0)' --length 4096").stdout
    lines = text.splitlines()
    assert lines[0] == "causal() & window(256, 0), 4096 queries, 4096 keys, tiles of 128 x 128"
    drawn = [line.strip() for line in lines[1:33]]
    assert drawn[0] == "▒▒" + 62 * "·"
    assert drawn[5] == 6 * "·" + "▒▒██▒▒" + 52 * "·"
    assert lines[33] == "each pair of characters is a tile"
    assert "▒      62 of 1024 (  6.1%)  PARTIAL: masked pair by pair" in lines
    assert "█      31 of 1024 (  3.0%)  FULL: no mask arithmetic" in lines
    assert "·     931 of 1024 ( 90.9%)  EMPTY: skipped" in lines
    assert lines[-1] == "FLOPs: the tiles visited hold 9.1% of the unmasked problem's, the pairs kept 6.1%"
    shrunk = run("tiles --mask causal --length 100,16384").stdout
    assert "each pair of characters is 1 x 4 tiles, ▒ also where these differ" in shrunk
    assert "batch entry 1" in run("tiles --mask 'key_lengths([5, 9])' --length 64").stdout


def test_the_page_of_documentation_shows_what_is_printed():
    page = (Path(__file__).parent.parent / "docs" / "tiles.md").read_text()
    line = re.search("```bash\ntilewise (.*?)\n```", page)[1]
    assert run(line).stdout.splitlines() == re.search("```text\n(.*?)```", page, re.S)[1].splitlines()


def test_json():
    found = facts("tiles --mask 'causal & window(256,0)' --length 4096 --block-m 64 --block-n 256")
    assert found["mask"] == "causal() & window(256, 0)"
    assert (found["len_q"], found["len_k"], found["block_m"], found["block_n"]) == (4096, 4096, 64, 256)
    assert found["total"] == 64 * 16 == found["empty"] + found["partial"] + found["full"]
    assert [len(found["maps"]), len(found["maps"][0]), len(found["maps"][0][0])] == [1, 64, 16]


@pytest.mark.parametrize("mask", ["causal", "key_lengths([70, 300]) & causal"])
def test_png(tmp_path, mask):
    """The colours of the picture are those of the verdicts, in their places."""
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "map.png"
    result = run(f"tiles --mask '{mask}' --length 300 --png {path}")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"wrote {path}"
    pixels = image.imread(path)[..., :3]
    found = tiles.tile_facts(mask, 300, 300)

    def share(letter):
        colour = torch.tensor([int(tiles.COLOURS[letter][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        return float(((torch.tensor(pixels) - colour).abs().amax(-1) < 0.01).double().mean())

    # Of each map 300 x 300 are drawn, the last tiles cut off; the legend adds a little to each colour.
    areas = dict.fromkeys("EPF", 0)
    for lines in found["maps"]:
        for i, line in enumerate(lines):
            for j, letter in enumerate(line):
                areas[letter] += min(128, 300 - 128 * i) * min(128, 300 - 128 * j)
    total, drawn = sum(areas.values()), sum(share(x) for x in "EPF")
    assert drawn > 0.4
    for letter, area in areas.items():
        assert share(letter) / drawn == pytest.approx(area / total, abs=0.02)


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = run(f"tiles --mask causal --length 64 --png {tmp_path}/x.png")
    assert result.exit_code == 2
    assert result.stderr.strip() == "Error: --png needs matplotlib: pip install 'tilewise[plots]'"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--mask cauzal --length 64", "unknown mask 'cauzal'"),
        ("--mask causal --length 64x64", "--length takes a length such as 4096"),
        ("--mask causal --length 64,64,64", "--length takes a length"),
        ("--mask causal --length 0", "at least 1; got Lq = 0"),
        ("--mask causal --length 64 --block-m 0", "tiles of 0 x 128"),
        ("--mask causal --length 1000000 ", "1 x 7813 x 7813 tiles are more than 1048576; take larger tiles"),
        ("--mask causal --length 1000000 --block-m 100000 --block-n 100000", "more than 4194304 pairs"),
        ("--mask 'documents([0, 1])' --length 64", "documents: the ids of the queries must have shape (64,)"),
        ("--mask 'key_lengths([])' --length 64", "lengths must be integers"),
        ("--mask 'documents([[0] * 64] * 17)' --length 64 --png x.png", "at most 16 batch entries, got 17"),
        ("--mask causal --length 64 --png /nowhere/at/all.png", "cannot write /nowhere/at/all.png: No such file"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(args, said):
    result = run("tiles " + args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert said in facts("tiles " + args, code=2)["error"]
