"""The kernels of ``triton`` in Triton's interpreter: the judge's problems, and the promises that need bits.

    TRITON_INTERPRET=1 pytest tests/test_triton.py                          small problems
    TRITON_INTERPRET=1 TILEWISE_TRITON_ALL=1 pytest tests/test_triton.py    larger ones, and all in fp16

The variable must be set before triton is imported. bf16 is left to the GPU: the interpreter truncates it.
"""

import os
import warnings

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels run on a CPU only with TRITON_INTERPRET=1 set before the start", allow_module_level=True)
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tilewise import attention, dispatch, masks  # noqa: E402
from tilewise.backends import triton as backend  # noqa: E402
from tilewise.backends.triton import config  # noqa: E402
from tilewise.backends.triton.primitives import survives  # noqa: E402
from tilewise.backends.triton.repeat import Work  # noqa: E402
from tilewise.masks import Patch  # noqa: E402
from tilewise.philox import dropout_keep, threshold  # noqa: E402
from tilewise.request import alibi  # noqa: E402
from tilewise.testing import judge, problems  # noqa: E402
from tilewise.testing.problems import Maker  # noqa: E402

for _backend in backend.backends():
    dispatch.register(_backend)


def _patch_once(fn, patch=interpreter._patch_lang, patched=set()):  # noqa: B006
    """The interpreter patches triton.language anew for every call of a helper, half of its time. Once is enough here."""
    langs = frozenset(id(x) for x in fn.__globals__.values() if x in (tl, tl.core))
    if langs in patched:
        return interpreter._LangPatchScope()
    patched.add(langs)
    patch(fn)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once


def _product(self, a, b, d, input_precision, max_num_imprecise_acc):
    """numpy adds up a product and its transpose in orders of their own, which differ from CPU to CPU. A GPU does not, and
    the backward counts on scores that are those of the forward: in fp64, rounded once, they are here too."""
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _product


def sizes(p):
    """(tiles of 16 x 16 over all heads, tile shape to use) of a problem."""
    t = p.make(Maker(p.name, torch.float32, "cpu")).tensors
    q, k = t["q"], t["k"]
    heads = q.shape[1] * (q.shape[0] if q.dim() == 4 else 1)
    area = q.shape[-2 if q.dim() == 4 else 0] * k.shape[-2 if q.dim() == 4 else 0] * heads
    return area, (16, 16) if area <= 20_000 else (32, 32) if area <= 45_000 else (64, 64)


EVERY = os.environ.get("TILEWISE_TRITON_ALL") == "1"  # ten minutes in place of three
SMALL = {p.name: p for p in problems() if sizes(p)[0] <= (410_000 if EVERY else 60_000)}
HALF = {p.name for p in (problems() if EVERY else problems(quick=True))}


