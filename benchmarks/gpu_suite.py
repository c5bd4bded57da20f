"""The GPU suite: what the judge's small problems cannot show. `make gpu` runs it and records every check.

    python benchmarks/gpu_suite.py                  # all of it, one check after the other
    python benchmarks/gpu_suite.py --only graph     # those whose name has the word
    python benchmarks/gpu_suite.py --small causal   # a call's kernels on small shapes: what compute-sanitizer watches

A check is a function of a backend, a device and a case; sizes are parameters, so that its logic runs on a CPU too
(``tests/test_gpu_suite.py``). It returns a note with figures, raises ``Failed`` with what was found, or ``Absent``
where the machine has not got what it needs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from crew import told
from dense_by_rows import by_rows
from gpu_calls import REPEATABLE, Absent, Device, Failed, Repeatable, repeatable, require, same_bits, with_extra
from gpu_requests import FAMILIES, soak
from torch import Tensor

import tilewise
from tilewise import masks
from tilewise.memory import PeakMemory
from tilewise.testing import Problem, judge
from tilewise.testing.judge import compare
from tilewise.testing.problems import Call, Maker, qkv

ROOT = Path(__file__).resolve().parent.parent


class Check(NamedTuple):
    """One line of the record. ok None: it could not run."""

    name: str
    case: str
    ok: bool | None
    seconds: float
    note: str


# --- the same bits, whatever the circumstances ----------------------------------------------------


def repeats(backend: str, device: Device, case: str, length: int = 1000, times: int = 30) -> str:
    c = repeatable(case, device, length)
    first = _seeded(c, backend)
    for _ in range(times - 1):
        same_bits(_seeded(c, backend), first, "another run")
    other = repeatable(case, device, length)
    with torch.no_grad():
        for x in (*c.tensors, c.dout):
            x.fill_(float("nan"))
    same_bits(_seeded(other, backend), first, "a run with other tensors of the same numbers")
    return f"{times} runs, and one with other tensors, L={length}"


def _seeded(c: Repeatable, backend: str, seed: int = 3) -> list[Tensor]:
    torch.manual_seed(seed)
    return c.run(backend)


def captured(run: Callable[[], list[Tensor]], device: Device) -> tuple[Callable[[], None], list[Tensor]]:
    """run() as a CUDA graph: its replay, and the tensors that it writes. On a CPU, which has none: run() again."""
    if device.type != "cuda":
        written = run()

        def again() -> None:
            for x, y in zip(written, run(), strict=True):
                x.copy_(y)

        return again, written
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):  # whatever compiles or is made once
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = run()
    return graph.replay, written


def graphs(backend: str, device: Device, case: str, length: int = 500, replays: int = 3) -> str:
    """Forward and backward in one graph, replayed with other inputs, against eager calls from the same RNG state."""
    c = repeatable(case, device, length)
    replay, written = captured(lambda: c.run(backend), device)
    outs = []
    for n in range(replays):
        with torch.no_grad():
            for x in (*c.tensors, c.dout):
                x.copy_(x.roll(1, 0).neg())  # inputs that are new, of the same kind
        torch.manual_seed(n)
        replay()
        got = [x.clone() for x in written]
        same_bits(got, _seeded(c, backend, n), f"replay {n}")
        torch.manual_seed(100)
        replay()
        outs.append((got[0], written[0].clone()))
    if case == "dropout":
        require(all(not torch.equal(a, b) for a, b in outs), "two replays drew the same dropout mask")
        return f"{replays} replays as eager; another mask in each, that of eager from the same RNG state"
    require(all(torch.equal(a, b) for a, b in outs), "a replay with the same inputs differs")
    return f"{replays} replays as eager, L={length}"


def streams(backend: str, device: Device, case: str, length: int = 1000) -> str:
    c = repeatable(case, device, length)
    default = _seeded(c, backend)
    if device.type != "cuda":
        raise Absent("no streams on a CPU")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        other = _seeded(c, backend)
    torch.cuda.current_stream(device).wait_stream(side)
    same_bits(other, default, "on another stream")
    return f"L={length}"


def devices(backend: str, device: Device, case: str, length: int = 1000, other: Device | None = None) -> str:
    """On a device that is not the current one."""
    if other is None:
        count = torch.cuda.device_count()
        if count < 2:
            raise Absent(f"needs two GPUs, there is {count}")
        other = Device("cuda", ((device.index or 0) + 1) % count)
    here = _seeded(repeatable(case, device, length), backend)
    there = _seeded(repeatable(case, other, length), backend)
    require(there[0].device == other, f"the output is on {there[0].device}")
    same_bits(there, here, f"on {other} while {device} is current")
    return f"{other} and {device}"


def fill_free_memory(device: Device, megabytes: int = 512) -> None:
    """Leave NaN in the memory that the allocator will hand out next, in pieces of the sizes it keeps apart."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    pieces = [2**17] * 512 + [2**24] * (megabytes // 32) + [2**26] * (megabytes // 128)
    held = [torch.full((n,), 0xFF, dtype=torch.uint8, device=device) for n in pieces]  # NaN in every float dtype
    del held


