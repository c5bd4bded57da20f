"""The tile map of a mask as plain data and as pictures: what ``tilewise tiles`` shows."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

import torch
from torch import Tensor

from .maskexpr import parse_mask
from .masks import EMPTY, FULL, PARTIAL, Grid, Mask
from .tilemap import tile_map

Facts = dict[str, Any]
MAX_TILES = 2**20  # of all batch entries; each is looked at
MAX_TILE = 2**22  # pairs of a tile: those of a PARTIAL one are counted by making its mask
MAX_DRAWN = 16  # batch entries side by side in one picture
LETTERS = {EMPTY: "E", PARTIAL: "P", FULL: "F"}
MARKS = {"E": "·", "P": "▒", "F": "█"}
COLOURS = {"E": "#eceff3", "P": "#e8983a", "F": "#2f6fb2"}
WORDS = {"E": "EMPTY: skipped", "P": "PARTIAL: masked pair by pair", "F": "FULL: no mask arithmetic"}


def tile_facts(text: str, len_q: int, len_k: int, block_m: int = 128, block_n: int = 128) -> Facts:
    """How many tiles of a mask are skipped, masked and taken whole, and what share of the work is left.

    text: a mask as ``parse_mask`` reads it, for one head. A mask with a length or a row of numbers for each batch
        entry has that many batch entries, and a map for each.

    Work is counted in pairs of a query and a key, as each costs the same 2 (D + Dv) FLOPs forward: ``share_visited``
    are the pairs of all tiles that are not EMPTY, ``share_visible`` those that the mask keeps; both of B * Lq * Lk.
    ``maps`` has for each batch entry a line for each row of tiles, one letter a tile: E, P or F.
    """
    mask = parse_mask(text)
    grid = _grid(mask, len_q, len_k, block_m, block_n)
    tiles = tile_map(mask, grid)
    table = tiles.table[:, 0]  # (B, row tiles, column tiles): every tensor of such a mask is of one head
    pairs = grid.batch * len_q * len_k
    return {
        "mask": repr(mask),
        "batch": grid.batch, "len_q": len_q, "len_k": len_k, "block_m": block_m, "block_n": block_n,
        "total": table.numel(),
        "empty": int((table == EMPTY).sum()),
        "partial": int((table == PARTIAL).sum()),
        "full": int((table == FULL).sum()),
        "share_visited": int((_pairs(grid) * (table != EMPTY)).sum()) / pairs,
        "share_visible": tiles.visible() / pairs,
        "maps": [["".join(LETTERS[x] for x in row) for row in entry] for entry in table.tolist()],
    }  # fmt: skip


def _grid(mask: Mask, len_q: int, len_k: int, block_m: int, block_n: int) -> Grid:
    batch = max((t.shape[0] for t in mask.tensors()), default=1)  # (B,) lengths, (B or 1, L) document numbers
    grid = Grid(batch, 1, len_q, len_k, block_m, block_n, torch.device("cpu"))
    if min(grid[:6]) < 1:
        raise ValueError(
            f"a tile map needs lengths and tiles of at least 1; got Lq = {len_q}, Lk = {len_k}, {batch} batch entries, "
            f"tiles of {block_m} x {block_n}"
        )
    mask.check(*grid[:4])
    if batch * grid.rows * grid.cols > MAX_TILES:
        raise ValueError(
            f"{batch} x {grid.rows} x {grid.cols} tiles are more than {MAX_TILES}; take larger tiles (--block-m, "
            "--block-n) or a shorter --length"
        )
    if min(block_m, len_q) * min(block_n, len_k) > MAX_TILE:
        raise ValueError(f"a tile of {block_m} x {block_n} is more than {MAX_TILE} pairs; take smaller tiles")
    return grid


def _pairs(grid: Grid) -> Tensor:
    """Pairs of a query and a key in each tile, (row tiles, column tiles): those at the ends may be smaller."""
    (i0, i1), (j0, j1) = grid.edges(0), grid.edges(1)
    return (i1 - i0 + 1)[:, None] * (j1 - j0 + 1)


def parse_length(text: str) -> tuple[int, int]:
    """ "4096", or "128,4096" for fewer queries than keys."""
    words = [w.strip() for w in text.split(",")]
    if len(words) > 2 or not all(w.isdecimal() for w in words):
        raise ValueError(f"--length takes a length such as 4096, or queries,keys such as 128,4096; got {text!r}")
    return int(words[0]), int(words[-1])


# --- pictures -------------------------------------------------------------------------------------


def shrink(lines: list[str], most: int = 32) -> tuple[list[str], tuple[int, int]]:
    """A map of at most ``most`` x ``most`` letters, and how many tiles high and wide a letter is.

    A letter that stands for tiles of several verdicts is P: some of their pairs are kept, and some are not.
    """
    high, wide = (-(-n // most) for n in (len(lines), len(lines[0])))
    return [_shrunk(lines[i : i + high], wide) for i in range(0, len(lines), high)], (high, wide)


def _shrunk(strip: list[str], wide: int) -> str:
    found = ({letter for line in strip for letter in line[j : j + wide]} for j in range(0, len(strip[0]), wide))
    return "".join(letters.pop() if len(letters) == 1 else "P" for letters in found)


def png(facts: Facts) -> bytes:
    """The maps side by side, drawn with matplotlib; ValueError where that is missing, or for too many of them."""
    if not importlib.util.find_spec("matplotlib"):
        raise ValueError("--png needs matplotlib: pip install 'tilewise[plots]'")
    if facts["batch"] > MAX_DRAWN:
        raise ValueError(f"--png draws the maps of at most {MAX_DRAWN} batch entries, got {facts['batch']}")
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # A Figure without pyplot: no window system is looked for, and no state is left behind.
    fig = Figure(figsize=(max(6.5, 4.5 * facts["batch"]), 5.5), layout="constrained")
    axes = fig.subplots(1, facts["batch"], squeeze=False)[0]
    rows, cols = len(facts["maps"][0]), len(facts["maps"][0][0])
    extent = (0, cols * facts["block_n"], rows * facts["block_m"], 0)  # the last tiles reach beyond the end
    for b, (ax, lines) in enumerate(zip(axes, facts["maps"], strict=True)):
        codes = [["EPF".index(letter) for letter in line] for line in lines]
        ax.imshow(codes, ListedColormap(list(COLOURS.values())), vmin=0, vmax=2, extent=extent, aspect="auto")
        ax.set(xlim=(0, facts["len_k"]), ylim=(facts["len_q"], 0), xlabel="key", ylabel="query")
        ax.set_title(f"batch entry {b}" if facts["batch"] > 1 else "")
    counts = {"E": facts["empty"], "P": facts["partial"], "F": facts["full"]}
    labels = [Patch(facecolor=COLOURS[x], label=f"{counts[x]} {WORDS[x]}") for x in "EPF"]
    fig.legend(handles=labels, loc="outside lower center", ncols=3, fontsize="small")
    fig.suptitle(f"{facts['mask']}, tiles of {facts['block_m']} x {facts['block_n']}")
    out = io.BytesIO()
    fig.savefig(out, format="png", dpi=120)
    return out.getvalue()
