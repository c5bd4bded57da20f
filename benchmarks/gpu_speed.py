"""Speed on a GPU beside PyTorch's kernels: bf16, the backends in turns, in one process.

Four tables: TFLOP/s beside FlashAttention and cuDNN, milliseconds beside compiled FlexAttention with the same mask or
the same change of the scores (and beside the memory-efficient kernel, which takes a bias and gives its gradient),
beside another call that the time of this one should be in proportion to, and what a call costs on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch
from crew import told
from torch import Tensor

import tilewise
from tilewise import masks
from tilewise.request import alibi

PEERS = ("torch_flash", "torch_cudnn")
FLEX, EFFICIENT = "flex", "torch_efficient"
TOKENS, WIDTH = 16384, 2048  # of a cell: batch * length, heads * D
WINDOW, DOCUMENTS, CAP = 1024, 16, 30.0
GROUP = 8  # query heads of a key head
ONLY = {
    "hopper": ("full", "causal", f"window {WINDOW}", f"softcap {CAP:.0f}")
}  # the cases of backends that take only some
CASES = (f"window {WINDOW}", f"{DOCUMENTS} documents", "alibi", f"softcap {CAP:.0f}", "bias", "causal")


class Cell(NamedTuple):
    """One shape. flex: beside FlexAttention, else beside ``PEERS``."""

    case: str
    dim: int
    length: int
    flex: bool


class Line(NamedTuple):
    """A call beside ``other``, which should take at least ``asked`` times as long."""

    case: str
    dim: int
    length: int
    other: str
    asked: float


def lines(backend: str) -> list[Line]:
    """A window beside cuDNN without it; a ragged batch beside its FLOPs in sequences of one length; heads in groups."""
    if backend != "hopper":
        return []
    found = [Line(f"window {WINDOW}", d, TOKENS, "torch_cudnn, causal", 6) for d in (64, 128)]
    for mask in ("full", "causal"):
        found.append(Line(f"{DOCUMENTS} ragged, {mask}", 128, TOKENS, f"{DOCUMENTS} equal, by FLOPs", 1 / 1.1))
        found.append(Line(f"GQA {GROUP}:1, {mask}", 128, 4096, "MHA", 1))
    return found


def cells(backend: str) -> list[Cell | Line]:
    """In order of importance: the time may run out."""
    plain = [Cell(c, d, n, False) for d in (64, 128) for n in (4096, 16384) for c in ("full", "causal")]
    if backend == "hopper":  # a call of 1024 keys is as much its launch as its kernel
        plain += [Cell(c, 256, n, False) for n in (4096, 16384) for c in ("full", "causal")]
        plain += [Cell(c, d, 1024, False) for d in (64, 128, 256) for c in ("full", "causal")]
    flex = [Cell(c, d, 4096, True) for d in (128, 64) for c in CASES]
    long = [Cell(c, 128, 16384, True) for c in CASES if c != "bias"]  # an L x L bias for 16 heads is 8 GB there
    taken = (c for c in (*flex, *long) if c.case in ONLY.get(backend, (c.case,)))
    return [*plain, *lines(backend), *taken]


SMALL = {"tokens": 128, "width": 128}  # where a kernel takes less time than calling it


def small_cells(backend: str) -> list[Cell]:
    """What a call costs on the host: one sequence of two heads, beside PyTorch's kernels and FlexAttention."""
    every = [
        Cell("causal", 64, 128, False),
        Cell("causal", 64, 128, True),
        Cell(f"{DOCUMENTS} documents", 64, 128, True),
    ]
    return [c for c in every if c.case in ONLY.get(backend, (c.case,))]


def peers(backend: str) -> tuple[str, ...]:
    """Our kernels for any GPU stand beside those for one."""
    return PEERS if backend not in ONLY else (*PEERS, "triton")


class Contestant(NamedTuple):
    """A call, the tensors that take a gradient, the output's gradient, and what its time is multiplied by."""

    call: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    dout: Tensor
    factor: float = 1.0


