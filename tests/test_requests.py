"""Random requests over all features, against fp64 by the error budget: at least 2,000 of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import seed as set_seed
from hypothesis import strategies as st
from test_masks import build, mask_strategy

from tilewise import dispatch
from tilewise.testing import Problem, judge
from tilewise.testing.problems import Call, Maker, qkv

LENGTHS = st.integers(1, 20) | st.sampled_from([0, 31, 33, 65])


@st.composite
def calls(draw):
    """A recipe for a call: everything but its dtype."""
    kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lq, lk, heads = draw(LENGTHS), draw(LENGTHS), kv * group
    d, dv = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    ragged = draw(st.booleans()) and draw(st.booleans())
    tree = draw(st.none() | mask_strategy()) if lq and lk else None
    bias = draw(st.none() | st.tuples(*(st.booleans() for _ in range(4)))) if not ragged else None
    alibi = bias is None and draw(st.booleans())
    options = {
        "softcap": draw(st.none() | st.floats(0.5, 20)),
        "scale": draw(st.none() | st.floats(-2, 2)),
        "dropout_p": draw(st.just(0.0) | st.floats(0, 1)),
        "seed": draw(st.integers(0, 2**62)),
    }
    inf_rate = draw(st.sampled_from([0.0, 0.3]))
    sinks, loss = draw(st.booleans()), draw(st.sampled_from([("out",), ("lse",), ("out", "lse")]))
    cuts = (
        sorted(draw(st.lists(st.integers(0, lq), min_size=1, max_size=1))),
        sorted(draw(st.lists(st.integers(0, lk), min_size=1, max_size=1))),
    )
    names = ["q", "k", "v"] + ["bias"] * (bias is not None) + ["alibi"] * alibi + ["sinks"] * sinks
    needs = tuple(draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))

    def make(m: Maker) -> Call:
        if ragged:
            t = {"q": m.randn(lq, heads, d), "k": m.randn(lk, kv, d), "v": m.randn(lk, kv, dv)}
        else:
            t = qkv(m, 2, heads, lq, lk, d, dv=dv, kv=kv)
        if bias is not None:
            shape = [n if full else 1 for n, full in zip((2, heads, lq, lk), bias, strict=True)]
            t["bias"] = m.randn(*shape).masked_fill(m.coin(*shape, p=inf_rate), float("-inf"))
        if alibi:
            t["alibi"] = m.exact(m.randn(heads).abs())
        if sinks:
            t["sinks"] = m.randn(heads)
        cu = None
        if ragged:  # two sequences; rows after the second belong to none
            ends = ([0, *cut, max(cut[0], n - 1)] for cut, n in zip(cuts, (lq, lk), strict=True))
            cu = tuple(torch.tensor(e, dtype=torch.int32) for e in ends)
        mask = None if tree is None else build(tree, lq, lk) if not ragged else _causal(tree)
        return Call(t, {**options, "mask": mask}, cu=cu, needs=needs, loss=loss)

    return make


def _causal(tree):
    from tilewise import masks

    return masks.causal("bottom_right") & masks.window(len(str(tree)) % 7, 0)


tile = st.tuples(st.integers(6, 40), st.integers(6, 40))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_random_requests(seed, dtype):
    """8 x 70 requests a dtype, 2,240 in all, each in tiles of a random shape."""
    backend = dispatch.get("tiled")

    @set_seed(seed)  # the same requests in every run, other ones for every number here
    @settings(max_examples=70, database=None)
    @given(calls(), tile)
    def check(make, shape):
        backend.tiles = shape
        problem = Problem(f"random {seed}", "random", make)
        assert not [v for v in judge(problem, "tiled", dtype) if not v.ok]

    try:
        check()
    finally:
        backend.tiles = None
