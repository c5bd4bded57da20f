"""What attention costs: FLOPs, bytes that memory has to move, and the time that both allow. Shapes are enough.

Two ways to compute the same call are counted side by side:

standard  three kernels, S = Q K^T, P = softmax(S), O = P V, each reading its operands from memory and writing its
          result there; the backward likewise. The matrices are whole, whatever is masked.
tiled     a tile of Q stays, K and V stream past, O is written once; in the backward a tile of K and V stays, and
          Q, dO and dQ stream past. What the tile map skips is neither computed nor read.

With N rows of head dim d and a tile as large as an on-chip memory of M elements allows, the first moves
Theta(N d + N^2) and the second Theta(N^2 d^2 / M) elements.

Source: Dao et al. 2022, "FlashAttention", algorithms 0, 3 and 4, theorem 2.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import dispatch
from .backends.tiled import TiledBackend
from .masks import EMPTY
from .request import Request, Sequence
from .tilemap import TileMap, backward_flops, forward_flops, sequence_map, visible_pairs


class Machine(NamedTuple):
    """What the model knows of a device and of the kernel on it."""

    forward_tile: tuple[int, int]  # queries and keys of a tile
    backward_tile: tuple[int, int]
    cache_bytes: int  # of the last cache before memory: what streams past again and lies in it is not read again


class Work(NamedTuple):
    """One pass, forward or backward."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


class Pipeline(NamedTuple):
    """Both passes of one way to compute attention."""

    forward: Work
    backward: Work


class Cost(NamedTuple):
    """A request, counted. Bytes are those of the whole request: all batch entries and heads."""

    standard: Pipeline
    tiled: Pipeline
    pairs: int  # (query, key) pairs
    visible: int  # of them, those that the mask keeps
    score_matrix_bytes: int  # S, or P, in the dtype of the inputs: standard stores both
    output_bytes: int  # O, which both store
    statistics_bytes: int  # the log-sum-exp of each row (and its rounding error, where kept): tiled stores it
    machine: Machine


class Ceilings(NamedTuple):
    """What a device reached in this process: no kernel is faster than these allow."""

    matmul_flops_per_s: float
    copy_bytes_per_s: float  # read and written bytes both count


def cost(r: Request, machine: Machine | None = None) -> Cost:
    """FLOPs, bytes and stored intermediates of a request, for the standard pipeline and the tiled algorithm.

    With e bytes an element, s bytes a number of the row state, Q, K, V, O elements of those tensors, R rows
    (B * Hq * Lq) and X bytes of bias and of mask tensors, the bytes are

        standard, forward   e (Q + K + V + O + 4 pairs) + X                      S and P are written and read
        standard, backward  e (2 Q + 2 K + 2 V + 2 O + 7 pairs)                  P read twice; dP written, read;
                                                                                 dS written, read twice
        tiled, forward      e (Q + O) + s R + e (D + Dv) keys read + X           keys read: ``_rows_read``; the
                                                                                 log-sum-exp (2 s R before a
                                                                                 backward: ``keeps_low``)
        tiled, backward     e (2 O) + s R                                        delta = rowsum(dO * O)
                            + 2 e (K + V)                                        K and V read, dK and dV written
                            + (e (D + Dv) + 2 s + 2 s D) queries read + X        Q, dO, lse, delta; dQ also written
                            + (s + e) Q                                          dQ to the inputs' dtype, if another

    Both backwards write the gradient of a bias that needs one. What is not counted: slopes, sinks, the random
    numbers of dropout (they are made anew, not stored) and passes that only convert.

    FLOPs are those of the matrix products: of tiled over the visible pairs, of standard over all of them. The backward
    of tiled computes S again, a fifth product; that of standard does not.

    machine: None is ``machine_for(r)``.
    Only shapes, the mask and (if ragged) the boundaries are read: tensors on "meta" will do.
    Raises ValueError if the mask's own tensors or the boundaries are on "meta".
    """
    _check_values(r)
    machine = machine or machine_for(r)
    e, s = r.q.element_size(), r.state_dtype.itemsize
    pairs, visible = _pairs(r), visible_pairs(r)
    q, k, v, o, rows = r.q.numel(), r.k.numel(), r.v.numel(), r.q.numel() // r.dim * r.dim_v, r.q.numel() // r.dim
    extra = _stored(r.bias) + sum(_stored(x) for x in ([] if r.mask is None else r.mask.tensors()))
    dbias = _stored(r.bias) if r.bias is not None and r.bias.requires_grad else 0
    stats = s * rows * (2 if r.keeps_low else 1)
    keys, queries = _streamed(r, machine)
    standard = Pipeline(
        Work(forward_flops(pairs, r.dim, r.dim_v), e * (q + k + v + o + 4 * pairs) + extra),
        Work(2 * forward_flops(pairs, r.dim, r.dim_v), e * 2 * (q + k + v + o) + e * 7 * pairs + dbias),
    )
    tiled = Pipeline(
        Work(forward_flops(visible, r.dim, r.dim_v), e * (q + o) + stats + keys * _key_bytes(r) + extra),
        Work(
            backward_flops(visible, r.dim, r.dim_v),
            e * 2 * o + s * rows + e * 2 * (k + v) + queries * (_query_bytes(r) + s * r.dim) + extra + dbias
            + ((s + e) * q if r.dtype != r.state_dtype else 0),
        ),
    )  # fmt: skip
    return Cost(standard, tiled, pairs, visible, e * pairs, e * o, stats, machine)


