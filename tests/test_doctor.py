"""The doctor: it names each symptom at its place, is silent on a healthy model, and changes nothing."""

import contextlib
import gc
import importlib.util
import json
import subprocess
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import tilewise
from tilewise import api, masks
from tilewise.diagnosis import SYMPTOMS, examine, kernels, run_script, steps, symptoms
from tilewise.diagnosis.records import NanRow, large

EXAMPLES = Path(__file__).parent.parent / "examples" / "symptoms"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rand(*shape, seed=0, **kw):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **kw)


# --- the six symptoms -----------------------------------------------------------------------------

EXPECTED = {  # script -> the symptom, and the line it is at
    "forced_flash": ("forced flash refused", "return F.scaled_dot_product_attention(q, k, v)"),
    "nan_row": ("a row of NaN", "weights = torch.softmax(scores, -1)"),
    "run_to_run": ("inference differs from run to run", "F.scaled_dot_product_attention(q, k, v, dropout_p"),
    "quadratic_memory": ("memory still grows as L²", "bias = torch.zeros(batch, heads, length, length)"),
    "not_bit_equal": ("not bit-equal to the baseline", "torch.equal(out, baseline)"),
    "slow_step": ("fast kernel, slow step", ""),
}


def run_example(name):
    return run_script(str(EXAMPLES / f"{name}.py"), [])


@pytest.mark.parametrize("name", EXPECTED)
def test_each_symptom_is_named_at_its_place(name, capsys):
    report, error = run_example(name)
    symptom, line = EXPECTED[name]
    (found,) = report.findings
    assert found.symptom == symptom
    assert Path(found.place.file) == EXAMPLES / f"{name}.py"
    assert line in Path(found.place.file).read_text().splitlines()[found.place.line - 1]
    assert symptom in str(report)
    assert str(found.place) in str(report)
    assert ("No available kernel" in error) == (name == "forced_flash")
    json.dumps(report.as_dict(), allow_nan=False)


def test_there_is_an_example_for_each():
    assert [symptom for symptom, _ in EXPECTED.values()] == list(SYMPTOMS)
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {*EXPECTED, "healthy"}


def test_silent_on_a_healthy_model(capsys):
    report, error = run_example("healthy")
    assert (report.findings, error, report.unseen) == ([], "", [])
    (call,) = report.calls
    assert (call.ran, call.count, call.modules) == ("flash", 10, {"1 (Block)": 5, "2 (Block)": 5})
    assert (call.query, call.dtype, call.is_causal, call.grads) == ((2, 2, 512, 64), "float32", True, True)
    assert call.numerics.ok
    assert report.step.kind == "training"
    assert str(report).startswith("no symptom in 10 attention calls")


def test_forced_flash_says_what_would_work():
    q, v = rand(1, 2, 8, 16), rand(1, 2, 8, 24)
    with (
        tilewise.doctor() as report,
        pytest.raises(RuntimeError, match="No available kernel"),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    (call,) = report.calls
    assert call.ran is None
    assert [r.why for r in call.reasons["flash"]] == [
        "has no dropout; dropout_p is 0.5",
        "takes one head dim for query, key and value; these are 16, 16, 24",
    ]
    assert len(call.changes["flash"]) == 2
    (found,) = report.findings
    assert "dropout_p=0.0" in found.fix
    assert "pad the smaller" in found.fix
    assert "tilewise.attention takes it" in found.fix
    padded = F.pad(q, (0, 8))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # what it said works
        F.scaled_dot_product_attention(padded, padded, v, scale=1 / 4, dropout_p=0.0)


def test_rows_of_nan_are_named():
    report, _ = run_example("nan_row")
    (found,) = report.findings
    assert found.seen.startswith("batch 1, head 0-1, query 0-7: ")
    (hand,) = report.by_hand
    assert hand.nan.rows == tuple((1, h, i) for h in range(2) for i in range(8))


def test_nan_of_the_inputs_is_not_blamed_on_the_mask():
    q = rand(1, 1, 4, 8)
    q[0, 0, 2] = float("nan")
    k = q.nan_to_num()
    with tilewise.doctor() as report:
        F.scaled_dot_product_attention(q, k, k[..., :4])  # the math kernel
        torch.softmax(q @ k.mT, -1) @ k
    assert report.findings == []
    assert report.calls[0].nan.rows == ((0, 0, 2),)
    assert not report.calls[0].nan.masked
    assert not report.by_hand[0].nan.masked
    assert "rows of NaN: 1, not by a mask" in str(report)


def test_a_kernel_that_hides_a_nan_is_outside_of_the_budget():
    q = rand(1, 1, 4, 8)
    q[0, 0, 2] = float("nan")
    k = q.nan_to_num()
    with tilewise.doctor() as report:
        out = F.scaled_dot_product_attention(q, k, k)
    hidden = not bool(out.isnan().any())  # PyTorch's CPU flash kernel gives 0 for a query that is NaN (torch 2.13)
    assert [f.symptom for f in report.findings] == ["not bit-equal to the baseline"] * hidden


class OldKernel:
    """What SDPA did before torch 2.5: NaN in a row whose keys are all masked."""

    def __init__(self, error=0.0):
        self.error = error

    def __call__(self, query, key, value, attn_mask):
        s = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~attn_mask, float("-inf"))
        return torch.softmax(s, -1) @ value + self.error


