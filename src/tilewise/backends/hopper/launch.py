"""From a Request to a launch of the kernel: the mask as a band, tensors as TMA describes them, compiled kernels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Grads, Output, Saved
from ...masks import BOTTOM_RIGHT, All, Band, Lengths, Mask
from ...request import Request
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


def skewed(mask: Mask | None) -> bool | None:
    """Whether bands lie on the diagonal to the bottom right, which each ragged sequence has elsewhere; None: only some.

    ``kept`` for lengths of 0 has such bands on the main diagonal.
    """
    aligned = {b.align == BOTTOM_RIGHT for b in _bands(mask)}
    return None if len(aligned) > 1 else aligned == {True}


def _bands(mask: Mask | None) -> Iterator[Band]:
    if isinstance(mask, Band) and (mask.left, mask.right) != (None, None):
        yield mask
    for term in mask.terms if isinstance(mask, All) else ():
        yield from _bands(term)


def ends(keep: Kept) -> tuple[int, int, bool, bool]:
    """low, high, and which of them there are."""
    low, high = (max(-_FAR, min(n or 0, _FAR)) for n in (keep.low, keep.high))
    return low, high, keep.low is not None, keep.high is not None


def _both(pick: Callable[[int, int], int], a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else pick(a, b)


def planes(r: Request, x: Tensor) -> Tensor:
    """An input or output of a request as (B, H, L, D): all of a ragged batch is one entry."""
    return x if r.ragged is None else x.transpose(0, 1)[None]


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


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def _counter(device: torch.device) -> Tensor:
    """The number of the next tile to work on, and of programs that are done: two zeros, which a launch leaves as zeros.

    One pair for each stream, where launches follow each other. A graph may run beside them: it gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device.index, _stream(device)
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


class Tiled(NamedTuple):
    """A tensor as TMA takes it: in tiles. The last stride is 1."""

    x: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def descriptor(self) -> Any:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[self.x.dtype]
        block = list(self.block)
        one = len(block) == 1
        layout = gl.NVMMASharedLayout(0, 32, 1) if one else gl.NVMMASharedLayout.get_default_for(block, element)
        return TensorDescriptor(self.x, list(self.shape), [*self.strides, 1], block, layout)


def tiled(x: Tensor, rows: int, columns: int | None = None, heads: int = 1) -> Tiled:
    """A (B, H, L, D) tensor in tiles of so many rows, of so many heads, and columns; None: a power of two for all."""
    block = 1, heads, rows // heads, columns or config.padded(x.shape[3])
    return Tiled(x, tuple(x.shape), strides(x), block)


_compiled: dict[tuple, Compiled] = {}


def _launch(kernel: str, grid: int, device: torch.device, key: tuple, tensors: tuple[Tiled, ...], rest: tuple) -> None:
    """``kernel[(grid,)]`` of the tensors' descriptors and the rest. key: what else the code depends on."""
    from triton import knobs

    key = kernel, device.index, tensors[0].x.dtype, *key, *(t.block for t in tensors)
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook  # a profiler's
    if key in _compiled and not any(x.calls for x in hooks):
        _compiled[key](grid, _stream(device), [(t.x.data_ptr(), t.shape, t.strides) for t in tensors], rest)
        return
    from . import backward
    from . import kernel as forward

    fn = forward.forward_kernel if kernel == "forward" else backward.backward_kernel
    _compiled[key] = Compiled(fn[(grid,)](*(t.descriptor() for t in tensors), *rest, num_warps=4))


