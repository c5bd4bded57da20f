"""Attention on a small problem with every number kept: what ``tilewise trace`` shows.

For each tile of queries the tiles of keys pass by in order. A tile has a verdict (``tilemap``), scores, and a
state (m, l, acc) of its own for each row; the rows' state before it and after it are those of ``state.fold``, and
``state.merge`` of the state before and the tile's own gives the state after as well. ``state.finish`` ends a row.

Nothing here is fast, and every number is kept, so sizes are limited (``MAX_SCORES``, ``MAX_DIM_V``).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import api, masks, state
from .cli import plain
from .masks import EMPTY, FULL, PARTIAL, Grid, Mask, Patch
from .request import NEG_INF, Alibi, Request
from .state import State
from .tilemap import tile_map

Facts = dict[str, Any]
VERDICTS = {EMPTY: "EMPTY", PARTIAL: "PARTIAL", FULL: "FULL"}
MAX_SCORES = 4096  # B * H * Lq * Lk
MAX_DIM_V = 16  # numbers of a value


class Step(NamedTuple):
    """One tile, m queries by n keys, of one batch entry and query head.

    An EMPTY tile is skipped: it has no scores and no state, and leaves the rows' state as it was.
    """

    batch: int
    head: int
    rows: slice
    cols: slice
    verdict: str  # "EMPTY", "PARTIAL" or "FULL"
    scores: Tensor | None  # (m, n): scaled, softcapped, biased; -inf where masked
    before: State  # of the m rows: m (m,), l (m,), acc (m, Dv)
    tile: State | None  # of this tile alone
    after: State


@dataclass(frozen=True)
class Trace:
    """All tiles of a problem in the order in which they are visited, and the answer."""

    about: tuple[str, ...]  # lines that say what was computed
    grid: Grid
    mask: Mask | None
    values: Tensor  # (B, Hq, Lk, Dv)
    sinks: Tensor | None  # (Hq,)
    steps: tuple[Step, ...]
    out: Tensor  # (B, Hq, Lq, Dv)
    lse: Tensor  # (B, Hq, Lq)

    def to_dict(self) -> Facts:
        """Plain data; numbers that JSON does not have are text ("-inf", "inf", "nan")."""
        g = self.grid
        facts = {
            "about": list(self.about),
            "mask": None if self.mask is None else repr(self.mask),
            "sizes": {
                "batch": g.batch, "heads": g.heads, "len_q": g.len_q, "len_k": g.len_k,
                "dim_v": self.values.shape[-1], "block_m": g.block_m, "block_n": g.block_n,
            },
            "values": self.values.tolist(),
            "sinks": None if self.sinks is None else self.sinks.tolist(),
            "steps": [_step_facts(s) for s in self.steps],
            "out": self.out.tolist(),
            "lse": self.lse.tolist(),
        }  # fmt: skip
        return plain(facts)


def _step_facts(s: Step) -> Facts:
    return {
        "batch": s.batch,
        "head": s.head,
        "rows": [s.rows.start, s.rows.stop],
        "cols": [s.cols.start, s.cols.stop],
        "verdict": s.verdict,
        "scores": None if s.scores is None else s.scores.tolist(),
        **{name: _state_facts(getattr(s, name)) for name in ("before", "tile", "after")},
    }


def _state_facts(x: State | None) -> Facts | None:
    return None if x is None else {name: value.tolist() for name, value in x._asdict().items()}


# --- the problems ---------------------------------------------------------------------------------


def of_scores(scores: Tensor, values: Tensor, mask: Mask | None = None, *, block_m: int = 2, block_n: int = 2) -> Trace:
    """Trace of given scores.

    scores: (Lq, Lk), as they enter the softmax; -inf excludes a pair, as a mask does.
    values: (Lk,), a number for each key, or (Lk, Dv).
    mask: further pairs to exclude.
    """
    if scores.dim() != 2 or values.dim() not in (1, 2) or scores.shape[1] != values.shape[0]:
        raise ValueError(
            "scores (Lq, Lk) and values (Lk,) or (Lk, Dv) must have the same number of keys; got "
            f"{tuple(scores.shape)} and {tuple(values.shape)}"
        )
    allowed = scores != NEG_INF
    if not bool(allowed.all()):
        mask = masks.dense(allowed) if mask is None else masks.dense(allowed) & mask
    grid = _grid(1, 1, scores.shape[0], scores.shape[1], block_m, block_n, scores.device)
    about = [f"given scores, Lq = {grid.len_q}, Lk = {grid.len_k}"]
    if mask is not None:
        mask.check(*grid[:4])
        about.append(f"with mask {mask!r}")
    v = values.view(1, 1, grid.len_k, -1)
    return _trace(tuple(about), grid, mask, lambda patch: patch.take(scores[None, None]), v, None)


def of_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    block_m: int = 2,
    block_n: int = 2,
) -> Trace:
    """Trace of a call of ``tilewise.attention`` with the same arguments; state and answer are fp32 (fp64 for fp64)."""
    r = api._request(
        query, key, value, mask, bias, scale, softcap, sinks, None, aux=None, dropout=(0.0, None, None)
    )  # fmt: skip
    grid = _grid(r.batch, r.heads, r.len_q, r.len_k, block_m, block_n, r.device)
    q, k, v = (x.detach().to(r.state_dtype) for x in (r.q, r.k, r.v))
    k, v = k.repeat_interleave(r.group, 1), v.repeat_interleave(r.group, 1)
    sinks = None if r.sinks is None else r.sinks.detach().to(r.state_dtype)
    about = tuple(r.describe().splitlines()[:-1])  # the last line is about gradients
    return _trace(about, grid, r.mask, lambda patch: _scores(r, q, k, patch), v, sinks)


def random_problem(
    shape: tuple[int, int, int, int], mask: Mask | None = None, *, block_m: int = 2, block_n: int = 2, seed: int = 0
) -> Trace:
    """Trace of normally distributed q, k and v of shape (B, H, L, D) in fp64."""
    b, h, n, d = shape
    _grid(b, h, n, n, block_m, block_n, torch.device("cpu"))  # refuses what is too large before it is made
    _check_dim_v(d)
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=made, dtype=torch.float64) for _ in range(3))
    return of_attention(q, k, v, mask, block_m=block_m, block_n=block_n)


def parse_numbers(option: str, text: str) -> Tensor:
    """Rows of numbers, "1,2,3" or "1,2,-inf;4,5,6", as fp64 (rows, numbers); ValueError names the option."""
    try:
        rows = [[float(word) for word in row.split(",")] for row in text.split(";")]
    except ValueError:
        raise ValueError(f"{option} takes numbers such as 1,2,3 with rows separated by ;, got {text!r}") from None
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{option}: all rows must have as many numbers as the first, got {[len(r) for r in rows]}")
    return torch.tensor(rows, dtype=torch.float64)


def _grid(batch: int, heads: int, len_q: int, len_k: int, block_m: int, block_n: int, device: torch.device) -> Grid:
    grid = Grid(batch, heads, len_q, len_k, block_m, block_n, device)
    if min(grid[:6]) < 1:
        raise ValueError(
            "a trace needs at least one batch entry, head, query, key and a tile of one; got "
            f"B = {batch}, H = {heads}, Lq = {len_q}, Lk = {len_k}, tiles of {block_m} x {block_n}"
        )
    scores = batch * heads * len_q * len_k
    if scores > MAX_SCORES:
        raise ValueError(
            f"a trace keeps every number, so it takes at most {MAX_SCORES} scores (B * H * Lq * Lk); got "
            f"{batch} * {heads} * {len_q} * {len_k} = {scores}. Take fewer or shorter sequences: "
            "the arithmetic of a tile is the same"
        )
    return grid


def _check_dim_v(dim_v: int) -> None:
    if dim_v > MAX_DIM_V:
        raise ValueError(f"a trace shows values of at most {MAX_DIM_V} numbers, got {dim_v}; take a smaller head dim")


# --- tile by tile ---------------------------------------------------------------------------------


@torch.no_grad()
def _trace(
    about: tuple[str, ...], grid: Grid, mask: Mask | None, scores: Callable[[Patch], Tensor], v: Tensor,
    sinks: Tensor | None,
) -> Trace:  # fmt: skip
    """``scores`` gives the unmasked scores (1, 1, m, n) of a patch of one head; v is (B, H, Lk, Dv)."""
    _check_dim_v(v.shape[-1])
    verdicts = tile_map(mask, grid).table.expand(grid.batch, grid.heads, -1, -1).tolist()
    out, lse = v.new_empty(grid.batch, grid.heads, grid.len_q, v.shape[-1]), v.new_empty(*grid[:3])
    steps: list[Step] = []
    for b, h, r in itertools.product(range(grid.batch), range(grid.heads), range(grid.rows)):
        rows = grid.rows_of(r)
        seen = state.empty((rows.stop - rows.start,), v.shape[-1], dtype=v.dtype, device=v.device)
        for c, verdict in enumerate(verdicts[b][h][r]):
            cols = grid.cols_of(c)
            patch = Patch(slice(b, b + 1), slice(h, h + 1), rows, cols, grid.len_q, grid.len_k, grid.device)
            s = None if verdict == EMPTY else _masked(scores(patch), mask if verdict == PARTIAL else None, patch)
            steps.append(_step(patch, verdict, s, seen, v[b, h, cols]))
            seen = steps[-1].after
        if sinks is not None:
            seen = state.with_sink(seen, sinks[h])
        out[b, h, rows], lse[b, h, rows] = state.finish(seen)
    return Trace(about, grid, mask, v, sinks, tuple(steps), out, lse)


def _step(patch: Patch, verdict: int, s: Tensor | None, seen: State, v: Tensor) -> Step:
    where = (patch.batch.start, patch.heads.start, patch.rows, patch.cols, VERDICTS[verdict])
    if s is None:
        return Step(*where, None, seen, None, seen)
    nothing = state.empty((s.shape[0],), v.shape[-1], dtype=v.dtype, device=v.device)
    return Step(*where, s, seen, _fold(nothing, s, v), _fold(seen, s, v))


def _masked(s: Tensor, mask: Mask | None, patch: Patch) -> Tensor:
    """Scores (m, n) of a patch of one head, -inf where the mask keeps nothing."""
    return (s if mask is None else torch.where(mask.keep(patch), s, NEG_INF))[0, 0]


def _fold(seen: State, s: Tensor, v: Tensor) -> State:
    """``state.fold`` of scores (m, n) and values (n, Dv), each row with values of its own.

    They are 0 where a row does not see the key: 0 * NaN is NaN.
    """
    mine = torch.where((s == NEG_INF)[..., None], 0.0, v)  # (m, n, Dv)
    one = State(seen.m[:, None], seen.l[:, None], seen.acc[:, None])  # m states of one row
    return State(*(x.squeeze(1) for x in state.fold(one, s[:, None], mine)))


def _scores(r: Request, q: Tensor, k: Tensor, patch: Patch) -> Tensor:
    """Scaled, softcapped and biased scores (1, 1, m, n) of a patch of one head; k has as many heads as q."""
    at = (patch.batch, patch.heads)
    s = q[(*at, patch.rows)] @ k[(*at, patch.cols)].mT * r.scale
    if r.softcap is not None:
        s = r.softcap * torch.tanh(s / r.softcap)
    bias = r.bias_tile(patch)
    if bias is not None:
        s = torch.where(bias == NEG_INF, NEG_INF, s + bias)  # -inf excludes: not even a NaN shines through
    return s


# --- the page -------------------------------------------------------------------------------------


def page(trace: Trace) -> str:
    """A self-contained HTML page that steps through the tiles; it loads nothing from anywhere."""
    template = resources.files(__package__).joinpath("trace.html").read_text("utf-8")
    # Inside a script element the parser looks for "</script" and "<!--"; JSON may write < as an escape.
    data = json.dumps(trace.to_dict(), allow_nan=False).replace("<", "\\u003c")
    return template.replace("TRACE_DATA", data)
