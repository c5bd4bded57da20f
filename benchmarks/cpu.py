"""tiled against PyTorch's fastest CPU path for the same call, in alternating runs: `make bench-cpu`.

For each cell both are called in turn, forward and backward apart, and the medians' ratio is printed: above 1, tiled
is the faster. Where both compute the same, that is checked before it is timed. Then follow RMS errors against fp64,
the speed of fp32 products, and the time of a call too small to compute much. ``--json FILE`` keeps the numbers.

    plain     8 heads, without a mask and causal: the cells of the flash kernel
    masked    what tiled skips and PyTorch does not: compared with PyTorch's full causal attention
    features  what PyTorch's flash kernel does not take, so that PyTorch's own choice is the math path
    small     many short padded sequences, as sentence models have them; one sequence of one head
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import masks, philox_loop
from tilewise.backends import products
from tilewise.bench.timing import alternate, turn
from tilewise.masks import Mask

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROUPS = ("plain", "masked", "features", "small")
WINDOW, DOCUMENTS, LONG = 512, 16, 16384
DROPOUT = 0.1


class Cell(NamedTuple):
    """A shape and two calls of it. ``alike``: both compute the same, up to rounding."""

    group: str
    case: str
    dtype: str
    shape: tuple[int, int, int, int]  # (B, H, L, D)
    mask: Mask | None = None
    ours: Mapping[str, Any] = MappingProxyType({})
    theirs: Mapping[str, Any] = MappingProxyType({})
    dim_v: int | None = None
    bias: bool = False  # a trainable one, (1, H, L, L)
    alike: bool = True


def cells() -> Iterator[Cell]:
    causal = masks.causal()
    for dtype, n, d in itertools.product(DTYPES, (1024, 4096), (64, 128)):
        yield Cell("plain", "full", dtype, (1, 8, n, d))
        yield Cell("plain", "causal", dtype, (1, 8, n, d), causal, theirs={"is_causal": True})
    ids = torch.arange(LONG) // (LONG // DOCUMENTS)
    full = {"theirs": {"is_causal": True}, "alike": False}
    yield Cell(
        "masked", f"causal & window {WINDOW}", "fp32", (1, 8, LONG, 64), causal & masks.window(WINDOW, 0), **full
    )
    yield Cell(
        "masked", f"causal & {DOCUMENTS} documents", "fp32", (1, 8, LONG, 64), causal & masks.documents(ids), **full
    )
    p = {"dropout_p": DROPOUT}
    yield Cell("features", "dropout", "fp32", (1, 8, 2048, 64), ours=p, theirs=p, alike=False)  # not the same bits drop
    yield Cell("features", "Dv = 2 D", "fp32", (1, 8, 2048, 64), dim_v=128)
    yield Cell("features", "trainable bias", "fp32", (1, 8, 2048, 64), bias=True)
    lengths = torch.randint(16, 129, (32,), generator=torch.Generator().manual_seed(0))
    padding = (torch.arange(128) < lengths[:, None])[:, None, None]
    yield Cell("small", "padded", "fp32", (32, 12, 128, 32), masks.key_lengths(lengths), theirs={"attn_mask": padding})
    yield Cell("small", "one head, full", "fp32", (1, 1, 4096, 64))
    yield Cell("small", "one head, causal", "fp32", (1, 1, 4096, 64), causal, theirs={"is_causal": True})


def race(cell: Cell) -> tuple[tuple[Tensor, ...], list[Callable[[], Tensor]]]:
    """The inputs that take a gradient; PyTorch's call, and tiled's."""
    b, h, n, d = cell.shape
    shapes = [cell.shape, cell.shape, (b, h, n, cell.dim_v or d), *([(1, h, n, n)] if cell.bias else [])]
    inputs = tuple(torch.randn(s, dtype=DTYPES[cell.dtype]).requires_grad_() for s in shapes)
    ours, theirs = dict(cell.ours), dict(cell.theirs)
    if cell.bias:
        ours["bias"] = theirs["attn_mask"] = inputs[3]
    return inputs, [
        partial(F.scaled_dot_product_attention, *inputs[:3], **theirs),
        partial(tilewise.attention, *inputs[:3], cell.mask, backend="tiled", **ours),
    ]


def medians(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each call; the calls take turns."""
    return [times.median for times in alternate([partial(turn, call) for call in calls], rounds)]


def measure(cell: Cell, rounds: int) -> dict[str, float]:
    """Seconds of PyTorch and tiled, and the ratios, of forward and backward."""
    inputs, calls = race(cell)
    outs = [call() for call in calls]
    dout = torch.randn_like(outs[0])

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    if cell.alike:
        _check(outs, [backward(o) for o in outs])
    with torch.no_grad():
        forward = medians(list(calls), rounds)
    back = medians([partial(backward, o) for o in outs], rounds)
    return {
        "torch_forward_s": forward[0],
        "tiled_forward_s": forward[1],
        "torch_backward_s": back[0],
        "tiled_backward_s": back[1],
        "forward_ratio": forward[0] / forward[1],
        "backward_ratio": back[0] / back[1],
    }


