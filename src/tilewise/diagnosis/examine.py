"""Looks at the tensors of one call: its error against fp64, its NaN rows, and which mask its attn_mask is.

Nothing here changes a tensor, draws a random number or keeps one alive; an L x L mask is read a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import api, masks
from ..masks import Mask, Patch
from ..request import NEG_INF, Request
from ..testing.judge import Measured, compare
from .records import MOST_ROWS, NanRow

_ROWS = 8  # of queries in a cut, at the start and at the end
_STEP = 2**20  # mask entries read at a time


def request_of(args: dict[str, Any]) -> Request:
    """An SDPA call as tilewise's request; ValueError or TypeError where tilewise takes other shapes than SDPA."""
    q, k, v = (api._four_dims(args[n]) for n in ("query", "key", "value"))
    given: Tensor | None = args["attn_mask"]
    mask: Mask | Tensor | None = masks.causal() if args["is_causal"] else None
    bias = None
    if given is not None:
        given = api._four_dims_mask(given, args["query"].shape[:-2])
        mask, bias = (given, None) if given.dtype == torch.bool else (None, given)
    dropout = (args["dropout_p"], 0, None)  # a fixed seed: drawing one would change the model's random numbers
    r = api._request(q, k, v, mask, bias, args["scale"], None, None, None, aux=None, dropout=dropout)
    return replace(r, seeded=False)


# --- numbers --------------------------------------------------------------------------------------


def against_exact(r: Request, out: Tensor) -> tuple[Measured, bool]:
    """The first and last rows of the first and last head: their error against ``dense`` in fp64, as the judge
    measures it, and whether they have the bits of ``dense`` in their own dtype."""
    mine, same, exact = [], [], []
    for b, h, rows in _cuts(r):
        mine.append(out[b : b + 1, h : h + 1, rows].flatten())
        same.append(_dense(r, b, h, rows, r.dtype).flatten())
        exact.append(_dense(r, b, h, rows, torch.float64).flatten())
    x, dense, true = (torch.cat(parts) for parts in (mine, same, exact))
    return compare(x.double(), dense.double(), true, r.dtype), torch.equal(x, dense)


def _cuts(r: Request) -> Iterator[tuple[int, int, slice]]:
    rows = {(0, min(_ROWS, r.len_q)), (max(0, r.len_q - _ROWS), r.len_q)}
    for b, h in sorted({(0, 0), (r.batch - 1, r.heads - 1)}):
        for start, stop in sorted(rows):
            yield b, h, slice(start, stop)


def _dense(r: Request, b: int, h: int, rows: slice, dtype: torch.dtype) -> Tensor:
    patch = _patch(r, b, h, rows)
    kv = h // r.group
    q, k, v = r.q[b : b + 1, h : h + 1, rows], *(x[b : b + 1, kv : kv + 1] for x in (r.k, r.v))
    keep = None if r.mask is None else r.mask.keep(patch).expand(1, 1, q.shape[2], r.len_k)
    bias = r.bias_tile(patch)
    return api.attention(
        q.to(dtype), k.to(dtype), v.to(dtype), keep,
        bias=None if bias is None else bias.to(torch.float64 if dtype == torch.float64 else bias.dtype),
        scale=r.scale, softcap=r.softcap, sinks=None if r.sinks is None else r.sinks[h : h + 1], backend="dense",
    )  # fmt: skip


def _patch(r: Request, b: int, h: int, rows: slice) -> Patch:
    return Patch(slice(b, b + 1), slice(h, h + 1), rows, slice(0, r.len_k), r.len_q, r.len_k, r.device)


# --- NaN ------------------------------------------------------------------------------------------


def nan_rows(r: Request | None, out: Tensor) -> NanRow | None:
    """The rows (batch, head, query) of an output (..., Lq, Dv) that are NaN throughout."""
    if out.shape[-1] == 0 or not bool(out[..., 0].isnan().any()):
        return None
    rows, total = _indices(out.isnan().all(-1))
    if not total:
        return None
    masked = r is not None and out.dim() == 4 and all(_no_key(r, *row) for row in rows)
    return NanRow(_axes(out.dim() - 1), rows, total, masked)


