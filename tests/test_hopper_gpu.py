"""The hopper kernels on an H100 or H200, against the judge: sizes, masks, layouts, and what a mask hides."""

import pytest
import torch

from tilewise import AuxRequest, attention, attention_varlen, masks
from tilewise.backends import hopper
from tilewise.testing.judge import judge
from tilewise.testing.problems import Call, Problem, plain, qkv

GPU = torch.device("cuda", 0)
if not torch.cuda.is_available() or hopper.machine(GPU):
    pytest.skip("needs a GPU that the hopper backend takes", allow_module_level=True)

LENGTHS = torch.tensor([0, 5, 300, 555])
BANDS = {
    "full": None,
    "causal": masks.causal(),
    "bottom right": masks.causal("bottom_right"),
    "offset": masks.causal(-40),
    "window": masks.window(70, 0, "bottom_right"),
    "left": masks.window(33, None),
    "both": masks.window(10, 300, 77),
}
RAGGED_TILES = ((1, 1), (17, 17), (127, 127), (128, 128), (129, 129), (1024, 1024), (1, 1000), (1000, 100), (257, 515))
ODD = {
    "causal": masks.causal(),
    "window": masks.window(20, 20),
    "lengths": masks.key_lengths([150, 293]),
    "both": masks.key_lengths([293, 293]) & masks.causal(),
}


def options(mask):
    return {} if mask is None else {"mask": mask}


def passes(make, dtype=torch.bfloat16):
    for v in judge(Problem("hopper", "H", make), "hopper", dtype, GPU):
        assert v.ok, f"{v.quantity}: {v.note}"
        assert v.quantity != "refused", v.note


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", BANDS)
def test_sizes(mask, dim):
    for lq, lk in RAGGED_TILES:
        passes(plain((2, 3, lq, lk, dim), options(BANDS[mask])))


@pytest.mark.parametrize(("dim", "dim_v"), [(256, 256), (96, 96), (192, 192), (192, 128), (64, 256), (128, 64)])
@pytest.mark.parametrize("mask", ["full", "causal", "both"])
def test_other_head_dims(mask, dim, dim_v):
    for lq, lk in ((129, 129), (1, 1000), (257, 515)):
        passes(plain((2, 3, lq, lk, dim), options(BANDS[mask]), dv=dim_v))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "both"])
def test_softcap_and_sinks(mask, dim):
    def make(m, lq, lk, given):
        tensors = {**qkv(m, 2, 4, lq, lk, dim, kv=2), "sinks": m.randn(4)}
        return Call(tensors, options(BANDS[mask]) | given)

    for lq, lk in ((129, 129), (257, 515)):
        passes(lambda m, lq=lq, lk=lk: make(m, lq, lk, {}))
        passes(lambda m, lq=lq, lk=lk: make(m, lq, lk, {"softcap": 3.0}))
        passes(plain((2, 3, lq, lk, dim), options(BANDS[mask]) | {"softcap": 128.0}, scale=8))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv"), [(16, 2), (6, 3), (64, 1)])
def test_few_queries_of_many_heads(heads, kv, dim):
    for lq in (1, 5, 37, 200):
        for mask in ("full", "bottom right", "window"):
            passes(plain((2, heads, lq, 300, dim), options(BANDS[mask]), kv=kv))

    def spoilt(m):
        tensors = {**qkv(m, 2, heads, 5, 300, dim, kv=kv), "sinks": m.randn(heads)}
        tensors["v"][:, :, -2:], tensors["v"][:, :, 200] = float("nan"), float("inf")
        return Call(tensors, {"mask": masks.causal(294)})

    passes(spoilt)


