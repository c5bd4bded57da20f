"""PyTorch's own attention kernels as named backends: peers to compare with and to diagnose.

They are never chosen automatically. Their reasons are SDPA's own constraints: what its signature
cannot say is refused here, and the kernel's own limits are asked of PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dispatch import Backend, Output, Reason
from ..masks import BOTTOM_RIGHT, Band, Dense, Mask, Patch
from ..request import Request

_COMMON = frozenset({"mask", "bias", "dropout", "gqa"})
_HINTS = {
    "lse": "use a tilewise backend, or take only the output",
    "sinks": "use a tilewise backend",
    "softcap": "use a tilewise backend",
    "alibi": "use a tilewise backend, or pass the biases as an (Lq, Lk) tensor",
    "varlen": "use a tilewise backend, or pad the sequences",
}


class SDPABackend(Backend):
    """One of SDPA's kernels, forced with ``torch.nn.attention.sdpa_kernel``."""

    composite = True
    hints = _HINTS
    kernel: SDPBackend
    can_use: Callable[..., bool]
    lowered_masks: tuple[type[Mask], ...] = ()  # mask terms that fit attn_mask without a new L x L tensor

    def limits(self, r: Request) -> list[Reason]:
        reasons = self._device_limits(r)
        if r.seeded:
            reasons.append(
                Reason("draws its own dropout mask and cannot honour a seed", "leave seed= and generator= out")
            )
        if r.mask is not None and r.bias is not None:
            reasons.append(Reason("takes a mask or a bias, not both", "put -inf into the bias where masked"))
        if r.mask is not None and not self._fits(r):
            reasons.append(
                Reason(f"has no argument for {r.mask!r}, and no (Lq, Lk) tensor is built for it", "backend='tiled'")
            )
        elif not (reasons or r.ragged or torch.compiler.is_compiling()):
            reasons = self._ask(r)
        return reasons

    def _fits(self, r: Request) -> bool:
        return _is_causal(r) or isinstance(r.mask, self.lowered_masks)

    def _device_limits(self, r: Request) -> list[Reason]:
        """What this kernel needs, apart from what PyTorch tells when asked."""
        if r.device.type == "cuda":
            return []
        return [Reason(f"is a CUDA kernel, the tensors are on {r.device.type}")]

    def _ask(self, r: Request) -> list[Reason]:
        """What PyTorch says of this kernel and these tensors."""
        return _asked(self.can_use, r, self._arguments(r))

    def forward(self, r: Request) -> Output:
        with sdpa_kernel(self.kernel):
            out = F.scaled_dot_product_attention(r.q, r.k, r.v, **self._arguments(r))
        return Output(out)

    def _arguments(self, r: Request) -> dict:
        causal = _is_causal(r)
        bias = None if r.bias is None else r.bias.to(r.dtype)
        mask = self._lower(r) if r.mask is not None and not causal else bias
        return {
            "attn_mask": mask,
            "dropout_p": r.dropout_p,
            "is_causal": causal,
            "scale": r.scale,
            "enable_gqa": r.group != 1,
        }

    def _lower(self, r: Request) -> Tensor:
        assert isinstance(r.mask, Dense)
        return r.mask.mask


class TorchFlash(SDPABackend):
    name = "torch_flash"
    summary = "PyTorch's FlashAttention-2 (CUDA) or CPU flash kernel"
    kernel = SDPBackend.FLASH_ATTENTION
    can_use = staticmethod(torch.backends.cuda.can_use_flash_attention)
    devices = ("cuda", "cpu")
    features = _COMMON

    def _fits(self, r: Request) -> bool:
        return _is_causal(r) or (r.device.type == "cpu" and isinstance(r.mask, Dense))

    def _device_limits(self, r: Request) -> list[Reason]:
        """On a CPU: aten/src/ATen/native/transformers/sdp_utils_cpp.cpp of torch 2.9 to 2.14."""
        reasons: list[Reason] = []
        if r.device.type != "cpu":
            return reasons
        if r.dropout_p > 0:
            reasons.append(Reason("PyTorch's CPU flash kernel has no dropout", "dropout_p=0.0, or backend='tiled'"))
        if r.grads()["bias"]:
            reasons.append(Reason("PyTorch's CPU flash kernel has no gradient of the bias", "backend='tiled'"))
        if 0 in (r.batch, r.len_q, r.len_k):
            reasons.append(Reason("PyTorch's CPU flash kernel takes no empty tensors", "backend='tiled'"))
        if r.mask is not None and not r.scale > 0:  # it masks before it scales: -inf * 0 is NaN
            reasons.append(
                Reason(f"PyTorch's CPU flash kernel gives NaN for a mask and scale {r.scale}", "backend='tiled'")
            )
        return reasons

    def _ask(self, r: Request) -> list[Reason]:
        if r.device.type == "cpu":
            return _forced(self.kernel, r, self._arguments(r))
        return super()._ask(r)


