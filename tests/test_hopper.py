"""The backend ``hopper`` as far as it goes without a GPU: what it refuses, what it makes of a mask, which tiles it visits."""

import contextlib
import itertools

import pytest
import torch

import tilewise as tw
from tilewise import dispatch, masks
from tilewise.backends import hopper
from tilewise.backends.hopper import config, launch
from tilewise.masks import EMPTY, FULL, Grid
from tilewise.request import Ragged, Request

CPU = "runs on cuda, the tensors are on cpu"
MASK = "takes bands (causal, window) and key lengths padded on the right, joined by &; got "


def make(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def request(d=64, dtype=torch.bfloat16, kv=2, **given):
    q, k, v = make(2, 4, 30, d, dtype=dtype), make(2, kv, 40, d, dtype=dtype), make(2, kv, 40, d, dtype=dtype)
    return Request(**({"q": q, "k": k, "v": v, "scale": 0.1} | given))


@pytest.fixture
def anywhere(monkeypatch):
    """The backend, as if the CPU were an H200."""
    monkeypatch.setattr(hopper.HopperBackend, "devices", None)
    return hopper.HopperBackend()


def reasons(backend, r):
    return [x.why for x in backend.why_not(r)]


LENGTHS = masks.key_lengths([3, 40])
TAKEN = {
    "full": {},
    "fp16": {"dtype": torch.float16},
    "D = 128": {"d": 128},
    "multi-query": {"kv": 1},
    "causal": {"mask": masks.causal()},
    "bottom right": {"mask": masks.causal("bottom_right")},
    "window": {"mask": masks.window(3, 2, 7)},
    "key lengths": {"mask": LENGTHS},
    "all of them": {"mask": LENGTHS & masks.causal() & masks.window(10, None)},
    "outputs": {"want_lse": True, "want_max_logits": True},
    "no keys": {"k": make(2, 2, 0, 64), "v": make(2, 2, 0, 64)},
    "(B, L, H, D)": {"q": make(2, 30, 4, 64).transpose(1, 2)},
    "D = 256": {"d": 256},
    "D = 96": {"d": 96},
    "value head dim": {"d": 192, "v": make(2, 2, 40, 128)},
    "softcap": {"softcap": 128.0},
    "sinks": {"sinks": make(4)},
    "part of a row": {"k": make(2, 2, 40, 192)[..., 64:128]},
}
REFUSED = {
    "head dim": ({"d": 32, "v": make(2, 2, 40, 64)}, "takes head dims 64, 96, 128, 192, 256, got 32"),
    "value head dim": ({"v": make(2, 2, 40, 80)}, "takes value head dims 64, 96, 128, 192, 256, got 80"),
    "fp32": ({"dtype": torch.float32}, "does not take float32"),
    "softcap": ({"softcap": 130.0}, "takes a softcap up to 128.0, got 130.0"),
    "dropout": ({"dropout_p": 0.5}, "does not take dropout_p 0.5"),
    "bias": ({"bias": make(1, 1, 30, 40)}, "does not take a bias"),
    "ALiBi": ({"alibi": make(1, 4)}, "does not take ALiBi slopes"),
    "scale 0": ({"scale": 0.0}, "takes a finite scale > 0, got 0.0"),
    "scale nan": ({"scale": float("nan")}, "takes a finite scale > 0, got nan"),
    "padding on the left": (
        {"mask": masks.key_lengths([3, 40], padding="left")},
        MASK + "key_lengths(int64[2], padding='left')",
    ),
    "query lengths": ({"mask": masks.query_lengths([3, 30])}, MASK + "query_lengths(int64[2])"),
    "or": ({"mask": masks.causal() | LENGTHS}, MASK + "causal() | key_lengths(int64[2])"),
    "two lengths": ({"mask": LENGTHS & LENGTHS}, MASK + "key_lengths(int64[2]) & key_lengths(int64[2])"),
    "documents": ({"mask": masks.documents(torch.arange(30), torch.arange(40))}, MASK + "documents(int64[1, 30])"),
    "odd rows": (
        {"k": make(2, 2, 40, 68)[..., :64]},
        "needs key with a last stride of 1, other strides above 0 and, like its offset, multiples of 8, "
        "got strides (5440, 2720, 68, 1) and offset 0",
    ),
    "odd offset": (
        {"v": make(2, 2, 40, 72)[..., 4:68]},
        "needs value with a last stride of 1, other strides above 0 and, like its offset, multiples of 8, "
        "got strides (5760, 2880, 72, 1) and offset 4",
    ),
    "channels apart": (
        {"q": make(2, 4, 64, 30).transpose(2, 3)},
        "needs query with a last stride of 1, other strides above 0 and, like its offset, multiples of 8, "
        "got strides (7680, 1920, 1, 30) and offset 0",
    ),
    "expanded": (
        {"k": make(1, 2, 40, 64).expand(2, 2, 40, 64)},
        "needs key with a last stride of 1, other strides above 0 and, like its offset, multiples of 8, "
        "got strides (0, 2560, 64, 1) and offset 0",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_takes(name, anywhere):
    assert reasons(anywhere, request(**TAKEN[name])) == []


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name, anywhere):
    given, why = REFUSED[name]
    assert reasons(anywhere, request(**given)) == [why]


def test_takes_ragged_sequences(anywhere):
    q, k = make(30, 4, 64), make(40, 2, 64)
    cu = torch.tensor([0, 30], dtype=torch.int32), torch.tensor([0, 40], dtype=torch.int32)
    ragged = {"q": q, "k": k, "v": k, "ragged": Ragged(*cu, 30, 40)}
    both = masks.causal("bottom_right") & masks.window(5, None)  # the window takes the alignment of the other
    for mask in (None, masks.causal(), masks.causal("bottom_right"), both, LENGTHS):
        assert reasons(anywhere, request(**ragged, mask=mask)) == []
    mixed = masks.causal("bottom_right") & masks.window(5, None, "top_left")
    assert reasons(anywhere, request(**ragged, mask=mixed)) == [
        f"takes bands of one alignment in ragged sequences; got {mixed!r}"
    ]
    assert [launch.skewed(m) for m in (None, masks.causal(), both, masks.causal(3), mixed)] == [
        False, False, True, False, None,
    ]  # fmt: skip


@pytest.fixture
def h200(monkeypatch):
    """A machine that lacks nothing."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "_HAS_TRITON", True)
    monkeypatch.setattr(hopper, "triton_version", lambda: "3.6.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return monkeypatch


def machine():
    return [str(x) for x in hopper.machine(torch.device("cuda", 0))]


def test_lacks_nothing(h200):
    assert machine() == []


def test_lacks_the_gpu(h200):
    h200.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert machine() == ["needs compute capability 9.0 (H100, H200), this GPU has 8.0"]
    h200.setattr(torch.version, "hip", "6.4")
    assert machine() == ["needs an NVIDIA GPU (H100, H200)"]


def test_lacks_triton(h200):
    h200.setattr(hopper, "triton_version", lambda: "3.9.1")
    fix = "(fix: pip install 'triton==3.6.*')"
    assert machine() == [f"is measured with Triton 3.6, installed is Triton 3.9.1 {fix}"]
    h200.setattr(hopper, "_HAS_TRITON", False)
    assert machine() == [f"needs Triton, which is not installed {fix}"]


def test_has_no_interpreter(h200):
    h200.setenv("TRITON_INTERPRET", "1")
    assert machine() == ["has no interpreter, and TRITON_INTERPRET is set (fix: backend='triton')"]


def test_is_asked_first_and_falls_through():
    """On a CPU the next that can is taken; all reasons are there."""
    assert dispatch.AUTO == ("hopper", "triton", "tiled")
    q = make(1, 2, 8, 64)
    said = tw.explain(q, q, q, masks.causal())
    assert said.chosen == "tiled"
    assert said.reasons["hopper"][0].why == CPU
    assert tw.attention(q, q, q, masks.causal()).shape == q.shape
    with pytest.raises(NotImplementedError, match=r"hopper: *\n  - runs on cuda, the tensors are on cpu"):
        tw.attention(q, q, q, backend="hopper")


# --- masks as bands -------------------------------------------------------------------------------


def test_a_combination_of_bands_is_a_band():
    both = masks.causal("bottom_right") & masks.window(5, 3) & masks.window(None, 2, 1)
    assert launch.kept(both, 10, 14) == (-1, 3, None)  # the window lies on the diagonal of the causal mask
    assert launch.kept(masks.window(None, None), 10, 14) == (None, None, None)
    assert launch.kept(None, 10, 14) == (None, None, None)
    assert launch.kept(LENGTHS & masks.causal(), 10, 14) == (None, 0, LENGTHS.lengths)


BANDS = [
    masks.causal(),
    masks.causal("bottom_right"),
    masks.causal(-70),
    masks.window(50, None),
    masks.window(None, 150),
    masks.window(0, 0, "bottom_right"),
    masks.window(100, 33),
    masks.window(300, 260, -20),
]


def test_visits_the_tiles_of_the_tile_map():
    """All that are not empty, each once, and without a mask only those that are full."""
    kernel = pytest.importorskip("tilewise.backends.hopper.kernel", exc_type=ImportError)
    block_n = config.choose(64, 64, True, True).block_n
    for mask, len_q, len_k in itertools.product([None, *BANDS], (1, 128, 129, 600), (1, 127, 128, 515)):
        keep = launch.kept(mask, len_q, len_k)
        grid = Grid(1, 1, len_q, len_k, config.BLOCK_M, block_n, torch.device("cpu"))
        table = torch.full((grid.rows, grid.cols), FULL) if mask is None else mask.verdict(grid)[0, 0]
        for row in range(grid.rows):
            r = grid.rows_of(row)
            last, right, full, n = kernel.span.fn(
                r.start, r.stop - 1, len_k, keep.low or 0, keep.high or 0, block_n, keep.low is not None,
                keep.high is not None,
            )  # fmt: skip
            blocks = [last - 1 - t for t in range(n)]
            unmasked = blocks[right : right + full]
            assert n >= 1
            assert min(right, full) >= 0
            assert set((table[row] != EMPTY).nonzero().flatten().tolist()) <= set(blocks)
            assert all(b < grid.cols and table[row, b] == FULL and (b + 1) * block_n <= len_k for b in unmasked)
            # not many more than are needed: one that keeps nothing if there is none, one at an end of the range
            assert n <= max(int((table[row] != EMPTY).sum()), 1) + 1
            assert full >= int((table[row] == FULL).sum()) - 1, "the last may be cut by the end of the keys"


def test_few_queries_of_many_heads_share_a_tile(monkeypatch):
    """Never more tiles than without, and where queries fill tiles of their own, those."""
    lengths = 1, 5, 16, 100, 128, 200, 257, 1000, 4096
    assert [config.packed(n, 8, "padded") for n in lengths] == [1] * 9
    assert [config.packed(n, 8, "ragged") for n in lengths] == [2, 2, 2, 1, 1, 1, 2, 1, 1]
    monkeypatch.setitem(config.MOST_PACKED, "padded", 64)
    assert [config.packed(n, 8, "padded") for n in lengths] == [8, 8, 8, 8, 1, 8, 8, 1, 1]
    assert [config.packed(1, group, "padded") for group in (1, 3, 6, 12, 71, 128)] == [1, 1, 2, 4, 1, 64]


def test_every_tile_is_worked_on_once():
    kernel = pytest.importorskip("tilewise.backends.hopper.kernel", exc_type=ImportError)
    for longest_first, n_m, pairs, section in itertools.product((False, True), (1, 3), (1, 7), (1, 2, 3, 7)):
        places = [kernel.place.fn(t, n_m, pairs, section, longest_first) for t in range(n_m * pairs)]
        assert sorted(places) == list(itertools.product(range(n_m), range(pairs)))
        if longest_first:  # within a section
            rows = [m for m, _ in places[: n_m * min(section, pairs)]]
            assert rows == sorted(rows, reverse=True)


@pytest.fixture
def backward():
    return pytest.importorskip("tilewise.backends.hopper.columns", exc_type=ImportError)


EMPTY_BANDS = [masks.window(5, 0, 20) & masks.causal(), masks.causal(-700)]


@pytest.mark.parametrize("dim", [64, 128])
def test_backward_visits_the_tiles_of_the_tile_map(dim, backward):
    """All that are not empty; those that add to one tile of queries have turns 0, 1, .. in order of their number."""
    cfg = config.choose_backward(dim, dim)
    block_m, block_n = cfg.block_m, cfg.block_n
    ends = (None, 0, 1, 130, 300)
    for mask, len_q, len_k, end in itertools.product(
        [None, *BANDS, *EMPTY_BANDS], (1, 128, 129, 600), (1, 128, 515), ends
    ):
        keep = launch.kept(mask, len_q, len_k)
        stop = len_k if end is None else min(end, len_k)
        given = keep.low or 0, keep.high or 0
        sides = keep.low is not None, keep.high is not None
        grid = Grid(1, 1, len_q, len_k, block_m, block_n, torch.device("cpu"))
        table = torch.full((grid.rows, grid.cols), FULL) if mask is None else mask.verdict(grid)[0, 0]
        turns = [0] * grid.rows
        for col in range(grid.cols):
            j0 = col * block_n
            last, n = backward.visits.fn(j0, stop, len_q, *given, block_m, block_n, *sides)
            seen = range(last, last - n, -1)
            if j0 < stop:
                inside = table[:, col] if j0 + block_n <= stop else table[:, col][:0]
                assert set((inside != EMPTY).nonzero().flatten().tolist()) <= set(seen)
            lo, hi = backward.unmasked.fn(j0, stop, len_q, *given, block_n, *sides)
            for row in seen:
                assert 0 <= row < grid.rows
                assert backward.turn.fn(col, row * block_m, given[0], block_n, sides[0]) == turns[row]
                turns[row] += 1
                for i0 in range(row * block_m, (row + 1) * block_m, config.ROWS):
                    if lo <= i0 <= hi:  # not masked: all pairs exist and are kept
                        assert i0 + config.ROWS <= len_q
                        assert j0 + block_n <= stop
                        kept = range(i0 + config.ROWS - 1 + given[0], i0 + given[1] + 1)
                        assert not sides[0] or j0 >= kept.start
                        assert not sides[1] or j0 + block_n <= kept.stop


def test_work_on_keys_is_handed_out_in_the_order_of_turns(backward):
    """Who waits for its turn waits for a tile that was taken before."""
    for n_n, pairs, section in itertools.product((1, 3, 8), (1, 5), (1, 2, 5)):
        places = [backward.place.fn(t, n_n, pairs, section, True) for t in range(n_n * pairs)]
        for pair in range(pairs):
            assert [n_n - 1 - back for back, p in places if p == pair] == list(range(n_n))


def test_some_gradients_are_left_to_triton(monkeypatch):
    """Where one is not asked for, or there is nothing to multiply."""
    gradients = pytest.importorskip("tilewise.backends.triton.gradients", exc_type=ImportError)
    asked = []
    monkeypatch.setattr(gradients, "backward", lambda r, saved, needs: asked.append(needs))
    for needs in (frozenset("q"), frozenset("kv")):
        launch.backward(request(), None, needs)
    launch.backward(request(k=make(2, 2, 0, 64), v=make(2, 2, 0, 64)), None, frozenset("qkv"))
    assert asked == [frozenset("q"), frozenset("kv"), frozenset("qkv")]


def test_of_sinks_only_their_gradient_is_left_to_triton(monkeypatch):
    gradients = pytest.importorskip("tilewise.backends.triton.gradients", exc_type=ImportError)
    monkeypatch.setattr(gradients, "backward", lambda r, saved, needs: dispatch.Grads(sinks=needs))
    monkeypatch.setattr(launch, "_backward", lambda r, saved, work: ("dq", "dk", "dv"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    r, sinks = request(sinks=make(4)), frozenset({"sinks"})
    saved = dispatch.Saved(r.q, None, r.q, torch.zeros(r.q.shape[:3]), None)
    assert launch.backward(r, saved, frozenset("qkv")) == ("dq", "dk", "dv", None, None, None)
    assert launch.backward(r, saved, frozenset("qkv") | sinks) == ("dq", "dk", "dv", None, None, sinks)
    assert launch.backward(r, None, sinks).q is None


def test_strides_of_dims_of_size_1_do_not_matter():
    x = make(1, 1, 1, 64).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    assert launch.describable(x)
    assert launch.strides(x) == (8, 8, 8)


def test_the_blocks_are_those_of_the_cost_model(anywhere, monkeypatch):
    from tilewise import iomodel

    pytest.importorskip("triton")
    monkeypatch.setitem(dispatch.BACKENDS, "hopper", anywhere)
    monkeypatch.setattr("tilewise.backends.triton.config.generation", lambda device: "sm_90")
    machine = iomodel.machine_for(request(mask=masks.causal()))
    assert (machine.forward_tile, machine.backward_tile) == ((128, 128), (128, 128))
    assert iomodel.machine_for(request(128)).backward_tile == (64, 128)
    wide = iomodel.machine_for(request(256))
    assert (wide.forward_tile, wide.backward_tile) == ((128, 64), (64, 64))
