"""The second sequence is all padding: its queries have no key, and softmax of nothing but -inf is NaN."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, real):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~real[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, -1)
        return weights @ v


lengths = torch.tensor([5, 0, 8])
real = torch.arange(8) < lengths[:, None]
out = Attention(32, 2)(torch.randn(3, 8, 32), real)
print("NaN in", int(out.isnan().sum()), "of", out.numel(), "numbers")
