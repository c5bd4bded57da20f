"""``tilewise trace``: the numbers of each tile, the command, and the page in a real browser."""

import dataclasses
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from torch import tensor

pytest.importorskip("typer")
pytest.importorskip("rich")
from typer.testing import CliRunner

import tilewise
from tilewise import masks, state, trace
from tilewise.console import app
from tilewise.masks import EMPTY, FULL, PARTIAL, Grid, Patch
from tilewise.testing import problems
from tilewise.testing.problems import Maker
from tilewise.tilemap import tile_map

ARTICLE = "trace --scores 1,2,3 --values 10,20,40 --block 2"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def run(line):
    return CliRunner().invoke(app, shlex.split(line))


def facts(line, code=0):
    result = run(line + " --json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def answer(*args, **options):
    """Output and log-sum-exp of the dense backend."""
    out, aux = tilewise.attention(*args, **options, backend="dense", return_aux=tilewise.AuxRequest(lse=True))
    return out, aux.lse


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


# --- by hand --------------------------------------------------------------------------------------


def test_the_worked_example():
    """Scores 1, 2, 3 with values 10, 20, 40: every number by hand."""
    e = math.exp
    first, second = facts(ARTICLE)["steps"]
    assert first["before"] == {"m": ["-inf"], "l": [0.0], "acc": [[0.0]]}
    assert first["scores"] == [[1.0, 2.0]]
    assert first["after"] == first["tile"] == second["before"]
    assert first["tile"]["m"] == [2.0]
    assert first["tile"]["l"] == pytest.approx([e(-1) + 1])
    assert first["tile"]["acc"] == [pytest.approx([10 * e(-1) + 20])]
    assert second["tile"] == {"m": [3.0], "l": [1.0], "acc": [[40.0]]}
    assert second["after"]["m"] == [3.0]
    assert second["after"]["l"] == pytest.approx([e(-2) + e(-1) + 1])
    assert second["after"]["acc"] == [pytest.approx([10 * e(-2) + 20 * e(-1) + 40])]
    assert facts(ARTICLE)["lse"] == [[pytest.approx([math.log(e(1) + e(2) + e(3))])]]


def test_the_worked_example_as_printed():
    text = run(ARTICLE).stdout
    lines = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["0-1", "FULL", "0", "1, 2", "-inf, 0, 0", "2, 1.3679, 23.6788", "2, 1.3679, 23.6788"] in cells
    assert ["2", "FULL", "0", "3", "2, 1.3679, 23.6788", "3, 1, 40", "3, 1.5032, 48.7109"] in cells
    assert ["0", "32.405", "3.4076"] in cells


def test_the_page_of_documentation_shows_what_is_printed():
    page = (Path(__file__).parent.parent / "docs" / "trace.md").read_text()
    assert f"```bash\ntilewise {ARTICLE}\n```" in page
    shown = re.search("```text\n(.*?)```", page, re.S)[1]
    printed = [line.strip() for line in run(ARTICLE).stdout.splitlines()[2:]]
    assert [line.strip() for line in shown.splitlines() if line] == [line for line in printed if line]


def test_exercise_two_tiles():
    """Scores 0, 2, 1, 3 as tiles (0, 2) and (1, 3): both states, and the denominator."""
    e = math.exp
    found = facts("trace --scores 0,2,1,3 --values 1,1,1,1 --block 2")
    a, b = found["steps"]
    assert (a["tile"]["m"], b["tile"]["m"], b["after"]["m"]) == ([2.0], [3.0], [3.0])
    assert a["tile"]["l"] == b["tile"]["l"] == pytest.approx([1 + e(-2)])
    assert b["after"]["l"] == pytest.approx([e(-3) + e(-1) + e(-2) + 1])
    assert b["after"]["acc"][0] == pytest.approx(b["after"]["l"])  # values of 1: acc is l, and the output 1
    assert found["out"] == [[[pytest.approx([1.0])]]]


@pytest.mark.parametrize(
    "padded", ["--scores 5,7,1,3 --mask 'key_lengths([2], padding=\"left\")'", "--scores -inf,-inf,1,3"]
)
def test_exercise_padding(padded):
    """A wholly masked tile in a row that has keys elsewhere: it is skipped and leaves no trace."""
    found = facts(f"trace {padded} --values 10,20,30,40 --block 2")
    skipped, seen = found["steps"]
    assert (skipped["verdict"], skipped["scores"], skipped["tile"]) == ("EMPTY", None, None)
    assert skipped["after"] == skipped["before"] == seen["before"] == {"m": ["-inf"], "l": [0.0], "acc": [[0.0]]}
    alone = facts("trace --scores 1,3 --values 30,40 --block 2")
    assert found["out"] == alone["out"]
    assert found["lse"] == alone["lse"]
    # also in a tile that is not skipped for another row's sake
    both = facts("trace --scores -inf,-inf,1,3;1,2,-inf,3 --values 10,20,30,40 --block 2")
    first = both["steps"][0]
    assert first["verdict"] == "PARTIAL"
    assert (first["after"]["m"], first["after"]["l"][0]) == (["-inf", 2.0], 0.0)
    assert both["out"][0][0][0] == alone["out"][0][0][0]


# --- any problem ----------------------------------------------------------------------------------

MASKS = [
    None,
    masks.causal(),
    masks.causal() & masks.window(4, 0),
    masks.causal("bottom_right") | masks.key_lengths([3, 9]),
    masks.key_lengths([0, 7], padding="left"),
    masks.documents([0, 0, 0, 1, 1, 1, 1], key_ids=[0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2]),
    masks.predicate(lambda b, h, i, j: (i + j + h) % 3 == 0),
    masks.dense(torch.arange(77).view(7, 11) % 5 < 2),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("block", [(1, 1), (2, 3), (4, 8), (16, 16)], ids=str)
def test_the_steps_are_those_of_the_tile_map_and_the_state(mask, block):
    m = Maker("trace", torch.float64, "cpu")
    q, k, v = m.randn(2, 2, 7, 3), m.randn(2, 1, 11, 3), m.randn(2, 1, 11, 2)
    t = trace.of_attention(q, k, v, mask, block_m=block[0], block_n=block[1])
    same((t.out, t.lse), answer(q, k, v, mask))

    grid = Grid(2, 2, 7, 11, *block, q.device)
    table = tile_map(mask, grid).table.expand(2, 2, -1, -1)
    names = {EMPTY: "EMPTY", PARTIAL: "PARTIAL", FULL: "FULL"}
    assert [s.verdict for s in t.steps] == [names[x] for x in table.flatten().tolist()]
    s_all = q @ k.mT / math.sqrt(3)
    seen = None
    for step in t.steps:
        if step.cols.start == 0:
            seen = state.empty((step.rows.stop - step.rows.start,), 2, dtype=q.dtype, device=q.device)
        same(tuple(step.before), tuple(seen))
        seen = step.after
        if step.verdict == "EMPTY":
            assert step.after is step.before
            assert step.scores is None
            continue
        keep = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        if mask is not None:
            b, h = slice(step.batch, step.batch + 1), slice(step.head, step.head + 1)
            keep = mask.keep(Patch(b, h, step.rows, step.cols, 7, 11, q.device))
        expected = s_all[step.batch, step.head, step.rows, step.cols].masked_fill(~keep[0, 0], -math.inf)
        same(step.scores, expected)
        same(tuple(state.merge(step.before, step.tile)), tuple(step.after))


def test_every_small_problem_of_the_judge():
    """Biases, ALiBi, softcap, sinks, grouped heads, NaN behind masks, rows without a key, extreme numbers."""
    done, families = 0, set()
    for p in problems():
        call = p.make(Maker(p.name, torch.float64, "cpu"))
        t = {name: call.views.get(name, lambda x: x)(x) for name, x in call.tensors.items()}
        q, k, v, sinks = t["q"], t["k"], t["v"], t.get("sinks")
        bias = tilewise.alibi(t["alibi"]) if "alibi" in t else t.get("bias")
        options = dict(call.options)
        too_large = call.cu is not None or q[..., 0].numel() * k.shape[2] > trace.MAX_SCORES or v.shape[-1] > 16
        if too_large or not q.numel() or not k.numel() or set(options) - {"mask", "scale", "softcap"}:
            continue
        found = trace.of_attention(q, k, v, bias=bias, sinks=sinks, **options, block_m=3, block_n=4)
        out, lse = answer(q, k, v, bias=bias, sinks=sinks, **options)
        for actual, expected in ((found.out, out), (found.lse, lse)):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, equal_nan=True, msg=p.name)
        done += 1
        families.add(p.family[0])
    assert done >= 50
    assert families >= set("ABCDEG")


def test_the_state_is_fp32_for_low_precision():
    q = torch.randn(1, 1, 4, 4, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    t = trace.of_attention(q, q, q)
    assert {x.dtype for x in (t.out, t.lse, *t.steps[0].after)} == {torch.float32}
    torch.testing.assert_close(t.out.to(q.dtype), tilewise.attention(q, q, q), rtol=2e-2, atol=2e-2)


def test_a_random_problem_follows_its_seed():
    line = "trace --shape 1,2,6,3 --mask 'causal & window(2, 0)'"
    assert facts(line) == facts(line + " --seed 0")
    assert facts(line)["out"] != facts(line + " --seed 1")["out"]
    found = facts(line + " --block-m 3 --block-n 2")
    assert found["sizes"] == {
        "batch": 1, "heads": 2, "len_q": 6, "len_k": 6, "dim_v": 3, "block_m": 3, "block_n": 2,
    }  # fmt: skip
    assert len(found["steps"]) == 2 * 2 * 3
    assert found["mask"] == "causal() & window(2, 0)"
    text = run(line).stdout
    assert "skipped" in text
    assert "0, 1" in text  # batch entry 0, head 1


def test_json_has_no_number_that_json_does_not_have():
    found = facts("trace --scores -inf,-inf;nan,inf --values 1,2")
    assert found["lse"] == [[["-inf", "nan"]]]
    assert found["out"] == [[[[0.0], ["nan"]]]]


# --- what cannot be meant -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("", "give either --scores and --values, or --shape"),
        ("--scores 1,2", "give either"),
        ("--scores 1,2 --values 1,2 --shape 1,1,2,2", "give either"),
        ("--scores 1,2 --values 1,2 --seed 3", "give either"),
        ("--scores 1,two --values 1,2", "--scores takes numbers such as 1,2,3"),
        ("--scores 1,2;3 --values 1,2", "--scores: all rows must have as many numbers"),
        ("--scores 1,2 --values 1,2,3", "the same number of keys; got (1, 2) and (3,)"),
        ("--scores 1,2 --values 1;2", "--values takes one number for each key"),
        ("--scores 1,2 --values 1,2 --block 0", "tiles of 2 x 0"),
        ("--scores 1,2 --values 1,2 --mask cauzal", "unknown mask 'cauzal'"),
        ("--scores 1,2 --values 1,2 --mask 'documents([0])'", "documents: the ids"),
        ("--shape 1,1,8", "--shape B,H,L,D takes four sizes"),
        ("--shape 1,1,0,4", "at least one"),
        ("--shape 1,1,65,4", "at most 4096 scores (B * H * Lq * Lk); got 1 * 1 * 65 * 65 = 4225"),
        ("--shape 999999,999999,999999,4", "at most 4096 scores"),
        ("--shape 1,1,4,999999999", "at most 16 numbers"),
        ("--shape 2,1,8,4 --mask 'key_lengths([3])'", "lengths must have shape"),
        ("--shape 1,1,8,4 --html /nowhere/at/all.html", "cannot write /nowhere/at/all.html: No such file"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(args, said):
    result = run("trace " + args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert said in facts("trace " + args, code=2)["error"]


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"got \(3,\) and \(3,\)"):
        trace.of_scores(tensor([1.0, 2.0, 3.0]), tensor([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="at most 16 numbers"):
        trace.of_attention(*(torch.zeros(1, 1, 2, 17) for _ in "qkv"))


# --- the page -------------------------------------------------------------------------------------


def embedded(html):
    """What the page holds between its script tags, as a parser finds it."""
    return re.search(r'<script type="application/json" id="trace">(.*?)</script', html, re.S)[1]


def test_the_page_holds_the_trace_whatever_its_text():
    t = trace.random_problem((1, 1, 4, 2), masks.causal())
    nasty = "</script><script>document.title='owned'</script><!-- <b>TRACE_DATA</b> \\u003c \u2028"
    t = dataclasses.replace(t, about=(*t.about, nasty))
    html = trace.page(t)
    assert json.loads(embedded(html)) == t.to_dict()
    assert html.count("<script") == trace.page(dataclasses.replace(t, about=())).count("<script") == 2


def test_the_page_asks_for_nothing():
    html = trace.page(trace.random_problem((1, 1, 4, 2)))
    assert not re.search(r"https?:|//[a-z]|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttpRequest", html)


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium without a window; ``make test`` installs it where it may."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no browser to open the page in: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Root has no sandbox, and containers little shared memory; only files written here are opened.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900"):
        options.add_argument(argument)
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield window
    window.quit()


class Page:
    """The page of a trace as its reader meets it."""

    def __init__(self, browser, path, what):
        if isinstance(what, str):
            result = run(f"{what} --html {path}")
            assert result.exit_code == 0, result.output
            assert result.stdout.splitlines()[-1].startswith(f"wrote {path}")
        else:
            path.write_text(trace.page(what), "utf-8")
        self.browser = browser
        browser.get_log("browser")
        browser.get(path.as_uri())

    def find(self, selector):
        return self.browser.find_elements("css selector", selector)

    def text(self, selector):
        return self.find(selector)[0].text

    def click(self, selector):
        self.find(selector)[0].click()

    def press(self, key):
        self.find("body")[0].send_keys(key)

    def cells(self, selector):
        """Texts of a table, a list for each row that is shown."""
        rows = self.browser.execute_script(
            "return [...document.querySelectorAll(arguments[0] + ' tr')]"
            ".map(r => [...r.children].map(c => c.innerText.trim()))",
            selector,
        )
        return rows

    def shown(self):
        return self.text("#position"), self.text("#what").split(". ")[0].rstrip(".")


@pytest.fixture
def opened(browser, tmp_path):
    def open_page(what):
        """The page of a command line or of a trace."""
        return Page(browser, tmp_path / "trace.html", what)

    yield open_page
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_the_page_steps_forward_and_back(opened):
    page = opened(ARTICLE)
    first, second = ("tile 1 of 2", "Queries 0, keys 0–1: FULL"), ("tile 2 of 2", "Queries 0, keys 2: FULL")
    first_row = ["0", "−∞", "0", "0", "2", "1.3679", "23.6788", "2", "1.3679", "23.6788"]
    second_row = ["0", "2", "1.3679", "23.6788", "3", "1", "40", "3", "1.5032", "48.7109"]

    assert page.shown() == first
    assert page.cells("#state")[-1] == first_row
    assert page.cells("#scores")[1] == ["query 0", "1", "2", ""]  # the third is of a tile to come
    assert page.cells("#scores")[2] == ["value", "10", "20", "40"]
    assert not page.find("#previous")[0].is_enabled()
    assert not page.find("#answer")[0].is_displayed()

    page.click("#next")
    assert page.shown() == second
    assert page.cells("#state")[-1] == second_row
    assert page.cells("#scores")[1] == ["query 0", "1", "2", "3"]
    assert page.text("#arithmetic").splitlines() == [
        "query 0: s = 3",
        "m = max(2, 3) = 3",
        "l = e^(2 − 3) · 1.3679 + e^(3 − 3) · 1 = 1.5032",
        "acc = e^(2 − 3) · 23.6788 + e^(3 − 3) · 40 = 48.7109",
    ]

    page.click("#previous")
    assert page.shown() == first
    assert page.cells("#state")[-1] == first_row
    assert page.cells("#scores")[1] == ["query 0", "1", "2", ""]

    page.click("#next")
    page.click("#next")
    assert page.shown()[0] == "output"
    assert page.find("#answer")[0].is_displayed()
    assert not page.find("#rows")[0].is_displayed()
    assert not page.find("#next")[0].is_enabled()
    assert page.cells("#output") == [["query", "acc / l", "m + log(l)"], ["0", "32.4045", "3.4076"]]

    page.click("#previous")
    assert page.shown() == second
    assert page.cells("#state")[-1] == second_row


def test_the_page_takes_keys_the_slider_and_the_map(opened):
    from selenium.webdriver.common.keys import Keys

    page = opened("trace --shape 1,2,6,3 --mask 'causal & window(2,0)'")
    seen = [page.shown()[0]]
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.END,
                Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.HOME):  # fmt: skip
        page.press(key)
        seen.append(page.shown()[0])
    at = "tile {} of 18".format
    assert seen == [*map(at, (1, 2, 3, 2, 1, 1)), "output", "output", at(18), at(1)]

    page.find("#slider")[0].send_keys(Keys.ARROW_RIGHT)
    assert page.shown()[0] == at(2)
    page.click("#map tr:nth-child(3) td:nth-child(3) button")
    assert page.shown() == (at(5), "Queries 2–3, keys 2–3: PARTIAL")
    page.browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.shown() == (at(6), "Queries 2–3, keys 4–5: EMPTY")
    assert page.text("#arithmetic") == "query 2: nothing to do"
    page.click("#last")
    page.click("#first")
    assert page.shown()[0] == at(1)


def test_the_page_shows_what_the_trace_holds(opened):
    """Every step: verdicts, scores and state, against the JSON of the same command."""
    line = "trace --shape 1,2,5,2 --mask 'causal & window(2,0)' --block-m 3"
    found = facts(line)
    page = opened(line)

    def number(text):
        return float(text.replace("−", "-").replace("∞", "inf"))

    for n, step in enumerate(found["steps"]):
        assert page.text("#position") == f"tile {n + 1} of {len(found['steps'])}"
        mine = [s for s in found["steps"] if s["head"] == step["head"]]
        letters = "".join(cell[0] for row in page.cells("#map")[1:] for cell in row[1:])
        assert letters == "".join(s["verdict"][0] for s in mine)
        assert step["verdict"] in page.text("#what")
        (i0, i1), (j0, j1) = step["rows"], step["cols"]
        for i in range(i0, i1):
            cells = page.cells("#scores")[1 + i][1 + j0 : 1 + j1]
            row = page.cells("#state")[2 + i - i0]
            after = [step["after"]["m"][i - i0], step["after"]["l"][i - i0], *step["after"]["acc"][i - i0]]
            assert [number(x) for x in row[9:]] == pytest.approx([float(x) for x in after], abs=6e-5)
            if step["scores"] is None:
                assert cells == [""] * (j1 - j0)
                assert row[5:9] == ["–"] * 4
            else:
                expected = [float(x) for x in step["scores"][i - i0]]
                assert [number(x) for x in cells] == pytest.approx(expected, abs=6e-5)
        page.click("#next")
    rows = page.cells("#output")[1:]
    expected = [[0, h, i, *found["out"][0][h][i], found["lse"][0][h][i]] for h in range(2) for i in range(5)]
    assert [[number(x) for x in row] for row in rows] == [pytest.approx(row, abs=6e-5) for row in expected]


def test_the_page_of_sinks_and_of_a_bias_with_a_gradient(opened):
    q, bias = torch.ones(1, 2, 2, 1), torch.zeros(2, 2, requires_grad=True)
    found = trace.of_attention(q, q, q, bias=bias, sinks=tensor([1.0, -2.5]))
    same(found.out, answer(q, q, q, bias=bias.detach(), sinks=tensor([1.0, -2.5]))[0])
    page = opened(found)
    page.click("#last")
    assert page.text("#what").endswith("First a sink joins the state: its score is 1, −2.5.")
    assert page.cells("#output")[1] == ["0", "0", "0", "0.6667", "2.0986"]  # 2e / 3e, log(3e)


def test_the_page_of_a_long_row_shows_colours_with_titles(opened):
    page = opened("trace --shape 1,1,40,2 --mask causal --block-m 16 --block-n 16")
    page.click("#last")
    last = page.find("#scores tr:nth-child(41) td:last-child")[0]
    assert last.text == ""
    assert re.fullmatch(r"query 39, key 39: −?\d+\.\d+", last.get_attribute("title"))
    assert last.size["width"] < 20


CONTRAST = """
const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
const pen = canvas.getContext("2d", {willReadFrequently: true});
function rgb(colour) {
  pen.clearRect(0, 0, 1, 1);
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data];
}
function light(colour) {
  const [r, g, b] = rgb(colour).map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(e) {
  const colour = getComputedStyle(e).backgroundColor;
  return rgb(colour)[3] === 255 ? colour : behind(e.parentElement);
}
return [...document.querySelectorAll("body *")]
  .filter(e => e.checkVisibility() && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
  .map(e => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.outerHTML];
  });
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable(opened, scheme):
    """Contrast of every text against what is behind it, at least 4.5 (WCAG 2 AA), on each step."""
    page = opened("trace --scores 1,9,-9,3;9,-inf,-inf,-inf --values 9,-8,1,2 --block 2")
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    paper = page.browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) > 384) == (scheme == "light")
    for _ in range(3):
        found = page.browser.execute_script(CONTRAST)
        assert len(found) > 30
        assert min(found)[0] >= 4.5, min(found)
        page.click("#next") if page.find("#next")[0].is_enabled() else None
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
