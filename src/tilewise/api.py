"""The front door: ``attention`` and its relatives. Inputs are validated here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, overload

import torch
from torch import Tensor

from . import dispatch, masks, ops, state
from .masks import EMPTY, FULL, PARTIAL, Grid, Mask, check_broadcast, to_4d
from .request import Alibi, Ragged, Request
from .tilemap import tile_map


class AuxRequest(NamedTuple):
    """Which outputs beside the attention output are wanted."""

    lse: bool = False
    max_logits: bool = False


class AuxOutput(NamedTuple):
    """Outputs beside the attention output; None where not asked for.

    lse: natural log-sum-exp of each row's scores (sink included), (B, Hq, Lq) or (Hq, T) for ragged
        calls, fp32 (fp64 for fp64); -inf for a row without a key. Differentiable.
    max_logits: each row's largest score after scale, softcap, bias and mask (sink excluded), same shape
        and dtype; -inf for a row without a key. Not differentiable. ``.amax((0, 2))`` is that of each head.
    """

    lse: Tensor | None = None
    max_logits: Tensor | None = None


Bias = Tensor | Alibi | None
Choice = str | Sequence[str] | None


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None = ..., *, bias: Bias = ..., scale: float | None = ..., softcap: float | None = ..., sinks: Tensor | None = ..., dropout_p: float = ..., seed: int | None = ..., generator: torch.Generator | None = ..., backend: Choice = ..., return_aux: None = ...) -> Tensor: ...  # fmt: skip  # noqa: E501
@overload
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None = ..., *, bias: Bias = ..., scale: float | None = ..., softcap: float | None = ..., sinks: Tensor | None = ..., dropout_p: float = ..., seed: int | None = ..., generator: torch.Generator | None = ..., backend: Choice = ..., return_aux: AuxRequest) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip  # noqa: E501
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Bias = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    backend: Choice = None,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """softmax(softcap(query key^T * scale) + bias, masked) value, exactly, in memory linear in the lengths.

    Args:
        query: (B, Hq, Lq, D), fp64, fp32, bf16 or fp16; any strides.
        key: (B, Hkv, Lk, D); Hkv divides Hq, and query head h reads key/value head h // (Hq / Hkv).
        value: (B, Hkv, Lk, Dv).
        mask: a ``tilewise.masks.Mask``, or a bool tensor (Lq, Lk) or (B, Hq, Lq, Lk) with 1 where it broadcasts,
            True = attend. What is masked never influences anything, NaN included. A row without a key
            gets output 0, lse -inf and zero gradients.
        bias: added to the scores: a float tensor (Lq, Lk) or (B, Hq, Lq, Lk) with 1 where it broadcasts, or
            ``alibi(slopes)``. -inf excludes; finite values, however negative, are literal. Differentiable.
        scale: None is 1 / sqrt(D); anything else, 0 and negative included, is taken literally.
        softcap: c > 0 replaces a scaled score s by c * tanh(s / c). Applied before bias and mask.
        sinks: (Hq,), a logit per head that joins the denominator only. Differentiable.
        dropout_p: probability with which an attention weight is dropped. Applied whenever it is given.
        seed: an int that fixes the dropout mask; a function of (seed, b, h, i, j), whatever the backend.
        generator: draws the seed instead (None: PyTorch's default generator of query's device).
        backend: a name, or a list in order of preference; None picks. See ``explain``.
        return_aux: which further outputs to return.

    Returns:
        (B, Hq, Lq, Dv) in query's dtype; with ``return_aux``, that and an ``AuxOutput``.

    Raises:
        TypeError, ValueError: malformed input. NotImplementedError: no allowed backend can run it.

    Under autocast the inputs are cast as PyTorch's attention casts its own.
    """
    r = _request(
        query, key, value, mask, bias, scale, softcap, sinks, None, aux=return_aux,
        dropout=(dropout_p, seed, generator),
    )  # fmt: skip
    return _answer(_run(r, backend), return_aux)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask | Tensor | None = None,
    *,
    bias: Bias = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    backend: Choice = None,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """``attention`` over sequences of different lengths laid end to end, without padding.

    Args:
        query: (Tq, Hq, D). key: (Tk, Hkv, D). value: (Tk, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32, not decreasing, from 0: sequence n is rows cu[n] to cu[n + 1].
            Rows beyond the last entry belong to no sequence: their output and gradients are 0, their lse -inf.
        max_seqlen_q, max_seqlen_k: the longest sequence; None computes it (which waits for the GPU).
        mask, bias: positions i, j count within a sequence, b is its number; tensors are sized by the
            longest sequence.
        The rest as in ``attention``.

    Returns:
        (Tq, Hq, Dv); with ``return_aux``, that and an ``AuxOutput`` of shape (Hq, Tq).
    """
    ragged = _ragged(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    r = _request(
        query, key, value, mask, bias, scale, softcap, sinks, ragged, aux=return_aux,
        dropout=(dropout_p, seed, generator),
    )  # fmt: skip
    return _answer(_run(r, backend), return_aux)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, same signature and meaning.

    query (..., Hq, L, E), key (..., H, S, E), value (..., H, S, Ev), of at least 3 dims, whose batch dims (...) are
    the same: they and the heads are not broadcast. A bool attn_mask is True = attend, a float one is added; is_causal
    is top-left aligned and excludes attn_mask. A row whose keys are all masked is 0.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal=True and attn_mask exclude each other, as in PyTorch; put both into attn_mask")
    if query.dim() < 3 or query.dim() != key.dim() or query.dim() != value.dim():
        raise ValueError(
            "query, key and value must have the same rank of at least 3, (..., H, L, E); got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"query, key and value must have the same batch dims, which are not broadcast{_sizes(query, key, value)}; "
            "expand them first"
        )
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"query has {query.shape[-3]} heads and key {key.shape[-3]}: "
            "pass enable_gqa=True for grouped-query attention"
        )
    lead = query.shape[:-2]
    q, k, v = (_four_dims(x) for x in (query, key, value))
    mask: Mask | Tensor | None = masks.causal() if is_causal else None
    bias: Tensor | None = None
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(
                f"attn_mask must be bool (True = attend) or floating point (added to the scores), got {attn_mask.dtype}"
            )
        attn_mask = _four_dims_mask(attn_mask, lead)
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    out = attention(q, k, v, mask, bias=bias, scale=scale, dropout_p=dropout_p)
    return out.reshape(*lead, *out.shape[-2:])


def _four_dims(x: Tensor) -> Tensor:
    """(H, L, E) -> (1, H, L, E); (..., H, L, E) -> (B, H, L, E)."""
    return x[None] if x.dim() == 3 else x.flatten(0, -4) if x.dim() > 4 else x


def _four_dims_mask(mask: Tensor, lead: torch.Size) -> Tensor:
    """An attn_mask broadcastable to (*lead, L, S) as 4-D with 1 where it broadcasts."""
    if mask.dim() < 2 or mask.dim() > len(lead) + 2:
        raise ValueError(
            f"attn_mask must have 2 to {len(lead) + 2} dims to broadcast to (..., L, S); got {tuple(mask.shape)}"
        )
    mask = mask[(None,) * (max(len(lead), 2) + 2 - mask.dim())]
    if mask.dim() == 4:
        return mask
    outer = mask.shape[:-3]
    if any(n != 1 for n in outer):  # a mask of its own for every batch entry is of that size already
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    return mask.flatten(0, -4)


def merge(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint sets of keys: what split-KV decoding and ring attention do.

    parts: (out, lse) pairs of the same queries, out (..., Lq, Dv) and natural lse (..., Lq); a part
        without keys has lse -inf. At most one of them may have been computed with ``sinks``.
    Returns (out, lse) over the union of the keys, in the dtypes of the first part. Differentiable.
    """
    if not parts:
        raise ValueError("merge needs at least one (out, lse) pair")
    for out, lse in parts:
        if out.shape[:-1] != lse.shape or out.shape != parts[0][0].shape:
            raise ValueError(
                "merge needs (out, lse) pairs of one shape, out (..., Lq, Dv) with lse (..., Lq); got "
                + ", ".join(f"{tuple(o.shape)} with {tuple(x.shape)}" for o, x in parts)
            )
    out, lse = parts[0]
    states = [state.from_output(o.to(x.dtype), x) for o, x in parts]
    total = states[0]
    for s in states[1:]:
        total = state.merge(total, s)
    merged, merged_lse = state.finish(total)
    return merged.to(out.dtype), merged_lse.to(lse.dtype)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Bias = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    backend: Choice = None,
    return_aux: AuxRequest | None = None,
) -> dispatch.Explanation:
    """What ``attention`` with these arguments would run, and every reason why each other backend would not.

    Nothing is computed: tensors on the "meta" device will do. ``str()`` of the answer is for people,
    ``to_dict()`` for programs.
    """
    r = _request(
        query, key, value, mask, bias, scale, softcap, sinks, None, aux=return_aux,
        dropout=(dropout_p, seed, generator),
    )  # fmt: skip
    names = dispatch.candidates(backend)
    reasons = {n: dispatch.get(n).why_not(r) for n in dispatch.BACKENDS}
    chosen = next((n for n in names if not reasons[n]), None)
    return dispatch.Explanation(r.describe(), names, chosen, reasons, _tile_counts(r))


