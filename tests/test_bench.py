"""The benchmark: what is in a row, what becomes a reason, and what plot and report make of a file."""

import base64
import importlib.util
import json
import re
import resource
import shlex
import signal
import stat
import subprocess
import sys
import time
import types
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from tilewise import attention, dispatch, iomodel, masks
from tilewise.backends.tiled import TiledBackend
from tilewise.bench import adapters, check, kernels, ncu, plots, records, report, runner, timing
from tilewise.bench.adapters import base, flex
from tilewise.bench.cases import Axes, Case, checkable, inputs, leaves, mask_text
from tilewise.bench.timing import Times, alternate, turn
from tilewise.console import app
from tilewise.dispatch import Grads
from tilewise.maskexpr import parse_mask
from tilewise.masks import Patch

CEILINGS = iomodel.Ceilings(1e11, 1e10)
TINY = "--heads 2 --dim 16 --rounds 2 --length 40"
MEASURED = (
    "check", "samples", "p20_s", "p50_s", "p80_s", "spread", "step_s", "peak_bytes", "kernels", "flops", "model_bytes",
    "intensity", "predicted_s", "tflops", "tokens_per_s", "matmul_share", "copy_share", "predicted_to_measured",
)  # fmt: skip
ALWAYS = (*records.CASE, "backend", "direction", "device", "device_facts", "versions", "seed", "rounds", "measured_at")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """Measuring the ceilings takes seconds: once, in the test of the process, is enough."""
    monkeypatch.setattr(iomodel, "measure_ceilings", lambda device, dtype: CEILINGS)
    monkeypatch.setenv("COLUMNS", "200")


def run(line):
    return CliRunner().invoke(app, shlex.split(line))


def sweep(path, line, code=0):
    """Rows of a sweep by (backend, direction, length, mask)."""
    path = path / "rows.jsonl"
    result = run(f"bench --out {path} {line}")
    assert result.exit_code == code, result.output
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({tuple(row) for row in rows}) == 1  # all have the same keys
    return {(r["backend"], r["direction"], r["length"], r["mask"]): r for r in rows}


def register(monkeypatch, name, forward=None, backward=None):
    """A backend that is tiled, but for what is given."""

    class Changed(TiledBackend):
        pass

    Changed.name = name
    backend = Changed()
    if forward is not None:
        backend.forward = lambda r: forward(TiledBackend.forward(backend, r))
    if backward is not None:
        backend.backward = lambda r, *rest: backward(TiledBackend.backward(backend, r, *rest))
    monkeypatch.setitem(dispatch.BACKENDS, name, backend)


# --- rows -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A sweep over masks, grouped heads, backends and directions."""
    path = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iomodel, "measure_ceilings", lambda device, dtype: CEILINGS)
        line = "--backend tiled,torch_flash,dense --length 48,96 --heads 4 --kv-heads 2 --dim 16 --rounds 2"
        masks_ = '--mask full --mask "window(9, 0)" --causal no,yes --direction forward,backward,both'
        return sweep(path, f"{line} {masks_}")


def test_a_sweep_is_every_combination(rows):
    named = {"full", "causal", "window(9, 0)", "causal & (window(9, 0))"}
    assert {key[3] for key in rows} == named
    assert len(rows) == 3 * 3 * 2 * 4


def test_timed_rows_are_complete(rows):
    timed = [row for row in rows.values() if row["reason"] is None]
    assert len(timed) == len(rows) - 12  # the flash kernel takes no window
    for row in timed:
        assert all(row[name] is not None for name in (*MEASURED, *ALWAYS)), row
        assert row["p20_s"] <= row["p50_s"] <= row["p80_s"]
        assert row["samples"] == 2
        assert row["spread"] == pytest.approx((row["p80_s"] - row["p20_s"]) / row["p50_s"])
        assert row["tflops"] * 1e12 * row["p50_s"] == pytest.approx(row["flops"])
        assert row["matmul_share"] == pytest.approx(row["tflops"] * 1e12 / CEILINGS.matmul_flops_per_s)
        assert row["copy_share"] * CEILINGS.copy_bytes_per_s * row["p50_s"] == pytest.approx(row["model_bytes"])
        assert row["tokens_per_s"] * row["p50_s"] == pytest.approx(row["length"])
        assert row["predicted_to_measured"] == pytest.approx(row["predicted_s"] / row["p50_s"])
        assert row["intensity"] == pytest.approx(row["flops"] / row["model_bytes"])
        wanted = {"out"} if row["direction"] == "forward" else {"out", "dq", "dk", "dv"}
        assert set(row["check"]["measured"]) == wanted
        assert all(m["ok"] and m["error"] <= m["limit"] for m in row["check"]["measured"].values())