def test_a_masked_row_of_an_sdpa_call(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", OldKernel())
    mask = torch.ones(3, 1, 6, 6, dtype=torch.bool)
    mask[2, :, 4:] = False
    q = rand(3, 2, 6, 8)
    with tilewise.doctor() as report:
        F.scaled_dot_product_attention(q, q, q, mask)
    (found,) = report.findings
    assert found.symptom == "a row of NaN"
    assert found.seen.startswith("batch 2, head 0-1, query 4-5: ")


def test_outside_of_the_error_budget(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", OldKernel(error=1e-3))
    q, mask = rand(1, 2, 40, 8), torch.ones(40, 40, dtype=torch.bool).tril()
    with tilewise.doctor() as report:
        F.scaled_dot_product_attention(q, q, q, mask)
    (found,) = report.findings
    assert found.symptom == "not bit-equal to the baseline"
    assert "OUTSIDE" in found.seen
    assert not report.calls[0].numerics.ok


def test_not_bit_equal_says_not_a_bug(capsys):
    report, _ = run_example("not_bit_equal")
    assert "Not a bug: within the error budget" in report.findings[0].seen
    assert report.calls[0].bit_equal is False


@pytest.mark.parametrize("compare", [torch.equal, lambda a, b: torch.allclose(a, b, 0, 0)])
def test_comparisons_are_seen_through_copies_and_equal_ones_are_fine(compare):
    q = rand(1, 2, 64, 16)
    with tilewise.doctor() as report:
        out = F.scaled_dot_product_attention(q, q, q)
        flat = out.transpose(1, 2).reshape(1, 64, 32)
        compare(flat, flat.clone())
        torch.testing.assert_close(flat, flat + 1e-7)
        assert report.findings == []
        compare(flat, flat + 1e-7)
        compare(q, q + 1)  # of no attention
    (found,) = report.findings
    assert (found.symptom, found.times) == ("not bit-equal to the baseline", 1)


def test_dropout_by_hand_in_eval_mode():
    class Net(nn.Module):
        def forward(self, q):
            w = torch.softmax(q @ q.mT, -1)
            return F.dropout(w, 0.25) @ q  # training=True by default

    net = Net()
    with tilewise.doctor() as report:
        net(rand(1, 2, 8, 4))
    assert report.findings == []
    with tilewise.doctor() as report:
        net.eval()(rand(1, 2, 8, 4))
    (found,) = report.findings
    assert (found.symptom, found.modules) == ("inference differs from run to run", ("(Net)",))
    assert "0.25" in found.seen


def test_dropout_without_a_module_counts_as_inference_without_gradients():
    q = rand(1, 2, 8, 4)
    with tilewise.doctor() as report:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert report.findings == []
    with tilewise.doctor() as report, torch.no_grad():
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert [f.symptom for f in report.findings] == ["inference differs from run to run"]


def test_memory_of_a_buffer_by_hand_and_of_the_math_kernel():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("tri", torch.ones(300, 300, dtype=torch.bool).tril())

        def forward(self, q):
            F.scaled_dot_product_attention(q, q, q, self.tri)
            F.scaled_dot_product_attention(q, q, q[..., :4], is_causal=True)
            s = q @ q.mT
            s = s.masked_fill(~self.tri, float("-inf"))
            return torch.softmax(s, -1) @ q

    net = Net()
    with tilewise.doctor() as report:
        net(rand(1, 2, 300, 8))
    buffer, math, hand = sorted(report.findings, key=lambda f: f.place.line)
    assert {f.symptom for f in report.findings} == {"memory still grows as L²"}
    assert "the buffer 'tri'" in buffer.seen
    assert "it is the causal mask" in buffer.fix
    assert "the math kernel ran: it stores (1, 2, 300, 300)" in math.seen
    assert math.bytes == 2 * 2 * 300 * 300 * 4
    assert hand.bytes == 3 * 2 * 300 * 300 * 4
    assert "attention by hand: 3 tensors" in hand.seen


def test_expanded_and_small_masks_are_fine():
    q = rand(2, 2, 300, 8)
    padding = torch.ones(2, 1, 1, 300, dtype=torch.bool)
    with tilewise.doctor() as report:
        F.scaled_dot_product_attention(q, q, q, padding)
        F.scaled_dot_product_attention(q, q, q, padding.expand(2, 2, 300, 300))
        F.scaled_dot_product_attention(q[..., :9, :], q, q, torch.ones(9, 300, dtype=torch.bool))
    assert report.findings == []
    assert [c.ran for c in report.calls] == ["flash", "flash", "flash"]


def test_attention_by_hand_is_told_from_linear_layers():
    x = rand(2, 8, 16)
    router, experts = nn.Linear(16, 8), nn.Linear(16, 16)
    with tilewise.doctor() as report:
        torch.softmax(router(x), -1) @ experts(x)
        torch.softmax(x @ x.mT, -1).sum()
    assert report.by_hand == []


@pytest.mark.parametrize("write", ["bmm", "einsum", "heads", "2-D", "baddbmm", "half"])
def test_ways_to_write_attention(write):
    q = rand(2, 3, 8, 4)
    flat = q.flatten(0, 1)
    ways = {
        "bmm": lambda: torch.bmm(torch.bmm(flat, flat.mT).div(2).softmax(-1), flat),
        "einsum": lambda: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, q).softmax(3), q),
        "heads": lambda: torch.matmul(F.softmax(torch.matmul(q, q.transpose(2, 3)) / 2 + 1, dim=-1), q),
        "2-D": lambda: torch.softmax(q[0, 0] @ q[0, 0].T, 1) @ q[0, 0],
        "baddbmm": lambda: torch.baddbmm(torch.zeros(6, 8, 8), flat, flat.mT, alpha=0.5).softmax(-1) @ flat,
        "half": lambda: (
            torch.softmax(q.bfloat16() @ q.bfloat16().mT, -1, dtype=torch.float32).bfloat16() @ q.bfloat16()
        ),
    }
    with tilewise.doctor() as report:
        ways[write]()
    (hand,) = report.by_hand
    assert hand.shape[-2:] == (8, 8)
    assert hand.scores.file == hand.softmax.file == hand.average.file == __file__


