"""Choosing a backend: explicit choices are kept to, and every reason is told."""

import pytest
import torch

import tilewise as tw
from tilewise import dispatch, masks


def qkv(b=1, h=2, lq=6, lk=6, d=8, **kw):
    return torch.randn(b, h, lq, d, **kw), torch.randn(b, h, lk, d, **kw), torch.randn(b, h, lk, d, **kw)


@pytest.fixture
def ran(monkeypatch):
    """Names of the backends that ran."""
    names = []
    for b in dispatch.BACKENDS.values():
        monkeypatch.setattr(b, "forward", lambda r, b=b, run=b.forward: names.append(b.name) or run(r))
    return names


def test_the_order_of_choices(ran, monkeypatch):
    q, k, v = qkv()
    tw.attention(q, k, v)
    monkeypatch.setenv("TILEWISE_BACKEND", "torch_math")
    tw.attention(q, k, v)
    with tw.use_backend("dense"):
        tw.attention(q, k, v)
        with tw.use_backend("tiled"):
            tw.attention(q, k, v)
        tw.attention(q, k, v, backend="torch_flash")
    monkeypatch.setenv("TILEWISE_BACKEND", "torch_cudnn, dense")
    tw.attention(q, k, v)
    assert ran == ["tiled", "torch_math", "dense", "tiled", "torch_flash", "dense"]


def test_a_list_takes_the_first_that_can(ran):
    q, k, v = qkv()
    tw.attention(q, k, v, softcap=1.0, backend=["torch_flash", "torch_efficient", "dense", "tiled"])
    assert ran == ["dense"]


def test_an_explicit_choice_never_falls_back(ran):
    q, k, v = qkv()
    with pytest.raises(NotImplementedError):
        tw.attention(q, k, v, softcap=1.0, backend="torch_flash")
    with pytest.raises(NotImplementedError, match="none of the chosen backends can run this call"):
        tw.attention(q, k, v, softcap=1.0, backend=["torch_flash", "torch_cudnn"])
    assert ran == []


def test_never_automatic():
    assert not {n for n in dispatch.AUTO if n.startswith("torch_")}
    assert "dense" not in dispatch.AUTO


def test_the_choice_is_undone_after_an_error():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError), tw.use_backend("torch_flash"):
        tw.attention(q, k, v, softcap=1.0)
    assert dispatch.candidates(None) == dispatch.AUTO


