"""Compiling ahead of time, with no GPU: every kernel that a request would launch, for any target.

The launch code itself runs, on tensors of the "meta" device, and each launch is compiled instead of made. What is
compiled is therefore what would run: the same specialisation of every pointer, stride and constant.

    compiled = compile_request(request, "sm_90", backward=True)
    compiled[0].shared, compiled[0].asm["ptx"]
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from ...dispatch import Saved
from ...request import Request
from . import config
from .forward import forward
from .gradients import backward as launch_backward

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), config.SM80),
    "sm_90": (GPUTarget("cuda", 90, 32), config.SM90),
    "gfx942": (GPUTarget("hip", "gfx942", 64), config.AMD),
}


class Compiled(NamedTuple):
    """One kernel: its code in every form, its shared memory in bytes."""

    name: str
    target: str
    asm: dict[str, Any]
    shared: int

    def resources(self) -> dict[str, int]:
        """REG, STACK, ... of an NVIDIA kernel, by cuobjdump; vgpr_count, private_segment_fixed_size of an AMD one."""
        if "cubin" not in self.asm:
            names = "private_segment_fixed_size|vgpr_count|vgpr_spill_count|sgpr_spill_count"
            found = re.findall(rf"\.({names}):\s*(\d+)", self.asm["amdgcn"])
            return {name: int(n) for name, n in found}
        said = self._read(triton.knobs.nvidia.cuobjdump.path, "-res-usage")
        return {name: int(n) for name, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", said)}

    def code(self) -> str:
        """The machine code with lines that name its source. Not ``asm["sass"]``, which ends after 64 KB."""
        if "cubin" not in self.asm:
            return self.asm["amdgcn"]
        return self._read(triton.knobs.nvidia.nvdisasm.path, "-c", "-g")

    def _read(self, tool: str, *options: str) -> str:
        """What a tool says of the cubin."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(self.asm["cubin"])
            f.flush()
            return subprocess.run([tool, *options, f.name], capture_output=True, text=True, check=True).stdout


def compile_launch(fn: JITFunction, target: str, *args: Any, **kwargs: Any) -> Compiled:
    """What ``fn[grid](*args, **kwargs)`` would compile."""
    gpu, _ = TARGETS[target]
    backend = make_backend(gpu)
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    options, signature, constexprs, attrs = fn._pack_args(backend, kwargs, bound, specialization, options)
    kernel = triton.compile(ASTSource(fn, signature, constexprs, attrs), target=gpu, options=options.__dict__)
    return Compiled(fn.__name__, target, kernel.asm, kernel.metadata.shared)


@contextmanager
def recorded(target: str, only: str | None = None) -> Iterator[list[Compiled]]:
    """Within the block, launches are compiled for the target and appended to the list. only: kernels of this name."""
    made: list[Compiled] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if only is None or self.__name__ == only:
            made.append(compile_launch(self, target, *args, debug=False, **kwargs))

    gpu = mock.patch.object(config, "generation", return_value=TARGETS[target][1])
    with mock.patch.object(JITFunction, "run", run), gpu:
        yield made


def compile_request(r: Request, target: str, backward: bool = False, only: str | None = None) -> list[Compiled]:
    """All kernels of a request on the "meta" device, and with ``backward`` those of all its gradients."""
    with recorded(target, only) as made:
        o = forward(r)
        if backward:
            assert o.lse is not None
            given = {"q": r.q, "k": r.k, "v": r.v, "bias": r.bias, "alibi": r.alibi, "sinks": r.sinks}
            needs = frozenset(n for n, x in given.items() if x is not None)
            launch_backward(r, Saved(torch.empty_like(o.out), torch.empty_like(o.lse), o.out, o.lse, o.lse_low), needs)
    return made