def _check_values(r: Request) -> None:
    """ValueError where numbers are needed and there are only shapes."""
    masked = [] if r.mask is None else r.mask.tensors()
    ends = [] if r.ragged is None else [r.ragged.cu_q, r.ragged.cu_k]
    for what, tensors in (("the tensors of the mask", masked), ("cu_seqlens", ends)):
        if any(x.device.type == "meta" for x in tensors):
            raise ValueError(f"cost: {what} are on meta, which has no values; make them on the cpu: they are read")


def _pairs(r: Request) -> int:
    """(query, key) pairs over batch and query heads, masked or not."""
    return r.heads * sum((x.batch.stop - x.batch.start) * x.len_q * x.len_k for x in r.sequences())


def _stored(x: Tensor | None) -> int:
    """Bytes of a tensor in memory: what is expanded is there once."""
    if x is None or x.numel() == 0:
        return 0
    return x.element_size() * math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step)


def _key_bytes(r: Request) -> int:
    """A row of K and of V."""
    return r.q.element_size() * (r.dim + r.dim_v)


def _query_bytes(r: Request) -> int:
    """What the backward holds of a query: its rows of Q, dO and dQ, its log-sum-exp and delta."""
    return _key_bytes(r) + r.state_dtype.itemsize * (2 + r.dim)


