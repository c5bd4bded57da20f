"""What `make gpu` runs, on a CPU: its checks pass for `tiled` and fail for what is wrong, and its record is whole."""

import inspect
import itertools
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import crew
import dense_by_rows
import evidence
import gpu
import gpu_requests
import gpu_speed
import gpu_suite as suite

from tilewise import attention, dispatch
from tilewise.backends.tiled import TiledBackend
from tilewise.dispatch import Backend, Grads, Output
from tilewise.testing import Problem, problems
from tilewise.testing.judge import evaluate
from tilewise.testing.problems import Maker, plain

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Changing(TiledBackend):
    """A backend whose results change from call to call, by one bit of one number."""

    name = "changing"
    calls = 0

    def forward(self, r):
        o = super().forward(r)
        self.calls += 1
        o.out.view(-1)[self.calls % o.out.numel()] += 2**-6
        return o


class Skewed(TiledBackend):
    """A backend with an error of two hundredths in the gradients of k and v."""

    name = "skewed"

    def backward(self, r, *rest):
        grads = super().backward(r, *rest)
        return grads._replace(k=grads.k * 1.02, v=grads.v * 1.02)


class Leaking(TiledBackend):
    """A backend that multiplies what nobody sees by 0."""

    name = "leaking"

    def forward(self, r):
        o = super().forward(r)
        o.out.add_(0 * r.v.sum())
        return o


class Lean(Backend):
    """A backend that computes nothing, in exactly the memory that the results need."""

    name = "lean"

    def forward(self, r):
        return Output(r.new_out().zero_(), r.new_stats().zero_(), None, r.new_stats().zero_() if r.keeps_low else None)

    def backward(self, r, saved, needs):
        delta = torch.zeros_like(saved.lse)
        given = {"q": r.q, "k": r.k, "v": r.v, "bias": r.bias, "alibi": r.alibi}
        grads = Grads(**{n: torch.zeros_like(x) for n, x in given.items() if n in needs})
        del delta
        return grads


class Wasteful(Lean):
    """One that holds an L x L matrix in its backward."""

    name = "wasteful"

    def backward(self, r, *rest):
        matrix = torch.zeros(r.len_q, r.len_k)
        grads = super().backward(r, *rest)
        del matrix
        return grads


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    for b in (Changing(), Skewed(), Leaking(), Lean(), Wasteful()):
        monkeypatch.setitem(dispatch.BACKENDS, b.name, b)


# --- the same bits --------------------------------------------------------------------------------


def test_a_small_bias_is_computed_beside_dq_too():
    from tilewise.backends.triton import config, gradients

    small = (64, 64, True, 8, 1, 80, 80, config.SM90)  # what compute-sanitizer is given
    assert gradients.together(*small) is None
    with suite.repeatable("bias of all", CPU, 30).within():
        found = gradients.together(*small)
        assert (found.entries, found.programs) == (4, 1)
        assert gradients.together(*small[:-1], config.SM80) is None
    assert gradients.together(*small) is None


@pytest.mark.parametrize("case", suite.HIDDEN)
def test_what_nobody_sees_changes_no_bit(case):
    assert suite.hidden("tiled", CPU, case, length=30) == "L=30"
    with pytest.raises(suite.Failed, match="numbers of the output differ"):
        suite.hidden("leaking", CPU, case, length=30)


CIRCUMSTANCES = {
    "repeats": partial(suite.repeats, times=3),
    "graphs": partial(suite.graphs, replays=2),
    "devices": partial(suite.devices, other=CPU),
    "poisoned": suite.poisoned,
}


@pytest.mark.parametrize("case", suite.REPEATABLE)
def test_every_call_gives_the_same_bits(case, monkeypatch):
    monkeypatch.setattr(suite, "fill_free_memory", lambda device: None)
    for check in CIRCUMSTANCES.values():
        assert check("tiled", CPU, case, length=40)
    assert suite.asynchronous("tiled", CPU, case, length=40)


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_a_bit_that_changes_is_found(name, monkeypatch):
    monkeypatch.setattr(suite, "fill_free_memory", lambda device: None)
    with pytest.raises(suite.Failed, match="of 10240 numbers of the output differ"):
        CIRCUMSTANCES[name]("changing", CPU, "causal", length=20)