def test_a_refusal_is_a_row_with_its_reason_and_nothing_measured(rows):
    row = rows["torch_flash", "backward", 48, "causal & (window(9, 0))"]
    assert "has no argument for" in row["reason"]
    assert {name for name in MEASURED if row[name] is not None} == {"flops", "model_bytes", "intensity", "predicted_s"}
    assert all(row[name] is not None for name in ALWAYS)


def test_the_page_explains_every_key(rows):
    page = (Path(__file__).parent.parent / "docs" / "bench.md").read_text()
    explained = {word for line in page.splitlines() if line.startswith("| `") for word in re.findall(r"`(\w+)`", line)}
    assert set(next(iter(rows.values()))) <= explained


def test_numbers_are_those_of_the_case(rows):
    def row(backend="tiled", direction="forward", length=96, mask="full"):
        return rows[backend, direction, length, mask]

    full = 4 * 4 * 96 * 96 * 16
    assert row()["flops"] == full
    assert row(direction="backward")["flops"] == 2.5 * full
    assert row(direction="both")["flops"] == 3.5 * full
    assert row(mask="causal")["flops"] == full * 97 / 192
    assert row("dense")["flops"] == full  # what is useful, not what it computes
    assert row("dense")["model_bytes"] > row()["model_bytes"]
    for name in ("tiled", "dense"):
        steps = {row(name, direction)["step_s"] for direction in ("forward", "backward", "both")}
        assert steps == {row(name, "both")["p50_s"]}
    for name in ("forward", "backward"):
        assert row("dense", name)["peak_bytes"] > 3 * row("dense", name, length=48)["peak_bytes"]
    ran = {k["name"] for k in row(direction="both")["kernels"]}
    assert {"tilewise::forward", "tilewise::backward"} <= ran
    assert all(k["seconds"] > 0 and k["calls"] >= 1 for k in row()["kernels"])
    assert row()["gap_share"] is None  # there are no kernels on a CPU


def test_dropout_is_checked_with_the_seed_where_it_is_honoured(tmp_path):
    found = sweep(tmp_path, f"{TINY} --dropout 0.3 --backend tiled,torch_math,torch_flash --direction both --seed 5")
    assert found["tiled", "both", 40, "full"]["check"]["dropout_p"] == 0.3
    assert found["torch_math", "both", 40, "full"]["check"]["dropout_p"] == 0.0
    assert "dropout" in found["torch_flash", "both", 40, "full"]["reason"]
    assert all(row["seed"] == 5 for row in found.values())


def test_a_forward_alone_has_no_step(tmp_path):
    found = sweep(tmp_path, f"{TINY} --backend tiled --direction forward --dtype bf16,fp64")
    assert [row["dtype"] for row in records.read(tmp_path / "rows.jsonl")] == ["bfloat16", "float64"]
    assert all(row["step_s"] is None and row["p50_s"] for row in found.values())


# --- reasons --------------------------------------------------------------------------------------


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    register(monkeypatch, "wrong", forward=lambda o: o._replace(out=o.out * 1.001))
    found = sweep(tmp_path, f"{TINY} --backend tiled,wrong", code=1)
    for direction in ("forward", "backward"):
        row = found["wrong", direction, 40, "full"]
        assert row["reason"].startswith("wrong result, so it is not timed: out: root mean square error")
        assert not row["check"]["measured"]["out"]["ok"]
        assert row["p50_s"] is row["tflops"] is row["step_s"] is row["peak_bytes"] is row["kernels"] is None
        assert found["tiled", direction, 40, "full"]["p50_s"] > 0


def test_a_wrong_gradient_spoils_the_backward_only(tmp_path, monkeypatch):
    def shifted(grads):
        return Grads(*(None if g is None else g.roll(1, 2) if n == "k" else g for n, g in grads._asdict().items()))

    register(monkeypatch, "wrong", backward=shifted)
    found = sweep(tmp_path, f"{TINY} --backend wrong", code=1)
    assert found["wrong", "forward", 40, "full"]["p50_s"] > 0
    assert found["wrong", "forward", 40, "full"]["step_s"] is None
    row = found["wrong", "backward", 40, "full"]
    assert "dk: root mean square error" in row["reason"]
    assert "dv" not in row["reason"]
    assert row["p50_s"] is None


@pytest.mark.parametrize("at", ["the check", "the clock"])
def test_what_a_backend_raises_is_its_reason(tmp_path, monkeypatch, at):
    seen = []

    def fails(output):
        seen.append(output)
        if at == "the check" or len(seen) > 2:
            raise RuntimeError("the kernel has a <bug>")
        return output

    register(monkeypatch, "failing", forward=fails)
    found = sweep(tmp_path, f"{TINY} --backend failing,tiled --direction forward")
    row = found["failing", "forward", 40, "full"]
    assert row["reason"] == "RuntimeError: the kernel has a <bug>"
    assert row["p50_s"] is row["samples"] is None
    assert found["tiled", "forward", 40, "full"]["p50_s"] > 0