def test_the_choice_holds_for_every_thread():
    """As torch.nn.attention.sdpa_kernel's does."""
    from concurrent.futures import ThreadPoolExecutor

    with tw.use_backend("dense"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(dispatch.candidates, None).result() == ("dense",)


def test_h4_the_error_holds_every_reason():
    q, k, v = qkv(d=300)
    v = v[..., :40]
    with pytest.raises(NotImplementedError) as e:
        tw.attention(q, k, v, masks.window(3, 0), softcap=2.0, sinks=torch.zeros(2), backend="torch_cudnn")
    text = str(e.value)
    for line in (
        "backend 'torch_cudnn' cannot run this call",
        "q (1, 2, 6, 300), k (1, 2, 6, 300), v (1, 2, 6, 40), float32 on cpu",
        "mask window(3, 0); softcap 2.0; attention sinks; value head dim 40 beside 300",
        "does not take softcap 2.0 (fix: use a tilewise backend)",
        "does not take attention sinks",
        "has no argument for window(3, 0)",
        "tiled: can run it",
        "torch_flash:",
        "To run it: backend='tiled', or leave backend= out",
    ):
        assert line in text


def test_h4_explain_says_the_same_without_running(ran):
    q, k, v = (x.to("meta") for x in qkv(d=300))
    kw = {"softcap": 2.0, "backend": "torch_flash"}
    told = tw.explain(q, k, v, masks.causal(), **kw)
    assert told.chosen is None
    with pytest.raises(NotImplementedError) as e:
        tw.attention(q, k, v, masks.causal(), **kw)
    assert all(str(r) in str(e.value) for r in told.reasons["torch_flash"])
    assert tw.explain(*qkv(), masks.causal()).chosen == "tiled"
    assert ran == []
    text = str(told)
    assert "runs: nothing: torch_flash cannot" in text
    assert told.to_dict()["backends"]["torch_flash"][1]["why"].startswith("does not take softcap")


def test_h4_dtype_and_device_reasons(monkeypatch):
    q, k, v = qkv(dtype=torch.float64)
    flash = dispatch.get("torch_flash")
    monkeypatch.setattr(type(flash), "dtypes", (torch.bfloat16,))
    with pytest.raises(NotImplementedError, match=r"does not take float64 \(fix: cast q, k, v to one of bfloat16\)"):
        tw.attention(q, k, v, backend="torch_flash")
    told = tw.explain(*(x.to("meta") for x in (q, k, v)))
    assert any("the tensors are on meta" in str(r) for r in told.reasons["torch_flash"])


def test_explain_counts_tiles():
    q, k, v = qkv(lq=512, lk=512)
    tiles = tw.explain(q, k, v, masks.causal() & masks.window(127, 0)).tiles
    assert tiles == {"block_m": 128, "block_n": 128, "total": 32, "empty": 18, "partial": 14, "full": 0}


@pytest.mark.parametrize("name", ["torch_flash", "torch_math"])
def test_peers_run_what_they_say(name):
    """On a CPU: the kernel really is the one named, and agrees with the judge."""
    q, k, v = (x.requires_grad_() for x in qkv(lq=33, lk=33, d=16))
    bias = torch.randn(1, 2, 33, 33)
    for kw in ({}, {"mask": masks.causal()}, {"mask": torch.rand(33, 33) < 0.8}, {"bias": bias}, {"scale": 0.3}):
        with torch.profiler.profile() as p:
            out = tw.attention(q, k, v, backend=name, **kw)
        seen = {e.key for e in p.key_averages()}
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in seen) == (name == "torch_flash")
        torch.testing.assert_close(out, tw.attention(q, k, v, backend="dense", **kw), rtol=1e-4, atol=1e-5)


def test_peers_reasons_on_a_cpu():
    q, k, v = qkv()
    assert any("no dropout" in str(r) for r in tw.explain(q, k, v, dropout_p=0.1).reasons["torch_flash"])
    bias = torch.zeros(6, 6, requires_grad=True)
    assert any("gradient of the bias" in str(r) for r in tw.explain(q, k, v, bias=bias).reasons["torch_flash"])
    assert any("a seed" in str(r) for r in tw.explain(q, k, v, dropout_p=0.1, seed=1).reasons["torch_math"])
    assert any("CUDA kernel" in str(r) for r in tw.explain(q, k, v).reasons["torch_efficient"])
    told = tw.explain(q, k, v, masks.causal("bottom_right")).reasons
    assert told["torch_flash"] == []  # equal lengths: the same diagonal
    q1 = q[:, :, :3]
    assert tw.explain(q1, k, v, masks.causal("bottom_right")).reasons["torch_flash"] != []


def test_math_takes_any_mask():
    q, k, v = qkv(2, 2, 9, 12)
    two_of_three = masks.predicate(lambda b, h, i, j: (i + j) % 3 > 0)
    mask = masks.causal("bottom_right") & two_of_three | masks.key_lengths([3, 2])
    torch.testing.assert_close(
        tw.attention(q, k, v, mask, backend="torch_math"), tw.attention(q, k, v, mask, backend="dense")
    )
    slopes = torch.tensor([0.5, 0.1])
    torch.testing.assert_close(
        tw.attention(q, k, v, mask, bias=tw.alibi(slopes), backend="torch_math"),
        tw.attention(q, k, v, mask, bias=tw.alibi(slopes), backend="dense"),
    )