def test_dropout_that_draws_the_same_mask_again_is_found(monkeypatch):
    monkeypatch.setattr(suite.torch, "manual_seed", lambda n: torch.default_generator.manual_seed(1))
    with pytest.raises(suite.Failed, match="the same dropout mask"):
        suite.graphs("tiled", CPU, "dropout", length=40)


def test_reading_what_was_not_written_is_found(monkeypatch):
    """A backend whose buffer holds what was in memory before."""

    class Unwritten(TiledBackend):
        name, left = "unwritten", 0.0

        def forward(self, r):
            o = super().forward(r)
            o.out[..., 0] += self.left
            return o

    monkeypatch.setitem(dispatch.BACKENDS, "unwritten", Unwritten())
    monkeypatch.setattr(suite, "fill_free_memory", lambda device: setattr(Unwritten, "left", float("nan")))
    with pytest.raises(suite.Failed, match="with NaN in free memory"):
        suite.poisoned("unwritten", CPU, "causal", length=20)


def test_memory_is_filled_with_nan(monkeypatch):
    """The pattern is NaN in every dtype of a buffer."""
    made = []
    full = torch.full
    monkeypatch.setattr(suite.torch, "full", lambda shape, *a, **k: made.append(full((8,), *a, **k)))
    suite.fill_free_memory(CPU, megabytes=128)
    assert len(made) > 500
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        assert made[-1].view(dtype).isnan().all()


def test_what_a_cpu_has_not_is_absent():
    with pytest.raises(suite.Absent, match="no streams"):
        suite.streams("tiled", CPU, "causal", length=20)
    if torch.cuda.device_count() < 2:
        with pytest.raises(suite.Absent, match="two GPUs"):
            suite.devices("tiled", CPU, "causal")