def race(
    cell: Cell | Line, backend: str, device: torch.device, tokens: int = TOKENS, width: int = WIDTH
) -> dict[str, Contestant]:
    """The contestants of a cell; the first is ``backend``. Those of a cell compute the same."""
    batch, heads = tokens // cell.length, width // cell.dim
    shape = batch, heads, cell.length, cell.dim
    if isinstance(cell, Line):
        return beside(cell, backend, device, shape)
    q, k, v, dout = (randn(device, *shape) for _ in range(4))
    inputs = leaves(q, k, v)
    ours, theirs, bias = options(cell.case, heads, cell.length, device)
    calls = {
        n: partial(tilewise.attention, *inputs, backend=n, **ours)
        for n in (backend, *(() if cell.flex else peers(backend)), *((EFFICIENT,) if cell.case == "bias" else ()))
    }
    if cell.flex:
        calls[FLEX] = flex(inputs, **theirs)
    return {name: Contestant(call, (*inputs, *bias), dout) for name, call in calls.items()}


def randn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in tensors)


def beside(line: Line, backend: str, device: torch.device, shape: tuple[int, int, int, int]) -> dict[str, Contestant]:
    """The contestants of a line: a call of ``backend``, and the one that its time is compared with."""
    batch, heads, length, dim = shape
    mask = None if line.case.endswith("full") else masks.causal()
    if "ragged" in line.case:
        return {backend: ragged(backend, device, shape, mask), line.other: equal(backend, device, shape, mask)}
    kv_heads = heads // GROUP if "GQA" in line.case else heads
    q, dout, *kv = (randn(device, batch, h, length, dim) for h in (heads, heads, kv_heads, kv_heads, heads, heads))
    own, whole = leaves(q, *kv[:2]), leaves(q, *kv[2:])
    other = "torch_cudnn" if "cudnn" in line.other else backend
    given = mask if "GQA" in line.case else masks.causal() & masks.window(WINDOW, 0)
    return {
        backend: Contestant(partial(tilewise.attention, *own, given, backend=backend), own, dout),
        line.other: Contestant(partial(tilewise.attention, *whole, mask, backend=other), whole, dout),
    }


def cuts(tokens: int) -> list[int]:
    """Where sequences begin and the last one ends, at random, the same for each run."""
    r = Random(1)
    return [0, *sorted(r.sample(range(1, tokens), DOCUMENTS - 1)), tokens]


def ragged(backend: str, device: torch.device, shape: tuple[int, int, int, int], mask: masks.Mask | None) -> Contestant:
    _, heads, tokens, dim = shape
    ends = cuts(tokens)
    cu, longest = torch.tensor(ends, dtype=torch.int32, device=device), max(b - a for a, b in pairwise(ends))
    q, k, v, dout = (randn(device, tokens, heads, dim) for _ in range(4))
    inputs = leaves(q, k, v)
    call = partial(tilewise.attention_varlen, *inputs, cu, cu, longest, longest, mask, backend=backend)
    return Contestant(call, inputs, dout)


def equal(backend: str, device: torch.device, shape: tuple[int, int, int, int], mask: masks.Mask | None) -> Contestant:
    """As many sequences of one length, a multiple of 128, with about as many FLOPs; the rest is the factor."""
    _, heads, tokens, dim = shape
    squares = sum((b - a) ** 2 for a, b in pairwise(cuts(tokens)))
    length = max(1, round((squares / DOCUMENTS) ** 0.5 / 128)) * 128
    q, k, v, dout = (randn(device, DOCUMENTS, heads, length, dim) for _ in range(4))
    inputs = leaves(q, k, v)
    call = partial(tilewise.attention, *inputs, mask, backend=backend)
    return Contestant(call, inputs, dout, squares / (DOCUMENTS * length**2))


def options(
    case: str, heads: int, length: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any], tuple[Tensor, ...]]:
    """A case as arguments of ``tilewise.attention``, as functions for FlexAttention, and what of it has a gradient."""

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    ours: dict[str, Any] = {"mask": masks.causal()}
    theirs: dict[str, Any] = {"mask_mod": causal}
    if case == "full":
        return {}, {}, ()
    if case == f"window {WINDOW}":
        ours["mask"] = masks.causal() & masks.window(WINDOW, 0)
        theirs["mask_mod"] = lambda b, h, i, j: (i >= j) & (i - j <= WINDOW)
    elif case == f"{DOCUMENTS} documents":
        ids = torch.arange(length, device=device) // (length // DOCUMENTS)
        ours["mask"] = masks.causal() & masks.documents(ids)
        theirs["mask_mod"] = lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])
    elif case == "alibi":
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)
        ours["bias"] = alibi(slopes)
        theirs["score_mod"] = lambda s, b, h, i, j: s - slopes[h] * (i - j)  # j <= i
    elif case == f"softcap {CAP:.0f}":
        ours["softcap"] = CAP
        theirs["score_mod"] = lambda s, b, h, i, j: CAP * torch.tanh(s / CAP)
    elif case == "bias":
        bias = torch.randn(1, heads, length, length, device=device, dtype=torch.bfloat16).requires_grad_()
        return {"bias": bias}, {"score_mod": lambda s, b, h, i, j: s + bias[0, h, i, j]}, (bias,)
    elif case != "causal":
        raise ValueError(f"no such case {case!r}; there are full, causal, {', '.join(CASES)}")
    return ours, theirs, ()


