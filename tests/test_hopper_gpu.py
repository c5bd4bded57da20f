"""The hopper kernel on an H100 or H200, against the judge: sizes, masks, layouts, and what a mask hides."""

import pytest
import torch

from tilewise import AuxRequest, attention, masks
from tilewise.backends import hopper
from tilewise.testing.judge import judge
from tilewise.testing.problems import Call, Problem, plain, qkv

GPU = torch.device("cuda", 0)
if not torch.cuda.is_available() or hopper.machine(GPU):
    pytest.skip("needs a GPU that the hopper backend takes", allow_module_level=True)

LENGTHS = torch.tensor([0, 5, 300, 555])
BANDS = {
    "full": None,
    "causal": masks.causal(),
    "bottom right": masks.causal("bottom_right"),
    "offset": masks.causal(-40),
    "window": masks.window(70, 0, "bottom_right"),
    "left": masks.window(33, None),
    "both": masks.window(10, 300, 77),
}
RAGGED_TILES = ((1, 1), (17, 17), (127, 127), (128, 128), (129, 129), (1024, 1024), (1, 1000), (1000, 100), (257, 515))
ODD = {
    "causal": masks.causal(),
    "window": masks.window(20, 20),
    "lengths": masks.key_lengths([150, 293]),
    "both": masks.key_lengths([293, 293]) & masks.causal(),
}


def options(mask):
    return {} if mask is None else {"mask": mask}


def passes(make, dtype=torch.bfloat16):
    for v in judge(Problem("hopper", "H", make), "hopper", dtype, GPU):
        assert v.ok, f"{v.quantity}: {v.note}"
        assert v.quantity != "refused", v.note


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", BANDS)
def test_sizes(mask, dim):
    for lq, lk in RAGGED_TILES:
        passes(plain((2, 3, lq, lk, dim), options(BANDS[mask])))


@pytest.mark.parametrize("dim", [64, 128])
def test_lengths_groups_layouts(dim):
    for mask in (masks.key_lengths(LENGTHS), masks.key_lengths(LENGTHS.int()) & masks.window(100, 20)):
        passes(plain((4, 4, 555, 555, dim), {"mask": mask}, kv=2), torch.float16)
    passes(plain((1, 8, 257, 200, dim), {}, kv=1))
    view = dict.fromkeys("qkv", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    passes(lambda m: Call(qkv(m, 2, 3, 300, 300, dim), {"mask": masks.causal()}, views=view))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mask", ODD)
def test_what_is_hidden_stays_hidden(mask, value, dim):
    """A value that is not a number, among the last keys and at one place that some rows attend to."""

    def make(m, where, names):
        tensors = qkv(m, 2, 2, 300, 300, dim)
        for name in names:
            tensors[name][:, :, where] = value
        return Call(tensors, {"mask": ODD[mask]}, needs=())

    for where in (slice(-7, None), 5):
        for names in ("v", "kv"):
            passes(lambda m, where=where, names=names: make(m, where, names))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_the_same_bits(mask, dim):
    q, k, v = (torch.randn(2, h, 2000, dim, device=GPU, dtype=torch.bfloat16) for h in (4, 2, 2))
    runs = [attention(q, k, v, BANDS[mask], backend="hopper", return_aux=AuxRequest(lse=True)) for _ in range(30)]
    for out, aux in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(aux.lse, runs[0][1].lse)