@pytest.fixture
def at_most_a_terabyte():
    """Where the system promises more memory than there is, asking for 4 TB would not fail but end the tests."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**40, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("at_most_a_terabyte")
def test_out_of_memory_is_a_reason(tmp_path):
    line = "--backend torch_math --heads 1 --dim 8 --length 16,1048576 --direction forward --rounds 1"
    found = sweep(tmp_path, line)
    assert "can't allocate memory" in found["torch_math", "forward", 2**20, "full"]["reason"]
    assert found["torch_math", "forward", 16, "full"]["p50_s"] > 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--heads 4 --kv-heads 3", "query heads must be a multiple of key/value heads, got 4 and 3"),
        ('--mask "documents([0, 0, 1])"', "the ids of the queries must have shape"),
        ('--mask "key_lengths([9, 7])"', "lengths must have shape"),
    ],
)
def test_a_case_that_cannot_be_is_a_row_for_every_backend(tmp_path, line, reason):
    found = sweep(tmp_path, f"--length 32 --rounds 1 --direction both --backend tiled,torch_flash {line}", code=1)
    assert len(found) == 2
    assert all(reason in row["reason"] and row["p50_s"] is None and row["flops"] is None for row in found.values())


def test_packages_that_are_not_here_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "importable", lambda module: False)
    names = ",".join(adapters.PACKAGES)
    found = sweep(tmp_path, f"{TINY} --direction forward --backend {names}", code=1)
    reasons = {key[0]: row["reason"] for key, row in found.items()}
    assert set(reasons) == {"flex", "flash_attn_2", "flash_attn_3", "flash_attn_4", "xformers"}
    assert reasons["flash_attn_2"] == "flash-attn is not installed: pip install flash-attn"
    assert all(" is not installed: " in reason for reason in reasons.values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--length 0", "--length '0': '0' is not a size"),
        ("--dim 64,x", "'x' is not a size"),
        ("--backend nothing", "--backend 'nothing': unknown backend 'nothing'; there are hopper, triton, tiled"),
        ("--dtype int8", "unknown dtype 'int8'"),
        ("--mask sideways", "unknown mask 'sideways'"),
        ("--causal maybe", "'maybe' is neither no nor yes"),
        ("--dropout 1", "at least 0 and below 1"),
        ("--dropout x", "could not convert"),
        ("--direction up", "unknown direction 'up'; there are forward, backward, both"),
        ("--device meta", "nothing to measure on meta"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--device cpu:x", "there is no device 'cpu:x' here; there are cpu"),
        ("--device cpu --ncu", "--ncu counts what a GPU's memory moves"),
        ("--out /no/such/folder/rows.jsonl", "cannot write /no/such/folder/rows.jsonl"),
    ],
)
def test_what_cannot_be_meant_is_said(line, message):
    result = run(f"bench {line}")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


# --- the command ----------------------------------------------------------------------------------


def test_json_is_one_document_and_files_grow(tmp_path):
    path = tmp_path / "rows.jsonl"
    line = f"bench {TINY} --backend tiled,torch_cudnn --direction forward --out {path}"
    document = json.loads(run(line + " --json").stdout)
    assert document["ok"]
    assert not document["interrupted"]
    assert document["rows"] == [json.loads(text) for text in path.read_text().splitlines()]
    assert run(line).exit_code == 0
    assert len(path.read_text().splitlines()) == 4
    latest = records.read(path)
    assert len(latest) == 2
    assert latest[0]["p50_s"] == json.loads(path.read_text().splitlines()[2])["p50_s"]


def test_people_get_a_table_and_the_reasons():
    result = run(f"bench {TINY} --backend tiled,torch_cudnn")
    assert result.exit_code == 0
    assert "forward float32 full B=1 H=2 L=40 D=16" in result.stdout
    assert re.search(r"tiled +[\d.]+ +[\d.]+ % +[\d.e-]+", result.stdout)
    assert "torch_cudnn (2 rows): is a CUDA kernel, the tensors are on cpu" in result.stdout
    assert result.stderr == ""


def test_nothing_timed_is_exit_code_1():
    assert run(f"bench {TINY} --backend torch_cudnn").exit_code == 1


def test_as_a_process_ctrl_c_keeps_what_is_measured(tmp_path):
    path = tmp_path / "rows.jsonl"
    lengths = ",".join(str(n) for n in range(16, 3000))
    line = f"bench --backend tiled --heads 1 --dim 8 --rounds 1 --direction forward --length {lengths} --out {path}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tilewise.cli", *shlex.split(line)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it, and hands that on
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 130, error
    text = path.read_text()
    assert text.endswith("\n")
    rows = [json.loads(line) for line in text.splitlines()]
    assert 3 <= len(rows) < 384
    assert [row["length"] for row in rows] == list(range(16, 16 + len(rows)))
    assert all(row["p50_s"] > 0 and row["matmul_ceiling_tflops"] > 0 for row in rows)
    assert f"Interrupted after {len(rows)} rows." in out
    assert "Traceback" not in error


def test_the_command_imports_neither_matplotlib_nor_dynamo():
    code = "import sys, tilewise.console; print({'matplotlib', 'torch._dynamo'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --- cases ----------------------------------------------------------------------------------------


def test_cases():
    axes = Axes(heads=(4, 2), kv_heads=(2,), length=(8, 16), mask=("full", "causal"), causal=(False, True))
    cases = axes.cases()
    assert len(cases) == 2 * 2 * 3  # full and causal joined with causal are full, causal, causal & causal
    assert str(cases[0]) == "B=1 H=4/2 L=8 D=64 float32 full"
    assert Axes().cases()[0].kv_heads == 8
    assert mask_text("a | b", True) == "causal & (a | b)"


def test_inputs_are_random_and_repeat():
    case = Case(2, 4, 2, 16, 8, "bfloat16", "window(3, 0)", 0.5)
    one, two, other = inputs(case, "cpu", 0), inputs(case, "cpu", 0), inputs(case, "cpu", 1)
    r = one.request
    assert (r.q.shape, r.k.shape, r.v.shape) == ((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8))
    assert r.dtype == torch.bfloat16
    assert torch.equal(r.q, two.request.q)
    assert not torch.equal(r.q, other.request.q)
    assert float(r.q.float().std()) == pytest.approx(1, abs=0.1)
    trained = leaves(r)
    assert trained.q.requires_grad
    assert trained.q.is_leaf
    assert not r.q.requires_grad
    assert checkable(r, True).seeded
    assert checkable(r, False).dropout_p == 0


# --- the check ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 1, 7), (2, 3, 40), (3, 2, 500), (1, 4, 3000), (5, 1, 33)])
@pytest.mark.parametrize("scores", [1, 2**13, 2**16])
def test_pieces_are_disjoint_spread_and_few(batch, heads, length, scores):
    cut = check.pieces(batch, heads, length, length, scores)
    rows = [(b, i) for b, s in cut for i in range(s.start, s.stop)]
    assert len(set(rows)) == len(rows)
    assert all(0 <= b < batch and 0 <= i < length for b, i in rows)
    assert rows[0] == (0, 0)
    assert rows[-1] == (batch - 1, length - 1)
    if batch * heads * length * length <= scores:
        assert len(rows) == batch * length
    else:
        assert len(rows) <= max(32, scores // (heads * length))


@pytest.mark.parametrize("mask", ["full", "causal & window(40, 0)", "key_lengths([50, 200])"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cut_is_judged_as_the_whole_is(mask, dtype):
    """What is right passes and what is wrong in a part of dK only does not."""
    made = inputs(Case(2, 4, 2, 200, 16, dtype, mask, 0.2), "cpu", 3)
    r = checkable(leaves(made.request), True)
    right = adapters.get("tiled").prepare(r)

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, k):
            return k.view_as(k)

        @staticmethod
        def backward(ctx, g):
            g = g.clone()
            g[1, 1, 100:150] *= 2
            return g

    def wrong():
        return attention(
            r.q, Spoiled.apply(r.k), r.v, r.mask, dropout_p=r.dropout_p, seed=int(r.rng[0]), backend="tiled"
        )

    for scores in (2**22, 2**16):
        good = check.judged(r, made.dout, right, scores)
        assert not good.wrong
        assert (good.rows, good.of) == (400 if scores == 2**22 else 80, 400)
        assert check.judged(r, made.dout, wrong, scores).wrong.startswith("dk: root mean square error")


def test_a_wrong_row_of_the_cut_is_seen():
    made = inputs(Case(1, 2, 2, 1000, 16, "float32", "causal", 0.0), "cpu", 0)

    def wrong():
        out = attention(made.request.q, made.request.k, made.request.v, made.request.mask)
        out[:, :, -1] *= 1.01
        return out

    found = check.judged(made.request, made.dout, wrong, 2**17)
    assert found.rows == 64
    assert found.wrong.startswith("out: root mean square error")


def test_a_mask_that_leaves_one_key_has_gradients_of_zero():
    """P is 1, so dP - delta cancels: what is left is rounding, and the budget knows."""
    made = inputs(Case(1, 2, 2, 64, 16, "float32", "window(0, 0)", 0.0), "cpu", 0)
    r = leaves(made.request)
    assert not check.judged(r, made.dout, adapters.get("tiled").prepare(r)).wrong


# --- adapters -------------------------------------------------------------------------------------


def request(mask="full", dtype="float32", kv_heads=4, length=24):
    return inputs(Case(2, 4, kv_heads, length, 8, dtype, mask, 0.0), "cpu", 0).request


def test_a_package_gives_every_reason():
    r = request("documents([0] * 12 + [1] * 12)")
    reason = adapters.get("flash_attn_3").why_not(r)
    assert "runs on cuda, the tensors are on cpu" in reason
    assert "does not take float32, only bfloat16 and float16" in reason
    assert "takes one window on the bottom-right diagonal" in reason
    assert "does not take dropout_p" in adapters.get("flash_attn_3").why_not(inputs(
        Case(1, 2, 2, 8, 8, "bfloat16", "full", 0.5), "cpu", 0
    ).request)  # fmt: skip
    assert "no backward on a CPU" in adapters.get("flex").why_not(leaves(request()))
    assert adapters.get("flex").why_not(r) is None


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown backend 'x'; there are hopper, triton, tiled, .* flex"):
        adapters.get("x")


def test_what_a_sweep_takes_by_itself():
    assert {"dense", "torch_math"}.isdisjoint(adapters.usual("cuda"))
    assert {"triton", "tiled", "torch_flash", "flex", "flash_attn_4"} <= set(adapters.usual("cuda"))
    assert "flex" not in adapters.usual("cpu")


def fake_flash(none, with_lse):
    """flash_attn_func by its documentation, for (B, L, H, D) tensors; ``none`` is an open edge of its window."""

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(none, none)):
        assert dropout_p == 0.0
        left, right = (None if n == none else n for n in window_size)
        mask = masks.window(left, 0 if causal else right, align="bottom_right")
        out = attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, scale=softmax_scale).transpose(1, 2)
        return (out, None) if with_lse else out

    return flash_attn_func


@pytest.mark.parametrize("mask", ["full", "causal", "window(5, 2)", "window(5, None)", "causal & window(6, 0)"])
@pytest.mark.parametrize(("name", "none", "with_lse"), [
    ("flash_attn_2", -1, False), ("flash_attn_3", -1, False), ("flash_attn_3", -1, True), ("flash_attn_4", None, True),
])  # fmt: skip
def test_flash_attention_is_called_by_its_conventions(monkeypatch, mask, name, none, with_lse):
    adapter = adapters.get(name)
    module = types.SimpleNamespace(flash_attn_func=fake_flash(none, with_lse))
    monkeypatch.setitem(sys.modules, adapter.module, module)
    if parent := adapter.module.rpartition(".")[0]:
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    r = leaves(request(mask, kv_heads=2))
    assert not check.judged(r, torch.randn_like(r.q), adapter.prepare(r)).wrong


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_xformers_is_called_by_its_conventions(monkeypatch, mask):
    class LowerTriangularMask:
        pass

    def memory_efficient_attention(q, k, v, attn_bias, p, scale):
        mask = masks.causal() if isinstance(attn_bias, LowerTriangularMask) else attn_bias
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, scale=scale).transpose(1, 2)

    ops = types.SimpleNamespace(
        LowerTriangularMask=LowerTriangularMask, memory_efficient_attention=memory_efficient_attention
    )
    monkeypatch.setitem(sys.modules, "xformers", types.ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    r = leaves(request(mask))
    adapter = adapters.get("xformers")
    assert not check.judged(r, torch.randn_like(r.q), adapter.prepare(r)).wrong
    assert "is given no mask or causal() here" in adapter.why_not(request("window(3, 0)"))


@pytest.mark.parametrize(("text", "expected"), [
    ("causal & window(6, 0) & window(9, 3)", (6, 0, 0)),
    ("window(6, 2)", (6, 2, 0)),
    ("causal('bottom_right')", (None, 0, 16)),
    ("causal | window(3, 3)", None),
    ("causal & window(3, 0, 'bottom_right')", None),
    ("causal & key_lengths([3, 9])", None),
])  # fmt: skip
def test_one_band(text, expected):
    found = base.one_band(parse_mask(text), 24, 40)
    assert (None if found is None else (found.left, found.right, found.align)) == expected


FLEX_MASKS = [
    "causal", "window(5, 2)", "causal & window(6, 0)", "causal | ~documents([0] * 12 + [1] * 12)",
    "key_lengths([9, 20])", "key_lengths([9, 20], padding='left') & query_lengths([20, 3])", "prefix_lm([4, 8])",
]  # fmt: skip


@pytest.mark.parametrize("mask", FLEX_MASKS)
def test_flexattention_gets_the_mask_that_is_meant(mask):
    r = request(mask)
    b, h, i, j = (torch.arange(n).view([-1 if d == at else 1 for d in range(4)]) for at, n in enumerate((2, 1, 24, 24)))
    whole = Patch(slice(0, 2), slice(0, 1), slice(0, 24), slice(0, 24), 24, 24, r.device)
    assert torch.equal(flex.rule(r.mask, r)(b, h, i, j).expand(2, 1, 24, 24), r.mask.keep(whole).expand(2, 1, 24, 24))


@pytest.mark.parametrize("mask", ["full", FLEX_MASKS[2], FLEX_MASKS[5]])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flexattention_is_right(monkeypatch, mask):
    """Its call, not compiled to machine code: for one shape that takes half a minute on a CPU."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **how: fn if fn is flex.flex_attention else compile_(fn, **how))
    r = request(mask, kv_heads=2)
    assert not check.judged(r, torch.randn_like(r.q), adapters.get("flex").prepare(r)).wrong


