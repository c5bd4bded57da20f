"""The backend ``hopper``: forward and backward as warp-specialised kernels in Gluon, for the H100 and the H200.

It takes what fills those GPUs: bf16 and fp16, head dims 64, 96, 128, 192 and 256, full attention, bands and key
lengths, softcap, sinks and ragged sequences. The backward is its own where all of dQ, dK and dV are asked for; else it
is that of ``triton``. Gluon is an experimental language of Triton, and its compiler decides whether a kernel is fast: a
version of Triton counts as known once the kernels were measured with it.

This module imports without Triton; the kernels are imported when the first request runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

from ...dispatch import Backend, Grads, Output, Reason, Saved
from ...request import Request
from ..triton.config import interpreting
from . import config, launch

TRITON = "3.6"
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class HopperBackend(Backend):
    name = "hopper"
    summary = (
        "warp-specialised kernels for H100 and H200: 16 bits, head dims 64 to 256, bands, lengths, ragged, softcap"
    )
    devices = ("cuda",)
    dtypes = (torch.bfloat16, torch.float16)
    features = frozenset({"mask", "lse", "max_logits", "gqa", "dim_v", "softcap", "sinks", "varlen"})

    def limits(self, r: Request) -> Iterator[Reason]:
        if r.device.type == "cuda":
            yield from machine(r.device)
        for name, dim in (("head dims", r.dim), ("value head dims", r.dim_v)):
            if dim not in config.HEAD_DIMS:
                yield Reason(f"takes {name} {', '.join(map(str, config.HEAD_DIMS))}, got {dim}")
        if r.softcap is not None and r.softcap > config.LARGEST_CAP:
            yield Reason(f"takes a softcap up to {config.LARGEST_CAP}, got {r.softcap}")
        if not 0 < r.scale < float("inf"):
            yield Reason(f"takes a finite scale > 0, got {r.scale}")
        if launch.kept(r.mask, r.len_q, r.len_k) is None:
            why = "takes bands (causal, window) and key lengths padded on the right, joined by &"
            yield Reason(f"{why}; got {r.mask!r}")
        if r.ragged is not None and launch.skewed(r.mask) is None:
            yield Reason(f"takes bands of one alignment in ragged sequences; got {r.mask!r}")
        for name, x in (("query", r.q), ("key", r.k), ("value", r.v)):
            if not launch.describable(launch.planes(r, x)):
                why = (
                    f"needs {name} with a last stride of 1, other strides above 0 and, like its offset, multiples of 8"
                )
                got = f"got strides {x.stride()} and offset {launch.offset(x)}"
                yield Reason(f"{why}, {got}", f"{name}.{'clone' if x.is_contiguous() else 'contiguous'}()")

    def forward(self, r: Request) -> Output:
        return launch.forward(r)

    def backward(self, r: Request, saved: Saved, needs: frozenset[str]) -> Grads:
        return launch.backward(r, saved, needs)


def machine(device: torch.device) -> list[Reason]:
    """What the GPU and the installation lack."""
    reasons = []
    if torch.version.hip is not None:
        reasons.append(Reason("needs an NVIDIA GPU (H100, H200)"))
    elif (gpu := torch.cuda.get_device_capability(device)) != (9, 0):
        reasons.append(Reason(f"needs compute capability 9.0 (H100, H200), this GPU has {gpu[0]}.{gpu[1]}"))
    if not _HAS_TRITON:
        reasons.append(Reason("needs Triton, which is not installed", f"pip install 'triton=={TRITON}.*'"))
    elif not (found := triton_version()).startswith(TRITON + "."):
        why = f"is measured with Triton {TRITON}, installed is Triton {found}"
        reasons.append(Reason(why, f"pip install 'triton=={TRITON}.*'"))
    if interpreting():
        reasons.append(Reason("has no interpreter, and TRITON_INTERPRET is set", "backend='triton'"))
    return reasons


def triton_version() -> str:
    import triton

    return triton.__version__


def backends() -> list[Backend]:
    return [HopperBackend()]
