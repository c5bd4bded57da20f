"""A small GPT trained on Shakespeare's sonnets, a byte at a time, with any attention backend.

    python examples/train_gpt.py                                      # ten steps, the loss of each
    python examples/train_gpt.py --backend tiled --compare dense      # two curves; exit code 1 if they part

Two backends round differently, so their curves part a little. How much they may is not guessed: the same training in
fp64 shows the error that fp32 makes with ``dense``, and the judge's budget is twice that and a rounding of the loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise import masks
from tilewise.testing.judge import Measured, compare

TEXT = Path(__file__).parent / "data" / "sonnets.txt"
BATCH, WIDTH, HEADS, LAYERS = 8, 64, 4, 2


class Block(nn.Module):
    """Causal attention, then an MLP of four times the width; each adds to its input."""

    def __init__(self, backend: str):
        super().__init__()
        self.backend = backend
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = tilewise.attention(q, k, v, masks.causal(), backend=self.backend)  # (B, H, L, D)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes (B, L) to the logits (B, L, 256) of the byte that follows each."""

    def __init__(self, length: int, backend: str):
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*(Block(backend) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(backend: str, steps: int, length: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The loss of each step, fp64 on the CPU. The same weights and batches whatever the backend and dtype."""
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    model = GPT(length, backend).to(device, dtype)  # made on the CPU: the numbers are those of every device
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (BATCH,))
        ids = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def compared(mine: Tensor, other: Tensor, steps: int, length: int, device: str) -> Measured:
    """The error of ``mine`` against training in fp64, beside that of ``other``, both fp32; and the judge's limit."""
    return compare(mine, other, train("dense", steps, length, device, torch.float64), torch.float32)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton" if torch.cuda.is_available() else "tiled")
    parser.add_argument("--compare", metavar="BACKEND", help="train with this one too, and compare the curves")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args(argv)
    names = [a.backend, *([a.compare] if a.compare else [])]
    curves = [train(name, a.steps, a.length, a.device) for name in names]
    print("step", *(f"{name:>10}" for name in names))
    for n, losses in enumerate(zip(*curves, strict=True)):
        print(f"{n:4}", *(f"{x:10.6f}" for x in losses))
    if not a.compare:
        return 0
    m = compared(*curves, a.steps, a.length, a.device)
    print(f"largest difference {(curves[0] - curves[1]).abs().max():.2e}")
    print(f"error against fp64: {a.backend} {m.error:.2e}, {a.compare} {m.dense_error:.2e}, budget {m.limit:.2e}")
    print("within the budget" if m.ok else "BEYOND THE BUDGET")
    return 0 if m.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
