"""The problems a backend is judged on: the field's known failures as inputs, and sizes of every oddity.

Each is a small recipe that makes the same numbers for the judge (fp64), for the same-precision dense
computation and for the backend under test. The families are those of public bug reports: A masks and empty
rows, B causal, windows, softcap and sinks, C strides, D sizes, E biases and gradients, F ragged batches, G numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


def problems(quick: bool = False) -> list[Problem]:
    """All problems; ``quick`` keeps the first two of each family."""
    every = [p for source in (_masks, _bands, _strides, _sizes, _biases, _ragged, _numbers) for p in source()]
    if not quick:
        return every
    seen: dict[str, int] = {}
    for p in every:
        seen[p.family] = seen.get(p.family, 0) + 1
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
        yield Problem(f"A1 row with no key: {kind}", "A1", lambda m, kind=kind: empty_row(m, kind))

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
        yield Problem(f"A2 not a number behind a mask: {kind}", "A2", lambda m, kind=kind: behind(m, kind))

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

    yield Problem("A4 first tiles empty: band", "A4", lambda m: Call(qkv(m, 1, 1, 640, 640, 16), {"mask": masks.window(9, 0)}))

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
        yield Problem(f"A6 very negative lse: {lq} x {lk}", "A6", lambda m, a=lq, b=lk: very_negative(m, a, b, None))
    yield Problem("A6 very negative lse: causal", "A6", lambda m: very_negative(m, 129, 129, masks.causal()))
    yield Problem(
        "A6 very negative lse: all True",
        "A6",
        lambda m: very_negative(m, 65, 65, torch.ones(65, 65, dtype=torch.bool, device=m.device)),
    )


def _bands() -> Iterator[Problem]:
    for lq, lk in ((1, 8), (2, 5), (5, 2), (5, 6), (16, 1), (129, 64)):
        for align in ("top_left", "bottom_right"):
            yield Problem(
                f"B1 causal {align} {lq} x {lk}",
                "B1",
                lambda m, lq=lq, lk=lk, align=align: Call(qkv(m, 2, 4, lq, lk, 8, kv=2), {"mask": masks.causal(align)}),
            )
    for left, right in ((0, 0), (1, 0), (2, 3), (4, 0), (None, 1), (1, None)):
        yield Problem(
            f"B2 window {left}, {right}",
            "B2",
            lambda m, left=left, right=right: Call(qkv(m, 1, 1, 4, 4, 4), {"mask": masks.window(left, right)}),
        )
    yield Problem(
        "B2 window on the decoding diagonal",
        "B2",
        lambda m: Call(qkv(m, 1, 2, 33, 150, 8), {"mask": masks.causal("bottom_right") & masks.window(20, 0)}),
    )
    yield Problem("B2 prefix", "B2", lambda m: Call(qkv(m, 2, 2, 90, 90, 8), {"mask": masks.prefix_lm(torch.tensor([40, 0]))}))
    for cap in (1.0, 15.0):
        yield Problem(
            f"B3 softcap {cap}",
            "B3",
            lambda m, cap=cap: Call(
                {**qkv(m, 1, 2, 70, 70, 16, scale=3), "bias": m.randn(1, 2, 70, 70)},
                {"softcap": cap, "mask": masks.causal()},
            ),
        )
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
            yield Problem(
                f"C1 {name}: {which}",
                "C1",
                lambda m, view=view, which=which: Call(
                    qkv(m, 2, 3, 37, 45, 8), {"mask": masks.causal()}, views={which: view}
                ),
            )
    for which, shape in (("k", (1, 1, 45, 8)), ("v", (2, 1, 1, 8)), ("q", (1, 3, 37, 8))):
        yield Problem(f"C1 expanded: {which}", "C1", lambda m, w=which, s=shape: _expanded(m, w, s))
    for lk in (43, 361, 5):
        yield Problem(f"C3 bias at an odd offset, {lk} keys", "C3", lambda m, lk=lk: _odd_bias(m, lk))


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
        yield Problem(f"D1 head dim {d}", "D1", lambda m, d=d: Call(qkv(m, 1, 2, 33, 47, d), {"mask": masks.causal()}))
    for n in (1, 7, 63, 64, 65, 127, 129):
        yield Problem(f"D1 length {n}", "D1", lambda m, n=n: Call(qkv(m, 1, 2, n, n, 16), {"mask": masks.causal()}))
    for group in (1, 2, 3, 8):
        yield Problem(
            f"D2 {group} query heads a key head, Dv != D",
            "D2",
            lambda m, g=group: Call(qkv(m, 2, 2 * g, 65, 50, 16, dv=24, kv=2), {"mask": masks.causal("bottom_right")}),
        )
    for b, lq, lk in ((0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)):
        yield Problem(f"D3 batch {b}, {lq} x {lk}", "D3", lambda m, b=b, lq=lq, lk=lk: Call(qkv(m, b, 2, lq, lk, 8)))
    for shape in ((5, 6), (1, 6), (3, 1, 1, 6), (3, 1, 5, 6), (3, 2, 5, 6), (1, 2, 5, 1)):
        yield Problem(
            f"D4 mask of shape {shape}",
            "D4",
            lambda m, s=shape: Call(qkv(m, 3, 2, 5, 6, 8), {"mask": m.coin(*s, p=0.7)}),
        )


def _biases() -> Iterator[Problem]:
    everything = ("q", "k", "v", "bias", "sinks")
    for n in range(1, 2 ** len(everything)):
        needs = tuple(x for i, x in enumerate(everything) if n >> i & 1)
        yield Problem(
            f"E1 gradients of {' '.join(needs)}",
            "E1",
            lambda m, needs=needs: Call(
                {**qkv(m, 1, 2, 9, 11, 4), "bias": m.randn(1, 2, 9, 11), "sinks": m.randn(2)},
                {"mask": masks.causal()},
                needs=needs,
            ),
        )
    for shape in ((1, 1, 30, 40), (30, 40), (1, 2, 1, 40), (3, 1, 30, 1), (3, 1, 1, 40), (3, 2, 30, 40), (1, 1, 1, 1)):
        yield Problem(
            f"E2 gradient of a bias of shape {shape}",
            "E2",
            lambda m, s=shape: Call({**qkv(m, 3, 2, 30, 40, 8), "bias": m.randn(*s)}, {"mask": masks.causal()}),
        )

    def gathered(m: Maker) -> Call:
        table = m.randn(2, 2 * 40)
        at = torch.arange(30)[:, None] - torch.arange(40)[None] + 40
        return Call({**qkv(m, 2, 2, 30, 40, 8), "bias": table}, views={"bias": lambda x: x[:, at.to(x.device)][None]})

    yield Problem("E2 gathered relative positions", "E2", gathered)

    def minus_inf(m: Maker) -> Call:
        bias = m.randn(1, 2, 30, 40).masked_fill(m.coin(1, 2, 30, 40, p=0.3), float("-inf"))
        return Call({**qkv(m, 2, 2, 30, 40, 8), "bias": bias})

    yield Problem("E2 -inf inside a trainable bias", "E2", minus_inf)
    for batch in (1, 2):
        yield Problem(
            f"E2 ALiBi, slopes of {batch} batch entries",
            "E2",
            lambda m, batch=batch: Call(
                {**qkv(m, 2, 4, 33, 70, 8, kv=2), "alibi": m.exact(m.randn(*((batch, 4) if batch > 1 else (4,))).abs())},
                {"mask": masks.causal("bottom_right")},
            ),
        )
    for loss in (("out",), ("lse",), ("out", "lse")):
        yield Problem(
            f"E3 loss on {' and '.join(loss)}",
            "E3",
            lambda m, loss=loss: Call(qkv(m, 2, 2, 33, 40, 8), {"mask": masks.causal()}, loss=loss),
        )


def _ragged() -> Iterator[Problem]:
    cases = {
        "F1 slack rows": ([0, 2, 5], [0, 3, 5], 7, 8),
        "F2 empty sequences": ([0, 0, 3, 5, 5], [0, 2, 4, 5, 8], 5, 8),
        "F2 keys without queries": ([0, 1, 1, 2], [0, 3, 3, 8], 2, 8),
        "F2 long and short": ([0, 70, 71, 200], [0, 65, 70, 190], 200, 190),
    }
    for name, (cu_q, cu_k, tq, tk) in cases.items():
        for what, mask in (("full", None), ("causal", masks.causal()), ("decoding", masks.causal("bottom_right"))):
            yield Problem(
                f"{name}: {what}",
                name[:2],
                lambda m, a=cu_q, b=cu_k, tq=tq, tk=tk, mask=mask: Call(
                    {"q": m.randn(tq, 4, 8), "k": m.randn(tk, 2, 8), "v": m.randn(tk, 2, 5), "sinks": m.randn(4)},
                    {"mask": mask, "dropout_p": 0.2, "seed": 3},
                    cu=tuple(torch.tensor(x, dtype=torch.int32, device=m.device) for x in (a, b)),  # type: ignore[arg-type]
                ),
            )


def _numbers() -> Iterator[Problem]:
    for scale in (0.0, -0.5, 1e-8, 50.0, float("nan")):
        yield Problem(
            f"G1 scale {scale}",
            "G1",
            lambda m, s=scale: Call(qkv(m, 1, 2, 20, 30, 8, scale=0.3), {"scale": s, "mask": masks.causal()}),
        )
    for size, length in ((5, 240), (10, 240), (5, 1024)):
        yield Problem(
            f"G2 inputs of size {size}, {length} keys",
            "G2",
            lambda m, size=size, n=length: Call(qkv(m, 1, 1, n, n, 128, scale=size)),
        )
    for name, options in {
        "causal": {"mask": masks.causal()},
        "grouped": {},
        "p=1": {"dropout_p": 1.0},
        "p=0": {"dropout_p": 0.0},
    }.items():
        yield Problem(
            f"G4 dropout, {name}",
            "G4",
            lambda m, options=options: Call(qkv(m, 2, 4, 80, 80, 8, kv=2), {"dropout_p": 0.3, "seed": 11, **options}),
        )
    yield Problem(
        "G6 documents",
        "G6",
        lambda m: Call(qkv(m, 2, 2, 100, 100, 8), {"mask": masks.documents(torch.arange(100) // 13) & masks.causal()}),
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
