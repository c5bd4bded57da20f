"""Every problem of the judge on every backend that says it can, in every dtype, forward and gradients."""

import pytest
import torch

from tilewise.backends import tiled
from tilewise.testing import Verdict, judge, problems
from tilewise.testing.problems import Maker

PROBLEMS = {p.name: p for p in problems()}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TILES = [None, (1, 1), (3, 5), (16, 16), (2048, 2048)]


def failures(verdicts: list[Verdict]) -> list[str]:
    return [f"{v.quantity}: {v.note}" for v in verdicts if not v.ok]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend", ["tiled", "dense"])
def test_problem(backend, name):
    for dtype in DTYPES:
        verdicts = judge(PROBLEMS[name], backend, dtype)
        assert len(verdicts) > 1  # not refused
        assert not failures(verdicts), dtype


@pytest.mark.parametrize("shape", TILES[1:], ids=str)
def test_problem_in_tiles_of(shape, tiles):
    """fp64: tiled is dense to 1e-12 whatever the tile, gradients included."""
    tiles(shape)
    judged = 0
    for p in PROBLEMS.values():
        call = p.make(Maker(p.name, torch.float64, "cpu"))
        area = call.tensors["q"].shape[-2] * call.tensors["k"].shape[-2]
        if area <= 400 * shape[0] * shape[1]:  # a thousand tiles prove what a million do
            judged += 1
            assert not failures(judge(p, "tiled", torch.float64)), p.name
    assert judged > 80


MISTAKES = {
    "each tile's softmax alone": ("_fold_", lambda w, tile, seen, s, v1, *_: _softmax_alone(seen, s, v1)),
    "no mask": ("_scores", lambda w, tile, q, k, *_: (torch.bmm(k, q.mT), None, None)),
    "delta forgotten": ("_row_stats", lambda *a, true=tiled._row_stats: _without_delta(*true(*a))),
    "half the scale": ("_scores", lambda w, tile, q, k, *a, true=tiled._scores: true(w, tile, q / 2, k, *a)),
    "m taken for 0": ("_all_near_zero", lambda *a: True),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_judge_sees_a_wrong_answer(mistake, dtype, monkeypatch, tiles):
    """The budget is not so wide that a mistake fits in."""
    tiles((16, 16))
    monkeypatch.setattr(tiled, *MISTAKES[mistake])
    name = "G1 scale 50.0" if mistake == "m taken for 0" else "B1 causal top_left 129 x 64"
    assert failures(judge(PROBLEMS[name], "tiled", dtype))


def _softmax_alone(seen, s, v1):
    """The article's mistake: softmax each tile alone and add."""
    seen.acc.add_(v1.mT @ torch.softmax(s, 1).nan_to_num(0))
    seen.acc[:, -1] = 1


def _without_delta(lse, delta, weight):
    return lse, torch.zeros_like(delta), weight


@pytest.mark.parametrize("backend", ["torch_flash", "torch_math"])
def test_peers_are_judged_or_refuse_with_reasons(backend):
    """PyTorch's kernels go through the same judge; what they cannot take they refuse, with every reason."""
    refused = 0
    for p in problems(quick=True):
        for v in judge(p, backend, torch.float32):
            if v.quantity == "refused":
                refused += 1
                assert f"backend {backend!r} cannot run this call" in v.note
                assert "  - " in v.note
    assert 0 < refused < len(problems(quick=True))
    plain = [v for p in problems(quick=True) if p.family == "D1" for v in judge(p, backend, torch.float32)]
    assert {v.quantity for v in plain} == {"out", "dq", "dk", "dv"}
    assert not failures(plain)
