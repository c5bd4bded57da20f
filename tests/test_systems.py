"""Operators and transforms: opcheck, compile, autocast, vmap, torch.func, checkpoint, threads, FLOP counting."""

import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

import tilewise as tw
from tilewise import masks


def qkv(b=2, h=4, kv=2, lq=9, lk=11, d=8, dtype=torch.float32, grad=True):
    g = torch.Generator().manual_seed(0)
    shapes = ((b, h, lq, d), (b, kv, lk, d), (b, kv, lk, d))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("max_logits", [False, True])
def test_opcheck(ragged, max_logits):
    q, k, v = qkv(grad=False)
    mask = masks.causal() & (masks.key_lengths([5, 9]) | ~masks.window(1, 1))
    bias, slopes, sinks, rng = torch.randn(1, 4, 1, 11), None, torch.randn(4), torch.tensor([1, 2])
    cu_q = cu_k = None
    if ragged:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        cu_q, cu_k = torch.tensor([0, 9, 18], dtype=torch.int32), torch.tensor([0, 11, 22], dtype=torch.int32)
    numbers = (9, 11, 0.3, 2.0, 0.1, max_logits, True, "tiled", mask.code())
    args = (q, k, v, bias, slopes, sinks, rng, cu_q, cu_k, *numbers, mask.tensors())
    opcheck(torch.ops.tilewise.forward.default, args)
    out, lse, _, low = torch.ops.tilewise.forward(*args)
    needs = [True, True, True, True, False, True]
    opcheck(torch.ops.tilewise.backward.default, (out, lse, out, lse, low, needs, *args))


PREDICATE = masks.predicate(lambda b, h, i, j: (i + j) % 3 != 0)
COMPILED = {
    "causal, window, alibi, sinks, softcap, lse": lambda q, k, v, s: _sum(
        tw.attention(
            q, k, v, masks.causal() & masks.window(20, 0), bias=tw.alibi(s), sinks=s, softcap=5.0,
            return_aux=tw.AuxRequest(lse=True),
        )
    ),
    "lengths": lambda q, k, v, s: tw.attention(q, k, v, masks.key_lengths(torch.tensor([3, 7])) & masks.causal("bottom_right")),
    "predicate": lambda q, k, v, s: tw.attention(q, k, v, PREDICATE),
    "bias": lambda q, k, v, s: tw.attention(q, k, v, bias=s.view(1, 4, 1, 1)),
    "drop-in": lambda q, k, v, s: tw.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
}  # fmt: skip


def _sum(answer):
    return answer[0] + answer[1].lse[..., None]


@pytest.mark.parametrize("name", COMPILED)
def test_h3_compile_fullgraph_dynamic(name):
    """Five lengths, at most two compilations, same values and gradients."""
    f = COMPILED[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (16, 33, 57, 64, 128):
        q, k, v = qkv(lq=length, lk=length)
        s = torch.rand(4, requires_grad=True)
        wanted = [x for x in (q, k, v, s) if x is not s or "sinks" in name or name == "bias"]
        outs = [g(q, k, v, s) for g in (compiled, f)]
        torch.testing.assert_close(*outs)
        grads = [torch.autograd.grad(o.square().sum(), wanted) for o in outs]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_compile_dropout_draws_anew():
    f = torch.compile(lambda q, k, v: tw.attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    q, k, v = qkv(grad=False)
    assert not torch.equal(f(q, k, v), f(q, k, v))


def test_compile_varlen():
    q, k, v = (x.transpose(1, 2).flatten(0, 1).detach().requires_grad_() for x in qkv())
    cu_q, cu_k = torch.tensor([0, 5, 18], dtype=torch.int32), torch.tensor([0, 3, 20], dtype=torch.int32)
    f = lambda q, k, v: tw.attention_varlen(q, k, v, cu_q, cu_k, 13, 17, masks.causal())
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v), f(q, k, v))
    with pytest.raises(Exception, match=r"under torch\.compile pass max_seqlen_q and max_seqlen_k"):
        torch.compile(lambda q: tw.attention_varlen(q, k, v, cu_q, cu_k), fullgraph=True, backend="aot_eager")(q)


def test_compile_refuses_the_judge():
    q, k, v = qkv()
    with pytest.raises(Exception, match=r"looks at values, which torch\.compile cannot trace"):
        torch.compile(lambda q: tw.attention(q, k, v, backend="dense"), fullgraph=True, backend="aot_eager")(q)


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return tw.attention(q, k, v, masks.causal())

    args = tuple(qkv(grad=False))
    program = torch.export.export(Model(), args)
    assert "tilewise.forward" in str(program.graph)
    torch.testing.assert_close(program.module()(*args), Model()(*args))