# --- timing and profiling -------------------------------------------------------------------------


def test_turns_alternate():
    order = []

    def kind(name, seconds):
        return lambda: order.append(name) or [seconds, 2 * seconds]

    a, b = alternate([kind("a", 1.0), kind("b", 10.0)], 3)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert a.samples == (1.0, 2.0) * 3
    assert (b.median, b.quantile(0.2), b.quantile(0.8), b.spread) == (15.0, 10.0, 20.0, pytest.approx(2 / 3))
    assert Times((3.0,)).spread == 0


def test_a_turn_is_the_time_of_one_call():
    (seconds,) = turn(lambda: time.sleep(0.02))
    assert seconds >= 0.02


@pytest.mark.parametrize(("first", "repeats"), [(1.0, []), (0.01, []), (0.002, [5]), (1e-9, [1000])])
def test_short_calls_are_repeated_within_a_turn(monkeypatch, first, repeats):
    asked = []

    class FakeTimer:
        def __init__(self, *args, **named):
            assert named["num_threads"] == torch.get_num_threads()

        def timeit(self, number):
            asked.append(number)
            return types.SimpleNamespace(median=first if len(asked) == 1 else 0.5)

    monkeypatch.setattr(timing, "Timer", FakeTimer)
    assert turn(lambda: None) == [0.5 if repeats else first]
    assert asked == [1, *repeats]