def forward(r: Request) -> Output:
    """Launch the forward. Where there is nothing to multiply, ``triton`` fills in what that gives."""
    if r.q.numel() == 0 or r.k.numel() == 0 or 0 in (r.batch, r.len_q, r.len_k):
        from ..triton import forward

        return forward.forward(r)
    o = Output(r.new_out(), r.new_stats(), r.new_stats() if r.want_max_logits else None)
    lengths_known = r.ragged is None
    keep = kept(r.mask, r.len_q, r.len_k) if lengths_known else kept(r.mask, 0, 0)
    assert keep is not None
    low, high, left, right = ends(keep)
    masked = left or right or keep.lengths is not None or not lengths_known
    cfg = config.choose(r.dim, r.dim_v, masked, left)
    heads = config.packed(r.len_q if lengths_known else r.q.shape[0] // r.batch, r.group)
    rows = config.BLOCK_M // heads
    if lengths_known:
        tiles, pairs = -(-r.len_q // rows), r.batch * r.heads // heads
    else:
        tiles, pairs = r.q.shape[0] // rows + r.batch, r.heads // heads  # at most
    section = max(1, config.L2_BYTES // (2 * r.len_k * (r.dim + r.dim_v))) * r.group // heads
    qk_scale, cap = (r.scale, None) if r.softcap is None else (r.softcap, 2 * _LOG2E * r.scale / r.softcap)
    with torch.cuda.device(r.device):
        lengths = None if keep.lengths is None else keep.lengths.to(r.device).contiguous()
        counter = _counter(r.device) if masked else None  # without, all tiles take as long
        sinks = None if r.sinks is None else r.sinks.contiguous()
        q, k, v = (aligned(planes(r, x)) for x in (r.q, r.k, r.v))
        out = tiled(planes(r, o.out), config.ROWS, config.stored(config.padded(r.dim_v)), heads)
        tensors = tiled(q, config.ROWS, heads=heads), tiled(k, cfg.block_n), tiled(v, cfg.block_n), out
        rest = (
            o.lse, o.max_logits, sinks, lengths, counter, r.heads // heads, r.group // heads, r.len_q, r.len_k,
            tiles, pairs, min(section, pairs), tiles * pairs, low, high, qk_scale * _LOG2E, cap, q, k, v,
            *tensors[0].strides, *tensors[1].strides, *tensors[2].strides, *_items(r, o, tiles, rows, out.strides),
            r.dim, r.dim_v, heads, cfg.block_n, cfg.stages, cfg.wide, cfg.turns, left, right,
        )  # fmt: skip
        key = (
            r.dim, r.dim_v, left, right, r.want_max_logits, cap is None, sinks is None or sinks.dtype,
            lengths is None or lengths.dtype, lengths_known,
        )  # fmt: skip
        _launch("forward", min(processors(r.device), tiles * pairs), r.device, key, tensors, rest)
    return o


def _items(r: Request, o: Output, most: int, tile: int, out_strides: tuple[int, ...]) -> tuple:
    """What the kernel is told of a ragged batch, its list of tiles of so many rows among it; nothing of another one."""
    if r.ragged is None:
        return (*(None,) * 6, 0, 0)
    from ..triton.start import launch
    from .ragged import CHUNK, ROWS, items_kernel

    cu_q, cu_k, rows = r.ragged.cu_q, r.ragged.cu_k, r.q.shape[0]
    items = torch.empty(1 + 2 * most, dtype=torch.int32, device=r.device)
    args = cu_q, cu_k, items, o.out, o.lse, o.max_logits, r.batch, rows, r.heads, o.out.stride()
    launch(
        items_kernel, r.batch - (-rows // ROWS), args, DV=r.dim_v, BLOCK_DV=config.padded(r.dim_v),
        BLOCK_M=tile, CHUNK=CHUNK, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return cu_q, cu_k, items, int(bool(skewed(r.mask))), rows, o.out, out_strides[1], out_strides[2]


def backward(r: Request, saved: Saved, needs: frozenset[str]) -> Grads:
    """Launch the backward, which holds sums of dQ in fp32 meanwhile.

    ``triton`` does what this one does not take, and where not all three gradients are asked for only what is. The
    gradient of sinks, which needs none of the scores, is always its.
    """
    from ..triton import gradients

    if not own_backward(r) or not needs >= {"q", "k", "v"} or r.q.numel() == 0 or r.k.numel() == 0:
        return gradients.backward(r, saved, needs)
    sinks = gradients.backward(r, saved, frozenset({"sinks"})).sinks if "sinks" in needs else None
    with torch.cuda.device(r.device):
        return _backward(r, saved)._replace(sinks=sinks)


def own_backward(r: Request) -> bool:
    """Whether there is a backward kernel here for what the forward takes. Sinks are in its lse."""
    return r.dim == r.dim_v and r.dim in config.BACKWARD_DIMS and r.softcap is None and r.ragged is None


def _backward(r: Request, saved: Saved) -> Grads:
    from .backward import finish_kernel, prepare_kernel

    keep, cfg = kept(r.mask, r.len_q, r.len_k), config.choose_backward(r.dim)
    assert keep is not None
    low, high, left, right = ends(keep)
    masked = left or right or keep.lengths is not None
    q, k, v, dout = (aligned(x if describable(x) else x.contiguous()) for x in (r.q, r.k, r.v, saved.dout))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    out, lse, dlse = saved.out, saved.lse.contiguous(), saved.dlse
    pairs, kv_pairs = r.batch * r.heads, r.batch * r.kv_heads
    n_m, n_q, n_n = -(-r.len_q // cfg.block_m), -(-r.len_q // config.ROWS), -(-r.len_k // config.BLOCK_N)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=r.device)

    sums, stats = empty(pairs * n_m * cfg.block_m, r.dim), empty(pairs * n_m * 2 * cfg.block_m)
    turns = empty(pairs * n_m + 1, dtype=torch.int32)
    ticket = turns[-1:]
    delta = empty(pairs * r.len_q) if masked else None
    odd = empty(pairs * n_q + kv_pairs * n_n * 2, dtype=torch.int8) if masked else None
    prepare_kernel[(pairs * n_m,)](
        out, dout, lse, dlse, stats, delta, turns, ticket, out.stride()[:3], dout.stride()[:3],
        (0, 0, 0) if dlse is None else dlse.stride(), r.heads, r.len_q, n_m, D=r.dim, BLOCK_M=cfg.block_m, num_warps=4,
    )  # fmt: skip
    tensors = (
        tiled(q, cfg.block_m), tiled(k, config.BLOCK_N), tiled(v, config.BLOCK_N), tiled(dout, cfg.block_m),
        Tiled(stats, (stats.numel(),), (), (2 * cfg.block_m,)),
        Tiled(sums, tuple(sums.shape), (r.dim,), (cfg.block_m, r.dim)), tiled(dk, config.ROWS), tiled(dv, config.ROWS),
    )  # fmt: skip
    lengths = None if keep.lengths is None else keep.lengths.to(r.device).contiguous()
    section = config.section(r.dim, r.len_q, r.group)
    rest = (
        turns, ticket, None if odd is None else odd[pairs * n_q :], lengths, r.kv_heads, r.group, r.len_q, r.len_k,
        n_m, kv_pairs, min(section, kv_pairs), n_n * kv_pairs, low, high, r.scale, r.scale * _LOG2E, r.dim,
        cfg.block_m, cfg.stages, left, right,
    )  # fmt: skip
    key = left, right, masked, lengths is None or lengths.dtype
    _launch("backward", min(processors(r.device), n_n * kv_pairs), r.device, key, tensors, rest)
    finish_kernel[(pairs * n_q,)](
        sums, turns, dq, odd, dq.stride()[:3], r.heads, r.len_q, n_m, n_q, r.scale, D=r.dim, BLOCK_M=cfg.block_m,
        ROWS=config.ROWS, num_warps=4,
    )  # fmt: skip
    if odd is not None:
        _careful(r, (q, k, v, dout), lse, delta, (dq, dk, dv), odd, n_q, 2 * n_n)
    return Grads(dq, dk, dv)


def _careful(
    r: Request, inputs: tuple[Tensor, ...], lse: Tensor, delta: Tensor | None, grads: tuple[Tensor, ...], odd: Tensor,
    n_q: int, n_k: int,
) -> None:  # fmt: skip
    from ..triton.launch import Problem
    from .careful import CHUNK, careful_kernel

    p, total_q = Problem(r), r.batch * r.heads * n_q
    careful_kernel[(-(-odd.numel() // CHUNK),)](
        odd, *inputs, lse, delta, *grads, *(x.stride() for x in (*inputs, *grads)), p.stat_strides(lse), r.len_q,
        r.len_k, r.heads, r.group, r.scale, p.qk_scale, n_q, n_k, total_q, odd.numel(), p.mask_args, KEEP=p.mask.keep,
        REACH_Q=p.mask.reach_q, REACH_K=p.mask.reach_k, D=r.dim, UNIT=p.unit, WIDE=p.wide(*inputs, *grads),
        CHUNK=CHUNK, num_warps=4, num_stages=1,
    )  # fmt: skip
