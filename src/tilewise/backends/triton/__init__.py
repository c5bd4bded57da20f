"""The backend ``triton``: the algorithm of ``tiled`` as Triton kernels, for any GPU that Triton compiles for.

fp32 is multiplied in IEEE precision. Where PyTorch is told to multiply matrices in TF32, these are as well, forward
and backward: ``torch.backends.cuda.matmul.fp32_precision = "tf32"``, or its older forms ``allow_tf32`` and
``torch.set_float32_matmul_precision("high")``. The setting is read at each launch.

This module imports without Triton; the kernels are imported when the first request runs.
"""

from __future__ import annotations

import importlib.util

import torch

from ...dispatch import Backend, Grads, Output, Reason, Saved
from ...masks import holders
from ...request import Request
from . import config

MAX_DIM = config.BUCKETS[-1]
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class TritonBackend(Backend):
    name = "triton"
    summary = "portable GPU kernels in Triton, every feature, forward and backward; NVIDIA from sm_80, AMD"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def limits(self, r: Request) -> list[Reason]:
        reasons = []
        if not _HAS_TRITON:
            return [Reason("needs Triton, which is not installed", "pip install triton")]
        if r.device.type != "cuda" and not (config.interpreting() and r.device.type == "cpu"):
            fix = "move the tensors to a GPU, or backend='tiled'; TRITON_INTERPRET=1 runs the kernels on a CPU, slowly"
            reasons.append(Reason(f"runs on GPUs (cuda, ROCm), the tensors are on {r.device.type}", fix))
        elif _too_old(r.device):
            reasons.append(Reason("needs an NVIDIA GPU of compute capability 8.0 or newer", "backend='tiled'"))
        if max(r.dim, r.dim_v) > MAX_DIM:
            reasons.append(Reason(f"takes head dims up to {MAX_DIM}, got {r.dim} and {r.dim_v}", "backend='tiled'"))
        if holders(r.mask):
            from .predicates import LONGEST

            if max(r.len_q, r.len_k) > LONGEST:
                why = f"compiles predicates for lengths up to {LONGEST}, got {r.len_q} and {r.len_k}"
                reasons.append(Reason(why, "backend='tiled'"))
            from .lower import untranslatable

            reasons += [Reason(why, "backend='tiled'") for why in untranslatable(r.mask)]
        return reasons

    def forward(self, r: Request) -> Output:
        from . import tune
        from .forward import forward

        o = forward(r)
        if tune.ENABLED:
            tune.settle(lambda: forward(r)[:3], o[:3])  # but for lse_low, which is rounding
        return o

    def backward(self, r: Request, saved: Saved, needs: frozenset[str]) -> Grads:
        from . import tune
        from .gradients import backward

        grads = backward(r, saved, needs)
        if tune.ENABLED:
            tune.settle(lambda: backward(r, saved, needs), grads)
        return grads


def _too_old(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) < (8, 0)


def backends() -> list[Backend]:
    return [TritonBackend()]
