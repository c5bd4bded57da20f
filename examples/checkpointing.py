"""Training attention in less memory: recompute it, tile it, or look less far. Measured on one small transformer.

    dense                S and P of every layer are kept for the backward
    dense + checkpoint   a layer keeps its input only, and is computed once more in the backward: what is kept falls,
                         but while a layer is at work its S and P are there, L x L
    tiled                a layer keeps its rows' log-sum-exp; S and P exist a tile at a time, recomputed in the backward
    tiled + checkpoint   the two together: neither S and P nor what the rest of a layer would keep
    tiled + window       each query sees the last keys only: less work, and another function

    python examples/checkpointing.py --json rows.json --plot memory.png

All have the same weights and input, forward and backward, causal. `kept` is what the forward leaves for the
backward, and the output; `peak` is the most alive at once in a step. Both are beyond weights and input.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import masks
from tilewise.masks import Mask
from tilewise.memory import PeakMemory

ROUNDS = 3
MIB = 2**20


class Sizes(NamedTuple):
    """Of the model and of its input, (1, length, heads * dim)."""

    length: int
    layers: int = 4
    heads: int = 2
    dim: int = 64


class Way(NamedTuple):
    """How a layer's attention is computed."""

    name: str
    backends: tuple[str, ...]
    mask: Mask
    checkpointed: bool = False


def ways(window: int) -> list[Way]:
    tiled, near = (
        ("triton", "tiled"),
        masks.causal() & masks.window(window - 1, 0),
    )  # a window counts the query's own key
    return [
        Way("dense", ("dense",), masks.causal()),
        Way("dense + checkpoint", ("dense",), masks.causal(), checkpointed=True),
        Way("tiled", tiled, masks.causal()),
        Way("tiled + checkpoint", tiled, masks.causal(), checkpointed=True),
        Way("tiled + window", tiled, near),
    ]


class Layer(nn.Module):
    """Attention and a feed-forward net, each behind a norm and beside a residual connection."""

    def __init__(self, heads: int, dim: int):
        super().__init__()
        width = heads * dim
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, way: Way) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, L, D)
        o = tilewise.attention(q, k, v, way.mask, backend=way.backends)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def forward(layers: nn.ModuleList, x: Tensor, way: Way) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, way, use_reentrant=False) if way.checkpointed else layer(x, way)
    return x


def step(layers: nn.ModuleList, x: Tensor, way: Way) -> list[Tensor]:
    """The output and the gradients of its mean square with respect to the input and all weights."""
    out = forward(layers, x, way)
    return [out.detach(), *torch.autograd.grad(out.square().mean(), [x, *layers.parameters()])]


def measure(layers: nn.ModuleList, x: Tensor, way: Way) -> tuple[dict[str, Any], list[Tensor]]:
    """Memory, then time, and what a step returns."""
    with PeakMemory(x.device) as kept:
        out = forward(layers, x, way)
    del out
    with PeakMemory(x.device) as memory:
        found = step(layers, x, way)
    times = [seconds(layers, x, way) for _ in range(ROUNDS)]
    row = {"way": way.name, "kept_bytes": kept.kept, "peak_bytes": memory.peak, "seconds": statistics.median(times)}
    return row, found


def seconds(layers: nn.ModuleList, x: Tensor, way: Way) -> float:
    start = time.perf_counter()
    step(layers, x, way)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start


def difference(found: list[Tensor], reference: list[Tensor]) -> float:
    """The largest difference, each tensor's beside its largest number."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, reference, strict=True))


def compare(sizes: Sizes, window: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(sizes.heads, sizes.dim) for _ in range(sizes.layers)).to(device)
    x = torch.randn(1, sizes.length, sizes.heads * sizes.dim, device=device, requires_grad=True)
    step(layers, x[:, :64].detach().requires_grad_(), ways(window)[2])  # the first call is not like the others
    rows: list[dict[str, Any]] = []
    for way in ways(window):
        row, found = measure(layers, x, way)
        if not rows:
            reference = found
        rows.append({**row, "difference_from_dense": difference(found, reference)})
    one = sizes.heads * sizes.length**2 * x.element_size()
    return {
        **sizes._asdict(), "window": window, "device": device, "dtype": "float32", "threads": torch.get_num_threads(),
        "score_matrix_bytes": one, "rows": rows,
    }  # fmt: skip


def table(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['layers']} layers, {facts['heads']} heads of {facts['dim']}, {facts['length']} tokens, a window of "
        f"{facts['window']}, fp32 on {facts['device']}. S of one layer: {facts['score_matrix_bytes'] / MIB:.1f} MiB",
        f"{'':20}{'kept':>12}{'peak':>12}{'step':>12}   difference from dense",
    ]
    for row in facts["rows"]:
        kept, peak = (f"{row[name] / MIB:.1f} MiB" for name in ("kept_bytes", "peak_bytes"))
        far = f"{row['difference_from_dense']:.1e}"
        lines.append(f"{row['way']:20}{kept:>12}{peak:>12}{1e3 * row['seconds']:>9.0f} ms   {far}")
    return "\n".join(lines)


def draw(facts: dict[str, Any], path: str) -> None:
    """Memory and time of each way, side by side."""
    from matplotlib.figure import Figure

    rows = facts["rows"]
    names, y = [row["way"] for row in rows], range(len(rows))
    figure = Figure(figsize=(10, 3), layout="constrained")
    memory, speed = figure.subplots(1, 2, sharey=True)
    for offset, key, label in ((-0.2, "peak_bytes", "peak of a step"), (0.2, "kept_bytes", "kept for the backward")):
        bars = memory.barh([i + offset for i in y], [row[key] / MIB for row in rows], 0.4, label=label)
        memory.bar_label(bars, fmt="%.0f", padding=2)
    memory.set(yticks=y, yticklabels=names, xlabel="MiB beyond weights and input")
    memory.margins(x=0.12)
    memory.legend()
    speed.bar_label(speed.barh(y, [1e3 * row["seconds"] for row in rows], 0.6, color="tab:gray"), fmt="%.0f", padding=2)
    speed.set(xlabel="ms, forward and backward")
    speed.margins(x=0.12)
    memory.invert_yaxis()
    figure.suptitle(f"{facts['length']} tokens, {facts['layers']} layers, fp32 on {facts['device']}")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1280, help="tokens (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--window", type=int, default=128, help="keys that a query sees, itself included (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw them (needs matplotlib)")
    a = parser.parse_args(argv)
    if min(a.length, a.layers, a.window) < 1:
        parser.error(f"--length, --layers and --window must be at least 1, got {a.length}, {a.layers}, {a.window}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13's profiler announces every start and stop
    facts = compare(Sizes(a.length, a.layers), a.window, a.device)
    print(table(facts))
    if a.json:
        with open(a.json, "w") as f:
            json.dump(facts, f, indent=1)
    if a.plot:
        draw(facts, a.plot)


if __name__ == "__main__":
    main()