class TorchEfficient(SDPABackend):
    name = "torch_efficient"
    summary = "PyTorch's memory-efficient kernel (CUDA)"
    kernel = SDPBackend.EFFICIENT_ATTENTION
    can_use = staticmethod(torch.backends.cuda.can_use_efficient_attention)
    features = _COMMON | {"bias_grad", "dim_v"}
    lowered_masks = (Dense,)


class TorchCudnn(SDPABackend):
    name = "torch_cudnn"
    summary = "cuDNN's fused attention through PyTorch (CUDA)"
    kernel = SDPBackend.CUDNN_ATTENTION
    can_use = staticmethod(torch.backends.cuda.can_use_cudnn_attention)
    features = _COMMON | {"dim_v"}
    lowered_masks = (Dense,)


class TorchMath(SDPABackend):
    name = "torch_math"
    summary = "PyTorch's unfused reference: stores L x L matrices"
    kernel = SDPBackend.MATH
    features = _COMMON | {"bias_grad", "dim_v", "predicate", "alibi"}

    def _fits(self, r: Request) -> bool:
        return True  # it stores (Lq, Lk) matrices whatever it is given: a mask of that size is no surprise

    def _device_limits(self, r: Request) -> list[Reason]:
        return []

    def _ask(self, r: Request) -> list[Reason]:
        return []

    def _lower(self, r: Request) -> Tensor:
        assert r.mask is not None
        return r.mask.keep(_whole(r))

    def _arguments(self, r: Request) -> dict:
        args = super()._arguments(r)
        if r.alibi is not None:
            bias = r.bias_tile(_whole(r))
            assert bias is not None
            if r.mask is not None:
                bias = bias.masked_fill(~r.mask.keep(_whole(r)), float("-inf"))
            args.update(attn_mask=bias.to(r.dtype), is_causal=False)
        return args


def _whole(r: Request) -> Patch:
    (seq,) = r.sequences()
    return r.patch(seq, seq.batch, slice(0, r.heads), slice(0, r.len_q), slice(0, r.len_k))


def _is_causal(r: Request) -> bool:
    """SDPA's is_causal is top-left aligned, and excludes an attn_mask beside it."""
    m = r.mask
    if not isinstance(m, Band) or m.left is not None or m.right != 0 or r.bias is not None:
        return False
    return m.offset(r.len_q, r.len_k) == 0 if m.align != BOTTOM_RIGHT else r.len_q == r.len_k


def _asked(can_use, r: Request, args: dict) -> list[Reason]:
    """PyTorch's own reasons: it answers with warnings when asked in debug mode."""
    params = torch.backends.cuda.SDPAParams(
        r.q, r.k, r.v, args["attn_mask"], args["dropout_p"], args["is_causal"], args["enable_gqa"]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if can_use(params, True):
            return []
    said = [str(w.message).split(" (Triggered internally")[0] for w in caught]
    return [Reason(f"PyTorch: {s}") for s in said] or [Reason("PyTorch says that this kernel cannot be used")]


def _forced(kernel: SDPBackend, r: Request, args: dict) -> list[Reason]:
    """Whether SDPA, with only this kernel allowed, would take the call."""
    with sdpa_kernel(kernel), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            choice = torch._fused_sdp_choice(r.q, r.k, r.v, **args)
        except RuntimeError as e:
            return [Reason(f"PyTorch: {str(e).splitlines()[0]}")]
    return [] if choice == kernel.value else [Reason("PyTorch's SDPA would not take its flash kernel for this call")]


def backends() -> list[Backend]:
    return [TorchFlash(), TorchEfficient(), TorchCudnn(), TorchMath()]
