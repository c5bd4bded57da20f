"""The tile map: for every tile of the score matrix, whether to skip it, take it whole or mask it.

The map of a mask without tensors (causal, window and their combinations) is pure arithmetic on tile
edges and is cached. Masks with tensors are classified anew for each call, tile by tile; what is kept is one int8
per tile, never anything of size Lq x Lk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import EMPTY, FULL, PARTIAL, Grid, Mask, Patch, decode, holders
from .request import Request, Sequence


class Tile(NamedTuple):
    """Rows (queries) and columns (keys) of one tile, and whether it needs the mask."""

    rows: slice
    cols: slice
    verdict: int
    masked: slice = slice(0, 0)  # the columns of a PARTIAL tile that need it

    def edge(self) -> Tile:
        """The part of a PARTIAL tile that needs the mask."""
        return self._replace(cols=self.masked)


@dataclass(frozen=True)
class TileMap:
    """Verdicts of all tiles. ``table`` is int8 (B or 1, H or 1, row tiles, column tiles), on the CPU."""

    grid: Grid
    mask: Mask | None
    table: Tensor

    def block(self, batch: slice, heads: slice) -> list[list[int]]:
        """One verdict per tile for several batch entries and heads that are computed together."""
        part = self.table[batch if self.table.shape[0] > 1 else slice(None)]
        part = part[:, heads if self.table.shape[1] > 1 else slice(None)].flatten(0, 1)
        if part.shape[0] == 1:
            return part[0].tolist()
        every, some = part.amin(0), part.amax(0)
        return torch.where(every == FULL, FULL, some.clamp(max=PARTIAL)).tolist()

    def row(self, verdicts: list[list[int]], r: int, band: range | None = None) -> Iterator[tuple[int, Tile]]:
        """The tiles that row-tile r visits, each with its number, in key order; of a band of columns only."""
        for c in band or range(self.grid.cols):
            if tile := self._tile(verdicts[r][c], r, c):
                yield c, tile

    def col(self, verdicts: list[list[int]], c: int, band: range | None = None) -> Iterator[tuple[int, Tile]]:
        """The tiles that column-tile c takes part in, each with its number, in query order; of a band of rows only."""
        for r in band or range(self.grid.rows):
            if tile := self._tile(verdicts[r][c], r, c):
                yield r, tile

    def _tile(self, verdict: int, r: int, c: int) -> Tile | None:
        if verdict == EMPTY:
            return None
        g = self.grid
        rows, cols = g.rows_of(r), g.cols_of(c)
        if verdict == FULL or self.mask is None:
            return Tile(rows, cols, verdict)
        lo, hi = self.mask.reach(rows, g.len_q, g.len_k)  # drop the columns beyond the band's edge
        j0, j1 = max(cols.start, lo), min(cols.stop, hi)
        return Tile(rows, slice(j0, j1), PARTIAL, self._masked(rows, j0, j1)) if j0 < j1 else None

    def _masked(self, rows: slice, j0: int, j1: int) -> slice:
        """What is left of the columns [j0, j1) without those, at one end, that these rows keep."""
        assert self.mask is not None
        lo, hi = self.mask.whole(rows, self.grid.len_q, self.grid.len_k)
        if max(lo, j0) < min(hi, j1):
            if lo <= j0:
                j0 = min(hi, j1)
            elif hi >= j1:
                j1 = lo
        return slice(j0, j1)

    def visited(self) -> int:
        """Number of tiles computed, over all batch entries and heads."""
        repeats = (self.grid.batch // self.table.shape[0]) * (self.grid.heads // self.table.shape[1])
        return int((self.table != EMPTY).sum()) * repeats

    def visible(self, first: int = 0) -> int:
        """Number of (query, key) pairs kept, over all batch entries (from ``first``) and heads. Exact."""
        g, total, widths = self.grid, 0, self.sizes(1)
        nb, nh = self.table.shape[:2]
        for b in range(nb):
            for h in range(nh):
                batch = slice(first + b, first + b + 1) if nb > 1 else slice(first, first + g.batch)
                heads = slice(h, h + 1) if nh > 1 else slice(0, g.heads)
                repeats = (batch.stop - batch.start) * (heads.stop - heads.start)
                for r in range(g.rows):
                    row, rows = self.table[b, h, r], g.rows_of(r)
                    total += (rows.stop - rows.start) * int(widths[row == FULL].sum()) * repeats
                    for c in (row == PARTIAL).nonzero().flatten().tolist():
                        if tile := self._tile(PARTIAL, r, c):
                            total += self._kept(tile, batch, heads)
        return total

    def _kept(self, tile: Tile, batch: slice, heads: slice) -> int:
        """Number of pairs of a PARTIAL tile that the mask keeps."""
        assert self.mask is not None
        g = self.grid
        keep = self.mask.keep(Patch(batch, heads, tile.rows, tile.cols, g.len_q, g.len_k, g.device))
        shape = (s.stop - s.start for s in (batch, heads, tile.rows, tile.cols))
        return int(keep.expand(*shape).sum())

    def sizes(self, axis: int) -> Tensor:
        """Queries (0) or keys (1) of each tile, int64, on the CPU."""
        first, last = self.grid.edges(axis)
        return (last - first + 1).cpu()

    def flops(self, dim: int, dim_v: int) -> int:
        """FLOPs of the forward over the visible pairs."""
        return forward_flops(self.visible(), dim, dim_v)


def tile_map(mask: Mask | None, grid: Grid) -> TileMap:
    """Classify the tiles of ``grid`` (which names sizes, tile shape and device) under ``mask``."""
    if mask is None or not (mask.tensors() or holders(mask)):
        return TileMap(grid, mask, _arithmetic(() if mask is None else tuple(mask.code()), grid))
    return TileMap(grid, mask, _table(mask, grid))


def sequence_map(r: Request, seq: Sequence, block_m: int, block_n: int) -> TileMap:
    """The tiles of one sequence of a request. Of tensors on "meta" only the shapes are needed."""
    device = torch.device("cpu") if r.device.type == "meta" else r.device
    grid = Grid(r.batch, r.heads, seq.len_q, seq.len_k, block_m, block_n, device)
    tiles = tile_map(r.mask, grid)
    if r.ragged is None:
        return tiles
    table = tiles.table[seq.batch] if tiles.table.shape[0] > 1 else tiles.table
    return TileMap(grid._replace(batch=1), r.mask, table)


def visible_pairs(r: Request, block: int = 128) -> int:
    """Number of (query, key) pairs that the mask of a request keeps, over its batch and query heads. Exact."""
    return sum(sequence_map(r, seq, block, block).visible(seq.batch.start) for seq in r.sequences())


def forward_flops(pairs: int, dim: int, dim_v: int) -> int:
    """Two matrix products over so many (query, key) pairs: Q K^T and P V."""
    return 2 * (dim + dim_v) * pairs


def backward_flops(pairs: int, dim: int, dim_v: int) -> int:
    """Five: Q K^T again, dP = dO V^T, dV = P^T dO, dK = dS^T Q, dQ = dS K."""
    return 2 * (3 * dim + 2 * dim_v) * pairs


@lru_cache(maxsize=256)
def _arithmetic(code: tuple[int, ...], grid: Grid) -> Tensor:
    return _table(decode(list(code), []), grid)


def _table(mask: Mask | None, grid: Grid) -> Tensor:
    if mask is None:
        return torch.full((1, 1, grid.rows, grid.cols), FULL, dtype=torch.int8)
    table = mask.verdict(grid)
    return table.expand(*table.shape[:2], grid.rows, grid.cols).cpu()
