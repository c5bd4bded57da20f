"""The meter sees every allocation to the byte, also inside the operator, and tells linear from quadratic."""

import gc

import pytest
import torch

from tilewise import attention, dispatch, masks
from tilewise.backends.tiled import TiledBackend
from tilewise.memory import PeakMemory, peak_of


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_sees_a_tensor_allocated_and_freed_inside():
    with PeakMemory() as memory:
        x = torch.empty(1000, 1000)
        del x
    assert (memory.peak, memory.kept) == (4_000_000, 0)


def test_adds_what_is_alive_together_and_nothing_else():
    with PeakMemory() as memory:
        a, b = torch.empty(1000), torch.empty(2000)
        del a
        c = torch.empty(500)
    assert (memory.peak, memory.kept) == (12_000, 10_000)
    del b, c


def test_memory_from_before_the_block_is_not_counted():
    before = torch.empty(1_000_000)
    with PeakMemory() as memory:
        after = torch.empty(100)
    assert (memory.peak, memory.kept) == (400, 400)
    del before, after


def test_garbage_of_an_earlier_block_is_not_a_release_of_this_one():
    with PeakMemory():
        cycle = [torch.empty(1000)]
        cycle.append(cycle)
    del cycle
    with PeakMemory() as memory:
        a = torch.empty(1000)
        gc.collect()
        b = torch.empty(1000)
    assert (memory.peak, memory.kept) == (8_000, 8_000)
    del a, b


def test_temporaries_within_one_pytorch_call_count():
    x = torch.randn(512, 512)
    with PeakMemory() as memory:
        x.t().contiguous().softmax(-1).sum()
    assert memory.peak >= 2 * x.nbytes  # the copy and the softmax


class Wasteful(TiledBackend):
    """A tiled backend that makes an L x L tensor and lets it go."""

    name = "wasteful"

    def forward(self, r):
        torch.empty(r.len_q, r.len_k).fill_(0)
        return super().forward(r)

    def backward(self, r, *rest):
        torch.empty(2 * r.len_q, r.len_k).fill_(0)
        return super().backward(r, *rest)


@pytest.mark.parametrize("compute", ["forward", "backward"])
def test_sees_inside_the_operator(monkeypatch, compute):
    monkeypatch.setitem(dispatch.BACKENDS, "wasteful", Wasteful())
    n = 1024
    q = torch.randn(1, 1, n, 16, requires_grad=True)

    def peak(backend):
        with PeakMemory() as forward:
            out = attention(q, q, q, backend=backend)
        with PeakMemory() as backward:
            out.sum().backward()
        return {"forward": forward, "backward": backward}[compute].peak

    square = {"forward": 1, "backward": 2}[compute] * n * n * 4
    assert square <= peak("wasteful") < square + 2**20
    assert peak("tiled") < square


def test_repeats_to_the_byte():
    q = torch.randn(1, 2, 700, 32)
    attention(q, q, q, masks.causal())  # the tile map is cached

    def peak():
        with PeakMemory() as memory:
            attention(q, q, q, masks.causal())
        return memory.peak

    assert peak() == peak()


def attention_peak(length, backend):
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    total = attention(q, k, v, masks.causal(), backend=backend).sum()
    with PeakMemory() as memory:  # of the backward alone: a short forward has a higher peak than its backward
        total.backward()
    return memory.peak


def test_tells_linear_from_quadratic():
    one, two, four = (attention_peak(n, "tiled") for n in (1024, 2048, 4096))
    assert (four - two) / (two - one) == pytest.approx(2, rel=0.05)
    one, two = (attention_peak(n, "dense") for n in (512, 1024))
    assert two / one == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("what", ["causal", "padding", "predicate", "bias"])
def test_extra_memory_is_linear_at_real_lengths(what):
    """4k, 8k, 16k, forward and backward. A bias has its own size and that of its gradient, and nothing more."""

    def peak(n):
        q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3))
        bias = torch.zeros(n, n, requires_grad=True) if what == "bias" else None
        mask = {
            "causal": masks.causal(),
            "padding": masks.key_lengths([n // 2]) & masks.query_lengths([n // 2], padding="left"),
            "predicate": masks.predicate(lambda b, h, i, j: (i - j).abs() < 600),
            "bias": masks.causal() & masks.window(64, 0),
        }[what]
        with PeakMemory() as forward:
            out = attention(q, k, v, mask, bias=bias)
        with PeakMemory() as backward:
            out.sum().backward()
        return forward.peak, backward.peak - (0 if bias is None else bias.nbytes)

    sizes = [peak(n) for n in (4096, 8192, 16384)]
    for at_4k, at_8k, at_16k in zip(*sizes, strict=True):
        assert at_16k - at_8k <= 2.1 * (at_8k - at_4k) + 2**16  # a constant (the tile) and a slope
        assert at_16k < 16384 * 16384 / 16


def test_an_error_inside_passes_and_the_meter_still_works():
    def fails():
        with PeakMemory():
            torch.empty(10)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    with PeakMemory() as memory:
        torch.empty(10)
    assert memory.peak == 40


def test_refuses_a_device_it_cannot_measure():
    with pytest.raises(ValueError, match="cpu and cuda"):
        PeakMemory("meta")


@pytest.mark.parametrize(
    ("changes", "expected"), [([], (0, 0)), ([5, -5, 3], (5, 3)), ([-4, 2], (0, -2)), ([1, 2, -1, 4], (6, 6))]
)
def test_peak_of(changes, expected):
    assert peak_of(changes) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda():
    with PeakMemory("cuda") as memory:
        x = torch.empty(2**20, device="cuda")
        del x
    assert (memory.peak, memory.kept) == (2**22, 0)


def test_one_thread_within_the_block():
    """Other threads' allocations would not be counted; afterwards there are as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with PeakMemory():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
