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
from .request import Request


class Tile(NamedTuple):
    """Rows (queries) and columns (keys) of one tile, and whether it needs the mask."""

    rows: slice
    cols: slice
    verdict: int


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

    def row(self, verdicts: list[list[int]], r: int) -> Iterator[Tile]:
        """The tiles that row-tile r visits, in key order."""
        for c in range(self.grid.cols):
            if tile := self._tile(verdicts, r, c):
                yield tile

    def col(self, verdicts: list[list[int]], c: int) -> Iterator[Tile]:
        """The tiles that column-tile c takes part in, in query order."""
        for r in range(self.grid.rows):
            if tile := self._tile(verdicts, r, c):
                yield tile

    def _tile(self, verdicts: list[list[int]], r: int, c: int) -> Tile | None:
        if verdicts[r][c] == EMPTY:
            return None
        g = self.grid
        rows = slice(r * g.block_m, min((r + 1) * g.block_m, g.len_q))
        j0, j1 = c * g.block_n, min((c + 1) * g.block_n, g.len_k)
        if verdicts[r][c] == PARTIAL and self.mask is not None:  # drop the columns beyond the band's edge
            lo, hi = self.mask.reach(rows, g.len_q, g.len_k)
            j0, j1 = max(j0, lo), min(j1, hi)
        return Tile(rows, slice(j0, j1), verdicts[r][c]) if j0 < j1 else None

    def visited(self) -> int:
        """Number of tiles computed, over all batch entries and heads."""
        repeats = (self.grid.batch // self.table.shape[0]) * (self.grid.heads // self.table.shape[1])
        return int((self.table != EMPTY).sum()) * repeats

    def visible(self, first: int = 0) -> int:
        """Number of (query, key) pairs kept, over all batch entries (from ``first``) and heads. Exact."""
        g, total = self.grid, 0
        nb, nh = self.table.shape[:2]
        for b in range(nb):
            for h in range(nh):
                batch = slice(first + b, first + b + 1) if nb > 1 else slice(first, first + g.batch)
                heads = slice(h, h + 1) if nh > 1 else slice(0, g.heads)
                repeats = (batch.stop - batch.start) * (heads.stop - heads.start)
                verdicts = self.table[b, h].tolist()
                for r in range(g.rows):
                    for tile in self.row(verdicts, r):
                        m, n = tile.rows.stop - tile.rows.start, tile.cols.stop - tile.cols.start
                        if tile.verdict == PARTIAL and self.mask is not None:
                            patch = Patch(batch, heads, tile.rows, tile.cols, g.len_q, g.len_k, g.device)
                            kept = self.mask.keep(patch)
                            total += int(kept.expand(batch.stop - batch.start, heads.stop - heads.start, m, n).sum())
                        else:
                            total += m * n * repeats
        return total

    def flops(self, dim: int, dim_v: int) -> int:
        """FLOPs of the two forward matrix products over the visible pairs: 2 (D + Dv) each."""
        return 2 * (dim + dim_v) * self.visible()


def tile_map(mask: Mask | None, grid: Grid) -> TileMap:
    """Classify the tiles of ``grid`` (which names sizes, tile shape and device) under ``mask``."""
    if mask is None or not (mask.tensors() or holders(mask)):
        return TileMap(grid, mask, _arithmetic(() if mask is None else tuple(mask.code()), grid))
    return TileMap(grid, mask, _table(mask, grid))


def visible_pairs(r: Request, block: int = 128) -> int:
    """Number of (query, key) pairs that the mask of a request keeps, over its batch and query heads. Exact."""
    total = 0
    for seq in r.sequences():
        grid = Grid(r.batch, r.heads, seq.len_q, seq.len_k, block, block, r.device)
        tiles = tile_map(r.mask, grid)
        if r.ragged is not None:  # of this sequence only
            table = tiles.table[seq.batch] if tiles.table.shape[0] > 1 else tiles.table
            tiles = TileMap(grid._replace(batch=1), r.mask, table)
        total += tiles.visible(seq.batch.start)
    return total


@lru_cache(maxsize=256)
def _arithmetic(code: tuple[int, ...], grid: Grid) -> Tensor:
    return _table(decode(list(code), []), grid)


def _table(mask: Mask | None, grid: Grid) -> Tensor:
    if mask is None:
        return torch.full((1, 1, grid.rows, grid.cols), FULL, dtype=torch.int8)
    table = mask.verdict(grid)
    return table.expand(*table.shape[:2], grid.rows, grid.cols).cpu()
