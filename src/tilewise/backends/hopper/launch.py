"""From a Request to a launch of the kernel: the mask as a band, tensors as TMA describes them, compiled kernels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Output
from ...masks import All, Band, Lengths, Mask
from ...request import NEG_INF, Request
from . import config

_FAR = 2**29  # beyond every position, and sums of three of it fit 32 bits
_LOG2E = math.log2(math.e)


class Kept(NamedTuple):
    """The keys j that row i keeps: low <= j - i <= high, where not None, and j < lengths[b]."""

    low: int | None = None
    high: int | None = None
    lengths: Tensor | None = None


def kept(mask: Mask | None, len_q: int, len_k: int) -> Kept | None:
    """A mask as ``Kept``; None if it is another kind."""
    if mask is None:
        return Kept()
    if isinstance(mask, Band):
        offset = mask.offset(len_q, len_k)
        return Kept(
            None if mask.left is None else offset - mask.left, None if mask.right is None else offset + mask.right
        )
    if isinstance(mask, Lengths) and mask.axis == 1 and mask.side == "right":
        return Kept(lengths=mask.lengths)
    if not isinstance(mask, All):
        return None
    total = Kept()
    for term in mask.terms:
        k = kept(term, len_q, len_k)
        if k is None or (k.lengths is not None and total.lengths is not None):
            return None
        total = Kept(
            _both(max, total.low, k.low),
            _both(min, total.high, k.high),
            k.lengths if total.lengths is None else total.lengths,
        )
    return total


def _both(pick: Callable[[int, int], int], a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else pick(a, b)


def strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, head, row) of a (B, H, L, D) tensor. That of a dim of size 1 is never used: any that TMA takes."""
    (b, h, n, _), (batch, heads, length, _) = x.stride(), x.shape
    return b if batch > 1 else 8, h if heads > 1 else 8, n if length > 1 else 8


def offset(x: Tensor) -> int:
    """Where x begins in its storage; 0 to torch.compile, which does not trace this: ``aligned`` copies if it must."""
    return 0 if torch.compiler.is_compiling() else int(x.storage_offset())


def describable(x: Tensor) -> bool:
    """Whether TMA can load tiles of x: channels side by side, rows and base at multiples of 16 bytes."""
    b, h, n = strides(x)
    return x.stride(3) == 1 and not (b % 8 or h % 8 or n % 8 or offset(x) % 8) and b > 0 and h > 0 and n > 0


def aligned(x: Tensor) -> Tensor:
    """x, or a copy where it begins at an address that TMA does not take."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


@lru_cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_counters: dict[tuple[int, int], Tensor] = {}


def _counter(device: torch.device, stream: int) -> Tensor:
    """The number of the next tile to work on, and of programs that are done: two zeros, which a launch leaves as zeros.

    One pair for each stream, where launches follow each other. A graph may run beside them: it gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device.index, stream
    if key not in _counters:
        _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _counters[key]


class Compiled:
    """A specialisation of the kernel, launched with little work on the host.

    Triton's own launch looks at every argument for what it would specialise, and encodes each descriptor anew: 60 us,
    as long as the kernel takes for 1024 keys.
    """

    def __init__(self, compiled: Any):
        run = compiled.run
        self.kernel = compiled
        maps = compiled.metadata.tensordesc_meta  # of each descriptor: how it lies in shared memory
        self.maps = tuple(tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in m.items()) for m in maps)
        self.how = run.launch_cooperative_grid, run.launch_pdl, None, None  # no scratch memory
        # run.launch encodes descriptors and calls this one.
        self.launch = inspect.getclosurevars(run.launch).nonlocals["launcher"]

    def __call__(self, grid: int, stream: int, lies: list[tuple], rest: tuple) -> None:
        k = self.kernel
        described: list[Any] = []
        for where, made in zip(lies, self.maps, strict=True):
            described += encoded(*where, made)
        args = k.packed_metadata, None, None, None, *described, *rest
        self.launch(grid, 1, 1, stream, k.function, *self.how, *args)


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


_compiled: dict[tuple, Compiled] = {}


def _launch(grid: int, stream: int, key: tuple, tensors: tuple[Tensor, ...], lies: list[tuple], rest: tuple) -> None:
    """``forward_kernel[(grid,)]`` of the tensors' descriptors and the rest. key: all that the code depends on."""
    from triton import knobs

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook  # a profiler's
    if key in _compiled and not any(x.calls for x in hooks):
        _compiled[key](grid, stream, lies, rest)
        return
    from .kernel import forward_kernel

    described = (descriptor(x, n) for x, n in zip(tensors, key[-1], strict=True))
    _compiled[key] = Compiled(forward_kernel[(grid,)](*described, *rest, num_warps=4))


def descriptor(x: Tensor, rows: int) -> Any:
    """Of tiles of so many rows of a (B, H, L, D) tensor."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(x, list(x.shape), [*strides(x), 1], block, layout)


def forward(r: Request) -> Output:
    """Launch the forward."""
    o = Output(r.new_out(), r.new_stats(), r.new_stats() if r.want_max_logits else None)
    assert o.lse is not None
    if o.out.numel() == 0 or r.len_k == 0:
        o.out.zero_()
        for x in (o.lse, o.max_logits):
            if x is not None:
                x.fill_(NEG_INF)
        return o
    keep = kept(r.mask, r.len_q, r.len_k)
    assert keep is not None
    left, right = keep.low is not None, keep.high is not None
    low, high = (max(-_FAR, min(n or 0, _FAR)) for n in (keep.low, keep.high))
    masked = left or right or keep.lengths is not None
    cfg = config.choose(r.dim, masked, left)
    tiles = -(-r.len_q // config.BLOCK_M)
    pairs = r.batch * r.heads
    section = max(1, config.L2_BYTES // (4 * r.len_k * r.dim)) * r.group
    with torch.cuda.device(r.device):
        stream = torch._C._cuda_getCurrentRawStream(r.device.index)
        lengths = None if keep.lengths is None else keep.lengths.to(r.device).contiguous()
        counter = _counter(r.device, stream) if masked else None  # without, all tiles take as long
        q, k, v = (aligned(x) for x in (r.q, r.k, r.v))
        tensors = q, k, v, o.out
        lies = [(x.data_ptr(), x.shape, strides(x)) for x in tensors]
        rest = (
            o.lse, o.max_logits, lengths, counter, r.heads, r.group, r.len_q, r.len_k, tiles, pairs,
            min(section, pairs), tiles * pairs, low, high, r.scale * _LOG2E, q, k, v, *lies[0][2], *lies[1][2],
            *lies[2][2], r.dim, cfg.block_n, cfg.stages, cfg.wide, left, right,
        )  # fmt: skip
        rows = config.ROWS, cfg.block_n, cfg.block_n, config.ROWS
        key = r.device.index, r.dtype, r.dim, left, right, r.want_max_logits, lengths is None or lengths.dtype, rows
        _launch(min(processors(r.device), tiles * pairs), stream, key, tensors, lies, rest)
    return o
