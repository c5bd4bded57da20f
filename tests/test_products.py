"""Which library multiplies fp32 on a CPU: the setting is borrowed, and given back as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import masks
from tilewise.backends import products, tiled

CPU = torch.device("cpu")
MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    yield
    MATMUL.fp32_precision = "none"
    torch.backends.fp32_precision = "none"


@pytest.fixture
def better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_onednn_is_better", lambda: True)


@pytest.mark.parametrize("before", ["none", "ieee", "tf32", "bf16"])
def test_the_setting_is_given_back(better: None, before: str) -> None:
    MATMUL.fp32_precision = before
    with products.quick(CPU):
        assert MATMUL.fp32_precision == "bf16"
        with products.quick(CPU):
            pass
        assert MATMUL.fp32_precision == "bf16"
    assert MATMUL.fp32_precision == before
    with pytest.raises(KeyError), products.quick(CPU):
        raise KeyError
    assert MATMUL.fp32_precision == before


def test_a_setting_that_follows_the_general_one_still_does(better: None) -> None:
    with products.quick(CPU):
        pass
    torch.backends.fp32_precision = "tf32"
    assert MATMUL.fp32_precision == "tf32"


def test_the_last_of_several_threads_gives_it_back(better: None) -> None:
    inside, leave = threading.Barrier(3), threading.Event()

    def work() -> None:
        with products.quick(CPU):
            inside.wait()
            leave.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    inside.wait()
    with products.quick(CPU):
        pass
    assert MATMUL.fp32_precision == "bf16"
    leave.set()
    for t in threads:
        t.join()
    assert MATMUL.fp32_precision == "none"


def test_elsewhere_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_onednn_is_better", lambda: False)
    for device in (CPU, torch.device("cuda"), torch.device("meta")):
        with products.quick(device):
            assert MATMUL.fp32_precision == "none"


def test_which_settings_keep_all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_onednn_is_better", lambda: False)
    for setting, full in (("none", True), ("ieee", True), ("tf32", False), ("bf16", False)):
        MATMUL.fp32_precision = setting
        assert products.exact(CPU) is full
    monkeypatch.setattr(products, "_onednn_is_better", lambda: True)
    assert products.exact(CPU)
    assert not products.exact(torch.device("xpu"))


def test_bf16_is_quick_on_a_cpu_that_has_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has in (True, False):
        products.quick_in_bf16.cache_clear()
        monkeypatch.setattr(products, "_capabilities", lambda has=has: {"avx512_bf16": has})
        assert products.quick_in_bf16(CPU) is (has and torch.backends.mkldnn.is_available())
        assert not products.quick_in_bf16(torch.device("cuda"))
    products.quick_in_bf16.cache_clear()


def test_onednn_is_taken_only_where_it_rounds_nothing() -> None:
    if not products._onednn_is_better():
        assert not products._users
        return
    a, b = torch.randn(2, 96, 64), torch.randn(2, 64, 96)
    with products.quick(CPU):
        product = torch.bmm(a, b)
    assert (product - a.double() @ b.double()).abs().max() < 1e-4  # rounded to bf16 it would be 0.1


def _gradients(softcap: float | None, dropout_p: float) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 4, 70, 16, generator=g) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(
        *inputs, masks.causal(), softcap=softcap, dropout_p=dropout_p, seed=1 if dropout_p else None, backend="tiled"
    )
    return list(torch.autograd.grad(out, inputs, dout))


@pytest.mark.parametrize(("softcap", "dropout_p"), [(None, 0.0), (5.0, 0.0), (None, 0.3)])
def test_without_all_digits_no_sum_hides_in_a_product(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, dropout_p: float
) -> None:
    """-lse as a factor would be rounded to 8 bits: 1.6 % of a probability at lse = 8."""
    whole = _gradients(softcap, dropout_p)
    factors: list[Tensor] = []
    true = tiled._with

    def watched(x: Tensor, last: Tensor | float, scale: float = 1.0) -> Tensor:
        factors.append(torch.as_tensor(last))
        return true(x, last, scale)

    monkeypatch.setattr(products, "exact", lambda device: False)
    monkeypatch.setattr(tiled, "_with", watched)
    for a, b in zip(_gradients(softcap, dropout_p), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert {float(x) for x in factors} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("keys", "parts"), [(1, 1), (127, 1), (128, 1), (256, 2), (488, 4), (487, 1), (1024, 8), (1310, 1)]
)
def test_sums_go_in_equal_chains(keys: int, parts: int) -> None:
    assert tiled._chains(keys, 128) == parts
    assert parts == 1 or 64 <= keys // parts <= 128


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("poisoned", [False, True])
def test_chains_change_no_more_than_the_last_digits(
    monkeypatch: pytest.MonkeyPatch, bias: bool, poisoned: bool
) -> None:
    """Also where NaN lies behind the mask, and then to the same bits as without it."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 300, 16, generator=g) for _ in range(4))
    b = torch.randn(1, 2, 300, 300, generator=g) if bias else None
    mask = masks.key_lengths([260])

    def results(v: Tensor, backend: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v, *([] if b is None else [b]))]
        out = tilewise.attention(*inputs[:3], mask, bias=None if b is None else inputs[3], backend=backend)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(dtype))]

    monkeypatch.setattr(products, "in_one_chain", lambda device: True)
    assert 300 in tiled._FEW_QUERIES
    found = results(v, "tiled", torch.float32)
    for a, e in zip(found, results(v, "dense", torch.float64), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)
    if poisoned:
        w = v.clone()
        w[:, :, 260:] = float("nan")
        for a, e in zip(results(w, "tiled", torch.float32), found, strict=True):
            assert torch.equal(a, e)
