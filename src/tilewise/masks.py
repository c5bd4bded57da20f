"""Masks: which query may attend to which key.

A mask is a predicate ``keep(b, h, i, j)`` over batch, query head, query and key, plus a verdict on
any tile of scores:

    EMPTY    no pair is kept      the tile is skipped
    FULL     every pair is kept   no mask arithmetic is spent on it
    PARTIAL  some are, or it cannot be told cheaply: masked element by element

Masks combine with ``&``, ``|`` and ``~``. The verdicts combine by three-valued logic, so a
combination of cheap masks stays cheap.

    causal()                      window(1, 1)                  documents([0,0,0,1,1])
    x . . . .                     x x . . .                     x x x . .
    x x . . .                     x x x . .                     x x x . .
    x x x . .                     . x x x .                     x x x . .
    x x x x .                     . . x x x                     . . . x x
    x x x x x                     . . . x x                     . . . x x

    causal(align="bottom_right")  key_lengths([2])              prefix_lm([2])
    (3 queries, 5 keys)           x x . . .                     x x . . .
    x x x . .                     x x . . .                     x x . . .
    x x x x .                     x x . . .                     x x x . .
    x x x x x                     x x . . .                     x x x x .
                                  x x . . .                     x x x x x
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2
TOP_LEFT, BOTTOM_RIGHT = "top_left", "bottom_right"


@dataclass(frozen=True)
class Patch:
    """A rectangle of the score tensor: slices of batch, query heads, queries and keys.

    ``b, h, i, j`` are index tensors of shapes (nb,1,1,1), (1,nh,1,1), (1,1,m,1), (1,1,1,n).
    """

    batch: slice
    heads: slice
    rows: slice
    cols: slice
    len_q: int
    len_k: int
    device: torch.device

    def _index(self, s: slice, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = -1
        return torch.arange(s.start, s.stop, device=self.device).view(shape)

    b = cached_property(lambda self: self._index(self.batch, 0))
    h = cached_property(lambda self: self._index(self.heads, 1))
    i = cached_property(lambda self: self._index(self.rows, 2))
    j = cached_property(lambda self: self._index(self.cols, 3))

    def take(self, x: Tensor) -> Tensor:
        """The part of ``x``, a 4-D tensor with dims of size 1 where it broadcasts. A view."""
        where = (self.batch, self.heads, self.rows, self.cols)
        return x[tuple(slice(None) if n == 1 else s for n, s in zip(x.shape, where, strict=True))]


class Grid(NamedTuple):
    """The score tensor (batch, heads, len_q, len_k) cut into tiles of block_m x block_n."""

    batch: int
    heads: int
    len_q: int
    len_k: int
    block_m: int
    block_n: int
    device: torch.device

    @property
    def rows(self) -> int:
        return -(-self.len_q // self.block_m)

    @property
    def cols(self) -> int:
        return -(-self.len_k // self.block_n)

    def rows_of(self, r: int) -> slice:
        """Queries of row-tile r."""
        return slice(r * self.block_m, min((r + 1) * self.block_m, self.len_q))

    def cols_of(self, c: int) -> slice:
        """Keys of column-tile c."""
        return slice(c * self.block_n, min((c + 1) * self.block_n, self.len_k))

    def edges(self, axis: int) -> tuple[Tensor, Tensor]:
        """First and last index of each tile along queries (0) or keys (1), int64."""
        n, block, length = ((self.rows, self.block_m, self.len_q), (self.cols, self.block_n, self.len_k))[axis]
        first = torch.arange(n, device=self.device) * block
        return first, (first + block).clamp(max=length) - 1


class Mask:
    """Base of all masks; combine them with ``&``, ``|`` and ``~``."""

    def keep(self, patch: Patch) -> Tensor:
        """Bool tensor broadcastable to the patch: True = attend."""
        raise NotImplementedError

    def verdict(self, grid: Grid) -> Tensor:
        """int8 verdicts, broadcastable to (batch, heads, grid.rows, grid.cols)."""
        raise NotImplementedError

    def reach(self, rows: slice, len_q: int, len_k: int) -> tuple[int, int]:
        """A range [lo, hi) outside of which these rows keep no key: narrows the tiles at a band's edge."""
        return 0, len_k

    def whole(self, rows: slice, len_q: int, len_k: int) -> tuple[int, int]:
        """A range [lo, hi) within which these rows keep every key, empty if lo >= hi: the rest needs the mask."""
        return 0, 0

    def relative(self) -> bool:
        """Whether j - i alone decides what is kept, in every batch entry and head."""
        return False

    def check(self, batch: int, heads: int, len_q: int, len_k: int) -> None:
        """Raise ValueError if the mask's tensors do not fit a call of these sizes."""

    def tensors(self) -> list[Tensor]:
        return []

    def code(self) -> list[int]:
        """The mask as a postfix program of ints, so that it can cross an operator boundary."""
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return _combine(All, self, other)

    def __or__(self, other: Mask) -> Mask:
        return _combine(Any, self, other)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a Mask has no truth value: combine masks with & | ~, not with and/or/not")


