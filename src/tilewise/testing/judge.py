"""The judge: a backend's error against fp64 beside the error that its precision makes anyway.

The reference is ``dense`` in fp64. A backend passes when its error is at most twice that of ``dense`` in the
backend's own dtype on the same inputs, plus a floor: the rounding of the result and a few roundings of the row state.
That holds for the root mean square, forward and every gradient. A root mean square over few numbers says little
of their spread, so the floor is 1 + 8 / sqrt(n) times as high for n numbers. Gradients of the scores are
differences P * (dP - delta) that may cancel to nothing, so their floor counts the size of delta too. There is no
tolerance to tune. In fp64, where that error is the judge's own, the limit is
1e-12 of the quantity's size. Where the reference is not finite, the backend must agree exactly.

Source of the budget: the tests of FlashAttention (Dao et al.).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..api import AuxRequest, attention, attention_varlen
from ..request import alibi
from .problems import Call, Maker, Problem

SLACK = 2.0  # times the error of the same-precision dense computation
STATE_ULPS = 16.0  # plus so many roundings of the state dtype, and half a unit in the last place of the result
FLOAT64 = 1e-12


class Measured(NamedTuple):
    """A quantity's error beside that of ``dense`` in the same dtype, and what the budget allows."""

    error: float
    dense_error: float
    limit: float
    ok: bool
    note: str = ""


class Verdict(NamedTuple):
    """One quantity of one problem. ``error`` and ``dense_error`` are root mean squares against fp64."""

    problem: str
    family: str
    backend: str
    dtype: str
    quantity: str  # out, lse, max_logits, dq, dk, dv, dbias, dalibi, dsinks; or "refused"
    error: float
    dense_error: float
    limit: float
    ok: bool
    note: str


def judge(problem: Problem, backend: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Verdict]:
    """Run one problem on a backend and on the judge. A refusal is one verdict that holds the reasons."""
    call = problem.make(Maker(problem.name, dtype, device))

    def verdict(quantity: str, measured: Measured) -> Verdict:
        dtype_name = str(dtype).removeprefix("torch.")
        return Verdict(problem.name, problem.family, backend, dtype_name, quantity, *measured)

    try:
        mine = evaluate(call, backend, dtype)
    except NotImplementedError as refusal:  # the dispatcher's answer, with every reason
        return [verdict("refused", Measured(0.0, 0.0, 0.0, True, str(refusal)))]
    if "lse" not in mine:  # judged on the loss that the backend can serve
        call.loss = tuple(x for x in call.loss if x != "lse")
    exact = evaluate(call, "dense", torch.float64)
    dense = evaluate(call, "dense", dtype)
    sizes = _cancelled(call, exact)
    return [
        verdict(name, compare(x, dense[name], exact[name], dtype, sizes.get(name, 0.0))) for name, x in mine.items()
    ]