def softmax_nan_rows(scores: Tensor, weights: Tensor) -> NanRow | None:
    """The same of a softmax over the last axis: a row whose scores are all -inf."""
    if weights.dim() < 2 or weights.shape[-1] == 0:
        return None
    first = weights[..., 0].isnan()  # a row without a key is NaN throughout, so one column tells
    if not bool(first.any()):
        return None
    rows, total = _indices(first)
    return NanRow(_axes(first.dim()), rows, total, all(bool((scores[row] == NEG_INF).all()) for row in rows))


def _indices(flags: Tensor) -> tuple[tuple[tuple[int, ...], ...], int]:
    where = flags.nonzero()
    return tuple(tuple(row) for row in where[:MOST_ROWS].tolist()), len(where)


def _axes(n: int) -> tuple[str, ...]:
    names = ("batch", "head", "query") if n == 3 else ("batch·head", "query") if n == 2 else ("query",)
    return names if n <= 3 else (*(f"dim {i}" for i in range(n - 1)), "query")


def _no_key(r: Request, b: int, h: int, i: int) -> bool:
    patch = _patch(r, b, h, slice(i, i + 1))
    keep = torch.ones(1, dtype=torch.bool, device=r.device) if r.mask is None else r.mask.keep(patch)
    bias = r.bias_tile(patch)
    return not bool((keep if bias is None else keep & (bias != NEG_INF)).any())


# --- which mask it is -----------------------------------------------------------------------------


def recognise(r: Request, given: Tensor) -> str:
    """The tilewise mask that keeps the same pairs as an attn_mask (bool, or float of 0 and very negative): its source
    text, or "" where it is none of the usual ones."""
    mask = given[(None,) * (4 - given.dim())] if given.dim() < 4 else given
    if mask.dim() != 4 or 0 in mask.shape or mask.shape[-1] != r.len_k or mask.shape[-2] != r.len_q:
        return ""
    if mask.dtype != torch.bool and not _is_zero_or_out(mask):
        return ""
    last = _keep(mask[:, 0, -1])  # (B, Lk): what the last query sees tells a length or a window's width
    return next((text for text, m in _candidates(r, last) if _same(r, mask, m)), "")


def _candidates(r: Request, last: Tensor) -> Iterator[tuple[str, Mask]]:
    lengths = last.sum(-1)
    padding = {side: (f"masks.key_lengths({lengths.tolist()}{more})", masks.key_lengths(lengths, padding=side))
               for side, more in (("right", ""), ("left", ", padding='left'"))}  # fmt: skip
    yield "no mask: it keeps every pair", masks.window(None, None)
    yield "masks.causal()", masks.causal()
    if r.len_q != r.len_k:
        yield "masks.causal(align='bottom_right')", masks.causal(align="bottom_right")
    yield from padding.values()
    yield from ((f"masks.causal() & {text}", masks.causal() & m) for text, m in padding.values())
    width = int(lengths[0]) - 1
    if width >= 0 and r.len_q == r.len_k:
        yield f"masks.causal() & masks.window({width}, 0)", masks.causal() & masks.window(width, 0)


def _keep(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _blocks(mask: Tensor) -> Iterator[slice]:
    step = max(1, _STEP // max(1, mask[:, :, 0].numel()))
    for i in range(0, mask.shape[2], step):
        yield slice(i, min(i + step, mask.shape[2]))


def _is_zero_or_out(mask: Tensor) -> bool:
    """0 to keep, -inf or the dtype's most negative number to mask."""
    low = torch.finfo(mask.dtype).min
    return all(bool(((mask[:, :, rows] == 0) | (mask[:, :, rows] <= low)).all()) for rows in _blocks(mask))


def _same(r: Request, mask: Tensor, m: Mask) -> bool:
    for rows in _blocks(mask):
        patch = Patch(
            slice(0, mask.shape[0]), slice(0, mask.shape[1]), rows, slice(0, r.len_k), r.len_q, r.len_k, r.device
        )
        if not bool((m.keep(patch) == _keep(mask[:, :, rows])).all()):
            return False
    return True