@pytest.fixture
def tiles():
    yield config.interpret_in_tiles
    config.interpret_in_tiles(16, 16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", SMALL)
def test_problem(name, tiles):
    """Every small problem, forward and gradients, in fp32 and (two of each family) fp16, by the error budget."""
    tiles(*sizes(SMALL[name])[1])
    for dtype in (torch.float32, torch.float16)[: 2 if name in HALF else 1]:
        verdicts = judge(SMALL[name], "triton", dtype)
        assert len(verdicts) > 1, verdicts[0].note
        assert not [f"{v.quantity}: {v.note}" for v in verdicts if not v.ok], dtype


def test_most_problems_are_small():
    assert len(SMALL) >= 0.85 * len(problems())
    assert {p.family for p in problems()} == {p.family for p in SMALL.values()}


# --- predicates -----------------------------------------------------------------------------------


def qkv(b=2, h=2, lq=37, lk=45, d=8, grad=False, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(b, h, n, d, generator=g).to(dtype).requires_grad_(grad) for n in (lq, lk, lk)]


_TABLE = torch.randint(0, 3, (2, 64), generator=torch.Generator().manual_seed(3))
_FLAGS = torch.rand(64, generator=torch.Generator().manual_seed(4)) < 0.5
_WIDTH = 9


def _with_closure(n, t):
    return lambda b, h, i, j: (t[b, j] != n) & ((i - j) // 3 >= -n)


def _both(*fns):
    return lambda b, h, i, j: fns[0](b, h, i, j) & fns[1](b, h, i, j)


PREDICATES = {
    "functions of functions": (_both(_with_closure(1, _TABLE), lambda b, h, i, j: i >= j - _WIDTH),),
    "arithmetic": (lambda b, h, i, j: (i * 3 + j * 5 + h) % 7 < 4,),
    "python's floor": (lambda b, h, i, j: ((i - j) // 4 % 3 == 1) | ((j - i) % 5 == 2),),
    "captured": (lambda b, h, i, j, t, f: (t[b, j] == t[b, i]) | f[j], _TABLE, _FLAGS),
    "closure": (_with_closure(1, _TABLE),),
    "global": (lambda b, h, i, j: (i - j).abs() < _WIDTH + h,),
    "torch functions": (
        lambda b, h, i, j: torch.where(b == 0, torch.maximum(i, j) % 2 == 0, torch.logical_not(i > j)),
    ),
    "floats": (lambda b, h, i, j: i * 0.5 + 0.25 > j / 3,),
    "loop over numbers": (lambda b, h, i, j: sum((j == n) for n in range(3)) + (i >= j) > 0,),
    "past 32 bits": (lambda b, h, i, j: (i * 100003 * 70001 + j) % 3 == 0,),
    "constant": (lambda b, h, i, j: (i >= 0) & True,),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates_are_compiled(name):
    """The same mask as PyTorch computes, in the forward and in the gradients."""
    mask = masks.predicate(*PREDICATES[name])
    for combined in (mask, mask & masks.causal("bottom_right"), ~mask | masks.key_lengths(torch.tensor([3, 30]))):
        results = []
        for which in ("triton", "tiled"):
            q, k, v = qkv(grad=True)
            out = attention(q, k, v, combined, backend=which)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def _branches(b, h, i, j):
    return i >= j if b == 0 else j >= 0


def _calls(b, h, i, j):
    return torch.sin(i) > torch.cos(j)


@pytest.mark.parametrize(("fn", "why"), [(_branches, "if, and, or, not"), (_calls, "sin")])
def test_a_predicate_that_cannot_be_compiled_is_refused_with_its_reason(fn, why):
    with pytest.raises(NotImplementedError, match=f"cannot compile the predicate {fn.__name__}.*{why}"):
        attention(*qkv(), masks.predicate(fn), backend="triton")


def test_numbers_of_a_predicate_are_arguments():
    """Another value, window or length gives the same function: nothing is compiled again."""
    from tilewise.backends.triton.lower import lower

    def made(n, w):
        mask = masks.predicate(lambda b, h, i, j: j % n != 1) & masks.window(w, 0)
        return lower(mask)[0].keep

    assert made(5, 100) is made(7, 200)


def test_what_is_written_once_is_that_of_the_structure():
    """Masks that differ in structure share no function, though their arguments look alike."""
    from tilewise.backends.triton.lower import lower

    lengths, ids = torch.tensor([3, 4]), torch.zeros(37, dtype=torch.int64)
    band = masks.causal()
    made = [
        band, masks.window(0, None), masks.window(2, 2), masks.causal(align="bottom_right"), ~band, band & band,
        band & masks.causal(), band | masks.causal(), masks.key_lengths(lengths), masks.query_lengths(lengths),
        masks.key_lengths(lengths, padding="left"), masks.documents(ids), masks.dense(torch.ones(37, 45).bool()),
        masks.predicate(lambda b, h, i, j: i > j), masks.predicate(lambda b, h, i, j: i < j),
    ]  # fmt: skip
    kept = [lower(x)[0].keep for x in made]
    assert len({id(x) for x in kept}) == len(made)
    assert [lower(x)[0].keep for x in made] == kept


def test_the_structures_used_last_are_remembered(monkeypatch):
    from tilewise.backends.triton import lower

    monkeypatch.setattr(lower, "_MOST", 3)
    monkeypatch.setattr(lower, "_lowered", lower.OrderedDict())
    band = masks.causal()
    made = [band, ~band, band & band, band | band]
    first, second, third = (lower.lower(x)[0] for x in made[:3])
    assert lower.lower(band)[0] is first
    lower.lower(made[3])
    assert [lower.lower(x)[0] for x in (band, made[2])] == [first, third]
    assert len(lower._lowered) == 3
    assert lower.lower(~band)[0] is not second


# --- lists of tiles -------------------------------------------------------------------------------


def _row_numbers(lists, r):
    full, partial = lists[r, :2].tolist()
    return lists[r, 2 : 2 + full].tolist(), lists[r, 2 + full : 2 + full + partial].tolist()


_IDS = torch.tensor([0] * 90 + [1] * 3 + [2] * 200 + [7] * 50 + [5] * 57)
LISTED = {
    "documents": masks.documents(_IDS),
    "unsorted documents": masks.documents(torch.stack((_IDS, _IDS.flip(0) // 2)), torch.stack((_IDS, _IDS.roll(70)))),
    "causal documents": masks.causal() & masks.documents(_IDS),
    "but a document": masks.query_lengths([400, 130]) & ~masks.documents(_IDS) & masks.key_lengths([390, 64]),
    "dense": masks.dense(
        (torch.arange(400)[:, None] // 40 == torch.arange(400) // 50)[None, None].expand(2, 3, -1, -1)
    ),
    "predicate": masks.predicate(lambda b, h, i, j: (i // 32 + j // 64 + h) % 3 == b) & masks.window(100, 100),
}


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("sides", ["rows", "columns", "columns beside rows"])
def test_lists_are_the_tile_map(name, sides):
    """The numbers of the full and of the partial tiles, in order; those that reach past the end count as partial."""
    from tilewise.backends.triton.launch import Problem
    from tilewise.backends.triton.repeat import Work
    from tilewise.masks import Grid
    from tilewise.request import Request
    from tilewise.tilemap import tile_map

    mask, n, cfg = LISTED[name], 400, config.Config(32, 16, 4, 1)
    q = torch.zeros(2, 3, n, 8)
    wanted = {"rows": (cfg, None), "columns": (None, cfg)}.get(sides, (config.Config(16, 64, 4, 1), cfg))
    column = sides != "rows"
    lists, strides = Problem(Request(q, q, q, 1.0, mask)).lists(Work(), *wanted)[column]
    assert lists is not None
    table = tile_map(mask, Grid(2, 3, n, n, cfg.block_m, cfg.block_n, q.device)).table.clone()
    table[..., n // cfg.block_m, :].clamp_(max=1)
    assert all(s % 16 == 0 for s in strides)
    for b, h in ((0, 0), (1, 2)):
        mine = lists.as_strided(lists.shape[2:], (strides[2], 1), b * strides[0] + h * strides[1])
        rows = table[min(b, table.shape[0] - 1), min(h, table.shape[1] - 1)]
        for r, row in enumerate(rows.T if column else rows):
            assert _row_numbers(mine, r) == tuple((row == v).nonzero().flatten().tolist() for v in (2, 1)), (b, h, r)


# --- bits -----------------------------------------------------------------------------------------


@triton.jit
def _survivors(out, rng, threshold, bh, i0, j0, M: tl.constexpr, N: tl.constexpr):
    keep = survives(rng, threshold, bh, i0, j0, M, N)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, keep.to(tl.int8))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_is_the_philox_of_tiled(p):
    rng = torch.tensor([2**61 + 12345, 2**40 + 7])
    out = torch.empty(32, 64, dtype=torch.int8)
    bits = threshold(p)
    _survivors[(1,)](out, rng, bits - 2**32 if bits >= 2**31 else bits, 3 * 5 + 2, 48, 64, 32, 64)
    patch = Patch(slice(3, 4), slice(2, 3), slice(48, 80), slice(64, 128), 200, 200, torch.device("cpu"))
    assert torch.equal(out.bool(), dropout_keep(rng, p, patch, 5)[0, 0])


def run(q, k, v, *args, **kw):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, *args, backend="triton", **kw)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["lengths", "dense", "bias"])
def test_what_is_masked_changes_no_bit(bad, kind):
    q, k, v = qkv(dtype=torch.float16)
    lengths = torch.tensor([20, 33])
    hidden = torch.arange(45)[None] >= lengths[:, None]  # (B, Lk)
    kw = {"mask": masks.key_lengths(lengths)}
    if kind == "dense":
        kw = {"mask": ~hidden[:, None, None]}
    if kind == "bias":
        kw = {"bias": torch.zeros(2, 1, 1, 45).masked_fill(hidden[:, None, None], -float("inf"))}
    clean = run(q, k, v, **kw)
    k2, v2 = (x.masked_fill(hidden[:, None, :, None], bad) for x in (k, v))
    for a, b in zip(clean, run(q, k2, v2, **kw), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_a_bias_hides_changes_no_bit_of_tiles_in_pieces(dtype, tiles):
    """Beside a bias masked tiles are taken in pieces, and sums in other pieces are rounded otherwise."""
    tiles(32, 64)
    q, k, v = qkv(1, 1, 40, 150, dtype=dtype)
    unseen = torch.tensor([7, 140])
    bias = torch.randn(1, 1, 40, 150).index_fill(3, unseen, -float("inf")).to(dtype)
    clean = run(q, k, v, bias=bias)
    k2, v2 = k.index_fill(2, unseen, float("nan")), v.index_fill(2, unseen, float("inf"))
    for a, b in zip(clean, run(q, k2, v2, bias=bias), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_key_seen_by_some_rows_poisons_only_these(which):
    q, k, v = qkv(1, 1, 40, 40)
    clean = run(q, k, v, masks.causal())
    (k if which == "k" else v)[:, :, 17] = float("nan")
    out, dq, dk, _ = run(q, k, v, masks.causal())
    assert torch.equal(out[:, :, :17], clean[0][:, :, :17])
    assert torch.equal(dq[:, :, :17], clean[1][:, :, :17])
    assert out[:, :, 17:].isnan().all()
    assert dk[:, :, 17].isnan().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_beyond_the_last_add_nothing_to_a_key_that_is_not_finite():
    """Scores of -inf give a key no gradient, though 0 * inf is NaN in the tile's rows that do not exist."""
    q, k, v = qkv(1, 1, 37, 45)
    q, k = q.abs(), k.index_fill(2, torch.tensor(7), -float("inf"))
    out, _, dk, dv = run(q, k, v)
    assert out.isfinite().all()
    assert dk.isfinite().all()
    assert not dv[:, :, 7].any()


def test_a_bias_read_as_pairs_is_the_bias(monkeypatch):
    """One whose rows lie an odd number of elements apart is read one by one, to the same bits."""
    from tilewise.backends.triton.launch import Problem

    read = []
    paired = Problem.paired
    monkeypatch.setattr(Problem, "paired", lambda self: read.append(paired(self)) or read[-1])
    q, k, v = qkv(2, 2, 40, 48, dtype=torch.float16)
    wide = torch.randn(1, 2, 40, 49, generator=torch.Generator().manual_seed(2)).half()
    wide[..., 5, 7] = -float("inf")
    odd, even = wide[..., :48], wide[..., :48].contiguous()
    for x, y in zip(run(q, k, v, bias=odd), run(q, k, v, bias=even), strict=True):
        assert torch.equal(x, y)
    assert read == [False, True]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (1, 1)])
def test_the_gradient_of_a_bias_that_is_shared(shape, dtype, tiles, monkeypatch):
    """Beside dQ, entries two at a time and programs three; a hidden key that is not a number changes no bit of it."""
    launched, launch = [], Work.launch
    monkeypatch.setattr(
        Work, "launch", lambda self, fn, *args, **kw: launched.append(fn.__name__) or launch(self, fn, *args, **kw)
    )
    tiles(16, 16)
    q, k, v = qkv(3, 4, 40, 50, dtype=dtype)
    k, v = k[:, ::2], v[:, ::2]
    bias = torch.randn(*shape, 40, 50).index_fill(3, torch.tensor([7]), -float("inf")).to(dtype)

    def grads(k, v, backend="triton", dtype=dtype):
        tensors = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, bias)]
        out = attention(*tensors[:3], bias=tensors[3], backend=backend)
        return out, *torch.autograd.grad(out.double().square().sum(), tensors)

    mine, exact = ([x.detach() for x in found] for found in (grads(k, v), grads(k, v, "dense", torch.float64)))
    assert {"dq_dbias_kernel", "dbias_careful_kernel"} <= set(launched)
    assert "dbias_kernel" not in launched
    tol = 1e-5 if dtype == torch.float32 else 4e-3
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.double(), b, atol=tol * float(b.abs().max()), rtol=tol)
    bad_k, bad_v = (x.index_fill(2, torch.tensor([7]), bad) for x, bad in ((k, float("nan")), (v, float("inf"))))
    for a, b in zip(mine, grads(bad_k, bad_v), strict=True):
        assert torch.equal(a, b)


CHANGES = {
    "softcap": {"softcap": 5.0},
    "softcap of a negative scale": {"softcap": 5.0, "scale": -0.3},
    "softcap too large for the quick tanh": {"softcap": 200.0},
    "alibi": {"bias": alibi(torch.tensor([0.5, 0.01]))},
    "alibi of a negative scale": {"bias": alibi(torch.tensor([0.5, 0.01])), "scale": -0.3},
    "alibi of a tiny scale": {"bias": alibi(torch.tensor([0.5, 0.01])), "scale": 1e-8},
    "alibi under a softcap": {"bias": alibi(torch.tensor([0.5, 0.01])), "softcap": 5.0},
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_unit_of_changed_scores(name, tiles):
    """16 bits choose among the units of the scores by what is done to them."""
    tiles(16, 32)
    tensors = qkv(lq=70, lk=90)
    for mask in (masks.causal(align="bottom_right"), masks.documents(torch.arange(70) // 30, torch.arange(90) // 30)):
        mine = run(*(x.half() for x in tensors), mask, **CHANGES[name])
        q, k, v = (x.half().double().requires_grad_() for x in tensors)
        out = attention(q, k, v, mask, backend="dense", **CHANGES[name])
        exact = out, *torch.autograd.grad(out.square().sum(), (q, k, v))
        for a, b in zip(mine, exact, strict=True):
            torch.testing.assert_close(a.double(), b.detach(), atol=4e-3, rtol=4e-3)


def test_runs_give_the_same_bits():
    q, k, v = qkv()
    kw = {"mask": masks.causal(), "dropout_p": 0.2, "seed": 3}
    first = run(q, k, v, **kw)
    for a, b in zip(first, run(q, k, v, **kw), strict=True):
        assert torch.equal(a, b)


def test_reasons_without_an_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(NotImplementedError, match=r"runs on GPUs.*the tensors are on cpu"):
        attention(*qkv(), backend="triton")


# --- precision and tracing ------------------------------------------------------------------------

TF32 = {
    "fp32_precision": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.mark.parametrize("way", TF32)
def test_tf32_is_used_where_pytorch_is_set_to_it(way, monkeypatch):
    """The interpreter multiplies in fp32 whatever is asked for: what is proven is that every product is asked."""
    seen, create_dot = set(), interpreter.InterpreterBuilder.create_dot

    def spy(self, a, b, d, precision, *rest):
        seen.add(precision.name)
        return create_dot(self, a, b, d, precision, *rest)

    def precisions(dtype):
        seen.clear()
        run(*qkv(1, 1, 17, 17, dtype=dtype), masks.causal())
        return set(seen)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", spy)
    assert precisions(torch.float32) == {"IEEE"}
    try:
        TF32[way]()
        assert precisions(torch.float32) == {"TF32"}
        assert precisions(torch.float16) == {"IEEE"}  # 16 bits are exact in either: one kernel
    finally:
        torch.set_float32_matmul_precision("highest")
    assert precisions(torch.float32) == {"IEEE"}


def test_torch_compile_traces_it_without_a_warning():
    q, k, v = qkv(1, 1, 17, 17)
    compiled = torch.compile(
        lambda *x: attention(*x, masks.causal(), backend="triton"), backend="eager", fullgraph=True
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(Dynamo|lru_cache).*")
        out = compiled(q, k, v)
    torch.testing.assert_close(out, attention(q, k, v, masks.causal(), backend="tiled"))