def flex(inputs: tuple[Tensor, ...], mask_mod: Any = None, score_mod: Any = None) -> Callable[[], Tensor]:
    """Compiled FlexAttention, made at the first call; on a CPU, where it has no compiled backward, uncompiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    made: list[Callable[[], Tensor]] = []

    def call() -> Tensor:
        if not made:
            device, length = inputs[0].device, inputs[0].shape[2]
            block = None
            if mask_mod is not None:
                block = create_block_mask(mask_mod, None, None, length, length, device=str(device))
            compiled = flex_attention
            if device.type == "cuda":
                torch._dynamo.reset()  # or the ninth mask is not compiled any more
                compiled = torch.compile(flex_attention, dynamic=False)
            made.append(partial(compiled, *inputs, score_mod=score_mod, block_mask=block))
        return made[0]()

    return call


# --- measuring ------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any]) -> float:
    """Median on CUDA events, the L2 cache cleared before each call."""
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=50, return_mode="median")


def microseconds(call: Callable[[], Any], times: int = 30) -> float:
    """Of the host alone: the median of 9 times so many calls, which nobody waits for."""
    taken = []
    for _ in range(10):  # the first warms up
        wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        taken.append((time.perf_counter() - start) / times * 1e6)
    wait()
    return median(taken[1:])


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(
    cell: Cell | Line, backend: str, device: torch.device, timer: Callable[[Callable[[], Any]], float] = milliseconds,
    **sizes: int,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Milliseconds of each contestant, forward and backward alone, or the reason why there are none.

    The contestants take turns, there and back, and the better of two medians counts. One of a cell whose output is not
    that of the backend computes something else, and is not timed.
    """
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a compiled backward that runs again and again on one graph
    r = race(cell, backend, device, **sizes)
    found: dict[str, dict[str, Any]] = {}
    outs: dict[str, Tensor] = {}
    for name, c in r.items():
        try:
            outs[name] = c.call()
            torch.autograd.grad(outs[name], c.inputs, c.dout, retain_graph=True)
            same = isinstance(cell, Cell) and backend in outs
            if same and (difference := apart(outs[name], outs[backend])) > 0.05:
                raise RuntimeError(f"its output is another one, {difference:.2g} apart")
        except Exception as e:  # the reason is recorded, and the others run
            outs.pop(name, None)
            found[name] = {"error": told(e)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in outs}
    for name in (*outs, *reversed(outs)):
        c = r[name]
        backward = partial(torch.autograd.grad, outs[name], c.inputs, c.dout, retain_graph=True)
        times[name].append((timer(c.call) * c.factor, timer(backward) * c.factor))
    for name, both in times.items():
        found[name] = {"forward": min(f for f, _ in both), "backward": min(b for _, b in both)}
    return {name: found[name] for name in r}


def apart(x: Tensor, y: Tensor) -> float:
    """The root mean square of the difference, relative to y."""
    x, y = x.detach().float(), y.detach().float()
    return float((x - y).square().mean().sqrt() / y.square().mean().sqrt())


def tflops(cell: Cell, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """4 * B * H * L^2 * D in all, half of that when causal, and x 2.5 backward."""
    flops = 4 * TOKENS * WIDTH * cell.length * (0.5 if cell.case == "causal" else 1)

    def rate(x: dict[str, Any]) -> dict[str, Any]:
        return {"forward": flops / x["forward"] / 1e9, "backward": 2.5 * flops / x["backward"] / 1e9}

    return {name: x if "error" in x else rate(x) for name, x in found.items()}