# --- bands: causal and window ---------------------------------------------------------------------


@dataclass(frozen=True)
class Band(Mask):
    """Keys j with -left <= j - (i + offset) <= right; None is unbounded on that side.

    ``align`` places the diagonal j = i + offset: "top_left" (offset 0), "bottom_right"
    (offset Lk - Lq), or the offset itself. None: that of the band it is &-ed with, else "top_left".
    """

    left: int | None
    right: int | None
    align: str | int | None = None

    def offset(self, len_q: int, len_k: int) -> int:
        if self.align == BOTTOM_RIGHT:
            return len_k - len_q
        return 0 if self.align is None or self.align == TOP_LEFT else int(self.align)

    def keep(self, patch: Patch) -> Tensor:
        diagonal = patch.i + self.offset(patch.len_q, patch.len_k)
        left = None if self.left is None else patch.j >= diagonal - self.left
        right = None if self.right is None else patch.j <= diagonal + self.right
        if left is None or right is None:
            everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=patch.device)
            return left if left is not None else right if right is not None else everything
        return left & right

    def verdict(self, grid: Grid) -> Tensor:
        (i0, i1), (j0, j1) = grid.edges(0), grid.edges(1)
        off = self.offset(grid.len_q, grid.len_k)
        nearest = j0[None, :] - (i1[:, None] + off)  # smallest and largest j - i - offset in the tile
        farthest = j1[None, :] - (i0[:, None] + off)
        full, empty = torch.ones_like(nearest, dtype=torch.bool), torch.zeros_like(nearest, dtype=torch.bool)
        if self.left is not None:
            full, empty = full & (nearest >= -self.left), empty | (farthest < -self.left)
        if self.right is not None:
            full, empty = full & (farthest <= self.right), empty | (nearest > self.right)
        return _verdict(full, empty)[None, None]

    def reach(self, rows: slice, len_q: int, len_k: int) -> tuple[int, int]:
        off = self.offset(len_q, len_k)
        lo = 0 if self.left is None else rows.start + off - self.left
        hi = len_k if self.right is None else rows.stop + off + self.right
        return max(lo, 0), min(hi, len_k)

    def whole(self, rows: slice, len_q: int, len_k: int) -> tuple[int, int]:
        off = self.offset(len_q, len_k)
        lo = 0 if self.left is None else rows.stop - 1 + off - self.left
        hi = len_k if self.right is None else rows.start + 1 + off + self.right
        return lo, hi

    def relative(self) -> bool:
        return True

    def code(self) -> list[int]:
        kind = 2 if self.align == BOTTOM_RIGHT else 0 if self.align in (None, TOP_LEFT) else 1
        return [
            _BAND,
            int(self.left is not None),
            self.left or 0,
            int(self.right is not None),
            self.right or 0,
            kind,
            self.align if kind == 1 else 0,  # type: ignore[list-item]
        ]

    def __repr__(self) -> str:
        align = "" if self.align in (None, TOP_LEFT) else f"align={self.align!r}"
        if self.left is None and self.right == 0:
            return f"causal({align})"
        return f"window({self.left}, {self.right}{', ' + align if align else ''})"


