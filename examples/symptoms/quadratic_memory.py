"""SDPA runs its flash kernel, and memory grows as L² all the same: the causal mask is a float tensor of that size."""

import torch
import torch.nn.functional as F
from torch import nn


def causal_bias(batch: int, heads: int, length: int) -> torch.Tensor:
    above = torch.ones(length, length).triu(1).bool()
    bias = torch.zeros(batch, heads, length, length)
    return bias.masked_fill_(above, float("-inf"))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = causal_bias(len(x), self.heads, x.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


for length in (256, 512):
    Attention(64, 4)(torch.randn(2, length, 64))
    print(f"L = {length}: {2 * 4 * length**2 * 4 / 2**20:.0f} MiB of bias")