def evaluate(call: Call, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All outputs and gradients of a call, by name."""
    leaves = {
        name: x.detach().to(dtype, copy=True).requires_grad_(call.needs is None or name in call.needs)
        for name, x in call.tensors.items()
    }
    args = {name: call.views[name](x) if name in call.views else x for name, x in leaves.items()}
    out, lse, top = _call(args, call, backend)
    result = {"out": out, **({} if lse is None else {"lse": lse, "max_logits": top})}
    weights = _weights(call, out, lse)
    outputs = [x for name, x in (("out", out), ("lse", lse)) if name in weights and x is not None and x.requires_grad]
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if wanted and outputs:
        grad_outputs = [weights["out" if x is out else "lse"].to(x.dtype) for x in outputs]
        grads = torch.autograd.grad(outputs, list(wanted.values()), grad_outputs, allow_unused=True)
    for (name, leaf), g in zip(wanted.items(), grads, strict=True):  # None: nothing depends on it
        result[f"d{name}"] = torch.zeros_like(leaf) if g is None else g
    return {name: x.detach().double() for name, x in result.items() if x is not None}


def _call(args: dict[str, Tensor], call: Call, backend: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    named: dict[str, Any] = dict(call.options)
    if "bias" in args:
        named["bias"] = args["bias"]
    if "alibi" in args:
        named["bias"] = alibi(args["alibi"])
    if "sinks" in args:
        named["sinks"] = args["sinks"]
    aux = AuxRequest(lse=True, max_logits=True) if "lse" in dispatch.get(backend).features else None
    q, k, v = args["q"], args["k"], args["v"]
    if call.cu is None:
        answer: Any = attention(q, k, v, backend=backend, return_aux=aux, **named)
    else:
        answer = attention_varlen(q, k, v, *call.cu, backend=backend, return_aux=aux, **named)
    return (answer, None, None) if aux is None else (answer[0], answer[1].lse, answer[1].max_logits)


def _weights(call: Call, out: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    """Random gradients of the outputs: the same for every backend; none for the lse of a row without a key."""
    g = torch.Generator().manual_seed(17)
    weights = {"out": torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype).to(out.device)}
    if lse is not None:
        w = torch.randn(lse.shape, generator=g, dtype=torch.float64).to(lse.device)
        weights["lse"] = torch.where(torch.isinf(lse), 0.0, w)
    return {name: w for name, w in weights.items() if name in call.loss}


def _cancelled(call: Call, exact: dict[str, Tensor]) -> dict[str, float]:
    """The size of P * delta as it enters each gradient of the scores: what is left of it when dP - delta cancels."""
    weights = _weights(call, exact["out"], exact.get("lse"))
    terms = [(weights["out"] * exact["out"]).sum(-1)] if "out" in weights else []
    terms += [weights["lse"]] if "lse" in weights else []
    delta = sum(_rms(x[torch.isfinite(x)]) for x in terms)
    q, k = (call.tensors[n][torch.isfinite(call.tensors[n])] for n in ("q", "k"))
    scale = call.options.get("scale")
    scale = abs(call.tensors["q"].shape[-1] ** -0.5 if scale is None else scale)
    rows = exact["out"][..., 0].numel()
    per_key = (rows / max(call.tensors["k"][..., 0].numel(), 1)) ** 0.5
    sizes = {"dq": scale * _rms(k), "dk": scale * _rms(q) * per_key}
    sizes |= {name: (rows / max(exact[name].numel(), 1)) ** 0.5 for name in ("dbias", "dsinks") if name in exact}
    if "dalibi" in exact:
        sizes["dalibi"] = call.tensors["k"].shape[-2] * (rows / exact["dalibi"].numel()) ** 0.5
    return {name: float(delta * size) for name, size in sizes.items() if size == size}


def compare(x: Tensor, dense: Tensor, exact: Tensor, dtype: torch.dtype, cancelled: float = 0.0) -> Measured:
    """A quantity against its exact value and that of ``dense`` in ``dtype``, all given in fp64."""
    if x.shape != exact.shape:
        note = f"shape {tuple(x.shape)}, expected {tuple(exact.shape)}"
        return Measured(float("inf"), 0.0, 0.0, False, note)
    finite = torch.isfinite(exact)
    agree = (x == exact) | (x.isnan() & exact.isnan())
    if not bool((finite | agree).all()):
        return Measured(float("inf"), 0.0, 0.0, False, "differs where the exact value is not finite")
    if not bool(finite.any()):
        return Measured(0.0, 0.0, 0.0, True)
    err, base, exact = ((t - exact)[finite] for t in (x, dense, torch.zeros_like(exact)))
    if dtype == torch.float64:
        floor = FLOAT64
    else:
        floor = STATE_ULPS * torch.finfo(torch.float32).eps + 0.5 * torch.finfo(dtype).eps
    floor *= 1 + 8 / err.numel() ** 0.5
    error, limit = _rms(err), SLACK * _rms(base) + floor * (_rms(exact) + cancelled) + torch.finfo(torch.float32).tiny
    if not error <= limit:  # a NaN fails
        return Measured(error, _rms(base), limit, False, f"root mean square error {error:.3g} is over {limit:.3g}")
    return Measured(error, _rms(base), limit, True)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