def test_gaps_between_kernels():
    def share(*spans):
        return kernels.gap_share([kernels.Span("k", start, end) for start, end in spans])

    assert share() is None
    assert share((0, 10)) == 0
    assert share((0, 10), (20, 30)) == pytest.approx(1 / 3)
    assert share((20, 30), (0, 10), (5, 12), (6, 8)) == pytest.approx(8 / 30)  # in any order, two at once
    assert share((5, 5)) == 0


def test_kernels_by_name():
    spans = [kernels.Span("b", 0, 10), kernels.Span("a", 20, 50), kernels.Span("b", 60, 80), kernels.Span("b", 90, 99)]
    assert kernels.by_name(spans, 3) == [
        {"name": "b", "calls": 1.0, "seconds": pytest.approx(13e-9)},
        {"name": "a", "calls": pytest.approx(1 / 3), "seconds": pytest.approx(10e-9)},
    ]


def test_spans_are_read_from_a_real_profile(monkeypatch):
    """The profiler's events have what is read of them; on a CPU the device is the CPU."""
    with profile(activities=[ProfilerActivity.CPU]) as p:
        torch.ones(100, 100) @ torch.ones(100, 100)
    assert kernels._spans(p) == []
    monkeypatch.setattr(torch.autograd.DeviceType, "CUDA", torch.autograd.DeviceType.CPU)
    spans = {s.name: s for s in kernels._spans(p)}
    assert spans["aten::mm"].end > spans["aten::mm"].start
    assert spans["aten::ones"].start < spans["aten::mm"].start


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path):
    found = sweep(tmp_path, "--device cuda --backend triton,torch_flash --length 256 --dtype bf16 --rounds 2")
    for row in found.values():
        assert row["reason"] is None, row["reason"]
        assert all(row[name] is not None for name in (*MEASURED, "gap_share"))
        assert 0 <= row["gap_share"] < 1


