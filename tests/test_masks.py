"""Masks: element-wise meaning, verdicts that never lie, combination, crossing the operator boundary."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise import masks
from tilewise.masks import EMPTY, FULL, PARTIAL, Grid, Patch, decode
from tilewise.tilemap import tile_map

CPU = torch.device("cpu")


def whole(mask, b=1, h=1, lq=4, lk=4):
    patch = Patch(slice(0, b), slice(0, h), slice(0, lq), slice(0, lk), lq, lk, CPU)
    return mask.keep(patch).expand(b, h, lq, lk)


def picture(mask, **sizes):
    return ["".join("x" if k else "." for k in row) for row in whole(mask, **sizes)[0, 0].tolist()]


@pytest.mark.parametrize("none", [torch.zeros(0, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64)], ids=str)
def test_documents_without_keys(none):
    mask = masks.documents(torch.tensor([0, 0, 1]), none)
    mask.check(2, 1, 3, 0)
    assert whole(mask, b=2, lq=3, lk=0).shape == (2, 1, 3, 0)


def test_pictures():
    assert picture(masks.causal()) == ["x...", "xx..", "xxx.", "xxxx"]
    assert picture(masks.causal(), lq=2, lk=4) == ["x...", "xx.."]
    assert picture(masks.causal("bottom_right"), lq=2, lk=4) == ["xxx.", "xxxx"]
    assert picture(masks.causal(1), lq=2, lk=4) == ["xx..", "xxx."]
    assert picture(masks.causal("bottom_right"), lq=4, lk=2) == ["..", "..", "x.", "xx"]
    assert picture(masks.window(1, 1)) == ["xx..", "xxx.", ".xxx", "..xx"]
    assert picture(masks.window(None, 1)) == ["xx..", "xxx.", "xxxx", "xxxx"]
    assert picture(masks.window(1, None)) == ["xxxx", "xxxx", ".xxx", "..xx"]
    assert picture(masks.key_lengths([2])) == ["xx.."] * 4
    assert picture(masks.key_lengths([2], padding="left")) == ["..xx"] * 4
    assert picture(masks.query_lengths([1])) == ["xxxx", "....", "....", "...."]
    assert picture(masks.documents([7, 7, 3, 3])) == ["xx..", "xx..", "..xx", "..xx"]
    assert picture(masks.prefix_lm([2])) == ["xx..", "xx..", "xxx.", "xxxx"]
    assert picture(~masks.causal()) == [".xxx", "..xx", "...x", "...."]
    assert picture(masks.predicate(lambda b, h, i, j: (i + j) % 2 == 0)) == ["x.x.", ".x.x", "x.x.", ".x.x"]


def test_a_window_lies_on_the_diagonal_of_the_causal_mask_beside_it():
    for mask in (
        masks.causal("bottom_right") & masks.window(1, 0),
        masks.window(1, 0) & masks.causal("bottom_right"),
    ):
        assert picture(mask, lq=2, lk=4) == [".xx.", "..xx"]
    assert picture(masks.causal() & masks.window(1, 0), lq=2, lk=4) == ["x...", "xx.."]
    assert picture(masks.causal() & masks.causal("bottom_right"), lq=2, lk=4) == [
        "x...",
        "xx..",
    ]  # causal() is top left


TERMS = {
    "causal": lambda lq, lk: masks.causal(),
    "causal bottom right": lambda lq, lk: masks.causal("bottom_right"),
    "causal offset": lambda lq, lk: masks.causal(2),
    "window": lambda lq, lk: masks.window(3, 1),
    "window right": lambda lq, lk: masks.window(2, 2, "bottom_right"),
    "keys": lambda lq, lk: masks.key_lengths(torch.tensor([lk // 2, lk])),
    "left padding": lambda lq, lk: masks.key_lengths([lk // 3, 0], padding="left"),
    "queries": lambda lq, lk: masks.query_lengths([lq, lq // 2]),
    "documents": lambda lq, lk: masks.documents(torch.arange(lq) // 3, torch.arange(lk) // 4),
    "documents of each": lambda lq, lk: masks.documents(torch.arange(2 * lq).view(2, lq) % 5, torch.arange(2 * lk).view(2, lk) % 4),
    "dense": lambda lq, lk: masks.dense(torch.rand(2, 1, lq, lk, generator=torch.Generator().manual_seed(1)) < 0.6),
    "dense columns": lambda lq, lk: masks.dense(torch.arange(lk).view(1, 1, 1, lk) % 7 > 2),
    "predicate": lambda lq, lk: masks.predicate(lambda b, h, i, j: (i // 5 + j // 3 + b + h) % 2 == 0),
    "captured": lambda lq, lk: masks.predicate(lambda b, h, i, j, t: t[j] <= i, torch.arange(lk).flip(0)),
}  # fmt: skip


def mask_strategy():
    term = st.sampled_from(sorted(TERMS)).map(lambda name: (name,))
    return st.recursive(
        term, lambda m: st.tuples(st.sampled_from("&|"), m, m) | st.tuples(st.just("~"), m), max_leaves=4
    )


def build(tree, lq, lk):
    if len(tree) == 1:
        return TERMS[tree[0]](lq, lk)
    if tree[0] == "~":
        return ~build(tree[1], lq, lk)
    a, b = build(tree[1], lq, lk), build(tree[2], lq, lk)
    return a & b if tree[0] == "&" else a | b


def evaluate(tree, lq, lk):
    """The same expression over whole bool tensors."""
    if len(tree) == 1:
        return whole(TERMS[tree[0]](lq, lk), 2, 2, lq, lk)
    if tree[0] == "~":
        return ~evaluate(tree[1], lq, lk)
    a, b = evaluate(tree[1], lq, lk), evaluate(tree[2], lq, lk)
    return a & b if tree[0] == "&" else a | b


@given(mask_strategy(), st.integers(1, 20), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
def test_tiles_never_lie(tree, lq, lk, bm, bn):
    """Every kept pair lies in a visited tile, FULL tiles keep all, and counts are exact."""
    mask = build(tree, lq, lk)
    tiles = tile_map(mask, Grid(2, 2, lq, lk, bm, bn, CPU))
    kept = whole(mask, 2, 2, lq, lk)
    for b, h in itertools.product(range(2), range(2)):
        seen = torch.zeros(lq, lk, dtype=torch.bool)
        verdicts = tiles.block(slice(b, b + 1), slice(h, h + 1))
        for r in range(tiles.grid.rows):
            for _, tile in tiles.row(verdicts, r):
                part = kept[b, h, tile.rows, tile.cols]
                assert tile.verdict in (PARTIAL, FULL)
                assert tile.verdict != FULL or bool(part.all())
                if tile.verdict == PARTIAL:
                    beside = [tile.cols.start, tile.masked.start], [tile.masked.stop, tile.cols.stop]
                    assert all(j0 <= j1 and bool(kept[b, h, tile.rows, j0:j1].all()) for j0, j1 in beside)
                seen[tile.rows, tile.cols] = True
        assert not bool((kept[b, h] & ~seen).any())
    together = tiles.block(slice(0, 2), slice(0, 2))
    for r, c in itertools.product(range(tiles.grid.rows), range(tiles.grid.cols)):
        part = kept[:, :, r * bm : (r + 1) * bm, c * bn : (c + 1) * bn]
        assert together[r][c] != EMPTY or not bool(part.any())
        assert together[r][c] != FULL or bool(part.all())
    assert tiles.visible() == int(kept.sum())
    assert tiles.flops(8, 16) == 2 * 24 * int(kept.sum())


@given(mask_strategy(), st.integers(1, 20), st.integers(1, 20))
def test_code_crosses_the_boundary(tree, lq, lk):
    mask = build(tree, lq, lk)
    again = decode(mask.code(), mask.tensors())
    assert torch.equal(whole(again, 2, 2, lq, lk), whole(mask, 2, 2, lq, lk))
    expected = evaluate(tree, lq, lk)
    if "window" not in str(tree):  # a window's diagonal is that of the causal mask beside it
        assert torch.equal(whole(mask, 2, 2, lq, lk), expected)


def test_interval_verdicts_are_exact():
    """Bands, lengths and documents in order: a tile called PARTIAL really is."""
    n = 40
    for mask in (
        masks.causal(),
        masks.causal(-3),
        masks.window(7, 2),
        masks.key_lengths([17]),
        masks.query_lengths([9], padding="left"),
        masks.documents(torch.arange(n) // 11),
    ):
        table = tile_map(mask, Grid(1, 1, n, n, 8, 8, CPU)).table[0, 0]
        kept = whole(mask, lq=n, lk=n)[0, 0].view(5, 8, 5, 8).transpose(1, 2).flatten(2)
        expected = torch.where(kept.all(-1), FULL, torch.where(kept.any(-1), PARTIAL, EMPTY))
        assert torch.equal(table.long(), expected), mask


def test_a_predicate_is_not_repeated_over_what_it_ignores():
    calls = []

    def rule(b, h, i, j):
        keep = (i >= j) & (h >= 0)
        calls.append(keep.shape)
        return i >= j

    table = tile_map(masks.predicate(rule), Grid(4, 8, 64, 64, 16, 16, CPU)).table
    assert table.shape == (1, 1, 4, 4)
    assert len(calls) == 16  # once a tile


def test_cached_map_is_that_of_its_mask():
    grid = Grid(1, 1, 64, 64, 16, 16, CPU)
    assert tile_map(masks.causal(), grid).table is tile_map(masks.causal(), grid).table
    assert not torch.equal(tile_map(masks.causal(), grid).table, tile_map(masks.window(3, 0), grid).table)


def test_the_map_is_small():
    """131,072 x 131,072: a mask of that size would be 16 GiB."""
    tiles = tile_map(masks.causal() & masks.window(1024, 0), Grid(1, 1, 2**17, 2**17, 128, 128, CPU))
    assert tiles.table.numel() == 2**20
    assert tiles.visited() == 1024 * 9 - sum(range(9))


BAD = {
    "a mask has no truth value": (lambda: masks.causal() and masks.window(1, 0), TypeError, "combine masks with &"),
    "negative window": (lambda: masks.window(-1, 0), ValueError, "left must be >= 0 or None"),
    "alignment": (lambda: masks.causal("right"), ValueError, "'top_left', 'bottom_right' or an int offset, got 'right'"),
    "padding side": (lambda: masks.key_lengths([1], padding="top"), ValueError, "'right' or 'left', got 'top'"),
    "float lengths": (lambda: masks.key_lengths(torch.tensor([1.0])), TypeError, "lengths must be integers"),
    "integer mask": (lambda: masks.dense(torch.ones(2, 2, dtype=torch.int64)), TypeError, "True = attend, got torch.int64"),
    "3-D mask": (lambda: masks.dense(torch.ones(2, 2, 2).bool()), ValueError, r"shape \(Lq, Lk\) or \(B, H, Lq, Lk\)"),
    "documents": (lambda: masks.documents(torch.ones(2, 2, 2).long()), ValueError, r"\(L,\) or \(B, L\)"),
    "predicate of nothing": (lambda: masks.predicate(3), TypeError, r"a function of \(b, h, i, j\)"),
    "predicate of numbers": (
        lambda: whole(masks.predicate(lambda b, h, i, j: i - j)),
        TypeError,
        "must return a bool tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_masks(name):
    make, error, text = BAD[name]
    with pytest.raises(error, match=text):
        make()


def test_repr_reads_as_written():
    mask = masks.causal("bottom_right") & (masks.window(3, 0) | ~masks.key_lengths([1, 2]))
    assert repr(mask) == "causal(align='bottom_right') & (window(3, 0) | ~key_lengths(int64[2]))"