# --- it changes nothing ---------------------------------------------------------------------------


class Every(nn.Module):
    """Attention in every way that the doctor knows, with dropout."""

    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.qkv = nn.Linear(32, 96)
        self.register_buffer("tri", torch.ones(80, 80, dtype=torch.bool).tril())

    def forward(self, x):
        y = self.layer(self.mha(x, x, x, need_weights=False)[0]) + self.mha(x, x, x)[0]
        q, k, v = self.qkv(y).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=self.tri)
        b = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        w = torch.softmax((q @ k.mT).masked_fill(~self.tri, float("-inf")), -1)
        c = F.dropout(w, 0.1, self.training) @ v
        d = tilewise.attention(q, k, v, masks.causal(), dropout_p=0.1)
        return a + b + c + d + tilewise.attention(q, k, v, backend="dense")


def outcome(net, x, autocast, watched):
    torch.manual_seed(3)
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(net.training):
        if watched:
            with tilewise.doctor() as report:
                y = net(x)
                if net.training:
                    y.float().square().sum().backward()
            assert len(report.calls) > 3
        else:
            y = net(x)
            if net.training:
                y.float().square().sum().backward()
    return [y.detach(), torch.rand(4), *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_same_bits(training, autocast):
    torch.manual_seed(1)
    net, x = Every().train(training), rand(2, 80, 32)
    without, within = (outcome(net, x, autocast, watched) for watched in (False, True))
    assert len(without) == len(within) > (10 if training else 1)
    assert all(torch.equal(a, b) for a, b in zip(without, within, strict=True))


def test_everything_is_put_back():
    before = F.scaled_dot_product_attention, api._run
    hooks = [getattr(nn.modules.module, n) for n in ("_global_forward_pre_hooks", "_global_forward_hooks")]
    with pytest.raises(ZeroDivisionError), tilewise.doctor():
        [0.0, None][F.scaled_dot_product_attention is before[0]] / 0
    assert (F.scaled_dot_product_attention, api._run) == before
    assert not any(hooks)
    assert not torch.autograd.profiler._is_profiler_enabled
    assert "tilewise doctor" not in [t.name for t in threading.enumerate()]


def test_no_tensor_is_kept_alive():
    refs = []

    class Net(nn.Module):
        def forward(self, q):
            mask = torch.ones(300, 300, dtype=torch.bool).tril()
            out = F.scaled_dot_product_attention(q, q, q, mask)
            w = torch.softmax(q @ q.mT, -1)
            refs.extend(StorageWeakRef(x.untyped_storage()) for x in (mask, w, out))
            out = out + w @ q
            del mask, w
            assert refs[0].expired()
            assert refs[1].expired()
            return out

    with tilewise.doctor() as report, torch.no_grad():
        Net()(rand(1, 1, 300, 8))
        assert all(ref.expired() for ref in refs)
    gc.collect()
    assert len(report.findings) == 2
    report.as_dict()


def test_a_compiled_model_stays_compiled():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    class Net(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q).sin()

    q = rand(1, 2, 16, 8)
    expected = Net()(q)
    net = torch.compile(Net(), backend=backend, fullgraph=True)
    with tilewise.doctor() as report:
        assert torch.equal(net(q), expected)
    assert compiled
    assert torch.equal(net(q), expected)
    (call,) = report.calls
    assert (call.api, call.ran) == ("an SDPA kernel, called past F", "flash")
    assert any("torch.compile" in text for text in report.unseen)
    assert report.findings == []


def test_one_doctor_at_a_time(tmp_path):
    with tilewise.doctor(), pytest.raises(RuntimeError, match="watching already"), tilewise.doctor():
        pass
    script = tmp_path / "script.py"
    script.write_text("import tilewise\nwith tilewise.doctor(): pass")
    assert "watching already" in run_script(str(script), []).error


# --- what it sees ---------------------------------------------------------------------------------


def test_calls_of_tilewise_are_reported_as_such():
    q = rand(2, 2, 48, 8)
    with tilewise.doctor() as report:
        tilewise.attention(q, q, q, masks.causal(), softcap=5.0)
        tilewise.attention(q, q, q, backend="torch_flash")
        tilewise.scaled_dot_product_attention(q, q, q)
        with pytest.raises(NotImplementedError):
            tilewise.attention(q, q, q, softcap=1.0, backend="torch_flash")
    assert {c.api for c in report.calls} == {"tilewise.attention"}
    assert [c.ran for c in report.calls] == ["tiled", "torch_flash", "tiled", None]
    assert [c.place.function for c in report.calls] == ["test_calls_of_tilewise_are_reported_as_such"] * 4
    first = report.calls[0]
    assert first.numerics.ok
    assert "triton" in first.reasons
    assert "softcap 5.0" in first.note
    assert report.findings == []


def test_the_fast_path_of_multihead_attention():
    mha = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = rand(2, 300, 32)
    with tilewise.doctor() as report, torch.no_grad():
        mha(x, x, x, need_weights=False)
    (call,) = report.calls
    assert (call.ran, call.query, call.modules) == ("native", (2, 4, 300, 8), {"(MultiheadAttention)": 1})
    assert [f.symptom for f in report.findings] == ["memory still grows as L²"]


def test_names_taken_before_the_watch_and_other_threads(monkeypatch):
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "users_model", module)
    module.attend = F.scaled_dot_product_attention
    q = rand(1, 1, 8, 4)
    with tilewise.doctor() as report:
        module.attend(q, q, q)
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
        thread.start()
        thread.join()
    assert [(c.ran, c.is_causal) for c in report.calls] == [("flash", False), ("flash", True)]
    assert module.attend is F.scaled_dot_product_attention