def test_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out = tw.attention(q, k, v)
        out64 = tw.attention(*(x.double() for x in (q, k, v)))
    assert out.dtype == torch.bfloat16
    assert out64.dtype == torch.float64  # as PyTorch: fp64 is left alone
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(out, tw.attention(*(x.bfloat16() for x in (q, k, v))))


def test_vmap():
    q, k, v = (torch.stack([x, 2 * x, x - 1]) for x in qkv(grad=False))
    f = lambda q, k, v: tw.attention(q, k, v, masks.causal())
    out = torch.vmap(f)(q, k, v)
    torch.testing.assert_close(out, torch.stack([f(*x) for x in zip(q, k, v, strict=True)]))
    shared = torch.vmap(f, in_dims=(0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(shared, torch.stack([f(x, k[0], v[0]) for x in q]))
    per_sample = torch.vmap(torch.func.grad(lambda q, k, v: f(q, k, v).square().sum()))(q, k, v)
    one = torch.func.grad(lambda q: f(q, k[1], v[1]).square().sum())(q[1])
    torch.testing.assert_close(per_sample[1], one)


def test_func_grad_and_vjp():
    q, k, v = qkv(grad=False)
    f = lambda *a: tw.attention(*a, masks.causal()).square().sum()
    grads = torch.func.grad(f, argnums=(0, 1, 2))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for a, b in zip(grads, torch.autograd.grad(f(*leaves), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    from torch.utils.checkpoint import checkpoint

    q, k, v = qkv()
    f = lambda q, k, v: tw.attention(q, k, v, masks.causal())
    out = checkpoint(f, q, k, v, use_reentrant=reentrant)
    a = torch.autograd.grad(out.sum(), (q, k, v)) if not reentrant else None
    if reentrant:
        out.sum().backward()
        a = [x.grad for x in (q, k, v)]
    for x, y in zip(a, torch.autograd.grad(f(q, k, v).sum(), (q, k, v)), strict=True):
        assert torch.equal(x, y)


def test_predicates_live_as_long_as_their_backward():
    """The mask is made inline and gone before the backward runs."""
    before = len(masks._holders)
    q, k, v = qkv()
    out = tw.attention(q, k, v, masks.predicate(lambda b, h, i, j: i >= j))
    out.sum().backward()
    leaves = qkv()
    tw.attention(*leaves, masks.causal()).sum().backward()
    torch.testing.assert_close(q.grad, leaves[0].grad)
    assert len(masks._holders) == before + 1  # what the output's backward needs
    del out
    assert len(masks._holders) == before


def test_flex_block_mask_at_the_edge():
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = qkv(lk=9, grad=False)
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, 9, 9, device="cpu")
    torch.testing.assert_close(tw.attention(q, k, v, block), tw.attention(q, k, v, masks.causal()))


def test_flop_counter():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = qkv(1, 4, 2, 64, 48, 8)
    with FlopCounterMode(display=False) as counter:
        out = tw.attention(q, k, v)
    assert counter.get_total_flops() == 4 * 4 * 64 * 48 * 8
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2.5 * 4 * 4 * 64 * 48 * 8
    with FlopCounterMode(display=False) as counter:
        tw.attention(q, k, v, masks.causal())
    assert counter.get_total_flops() == 4 * 4 * 8 * sum(min(i + 1, 48) for i in range(64))
    cu = torch.tensor([0, 10, 48], dtype=torch.int32)
    ragged = (x[0].transpose(0, 1) for x in (q[:, :, :48], k, v))
    with FlopCounterMode(display=False) as counter:
        tw.attention_varlen(*ragged, cu, cu)
    assert counter.get_total_flops() == 4 * 4 * 8 * (10 * 10 + 38 * 38)


def test_import_is_light():
    """Without a GPU and without Triton; nothing patched, nothing optional imported."""
    code = """
import sys, torch.nn.functional as F
sys.modules['triton'] = None  # importing it is an ImportError
before = F.scaled_dot_product_attention
import tilewise
assert F.scaled_dot_product_attention is before
assert not {'transformers', 'typer', 'rich', 'matplotlib', 'hypothesis'} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names():
    assert len(tw.__all__) <= 12
    assert all(getattr(tw, n).__doc__ for n in tw.__all__)
