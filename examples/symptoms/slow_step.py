"""The attention kernel is a fast one; most of the step is Python that prepares the next batch."""

import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.embed, self.qkv, self.out = nn.Embedding(256, width), nn.Linear(width, 3 * width), nn.Linear(width, 2)

    def forward(self, tokens):
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


def tokenize(text: str) -> list[int]:
    tokens = []
    for n in range(len(text)):
        tokens.append(sum(ord(c) for c in text[max(0, n - 400) : n + 1]) % 256)
    return tokens


def batches(count: int):
    for n in range(count):
        text = f"review {n} says " + "good or bad " * 40
        yield torch.tensor([tokenize(text)[:256] for _ in range(4)]), torch.tensor([0, 1, 0, 1])


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for tokens, labels in batches(6):
    loss = F.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
