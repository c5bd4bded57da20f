"""From a Request to a launch of the kernel: the mask as a band, tensors as TMA describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Grads, Output, Saved
from ...masks import BOTTOM_RIGHT, All, Band, Lengths, Mask
from ...request import Request
from . import config

if TYPE_CHECKING:
    from ..triton.repeat import Work
    from ..triton.start import Tiled

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


def _counter(device: torch.device) -> Tensor:
    """The number of the next tile to work on, and of programs that are done: two zeros, which a launch leaves as zeros.

    One pair for each stream, where launches follow each other. A graph may run beside them: it gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _counters:
        _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _counters[key]


def tiled(x: Tensor, rows: int, columns: int | None = None, heads: int = 1) -> Tiled:
    """A (B, H, L, D) tensor in tiles of so many rows, of so many heads, and columns; None: a power of two for all."""
    from ..triton.start import Tiled

    block = 1, heads, rows // heads, columns or config.padded(x.shape[3])
    return Tiled(x, tuple(x.shape), strides(x), block)


def forward(r: Request) -> Output:
    """Launch the forward. Where there is nothing to multiply, ``triton`` fills in what that gives."""
    from ..triton import forward
    from ..triton.launch import decided_by, inputs
    from ..triton.repeat import repeated

    if r.q.numel() == 0 or r.k.numel() == 0 or 0 in (r.batch, r.len_q, r.len_k):
        return forward.forward(r)
    about = decided_by(r)
    with torch.cuda.device(r.device):
        alike = r.mask is None and r.ragged is None  # all tiles take as long
        counter = None if alike else _counter(r.device)
        given = (*inputs(r), counter)
        made = repeated(about and ("hopper forward", *about), given, r.device, partial(_forward, r, counter))
    return Output(*made)  # type: ignore[arg-type]


def scales(r: Request) -> tuple[float, float | None]:
    """What scores are multiplied by; under a softcap these are a tanh, and the second what q k^T is within it."""
    return (r.scale, None) if r.softcap is None else (r.softcap, 2 * _LOG2E * r.scale / r.softcap)