# --- ncu ------------------------------------------------------------------------------------------

CELL = ncu.Cell(Case(1, 2, 2, 16, 8, "float32", "causal & (window(9, 0))", 0.0), "tiled", "both", "cpu", 0)
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def ncu_line(kernel, metric, value, unit="byte"):
    return (
        f'"{kernel}","7","python3.11","127.0.0.1","void fwd<64, 128>(float *, int)","1","7","(128, 1, 1)",'
        f'"(32, 8, 1)","0","9.0","Command line profiler metrics","{metric}","{unit}","{value}"'
    )


# What ncu 2024 to 2025 prints with --csv: lines of its own, the header, a line for each kernel and metric.
NCU = "\n".join([
    "==PROF== Connected to process 7 (/usr/bin/python3.11)",
    '==PROF== Profiling "fwd" - 0: 0%....50%....100% - 1 pass',
    '==PROF== Profiling "fwd" - 1: 0%....50%....100% - 1 pass',
    "==PROF== Disconnected from process 7",
    HEADER,
    ncu_line(0, "dram__bytes_read.sum", "25,165,824"),
    ncu_line(0, "dram__bytes_write.sum", "8,388,608"),
    ncu_line(1, "dram__bytes_read.sum", "1024"),
    ncu_line(1, "dram__bytes_write.sum", "0"),
])  # fmt: skip


