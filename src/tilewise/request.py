"""One call to attention as one frozen object: what is asked for, with nothing about how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .masks import Mask, Patch, holders

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Alibi:
    """Linear biases -slope * |i + Lk - Lq - j|, made in the tile: no (Lq, Lk) tensor exists.

    slopes: (H,) or (B, H). Source: Press et al. 2022, "Train Short, Test Long".
    """

    slopes: Tensor


def alibi(slopes: Tensor) -> Alibi:
    """ALiBi as ``bias=alibi(slopes)``; slopes (H,) or (B, H), one positive number a head. Differentiable."""
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point() or slopes.dim() not in (1, 2):
        got = f"{slopes.dtype} {tuple(slopes.shape)}" if isinstance(slopes, Tensor) else type(slopes).__name__
        raise TypeError(f"alibi: slopes must be a floating-point tensor of shape (H,) or (B, H), got {got}")
    return Alibi(slopes)


@dataclass(frozen=True)
class Ragged:
    """Sequences of different lengths laid end to end: sequence n is rows cu[n] to cu[n + 1]."""

    cu_q: Tensor  # (N + 1,) int32
    cu_k: Tensor  # (N + 1,) int32
    max_q: int
    max_k: int


@dataclass(frozen=True)
class Request:
    """softmax(q k^T scale, softcap, + bias, masked) v, and what of it is wanted.

    q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv); with ``ragged``, q (Tq, Hq, D),
    k (Tk, Hkv, D), v (Tk, Hkv, Dv).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Mask | None = None
    bias: Tensor | None = None  # 4-D, broadcastable to (B, Hq, Lq, Lk)
    alibi: Tensor | None = None  # (B or 1, Hq) slopes
    softcap: float | None = None
    sinks: Tensor | None = None  # (Hq,)
    dropout_p: float = 0.0
    rng: Tensor | None = None  # (2,) int64: seed and offset of Philox
    seeded: bool = False  # the caller asked for this seed, so another generator will not do
    ragged: Ragged | None = None
    want_lse: bool = False
    want_max_logits: bool = False
    before_backward: bool = True  # whether a backward may follow

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.ragged is None else self.ragged.cu_q.shape[0] - 1

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        return self.heads // max(self.kv_heads, 1)

    @property
    def len_q(self) -> int:
        return self.q.shape[2] if self.ragged is None else self.ragged.max_q

    @property
    def len_k(self) -> int:
        return self.k.shape[2] if self.ragged is None else self.ragged.max_k

    @property
    def dim(self) -> int:
        return self.q.shape[-1]

    @property
    def dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the row state, of lse and of max_logits."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def keeps_low(self) -> bool:
        """Whether the forward saves ``state.lse_low``.

        In bf16 and fp16 it is lost in the rounding of P, unless a bias makes scores huge.
        """
        return self.before_backward and (self.bias is not None or self.dtype == self.state_dtype)

    def grads(self) -> dict[str, bool]:
        """Which inputs a backward pass would have to serve."""
        on = torch.is_grad_enabled()
        named = {"q": self.q, "k": self.k, "v": self.v, "bias": self.bias, "alibi": self.alibi, "sinks": self.sinks}
        return {name: on and x is not None and x.requires_grad for name, x in named.items()}

    def _has_tangents(self) -> bool:
        if torch.compiler.is_compiling() or forward_ad._current_level < 0:
            return False
        named = (self.q, self.k, self.v, self.bias, self.alibi, self.sinks)
        return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in named)

    def features(self) -> dict[str, str]:
        """Everything asked for beyond plain attention, with the words an error uses for it."""
        return {name: self.words(name) for name in self.asked()}

    def asked(self) -> Iterator[str]:
        """The names of these features."""
        if self.mask is not None:
            yield "mask"
            if holders(self.mask):
                yield "predicate"
        if self.bias is not None:
            yield "bias"
            if torch.is_grad_enabled() and self.bias.requires_grad:
                yield "bias_grad"
        if self.alibi is not None:
            yield "alibi"
        if self.softcap is not None:
            yield "softcap"
        if self.sinks is not None:
            yield "sinks"
        if self.dropout_p > 0:
            yield "dropout"
        if self.want_lse:
            yield "lse"
        if self.want_max_logits:
            yield "max_logits"
        if self.group != 1:
            yield "gqa"
        if self.dim_v != self.dim:
            yield "dim_v"
        if self.ragged is not None:
            yield "varlen"
        if self._has_tangents():
            yield "jvp"

    def words(self, feature: str) -> str:
        """What an error calls it."""
        return {
            "mask": f"mask {self.mask!r}",
            "predicate": "a predicate mask",
            "bias": "a bias",
            "bias_grad": "a gradient of the bias",
            "alibi": "ALiBi slopes",
            "softcap": f"softcap {self.softcap}",
            "sinks": "attention sinks",
            "dropout": f"dropout_p {self.dropout_p}",
            "lse": "the log-sum-exp as an output",
            "max_logits": "max_logits as an output",
            "gqa": f"{self.heads} query heads on {self.kv_heads} key/value heads",
            "dim_v": f"value head dim {self.dim_v} beside {self.dim}",
            "varlen": "ragged sequences (cu_seqlens)",
            "jvp": "forward-mode differentiation (jvp)",
        }[feature]

    def describe(self) -> str:
        """The request in a few lines, as errors and ``explain`` show it."""
        tensors = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("q", self.q), ("k", self.k), ("v", self.v)))
        wants = [name for name, on in self.grads().items() if on]
        lines = [f"{tensors}, {str(self.dtype).removeprefix('torch.')} on {self.device}, scale {self.scale:.6g}"]
        if asked := self.features():
            lines.append("with " + "; ".join(w for n, w in asked.items() if n != "predicate"))
        lines.append(f"gradients of {', '.join(wants)}" if wants else "no gradients")
        return "\n".join(lines)

    def sequences(self) -> Iterator[Sequence]:
        """The rectangular problems this call consists of: itself, or one for each ragged sequence."""
        if self.ragged is None:
            yield Sequence(slice(0, self.batch), slice(0, self.len_q), slice(0, self.len_k), False)
            return
        ends_q, ends_k = self.ragged.cu_q.tolist(), self.ragged.cu_k.tolist()
        for n in range(self.batch):
            rows, cols = slice(ends_q[n], ends_q[n + 1]), slice(ends_k[n], ends_k[n + 1])
            yield Sequence(slice(n, n + 1), rows, cols, True)

    def patch(self, seq: Sequence, batch: slice, heads: slice, rows: slice, cols: slice) -> Patch:
        return Patch(batch, heads, rows, cols, seq.len_q, seq.len_k, self.device)

    def bias_tile(self, patch: Patch) -> Tensor | None:
        """What is added to the scores of a patch, in the state dtype; broadcastable to it."""
        if self.bias is not None:
            return patch.take(self.bias).to(self.state_dtype)
        if self.alibi is not None:
            return -patch.take(self.alibi[:, :, None, None]).to(self.state_dtype) * distance(patch)
        return None

    def new_out(self) -> Tensor:
        """Room for the output in the memory order of q: a (B, L, H, D) q, seen as (B, H, L, D), gives such an out."""
        shape = (*self.q.shape[:-1], self.dim_v)
        if self.ragged is None and not self.q.is_contiguous() and self.q.transpose(1, 2).is_contiguous():
            b, h, n, d = shape
            return self.q.new_empty(b, n, h, d).transpose(1, 2)
        return self.q.new_empty(shape)

    def new_stats(self) -> Tensor:
        """Room for lse or max_logits: (B, H, Lq), or (H, T) when ragged, in the state dtype."""
        shape = self.q.shape[:3] if self.ragged is None else (self.heads, self.q.shape[0])
        return torch.empty(shape, dtype=self.state_dtype, device=self.device)


def distance(patch: Patch) -> Tensor:
    """|i + Lk - Lq - j| of ALiBi, (1, 1, m, n)."""
    return (patch.i + (patch.len_k - patch.len_q) - patch.j).abs()


@dataclass(frozen=True)
class Sequence:
    """A rectangular problem inside a request: its batch entries and where its rows lie."""

    batch: slice
    rows: slice
    cols: slice
    ragged: bool

    @property
    def len_q(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def len_k(self) -> int:
        return self.cols.stop - self.cols.start

    def queries(self, x: Tensor) -> Tensor:
        """The (B, H, Lq, D) view of a query-like tensor (q, out and their gradients)."""
        return x[self.rows].transpose(0, 1)[None] if self.ragged else x

    def keys(self, x: Tensor) -> Tensor:
        """The (B, H, Lk, D) view of a key-like tensor (k, v and their gradients)."""
        return x[self.cols].transpose(0, 1)[None] if self.ragged else x

    def stats(self, x: Tensor) -> Tensor:
        """The (B, H, Lq) view of a row statistic (lse, max_logits): (H, T) when ragged."""
        return x[:, self.rows][None] if self.ragged else x