def _tile_counts(r: Request, block: int = 128) -> dict[str, int]:
    if r.device.type == "meta" or any(t.device.type == "meta" for t in ([] if r.mask is None else r.mask.tensors())):
        return {}
    grid = Grid(r.batch, r.heads, r.len_q, r.len_k, block, block, r.device)
    table = tile_map(r.mask, grid).table
    repeats = (r.batch // table.shape[0]) * (r.heads // table.shape[1])
    count = {n: int((table == x).sum()) * repeats for n, x in (("empty", EMPTY), ("partial", PARTIAL), ("full", FULL))}
    return {"block_m": block, "block_n": block, "total": table.numel() * repeats, **count}


# --- from arguments to a Request ------------------------------------------------------------------


def _run(r: Request, choice: Choice) -> dispatch.Output:
    backend = dispatch.select(r, choice)
    return backend.forward(r) if backend.composite else ops.run(r, backend.name)


def _answer(o: dispatch.Output, aux: AuxRequest | None) -> Tensor | tuple[Tensor, AuxOutput]:
    if aux is None:
        return o.out
    return o.out, AuxOutput(o.lse if aux.lse else None, o.max_logits if aux.max_logits else None)


def _request(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Bias, scale: float | None,
    softcap: float | None, sinks: Tensor | None, ragged: Ragged | None, aux: AuxRequest | None,
    dropout: tuple[float, int | None, torch.Generator | None],
) -> Request:  # fmt: skip
    _check_rank(q, k, v, ragged is not None)
    if aux is not None and not isinstance(aux, AuxRequest):
        raise TypeError(f"return_aux must be an AuxRequest, as in AuxRequest(lse=True), got {type(aux).__name__}")
    if _autocast(q.device.type) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check_qkv(q, k, v, ragged)
    batch, lq, lk = (q.shape[0], q.shape[2], k.shape[2]) if ragged is None else (
        ragged.cu_q.shape[0] - 1, ragged.max_q, ragged.max_k
    )  # fmt: skip
    sizes = (batch, q.shape[1], lq, lk)
    dropout_p, seed, generator = dropout
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is a probability in [0, 1], got {dropout_p}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be > 0, got {softcap}; None turns it off")
    bias, slopes = (None, bias.slopes) if isinstance(bias, Alibi) else (bias, None)
    return Request(
        q, k, v,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        mask=_check_mask(mask, sizes),
        bias=_check_bias(bias, sizes, q),
        alibi=_check_slopes(slopes, sizes, q),
        softcap=softcap,
        sinks=_check_sinks(sinks, q),
        dropout_p=float(dropout_p),
        rng=_rng(q.device, seed, generator) if dropout_p > 0 else None,
        seeded=dropout_p > 0 and (seed is not None or generator is not None),
        ragged=ragged,
        want_lse=aux is not None and aux.lse,
        want_max_logits=aux is not None and aux.max_logits,
    )  # fmt: skip


# Asked here, as torch.compile before torch 2.13 cannot trace the question.
_AUTOCAST = frozenset(d for d in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia") if torch.amp.is_autocast_available(d))


def _autocast(device: str) -> bool:
    return device in _AUTOCAST and torch.is_autocast_enabled(device)


def _check_rank(q: Tensor, k: Tensor, v: Tensor, ragged: bool) -> None:
    rank, layout = (3, "(T, H, D)") if ragged else (4, "(B, H, L, D)")
    for name, x in (("query", q), ("key", k), ("value", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; torch.as_tensor({name}) makes one")
        if x.dim() != rank:
            fix = "; add a batch dim with x[None]" if x.dim() == rank - 1 and not ragged else ""
            raise ValueError(f"{name} must have {rank} dims, {layout}, got {x.dim()}: {tuple(x.shape)}{fix}")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged | None) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; cast them to one"
        )
    if not q.dtype.is_floating_point:
        raise TypeError(f"query, key and value must be floating point, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"query, key and value must be on one device, got {q.device}, {k.device} and {v.device}")
    length = 2 if ragged is None else 0
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"query and key must have the same head dim D, got {q.shape[-1]} and {k.shape[-1]}{_sizes(q, k, v)}"
        )
    if q.shape[-1] == 0:
        raise ValueError(f"head dim D must be at least 1{_sizes(q, k, v)}")
    if ragged is None and not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"query, key and value must have the same batch size{_sizes(q, k, v)}")
    if k.shape[1] != v.shape[1] or k.shape[length] != v.shape[length]:
        raise ValueError(f"key and value must have the same heads and length{_sizes(q, k, v)}")
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"query heads must be a multiple of key/value heads, got {q.shape[1]} and {k.shape[1]}{_sizes(q, k, v)}"
            + ("; with (B, L, H, D) tensors, transpose(1, 2) first" if ragged is None else "")
        )


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f" (query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)})"