def _alignment(align: str | int | None) -> str | int | None:
    if align is None or align in (TOP_LEFT, BOTTOM_RIGHT) or (isinstance(align, int) and not isinstance(align, bool)):
        return align
    if isinstance(align, torch.SymInt):
        return align
    raise ValueError(f"align must be 'top_left', 'bottom_right' or an int offset, got {align!r}")


def causal(align: str | int | None = None) -> Mask:
    """Query i attends to keys j <= i + offset.

    align: "top_left" (the default; offset 0, PyTorch's ``is_causal``), "bottom_right" (offset
    Lk - Lq: the last query sees the last key, what decoding with a cache needs), or the offset.
    """
    return Band(None, 0, TOP_LEFT if align is None else _alignment(align))


def window(left: int | None, right: int | None, align: str | int | None = None) -> Mask:
    """Query i attends to keys i + offset - left <= j <= i + offset + right, itself included.

    None is unbounded on that side. ``align`` as in ``causal``; left out, a window that is &-ed with
    a causal mask lies on that mask's diagonal.
    """
    for name, n in (("left", left), ("right", right)):
        if n is not None and not hasattr(n, "__index__"):
            raise TypeError(f"window: {name} must be an int or None (unbounded), got {n!r}")
        if n is not None and n < 0:
            raise ValueError(f"window: {name} must be >= 0 or None (unbounded), got {n}")
    return Band(left, right, _alignment(align))


