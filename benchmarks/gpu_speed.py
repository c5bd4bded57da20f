"""Speed on a GPU beside PyTorch's kernels: bf16, the backends in turns, in one process.

Three tables: TFLOP/s beside FlashAttention and cuDNN, milliseconds beside compiled FlexAttention with the same mask or
the same change of the scores (and beside the memory-efficient kernel, which takes a bias and gives its gradient), and
what a call costs on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
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
ONLY = {"hopper": ("full", "causal", f"window {WINDOW}")}  # the cases of backends that take only some
CASES = (f"window {WINDOW}", f"{DOCUMENTS} documents", "alibi", f"softcap {CAP:.0f}", "bias", "causal")


class Cell(NamedTuple):
    """One shape. flex: beside FlexAttention, else beside ``PEERS``."""

    case: str
    dim: int
    length: int
    flex: bool


def cells(backend: str) -> list[Cell]:
    """In order of importance: the time may run out."""
    plain = [Cell(c, d, n, False) for d in (64, 128) for n in (4096, 16384) for c in ("full", "causal")]
    if backend == "hopper":  # a call of 1024 keys is as much its launch as its kernel
        plain += [Cell(c, d, 1024, False) for d in (64, 128) for c in ("full", "causal")]
    flex = [Cell(c, d, 4096, True) for d in (128, 64) for c in CASES]
    long = [Cell(c, 128, 16384, True) for c in CASES if c != "bias"]  # an L x L bias for 16 heads is 8 GB there
    return [c for c in (*plain, *flex, *long) if c.case in ONLY.get(backend, (c.case,))]


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


class Race(NamedTuple):
    """What is compared: calls that compute the same, the tensors that take a gradient, the output's gradient."""

    calls: dict[str, Callable[[], Tensor]]
    inputs: tuple[Tensor, ...]
    dout: Tensor


def race(cell: Cell, backend: str, device: torch.device, tokens: int = TOKENS, width: int = WIDTH) -> Race:
    """The contestants of a cell; the first is ``backend``."""
    shape = (tokens // cell.length, width // cell.dim, cell.length, cell.dim)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    ours, theirs, bias = options(cell.case, shape[1], cell.length, device)
    calls = {
        n: partial(tilewise.attention, *inputs, backend=n, **ours)
        for n in (backend, *(() if cell.flex else peers(backend)), *((EFFICIENT,) if cell.case == "bias" else ()))
    }
    if cell.flex:
        calls[FLEX] = flex(inputs, **theirs)
    return Race(calls, (*inputs, *bias), dout)


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
    cell: Cell, backend: str, device: torch.device, timer: Callable[[Callable[[], Any]], float] = milliseconds,
    **sizes: int,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Milliseconds of each contestant, forward and backward alone, or the reason why there are none.

    The contestants take turns, there and back, and the better of two medians counts. One whose output is not that
    of the backend computes something else, and is not timed.
    """
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a compiled backward that runs again and again on one graph
    r = race(cell, backend, device, **sizes)
    found: dict[str, dict[str, Any]] = {}
    outs: dict[str, Tensor] = {}
    for name, call in r.calls.items():
        try:
            outs[name] = call()
            torch.autograd.grad(outs[name], r.inputs, r.dout, retain_graph=True)
            if backend in outs and (difference := apart(outs[name], outs[backend])) > 0.05:
                raise RuntimeError(f"its output is another one, {difference:.2g} apart")
        except Exception as e:  # the reason is recorded, and the others run
            outs.pop(name, None)
            found[name] = {"error": told(e)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in outs}
    for name in (*outs, *reversed(outs)):
        backward = partial(torch.autograd.grad, outs[name], r.inputs, r.dout, retain_graph=True)
        times[name].append((timer(r.calls[name]), timer(backward)))
    for name, both in times.items():
        found[name] = {"forward": min(f for f, _ in both), "backward": min(b for _, b in both)}
    return {name: found[name] for name in r.calls}


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
