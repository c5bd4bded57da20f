"""The byte model: the article's numbers, the standard pipeline counted operator by operator, the tiled one by hand."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tilewise import attention, iomodel, masks
from tilewise.iomodel import Ceilings, Machine, Work, cost, measure_ceilings, predicted_seconds
from tilewise.masks import Patch
from tilewise.request import Ragged, Request

MIB = 2**20
NO_CACHE = Machine((64, 64), (64, 64), 0)
EVERYTHING = NO_CACHE._replace(cache_bytes=2**60)


def request(b=1, hq=1, hkv=None, lq=256, lk=None, d=64, dv=None, dtype=torch.float16, device="meta", **rest):
    q = torch.empty(b, hq, lq, d, dtype=dtype, device=device)
    k = torch.empty(b, hkv or hq, lk or lq, d, dtype=dtype, device=device)
    v = torch.empty(*k.shape[:3], dv or d, dtype=dtype, device=device)
    return Request(q, k, v, scale=d**-0.5, **rest)


# --- the article ----------------------------------------------------------------------------------


def test_8192_in_fp16_is_128_mib_for_s_and_for_p():
    c = cost(request(lq=8192))
    assert c.score_matrix_bytes == 128 * MIB
    inputs_and_output = 4 * 8192 * 64 * 2
    assert c.standard.forward.bytes == 4 * c.score_matrix_bytes + inputs_and_output  # S and P, written and read
    assert c.statistics_bytes == 8192 * 4


def test_exercise_16_heads_of_4096_are_512_mib_against_8():
    c = cost(request(hq=16, lq=4096, d=64))
    assert (c.score_matrix_bytes, c.output_bytes) == (512 * MIB, 8 * MIB)


def test_the_arithmetic_is_the_same_and_the_traffic_is_not():
    c = cost(request(lq=8192), Machine((256, 256), (256, 256), 0))
    assert c.standard.forward.flops == c.tiled.forward.flops == 4 * 8192 * 8192 * 64
    assert c.standard.forward.bytes > 4 * c.tiled.forward.bytes
    assert c.standard.forward.intensity < 32 < c.tiled.forward.intensity


# --- FLOPs ----------------------------------------------------------------------------------------


def counted_flops(r, backend):
    leaves = [torch.zeros(x.shape).requires_grad_() for x in (r.q, r.k, r.v)]
    with FlopCounterMode(display=False) as forward:
        out = attention(*leaves, r.mask, backend=backend)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(5, 9), masks.key_lengths([7, 40])])
def test_flops_are_those_that_pytorch_counts(mask):
    r = request(b=2, hq=4, hkv=2, lq=70, lk=90, d=16, dv=24, dtype=torch.float32, mask=mask)
    c = cost(r)
    assert (c.tiled.forward.flops, c.tiled.backward.flops) == counted_flops(r, "tiled")
    assert (c.standard.forward.flops, c.standard.backward.flops) == counted_flops(r, "dense")


# --- bytes of the standard pipeline ---------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Bytes of what operators read and write; a view moves nothing."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(x.nbytes for x in (*args, out) if isinstance(x, torch.Tensor))
        return out


def test_standard_bytes_are_those_of_its_operators():
    n, m, d, dv = 48, 80, 16, 24
    q, k, v, do = (torch.randn(1, *shape) for shape in ((n, d), (m, d), (m, dv), (n, dv)))
    with Traffic() as forward:
        s = torch.bmm(q, k.mT)
        p = torch.softmax(s, -1)
        torch.bmm(p, v)
    with Traffic() as backward:
        torch.bmm(p.mT, do)
        dp = torch.bmm(do, v.mT)
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
        torch.bmm(ds, k)
        torch.bmm(ds.mT, q)
    c = cost(request(lq=n, lk=m, d=d, dv=dv, dtype=torch.float32))
    assert (c.standard.forward.bytes, c.standard.backward.bytes) == (forward.bytes, backward.bytes)


def test_a_mask_saves_the_standard_pipeline_nothing():
    assert cost(request(mask=masks.causal())).standard == cost(request()).standard


# --- bytes of the tiled algorithm -----------------------------------------------------------------


def test_without_a_limit_everything_is_moved_once():
    c = cost(request(b=2, hq=4, hkv=2, lq=300, lk=500, d=32, dv=48), EVERYTHING)
    q, o, k, v, rows = 2 * 4 * 300 * 32, 2 * 4 * 300 * 48, 2 * 2 * 500 * 32, 2 * 2 * 500 * 48, 2 * 4 * 300
    assert c.tiled.forward.bytes == 2 * (q + k + v + o) + 4 * rows
    delta, keys, streamed, converted = 2 * 2 * o + 4 * rows, 2 * 2 * (k + v), 2 * (q + o) + 8 * rows + 8 * q, 6 * q
    assert c.tiled.backward.bytes == delta + keys + streamed + converted


def test_without_a_cache_keys_are_read_once_for_each_query_tile():
    n, tile = 1000, (100, 64)
    c = cost(request(lq=n), Machine(tile, tile, 0))
    assert c.tiled.forward.bytes == 2 * (2 * n * 64) + 4 * n + 10 * n * 2 * 2 * 64


def test_keys_are_read_once_as_far_as_they_fit():
    """10 query tiles: the first reads all keys, each other what the cache could not hold."""
    n, tile, row = 1000, (100, 64), 2 * 2 * 64
    once = 2 * (2 * n * 64) + 4 * n + n * row
    for held in (0, 1, 300, 999, 1000, 5000):
        c = cost(request(lq=n), Machine(tile, tile, held * row))
        assert c.tiled.forward.bytes == once + 9 * max(0, n - held) * row


def test_theta_of_n2_d2_over_m():
    """Theorem 2 of FlashAttention: with tiles of M / (4 d) rows, traffic is N^2 d^2 / M up to a constant."""

    def elements(n, d, m):
        tile = (m // (4 * d),) * 2
        return cost(request(lq=n, d=d), Machine(tile, tile, 0)).tiled.forward.bytes / 2

    for n, d, m in ((8192, 64, 2**15), (16384, 64, 2**15), (8192, 128, 2**15), (8192, 64, 2**16)):
        assert elements(n, d, m) / (n * n * d * d / m) == pytest.approx(8, rel=0.05)


def test_causal_reads_the_tiles_below_the_diagonal():
    tiles, block, row = 8, 64, 2 * 2 * 64
    n = tiles * block
    c = cost(request(lq=n, mask=masks.causal()), NO_CACHE)
    visited = tiles * (tiles + 1) // 2
    assert c.tiled.forward.bytes == 2 * (2 * n * 64) + 4 * n + visited * block * row
    assert (c.pairs, c.visible) == (n * n, n * (n + 1) // 2)
    streamed = visited * block * (2 * 2 * 64 + 8 + 8 * 64)
    assert c.tiled.backward.bytes == 2 * 2 * n * 64 + 4 * n + 4 * 2 * n * 64 + streamed + 6 * n * 64


def test_a_window_needs_a_small_cache_only():
    """Neighbouring query tiles share most keys of a window, and those few are what the cache has to hold."""
    mask = masks.causal() & masks.window(200, 0)
    unlimited = cost(request(lq=4096, mask=mask), EVERYTHING).tiled.forward.bytes
    assert cost(request(lq=4096, mask=mask), NO_CACHE._replace(cache_bytes=320 * 256)).tiled.forward.bytes == unlimited
    assert cost(request(lq=4096, mask=mask), NO_CACHE).tiled.forward.bytes > 2 * unlimited


def test_masks_reduce_flops_and_bytes():
    narrower = [
        None,
        masks.causal(),
        masks.causal() & masks.window(300, 0),
        masks.causal() & masks.window(100, 0),
        masks.causal() & masks.window(100, 0) & masks.key_lengths([200]),
    ]
    costs = [cost(request(lq=1024, mask=m), NO_CACHE).tiled for m in narrower]
    for wide, narrow in itertools.pairwise(costs):
        for a, b in zip(wide, narrow, strict=True):
            assert a.flops > b.flops
            assert a.bytes > b.bytes


def test_documents_are_read_by_themselves_only():
    ids = [0] * 128 + [1] * 256 + [2] * 128
    c = cost(request(lq=512, mask=masks.documents(ids)), NO_CACHE)
    assert c.visible == 128**2 + 256**2 + 128**2
    assert c.tiled.forward.bytes - 2 * (2 * 512 * 64) - 4 * 512 - 2 * 512 * 8 == 2 * 2 * 64 * (
        2 * 128 + 4 * 256 + 2 * 128
    )


def test_heads_of_a_group_read_their_keys_once():
    def forward(hkv):
        return cost(request(hq=8, hkv=hkv, lq=256), NO_CACHE).tiled.forward.bytes

    q_o_lse = 2 * (2 * 8 * 256 * 64) + 4 * 8 * 256
    assert forward(8) - q_o_lse == 8 * (forward(1) - q_o_lse) == 4 * (forward(2) - q_o_lse)


def test_a_group_reads_what_any_of_its_heads_sees():
    one_head = masks.predicate(lambda b, h, i, j: ((h == 1) & (j < 64)) | ((h == 2) & (j >= 192) & (i >= 0)))
    r = request(hq=4, hkv=2, lq=256, mask=one_head)  # heads 0, 1 share keys, and so do 2, 3
    c = cost(r, NO_CACHE)
    assert c.visible == 2 * 256 * 64
    assert c.tiled.forward.bytes == 2 * (2 * 4 * 256 * 64) + 4 * 4 * 256 + 2 * 4 * 64 * 2 * 2 * 64


def test_a_bias_is_read_as_it_is_stored_and_its_gradient_written():
    plain = cost(request(b=2, hq=4), NO_CACHE)
    bias = torch.zeros(1, 1, 256, 256, dtype=torch.float16)
    for x in (bias, bias.expand(2, 4, -1, -1)):
        c = cost(request(b=2, hq=4, bias=x), NO_CACHE)
        for a, b in ((c.tiled.forward, plain.tiled.forward), (c.standard.forward, plain.standard.forward)):
            assert (
                a.bytes - b.bytes - (c.statistics_bytes - plain.statistics_bytes) * (a is c.tiled.forward) == 2 * 256**2
            )
    trained = cost(request(b=2, hq=4, bias=bias.requires_grad_()), NO_CACHE)
    for a, b in ((trained.tiled, c.tiled), (trained.standard, c.standard)):
        assert (a.forward.bytes - b.forward.bytes, a.backward.bytes - b.backward.bytes) == (0, 2 * 256**2)


def test_a_stored_mask_is_read_and_a_computed_one_is_not():
    stored = cost(request(mask=masks.dense(torch.ones(256, 256, dtype=torch.bool).tril())), NO_CACHE)
    computed = cost(request(mask=masks.causal()), NO_CACHE)
    assert stored.visible == computed.visible
    assert stored.tiled.forward.bytes - computed.tiled.forward.bytes == 256 * 256


def test_fp32_keeps_dq_where_it_is_and_both_parts_of_the_log_sum_exp():
    c = cost(request(lq=128, dtype=torch.float32), EVERYTHING)
    rows, x = 128, 128 * 64
    assert c.statistics_bytes == 2 * 4 * rows
    assert c.tiled.backward.bytes == 4 * 2 * x + 4 * rows + 4 * 4 * x + (4 * 2 * x + 8 * rows + 8 * x)


# --- the cache, against caches --------------------------------------------------------------------


def by_lru(kept, bm, bn, held):
    """Keys read if whole tiles are kept in order of their last use: what a real cache might do."""
    cached, read = {}, 0
    for i in range(0, kept.shape[0], bm):
        for j in range(0, kept.shape[1], bn):
            part = kept[i : i + bm, j : j + bn]
            if not bool(part.any()):
                continue
            if j not in cached:
                read += part.shape[1]
            cached.pop(j, None)
            cached[j] = part.shape[1]
            while sum(cached.values()) > held:
                cached.pop(next(iter(cached)))
    return read


@given(
    st.integers(1, 30), st.integers(1, 30), st.integers(1, 7), st.integers(1, 7), st.integers(0, 40),
    st.sampled_from(["full", "causal", "window", "random"]), st.integers(0, 9),
)  # fmt: skip
def test_never_more_than_a_real_cache_reads_and_never_less_than_once(n, m, bm, bn, held, kind, seed):
    random = torch.rand(n, m, generator=torch.Generator().manual_seed(seed)) < 0.2
    mask = {
        "full": masks.window(None, None), "causal": masks.causal(), "window": masks.window(3, 2),
        "random": masks.dense(random),
    }[kind]  # fmt: skip
    patch = Patch(slice(0, 1), slice(0, 1), slice(0, n), slice(0, m), n, m, torch.device("cpu"))
    kept = mask.keep(patch).expand(1, 1, n, m)[0, 0]
    row = 2 * 2 * 8

    def keys(held):
        """Rows of keys read, by the model."""
        r = request(lq=n, lk=m, d=8, mask=mask)
        c = cost(r, Machine((bm, bn), (bm, bn), held * row))
        other = 2 * (2 * n * 8) + 4 * n + sum(x.nbytes for x in mask.tensors())
        return (c.tiled.forward.bytes - other) / row

    needed = sum(min(bn, m - j) for j in range(0, m, bn) if bool(kept[:, j : j + bn].any()))
    assert needed <= keys(held) <= by_lru(kept, bm, bn, held)
    assert keys(0) == by_lru(kept, bm, bn, 0)
    assert keys(10**6) == needed
    assert keys(held + 5) <= keys(held)


# --- every request --------------------------------------------------------------------------------


def test_ragged_is_the_sum_of_its_sequences():
    lengths_q, lengths_k = [30, 0, 200, 65], [30, 10, 100, 65]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k))
    q, k = (torch.empty(int(cu[-1]), h, 32, dtype=torch.float16, device="meta") for cu, h in ((cu_q, 4), (cu_k, 2)))
    mask = masks.causal() & masks.key_lengths([25, 10, 90, 60])
    c = cost(Request(q, k, k, 1.0, mask, ragged=Ragged(cu_q, cu_k, 200, 100)), NO_CACHE)
    alone = [
        cost(request(hq=4, hkv=2, lq=m, lk=n, d=32, mask=masks.causal() & masks.key_lengths([kept])), NO_CACHE)
        for m, n, kept in zip(lengths_q, lengths_k, (25, 10, 90, 60), strict=True)
        if m
    ]
    assert c.pairs == sum(x.pairs for x in alone)
    assert c.visible == sum(x.visible for x in alone)
    length, unread = 8, 2 * 2 * (2 * 10 * 32)  # of the sequence without queries: its number in the mask, its K and V
    assert c.tiled.forward.bytes == sum(x.tiled.forward.bytes for x in alone) + length
    assert c.standard.forward.bytes == sum(x.standard.forward.bytes for x in alone) + length + unread
    gradients = unread  # zeros, but written
    assert c.tiled.backward.bytes == sum(x.tiled.backward.bytes for x in alone) + length + unread + gradients


def test_batch_and_heads_multiply():
    one, many = cost(request(mask=masks.causal()), NO_CACHE), cost(request(b=3, hq=5, mask=masks.causal()), NO_CACHE)
    for a, b in zip((*one.standard, *one.tiled), (*many.standard, *many.tiled), strict=True):
        assert (b.flops, b.bytes) == (15 * a.flops, 15 * a.bytes)


@pytest.mark.parametrize("sizes", [{"lq": 0, "lk": 5}, {"b": 0}])
def test_nothing_costs_next_to_nothing(sizes):
    c = cost(request(**sizes))
    assert c.pairs == c.visible == c.score_matrix_bytes == c.tiled.forward.flops == c.standard.backward.flops == 0


def test_shapes_suffice_and_say_the_same_as_tensors():
    for mask in (None, masks.causal(), masks.key_lengths([100, 256])):
        a, b = (cost(request(b=2, mask=mask, device=device), NO_CACHE) for device in ("meta", "cpu"))
        assert a == b


def test_what_has_no_values_is_refused():
    with pytest.raises(ValueError, match="the tensors of the mask are on meta"):
        cost(request(mask=masks.dense(torch.ones(256, 256, dtype=torch.bool, device="meta"))))
    ends = torch.zeros(2, dtype=torch.int32, device="meta")
    q = torch.empty(9, 1, 8, device="meta")
    with pytest.raises(ValueError, match="cu_seqlens are on meta"):
        cost(Request(q, q, q, 1.0, ragged=Ragged(ends, ends, 9, 9)))


# --- the device -----------------------------------------------------------------------------------


def test_the_tiles_are_those_of_the_backend_that_runs(tiles):
    r = request(device="cpu", dtype=torch.float32, lq=700, mask=masks.causal())
    assert cost(r).machine == iomodel.machine_for(r)
    m, n = iomodel.machine_for(r).forward_tile
    assert 1 <= m <= 700
    assert 1 <= n <= 700
    tiles((40, 50))
    assert iomodel.machine_for(r) == Machine((40, 50), (40, 50), iomodel.cache_bytes(torch.device("cpu")))


def test_the_tiles_of_triton_where_it_runs():
    pytest.importorskip("triton")
    code = (
        "import torch; from tilewise import iomodel; from tilewise.request import Request; "
        "q = torch.empty(1, 1, 64, 16); print(*iomodel.machine_for(Request(q, q, q, 1.0))[:2])"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "(16, 16) (16, 16)"  # of the interpreter


def test_the_largest_cache_of_the_cpu(monkeypatch, tmp_path):
    for name, size in (("index0", "48K"), ("index2", "2048K"), ("index3", "266240K")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(size + "\n")
    monkeypatch.setattr(iomodel, "Path", lambda _: tmp_path)
    assert iomodel.cache_bytes(torch.device("cpu")) == 260 * MIB
    monkeypatch.setattr(iomodel, "Path", lambda _: tmp_path / "elsewhere")
    assert iomodel.cache_bytes(torch.device("cpu")) == 0
    assert iomodel.cache_bytes(torch.device("meta")) == 0


# --- time -----------------------------------------------------------------------------------------


def test_the_slower_of_both_ceilings_rules():
    ceilings = Ceilings(matmul_flops_per_s=100.0, copy_bytes_per_s=10.0)
    assert predicted_seconds(Work(flops=1000, bytes=50), ceilings) == 10
    assert predicted_seconds(Work(flops=1000, bytes=500), ceilings) == 50
    assert Work(1000, 50).intensity == 20
    assert Work(0, 0).intensity == 0


def test_ceilings_count_flops_and_bytes(monkeypatch):
    """With a clock that says 10 ms for everything."""
    monkeypatch.setattr(iomodel, "_COPIED", {"cpu": 1000})
    monkeypatch.setattr(iomodel, "_LARGEST", 1024)
    monkeypatch.setattr(iomodel, "median_seconds", lambda run, device: run() is None or 0.01)
    assert measure_ceilings("cpu", torch.float32) == Ceilings(2 * 1024**3 / 0.01, 2 * 1000 / 0.01)
    monkeypatch.setattr(iomodel, "median_seconds", lambda run, device: run() is None or 0.5)
    assert measure_ceilings("cpu", torch.float32).matmul_flops_per_s == 2 * 512**3 / 0.5  # long enough


def test_the_clock_takes_the_median_after_a_warm_up(monkeypatch):
    now, steps = [0.0], iter([1000.0, 3.0, 1.0, 2.0, 900.0, 2.5])
    monkeypatch.setattr(iomodel.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += next(steps)

    assert iomodel.median_seconds(run, torch.device("cpu")) == 2.5


def test_ceilings_of_this_cpu(monkeypatch):
    monkeypatch.setattr(iomodel, "_COPIED", {"cpu": 2**24})
    found = measure_ceilings("cpu", torch.float32)
    assert found.matmul_flops_per_s > 1e8
    assert found.copy_bytes_per_s > 1e8


def test_ceilings_need_a_device_that_computes():
    with pytest.raises(ValueError, match="cpu and cuda, got meta"):
        measure_ceilings("meta", torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ceilings_of_this_gpu():
    found = measure_ceilings("cuda", torch.bfloat16)
    assert found.matmul_flops_per_s > 1e12
    assert found.copy_bytes_per_s > 1e11
    assert iomodel.cache_bytes(torch.device("cuda")) > 0
