"""The state of a softmax row, ``(m, l, acc)``, and the three things that happen to it.

A row of attention never needs all of its scores at once. Having seen any subset of the keys it
is summed up by

    m    (..., M)      the largest score so far
    l    (..., M)      sum of exp(score - m)
    acc  (..., M, Dv)  sum of exp(score - m) * value

``fold`` takes in a tile of scores and values, ``merge`` joins the states of two disjoint sets of
keys, ``finish`` turns a state into the row's output and its log-sum-exp. ``merge`` is associative
and commutative with the identity ``(-inf, 0, 0)``, which is why tiles may be visited in any order
and split-KV decoding, ring attention and chunked prefill are all this one operation.

Everything here is pure, differentiable and in the dtype of its inputs: callers pass fp32 (fp64 for
fp64 inputs), as low precision loses digits of the sum on long rows.

Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
"FlashAttention", algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")


class State(NamedTuple):
    """Running maximum, sum of exponentials and weighted values of a block of rows."""

    m: Tensor  # (..., M)
    l: Tensor  # (..., M)  # noqa: E741 - the field's name for it
    acc: Tensor  # (..., M, Dv)


def empty(rows: tuple[int, ...], dim_v: int, *, dtype: torch.dtype, device: torch.device) -> State:
    """The identity of ``merge``: a state that has seen no key."""
    return State(
        torch.full(rows, NEG_INF, dtype=dtype, device=device),
        torch.zeros(rows, dtype=dtype, device=device),
        torch.zeros(*rows, dim_v, dtype=dtype, device=device),
    )


def pivot(m: Tensor) -> Tensor:
    """What to subtract before ``exp``: m, but finite where no key was seen (else -inf - (-inf) = NaN)."""
    return m.clamp(min=torch.finfo(m.dtype).min)


def fold(state: State, s: Tensor, v: Tensor) -> State:
    """Take in a tile: scores ``s`` (..., M, N), -inf where masked, and values ``v`` (..., N, Dv)."""
    if s.shape[-1] == 0:
        return state
    # The new maximum is a constant of the computation (it cancels), so no gradient flows through it.
    m = torch.maximum(state.m, s.amax(-1)).detach()
    base = pivot(m)
    alpha = torch.exp(state.m - base)  # what the old sums are worth under the new maximum
    p = torch.exp(s - base[..., None])
    return State(m, state.l * alpha + p.sum(-1), state.acc * alpha[..., None] + p @ v)


def merge(a: State, b: State) -> State:
    """The state of the union of two disjoint sets of keys."""
    m = torch.maximum(a.m, b.m).detach()
    base = pivot(m)
    wa, wb = torch.exp(a.m - base), torch.exp(b.m - base)
    return State(m, a.l * wa + b.l * wb, a.acc * wa[..., None] + b.acc * wb[..., None])


def finish(state: State) -> tuple[Tensor, Tensor]:
    """The rows' output ``o`` (..., M, Dv) and natural log-sum-exp ``lse`` (..., M).

    A row that saw no key gets o = 0 and lse = -inf.
    """
    none = state.l == 0  # and then acc is 0 too
    l = torch.where(none, 1.0, state.l)  # noqa: E741
    return state.acc / l[..., None], torch.where(none, NEG_INF, pivot(state.m) + torch.log(l))


def lse_low(state: State, lse: Tensor) -> Tensor:
    """What rounding took from ``lse`` (..., M): m + log(l) = lse + lse_low.

    A row whose scores are all finfo.min (a finite mask) has an lse that cannot hold log(l); without it the
    probabilities that a backward recomputes from lse would each be 1.
    """
    low = torch.log(state.l) - (lse - pivot(state.m))
    return torch.where(torch.isfinite(lse) & torch.isfinite(low), low, 0.0)


def from_output(o: Tensor, lse: Tensor) -> State:
    """The state that finishes to (o, lse): how finished parts enter ``merge``.

    Other code may leave NaN as the output of a row that saw no key: such a row is 0, so that it spoils no other part.
    """
    none = lse == NEG_INF
    return State(lse, torch.where(none, 0.0, torch.ones_like(lse)), torch.where(none[..., None], 0.0, o))


def with_sink(state: State, sink: Tensor) -> State:
    """Merge in a key of score ``sink`` (broadcastable to m) whose value is 0 (an attention sink)."""
    m = sink.expand_as(state.m)
    return merge(state, State(m, torch.ones_like(m), torch.zeros_like(state.acc)))
