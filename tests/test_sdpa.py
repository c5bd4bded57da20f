"""The drop-in: PyTorch's signature and meaning."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import tilewise as tw


def rand(*shape, seed=0, **kw):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, **kw)


def test_signature():
    theirs = F.scaled_dot_product_attention.__doc__.split("\n")[0] + F.scaled_dot_product_attention.__doc__
    for name, p in inspect.signature(tw.scaled_dot_product_attention).parameters.items():
        assert name in theirs
        if p.default is not inspect.Parameter.empty:
            assert f"{name}={p.default}" in theirs.replace(" ", "")


@pytest.mark.parametrize("lead", [(3,), (2, 3), (2, 1, 3), (2, 2, 2, 3)])
@pytest.mark.parametrize("mask", ["none", "causal", "bool 2-D", "bool full", "float", "float per head", "batch"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_same_as_pytorch(lead, mask, scale):
    q, k, v = (rand(*lead, n, d, seed=s).requires_grad_() for s, (n, d) in enumerate([(5, 8), (7, 8), (7, 4)]))
    coin = lambda *s: torch.rand(s, generator=torch.Generator().manual_seed(3)) < 0.7
    kw = {
        "none": {},
        "causal": {"is_causal": True},
        "bool 2-D": {"attn_mask": coin(5, 7)},
        "bool full": {"attn_mask": coin(*lead, 5, 7)},
        "float": {"attn_mask": rand(5, 7, seed=4)},
        "float per head": {"attn_mask": rand(3, 1, 7, seed=4)},
        "batch": {"attn_mask": coin(lead[0], *(1,) * (len(lead) - 1), 1, 7)},
    }[mask]
    if kw.get("attn_mask") is not None and kw["attn_mask"].dtype == torch.bool:
        kw["attn_mask"][..., 0] = True
    theirs = F.scaled_dot_product_attention(q, k, v, scale=scale, **kw)
    ours = tw.scaled_dot_product_attention(q, k, v, scale=scale, **kw)
    torch.testing.assert_close(ours, theirs)
    w = rand(*theirs.shape, seed=8)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), w) for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_grouped_heads():
    q, k = rand(2, 6, 5, 8), rand(2, 2, 5, 8, seed=1)
    torch.testing.assert_close(
        tw.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
    )


def test_gradient_of_an_additive_mask():
    q = rand(2, 2, 5, 8)
    grads = []
    for f in (tw.scaled_dot_product_attention, F.scaled_dot_product_attention):
        bias = rand(2, 1, 5, 5, seed=2).requires_grad_()
        f(q, q, q, bias).square().sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(*grads)


def test_dropout_is_applied_whatever_the_mode():
    q = rand(1, 1, 40, 8)
    out = tw.scaled_dot_product_attention(q, q, torch.eye(40).double()[None, None], dropout_p=0.5)
    assert 0.3 < float((out == 0).double().mean()) < 0.7


def test_a_masked_row_is_zero():
    q = rand(1, 1, 2, 4)
    mask = torch.tensor([[True, True], [False, False]])
    assert not tw.scaled_dot_product_attention(q, q, q, mask)[0, 0, 1].any()
