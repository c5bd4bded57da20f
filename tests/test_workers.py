"""Pieces on threads: the same results, modes and errors as in a row, whatever the number of threads."""

import threading

import pytest
import torch

import tilewise as tw
from tilewise import masks, workers
from tilewise.backends import tiled


@pytest.fixture
def threads():
    """Set PyTorch's number of threads; what it was comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_results_are_in_order_and_from_as_many_threads(threads):
    threads(3)
    meet = threading.Barrier(3, timeout=30)  # nobody leaves before all three are there
    where = workers.run(
        [lambda n=n: (n, meet.wait(), threading.get_ident(), torch.get_num_threads()) for n in range(3)]
    )
    assert [n for n, *_ in where] == [0, 1, 2]
    assert len({ident for *_, ident, _ in where}) == 3
    assert {each for *_, each in where} == {1}
    assert torch.get_num_threads() == 3


def test_many_threads_are_shared_out(threads, monkeypatch):
    monkeypatch.setattr(workers, "_MOST", 2)
    threads(5)
    meet = threading.Barrier(2, timeout=30)
    assert workers.run([lambda: (meet.wait(), torch.get_num_threads())[1]] * 2) == [2, 2]


def test_one_thread_means_this_one(threads):
    threads(1)
    assert workers.run([threading.get_ident] * 3) == [threading.get_ident()] * 3


def test_modes_go_along_and_errors_come_back(threads):
    threads(2)
    with torch.inference_mode():
        assert workers.run([torch.is_inference_mode_enabled] * 4) == [True] * 4
    assert workers.run([torch.is_grad_enabled] * 4) == [False] * 4
    with pytest.raises(ZeroDivisionError):
        workers.run([lambda: 1 / 0, lambda: 1])


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
def test_attention_on_threads(name, threads, monkeypatch):
    """Every thread works on something of its own: run 10 times, the sums of shared gradients are right and repeat."""
    monkeypatch.setattr(tiled, "_WORTH_THREADS", 0)
    monkeypatch.setattr(tiled, "_STRIP", 256)
    call = {"mask": None, **CALLS[name]}
    threads(1)
    alone = gradients(**call)
    threads(4)
    first = gradients(**call)
    for a, b in zip(alone, first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(**call), strict=True))


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(40, 3), masks.key_lengths([500, 0])], ids=str)
@pytest.mark.parametrize("size", [1.0, 0.05])
def test_a_bound_on_the_scores_changes_no_bit(mask, size, monkeypatch):
    """What is known before the scores only saves work: one row's bits do not depend on another's size."""
    monkeypatch.setattr(torch.Tensor, "square", lambda x: x * size)
    known = gradients(mask)
    monkeypatch.setattr(tiled, "_all_near_zero", lambda *a: False)
    assert all(torch.equal(a, b) for a, b in zip(known, gradients(mask), strict=True))


def test_a_fork_starts_its_own_threads(threads, monkeypatch):
    threads(2)
    workers.run([int, int])
    monkeypatch.setattr(workers.os, "getpid", lambda: -1)  # what a forked child sees: another process, no threads
    assert workers.run([threading.get_ident, threading.get_ident]) is not None
    assert {pid for pid, _ in workers._pools} >= {-1}
    workers._pools.pop((-1, 2)).shutdown()