RAGGED = {
    "long and short": ([0, 70, 71, 200], [0, 65, 70, 190], 200, 190),
    "some without keys or queries": ([0, 0, 300, 340, 513], [0, 20, 400, 400, 540], 530, 600),
    "decoding": ([*range(34)], [55 * n for n in range(34)], 33, 1815),
    "many": ([37 * n for n in range(41)], [55 * n for n in range(41)], 1480, 2200),
}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "bottom right", "window"])
@pytest.mark.parametrize("batch", RAGGED)
def test_ragged(batch, mask, dim):
    """Rows past a sequence's end are another's; a NaN there is not its."""
    ends_q, ends_k, rows, keys = RAGGED[batch]

    def make(m, spoilt):
        tensors = {"q": m.randn(rows, 4, dim), "k": m.randn(keys, 2, dim), "v": m.randn(keys, 2, dim)}
        if spoilt:
            tensors["k"][ends_k[1] :][:2] = float("nan")
            tensors["v"][ends_k[1] :][:2] = float("nan")
        else:
            tensors["sinks"] = m.randn(4)
        cu = tuple(torch.tensor(x, dtype=torch.int32, device=m.device) for x in (ends_q, ends_k))
        return Call(tensors, options(BANDS[mask]), cu=cu)

    passes(lambda m: make(m, False))
    passes(lambda m: make(m, True), torch.float16)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_lengths_groups_layouts(dim):
    for mask in (masks.key_lengths(LENGTHS), masks.key_lengths(LENGTHS.int()) & masks.window(100, 20)):
        passes(plain((4, 4, 555, 555, dim), {"mask": mask}, kv=2), torch.float16)
    passes(plain((1, 8, 257, 200, dim), {}, kv=1))
    view = dict.fromkeys("qkv", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    passes(lambda m: Call(qkv(m, 2, 3, 300, 300, dim), {"mask": masks.causal()}, views=view))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mask", ODD)
def test_what_is_hidden_stays_hidden(mask, value, dim):
    """A value that is not a number, among the last keys and at one place that some rows attend to."""

    def make(m, where, names):
        tensors = qkv(m, 2, 2, 300, 300, dim)
        for name in names:
            tensors[name][:, :, where] = value
        return Call(tensors, {"mask": ODD[mask]})

    for where in (slice(-7, None), 5):
        for names in ("v", "kv", "q"):
            passes(lambda m, where=where, names=names: make(m, where, names))


def tensors(dim, length=2000, seed=1):
    g = torch.Generator(GPU).manual_seed(seed)
    shapes = [(2, h, length, dim) for h in (4, 2, 2, 4)]
    return [torch.randn(s, generator=g, device=GPU, dtype=torch.bfloat16) for s in shapes]


def everything(mask, q, k, v, dout):
    """Output, log-sum-exp and all gradients; that of the log-sum-exp is the output's first channel."""
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, aux = attention(q, k, v, BANDS[mask], backend="hopper", return_aux=AuxRequest(lse=True))
    given = [dout, dout[..., 0].float()]
    return [out, aux.lse, *torch.autograd.grad([out, aux.lse], [q, k, v], given)]


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_the_same_bits(mask, dim):
    given = tensors(dim)
    first = everything(mask, *given)
    for _ in range(29):
        for x, y in zip(everything(mask, *given), first, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_bits_of_ragged_sequences(dim):
    """Many tiles of keys of some sequences, and a softcap."""
    q, k, v, dout = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in tensors(dim, 3000))
    cu = torch.tensor([0, 2500, 2500, 2600, 5800, 5999], device=GPU, dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients():
        out = attention_varlen(*leaves, cu, cu, 3200, 3200, masks.causal(), softcap=20.0, backend="hopper")
        return torch.autograd.grad(out, leaves, dout)

    first = gradients()
    for _ in range(29):
        for x, y in zip(gradients(), first, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_in_a_graph(mask):
    """A replay with other numbers gives what an eager call gives."""
    given = tensors(64, 500)
    side = torch.cuda.Stream(GPU)
    side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        everything(mask, *given)
    torch.cuda.current_stream(GPU).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = everything(mask, *given)
    for seed in (2, 3):
        fresh = tensors(64, 500, seed)
        with torch.no_grad():
            for x, y in zip(given, fresh, strict=True):
                x.copy_(y)
        graph.replay()
        for x, y in zip(written, everything(mask, *fresh), strict=True):
            assert torch.equal(x, y)


def test_gradients_of_any_layout():
    """An incoming gradient that TMA cannot load is copied."""
    q, k, v, _ = tensors(64, 300)
    for dout in (torch.ones((), device=GPU, dtype=q.dtype).expand(q.shape), torch.randn_like(q.mT).mT):
        for x, y in zip(
            everything("causal", q, k, v, dout), everything("causal", q, k, v, dout.contiguous()), strict=True
        ):
            assert torch.equal(x, y)


@pytest.mark.parametrize("needs", ["q", "kv", "qkv"])
def test_only_what_is_asked_for(needs):
    passes(lambda m: Call(qkv(m, 1, 2, 300, 300, 64), {"mask": masks.causal()}, needs=tuple(needs)))