def _check_mask(mask: Mask | Tensor | None, sizes: tuple[int, int, int, int]) -> Mask | None:
    if mask is None:
        return None
    if not isinstance(mask, Mask):
        mask_mod = getattr(mask, "mask_mod", None)  # FlexAttention's BlockMask
        mask = masks.predicate(mask_mod) if mask_mod is not None else masks.dense(mask)
    mask.check(*sizes)
    return mask


def _check_bias(bias: Tensor | None, sizes: tuple[int, int, int, int], q: Tensor) -> Tensor | None:
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(
            f"bias must be a floating-point tensor (it is added to the scores) or alibi(slopes), got {got}; "
            "a bool tensor (True = attend) goes to mask="
        )
    _check_device("bias", bias, q)
    bias = to_4d("bias", bias)
    check_broadcast("bias", bias, sizes)
    return bias


def _check_slopes(slopes: Tensor | None, sizes: tuple[int, int, int, int], q: Tensor) -> Tensor | None:
    if slopes is None:
        return None
    _check_device("the slopes of alibi", slopes, q)
    if slopes.shape not in ((sizes[1],), (sizes[0], sizes[1])):
        raise ValueError(
            f"the slopes of alibi must have shape (H,) = ({sizes[1]},) or (B, H) = ({sizes[0]}, {sizes[1]}), "
            f"got {tuple(slopes.shape)}"
        )
    return slopes.view(-1, sizes[1])