def _check(outs: list[Tensor], grads: list[tuple[Tensor, ...]]) -> None:
    for a, b in [outs, *zip(*grads, strict=True)]:
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < 0.02, f"the two disagree by {float(error):.3g}"


def errors(dtype: str) -> dict[str, list[float]]:
    """RMS error against fp64, divided by the RMS value, of O, dQ, dK and dV: of PyTorch and of tiled."""
    inputs, calls = race(Cell("", "", dtype, (1, 8, 1024, 64), masks.causal(), theirs={"is_causal": True}))
    dout = torch.randn(1, 8, 1024, 64, dtype=DTYPES[dtype])

    def results(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> list[Tensor]:
        out = call()
        return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]

    exact_inputs = tuple(x.detach().double().requires_grad_() for x in inputs)
    exact = results(
        partial(tilewise.attention, *exact_inputs, masks.causal(), backend="dense"), exact_inputs, dout.double()
    )
    found = [results(call, inputs, dout) for call in calls]
    return {
        name: [float((a - e).square().mean().sqrt() / e.square().mean().sqrt()) for a, e in zip(of, exact, strict=True)]
        for name, of in zip(("torch", "tiled"), found, strict=True)
    }


def libraries(rounds: int) -> list[float]:
    """GFLOP/s of the fp32 product (4, 512, 64) x (4, 64, 512), as PyTorch computes it and within ``tiled``."""
    a, b, out = torch.randn(4, 512, 64), torch.randn(4, 64, 512), torch.empty(4, 512, 512)

    def as_tiled() -> None:
        with products.quick(a.device):
            torch.bmm(a, b, out=out)

    seconds = medians([partial(torch.bmm, a, b, out=out), as_tiled], rounds)
    return [2 * out.numel() * a.shape[2] / s / 1e9 for s in seconds]


def overhead(rounds: int) -> list[float]:
    """Median seconds of SDPA, of attention() and of our scaled_dot_product_attention() at L = 16, D = 64."""
    q, k, v = (torch.randn(1, 1, 16, 64) for _ in range(3))
    calls: list[Callable[[], object]] = [
        partial(f, q, k, v)
        for f in (F.scaled_dot_product_attention, tilewise.attention, tilewise.scaled_dot_product_attention)
    ]
    with torch.no_grad():
        return medians(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(GROUPS), help="which cells, by default all: %(default)s")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of the cells, by default %(default)s")
    parser.add_argument("--lengths", type=int, nargs="+", help="only cells of these L")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(), "numba": philox_loop.INSTALLED, "rounds": a.rounds,
        "rows": [],
    }  # fmt: skip
    loop = "dropout's words by numba" if philox_loop.INSTALLED else "no numba for dropout's words"
    print(f"torch {record['torch']}, {record['threads']} threads, {record['capability']}, {loop}")
    print("\ntimes as fast as PyTorch, medians of calls in turn")
    print(f"{'group':9} {'case':23} {'dtype':5} {'(B, H, L, D)':20} {'forward':>8} {'backward':>9}")
    for cell in cells():
        if cell.group not in a.groups.split(",") or cell.dtype not in a.dtypes.split(","):
            continue
        if a.lengths and cell.shape[2] not in a.lengths:
            continue
        row = measure(cell, a.rounds)
        about = f"{cell.group:9} {cell.case:23} {cell.dtype:5} {cell.shape!s:20}"
        print(f"{about} {row['forward_ratio']:8.2f} {row['backward_ratio']:9.2f}", flush=True)
        record["rows"].append({**{n: getattr(cell, n) for n in ("group", "case", "dtype", "shape")}, **row})
    print("\nRMS error against fp64 in parts of the RMS value, (1, 8, 1024, 64), causal")
    print(f"{'dtype':6}{'':6} {'O':>9} {'dQ':>9} {'dK':>9} {'dV':>9}")
    record["errors"] = {dtype: errors(dtype) for dtype in a.dtypes.split(",")}
    for dtype, by in record["errors"].items():
        for name, of in by.items():
            print(f"{dtype:6}{name:6} " + " ".join(f"{x:9.2e}" for x in of))
    record["gflops"] = libraries(max(a.rounds, 15))
    print("\nfp32 products: PyTorch's {:.0f} GFLOP/s, within tiled {:.0f}".format(*record["gflops"]))
    record["overhead_s"] = overhead(max(a.rounds, 15))
    sdpa, ours, drop_in = (1e6 * s for s in record["overhead_s"])
    print(f"\na call at L = 16, D = 64: SDPA {sdpa:.0f} us, attention {ours:.0f} us, its drop-in {drop_in:.0f} us")
    if a.json:
        with open(a.json, "w") as f:
            json.dump(record, f, indent=1)


if __name__ == "__main__":
    main()
