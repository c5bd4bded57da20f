"""Dropout's random numbers: the published function, and independence of tiling."""

import pytest
import torch

from tilewise import philox_loop
from tilewise.masks import Patch
from tilewise.philox import dropout_keep, philox

CPU = torch.device("cpu")


KNOWN = {
    ((0, 0, 0, 0), (0, 0)): {
        7: (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        10: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    },
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2): {
        7: (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
        10: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    },
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): {
        7: (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        10: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    },
}


@pytest.mark.parametrize(("given", "words"), KNOWN.items())
def test_known_answers(given, words):
    """philox4x32-7 and -10 of Random123's kat_vectors."""
    counter, (k0, k1) = given
    seed = (k1 << 32 | k0) - (1 << 64 if k1 >> 31 else 0)
    for rounds, expected in words.items():
        found = philox(torch.tensor(seed), *(torch.tensor(c) for c in counter), rounds=rounds)
        assert tuple(int(w) for w in found) == expected


@pytest.fixture(params=[False, True], ids=["operations", "loop"], autouse=True)
def _compiled_by_numba(request, monkeypatch):
    """Every test of survivors, without the extra "fast" and with it."""
    if request.param:
        pytest.importorskip("numba")
    monkeypatch.setattr(philox_loop, "INSTALLED", request.param)


def keep(p, rows, cols, seed=7, b=slice(0, 2), h=slice(0, 3)):
    return dropout_keep(torch.tensor([seed, 1]), p, Patch(b, h, rows, cols, 50, 60, CPU), heads=3)


def test_any_patch_is_a_part_of_the_whole():
    full = keep(0.3, slice(0, 50), slice(0, 60))
    for rows, cols in ((slice(3, 9), slice(5, 6)), (slice(0, 1), slice(2, 59)), (slice(7, 50), slice(13, 17))):
        assert torch.equal(keep(0.3, rows, cols), full[:, :, rows, cols])
    assert torch.equal(keep(0.3, slice(0, 50), slice(0, 60), b=slice(1, 2), h=slice(2, 3)), full[1:, 2:])


def test_rate_and_extremes():
    many = dropout_keep(
        torch.tensor([3, 0]), 0.3, Patch(slice(0, 1), slice(0, 1), slice(0, 500), slice(0, 800), 500, 800, CPU), 1
    )
    assert abs(float(many.double().mean()) - 0.7) < 4 * (0.21 / 400_000) ** 0.5
    assert keep(0.0, slice(0, 50), slice(0, 60)).all()
    assert not keep(1.0, slice(0, 50), slice(0, 60)).any()


def test_seeds_heads_and_batches_differ():
    full = keep(0.5, slice(0, 50), slice(0, 60))
    assert not torch.equal(full, keep(0.5, slice(0, 50), slice(0, 60), seed=8))
    planes = full.flatten(0, 1).flatten(1)
    assert len({tuple(p.tolist()) for p in planes}) == 6


class Room:
    """Memory that was used before."""

    def integers(self, shape):
        return [torch.full(shape, -1) for _ in range(6)]

    def survivors(self, shape):
        return torch.full(shape, float("nan"))


def test_the_loop_gives_the_same_bits(monkeypatch):
    """Whatever the seed and the offset, negative ones included, and wherever the patch lies."""
    pytest.importorskip("numba")
    g = torch.Generator().manual_seed(3)
    for n in range(40):
        rng = torch.randint(-(2**63), 2**63 - 1, (2,), generator=g)
        i, j, height, width = torch.randint(1, 90 if n % 2 else 2**20, (4,), generator=g).tolist()
        rows, cols = slice(i, i + 1 + height % 70), slice(j, j + 1 + width % 70)
        patch = Patch(slice(1, 3), slice(2, 5), rows, cols, rows.stop, cols.stop, CPU)
        found = []
        for installed in (False, True):
            monkeypatch.setattr(philox_loop, "INSTALLED", installed)
            found.append(dropout_keep(rng, (n + 1) / 41, patch, 7))
        assert torch.equal(*found)


def test_survivors_as_numbers():
    for rows, cols in ((slice(0, 50), slice(0, 60)), (slice(3, 9), slice(5, 6)), (slice(7, 50), slice(13, 17))):
        patch = Patch(slice(0, 2), slice(0, 3), rows, cols, 50, 60, CPU)
        found = dropout_keep(torch.tensor([7, 1]), 0.3, patch, 3, Room())
        assert found.dtype == torch.float32
        assert torch.equal(found, keep(0.3, rows, cols).float())


@pytest.mark.parametrize("shape", [(1, 1, 5, 1), (1, 1, 1, 7), (2, 3, 4, 6), (1, 1, 1, 1)])
def test_room_changes_no_word_and_no_counter(shape):
    counters = [torch.arange(n).view([n if d == dim else 1 for d in range(4)]) for dim, n in enumerate(shape)]
    given = [c.clone() for c in counters]
    room = [torch.empty(shape, dtype=torch.int64) for _ in range(6)]
    words = philox(torch.tensor(2**40 + 3), *counters, room=room)
    assert all(map(torch.equal, counters, given))
    for a, b in zip(words, philox(torch.tensor(2**40 + 3), *counters), strict=True):
        assert torch.equal(a, b)