def test_identical_calls_are_one():
    q = rand(1, 1, 8, 4)
    with tilewise.doctor() as report:
        for n in (8, 8, 6):
            F.scaled_dot_product_attention(q[:, :, :n], q, q)
    assert [(c.count, c.query) for c in report.calls] == [(2, (1, 1, 8, 4)), (1, (1, 1, 6, 4))]


def test_beyond_the_limit_calls_are_counted(monkeypatch):
    monkeypatch.setattr("tilewise.diagnosis.watch.MOST_CALLS", 2)
    q = rand(1, 1, 8, 4)
    with tilewise.doctor() as report:
        for n in range(1, 6):
            F.scaled_dot_product_attention(q[:, :, :n], q, q)
    assert len(report.calls) == 2
    assert "3 calls of further shapes" in report.unseen[0]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own word on vmap of its kernel
def test_vmap_checkpoint_nested_and_three_dims():
    q = rand(3, 2, 8, 4)
    expected = F.scaled_dot_product_attention(q, q, q)
    with tilewise.doctor() as report:
        torch.testing.assert_close(torch.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(q), expected)
        leaf = q.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(
            lambda x: F.scaled_dot_product_attention(x, x, x), leaf, use_reentrant=False
        ).sum().backward()
        torch.testing.assert_close(F.scaled_dot_product_attention(q[0], q[0], q[0]), expected[0])
        nested = torch.nested.nested_tensor([rand(n, 2, 4) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
        F.scaled_dot_product_attention(nested, nested, nested)
    assert [c.count for c in report.calls] == [1, 2, 1, 1]  # checkpoint calls it again
    assert "not examined" in report.calls[0].note
    if kernels._BATCHES_3D:
        assert report.calls[2].ran == "flash"
    else:
        assert report.calls[2].reasons["flash"][0].fix.startswith("make q, k and v 4-D")
    assert report.findings == []


def test_what_would_run_on_a_gpu():
    q = rand(1, 4, 8, 16)
    half = q.bfloat16()
    with tilewise.doctor() as report:
        F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(half, half, half, is_causal=True)
        F.scaled_dot_product_attention(half, half, half, torch.zeros(8, 8).bfloat16())
        F.scaled_dot_product_attention(half, half[:, :2], half[:, :2], torch.zeros(8, 8).bfloat16(), enable_gqa=True)
    assert [c.on_cuda for c in report.calls] == ["efficient", "flash", "efficient", "math"]
    assert "float32" in report.calls[0].on_cuda_reasons["flash"][0].why
    assert report.calls[1].on_cuda_reasons == {}


# --- SDPA's constraints ---------------------------------------------------------------------------


@st.composite
def sdpa_calls(draw):
    b, h, lq, lk, d = (draw(st.sampled_from(x)) for x in ((1, 2), (2, 4), (1, 5, 8), (5, 8), (8, 12)))
    hk = draw(st.sampled_from([h, 2]))
    dv = draw(st.sampled_from([d, d, 4]))
    rank = draw(st.sampled_from([4, 4, 4, 3]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    mask = draw(st.sampled_from([None, None, (lq, lk), (b, 1, 1, lk), (b, h, lq, lk), (h, lq, lk)]))
    causal = mask is None and draw(st.booleans())
    return {
        "shapes": ((b, h, lq, d), (b, hk, lk, d), (b, hk, lk, dv)),
        "rank": rank,
        "dtype": dtype,
        "mask": mask,
        "causal": causal,
        "mask_grad": mask is not None and draw(st.booleans()),
        "strided": draw(st.sampled_from([False, False, True])),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.3])),
    }


def arguments(c, device):
    def tensor(*shape):
        x = torch.zeros(*shape[:-1], shape[-1] * (2 if c["strided"] else 1), dtype=c["dtype"], device=device)
        return x[..., ::2] if c["strided"] else x

    q, k, v = (tensor(*(s if c["rank"] == 4 else s[1:])) for s in c["shapes"])
    mask = None
    if c["mask"] is not None and (c["rank"] == 4 or len(c["mask"]) < 4):
        mask = torch.zeros(c["mask"], dtype=c["dtype"], device=device, requires_grad=c["mask_grad"])
    gqa = c["shapes"][0][1] != c["shapes"][1][1]
    return {"query": q, "key": k, "value": v, "attn_mask": mask, "dropout_p": c["dropout"], "is_causal": c["causal"],
            "scale": None, "enable_gqa": gqa}  # fmt: skip


@settings(max_examples=150)
@given(sdpa_calls())
def test_the_rules_say_what_pytorch_says(c):
    # torch 2.14's _fused_sdp_choice overlooks that gradient of a 3-D call; what SDPA then runs is math, as the rules say
    assume(not (kernels._BATCHES_3D and c["rank"] == 3 and c["mask_grad"]))
    for device in DEVICES:
        args = arguments(c, device)
        reasons = kernels.why_not(device, "flash", kernels.inputs_of(args))
        assert kernels.takes("flash", args) == (not reasons), (device, reasons)


@settings(max_examples=100)
@given(sdpa_calls())
def test_the_changes_are_enough(c):
    call = kernels.inputs_of(arguments(c, "cpu"))
    for device, names in kernels.FASTER.items():
        for kernel in names:
            broken = kernels.why_not(device, kernel, call)
            changes = kernels.change(device, kernel, call)
            known = all(rule.mend for rule, _ in kernels._broken(device, kernel, call))
            assert bool(changes) == (bool(broken) and known), (device, kernel, broken)


@pytest.mark.parametrize(
    ("changes", "kernel", "why"),
    [
        ({"q": (2, 4, 8, 320), "v": (2, 4, 8, 320)}, "flash", "up to 256"),
        ({"q": (2, 4, 8, 20), "v": (2, 4, 8, 20)}, "efficient", "multiples of 8"),
        ({"q": (2, 4, 8, 160), "v": (2, 4, 8, 160)}, "cudnn", "up to 128"),
        ({"k": (2, 4, 9, 64), "v": (2, 4, 9, 64), "is_causal": True}, "flash", "Lq = Lk only"),
        ({"dropout_p": 0.1}, "cudnn", "multiples of 1/16"),
        ({"dtype": torch.float64}, "efficient", "float64"),
        ({"v": (2, 4, 8, 32)}, "flash", "one head dim"),
        ({"k": (2, 2, 8, 64), "v": (2, 2, 8, 64)}, "flash", "without enable_gqa"),
    ],
)
def test_reasons_of_cuda_kernels(changes, kernel, why):
    shape, dtype = (2, 4, 8, 64), changes.get("dtype", torch.bfloat16)
    q, v = changes.get("q", shape), changes.get("v", shape)
    k = changes.get("k", (*v[:-1], q[-1]))
    call = kernels.Inputs(
        q, k, v, (dtype,) * 3, True, True, None, False, changes.get("dropout_p", 0.0),
        changes.get("is_causal", False), False,
    )  # fmt: skip
    (reason,) = kernels.why_not("cuda", kernel, call)
    assert why in reason.why
    assert reason.fix


# --- parts ----------------------------------------------------------------------------------------


def causal_mask(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


MASKS = {
    "masks.causal()": lambda: causal_mask(6),
    "masks.key_lengths([2, 6])": lambda: (torch.arange(6) < torch.tensor([[2], [6]]))[:, None, None].expand(2, 1, 6, 6),
    "masks.key_lengths([2, 6], padding='left')": lambda: (torch.arange(6) >= torch.tensor([[4], [0]]))[
        :, None, None
    ].expand(2, 3, 6, 6),
    "masks.causal() & masks.window(2, 0)": lambda: causal_mask(6) & ~causal_mask(6).tril(-3),
    "masks.causal() & masks.key_lengths([5, 3])": lambda: (
        causal_mask(6) & (torch.arange(6) < torch.tensor([[5], [3]])[:, None, None])
    ),
    "no mask: it keeps every pair": lambda: torch.ones(6, 6, dtype=torch.bool),
    "": lambda: torch.eye(6, dtype=torch.bool) | causal_mask(6).T,
}


@pytest.mark.parametrize("form", ["bool", "-inf", "finfo.min"])
@pytest.mark.parametrize("text", MASKS)
def test_a_mask_is_recognised(text, form):
    mask = MASKS[text]()
    if form != "bool":
        low = float("-inf") if form == "-inf" else torch.finfo(torch.float32).min
        mask = torch.zeros(mask.shape).masked_fill(~mask, low)
    if mask.dim() == 3:
        mask = mask[:, None]
    q = rand(2, 3, 6, 4)
    args = {"query": q, "key": q, "value": q, "attn_mask": mask, "dropout_p": 0.0, "is_causal": False, "scale": None}
    assert examine.recognise(examine.request_of(args), mask) == text


def test_a_real_bias_is_no_mask():
    q = rand(1, 1, 6, 4)
    args = {
        "query": q,
        "key": q,
        "value": q,
        "attn_mask": rand(6, 6),
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": 1.0,
    }
    assert examine.recognise(examine.request_of(args), args["attn_mask"]) == ""


def test_rows_for_people():
    assert symptoms.ranges([5, 6, 7, 9]) == "5-7, 9"
    axes = ("batch", "head", "query")
    box = NanRow(axes, tuple((b, h, i) for b in (0, 1) for h in (0, 1) for i in (2, 3)), 8, True)
    assert symptoms.rows(box) == "batch 0-1, head 0-1, query 2-3"
    odd = NanRow(axes, ((0, 0, 1), (1, 1, 1)), 70, True)
    assert symptoms.rows(odd) == "batch 0, head 0, query 1; batch 1, head 1, query 1 and 68 more rows"


def test_large():
    assert large((256, 256))
    assert not large((255, 256))
    assert not large((1, 2**20))
    assert not large((2**20,))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::addmm", steps.MATMUL), ("aten::bmm", steps.MATMUL), ("aten::convolution", steps.MATMUL),
        ("aten::native_layer_norm_backward", steps.NORM), ("aten::_fused_rms_norm", steps.NORM),
        ("aten::normal_", steps.OTHER), ("aten::_softmax_backward_data", steps.ATTENTION),
        ("aten::_to_copy", steps.MOVEMENT), ("aten::index_select", steps.MOVEMENT),
        ("aten::gelu_backward", steps.ELEMENTWISE), ("aten::add_", steps.ELEMENTWISE),
        ("AddmmBackward0", steps.OTHER), ("autograd::engine::evaluate_function: MulBackward0", steps.OTHER),
    ],
)  # fmt: skip
def test_part_of(name, part):
    assert steps.part_of(name) == part


