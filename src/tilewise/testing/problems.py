"""The problems a backend is judged on: the field's known failures as inputs, and sizes of every oddity.

Each is a small recipe that makes the same numbers for the judge (fp64), for the same-precision dense
computation and for the backend under test. The families are those of public bug reports: A masks and empty
rows, B causal, windows, softcap and sinks, C strides, D sizes, E biases and gradients, F ragged batches, G numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import masks

View = Callable[[Tensor], Tensor]


class Maker:
    """Random numbers that a dtype can hold exactly, in fp64: every precision sees the same values."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device | str):
        self.dtype, self.device = dtype, torch.device(device)
        self._generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.exact(scale * torch.randn(shape, generator=self._generator, dtype=torch.float64))

    def exact(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(device=self.device, dtype=torch.float64)

    def coin(self, *shape: int, p: float = 0.5) -> Tensor:
        return (torch.rand(shape, generator=self._generator) < p).to(self.device)


@dataclass
class Call:
    """One call: fp64 tensors by the name of their gradient, other arguments, and how tensors are laid out."""

    tensors: dict[str, Tensor]  # q, k, v and any of bias, alibi, sinks
    options: dict[str, Any] = field(default_factory=dict)  # mask, scale, softcap, dropout_p, seed
    cu: tuple[Tensor, Tensor] | None = None
    views: dict[str, View] = field(default_factory=dict)  # strides: applied to the leaf before the call
    needs: tuple[str, ...] | None = None  # gradients to take; None: all
    loss: tuple[str, ...] = ("out", "lse")


@dataclass(frozen=True)
class Problem:
    """A named recipe; ``family`` is the letter and number of its kind."""

    name: str
    family: str
    make: Callable[[Maker], Call]


def qkv(m: Maker, b: int, h: int, lq: int, lk: int, d: int, *, dv: int | None = None, kv: int | None = None, scale: float = 1.0) -> dict[str, Tensor]:  # fmt: skip  # noqa: E501
    """Random q (b, h, lq, d), k (b, kv, lk, d), v (b, kv, lk, dv)."""
    kv = kv or h
    return {
        "q": m.randn(b, h, lq, d, scale=scale),
        "k": m.randn(b, kv, lk, d, scale=scale),
        "v": m.randn(b, kv, lk, dv or d),
    }


def plain(sizes: tuple[int, int, int, int, int], options: dict[str, Any], **how: Any) -> Callable[[Maker], Call]:
    """The recipe of a call on ``qkv(m, *sizes, **how)`` and nothing more."""
    return lambda m: Call(qkv(m, *sizes, **how), dict(options))


def problems(quick: bool = False) -> list[Problem]:
    """All problems; ``quick`` keeps the first two of each family."""
    every = [p for source in (_masks, _bands, _strides, _sizes, _biases, _ragged, _numbers) for p in source()]
    if not quick:
        return every
    return [p for n, p in enumerate(every) if sum(x.family == p.family for x in every[:n]) < 2]


def _masks() -> Iterator[Problem]:
    def empty_row(m: Maker, kind: str) -> Call:
        keep = torch.ones(6, 10, dtype=torch.bool).tril().to(m.device)
        keep[5] = False
        t = qkv(m, 1, 2, 6, 10, 8)
        if kind == "all heads but one":
            keep = keep.expand(1, 2, 6, 10).clone()
            keep[:, 1] = False
        if kind == "additive":
            t["bias"] = torch.zeros(6, 10, dtype=torch.float64, device=m.device).masked_fill(~keep, float("-inf"))
            return Call(t)
        return Call(t, {"mask": keep})

    for kind in ("one row", "all heads but one", "additive"):
        yield Problem(f"A1 row with no key: {kind}", "A1", partial(empty_row, kind=kind))

    def behind(m: Maker, kind: str) -> Call:
        t = qkv(m, 1, 1, 2, 4, 4) if kind != "padding" else qkv(m, 2, 2, 9, 70, 8)
        if kind == "padding":
            for name in ("k", "v"):
                t[name][0, :, 50:], t[name][1, :, 3:] = float("nan"), float("inf")
            return Call(t, {"mask": masks.key_lengths(torch.tensor([50, 3]))})
        if kind == "causal":
            t = qkv(m, 1, 2, 40, 40, 8)
            t["k"][:, :, 39], t["v"][:, :, 39] = float("inf"), float("nan")
            return Call(t, {"mask": masks.causal() & ~masks.key_lengths(torch.tensor([0])) & masks.query_lengths([39])})
        keep = torch.ones(2, 4, dtype=torch.bool, device=m.device)
        keep[:, 1] = False
        t["k"][:, :, 1] = float("nan") if kind == "nan" else float("inf")
        t["v"][:, :, 1] = float("nan") if kind == "nan" else 0.0
        if kind == "query":
            t["q"][:, :, 1], keep[1] = float("nan"), False
        return Call(t, {"mask": keep})

    for kind in ("nan", "inf", "padding", "causal", "query"):
        yield Problem(f"A2 not a number behind a mask: {kind}", "A2", partial(behind, kind=kind))

    def finite_minimum(m: Maker, twice: bool) -> Call:
        low = torch.zeros(2, 3, dtype=m.dtype)
        low[0] = torch.finfo(m.dtype).min
        low = low + low if twice else low
        t = qkv(m, 1, 1, 2, 3, 4)
        if twice:
            low[0, 0] = 0  # all of them overflow to -inf: leave a key
        return Call({**t, "bias": low.to(m.device, torch.float64)}, needs=("q", "k", "v"))

    yield Problem("A3 finite minimum is literal", "A3", lambda m: finite_minimum(m, False))
    yield Problem("A3 sum of two minima excludes", "A3", lambda m: finite_minimum(m, True))

    yield Problem("A4 first tiles empty: band", "A4", plain((1, 1, 640, 640, 16), {"mask": masks.window(9, 0)}))

    def first_columns(m: Maker) -> Call:
        keep = torch.ones(1, 1, 1, 441, dtype=torch.bool, device=m.device)
        keep[..., :128] = False
        return Call(qkv(m, 1, 2, 441, 441, 16), {"mask": keep})

    yield Problem("A4 first 128 columns masked", "A4", first_columns)

    def middle(m: Maker, lq: int, lk: int, lo: int, hi: int) -> Call:
        return Call(qkv(m, 1, 2, lq, lk, 8), {"mask": masks.predicate(lambda b, h, i, j: (j < lo) | (j >= hi))})

    yield Problem("A4 keys 0-3 masked", "A4", lambda m: middle(m, 4, 8, 0, 4))
    yield Problem("A4 middle tiles empty", "A4", lambda m: middle(m, 70, 600, 100, 500))

    def very_negative(m: Maker, lq: int, lk: int, mask: Any) -> Call:
        d = 64
        c = (120 / d**0.5) ** 0.5  # every scaled logit is -120
        q = m.exact(torch.full((1, 2, lq, d), c, dtype=torch.float64))
        k = m.exact(torch.full((1, 2, lk, d), -c, dtype=torch.float64))
        return Call({"q": q, "k": k, "v": m.randn(1, 2, lk, d)}, {"mask": mask})

    for lq, lk in ((64, 64), (192, 192), (1000, 1000), (1216, 1216), (1280, 1280), (1, 128)):
        yield Problem(f"A6 very negative lse: {lq} x {lk}", "A6", partial(very_negative, lq=lq, lk=lk, mask=None))
    yield Problem("A6 very negative lse: causal", "A6", lambda m: very_negative(m, 129, 129, masks.causal()))
    yield Problem(
        "A6 very negative lse: all True",
        "A6",
        lambda m: very_negative(m, 65, 65, torch.ones(65, 65, dtype=torch.bool, device=m.device)),
    )


def _bands() -> Iterator[Problem]:
    for lq, lk in ((1, 8), (2, 5), (5, 2), (5, 6), (16, 1), (129, 64)):
        for align in ("top_left", "bottom_right"):
            recipe = plain((2, 4, lq, lk, 8), {"mask": masks.causal(align)}, kv=2)
            yield Problem(f"B1 causal {align} {lq} x {lk}", "B1", recipe)
    for left, right in ((0, 0), (1, 0), (2, 3), (4, 0), (None, 1), (1, None)):
        recipe = plain((1, 1, 4, 4, 4), {"mask": masks.window(left, right)})
        yield Problem(f"B2 window {left}, {right}", "B2", recipe)
    yield Problem(
        "B2 window on the decoding diagonal",
        "B2",
        plain((1, 2, 33, 150, 8), {"mask": masks.causal("bottom_right") & masks.window(20, 0)}),
    )
    yield Problem("B2 prefix", "B2", plain((2, 2, 90, 90, 8), {"mask": masks.prefix_lm(torch.tensor([40, 0]))}))

    def softcapped(m: Maker, cap: float) -> Call:
        t = {**qkv(m, 1, 2, 70, 70, 16, scale=3), "bias": m.randn(1, 2, 70, 70)}
        return Call(t, {"softcap": cap, "mask": masks.causal()})

    for cap in (1.0, 15.0):
        yield Problem(f"B3 softcap {cap}", "B3", partial(softcapped, cap=cap))
    yield Problem("B4 sinks", "B4", lambda m: Call({**qkv(m, 1, 2, 3, 3, 4), "sinks": m.randn(2)}))
    yield Problem("B4 sinks, no keys", "B4", lambda m: Call({**qkv(m, 1, 2, 3, 0, 4), "sinks": m.randn(2)}))
    yield Problem(
        "B4 sinks, grouped, window",
        "B4",
        lambda m: Call({**qkv(m, 2, 6, 65, 65, 8, kv=2), "sinks": m.randn(6)}, {"mask": masks.window(8, 0)}),
    )


def _strides() -> Iterator[Problem]:
    layouts: dict[str, View] = {
        "last dim strided": lambda x: torch.stack([x, x], -1)[..., 0],
        "(B, L, H, D)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "fused qkv": lambda x: torch.stack([x, x, x], 2).transpose(1, 3).contiguous().transpose(1, 3)[:, :, 1],
        "padded": lambda x: torch.nn.functional.pad(x, (3, 5, 2, 1))[:, :, 2:-1, 3:-5],
        "odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    }
    for name, view in layouts.items():
        for which in ("q", "k", "v"):
            yield Problem(f"C1 {name}: {which}", "C1", partial(_viewed, which=which, view=view))
    for which, shape in (("k", (1, 1, 45, 8)), ("v", (2, 1, 1, 8)), ("q", (1, 3, 37, 8))):
        yield Problem(f"C1 expanded: {which}", "C1", partial(_expanded, which=which, shape=shape))
    for lk in (43, 361, 5):
        yield Problem(f"C3 bias at an odd offset, {lk} keys", "C3", partial(_odd_bias, lk=lk))


def _viewed(m: Maker, which: str, view: View) -> Call:
    return Call(qkv(m, 2, 3, 37, 45, 8), {"mask": masks.causal()}, views={which: view})


def _expanded(m: Maker, which: str, shape: tuple[int, ...]) -> Call:
    t = qkv(m, 2, 3, 37, 45, 8)
    full = t[which].shape
    t[which] = m.randn(*shape)
    return Call(t, views={which: lambda x: x.expand(full)})


def _odd_bias(m: Maker, lk: int) -> Call:
    t = qkv(m, 1, 2, 33, lk, 8)
    t["bias"] = m.randn(1, 2, 33, lk + 6)
    return Call(t, views={"bias": lambda x: x[..., 3 : 3 + lk]})


def _sizes() -> Iterator[Problem]:
    for d in (1, 3, 8, 40, 63, 72, 80, 96, 100, 128, 160, 192, 256, 512):
        yield Problem(f"D1 head dim {d}", "D1", plain((1, 2, 33, 47, d), {"mask": masks.causal()}))
    for n in (1, 7, 63, 64, 65, 127, 129):
        yield Problem(f"D1 length {n}", "D1", plain((1, 2, n, n, 16), {"mask": masks.causal()}))
    for group in (1, 2, 3, 8):
        recipe = plain((2, 2 * group, 65, 50, 16), {"mask": masks.causal("bottom_right")}, dv=24, kv=2)
        yield Problem(f"D2 {group} query heads a key head, Dv != D", "D2", recipe)
    for b, lq, lk in ((0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)):
        yield Problem(f"D3 batch {b}, {lq} x {lk}", "D3", plain((b, 2, lq, lk, 8), {}))

    def masked(m: Maker, shape: tuple[int, ...]) -> Call:
        return Call(qkv(m, 3, 2, 5, 6, 8), {"mask": m.coin(*shape, p=0.7)})

    for shape in ((5, 6), (1, 6), (3, 1, 1, 6), (3, 1, 5, 6), (3, 2, 5, 6), (1, 2, 5, 1)):
        yield Problem(f"D4 mask of shape {shape}", "D4", partial(masked, shape=shape))


def _biases() -> Iterator[Problem]:
    def needing(m: Maker, needs: tuple[str, ...]) -> Call:
        t = {**qkv(m, 1, 2, 9, 11, 4), "bias": m.randn(1, 2, 9, 11), "sinks": m.randn(2)}
        return Call(t, {"mask": masks.causal()}, needs=needs)

    everything = ("q", "k", "v", "bias", "sinks")
    for n in range(1, 2 ** len(everything)):
        needs = tuple(x for i, x in enumerate(everything) if n >> i & 1)
        yield Problem(f"E1 gradients of {' '.join(needs)}", "E1", partial(needing, needs=needs))

    def biased(m: Maker, shape: tuple[int, ...]) -> Call:
        return Call({**qkv(m, 3, 2, 30, 40, 8), "bias": m.randn(*shape)}, {"mask": masks.causal()})

    for shape in ((1, 1, 30, 40), (30, 40), (1, 2, 1, 40), (3, 1, 30, 1), (3, 1, 1, 40), (3, 2, 30, 40), (1, 1, 1, 1)):
        yield Problem(f"E2 gradient of a bias of shape {shape}", "E2", partial(biased, shape=shape))

    def gathered(m: Maker) -> Call:
        table = m.randn(2, 2 * 40)
        at = torch.arange(30)[:, None] - torch.arange(40)[None] + 40
        return Call({**qkv(m, 2, 2, 30, 40, 8), "bias": table}, views={"bias": lambda x: x[:, at.to(x.device)][None]})

    yield Problem("E2 gathered relative positions", "E2", gathered)

    def minus_inf(m: Maker) -> Call:
        bias = m.randn(1, 2, 30, 40).masked_fill(m.coin(1, 2, 30, 40, p=0.3), float("-inf"))
        return Call({**qkv(m, 2, 2, 30, 40, 8), "bias": bias})

    yield Problem("E2 -inf inside a trainable bias", "E2", minus_inf)

    def sloped(m: Maker, shape: tuple[int, ...]) -> Call:
        t = {**qkv(m, 2, 4, 33, 70, 8, kv=2), "alibi": m.exact(m.randn(*shape).abs())}
        return Call(t, {"mask": masks.causal("bottom_right")})

    yield Problem("E2 ALiBi, slopes of 1 batch entries", "E2", partial(sloped, shape=(4,)))
    yield Problem("E2 ALiBi, slopes of 2 batch entries", "E2", partial(sloped, shape=(2, 4)))

    def with_loss(m: Maker, loss: tuple[str, ...]) -> Call:
        return Call(qkv(m, 2, 2, 33, 40, 8), {"mask": masks.causal()}, loss=loss)

    for loss in (("out",), ("lse",), ("out", "lse")):
        yield Problem(f"E3 loss on {' and '.join(loss)}", "E3", partial(with_loss, loss=loss))


def _ragged() -> Iterator[Problem]:
    def packed(m: Maker, ends: tuple[list[int], list[int]], rows: tuple[int, int], mask: masks.Mask | None) -> Call:
        tq, tk = rows
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=m.device) for x in ends)
        return Call(
            {"q": m.randn(tq, 4, 8), "k": m.randn(tk, 2, 8), "v": m.randn(tk, 2, 5), "sinks": m.randn(4)},
            {"mask": mask, "dropout_p": 0.2, "seed": 3},
            cu=(cu_q, cu_k),
        )

    cases = {
        "F1 slack rows": ([0, 2, 5], [0, 3, 5], 7, 8),
        "F2 empty sequences": ([0, 0, 3, 5, 5], [0, 2, 4, 5, 8], 5, 8),
        "F2 keys without queries": ([0, 1, 1, 2], [0, 3, 3, 8], 2, 8),
        "F2 long and short": ([0, 70, 71, 200], [0, 65, 70, 190], 200, 190),
    }
    for name, (cu_q, cu_k, tq, tk) in cases.items():
        for what, mask in (("full", None), ("causal", masks.causal()), ("decoding", masks.causal("bottom_right"))):
            recipe = partial(packed, ends=(cu_q, cu_k), rows=(tq, tk), mask=mask)
            yield Problem(f"{name}: {what}", name[:2], recipe)