def _check_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    _check_device("sinks", sinks, q)
    if not sinks.is_floating_point() or sinks.shape != (q.shape[1],):
        raise ValueError(
            f"sinks must be floating point of shape (Hq,) = ({q.shape[1]},), got {sinks.dtype} {tuple(sinks.shape)}"
        )
    return sinks


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of query, {q.device}, got {x.device}")


def _rng(device: torch.device, seed: int | None, generator: torch.Generator | None) -> Tensor:
    """Seed and offset of the dropout mask, (2,) int64 on the device: drawn there, so that nothing waits."""
    if seed is not None and generator is not None:
        raise ValueError("pass seed= or generator=, not both")
    if seed is not None:
        offset = torch.zeros(1, dtype=torch.int64, device=device)
        return torch.cat([torch.full_like(offset, seed & (2**63 - 1)), offset])  # filled there: a copy would wait
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device, generator=generator)


def _ragged(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int | None, max_k: int | None
) -> Ragged:
    _check_rank(q, k, v, True)
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 1:
            raise TypeError(f"{name} must be int32 of shape (N + 1,), got {cu.dtype} {tuple(cu.shape)}")
        _check_device(name, cu, q)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must name the same number of sequences, got {cu_q.shape[0] - 1} and "
            f"{cu_k.shape[0] - 1}"
        )
    if torch.compiler.is_compiling():
        if max_q is None or max_k is None:
            raise ValueError(
                "under torch.compile pass max_seqlen_q and max_seqlen_k: they cannot be read from the tensors"
            )
        return Ragged(cu_q, cu_k, max_q, max_k)
    if cu_q.device.type == "cpu" or max_q is None or max_k is None:  # on a GPU with both given, nothing is read back
        longest_q = _check_cu("cu_seqlens_q", cu_q, q.shape[0], max_q)
        longest_k = _check_cu("cu_seqlens_k", cu_k, k.shape[0], max_k)
        max_q, max_k = max_q or longest_q, max_k or longest_k
    return Ragged(cu_q, cu_k, max_q, max_k)


def _check_cu(name: str, cu: Tensor, total: int, longest: int | None) -> int:
    """The longest sequence; ValueError if the boundaries are not those of ``total`` rows."""
    ends = cu.tolist()
    if ends[0] != 0 or ends[-1] > total or any(b < a for a, b in pairwise(ends)):
        raise ValueError(
            f"{name} must start at 0, not decrease, and end at or before the {total} rows there are; got {ends}"
        )
    most = max((b - a for a, b in pairwise(ends)), default=0)
    if longest is not None and longest < most:
        raise ValueError(f"{name} has a sequence of {most} rows, more than its max_seqlen of {longest}")
    return most
