"""The hopper forward as ``gluon_on_cpu`` runs it, against the judge: what it computes, whatever the GPU makes of it."""

import pytest
import torch
from gluon_on_cpu import on_cpu

from tilewise import masks
from tilewise.backends import hopper
from tilewise.testing.judge import judge
from tilewise.testing.problems import Call, Problem, plain, qkv

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(hopper.HopperBackend, "devices", None)
    monkeypatch.setattr(hopper.config, "MOST_PACKED", {"ragged": 64, "padded": 64})
    with on_cpu():
        yield


def passes(make):
    def forward(m):
        call = make(m)
        call.needs = ()
        return call

    for v in judge(Problem("hopper", "H", forward), "hopper", torch.float16):
        assert v.ok, f"{v.quantity}: {v.note}"
        assert v.quantity != "refused", v.note


LENGTHS = masks.key_lengths([300, 5])
WINDOW = masks.window(40, 10, "bottom_right")


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (96, 192), (128, 128), (256, 64), (256, 256)])
def test_masks_and_changes_of_the_scores(dim, dim_v):
    def make(m, given):
        return Call({**qkv(m, 2, 2, 140, 300, dim, dv=dim_v, kv=1), "sinks": m.randn(2)}, given)

    for mask in (None, masks.causal(), WINDOW, LENGTHS & masks.causal("bottom_right")):
        passes(plain((2, 2, 140, 300, dim), {} if mask is None else {"mask": mask}, dv=dim_v))
    for given in ({"softcap": 3.0}, {"mask": masks.causal(-20)}, {"mask": WINDOW, "softcap": 20.0}):
        passes(lambda m, given=given: make(m, given))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (16, 1), (64, 1)])
def test_few_queries_of_many_heads(heads, kv, dim):
    for lq, mask in ((1, None), (5, WINDOW), (37, masks.causal("bottom_right"))):
        passes(plain((2, heads, lq, 200, dim), {} if mask is None else {"mask": mask}, kv=kv))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize(("lq", "heads"), [(140, 2), (5, 8)])
def test_what_is_hidden_stays_hidden(lq, heads, dim):
    def make(m, value):
        tensors = {**qkv(m, 2, heads, lq, 150, dim, kv=2), "sinks": m.randn(heads)}
        for name in "kv":
            tensors[name][:, :, -6:] = value
        tensors["v"][:, :, 5] = value
        return Call(tensors, {"mask": masks.causal(140 - lq)})

    for value in (float("nan"), -float("inf")):
        passes(lambda m, value=value: make(m, value))


RAGGED = {
    "long and short": ([0, 70, 71, 200], [0, 65, 70, 190], 200, 190),
    "some without keys or queries": ([0, 0, 200, 240, 413], [0, 20, 300, 300, 440], 430, 500),
    "decoding": ([0, 1, 2, 2, 3, 8], [0, 100, 205, 300, 302, 400], 8, 400),
}


@pytest.mark.parametrize("batch", RAGGED)
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (8, 256)])
def test_ragged(heads, dim, batch):
    ends_q, ends_k, rows, keys = RAGGED[batch]

    def make(m, mask, spoilt):
        tensors = {"q": m.randn(rows, heads, dim), "k": m.randn(keys, 2, dim), "v": m.randn(keys, 2, 96)}
        if spoilt:
            for name in "kv":
                tensors[name][ends_k[1] :][:2] = float("nan")
        else:
            tensors["sinks"] = m.randn(heads)
        cu = tuple(torch.tensor(x, dtype=torch.int32) for x in (ends_q, ends_k))
        return Call(tensors, {} if mask is None else {"mask": mask}, cu=cu)

    for mask, spoilt in ((None, False), (masks.causal(), True), (WINDOW & masks.causal("bottom_right"), False)):
        passes(lambda m, mask=mask, spoilt=spoilt: make(m, mask, spoilt))