def event(name, start, total, children=(), device=0.0, label=False):
    """A profiler event in microseconds."""
    inner = sum(c.cpu_time_total for c in children)
    return SimpleNamespace(
        name=name, cpu_children=list(children), cpu_parent=None, cpu_time_total=total,
        self_cpu_time_total=total - inner, self_device_time_total=device, is_user_annotation=label,
        time_range=SimpleNamespace(start=start), device_type=torch.autograd.DeviceType.CPU,
    )  # fmt: skip


def test_steps_are_split_and_the_doctor_is_left_out():
    s = 1e6
    events = [
        event(steps.MARK, 0, 0, label=True),
        event("my label", 0.1 * s, 3.8 * s, label=True, children=[
            event("aten::mm", 0.5 * s, 1.0 * s, [event("aten::mm", 0.6 * s, 0.4 * s)]),
            event(steps.DOCTOR, 1.6 * s, 0.2 * s, label=True),
            event("Optimizer.step#SGD.step", 2.5 * s, 1.0 * s, [event("aten::add_", 2.6 * s, 0.5 * s)], label=True),
        ]),
        event(steps.MARK, 2 * s, 0, label=True),
        event(steps.MARK, 4 * s, 0, label=True),
    ]  # fmt: skip
    first, second = steps.split(["training", "training"], events)
    assert first.seconds == pytest.approx(2.0 - 0.6 - 0.2)
    assert first.parts == pytest.approx({steps.MATMUL: 0.4, steps.GAPS: 0.8})
    assert second.parts == pytest.approx({steps.OPTIMIZER: 1.0, steps.GAPS: 1.0})