def test_ncu_output_is_read():
    assert ncu.parse(NCU) == ncu.Dram(read=25_165_824 + 1024, write=8_388_608)


@pytest.mark.parametrize(("text", "message"), [
    ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "printed no dram__bytes_read.sum"),
    (NCU.replace('"byte"', '"Mbyte"'), "in 'Mbyte', expected 'byte'"),
    (f"{HEADER}\n{ncu_line(0, 'dram__bytes_read.sum', '5')}", "printed no dram__bytes_read.sum and dram__bytes_write"),
])  # fmt: skip
def test_ncu_output_that_says_nothing_is_an_error(text, message):
    with pytest.raises(RuntimeError, match=message):
        ncu.parse(text)


def fake_ncu(path, last):
    """A program that runs what comes after its options, as ncu does, and then ``last``."""
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != "{sys.executable}" ]; do shift; done\n"$@" || exit 9\n{last}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_ncu_runs_the_cell_and_nothing_else(tmp_path):
    (tmp_path / "out.csv").write_text(NCU)
    program = fake_ncu(tmp_path / "ncu", f"cat {tmp_path / 'out.csv'}")
    command = ncu.command(program, CELL)
    assert command[: command.index(sys.executable)] == [
        program, "--csv", "--print-units", "base", "--profile-from-start", "off",
        "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum",
    ]  # fmt: skip
    assert ncu.Cell.from_json(command[-1]) == CELL
    assert ncu.dram(program, CELL) == ncu.parse(NCU)
    broken = fake_ncu(tmp_path / "broken", "echo ERR_NVGPUCTRPERM >&2; exit 3")
    with pytest.raises(RuntimeError, match=r"exit code 3: .*ERR_NVGPUCTRPERM"):
        ncu.dram(broken, CELL)


def test_a_row_has_what_ncu_counted_or_why_it_did_not(monkeypatch):
    how = runner.Settings("cpu", ("tiled",), ("forward",), rounds=1, ncu="ncu")
    monkeypatch.setattr(ncu, "dram", lambda program, cell: ncu.Dram(100, 11))
    (row,) = runner.sweep([CELL.case], how)
    assert (row["dram_bytes"], row["dram_reason"]) == (111, None)

    def refused(program, cell):
        raise RuntimeError("no permission")

    monkeypatch.setattr(ncu, "dram", refused)
    (row,) = runner.sweep([CELL.case], how)
    assert (row["dram_bytes"], row["dram_reason"]) == (None, "no permission")
    assert row["p50_s"] > 0


def test_without_ncu_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="needs ncu"):
        ncu.program()


# --- plot and report ------------------------------------------------------------------------------


@pytest.fixture
def file(rows, tmp_path):
    path = tmp_path / "sweep.jsonl"
    for row in rows.values():
        if row["mask"] in ("full", "causal & (window(9, 0))"):
            records.append(path, row)
    return path


def png_size(data):
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def test_plot_writes_three_pictures(file, tmp_path):
    names = ["speed.png", "memory.png", "roofline.png"]
    files = json.loads(run(f"plot {file} --png-dir {tmp_path / 'png'} --json").stdout)["files"]
    assert files == [str(tmp_path / "png" / name) for name in names]
    assert all(min(png_size((tmp_path / "png" / name).read_bytes())) > 200 for name in names)


def test_pictures_are_beside_the_file_if_nothing_is_said(file, monkeypatch):
    monkeypatch.setattr(plots, "pictures", lambda rows: {"speed": b"a picture"})
    result = run(f"plot {file}")
    assert result.stdout == f"wrote {file.parent / 'speed.png'}\n"
    assert (file.parent / "speed.png").read_bytes() == b"a picture"


