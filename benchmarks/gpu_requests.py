"""Random requests against fp64 by the error budget: 2,000 of them on a GPU, of what its fastest kernels take.

A family shares what kernels are compiled for (head dims, dtype, the kind of mask, softcap, sinks, ragged or not); its
requests differ in all the rest.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch
from gpu_calls import Device, require

from tilewise import masks
from tilewise.testing import Problem, judge
from tilewise.testing.problems import Call, Maker, qkv

FAMILIES, REQUESTS = 40, 50
DIMS = (64, 128, 96, 192, 256)
KINDS = ("full", "causal", "bottom right", "window", "lengths", "causal lengths")
LONGEST = 300


class Family(NamedTuple):
    dims: tuple[int, int]
    dtype: torch.dtype
    kind: str
    softcap: bool
    sinks: bool
    ragged: bool


def family(n: int) -> Family:
    """Number n: head dims and kinds of masks in turn, the rest by chance."""
    r = Random(n)
    dim, ragged = DIMS[n % len(DIMS)], n % 4 == 3
    kinds = [k for k in KINDS if not (ragged and "lengths" in k)]
    dim_v = dim if r.random() < 0.75 else r.choice(DIMS)
    dtype = r.choice((torch.bfloat16, torch.float16))
    return Family((dim, dim_v), dtype, kinds[n % len(kinds)], r.random() < 0.3, r.random() < 0.3, ragged)


def mask(f: Family, r: Random, batch: int, len_k: int, device: Device) -> masks.Mask | None:
    found: masks.Mask | None = None
    if f.kind in ("causal", "causal lengths"):
        found = masks.causal()
    elif f.kind == "bottom right":
        found = masks.causal("bottom_right")
    elif f.kind == "window":
        found = masks.causal() & masks.window(r.randint(0, LONGEST), 0)
    if "lengths" in f.kind:
        padding = masks.key_lengths(torch.tensor([r.randint(0, len_k) for _ in range(batch)], device=device))
        found = padding if found is None else found & padding
    return found


def call(f: Family, r: Random, m: Maker) -> Call:
    """A request of a family."""
    batch, kv, group = r.randint(1, 3), r.randint(1, 3), r.choice((1, 1, 2, 4))
    len_q, len_k = (r.choice((1, r.randint(1, LONGEST), 64 * r.randint(1, 4))) for _ in "qk")
    (dim, dim_v), heads, cu = f.dims, kv * group, None
    if f.ragged:
        tensors = {"q": m.randn(len_q, heads, dim), "k": m.randn(len_k, kv, dim), "v": m.randn(len_k, kv, dim_v)}
        cuts = ([0, *sorted(r.randint(0, n) for _ in range(batch - 1)), n] for n in (len_q, len_k))
        cu = tuple(torch.tensor(x, dtype=torch.int32, device=m.device) for x in cuts)
    else:
        tensors = qkv(m, batch, heads, len_q, len_k, dim, dv=dim_v, kv=kv)
    if f.sinks:
        tensors["sinks"] = m.randn(heads)
    options: dict[str, Any] = {
        "mask": mask(f, r, batch, len_k, m.device),
        "softcap": r.uniform(5, 50) if f.softcap else None,
        "scale": r.choice((None, r.uniform(0.02, 0.3))),
    }
    return Call(tensors, options, cu=cu, loss=r.choice((("out",), ("lse",), ("out", "lse"))))  # type: ignore[arg-type]


def soak(backend: str, device: Device, case: str, times: int = REQUESTS) -> str:
    """The requests of family number ``case``."""
    f, worst = family(int(case)), 0.0
    for n in range(times):
        name = f"random {case}.{n}"
        problem = Problem(name, "random", lambda m, name=name: call(f, Random(name), m))  # type: ignore[misc]
        for v in judge(problem, backend, f.dtype, device):
            require(v.quantity != "refused", f"{name} of {f}: {v.note}")
            require(v.ok, f"{name} of {f}: {v.quantity} {v.error:.1e}, at most {v.limit:.1e}; {v.note}")
            worst = max(worst, v.error / v.limit if v.limit else 0.0)
    return f"{times} requests, {f.dims[0]}/{f.dims[1]} {f.kind}, the worst {worst:.2f} of its limit"