# --- lengths --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """The first (``side="left"``: the last) ``lengths[b]`` keys (axis 1) or queries (axis 0)."""

    lengths: Tensor  # (B,) integer
    axis: int
    side: str = "right"  # where the padding is

    def _range(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        n = self.lengths.to(device=device, dtype=torch.int64)
        return (torch.zeros_like(n), n) if self.side == "right" else (length - n, torch.full_like(n, length))

    def keep(self, patch: Patch) -> Tensor:
        x, length = (patch.i, patch.len_q) if self.axis == 0 else (patch.j, patch.len_k)
        lo, hi = self._range(length, patch.device)
        lo, hi = (t[patch.batch].view(-1, 1, 1, 1) for t in (lo, hi))
        return (x >= lo) & (x < hi)

    def verdict(self, grid: Grid) -> Tensor:
        first, last = grid.edges(self.axis)
        lo, hi = (t[:, None] for t in self._range((grid.len_q, grid.len_k)[self.axis], grid.device))
        full, empty = (first >= lo) & (last < hi), (last < lo) | (first >= hi)
        shape = (-1, 1, grid.rows, 1) if self.axis == 0 else (-1, 1, 1, grid.cols)
        return _verdict(full, empty).view(shape)

    def check(self, batch: int, heads: int, len_q: int, len_k: int) -> None:
        if self.lengths.shape != (batch,):
            raise ValueError(f"{self!r}: lengths must have shape (B,) = ({batch},), got {tuple(self.lengths.shape)}")

    def tensors(self) -> list[Tensor]:
        return [self.lengths]

    def code(self) -> list[int]:
        return [_LENGTHS, self.axis, int(self.side == "left")]

    def __repr__(self) -> str:
        side = "" if self.side == "right" else f", padding={self.side!r}"
        return f"{('query', 'key')[self.axis]}_lengths({_brief(self.lengths)}{side})"


def _lengths(axis: int, lengths: Tensor | list[int], padding: str) -> Mask:
    if padding not in ("right", "left"):
        raise ValueError(f"padding must be 'right' or 'left', got {padding!r}")
    return Lengths(_integers(lengths, "lengths"), axis, padding)


def key_lengths(lengths: Tensor | list[int], padding: str = "right") -> Mask:
    """Sequence b has ``lengths[b]`` real keys; the rest is padding on the given side.

    lengths: (B,) integers.
    """
    return _lengths(1, lengths, padding)


def query_lengths(lengths: Tensor | list[int], padding: str = "right") -> Mask:
    """Sequence b has ``lengths[b]`` real queries; the others attend to nothing (o = 0, lse = -inf)."""
    return _lengths(0, lengths, padding)


def prefix_lm(lengths: Tensor | list[int], align: str | int | None = None) -> Mask:
    """Causal, except that everyone sees the first ``lengths[b]`` keys (a prefix language model)."""
    return causal(align) | key_lengths(lengths)


# --- documents ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Query i attends to key j when both carry the same document number."""

    q_ids: Tensor  # (B or 1, Lq) int64
    k_ids: Tensor  # (B or 1, Lk) int64

    def keep(self, patch: Patch) -> Tensor:
        q = patch.take(self.q_ids.to(patch.device)[:, None, :, None])
        k = patch.take(self.k_ids.to(patch.device)[:, None, None, :])
        return q == k

    def verdict(self, grid: Grid) -> Tensor:
        q0, q1 = _extremes(self.q_ids.to(grid.device), grid.block_m)
        k0, k1 = _extremes(self.k_ids.to(grid.device), grid.block_n)
        q0, q1, k0, k1 = q0[:, :, None], q1[:, :, None], k0[:, None, :], k1[:, None, :]
        full = (q0 == q1) & (k0 == k1) & (q0 == k0)
        return _verdict(full, (q1 < k0) | (k1 < q0))[:, None]

    def check(self, batch: int, heads: int, len_q: int, len_k: int) -> None:
        for name, ids, n in (("queries", self.q_ids, len_q), ("keys", self.k_ids, len_k)):
            if ids.shape not in ((1, n), (batch, n)):
                raise ValueError(
                    f"documents: the ids of the {name} must have shape ({n},) or ({batch}, {n}), got {tuple(ids.shape)}"
                )

    def tensors(self) -> list[Tensor]:
        return [self.q_ids, self.k_ids]

    def code(self) -> list[int]:
        return [_DOCUMENTS]

    def __repr__(self) -> str:
        return f"documents({_brief(self.q_ids)})"


def documents(ids: Tensor | list[int], key_ids: Tensor | list[int] | None = None) -> Mask:
    """Packed sequences: a query attends only to keys of its own document.

    ids: (L,) or (B, L) integers, the document number of each position, in any order. ``key_ids``
    gives the keys' numbers where they differ from the queries'. Tiles of whole documents need no
    element-wise mask, and tiles of disjoint ranges of numbers are skipped.
    """
    q = _integers(ids, "ids").to(torch.int64)
    k = q if key_ids is None else _integers(key_ids, "key_ids").to(torch.int64)
    for name, x in (("ids", q), ("key_ids", k)):
        if x.dim() not in (1, 2):
            raise ValueError(f"documents: {name} must have shape (L,) or (B, L), got {tuple(x.shape)}")
    return Documents(*(x if x.dim() == 2 else x[None] for x in (q, k)))


def _extremes(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest id in each block of the last axis."""
    n = -(-ids.shape[-1] // block)
    padded = torch.nn.functional.pad(ids, (0, n * block - ids.shape[-1]), value=0)
    if padded.shape[-1] != ids.shape[-1]:
        padded[:, ids.shape[-1] :] = ids[:, -1:]
    tiles = padded.view(ids.shape[0], n, block)
    return tiles.amin(-1), tiles.amax(-1)


# --- arbitrary masks ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A bool tensor, broadcastable to (B, H, Lq, Lk)."""

    mask: Tensor  # 4-D

    def keep(self, patch: Patch) -> Tensor:
        return patch.take(self.mask).to(patch.device)

    def verdict(self, grid: Grid) -> Tensor:
        m = self.mask
        bm = 1 if m.shape[2] == 1 else grid.block_m
        bn = 1 if m.shape[3] == 1 else grid.block_n
        rows = [_blocks(m[:, :, i : i + bm], bn) for i in range(0, m.shape[2], bm)]
        return torch.stack(rows, 2) if rows else torch.zeros(*m.shape[:2], 0, 1, dtype=torch.int8)

    def check(self, batch: int, heads: int, len_q: int, len_k: int) -> None:
        check_broadcast("mask", self.mask, (batch, heads, len_q, len_k))

    def tensors(self) -> list[Tensor]:
        return [self.mask]

    def code(self) -> list[int]:
        return [_DENSE]

    def __repr__(self) -> str:
        return f"dense(bool{list(self.mask.shape)})"


def dense(mask: Tensor) -> Mask:
    """A bool tensor, True = attend, of shape (Lq, Lk) or (B, H, Lq, Lk) with 1 where it broadcasts."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        if not isinstance(mask, Tensor):
            fix = "; call it: masks.causal()" if callable(mask) else ""
            raise TypeError(f"a mask must be one of tilewise.masks or a bool tensor, got {mask!r}{fix}")
        raise TypeError(
            f"a mask tensor must be torch.bool with True = attend, got {mask.dtype}. For 1 = attend use mask.bool(); "
            "for 1 = masked use ~mask.bool(); an additive (float) mask goes to bias="
        )
    return Dense(to_4d("mask", mask))


def _blocks(strip: Tensor, bn: int) -> Tensor:
    """Verdicts (B, H, tiles) of a strip of one row of tiles, (B, H, m, L)."""
    every, some = strip.all(2), strip.any(2)
    n = -(-strip.shape[-1] // bn)
    gap = n * bn - strip.shape[-1]
    every = torch.nn.functional.pad(every, (0, gap), value=True).unflatten(-1, (n, bn)).all(-1)
    some = torch.nn.functional.pad(some, (0, gap), value=False).unflatten(-1, (n, bn)).any(-1)
    return _verdict(every, ~some)


class _Holder:
    """Keeps a predicate's function alive for as long as a mask or a pending backward needs it."""

    def __init__(self, fn: Callable[..., Tensor]):
        self.fn = fn


_next_key = itertools.count()
_holders: weakref.WeakValueDictionary[int, _Holder] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Predicate(Mask):
    """A Python function of (b, h, i, j, *captured)."""

    holder: _Holder
    key: int
    captured: tuple[Tensor, ...] = ()

    def keep(self, patch: Patch) -> Tensor:
        captured = [t.to(patch.device) for t in self.captured]
        out = self.holder.fn(patch.b, patch.h, patch.i, patch.j, *captured)
        if not isinstance(out, Tensor) or out.dtype != torch.bool:
            got = out.dtype if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(
                f"{self!r} must return a bool tensor built from b, h, i, j with arithmetic, comparisons and indexing; "
                f"got {got}"
            )
        return out

    def verdict(self, grid: Grid) -> Tensor:
        """Evaluated once, tile by tile; a predicate that ignores b or h is not repeated over them."""
        every, some = [], []
        for i in range(0, grid.len_q, grid.block_m):
            for j in range(0, grid.len_k, grid.block_n):
                rows, cols = slice(i, min(i + grid.block_m, grid.len_q)), slice(j, min(j + grid.block_n, grid.len_k))
                patch = Patch(
                    slice(0, grid.batch), slice(0, grid.heads), rows, cols, grid.len_q, grid.len_k, grid.device
                )
                kept = self.keep(patch)
                every.append(kept.all(-1).all(-1))
                some.append(kept.any(-1).any(-1))
        if not every:
            return torch.zeros(1, 1, grid.rows, grid.cols, dtype=torch.int8, device=grid.device)
        table = _verdict(torch.stack(every, -1), ~torch.stack(some, -1))
        return table.unflatten(-1, (grid.rows, grid.cols))

    def tensors(self) -> list[Tensor]:
        return list(self.captured)

    def code(self) -> list[int]:
        return [_PREDICATE, self.key, len(self.captured)]

    def __repr__(self) -> str:
        return f"predicate({getattr(self.holder.fn, '__name__', repr(self.holder.fn))})"


def predicate(fn: Callable[..., Tensor], *captured: Tensor) -> Mask:
    """Any rule: ``fn(b, h, i, j, *captured) -> bool tensor``, True = attend.

    fn gets index tensors of shapes (B,1,1,1), (1,H,1,1), (1,1,M,1), (1,1,1,N) and returns a bool
    tensor that broadcasts with them. Tensors that the rule reads are best given as ``captured``.
    Every tile is evaluated once to find those to skip; no (Lq, Lk) tensor is stored.
    """
    if not callable(fn):
        raise TypeError(f"predicate needs a function of (b, h, i, j), got {type(fn).__name__}")
    holder, key = _Holder(fn), next(_next_key)
    _holders[key] = holder
    return Predicate(holder, key, captured)


# --- combinations ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Group(Mask):
    terms: tuple[Mask, ...]

    def relative(self) -> bool:
        return all(t.relative() for t in self.terms)

    def check(self, batch: int, heads: int, len_q: int, len_k: int) -> None:
        for t in self.terms:
            t.check(batch, heads, len_q, len_k)

    def tensors(self) -> list[Tensor]:
        return [x for t in self.terms for x in t.tensors()]

    def _code(self, op: int) -> list[int]:
        return [x for t in self.terms for x in t.code()] + [op, len(self.terms)]


@dataclass(frozen=True, eq=False)
class All(_Group):
    """Kept where every term keeps."""

    def keep(self, patch: Patch) -> Tensor:
        return reduce(torch.logical_and, (t.keep(patch) for t in self.terms))

    def verdict(self, grid: Grid) -> Tensor:
        return reduce(torch.minimum, (t.verdict(grid) for t in self.terms))

    def reach(self, rows: slice, len_q: int, len_k: int) -> tuple[int, int]:
        ranges = [t.reach(rows, len_q, len_k) for t in self.terms]
        return max(r[0] for r in ranges), min(r[1] for r in ranges)

    def whole(self, rows: slice, len_q: int, len_k: int) -> tuple[int, int]:
        ranges = [t.whole(rows, len_q, len_k) for t in self.terms]
        return max(r[0] for r in ranges), min(r[1] for r in ranges)

    def code(self) -> list[int]:
        return self._code(_ALL)

    def __repr__(self) -> str:
        return " & ".join(f"({t!r})" if isinstance(t, Any) else repr(t) for t in self.terms)


@dataclass(frozen=True, eq=False)
class Any(_Group):
    """Kept where any term keeps."""

    def keep(self, patch: Patch) -> Tensor:
        return reduce(torch.logical_or, (t.keep(patch) for t in self.terms))

    def verdict(self, grid: Grid) -> Tensor:
        return reduce(torch.maximum, (t.verdict(grid) for t in self.terms))

    def reach(self, rows: slice, len_q: int, len_k: int) -> tuple[int, int]:
        ranges = [t.reach(rows, len_q, len_k) for t in self.terms]
        return min(r[0] for r in ranges), max(r[1] for r in ranges)

    def code(self) -> list[int]:
        return self._code(_ANY)

    def __repr__(self) -> str:
        return " | ".join(repr(t) for t in self.terms)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """Kept where the term does not keep."""

    term: Mask

    def keep(self, patch: Patch) -> Tensor:
        return ~self.term.keep(patch)

    def relative(self) -> bool:
        return self.term.relative()

    def verdict(self, grid: Grid) -> Tensor:
        return FULL - self.term.verdict(grid)

    def check(self, batch: int, heads: int, len_q: int, len_k: int) -> None:
        self.term.check(batch, heads, len_q, len_k)

    def tensors(self) -> list[Tensor]:
        return self.term.tensors()

    def code(self) -> list[int]:
        return [*self.term.code(), _NOT]

    def __repr__(self) -> str:
        return f"~{self.term!r}" if not isinstance(self.term, _Group) else f"~({self.term!r})"


def _combine(kind: type[All] | type[Any], a: Mask, b: Mask) -> Mask:
    if isinstance(b, Tensor):
        raise TypeError("a mask is joined with another mask: wrap the tensor, masks.dense(tensor)")
    if not isinstance(b, Mask):
        return NotImplemented
    terms = tuple(x for t in (a, b) for x in (t.terms if isinstance(t, kind) else (t,)))
    return kind(_one_diagonal(terms) if kind is All else terms)


def _one_diagonal(terms: tuple[Mask, ...]) -> tuple[Mask, ...]:
    """Bands that leave their diagonal open take that of the band beside them."""
    given = next((t.align for t in terms if isinstance(t, Band) and t.align is not None), None)
    if given is None:
        return terms
    return tuple(Band(t.left, t.right, given) if isinstance(t, Band) and t.align is None else t for t in terms)


# --- crossing the operator boundary ---------------------------------------------------------------

_BAND, _LENGTHS, _DOCUMENTS, _DENSE, _PREDICATE, _ALL, _ANY, _NOT = range(8)


def decode(code: list[int], tensors: list[Tensor]) -> Mask | None:
    """The mask that ``code()`` and ``tensors()`` came from; None for an empty code."""
    stack: list[Mask] = []
    xs, words = iter(tensors), iter(code)
    for op in words:
        if op == _BAND:
            has_left, left, has_right, right, kind, offset = itertools.islice(words, 6)
            align = (None, offset, BOTTOM_RIGHT)[kind]
            stack.append(Band(left if has_left else None, right if has_right else None, align))
        elif op == _LENGTHS:
            axis, left_padded = itertools.islice(words, 2)
            stack.append(Lengths(next(xs), axis, "left" if left_padded else "right"))
        elif op == _DOCUMENTS:
            stack.append(Documents(next(xs), next(xs)))
        elif op == _DENSE:
            stack.append(Dense(next(xs)))
        elif op == _PREDICATE:
            key, n = itertools.islice(words, 2)
            stack.append(Predicate(_holder(key), key, tuple(itertools.islice(xs, n))))
        elif op == _NOT:
            stack.append(Not(stack.pop()))
        else:
            n = next(words)
            terms = tuple(stack[len(stack) - n :])
            del stack[len(stack) - n :]
            stack.append((All if op == _ALL else Any)(terms))
    return stack[0] if stack else None


def _holder(key: int) -> _Holder:
    holder = _holders.get(key)
    if holder is None:
        raise RuntimeError(
            "the function of a predicate mask no longer exists: keep a reference to the mask until the compiled "
            "backward has run"
        )
    return holder


def holders(mask: Mask | None) -> tuple[_Holder, ...]:
    """What a pending backward must keep alive."""
    if isinstance(mask, Predicate):
        return (mask.holder,)
    if isinstance(mask, Not):
        return holders(mask.term)
    if not isinstance(mask, _Group):
        return ()
    found: tuple[_Holder, ...] = ()
    for t in mask.terms:  # no generator, as every call asks several times
        found += holders(t)
    return found


# --- small helpers --------------------------------------------------------------------------------


def _verdict(full: Tensor, empty: Tensor) -> Tensor:
    """int8: FULL where full, EMPTY where empty, else PARTIAL."""
    return torch.where(full, FULL, torch.where(empty, EMPTY, PARTIAL)).to(torch.int8)


def _integers(x: Tensor | list[int], name: str) -> Tensor:
    x = torch.as_tensor(x)
    if x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {x.dtype}")
    return x


def _brief(x: Tensor) -> str:
    return f"{x.dtype}{list(x.shape)}".replace("torch.", "")


def to_4d(name: str, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x[None, None]
    if x.dim() == 4:
        return x
    raise ValueError(
        f"{name} must have shape (Lq, Lk) or (B, H, Lq, Lk), with 1 where it broadcasts; got {tuple(x.shape)}"
    )


def check_broadcast(name: str, x: Tensor, sizes: tuple[int, int, int, int]) -> None:
    if any(n != 1 and n != size for n, size in zip(x.shape, sizes, strict=True)):
        b, h, lq, lk = sizes
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} does not broadcast to (B, H, Lq, Lk) = {sizes}: each dim must be 1 or "
            f"that size; accepted are ({lq}, {lk}) and ({b} or 1, {h} or 1, {lq} or 1, {lk} or 1)"
        )
