"""The backend "tiled" beside the cases that all backends share: threads, strips, and what is known before the scores."""

import mmap

import pytest
import torch

import tilewise as tw
from tilewise import masks
from tilewise.backends import products, tiled


@pytest.fixture
def threads():
    """Set PyTorch's number of threads; what it was comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def gradients(mask, heads=(4, 2), lengths=(600, 700), **options):
    torch.manual_seed(0)
    q = torch.randn(2, heads[0], lengths[0], 16, requires_grad=True)
    k, v = (torch.randn(2, heads[1], lengths[1], 16, requires_grad=True) for _ in range(2))
    leaves = [q, k, v]
    if "bias" in options:
        leaves.append(torch.randn(options["bias"], requires_grad=True))
        options["bias"] = leaves[-1] if leaves[-1].dim() == 4 else tw.alibi(leaves[-1])
    out = tw.attention(q, k, v, mask, backend="tiled", **options)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


CALLS = {
    "plain": {},
    "one head": {"heads": (1, 1)},
    "one head of a batch of one": {"heads": (1, 1), "lengths": (700, 4500)},
    "causal": {"mask": masks.causal()},
    "lengths": {"mask": masks.key_lengths([500, 700])},
    "a bias for all": {"bias": (1, 1, 600, 700)},
    "a bias for the heads": {"bias": (1, 4, 600, 700)},
    "a bias for the batch": {"bias": (2, 1, 1, 700)},
    "a bias of queries": {"bias": (1, 1, 600, 1)},
    "slopes": {"bias": (4,)},
    "dropout": {"dropout_p": 0.3, "seed": 5},
}


@pytest.mark.parametrize("name", CALLS)
def test_strips_and_threads_change_rounding_alone(name, threads, monkeypatch):
    """And no bit from run to run."""
    monkeypatch.setattr(tiled, "_STRIP", 256)
    call = {"mask": None, **CALLS[name]}
    threads(1)
    alone = gradients(**call)
    threads(4)  # heads that are worked on at once, too
    monkeypatch.setattr(tiled, "_STRIP", 4096)
    first = gradients(**call)
    for a, b in zip(alone, first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(**call), strict=True))


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(40, 3), masks.key_lengths([500, 0])], ids=str)
@pytest.mark.parametrize("size", [1.0, 0.05])
def test_a_bound_on_the_scores_changes_no_bit(mask, size, monkeypatch):
    """What is known before the scores only saves work: one row's bits do not depend on another's size."""
    monkeypatch.setattr(torch.Tensor, "square", lambda x: x * size)
    known = gradients(mask)
    monkeypatch.setattr(tiled, "_all_near_zero", lambda *a: False)
    assert all(torch.equal(a, b) for a, b in zip(known, gradients(mask), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "lengths"), [((4, 4), (16, 16)), ((6, 2), (1, 40)), ((4, 1), (7, 1))])
@pytest.mark.parametrize("lead", ["B, H, L", "B, L, H"])
def test_small_calls_without_gradients(dtype, heads, lengths, lead, monkeypatch):
    """They are computed at once, to what tiles give."""
    torch.manual_seed(0)
    shapes = [(2, h, n, d) for h, n, d in zip((*heads, heads[1]), (*lengths, lengths[1]), (8, 8, 5), strict=True)]
    q, k, v = (torch.randn(b, n, h, d, dtype=dtype).transpose(1, 2) for b, h, n, d in shapes)
    if lead == "B, H, L":
        q, k, v = (x.contiguous() for x in (q, k, v))
    calls = []
    monkeypatch.setattr(tiled, "_at_once", lambda r, real=tiled._at_once: calls.append(r) or real(r))
    aux = tw.AuxRequest(lse=True)
    out, more = tw.attention(q, k, v, backend="tiled", return_aux=aux)
    assert len(calls) == 1
    monkeypatch.setattr(tiled, "_AT_ONCE", 0)
    expected, by_tiles = tw.attention(q, k, v, backend="tiled", return_aux=aux)
    assert len(calls) == 1
    assert (out.stride(), out.dtype) == (expected.stride(), expected.dtype)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(more.lse, by_tiles.lse)
    q.requires_grad_()
    monkeypatch.undo()
    with monkeypatch.context() as m:
        m.setattr(tiled, "_at_once", lambda r: pytest.fail("a backward follows"))
        tw.attention(q, k, v, backend="tiled")


def bf16_gradients(mask, dtype=torch.bfloat16, spoiled=None, **options):
    torch.manual_seed(0)
    leaves = [torch.randn(2, h, n, 32, dtype=torch.bfloat16) for h, n in ((4, 300), (2, 1100), (2, 1100))]
    dout = torch.randn(2, 4, 300, 32, dtype=torch.bfloat16).to(dtype)
    for x in leaves[1:]:
        if spoiled is not None:
            x[:, :, -50:] = spoiled
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    out = tw.attention(*leaves, mask, backend="tiled" if dtype == torch.bfloat16 else "dense", **options)
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(40, 3), masks.key_lengths([500, 1100])], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"scale": -0.3}, {"scale": 0.0}], ids=str)
def test_gradients_by_products_of_bf16(mask, options, monkeypatch):
    """Three roundings, of P or dS, of a tile's sums and of the result, in place of the last one alone."""
    exact = bf16_gradients(mask, torch.float64, **options)
    found, errors = {}, {}
    for quick in (True, False):
        monkeypatch.setattr(products, "quick_in_bf16", lambda device, quick=quick: quick)
        found[quick] = bf16_gradients(mask, **options)
        errors[quick] = [float((a - b).norm()) for a, b in zip(found[quick], exact, strict=True)]
    for three, one in zip(errors[True], errors[False], strict=True):
        assert three <= 2 * one  # sqrt(3) if all are alike
    assert not torch.equal(found[True][2], found[False][2])


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_what_is_masked_changes_no_bit_of_products_of_bf16(spoiled, monkeypatch):
    monkeypatch.setattr(products, "quick_in_bf16", lambda device: True)
    mask = masks.key_lengths([1050, 700])
    clean, odd = bf16_gradients(mask), bf16_gradients(mask, spoiled=spoiled)
    assert all(torch.equal(a, b) for a, b in zip(clean, odd, strict=True))


@pytest.mark.parametrize("mib", [1, 64])
def test_only_large_tensors_are_asked_for_in_huge_pages(mib, monkeypatch):
    libraries = []
    monkeypatch.setattr(tiled.ctypes, "CDLL", lambda name, true=tiled.ctypes.CDLL: libraries.append(1) or true(name))
    x = torch.empty(mib * 2**18)
    assert tiled._in_huge_pages(x) is x
    assert bool((x.fill_(1.0) == 1).all())
    assert len(libraries) == (mib == 64 and hasattr(mmap, "MADV_HUGEPAGE"))
