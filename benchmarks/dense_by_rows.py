"""The judge where L x L does not fit: ``dense``, some rows of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilewise import dispatch
from tilewise.backends.dense import DenseBackend, attend
from tilewise.dispatch import Output
from tilewise.request import Request


class DenseByRows(DenseBackend):
    """``dense`` for some rows at a time, computed again in the backward. Each row is what ``dense`` makes of it."""

    scores = 2**24  # entries of the matrices that exist at a time

    def forward(self, r: Request) -> Output:
        if r.ragged is not None:
            return super().forward(r)
        (seq,) = r.sequences()

        def up(x: Tensor | None) -> Tensor | None:  # gradients of shared inputs are summed in the state dtype
            return None if x is None else x.to(r.state_dtype)

        wide = replace(r, alibi=up(r.alibi), sinks=up(r.sinks))
        k, v = r.k.to(r.state_dtype), r.v.to(r.state_dtype)

        def some(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
            patch = r.patch(seq, seq.batch, slice(0, r.heads), rows, slice(0, r.len_k))
            return attend(wide, r.q[:, :, rows], k.to(r.dtype), v.to(r.dtype), patch)

        step = max(1, self.scores // max(1, r.batch * r.heads * r.len_k))
        starts = range(0, max(r.len_q, 1), step)
        rows = [slice(i, min(i + step, r.len_q)) for i in starts]
        parts = [checkpoint(some, x, use_reentrant=False, preserve_rng_state=False) for x in rows]
        return Output(*(torch.cat(x, 2) for x in zip(*parts, strict=True)))


@contextmanager
def by_rows(scores: int = DenseByRows.scores) -> Iterator[None]:
    """Within the block, ``dense`` is ``DenseByRows``."""
    backend = DenseByRows()
    backend.scores = scores
    with mock.patch.dict(dispatch.BACKENDS, dense=backend):
        yield