def _numbers() -> Iterator[Problem]:
    for scale in (0.0, -0.5, 1e-8, 50.0, float("nan")):
        recipe = plain((1, 2, 20, 30, 8), {"scale": scale, "mask": masks.causal()}, scale=0.3)
        yield Problem(f"G1 scale {scale}", "G1", recipe)
    for size, length in ((5, 240), (10, 240), (5, 1024)):
        recipe = plain((1, 1, length, length, 128), {}, scale=size)
        yield Problem(f"G2 inputs of size {size}, {length} keys", "G2", recipe)
    dropouts: dict[str, dict[str, Any]] = {
        "causal": {"mask": masks.causal()},
        "grouped": {},
        "p=1": {"dropout_p": 1.0},
        "p=0": {"dropout_p": 0.0},
    }
    for name, options in dropouts.items():
        recipe = plain((2, 4, 80, 80, 8), {"dropout_p": 0.3, "seed": 11, **options}, kv=2)
        yield Problem(f"G4 dropout, {name}", "G4", recipe)
    yield Problem(
        "G6 documents",
        "G6",
        plain((2, 2, 100, 100, 8), {"mask": masks.documents(torch.arange(100) // 13) & masks.causal()}),
    )
    yield Problem(
        "G6 everything at once",
        "G6",
        lambda m: Call(
            {**qkv(m, 2, 4, 70, 90, 24, dv=40, kv=2), "bias": m.randn(1, 4, 70, 90), "sinks": m.randn(4)},
            {
                "mask": masks.causal("bottom_right") & (masks.window(30, 0) | masks.key_lengths(torch.tensor([5, 0]))),
                "softcap": 4.0,
                "dropout_p": 0.25,
                "seed": 5,
                "scale": 0.4,
            },
        ),
    )
