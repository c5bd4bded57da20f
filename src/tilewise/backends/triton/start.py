"""Launching a kernel with little work on the host.

Triton's own launch looks at each of some fifty arguments for what it would specialise, and compares every constant of
the source: 80 us on the host of an H200, as long as a short kernel runs, and a backward has two to seven. A kernel that
was launched with such arguments before is found here by what these are, and called as that launch called it.

The call is one of Triton 3.6; with another version, or on another GPU than one of NVIDIA, Triton launches.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

_VERSION = "3.6."
_MOST = 4096  # launches that are remembered


class Tiled(NamedTuple):
    """A tensor as TMA takes it: in tiles. Its last stride is 1. Shape and strides may be others than those of x."""

    x: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def descriptor(self) -> Any:
        """For a launch by Triton."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[self.x.dtype]
        block = list(self.block)
        one = len(block) == 1
        layout = gl.NVMMASharedLayout(0, 32, 1) if one else gl.NVMMASharedLayout.get_default_for(block, element)
        return TensorDescriptor(self.x, list(self.shape), [*self.strides, 1], block, layout)


class Compiled(NamedTuple):
    """A specialisation of a kernel, and how Triton's launcher calls it."""

    call: Any
    function: Any
    how: tuple  # whether cooperative and dependent; no scratch memory; metadata; no hooks
    maps: tuple  # of each descriptor: how a tile lies in shared memory
    constants: tuple

    def arguments(self, grid: int, stream: int, args: tuple, masks: tuple) -> list:
        """Of ``call``."""
        values: list[Any] = []
        maps = iter(self.maps)
        for x in args:
            if isinstance(x, Tiled):
                values += encoded(x.x.data_ptr(), x.shape, x.strides, next(maps))
            else:
                values.append(_address(x))
        values += [tuple([_address(x) for x in m]) for m in masks]
        return [grid, 1, 1, stream, self.function, *self.how, *values, *self.constants]


def _address(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, Tensor) else x


@lru_cache(4096)
def encoded(address: int, shape: tuple[int, ...], strides: tuple[int, ...], made: tuple) -> tuple:
    """A descriptor as the launcher takes it: where a tensor is and how it lies, whichever tensor that is by now."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    meta = {k: list(v) if isinstance(v, tuple) else v for k, v in made}
    return tuple(make_tensordesc_arg(_Descriptor(_Base(address), list(shape), [*strides, 1]), meta))


class _Base(NamedTuple):
    address: int

    def data_ptr(self) -> int:
        return self.address


class _Descriptor(NamedTuple):
    base: _Base
    shape: list[int]
    strides: list[int]
    padding: str = "zero"


_known: dict[tuple, Compiled] = {}


def launch(
    kernel: Any, grid: int, args: tuple, masks: tuple = (), *, num_warps: int = 4, num_stages: int = 3,
    maxnreg: int | None = None, **constants: Any,
) -> Compiled | None:  # fmt: skip
    """``kernel[(grid,)](*args, *masks, **constants)`` on the current device and stream.

    args: tensors, ``Tiled``, numbers, None, and tuples of numbers. masks: tuples of tensors and numbers, the parameters
    after them. constants: the tl.constexpr parameters, which come last. Returns how to call it again, where that is
    known.
    """
    options = {**constants, "num_warps": num_warps, "num_stages": num_stages}
    if maxnreg is not None:  # not every backend of Triton knows it
        options["maxnreg"] = maxnreg
    first = args[0].x if isinstance(args[0], Tiled) else args[0]
    if not (isinstance(kernel, triton.JITFunction) and remembers(first.device)):
        kernel[(grid,)](*map(_for_triton, args), *masks, **options)
        return None
    if constants.get("PDL"):  # a kernel that waits itself for the one before
        options["launch_pdl"] = True
    device = torch.cuda.current_device()
    last = tuple([constants[name] for name in kernel.arg_names[len(args) + len(masks) :]])
    seen = tuple(map(_seen, args)), tuple([tuple(map(_seen, m)) for m in masks])
    key = kernel, device, num_warps, num_stages, maxnreg, seen, last
    found = _known.get(key)
    if found is not None:
        found.call(*found.arguments(grid, stream(device), args, masks))
        return found
    compiled = kernel[(grid,)](*map(_for_triton, args), *masks, **options)
    found = _how(compiled, last)
    if found is not None:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = found
    return found


def _how(compiled: Any, constants: tuple) -> Compiled | None:
    """How to call a specialisation; None if it needs memory of Triton's."""
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    how = run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None
    described = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    maps = tuple(tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in m.items()) for m in described)
    # With descriptors run.launch encodes them at every call, and calls this one.
    call = inspect.getclosurevars(run.launch).nonlocals["launcher"] if maps else run.launch
    return Compiled(call, compiled.function, how, maps, constants)


def _for_triton(x: Any) -> Any:
    return x.descriptor() if isinstance(x, Tiled) else x


def _seen(x: Any) -> Any:
    """All of an argument that Triton may compile for."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return (x.x.dtype, x.block) if isinstance(x, Tiled) else x


def stream(device: int) -> int:
    """The current one."""
    return torch._C._cuda_getCurrentRawStream(device)


def remembers(device: torch.device) -> bool:
    """Whether kernels launch there as ``Compiled`` says, and no profiler of Triton's wants to hear of it."""
    if device.type != "cuda" or not _is_known_triton():
        return False
    return not (knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


@lru_cache
def _is_known_triton() -> bool:
    return triton.__version__.startswith(_VERSION) and torch.version.cuda is not None