def test_on_a_gpu_the_parts_are_device_time():
    events = [event("aten::mm", 0, 100.0, device=3e5), event("aten::_softmax", 100, 50.0, device=1e5)]
    step = steps.fold("block", 1.0, events)
    assert step.parts == pytest.approx({steps.MATMUL: 0.3, steps.ATTENTION: 0.1, steps.GAPS: 0.6})
    assert steps.fold("block", 0.1, events).seconds == pytest.approx(0.4)  # it cannot be shorter than its kernels


def test_the_median_step_is_of_those_after_the_first():
    made = [steps.Step("training", t, {steps.MATMUL: t}) for t in (9.0, 1.0, 2.0, 50.0)]
    assert steps.median([steps.Step("forward", 7.0, {}), *made]).seconds == 2.0
    assert steps.median(made[:1]).seconds == 9.0
    assert steps.median([]) is None


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A clock that only a forward of ``Attending`` moves, by a second: on a busy machine any step may be the longest."""
    clock, forward = types.SimpleNamespace(now=1.0), Attending.forward

    def second(self, x):
        clock.now += 1.0
        return forward(self, x)

    monkeypatch.setattr(Attending, "forward", second)
    monkeypatch.setattr(steps, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(steps, "on_gpu", lambda: True)
    monkeypatch.setattr(steps, "_wait", lambda: None)
    return clock


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.dropout_p = nn.Linear(8, 8), 0.0

    def forward(self, x):
        q = self.proj(x)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout_p)


def train(model, count, around=contextlib.nullcontext):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        with around():
            model(rand(1, 2, 4, 8)).sum().backward()
            optimizer.step()


def test_steps_that_run_alone_give_the_length(as_on_a_gpu):
    with tilewise.doctor() as report:
        train(Attending(), 9)
        watch = report._watch
        assert _get_current_dispatch_mode() is watch
    assert _get_current_dispatch_mode() is None
    assert sum(c.count for c in report.calls) == 6  # four of the profile, two after the three alone
    alone = sorted(watch.times.alone)
    assert len(alone) == 3
    assert report.step.seconds == pytest.approx(
        max(alone[1], sum(s for p, s in report.step.parts.items() if p != steps.GAPS))
    )
    assert "its length is that of 3 more without the doctor" in str(report)
    assert report.as_dict()["step"]["alone"] == 3
    assert report.unseen == []


def test_forward_steps_run_alone_too(as_on_a_gpu):
    model = Attending().eval()
    with tilewise.doctor() as report:
        for _ in range(9):
            model(rand(1, 2, 4, 8))
    assert (report.step.kind, len(report._watch.times.alone)) == ("forward", 3)
    assert sum(c.count for c in report.calls) == 6


def test_the_watch_goes_on_where_no_more_such_steps_come(as_on_a_gpu):
    model = Attending()
    with tilewise.doctor() as report:
        train(model, 5)
        model.eval()
        model.dropout_p = 0.5
        model(rand(1, 2, 4, 8))
    assert [f.symptom for f in report.findings] == ["inference differs from run to run"]
    assert len(report._watch.times.alone) == 1
    with tilewise.doctor() as report:
        train(Attending(), 4)
        as_on_a_gpu.now += 1.5  # overdue
        q = rand(1, 1, 3, 5)
        F.scaled_dot_product_attention(q, q, q)
    assert [c.query for c in report.calls] == [(1, 2, 4, 8), (1, 1, 3, 5)]


def test_without_a_step_alone_nobody_is_accused(as_on_a_gpu):
    with tilewise.doctor() as report:
        train(Attending(), 4)
    assert report._watch.times.inflated
    assert report.findings == []
    assert "the doctor's own time included" in str(report)
    assert "the step after the first 4 would show it" in report.unseen[0]


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_the_users_modes_stay_in_order(as_on_a_gpu):
    with tilewise.doctor() as report:
        train(Attending(), 9, around=Passing)  # on top of the watch when a step ends
    assert report._watch.times.alone == []
    assert _get_current_dispatch_mode() is None
    with tilewise.doctor() as report:
        model = Attending()
        train(model, 5)
        with Passing() as mine:  # on top of a watch that is paused: it comes back after
            train(model, 4)
            assert _get_current_dispatch_mode() is mine
        train(model, 1)
        assert _get_current_dispatch_mode() is report._watch
    assert _get_current_dispatch_mode() is None


def test_forward_steps_and_the_limit_of_operators(monkeypatch):
    net, x = nn.Linear(4, 4).eval(), rand(2, 4)
    with tilewise.doctor() as report:
        for _ in range(3):
            net(x)
    assert (report.step.kind, len(report._watch.times.steps)) == ("forward", 3)
    monkeypatch.setattr(steps, "MOST_OPERATORS", 5)
    with tilewise.doctor() as report:
        for _ in range(10):
            x = x + 1
    assert report.step is None
    assert "more than 5 operators" in report.unseen[0]


def test_the_users_own_profiler_comes_first():
    with tilewise.doctor() as report, torch.profiler.profile() as mine:
        rand(3, 3) @ rand(3, 3)
    assert any(e.name == "aten::mm" for e in mine.events())
    assert report.step is None
    assert report.unseen == ["the step's time: another profiler took over"]
    with torch.profiler.profile() as mine, tilewise.doctor() as report:
        rand(3, 3) @ rand(3, 3)
    assert any(e.name == "aten::mm" for e in mine.events())
    assert report.unseen == ["the step's time: another profiler runs"]


def test_import_is_cheap_and_needs_no_typer():
    code = (
        "import sys, tilewise; assert 'tilewise.diagnosis' not in sys.modules; tilewise.doctor; "
        "assert not {'typer', 'rich', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "doctor" in tilewise.__all__


# --- the command ----------------------------------------------------------------------------------

if importlib.util.find_spec("typer") and importlib.util.find_spec("rich"):
    from typer.testing import CliRunner

    from tilewise.console import app

    def run(*args):
        return CliRunner().invoke(app, ["doctor", *map(str, args)])

    SCRIPT = """