def _streamed(r: Request, machine: Machine) -> tuple[int, int]:
    """Rows of keys that the forward reads, and rows of queries that stream past in the backward."""
    keys = queries = 0
    for seq in r.sequences():
        tiles = sequence_map(r, seq, *machine.forward_tile)
        visited, each = _visited(r, tiles)
        keys += each * _rows_read(visited, tiles.sizes(1), machine.cache_bytes // _key_bytes(r))
        tiles = sequence_map(r, seq, *machine.backward_tile)
        visited, each = _visited(r, tiles)
        held = machine.cache_bytes // _query_bytes(r)
        queries += each * _rows_read(visited.transpose(2, 3), r.group * tiles.sizes(0), held)
    return keys, queries


def _visited(r: Request, tiles: TileMap) -> tuple[Tensor, int]:
    """Bool (B or 1, Hkv or 1, row tiles, column tiles), and how many (batch, key/value head) pairs an entry stands for.

    The query heads of a group stay together, so their keys and values stream past once.
    """
    visited = tiles.table != EMPTY
    if visited.shape[1] > 1:
        visited = visited.unflatten(1, (r.kv_heads, r.group)).any(2)
    return visited, tiles.grid.batch * r.kv_heads // max(visited.shape[0] * visited.shape[1], 1)


def _rows_read(visited: Tensor, sizes: Tensor, held: int) -> int:
    """Rows that come from memory as one tile after another stays and those it visits stream past.

    visited: bool (B, H, tiles that stay, tiles that stream). sizes: rows of each that streams. held: rows that the
    cache has room for. A row needed for the first time is read; of those needed before, the cache holds what it can
    at best, ``held``: no order of the streaming tiles and no cache of that size reads less. The cache serves one
    (batch, head) pair at a time.
    """
    total, known = 0, torch.zeros_like(visited[:, :, :1]).squeeze(2)
    for row in visited.unbind(2):
        again = torch.where(row & known, sizes, 0).sum(-1)
        total += int(torch.where(row, sizes, 0).sum() - again.clamp(max=held).sum())
        known |= row
    return total


# --- the device -----------------------------------------------------------------------------------


def machine_for(r: Request) -> Machine:
    """The tiles of the backend that runs this request if nothing is chosen, and the cache of the request's device.

    A ragged request's tiles are those of its longest sequence.
    """
    name = next((n for n in dispatch.AUTO if dispatch.get(n).can(r)), "tiled")
    if name in ("hopper", "triton"):
        from .backends import hopper
        from .backends.triton import config, launch  # needs Triton

        problem = launch.Problem(r)
        forward, backward = ((c.block_m, c.block_n) for c in map(problem.config, (config.FORWARD, config.DKDV)))
        if name == "hopper":
            forward = hopper.config.BLOCK_M, hopper.config.choose(r.dim, r.dim_v, r.mask is not None, False).block_n
            cfg = hopper.config.choose_backward(r.dim, r.dim_v)
            backward = cfg.block_m, cfg.block_n
        return Machine(forward, backward, cache_bytes(r.device))
    longest = Sequence(slice(0, r.batch), slice(0, r.len_q), slice(0, r.len_k), r.ragged is not None)
    tiled = dispatch.get("tiled")
    assert isinstance(tiled, TiledBackend)
    forward, backward = (tiled.block_shape(r, longest, x) for x in (False, True))
    return Machine(forward, backward, cache_bytes(r.device))


def cache_bytes(device: torch.device) -> int:
    """The last cache before memory: a GPU's L2, the largest cache of a CPU. 0 where it is not known, as on "meta"."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    if device.type != "cpu":
        return 0
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")  # Linux; such as 2048K
    return max((1024 * int(x.read_text().strip().removesuffix("K")) for x in sizes), default=0)


# --- time -----------------------------------------------------------------------------------------


def predicted_seconds(work: Work, ceilings: Ceilings) -> float:
    """The least time of a pass: max(FLOPs / matmul ceiling, bytes / copy ceiling).

    Source: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model".
    """
    return max(work.flops / ceilings.matmul_flops_per_s, work.bytes / ceilings.copy_bytes_per_s)


_ENOUGH = 0.02  # seconds of a matrix product: a larger one would not be faster by much
_LARGEST = 8192
_COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes: more than a cache holds


def measure_ceilings(device: torch.device | str, dtype: torch.dtype) -> Ceilings:
    """A large matrix product and a large copy, now, in this process: medians after a warm-up. It takes a second or so.

    device: cpu or cuda (timed with events); ValueError for any other. dtype: of the product's operands.
    The product has as many rows as it takes to last 20 ms, at most 8192, and is computed as PyTorch is set to: an
    fp32 product in TF32 if ``torch.backends.cuda.matmul.allow_tf32`` says so.
    """
    device = torch.device(device)
    if device.type not in _COPIED:
        raise ValueError(f"ceilings are measured on cpu and cuda, got {device}")
    return Ceilings(_matmul_flops_per_s(device, dtype), _copy_bytes_per_s(device))


def _matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    n = 512
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = median_seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)  # type: ignore[misc]
        if seconds >= _ENOUGH or n == _LARGEST:
            return 2 * n**3 / seconds
        n *= 2


def _copy_bytes_per_s(device: torch.device) -> float:
    x = torch.zeros(_COPIED[device.type], dtype=torch.uint8, device=device)
    y = torch.ones_like(x)
    return 2 * x.numel() / median_seconds(lambda: x.copy_(y), device)


def median_seconds(run: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Median time of a call after one to warm up; on CUDA between events, so that launching it does not count."""
    run()
    once = _cuda_seconds if device.type == "cuda" else _seconds
    return statistics.median(once(run, device) for _ in range(times))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_seconds(run: Callable[[], object], device: torch.device) -> float:
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / 1e3
