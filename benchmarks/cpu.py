"""tiled against PyTorch's CPU flash kernel, in one alternating run: `make bench-cpu`.

For each cell both are called in turn, forward and backward apart, and the medians' ratio is printed: above 1, tiled
is the faster. Results are checked against each other before they are timed. ``--json FILE`` keeps the numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import tilewise
from tilewise import masks
from tilewise.bench.timing import alternate, turn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def medians(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each call; the calls take turns."""
    return [times.median for times in alternate([partial(turn, call) for call in calls], rounds)]


def cell(dtype: torch.dtype, length: int, dim: int, causal: bool, heads: int, rounds: int) -> dict[str, float]:
    """Seconds and ratios of one shape, (1, heads, length, dim)."""
    q, k, v = (torch.randn(1, heads, length, dim).to(dtype).requires_grad_() for _ in range(3))
    mask = masks.causal() if causal else None
    backends = ("torch_flash", "tiled")

    def forward(name: str) -> Tensor:
        return tilewise.attention(q, k, v, mask, backend=name)

    outs = [forward(name) for name in backends]
    dout = torch.randn_like(outs[0])

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    _check(outs, [backward(o) for o in outs])
    with torch.no_grad():
        fwd = medians([lambda n=n: forward(n) for n in backends], rounds)  # type: ignore[misc]
    bwd = medians([lambda o=o: backward(o) for o in outs], rounds)  # type: ignore[misc]
    flops = 4 * heads * dim * (length * (length + 1) // 2 if causal else length * length)
    return {
        "forward_ratio": fwd[0] / fwd[1],
        "backward_ratio": bwd[0] / bwd[1],
        "forward_gflops": flops / fwd[1] / 1e9,
        "backward_gflops": 2.5 * flops / bwd[1] / 1e9,
        **{f"{n}_forward_s": t for n, t in zip(backends, fwd, strict=True)},
        **{f"{n}_backward_s": t for n, t in zip(backends, bwd, strict=True)},
    }


def _check(outs: list[Tensor], grads: list[tuple[Tensor, ...]]) -> None:
    for a, b in [outs, *zip(*grads, strict=True)]:
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < 0.02, f"the two disagree by {float(error):.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--lengths", default="4096")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    a = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'dtype':6}{'L':>6}{'D':>5}  {'mask':8}{'forward':>9}{'backward':>9}   (times PyTorch's CPU flash)")
    rows = []
    for name, length, dim, causal in itertools.product(
        a.dtypes.split(","), map(int, a.lengths.split(",")), map(int, a.dims.split(",")), (False, True)
    ):
        row = cell(DTYPES[name], length, dim, causal, a.heads, a.rounds)
        mask = "causal" if causal else "full"
        print(f"{name:6}{length:6}{dim:5}  {mask:8}{row['forward_ratio']:9.2f}{row['backward_ratio']:9.2f}", flush=True)
        rows.append({"dtype": name, "length": length, "dim": dim, "mask": mask, "heads": a.heads, **row})
    if a.json:
        with open(a.json, "w") as f:
            record = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
            json.dump({**record, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