# --- the judge at real sizes ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [p.name for p in problems(quick=True) if "F" not in p.family])
def test_dense_by_rows_is_dense(name):
    (problem,) = (p for p in problems() if p.name == name)
    call = problem.make(Maker(name, torch.float64, CPU))
    whole = evaluate(call, "dense", torch.float64)
    b, h, n = whole["lse"].shape
    with dense_by_rows.by_rows(scores=b * h * (n // 3 + 1) * call.tensors["k"].shape[2]):  # three parts
        rows = evaluate(call, "dense", torch.float64)
    assert dispatch.get("dense").name == "dense"
    for key, x in whole.items():
        torch.testing.assert_close(rows[key], x, rtol=1e-10, atol=1e-12, equal_nan=True, msg=key)


@pytest.mark.parametrize("feature", suite.FEATURES)
def test_real_sizes(feature):
    case = f"{feature} 16 float32"
    assert "of its limit" in suite.real_sizes("tiled", CPU, case, lengths=(64,))
    with pytest.raises(suite.Failed, match=f"{feature} D=16 L=64 dk: root mean square error"):
        suite.real_sizes("skewed", CPU, case, lengths=(64,))


def test_a_refusal_is_no_success():
    with pytest.raises(suite.Failed, match="cannot run"):
        suite.real_sizes("torch_flash", CPU, "alibi 16 float32", lengths=(64,))


def test_long_causal():
    note = suite.long_causal("tiled", CPU, "", length=150, scores=1000)
    assert "MiB beyond the inputs" in note
    with pytest.raises(suite.Failed, match="dk"):
        suite.long_causal("skewed", CPU, "", length=150, scores=1000)


@pytest.mark.parametrize("case", suite.FAR)
def test_far_offsets(case):
    far = 2**17 if "long" in case else 2**20
    assert suite.far_offsets("tiled", CPU, case, far=far)
    if case != "long bias":  # which judges rows, and k's gradient has none of its own
        with pytest.raises(suite.Failed, match="gradient 2: root mean square error"):
            suite.far_offsets("skewed", CPU, case, far=far)


def test_sizes_on_a_gpu_pass_2_to_the_31():
    x = torch.empty(2, 4, 300, 64, device="meta", dtype=torch.bfloat16)
    for case, shape in (
        ("batch stride", x),
        ("row stride within a tile", x[:1]),
        ("long rows", x.new_empty(1, 4, 4096, 64)),
    ):
        spread = suite._spread(shape, case, 2**31)
        assert sum((n - 1) * s for n, s in zip(spread.shape, spread.stride(), strict=True)) >= 2**31
        assert all(s % 16 == 0 for s in spread.stride()[:3])
        if "tile" in case:
            assert 256 * spread.stride(2) >= 2**31


# --- memory, compilation, models, tools -----------------------------------------------------------


@pytest.mark.parametrize("case", suite.MEMORY)
def test_memory_is_what_was_computed(case):
    assert "computed" in suite.memory("lean", CPU, case, length=256)
    with pytest.raises(suite.Failed, match=r"backward: .* bytes at the peak, computed"):
        suite.memory("wasteful", CPU, case, length=256)


def test_random_requests():
    """Families differ, hold every head dim and kind of mask, and are judged; a wrong result is named."""
    families = [gpu_requests.family(n) for n in range(gpu_requests.FAMILIES)]
    assert {f.dims[0] for f in families} == set(gpu_requests.DIMS)
    assert {f.kind for f in families} == set(gpu_requests.KINDS)
    assert {(f.softcap, f.sinks, f.ragged) for f in families if f.softcap + f.sinks + f.ragged < 2} >= {
        (True, False, False), (False, True, False), (False, False, True)
    }  # fmt: skip
    for n in (1, 3, 5):
        assert gpu_requests.soak("tiled", CPU, str(n), 2).startswith("2 requests")


def test_a_wrong_answer_to_a_random_request_is_found(monkeypatch):
    real = gpu_requests.judge
    wrong = [v._replace(ok=False) for v in real(Problem("p", "p", plain((1, 1, 3, 3, 4), {})), "tiled", torch.float32)]
    monkeypatch.setattr(gpu_requests, "judge", lambda *_: wrong)
    with pytest.raises(suite.Failed, match=r"random 2\.0 of Family.*out"):
        gpu_requests.soak("tiled", CPU, "2", 1)


def test_kernels_are_counted(monkeypatch):
    from tilewise.backends.triton import lists

    before = suite.compiled()
    monkeypatch.setattr(lists.list_kernel, "device_caches", {0: ({"a": 1, "b": 2}, {})}, raising=False)
    assert suite.compiled() == before + 2 * (os.environ.get("TRITON_INTERPRET") != "1")


def test_recompilation(monkeypatch):
    sizes = {"warm": (16, 20), "lengths": (32, 24)}
    assert "none for 2 other lengths" in suite.recompilation("tiled", CPU, "causal", **sizes)
    monkeypatch.setattr(suite, "compiled", iter((3, 5)).__next__)
    with pytest.raises(suite.Failed, match="2 kernels compiled anew"):
        suite.recompilation("tiled", CPU, "causal", **sizes)


def test_training():
    assert "3 steps" in suite.training("tiled", CPU, "", steps=3, length=32)
    with pytest.raises(suite.Failed, match="the curves part"):
        suite.training("skewed", CPU, "", steps=10, length=32)


def test_models(monkeypatch):
    pytest.importorskip("transformers")
    assert "tensors within the budget" in suite.models("tiled", CPU, "llama")
    with pytest.raises(suite.Failed, match="budget"):
        suite.models("skewed", CPU, "llama")
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(suite.Absent, match="transformers is not installed"):
        suite.models("tiled", CPU, "llama")


@pytest.mark.parametrize(
    ("said", "ok"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", True),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True),
        ("========= Invalid __global__ read of size 4\n========= ERROR SUMMARY: 3 errors\n", False),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", False),
        ("========= ERROR SUMMARY: 10 errors\n", False),
    ],
)
def test_the_sanitizers_summary_is_read(said, ok):
    if ok:
        assert "SUMMARY: 0" in suite.verdict(said)
    else:
        with pytest.raises(suite.Failed, match="SUMMARY"):
            suite.verdict(said)


def race_of(kind, fn, other, *, file="pipeline.py", far=0, count=1):
    """What racecheck says of an access in a line of a function and one of the other kind in another function."""
    lines = [inspect.getsourcelines(x.fn)[1] + 2 for x in (fn, other)]
    kinds = [kind, "Read" if kind == "Write" else "Write"]
    return (
        f"========= Error: Race reported between {kinds[0]} access at a_kernel+0x10 in {file}:{lines[0] + far}\n"
        f"=========     and {kinds[1]} access at a_kernel+0x20 in pipeline.py:{lines[1]} [4 hazards]\n"
        f"========= RACECHECK SUMMARY: {count} hazard{'s' * (count > 1)} displayed ({count} error, 0 warnings)\n"
    )


def test_only_work_items_that_are_handed_on_are_no_race():
    from tilewise.backends.hopper.pipeline import hand_on, store_rows, taken

    assert "work items" in suite.verdict(race_of("Write", hand_on, taken))
    assert "work items" in suite.verdict(race_of("Read", taken, hand_on))
    for said in (
        race_of("Write", hand_on, taken, file="kernel.py"),
        race_of("Write", hand_on, taken, far=40),
        race_of("Write", hand_on, store_rows),
        race_of("Read", hand_on, taken),
        race_of("Write", hand_on, taken, count=2),
        race_of("Write", hand_on, taken).replace("=========     and", "========= and a write access at 0x7\n and"),
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
    ):
        with pytest.raises(suite.Failed, match="SUMMARY"):
            suite.verdict(said)


def test_an_old_racecheck_is_not_asked(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    for version, follows in (("2025.3.1.0", False), ("2026.1.0.0", True), ("2027.0.0.0", True)):
        tool.write_text(f"#!/bin/sh\necho 'NVIDIA (R) Compute Sanitizer'; echo 'Version {version} (build 1)'\n")
        tool.chmod(0o755)
        assert suite.follows_mbarriers(str(tool)) == follows
    monkeypatch.setattr(suite, "_packaged", lambda: [str(tmp_path)])
    tool.write_text("#!/bin/sh\necho 'Version 2025.3.1.0'\n")
    with pytest.raises(suite.Absent, match="pip install"):
        suite.sanitizer("hopper", CPU, "racecheck, causal")


def test_a_sanitizer_runs_the_small_shapes(tmp_path, monkeypatch):
    """With a stand-in that runs its program and says what the tool would."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\nshift 4\n"$@" && echo "========= ERROR SUMMARY: 0 errors"\n')
    tool.chmod(0o755)
    monkeypatch.setattr(suite, "_packaged", list)
    with pytest.raises(suite.Absent, match="not installed"):
        suite.sanitizer("tiled", CPU, "memcheck, causal", seconds=600)
    monkeypatch.setattr(suite, "_packaged", lambda: [str(tmp_path)])
    assert suite.sanitizer("tiled", CPU, "memcheck, ragged, D=16", seconds=600) == "ERROR SUMMARY: 0 errors"
    dead = subprocess.CompletedProcess([], 1, "", "mine")
    monkeypatch.setattr(suite.subprocess, "run", lambda *a, **k: dead)
    with pytest.raises(suite.Failed, match="without the tool: mine"):
        suite.sanitizer("tiled", CPU, "memcheck, causal")


def test_a_failure_is_a_line_of_the_record_and_the_next_check_runs(monkeypatch):
    def broken(backend, device, case):
        raise ZeroDivisionError("mine")

    monkeypatch.setitem(suite.CHECKS, "broken", broken)
    monkeypatch.setitem(suite.CHECKS, "fine", lambda *a: "figures")
    monkeypatch.setitem(suite.CHECKS, "wrong", lambda *a: suite.require(False, "differs"))
    found = suite.run((("broken", "a"), ("wrong", "b"), ("another stream", "causal"), ("fine", "c")), "tiled", CPU)
    assert [c.ok for c in found] == [False, False, None, True]
    assert [c.note for c in found][::3] == ["ZeroDivisionError: mine", "figures"]
    assert found[1].note == "differs"


def test_jobs_cover_every_check_and_name_no_other():
    of_hopper = {name for job in suite.jobs("hopper") for name, _ in job}
    pairs = [pair for job in suite.jobs("tiled") for pair in job]
    assert {name for name, _ in pairs} | of_hopper == set(suite.CHECKS)
    assert len(pairs) == len(set(pairs))
    features = {c.split()[0] for n, c in pairs if n == "real sizes"}
    assert features == set(suite.FEATURES)


# --- processes ------------------------------------------------------------------------------------


def work(job, number):
    """A job of the crew's test: pickled by name."""
    if job == "die":
        os._exit(3)
    if job == "raise":
        raise ValueError("mine")
    if job == "hang":
        time.sleep(600)
    return job, number


def test_a_crew_outlives_its_jobs():
    until = time.monotonic() + 300
    done = {d.job: d for d in crew.crew(work, ["raise", 1, "die", 2, 3], 2, until)}
    assert {n: done[n].result[0] for n in (1, 2, 3)} == {1: 1, 2: 2, 3: 3}
    assert done["raise"].error == "ValueError: mine"
    assert done["die"].error == "the process ended with code 3"


def test_a_job_that_hangs_is_stopped_and_the_end_is_the_end():
    start = time.monotonic()
    done = list(crew.crew(work, ["hang", 1], 1, start + 300, limit=0.5))
    assert done[0].error == "stopped after 0 s"
    done = list(crew.crew(work, ["hang", 1], 1, time.monotonic() + 0.5))
    assert [d.error for d in done] == [crew.CUT]
    assert time.monotonic() - start < 550


# --- speed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*gpu_speed.CASES, "full"])
def test_flex_is_asked_for_the_same(case):
    """Each case in FlexAttention's words and in ours: the same output, in fp32."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = 1280 if case.startswith("window") else 128
    ours, theirs, _ = gpu_speed.options(case, 2, length, CPU)
    q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
    mask_mod = theirs.pop("mask_mod", None)
    block = None if mask_mod is None else create_block_mask(mask_mod, None, None, length, length, device="cpu")
    with torch.no_grad():
        out = flex_attention(q, k, v, block_mask=block, **theirs)
        expected = attention(q, k, v, backend="dense", **ours)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        if case not in ("full", "causal"):  # and not that of the plain call
            plain = attention(q, k, v, gpu_speed.masks.causal() if "mask" in ours else None, backend="dense")
            if case != "softcap 30":  # which random scores hardly reach
                assert (plain - expected).abs().max() > 1e-2


SIZES = {"tokens": 256, "width": 32}


def test_a_cell_is_timed_in_turns(monkeypatch):
    monkeypatch.setattr(gpu_speed, "PEERS", ("dense",))
    answers = iter([5.0, 9.0, 7.0, 8.0, 3.0, 6.0, 4.0, 2.0])
    cell = gpu_speed.Cell("causal", 16, 128, False)
    found = gpu_speed.measure(cell, "tiled", CPU, lambda call: (call(), next(answers))[1], **SIZES)
    assert found == {"tiled": {"forward": 4.0, "backward": 2.0}, "dense": {"forward": 3.0, "backward": 6.0}}
    rates = gpu_speed.tflops(cell, found)
    assert rates["tiled"]["backward"] == 5 * rates["tiled"]["forward"]


def test_a_line_compares_two_calls():
    """Each with its own tensors: what it says it is, and the other in proportion."""
    sizes = {"tokens": 128, "width": 128}
    for line in gpu_speed.lines("hopper"):
        line = line._replace(dim=16, length=128)
        (name, own), (other, beside) = gpu_speed.race(line, "tiled", CPU, **sizes).items()
        assert (name, other) == ("tiled", line.other)
        q, k, v = own.inputs
        if "ragged" in line.case:
            assert own.call().shape == q.shape == (128, 8, 16)
            batch, _, length, _ = beside.inputs[0].shape
            ends = gpu_speed.cuts(128)
            work = sum((b - a) ** 2 for a, b in itertools.pairwise(ends))
            assert batch * length**2 * beside.factor == pytest.approx(work)
        elif "GQA" in line.case:
            assert (q.shape[1], k.shape[1]) == (8, 1)
            assert [x.shape[1] for x in beside.inputs] == [8, 8, 8]
            plain = attention(q, k, v, None if "full" in line.case else gpu_speed.masks.causal(), backend="dense")
            torch.testing.assert_close(own.call(), plain, atol=2e-2, rtol=2e-2)
        else:
            assert repr(own.call.args[3]) == f"causal() & window({gpu_speed.WINDOW}, 0)"
            assert beside.call.keywords["backend"] == "torch_cudnn"
    (line,) = (x for x in gpu_speed.lines("hopper") if x.case == "GQA 8:1, causal")
    answers = iter([5.0, 9.0, 7.0, 8.0, 3.0, 6.0, 4.0, 2.0])
    found = gpu_speed.measure(
        line._replace(dim=16, length=128), "tiled", CPU, lambda call: (call(), next(answers))[1], **sizes
    )
    assert found == {"tiled": {"forward": 4.0, "backward": 2.0}, "MHA": {"forward": 3.0, "backward": 6.0}}


def test_a_peer_that_cannot_is_recorded_with_its_reason():
    cell = gpu_speed.Cell("bias", 16, 128, True)
    found = gpu_speed.measure(cell, "tiled", CPU, lambda call: (call(), 1.0)[1], **SIZES)
    assert found["tiled"] == {"forward": 1.0, "backward": 1.0}
    assert "is a CUDA kernel" in found["torch_efficient"]["error"]
    assert "does not support backward on CPU" in found["flex"]["error"]


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch):
    def other(q, k, v, *args, backend, **kw):
        return (
            attention(q, k, v, backend="tiled")
            if backend == "torch_flash"
            else attention(q, k, v, *args, backend=backend, **kw)
        )

    monkeypatch.setattr(gpu_speed.tilewise, "attention", other)
    monkeypatch.setattr(gpu_speed, "PEERS", ("torch_flash",))
    cell = gpu_speed.Cell("causal", 16, 128, False)
    found = gpu_speed.measure(cell, "tiled", CPU, lambda call: 1.0, **SIZES)
    assert "another one" in found["torch_flash"]["error"]
    assert "forward" in found["tiled"]


# --- the record -----------------------------------------------------------------------------------


def test_a_run_writes_its_record_section_by_section(tmp_path, monkeypatch):
    """With one process of each kind of work, on a CPU."""
    path = tmp_path / "cpu" / "tiled.json"
    record = {"backend": "tiled", "gpu": "cpu", "digest": evidence.digest("tiled")}
    run = gpu.Run(record, path, workers=1, budget=3600)
    monkeypatch.setattr(gpu, "crew", inline)
    monkeypatch.setattr(gpu_speed.measure, "__defaults__", (lambda call: (call(), 1.0)[1],))
    cells = [gpu_speed.Cell("full", 16, 128, False), gpu_speed.Cell("bias", 16, 128, True)]
    run.speed([*cells, gpu_speed.Line("GQA 8:1, full", 4, 128, "MHA", 1)], **SIZES)
    first = json.loads(path.read_text())
    rows = first["speed_tflops"] + first["speed_ratios"] + first["speed_lines"]
    assert [row["mask"] for row in rows] == ["full", "bias", "GQA 8:1, full"]
    assert "suite" not in first
    run.host([gpu_speed.Cell("causal", 64, 128, True)])
    (row,) = json.loads(path.read_text())["host_us"]
    assert set(row["tiled"]) == {"forward", "backward"}
    assert min(row["tiled"].values()) > 0
    assert "error" in row["flex"]
    monkeypatch.setitem(suite.CHECKS, "fine", lambda *a: "a|figure")
    monkeypatch.setitem(suite.CHECKS, "wrong", lambda *a: suite.require(False, "it differs"))
    checks = [(("fine", "a"), ("wrong", "b")), (("another stream", "causal"),)]
    run.prove(checks, [(p.name, "float32") for p in problems(quick=True)[:3]])
    assert run.failures() == ["wrong, b: it differs"]
    whole = json.loads(path.read_text())
    assert whole["correctness"]["problems"] == whole["correctness"]["of"] == 3
    assert whole["correctness"]["checks"] >= 15
    assert [c["ok"] for c in whole["suite"]] == [True, False, None]
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    assert "| tiled on cpu | 3 of 3 |" in evidence.table()
    assert "| fine | 1 of 1 |  | a/figure |" in evidence.suite()
    assert "| wrong | 0 of 1 |  | it differs |" in evidence.suite()
    assert "| another stream | 0 of 0 | 1 | no streams on a CPU |" in evidence.suite()
    assert "| D=16 L=128 bias | – | – |" in evidence.ratios()
    assert "| D=16 L=128 full |" in evidence.speeds()
    assert "| D=4 L=128 GQA 8:1, full | MHA | 1.00 / 1.00 | 1.00 |" in evidence.lines()


def inline(work, jobs, workers, until, limit=0):
    """The crew without processes."""
    for job in jobs:
        if time.monotonic() < until:
            yield crew.Done(job, work(job, 0), "", 0.0)


def test_what_the_time_did_not_allow_is_in_the_record(tmp_path, monkeypatch):
    record = {"backend": "tiled", "gpu": "cpu", "digest": ""}
    run = gpu.Run(record, tmp_path / "x" / "tiled.json", workers=1, budget=0)
    monkeypatch.setattr(gpu, "crew", inline)
    run.speed([gpu_speed.Cell("full", 16, 128, False)])
    run.prove(suite.jobs("tiled"), gpu.judge_jobs(("float16", "float32")))
    assert run.record["speed_cells"] == [0, 1]
    assert {c["ok"] for c in run.record["suite"]} == {None}
    assert run.record["correctness"]["problems"] == 0
    assert run.record["correctness"]["stopped"]
    assert run.failures() == []


def test_a_job_without_an_answer_fails_its_checks(tmp_path, monkeypatch):
    record = {"backend": "tiled", "gpu": "cpu", "digest": ""}
    run = gpu.Run(record, tmp_path / "x" / "tiled.json", workers=1, budget=3600)
    monkeypatch.setattr(
        gpu, "crew", lambda work, jobs, *a: [crew.Done(j, None, "the process ended", 1.0) for j in jobs]
    )
    run.speed([gpu_speed.Cell("full", 16, 128, False)])
    run.prove([(("CUDA graph", "causal"), ("no host sync", "causal"))], [("A", "float32")])
    assert len(run.failures()) == 4


def test_sections_of_the_same_kernels_are_kept(tmp_path):
    record = {"backend": "tiled", "gpu": "cpu", "gpus": 2, "digest": "a", "versions": {"torch": "2"}}
    path = tmp_path / "tiled.json"
    assert gpu.continued(record, path) == record
    path.write_text(json.dumps({**record, "gpus": 1, "host_us": [1]}))
    assert gpu.continued(record, path) == {**record, "host_us": [1]}
    for other in ({"digest": "b"}, {"gpu": "another"}, {"versions": {"torch": "3"}}):
        assert gpu.continued({**record, **other}, path) == {**record, **other}


def test_every_problem_comes_once_before_any_comes_twice():
    jobs = gpu.judge_jobs(gpu.DTYPES)
    n = len(problems())
    assert len(jobs) == len(set(jobs)) == 3 * n
    assert {name for name, _ in jobs[:n]} == {p.name for p in problems()}
    assert {dtype for _, dtype in jobs[:n]} == set(gpu.DTYPES)


def test_a_refusal_is_recorded_by_its_reasons():
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(NotImplementedError) as e:
        attention(q, q, q, sinks=torch.zeros(1), backend="torch_flash")
    assert gpu.reasons(str(e.value), "torch_flash").startswith("does not take attention sinks")
    assert gpu.reasons("something else", "torch_flash") == "something else"