def poisoned(backend: str, device: Device, case: str, length: int = 1000) -> str:
    c = repeatable(case, device, length)
    before = _seeded(c, backend)
    for n in range(2):
        fill_free_memory(device)
        same_bits(_seeded(c, backend), before, f"with NaN in free memory, run {n}")
    return f"L={length}"


HIDDEN = ("padding", "bias of all")


def hidden(backend: str, device: Device, case: str, length: int = 1000) -> str:
    """Keys and values that nobody sees may be NaN and infinite: no bit of the output or of a gradient changes."""
    c = repeatable(case, device, length)
    _, k, v, *bias = c.tensors
    unseen = (1, slice(None), slice(length // 3, None)) if case == "padding" else (..., slice(7, 8), slice(None))
    with torch.no_grad():
        for x in bias:
            x[..., 7] = -float("inf")
    before = c.run(backend)
    with torch.no_grad():
        k[unseen], v[unseen] = float("nan"), float("inf")
    same_bits(c.run(backend), before, "with keys that are NaN and values that are infinite where nobody looks")
    return f"L={length}"


@contextmanager
def no_sync(device: Device) -> Iterator[None]:
    """Within the block, an operation that waits for the GPU is an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def asynchronous(backend: str, device: Device, case: str, length: int = 500) -> str:
    c = repeatable(case, device, length)
    c.run(backend)  # compiles
    with no_sync(device):
        c.run(backend)
    return "forward and backward"


# --- the judge at real sizes ----------------------------------------------------------------------


FEATURES = ("causal", "window", "documents", "alibi", "softcap", "bias", "shared-bias", "dropout")


def real(m: Maker, feature: str, length: int, dim: int) -> Call:
    """B = 1 and two query heads on one key head; B = 3 and eight for a bias that is shared. Causal but for a bias."""
    batch, heads = (3, 8) if feature == "shared-bias" else (1, 2)
    t = qkv(m, batch, heads, length, length, dim, kv=heads // 2)
    options: dict[str, Any] = {"mask": masks.causal()}
    if feature == "window":
        options["mask"] = masks.causal() & masks.window(length // 8, 0)
    elif feature == "documents":
        ids = torch.arange(length, device=m.device) // (length // 9 + 1)
        options["mask"] = masks.causal() & masks.documents(ids)
    elif feature == "alibi":
        t["alibi"] = m.exact(torch.tensor([0.25, 0.01], dtype=torch.float64))
    elif feature == "softcap":
        options["softcap"] = 15.0
    elif feature == "bias":
        options = {}
        t["bias"] = m.randn(1, 2 if length <= 4096 else 1, length, length)
    elif feature == "shared-bias":
        options = {}
        t["bias"] = m.randn(1, heads, length, length)
    elif feature == "dropout":
        options |= {"dropout_p": 0.1, "seed": 7}
    return Call(t, options)


def real_sizes(backend: str, device: Device, case: str, lengths: tuple[int, ...] = (1024, 4096, 16384)) -> str:
    """The judge, all rows, forward and every gradient. case: feature, head dim, dtype."""
    feature, dim, dtype = case.split()
    if "bias" in feature and case != "bias 64 bfloat16":  # one L x L tensor of 16k is enough at a time
        lengths = tuple(n for n in lengths if n <= 4096)
    verdicts = []
    for n in lengths:
        make = partial(real, feature=feature, length=n, dim=int(dim))
        problem = Problem(f"{feature} D={dim} L={n}", feature, make)
        with by_rows():
            verdicts += judge(problem, backend, getattr(torch, dtype), device)
    return _judged(verdicts)


def _judged(verdicts: list[Any]) -> str:
    bad = [f"{v.problem} {v.quantity}: {v.note}" for v in verdicts if not v.ok or v.quantity == "refused"]
    require(not bad, "; ".join(bad))
    worst = max(verdicts, key=lambda v: v.error / v.limit)
    return f"{len(verdicts)} quantities, the worst {worst.error / worst.limit:.2f} of its limit ({worst.quantity})"


def long_causal(backend: str, device: Device, case: str, length: int = 131_072, scores: int = 2**26) -> str:
    """One head, D = 64, bf16: peak memory of forward and backward, and the judge on all rows."""
    c = Call(qkv(Maker("long", torch.bfloat16, device), 1, 1, length, length, 64), {"mask": masks.causal()})
    q, k, v = (c.tensors[n].bfloat16().requires_grad_() for n in "qkv")
    dout = torch.ones_like(q)
    with requested(device) as memory:
        out = tilewise.attention(q, k, v, masks.causal(), backend=backend)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    del out, grads
    with by_rows(scores):
        verdicts = judge(Problem(f"causal L={length}", "long", lambda m: c), backend, torch.bfloat16, device)
    return f"{_judged(verdicts)}; {memory.peak / 2**20:.0f} MiB beyond the inputs"


# --- offsets --------------------------------------------------------------------------------------

FAR = ("batch stride", "row stride within a tile", "long rows", "long tensors", "long bias")


def far_offsets(backend: str, device: Device, case: str, far: int = 2**31) -> str:
    """Tensors whose offsets pass 2**31; ``far`` is that number."""
    if case == "long tensors":
        return _long_tensors(backend, device, far)
    if case == "long bias":
        return _long_bias(backend, device, far)
    c = repeatable("causal", device, max(300, far // 2**19) if case == "long rows" else 300)
    tensors = tuple(_spread(x.detach()[:1] if "row" in case else x.detach(), case, far) for x in (*c.tensors, c.dout))
    compact = Repeatable(c.call, tuple(x.contiguous().requires_grad_() for x in tensors[:3]), tensors[3].contiguous())
    spread = Repeatable(c.call, tuple(x.requires_grad_() for x in tensors[:3]), tensors[3])
    span = max(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in tensors)
    require(span >= far, f"the largest offset is only {span}")
    return f"offsets up to {span:,}; {_against_dense(spread.run(backend), compact)}"


def _spread(x: Tensor, case: str, far: int) -> Tensor:
    """x with one stride so large that offsets pass ``far``."""
    _, h, n, d = x.shape
    if case == "batch stride":
        strides = (far + 16, n * d, d, 1)
    elif case == "row stride within a tile":
        strides = (0, d, max(far // 256 + 16, h * d), 1)  # 256 rows: no tile has more
    else:
        strides = (0, d, max(far // (n - 1) // 16 * 16 + 16, h * d), 1)
    last = sum((size - 1) * s for size, s in zip(x.shape, strides, strict=True))
    return x.new_empty(last + 1).as_strided(x.shape, strides).copy_(x)


def _against_dense(got: list[Tensor], c: Repeatable) -> str:
    """Each tensor by the judge's budget."""
    exact, dense = c.to(torch.float64).run("dense"), c.run("dense")
    worst = 0.0
    for n, (x, d, e) in enumerate(zip(got, dense, exact, strict=True)):
        m = compare(x.double(), d.double(), e, got[0].dtype)
        require(m.ok, f"{'the output' if n == 0 else f'gradient {n}'}: {m.note}")
        worst = max(worst, m.error / m.limit)
    return f"the worst error {worst:.2f} of its limit"


def _long_tensors(backend: str, device: Device, far: int) -> str:
    """q, its output and their gradients have more than ``far`` elements; the first, a middle and the last batch."""
    heads, rows, keys, dim = 8, min(8192, far // 1024), 32, 64
    batch = far // (heads * rows * dim) + 1
    g = torch.Generator(device).manual_seed(1)

    def randn(n: int) -> Tensor:
        return torch.randn(batch, heads, n, dim, generator=g, device=device, dtype=torch.bfloat16)

    q, k, v = (randn(n).requires_grad_() for n in (rows, keys, keys))
    dout = randn(rows)
    require(q.numel() > far, f"q has only {q.numel()} elements")
    call = tilewise.attention
    got = Repeatable(call, (q, k, v), dout).run(backend)
    notes = []
    for b in (0, batch // 2, batch - 1):
        one = slice(b, b + 1)
        few = Repeatable(call, tuple(x.detach()[one].requires_grad_() for x in (q, k, v)), dout[one])
        notes.append(_against_dense([x[one] for x in got], few))
    return f"{q.numel():,} elements; {notes[-1]}"


def _long_bias(backend: str, device: Device, far: int) -> str:
    """A bias and its gradient of more than ``far`` elements; the last rows are judged."""
    keys = int((far / 2) ** 0.5) // 32 * 32
    rows, dim, last = far // keys + 64, 64, 64
    g = torch.Generator(device).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16)

    q, k, v, dout = (randn(1, 1, n, dim) for n in (rows, keys, keys, rows))
    bias = randn(1, 1, rows, keys)
    require(bias.numel() > far, f"the bias has only {bias.numel()} elements")
    call = partial(with_extra, names=("bias",))
    out, dq, _, _, dbias = Repeatable(call, tuple(x.requires_grad_() for x in (q, k, v, bias)), dout).run(backend)
    few = tuple(x.detach().requires_grad_() for x in (q[:, :, -last:], k, v, bias[:, :, -last:]))
    c = Repeatable(call, few, dout[:, :, -last:])
    exact, dense = c.to(torch.float64).run("dense"), c.run("dense")
    for name, x, n in (("out", out, 0), ("dq", dq, 1), ("dbias", dbias, 4)):
        m = compare(x[:, :, -last:].double(), dense[n].double(), exact[n], torch.bfloat16)
        require(m.ok, f"{name} of the last rows: {m.note}")
    return f"a bias of {bias.numel():,} elements, its last {last} rows"


# --- memory ---------------------------------------------------------------------------------------


@dataclass
class Requested:
    """Bytes asked for at the peak and beyond what was alive before; ``allocated`` counts the allocator's blocks."""

    peak: int = 0
    allocated: int = 0


@contextmanager
def requested(device: Device) -> Iterator[Requested]:
    found = Requested()
    if device.type != "cuda":
        with PeakMemory(device) as memory:
            yield found
        found.peak = found.allocated = memory.peak
        return

    def now(kind: str, which: str) -> int:
        return torch.cuda.memory_stats(device)[f"{kind}_bytes.all.{which}"]

    gc.collect()  # what an earlier check left in cycles would be freed within the block
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = {kind: now(kind, "current") for kind in ("requested", "allocated")}
    yield found
    torch.cuda.synchronize(device)
    found.peak = now("requested", "peak") - before["requested"]
    found.allocated = now("allocated", "peak") - before["allocated"]


MEMORY = ("causal", "documents", "alibi", "shared bias", "own bias")


def _sums(c: Repeatable) -> int:
    """Bytes of what the backward of ``hopper`` makes beside delta: lse and delta in whole tiles; up to D = 128 dQ in
    fp32 and a turn of each tile; two tickets; and a byte for each 64 rows that says whether they are finite.
    """
    from tilewise.backends.hopper import config

    (b, h, n, d), (_, kv, keys, _) = c.tensors[0].shape, c.tensors[1].shape
    cfg = config.choose_backward(d, d)
    m = cfg.block_m
    tiles = b * h * -(-n // m)
    odd = b * h * -(-n // config.ROWS) + b * kv * -(-keys // cfg.block_n) * 2
    return 8 * tiles * m + cfg.sums * 4 * tiles * (m * d + 1) + 8 + odd


def memory(backend: str, device: Device, case: str, length: int = 4000) -> str:
    """Peak bytes beyond the inputs: forward out and lse; backward delta, the gradients and what ``hopper`` sums up in.
    Tile lists, and whether a tile is finite, on top.
    """
    c = repeatable(case, device, length)
    c.run(backend)  # what is made once
    rows = 4 * c.dout[..., 0].numel()  # a row statistic in fp32
    low = rows if "bias" in case else 0  # ``Request.keeps_low``
    forward = c.dout.nbytes + rows + low
    backward = rows + sum(x.nbytes for x in c.tensors) + (_sums(c) if backend == "hopper" else 0)
    lists = length**2 // 64 if case == "documents" else 0  # O(tiles): under a bit for eight pairs
    small = 2**16 if case == "alibi" else 0  # the slopes' gradient, one number for each tile of queries
    small += rows // 32  # a byte for each tile of queries and of keys, of 16 or more
    with requested(device) as first:
        out = c.call(*c.tensors, backend=backend)
    with requested(device) as second:
        grads = torch.autograd.grad(out, c.tensors, c.dout)
    del out, grads
    for name, found, expected in (("forward", first, forward), ("backward", second, backward)):
        most = expected + lists + small
        require(
            expected <= found.peak <= most,
            f"{name}: {found.peak:,} bytes at the peak, computed {expected:,}" + f" to {most:,}" * (most > expected),
        )
    return (
        f"L={length}: forward {first.peak:,} bytes (computed {forward:,}), backward {second.peak:,} ({backward:,}); "
        f"in the allocator's blocks {first.allocated:,} and {second.allocated:,}"
    )


# --- compilation ----------------------------------------------------------------------------------


def compiled() -> int:
    """How many specialisations of this package's Triton kernels this process has."""
    from triton.runtime.jit import JITFunction

    modules = [m for name, m in list(sys.modules.items()) if name.startswith("tilewise.backends.") and m is not None]
    kernels = {id(x): x for m in modules for x in vars(m).values() if isinstance(x, JITFunction)}
    return sum(len(entry[0]) for fn in kernels.values() for entry in fn.device_caches.values())


def recompilation(
    backend: str, device: Device, case: str, warm: tuple[int, ...] = (256, 260, 257),
    lengths: tuple[int, ...] = (384, 300, 331, 514, 772, 1024),
) -> str:  # fmt: skip
    """Warm lengths: one for each class of divisibility that a stride of 4 heads can have."""
    for n in warm:
        repeatable(case, device, n).run(backend)
    before = compiled()
    for n in lengths:
        repeatable(case, device, n).run(backend)
    more = compiled() - before
    require(more == 0, f"{more} kernels compiled anew for lengths {lengths} after {warm}")
    return f"{before} kernels after L={', '.join(map(str, warm))}; none for {len(lengths)} other lengths"


# --- models ---------------------------------------------------------------------------------------


def _module(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def training(backend: str, device: Device, case: str, steps: int = 10, length: int = 256) -> str:
    """examples/train_gpt.py against dense, in fp32."""
    t = _module(ROOT / "examples" / "train_gpt.py")
    mine, dense = (t.train(name, steps, length, device) for name in (backend, "dense"))
    m = t.compared(mine, dense, steps, length, device)
    require(m.ok, f"the curves part: {m.note}; {mine.tolist()} and {dense.tolist()}")
    return (
        f"{steps} steps, loss {mine[0]:.4f} to {mine[-1]:.4f}; error against fp64 {m.error:.1e} "
        f"(dense {m.dense_error:.1e}, budget {m.limit:.1e})"
    )


MODELS = ("llama", "gemma2", "gpt_oss")


def models(backend: str, device: Device, case: str) -> str:
    """The tiny models of tests/test_transformers.py: logits and gradients within the budget of eager attention."""
    for package in ("transformers", "pytest"):  # that file needs both
        if importlib.util.find_spec(package) is None:
            raise Absent(f"{package} is not installed")
    t = _module(ROOT / "tests" / "test_transformers.py")
    ids, mask = (x.to(device) for x in t.batch("left"))
    three = tuple(m.to(device) for m in t.models(case))
    with tilewise.use_backend(backend):
        ref, base, got = t.judged(three, lambda m: t.step(m, ids, mask))
    try:
        t.assert_within_budget(ref, base, got)
    except AssertionError as e:
        raise Failed(str(e)) from None
    return f"{len(got)} tensors within the budget"


# --- compute-sanitizer ----------------------------------------------------------------------------

TOOLS = ("memcheck", "racecheck")
# Backends that take only some calls: the cases for them, by the words that make them up.
ONLY: dict[str, frozenset[str]] = {
    "hopper": frozenset({
        "causal", "window", "softcap", "sinks", "ragged", "padding", "D=64", "D=128", "D=256", "64", "128", "bf16",
        "bfloat16", "float16", *TOOLS,
    })
}  # fmt: skip

# Every kernel of a bias and of none, and the lists; of hopper the kernels of each kind of backward.
SMALL = ("causal", "documents", "shared bias", "own bias", "bias of all")
SMALL_OF = {"hopper": ("causal", "ragged", "window, softcap, sinks, D=128", "causal, D=256", "ragged, D=256")}


def _takes(backend: str, case: str) -> bool:
    return backend not in ONLY or ONLY[backend].issuperset(case.replace(",", "").split())


def small(backend: str, device: Device, case: str) -> None:
    """A call on shapes of several tiles."""
    name, _, dim = case.partition(", D=")
    c = repeatable(name, device, 300 if backend in SMALL_OF else 80, dim=int(dim or 64))
    # In this thread: PyTorch's own thread for the backward may still hold the graph when Python ends, and aborts then.
    with torch.autograd.set_multithreading_enabled(False):
        c.run(backend)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sanitizer(backend: str, device: Device, case: str, seconds: float = 70) -> str:
    """The kernels of a call under compute-sanitizer."""
    kind, _, call = case.partition(", ")
    at = shutil.which("compute-sanitizer", path=os.pathsep.join((*_packaged(), os.environ.get("PATH", ""), TOOLKIT)))
    if at is None:
        raise Absent("compute-sanitizer is not installed")
    if kind == "racecheck" and backend in SMALL_OF and not follows_mbarriers(at):
        raise Absent(f"{at} does not follow mbarriers: pip install nvidia-cuda-sanitizer-api")
    program = [sys.executable, __file__, "--small", call, "--backend", backend, "--device", str(device)]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    watched = [at, "--tool", kind, "--target-processes", "application-only", *program]
    try:
        plain = subprocess.run(program, env=env, capture_output=True, text=True, timeout=seconds)  # compiles
        require(plain.returncode == 0, f"without the tool: {plain.stderr[-500:]}")
        said = subprocess.run(watched, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as e:
        raise Absent(f"{e.cmd[0]} did not end within {seconds:.0f} s") from None
    return verdict(said.stdout + said.stderr)


TOOLKIT = "/usr/local/cuda/bin"
FOLLOWS_MBARRIERS = (2026, 1)  # racecheck, from this version on


def _packaged() -> list[str]:
    """Where the package nvidia-cuda-sanitizer-api has its tool: it may be newer than the toolkit's."""
    found = importlib.util.find_spec("nvidia")
    return [f"{x}/cu13/bin" for x in (found and found.submodule_search_locations) or ()]


def follows_mbarriers(tool: str) -> bool:
    """Whether racecheck is right about warps that wait at mbarriers.

    Before, it forgets BAR.SYNC beside such a wait, and takes what Triton tells the warps of a specialised kernel at its
    begin and end for races: in a kernel of ten lines too, with an mbarrier and not without.
    """
    said = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version (\d+)\.(\d+)", said)
    return found is not None and tuple(map(int, found.groups())) >= FOLLOWS_MBARRIERS


def verdict(said: str) -> str:
    """compute-sanitizer's own summary; Failed if it counts anything that is not ``handed_on``."""
    found = re.findall(r"=+ *((?:ERROR|RACECHECK) SUMMARY: .*)", said)
    if not found:
        raise Absent(f"the tool ended without a summary: {said[-300:]}")
    if re.match(r"\w+ SUMMARY: 0 ", found[-1]):
        return found[-1]
    require(handed_on(said, found[-1]), f"{found[-1]}; {said[:400]}")
    return f"{found[-1]}: work items that a warp hands on"


def handed_on(said: str, summary: str) -> bool:
    """Whether all that racecheck counts is the store and the load of a work item of ``hopper``, which are no race.

    All 32 lanes of a warp store the same number at the same place, bar.warp.sync waits for all, and lane 0 arrives at
    the mbarrier that the readers wait at. That orders all of it, but racecheck counts an arrival for one lane alone: it
    names the store of lane 31, which is the last, and names it with a BAR.SYNC of the warp in between too.
    """
    from tilewise.backends.hopper import pipeline

    where = set()
    for kind, fn in (("Write", pipeline.hand_on), ("Read", pipeline.taken)):
        lines, first = inspect.getsourcelines(fn.fn)
        where |= {(kind, "pipeline.py", str(first + n)) for n in range(len(lines))}
    accesses = re.findall(r"(Read|Write) access at .* in (\S+):(\d+)", said)
    hazards = said.count("Race reported between ")
    whole = len(accesses) == said.count(" access at ") and f" {hazards} hazard" in summary
    return whole and hazards > 0 and where.issuperset(accesses)


# --- all of it ------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[str, Device, str], str]] = {
    "same bits 30 times": repeats,
    "CUDA graph": graphs,
    "another stream": streams,
    "another device": devices,
    "NaN in free memory": poisoned,
    "no host sync": asynchronous,
    "hidden NaN": hidden,
    "real sizes": real_sizes,
    "131,072 causal": long_causal,
    "offsets past 2^31": far_offsets,
    "memory": memory,
    "no recompilation": recompilation,
    "random requests": soak,
    "training": training,
    "transformers": models,
    "compute-sanitizer": sanitizer,
}
UNCHANGED = tuple(CHECKS)[:6]  # the same bits, whatever the circumstances

Job = tuple[tuple[str, str], ...]  # (check, case) of those that share what they compile


def jobs(backend: str) -> list[Job]:
    """What one process each should do, the longest first."""
    alone: list[Job] = [tuple(("offsets past 2^31", c) for c in FAR), (("131,072 causal", "D=64 bf16"),)]
    alone += [
        tuple(("compute-sanitizer", f"{tool}, {call}") for tool in TOOLS) for call in SMALL_OF.get(backend, SMALL)
    ]
    alone += [(("training", "ten steps"),), *((("transformers", name),) for name in MODELS)]
    circumstances = [tuple((check, case) for check in UNCHANGED) for case in REPEATABLE]
    linear = [(("memory", case),) for case in MEMORY] + [(("hidden NaN", case),) for case in HIDDEN]
    compiling = [(("no recompilation", case),) for case in ("causal", "documents", "shared bias")]
    sizes = [
        (("real sizes", f"{feature} {dim} {dtype}"),)
        for dtype in ("bfloat16", "float16", "float32")
        for dim in (64, 128)
        for feature in FEATURES
    ]
    random: list[Job] = [(("random requests", str(n)),) for n in range(FAMILIES if backend == "hopper" else 0)]
    every = [*alone, *circumstances, *linear, *compiling, *sizes]
    chosen = (tuple(pair for pair in job if _takes(backend, pair[1])) for job in every)
    return [*(job for job in chosen if job), *random]


def run(job: Job, backend: str, device: Device) -> list[Check]:
    """The checks of a job; a failure is a line of the record, and the next check runs."""
    return [_one(name, case, backend, device) for name, case in job]


def _one(name: str, case: str, backend: str, device: Device) -> Check:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # other processes need it
    start = time.monotonic()
    ok: bool | None
    try:
        ok, note = True, CHECKS[name](backend, device, case)
    except Absent as e:
        ok, note = None, str(e)
    except Failed as e:
        ok, note = False, str(e)
    except Exception as e:  # whatever went wrong belongs into the record
        ok, note = False, told(e)
    return Check(name, case, ok, round(time.monotonic() - start, 2), note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", default="", help="part of a check's or a case's name")
    parser.add_argument("--small", metavar="CALL", help="only this")
    a = parser.parse_args()
    device = Device(a.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if a.small:
        small(a.backend, device, a.small)
        return 0
    failed = 0
    for job in jobs(a.backend):
        for pair in job:
            if a.only in " ".join(pair):
                (check,) = run((pair,), a.backend, device)
                failed += check.ok is False
                word = {True: "ok", False: "FAILED", None: "not run"}[check.ok]
                print(f"{word:8}{check.name}: {check.case} ({check.seconds} s) {check.note}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
