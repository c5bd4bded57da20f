"""Flash is forced, so that nothing falls back in silence; value heads of another size than query heads are refused."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, value_dim: int):
        super().__init__()
        self.heads = heads
        self.qk = nn.Linear(width, 2 * width)
        self.v = nn.Linear(width, heads * value_dim)

    def forward(self, x):
        q, k = self.qk(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        v = self.v(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)


model = Attention(64, 4, value_dim=24)
model(torch.randn(2, 32, 64))