def test_pictures_show_what_is_in_the_rows(file):
    rows = records.timed(records.read(file))
    axes = plots.speed(rows).axes
    assert [a.get_title() for a in axes][:3] == [
        f"{direction} float32 full B=1 H=4/2 D=16" for direction in ("forward", "backward", "both")
    ]
    lines = {line.get_label(): line for line in axes[0].get_lines()}
    assert set(lines) == {"tiled", "torch_flash", "dense"}
    mine = [r for r in rows if r["backend"] == "tiled" and r["direction"] == "forward" and r["mask"] == "full"]
    assert list(lines["tiled"].get_xdata()) == [48, 96]
    assert list(lines["tiled"].get_ydata()) == [row["tflops"] for row in mine]
    memory = {line.get_label(): line for line in plots.memory(rows).axes[0].get_lines()}
    assert list(memory["tiled"].get_ydata()) == [row["peak_bytes"] / 2**20 for row in mine]
    (roof,) = plots.roofline(rows).axes
    labels = {line.get_label(): line for line in roof.get_lines()}
    assert set(labels) == {"copy 10 GB/s", "matmul 0.1 TFLOP/s"}
    x, y = labels["copy 10 GB/s"].get_data()
    assert (x[-1], y[-1]) == (pytest.approx(10), pytest.approx(0.1))  # the ridge
    points = {c.get_label(): c.get_offsets() for c in roof.collections}
    assert set(points) == {
        f"{b} {d}" for b in ("tiled", "torch_flash", "dense") for d in ("forward", "backward", "both")
    }
    assert points["tiled forward"].shape == (4, 2)


class Page(HTMLParser):
    """Tags that would load something, the text, and whether every element is closed."""

    def __init__(self):
        super().__init__()
        self.links, self.words, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read_page(path):
    page = Page()
    page.feed(path.read_text())
    assert page.open == []
    return page, " ".join(page.words)


def test_report_is_one_page_that_holds_everything(file, tmp_path):
    html = tmp_path / "report.html"
    result = run(f"report {file} --html {html}")
    assert result.exit_code == 0, result.output
    page, text = read_page(html)
    assert len(page.links) == 3
    for link in page.links:
        png_size(base64.b64decode(link.removeprefix("data:image/png;base64,")))
    assert "http" not in re.sub(r"base64,[^\"]*", "", html.read_text())
    assert torch.__version__ in text
    assert "forward float32 causal & (window(9, 0)) B=1 H=4/2 D=16" in text
    assert "matmul 0.1 TFLOP/s, copy 10 GB/s" in text
    assert "has no argument for causal() & window(9, 0)" in text
    assert "tilewise::backward" in text
    tiled = next(r for r in records.read(file) if r["backend"] == "tiled")
    assert records.worded(tiled)["TFLOP/s"] in text
    assert "30 measurements, 6 rows without one" in text


def test_report_of_failures_alone(tmp_path, monkeypatch):
    register(monkeypatch, "failing", forward=lambda o: 1 / 0)
    sweep(tmp_path, f"{TINY} --backend failing", code=1)
    html = tmp_path / "report.html"
    assert run(f"report {tmp_path / 'rows.jsonl'} --html {html}").exit_code == 0
    page, text = read_page(html)
    assert page.links == []
    assert "ZeroDivisionError: division by zero" in text
    assert "No row has a time." in text


def test_reasons_are_escaped(rows):
    row = {**next(iter(rows.values())), "p50_s": None, "reason": "<script>alert(1)</script> & more"}
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in report.page([row])


@pytest.mark.parametrize("command", ["plot", "report --html page.html"])
def test_without_matplotlib_it_says_what_to_install(file, monkeypatch, command):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = run(f"{command} {file}")
    assert result.exit_code == 2
    assert "plots need matplotlib: pip install 'tilewise[plots]'" in result.stderr


def test_files_that_cannot_be_read_are_said(tmp_path):
    path = tmp_path / "x.jsonl"
    assert "No such file" in run(f"plot {path}").stderr
    for text, message in (
        ("", "has no rows"),
        ("{\n", "line 1 is not JSON"),
        ('{"batch": 1}\n', "line 1 is not a row of tilewise bench: it has no heads"),
    ):
        path.write_text(text)
        result = run(f"plot {path}")
        assert result.exit_code == 2
        assert message in result.stderr
    failed = dict.fromkeys((*records.CASE, "backend", "direction", "p50_s")) | {"reason": "x"}
    path.write_text(json.dumps(failed) + "\n")
    assert "no row has a time" in run(f"plot {path}").stderr


def test_a_row_is_one_write(tmp_path):
    path = tmp_path / "rows.jsonl"
    records.append(path, {"a": float("inf"), "b": [1.5]})
    records.append(path, {"a": None})
    assert path.read_text() == '{"a": "inf", "b": [1.5]}\n{"a": null}\n'