import sys
import torch
import torch.nn.functional as F
q = torch.randn(1, 2, 8, 4)
F.scaled_dot_product_attention(q, q, q)
print("arguments", sys.argv[1:], __name__)
{}
"""

    @pytest.fixture
    def script(tmp_path):
        def write(last=""):
            (tmp_path / "users.py").write_text(SCRIPT.format(last))
            return tmp_path / "users.py"

        return write

    def test_a_script_runs_as_it_is(script):
        argv, path = list(sys.argv), list(sys.path)
        result = run(script(), "--json", "-x", "1")
        assert result.exit_code == 0, result.output
        assert "arguments ['--json', '-x', '1'] __main__" in result.stdout
        assert "no symptom in 1 attention calls" in result.stdout
        assert (sys.argv, sys.path) == (argv, path)

    def test_json_is_one_document(script):
        result = run("--json", script())
        facts = json.loads(result.stdout)
        assert facts["healthy"]
        assert facts["calls"][0]["ran"] == "flash"
        assert "arguments" in result.stderr

    def test_a_script_that_raises(script):
        result = run(script("raise KeyError('mine')"))
        assert result.exit_code == 1
        assert "up to the error" in result.stdout
        assert "1 x scaled_dot_product_attention" in result.stdout
        assert "KeyError: 'mine'" in result.stderr
        assert "runpy" not in result.stderr
        assert json.loads(run("--json", script("1 / 0")).stdout)["error"].endswith(
            "ZeroDivisionError: division by zero\n"
        )

    @pytest.mark.parametrize(("code", "expected"), [("0", 0), ("3", 1), ("'bad'", 1), ("", 0)])
    def test_a_script_that_exits(script, code, expected):
        assert run(script(f"sys.exit({code})")).exit_code == expected

    def test_symptoms_are_exit_code_1(script):
        result = run(script("with torch.no_grad(): F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)"))
        assert result.exit_code == 1
        assert "1. inference differs from run to run" in result.stdout
        assert "users.py:8 in <module>" in result.stdout

    @pytest.mark.parametrize("flags", [(), ("--json",)])
    def test_no_such_script(flags):
        result = run(*flags, "nowhere.py")
        assert result.exit_code == 2
        assert "nowhere.py is not a file" in (result.stdout if flags else result.stderr)
