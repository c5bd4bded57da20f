"""Launching a kernel with little work on the host.

Triton's own launch looks at each of some fifty arguments for what it would specialise, and compares every constant of
the source: 80 us on the host of an H200, as long as a short kernel runs, and a backward has five. A kernel that was
launched with such arguments before is found here by what these are, and called as that launch called it.

The call is one of Triton 3.6; with another version, or on another GPU than one of NVIDIA, Triton launches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

_VERSION = "3.6."
_MOST = 4096  # launches that are remembered


class Compiled(NamedTuple):
    """A specialisation of a kernel, and how Triton's launcher calls it."""

    call: Any
    function: Any
    how: tuple  # whether cooperative and dependent; no scratch memory; metadata; no hooks
    constants: tuple

    def arguments(self, grid: int, stream: int | None, values: list) -> list:
        """Of ``call``."""
        return [grid, 1, 1, stream, self.function, *self.how, *values, *self.constants]


_known: dict[tuple, Compiled] = {}


def launch(
    kernel: Any, grid: int, args: tuple, masks: tuple = (), *, num_warps: int = 4, num_stages: int = 3,
    maxnreg: int | None = None, **constants: Any,
) -> Compiled | None:  # fmt: skip
    """``kernel[(grid,)](*args, *masks, **constants, **options)`` on the current device and stream.

    args: tensors, numbers, None, and tuples of numbers. masks: tuples of tensors and numbers, the parameters after
    them. constants: the tl.constexpr parameters, which come last. Returns how to call it again, where that is known.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if maxnreg is not None:  # not every backend knows it
        options["maxnreg"] = maxnreg
    if not (isinstance(kernel, triton.JITFunction) and remembers(args[0].device)):
        kernel[(grid,)](*args, *masks, **constants, **options)
        return None
    device = torch.cuda.current_device()
    values, seen = _seen(args)
    for m in masks:
        of_mask, seen_of_mask = _seen(m)
        values.append(tuple(of_mask))
        seen.append(tuple(seen_of_mask))
    last = tuple([constants[name] for name in kernel.arg_names[len(values) :]])
    key = kernel, device, tuple(options.items()), tuple(seen), last
    found = _known.get(key)
    if found is not None:
        found.call(*found.arguments(grid, stream(device), values))
        return found
    compiled = kernel[(grid,)](*args, *masks, **constants, **options)
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    if len(_known) >= _MOST:
        _known.clear()
    how = run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None
    _known[key] = found = Compiled(run.launch, compiled.function, how, last)
    return found


def stream(device: int) -> int:
    """The current one."""
    return torch._C._cuda_getCurrentRawStream(device)


def _seen(args: tuple) -> tuple[list, list]:
    """Arguments as the launcher takes them, and all of them that Triton may compile for."""
    values, seen = [], []
    for x in args:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            values.append(address)
            seen.append((x.dtype, address % 16 == 0))
        else:
            values.append(x)
            seen.append(x)
    return values, seen


def remembers(device: torch.device) -> bool:
    """Whether kernels launch there as ``Compiled`` says, and no profiler of Triton's wants to hear of it."""
    if device.type != "cuda" or not _is_known_triton():
        return False
    return not (knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


@lru_cache
def _is_known_triton() -> bool:
    return triton.__version__.startswith(_VERSION) and torch.version.cuda is not None
