"""The row state: the article's numbers, and the algebra of merge."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from tilewise import state
from tilewise.state import State


def tile(scores, values):
    s = torch.tensor([scores], dtype=torch.float64)
    v = torch.tensor(values, dtype=torch.float64)[:, None]
    return state.fold(state.empty((1,), 1, dtype=torch.float64, device="cpu"), s, v)


def numbers(x: State):
    return x.m.item(), x.l.item(), x.acc.item()


def test_the_articles_numbers():
    a, b = tile([1, 2], [10, 20]), tile([3], [40])
    assert numbers(a) == pytest.approx((2, 1.3679, 23.6788), abs=1e-4)
    assert numbers(b) == pytest.approx((3, 1, 40))
    both = state.merge(a, b)
    assert numbers(both) == pytest.approx((3, 1.5032, 48.7109), abs=1e-4)
    o, lse = state.finish(both)
    assert o.item() == pytest.approx(32.405, abs=1e-3)
    assert lse.item() == pytest.approx(math.log(sum(math.exp(s) for s in (1, 2, 3))))


def test_the_articles_exercise():
    """Scores [0, 2, 1, 3] as tiles [0, 2] and [1, 3]."""
    a, b = tile([0, 2], [0, 0]), tile([1, 3], [0, 0])
    assert (a.m.item(), b.m.item()) == (2, 3)
    assert a.l.item() == b.l.item() == pytest.approx(1 + math.exp(-2))
    assert state.merge(a, b).l.item() == pytest.approx(sum(math.exp(s - 3) for s in (0, 1, 2, 3)))


def test_identity():
    a = tile([1, 2], [10, 20])
    nothing = state.empty((1,), 1, dtype=torch.float64, device="cpu")
    for both in (state.merge(a, nothing), state.merge(nothing, a)):
        assert numbers(both) == numbers(a)
    o, lse = state.finish(state.merge(nothing, nothing))
    assert o.item() == 0
    assert lse.item() == -math.inf


def test_wholly_masked_tile_in_a_row_with_keys_elsewhere():
    a = state.fold(
        tile([1, 2], [10, 20]), torch.full((1, 3), -math.inf, dtype=torch.float64), torch.ones(3, 1).double()
    )
    assert numbers(a) == numbers(tile([1, 2], [10, 20]))


finite = st.floats(-50, 50)
part = st.lists(st.tuples(finite | st.just(-math.inf), finite), max_size=5)


@given(st.lists(part, min_size=1, max_size=6), st.randoms())
def test_merge_in_any_order_is_the_softmax(parts, random):
    pairs = [x for p in parts for x in p]
    states = [tile([s for s, _ in p], [v for _, v in p]) if p else tile([-math.inf], [0]) for p in parts]
    while len(states) > 1:  # any order and any bracketing
        a = states.pop(random.randrange(len(states)))
        b = states.pop(random.randrange(len(states)))
        states.append(state.merge(a, b))
    o, lse = state.finish(states[0])
    s = torch.tensor([s for s, _ in pairs], dtype=torch.float64)
    if not len(s) or bool((s == -math.inf).all()):
        assert (o.item(), lse.item()) == (0, -math.inf)
        return
    v = torch.tensor([v for _, v in pairs], dtype=torch.float64)
    assert o.item() == pytest.approx(float(torch.softmax(s, 0) @ v), rel=1e-12, abs=1e-12)
    assert lse.item() == pytest.approx(float(torch.logsumexp(s, 0)), rel=1e-12, abs=1e-12)


def test_gradients():
    """fold and merge are differentiable, from scores and from finished parts."""
    torch.manual_seed(0)
    s, v = torch.randn(2, 3, 5).double().requires_grad_(), torch.randn(2, 5, 4).double().requires_grad_()

    def folded(s, v):
        x = state.empty((2, 3), 4, dtype=torch.float64, device="cpu")
        return state.finish(state.fold(state.fold(x, s[..., :2], v[:, :2]), s[..., 2:], v[:, 2:]))

    assert gradcheck(folded, (s, v))
    o, lse = torch.randn(2, 2, 3, 4).double().requires_grad_(), torch.randn(2, 2, 3).double().requires_grad_()
    sink = torch.randn(2, 1).double().requires_grad_()

    def merged(o, lse, sink):
        both = state.merge(state.from_output(o[0], lse[0]), state.from_output(o[1], lse[1]))
        return state.finish(state.with_sink(both, sink))

    assert gradcheck(merged, (o, lse, sink))


def test_a_part_without_keys_has_no_gradient():
    o, lse = torch.zeros(2, 3, requires_grad=True), torch.full((2,), -math.inf, requires_grad=True)
    other = tile([1], [2])
    both = state.merge(state.from_output(o[:1, :1].double(), lse[:1].double()), other)
    out, total = state.finish(both)
    (out.sum() + total.sum()).backward()
    assert o.grad.isfinite().all()
    assert lse.grad.isfinite().all()
    assert not o.grad.any()


def test_what_other_code_leaves_in_a_row_without_keys_spoils_nothing():
    empty = torch.full((1, 2), math.nan), torch.tensor([-math.inf])
    whole = torch.tensor([[1.0, 2.0]]), torch.tensor([0.5])
    for parts, expected in (((empty, empty), (torch.zeros(1, 2), empty[1])), ((empty, whole), whole)):
        for a, b in (parts, parts[::-1]):
            found = state.finish(state.merge(state.from_output(*a), state.from_output(*b)))
            torch.testing.assert_close(found, expected)


def test_low_part_of_lse_restores_what_rounding_took():
    x = tile([-1e30] * 3, [0] * 3)
    x = State(*(t.float() for t in x))
    _, lse = state.finish(x)
    assert state.lse_low(x, lse).item() == pytest.approx(math.log(3))