def _forward(r: Request, counter: Tensor | None, work: Work) -> Output:
    from .kernel import forward_kernel

    out, lse = work.made(r.new_out()), work.made(r.new_stats())
    top = work.made(r.new_stats()) if r.want_max_logits else None
    o = Output(out, lse, top)
    lengths_known = r.ragged is None
    keep = kept(r.mask, r.len_q, r.len_k) if lengths_known else kept(r.mask, 0, 0)
    assert keep is not None
    low, high, left, right = ends(keep)
    masked = left or right or keep.lengths is not None or not lengths_known
    cfg = config.choose(r.dim, r.dim_v, masked, left)
    queries, batch = (r.len_q, "padded") if lengths_known else (r.q.shape[0] // r.batch, "ragged")
    heads = config.packed(queries, r.group, batch)
    rows = config.BLOCK_M // heads
    if lengths_known:
        tiles, pairs = -(-r.len_q // rows), r.batch * r.heads // heads
    else:
        tiles, pairs = r.q.shape[0] // rows + r.batch, r.heads // heads  # at most
    section = max(1, config.L2_BYTES // (2 * r.len_k * (r.dim + r.dim_v))) * r.group // heads
    qk_scale, cap = scales(r)
    lengths = None if keep.lengths is None else keep.lengths.to(r.device).contiguous()
    sinks = None if r.sinks is None else r.sinks.contiguous()
    q, k, v = (aligned(planes(r, x)) for x in (r.q, r.k, r.v))
    to = tiled(planes(r, out), config.ROWS, config.stored(config.padded(r.dim_v)), heads)
    args = (
        tiled(q, config.ROWS, heads=heads), tiled(k, cfg.block_n), tiled(v, cfg.block_n), to, lse, top, sinks,
        lengths, counter if masked else None, r.heads // heads, r.group // heads, r.len_q, r.len_k, tiles, pairs,
        min(section, pairs), tiles * pairs, low, high, qk_scale * _LOG2E, cap, q, k, v, *strides(q), *strides(k),
        *strides(v), *_items(r, o, tiles, rows, to.strides, work),
    )  # fmt: skip
    work.launch(
        forward_kernel, min(processors(r.device), tiles * pairs), args, D=r.dim, DV=r.dim_v, HEADS=heads,
        BLOCK_N=cfg.block_n, STAGES=cfg.stages, WIDE=cfg.wide, TURNS=cfg.turns, LEFT=left, RIGHT=right,
    )  # fmt: skip
    return o


def _items(r: Request, o: Output, most: int, tile: int, out_strides: tuple[int, ...], work: Work) -> tuple:
    """What the kernel is told of a ragged batch, its list of tiles of so many rows among it; nothing of another one."""
    if r.ragged is None:
        return (*(None,) * 6, 0, 0)
    from .ragged import CHUNK, ROWS, items_kernel

    cu_q, cu_k, rows = r.ragged.cu_q, r.ragged.cu_k, r.q.shape[0]
    items = work.made(torch.empty(1 + 2 * most, dtype=torch.int32, device=r.device))
    args = cu_q, cu_k, items, o.out, o.lse, o.max_logits, r.batch, rows, r.heads, o.out.stride()
    work.launch(
        items_kernel, r.batch - (-rows // ROWS), args, DV=r.dim_v, BLOCK_DV=config.padded(r.dim_v),
        BLOCK_M=tile, CHUNK=CHUNK, ROWS=ROWS,
    )  # fmt: skip
    return cu_q, cu_k, items, int(bool(skewed(r.mask))), rows, o.out, out_strides[1], out_strides[2]


def backward(r: Request, saved: Saved, needs: frozenset[str]) -> Grads:
    """Launch the backward, which holds sums of dQ in fp32 meanwhile, up to 128 columns.

    Where not all three gradients are asked for, ``triton`` computes only what is. The gradient of sinks, which needs
    none of the scores, is always its.
    """
    from ..triton import gradients
    from ..triton.launch import decided_by, inputs
    from ..triton.repeat import repeated

    nothing = r.q.numel() == 0 or r.k.numel() == 0 or 0 in (r.batch, r.len_q, r.len_k)
    if nothing or not needs >= {"q", "k", "v"}:
        return gradients.backward(r, saved, needs)
    sinks = gradients.backward(r, saved, frozenset({"sinks"})).sinks if "sinks" in needs else None
    about = decided_by(r)
    saved = saved._replace(lse=saved.lse.contiguous())
    with torch.cuda.device(r.device):
        given = (*inputs(r), *saved)
        dq, dk, dv = repeated(about and ("hopper backward", *about), given, r.device, partial(_backward, r, saved))
    return Grads(dq, dk, dv, sinks=sinks)


def _backward(r: Request, saved: Saved, work: Work) -> tuple[Tensor, ...]:
    from .around import prepare_kernel

    cfg, tiles = config.choose_backward(r.dim, r.dim_v), Tiles.of(r)
    given = (planes(r, x) for x in (r.q, r.k, r.v, saved.dout))
    q, k, v, dout = (aligned(x if describable(x) else x.contiguous()) for x in given)
    grads = tuple(work.made(torch.empty_like(x)) for x in (r.q, r.k, r.v))
    out, lse, dlse = planes(r, saved.out), saved.lse, saved.dlse
    keep = kept(r.mask, r.len_q, r.len_k) if r.ragged is None else kept(r.mask, 0, 0)
    assert keep is not None
    low, high, left, right = ends(keep)
    masked = left or right or keep.lengths is not None or r.ragged is not None
    pairs, kv_pairs = (n if r.ragged is not None else r.batch * n for n in (r.heads, r.kv_heads))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return work.made(torch.empty(shape, dtype=dtype, device=r.device))

    n_m = tiles.of_queries
    stats, ticket = empty(pairs * n_m * 2 * cfg.block_m), empty(2, dtype=torch.int32)
    turns = empty(pairs * n_m, dtype=torch.int32) if cfg.sums else None
    delta = empty(*lse.shape) if masked else None
    dlse_strides = (0, 0, 0) if dlse is None else (0, *dlse.stride())[-3:]
    cu_q, rows = None if r.ragged is None else r.ragged.cu_q, q.shape[2]
    args: tuple[Any, ...] = (
        out, dout, lse, dlse, stats, delta, turns, ticket, out.stride()[:3], dout.stride()[:3], dlse_strides, cu_q,
        r.batch, r.heads, rows, n_m,
    )  # fmt: skip
    columns_v = config.columns(r.dim_v, r.dim)
    work.launch(prepare_kernel, pairs * n_m, args, DV=r.dim_v, COLS=columns_v, BLOCK_M=cfg.block_m)
    odd = None
    if masked:
        flags = torch.empty(pairs * tiles.of_rows + kv_pairs * tiles.of_keys * 2, dtype=torch.int8, device=r.device)
        odd = work.made(flags, None if r.ragged is None else 0)  # of tiles that are not used nobody says anything
    lengths = None if keep.lengths is None else keep.lengths.to(r.device).contiguous()
    qk_scale, cap = scales(r)
    numbers = low, high, r.scale, qk_scale * _LOG2E, cap
    one = _Backward(r, cfg, tiles, (q, k, v, dout), grads, stats, turns, ticket, odd, lengths, numbers, left, right)
    one.keys(work, kv_pairs, pairs)
    if not cfg.sums:
        one.queries(work, pairs)
    if odd is not None:
        _careful(r, (q, k, v, dout), lse, delta, tuple(planes(r, x) for x in grads), odd, pairs, tiles, cfg, work)
    return grads


@dataclass(frozen=True)
class _Backward:
    """What the kernels of a backward share."""

    r: Request
    cfg: config.Backward
    tiles: Tiles
    inputs: tuple[Tensor, ...]  # q, k, v, dO: (B, H, L, D)
    grads: tuple[Tensor, ...]
    stats: Tensor
    turns: Tensor | None
    ticket: Tensor
    odd: Tensor | None
    lengths: Tensor | None
    numbers: tuple[Any, ...]
    left: bool
    right: bool

    def tiled(self, x: Tensor, rows: int, values: bool = False) -> Tiled:
        dims = self.r.dim_v, self.r.dim
        return tiled(x, rows, config.columns(*(dims if values else dims[::-1])))

    def keys(self, work: Work, kv_pairs: int, pairs: int) -> None:
        """dK and dV; and dQ, where it is added up beside them."""
        from ..triton.start import Tiled
        from .around import finish_kernel
        from .backward import backward_kernel

        r, cfg, (q, k, v, dout) = self.r, self.cfg, self.inputs
        dq, dk, dv = (planes(r, x) for x in self.grads)
        n_m, n_q, n_n = self.tiles
        columns = config.columns(r.dim, r.dim_v)
        sums, to = None, None
        if cfg.sums:  # rows of 32 numbers: ``by_thread``
            rows = cfg.block_m * r.dim // 32
            sums = work.made(torch.empty(pairs * n_m, rows, 32, dtype=torch.float32, device=r.device))
            to = Tiled(sums, tuple(sums.shape), (32 * rows, 32), (1, cfg.block_m * columns // 32, 32))
        odd = None if self.odd is None else work.part(self.odd, pairs * n_q)
        section = min(config.section(r.dim, r.len_q, r.group), kv_pairs)
        args: tuple[Any, ...] = (
            self.tiled(q, cfg.block_m), self.tiled(k, cfg.block_n), self.tiled(v, cfg.block_n, True),
            self.tiled(dout, cfg.block_m, True), Tiled(self.stats, (self.stats.numel(),), (), (2 * cfg.block_m,)), to,
            self.tiled(dk, config.ROWS), self.tiled(dv, config.ROWS, True), self.turns, self.ticket, odd, self.lengths,
            r.kv_heads, r.group, r.len_q, r.len_k, n_m, n_n, kv_pairs, section, *self.numbers,
            *_key_items(r, self.grads, cfg.block_n, n_n, work),
        )  # fmt: skip
        work.launch(
            backward_kernel, min(processors(r.device), n_n * kv_pairs), args, D=r.dim, DV=r.dim_v,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, STAGES=cfg.stages, LEFT=self.left, RIGHT=self.right,
        )  # fmt: skip
        if cfg.sums:
            cu_q = None if r.ragged is None else r.ragged.cu_q
            args = (
                sums, self.turns, dq, self.odd, dq.stride()[:3], cu_q, r.batch, r.heads, q.shape[2], n_m, n_q, r.scale,
            )  # fmt: skip
            work.launch(
                finish_kernel, pairs * n_q, args, D=r.dim, COLS=columns, BLOCK_M=cfg.block_m, ROWS=config.ROWS
            )  # fmt: skip

    def queries(self, work: Work, pairs: int) -> None:
        """dQ by a kernel of its own."""
        from .queries import queries_kernel

        r, (q, k, v, dout), dq = self.r, self.inputs, self.grads[0]
        most = -(-r.len_q // config.BLOCK_M)
        items: tuple[Any, ...] = (None, None, None, 0, None, 0, 0)
        if r.ragged is not None:
            cu_q, cu_k, most = r.ragged.cu_q, r.ragged.cu_k, q.shape[2] // config.BLOCK_M + r.batch
            to = dq, dq.stride(1), dq.stride(0)
            items = cu_q, cu_k, _items_of(r, cu_q, cu_k, config.BLOCK_M, most, work), int(bool(skewed(r.mask))), *to
        section = max(1, config.L2_BYTES // (2 * r.len_k * (r.dim + r.dim_v))) * r.group
        args = (
            self.tiled(q, config.ROWS), self.tiled(k, config.ROWS), self.tiled(v, config.ROWS, True),
            self.tiled(dout, config.ROWS, True), self.tiled(planes(r, dq), config.ROWS), self.stats,
            work.part(self.ticket, 1), self.odd, self.lengths, r.heads, r.group, r.len_q, r.len_k, most,
            self.tiles.of_queries, pairs, min(section, pairs), *self.numbers, *items,
        )  # fmt: skip
        work.launch(
            queries_kernel, min(processors(r.device), most * pairs), args, D=r.dim, DV=r.dim_v, STAGES=self.cfg.stages,
            LEFT=self.left, RIGHT=self.right,
        )  # fmt: skip


class Tiles(NamedTuple):
    """How many tiles there is room for in each head of a batch entry, or of all of a ragged batch."""

    of_queries: int
    of_rows: int  # of queries, 64 each
    of_keys: int

    @classmethod
    def of(cls, r: Request) -> Tiles:
        cfg = config.choose_backward(r.dim, r.dim_v)
        blocks = (r.len_q, cfg.block_m), (r.len_q, config.ROWS), (r.len_k, cfg.block_n)
        if r.ragged is None:
            return cls(*(-(-n // block) for n, block in blocks))
        rows, keys = r.q.shape[0], r.k.shape[0]
        return cls(rows // cfg.block_m + r.batch, rows // config.ROWS + r.batch, keys // cfg.block_n + r.batch)


def _items_of(r: Request, cu: Tensor, others: Tensor, tile: int, most: int, work: Work) -> Tensor:
    """The list of tiles of so many rows of the sequences cu; others: of what they visit."""
    from .ragged import CHUNK, ROWS, items_kernel

    items = work.made(torch.empty(1 + 2 * most, dtype=torch.int32, device=r.device))
    args: tuple[Any, ...] = cu, others, items, None, None, None, r.batch, 0, 0, (0, 0)
    work.launch(items_kernel, r.batch, args, DV=1, BLOCK_DV=1, BLOCK_M=tile, CHUNK=CHUNK, ROWS=ROWS)
    return items


def _key_items(r: Request, grads: tuple[Tensor, ...], tile: int, most: int, work: Work) -> tuple:
    """What the kernel for dK and dV is told of a ragged batch, its list of tiles of so many keys among it."""
    if r.ragged is None:
        return (None,) * 3 + (0, None, 0, 0, None, 0, 0)
    from .ragged import ROWS, blank_kernel

    cu_q, cu_k, (dq, dk, dv) = r.ragged.cu_q, r.ragged.cu_k, grads
    items = _items_of(r, cu_k, cu_q, tile, most, work)
    rows, keys = dq.shape[0], dk.shape[0]
    args = (
        cu_q, cu_k, dq, dk, dv, *(x.stride()[:2] for x in grads), r.batch, rows, keys, r.heads, r.kv_heads,
    )  # fmt: skip
    work.launch(
        blank_kernel, -(-max(rows, keys) // ROWS), args, D=r.dim, DV=r.dim_v, BLOCK_D=config.padded(r.dim),
        BLOCK_DV=config.padded(r.dim_v), ROWS=ROWS,
    )  # fmt: skip
    places = (y for x in (dk, dv) for y in (x, x.stride(1), x.stride(0)))
    return cu_q, cu_k, items, int(bool(skewed(r.mask))), *places


def _careful(
    r: Request, inputs: tuple[Tensor, ...], lse: Tensor, delta: Tensor | None, grads: tuple[Tensor, ...], odd: Tensor,
    pairs: int, tiles: Tiles, cfg: config.Backward, work: Work,
) -> None:  # fmt: skip
    from ..triton.launch import Problem
    from .careful import CHUNK, careful_kernel

    p, n_q, n_k = Problem(r), tiles.of_rows, 2 * tiles.of_keys
    first = 0 if r.ragged is None else 1  # all of a ragged batch is one entry
    strides = ((0,) * first + x.stride()[first:] for x in (*inputs, *grads))
    args = (
        odd, *inputs, lse, delta, *grads, *strides, p.stat_strides(lse), p.cu_q, p.cu_k, r.batch, r.len_q, r.len_k,
        r.heads, r.group, r.scale, p.qk_scale, p.cap, n_q, n_k, pairs * n_q, odd.numel(),
    )  # fmt: skip
    work.launch(
        careful_kernel, -(-odd.numel() // CHUNK), args, (p.mask_args,), KEEP=p.mask.keep, REACH_Q=p.mask.reach_q,
        REACH_K=p.mask.reach_k, D=r.dim, DV=r.dim_v, BLOCK_D=p.block_d, BLOCK_DV=p.block_dv, UNIT=p.unit,
        SOFTCAP=r.softcap is not None, WIDE=p.wide(*(x[0].transpose(0, 1) if first else x for x in (*inputs, *grads))),
        BLOCK_N=cfg.block_n, CHUNK=CHUNK, num_stages=1,
    )  # fmt: skip
