"""From a Request to kernel arguments that the forward and the backward share, and the launch of the lists."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from ...philox import threshold
from ...request import Request
from . import config, tune
from .config import BIAS, DROPOUT, EXTRA, LIGHT, LISTS, RANGES, WINDOW, Config
from .lists import BASE, classify_kernel, extremes_kernel, list_kernel
from .lower import Lowered, lower, recordings
from .primitives import FOLDED, LOG2, NATURAL
from .repeat import Work

LOG2E = math.log2(math.e)
Lists = tuple[Tensor | None, tuple[int, ...]]  # and strides over (batch, head, tile)
NO_LISTS: Lists = None, (0, 0, 0)
_QUICK_CAP = 128.0  # of a softcap: times the 5e-7 of ``quick_tanh`` it is within the rounding of 16 bits
_LEAST_SCALE = 2.0**-20  # beside ALiBi, whose slopes are divided by it
ENTRIES = 64  # of a table of documents that one program writes
_L2_BYTES = 16 * 2**20  # keys and values that one section of heads may hold: well inside 40 to 50 MB


class Problem:
    """A request as the kernels see it: strides, units and lowered mask."""

    def __init__(self, r: Request):
        self.r = r
        self.ragged = r.ragged is not None
        self.cu_q: Tensor | None = None if r.ragged is None else r.ragged.cu_q
        self.cu_k: Tensor | None = None if r.ragged is None else r.ragged.cu_k
        self.gpu = config.generation(r.device)
        self.pdl = follows(r)
        self.mask, args = lower(r.mask)
        self.mask_args = tuple(x.to(r.device) if isinstance(x, Tensor) else x for x in args)
        self.hides = r.mask is not None or r.bias is not None  # what is not finite, maybe
        self.half = r.dtype != torch.float32
        self.precision = precision(r)
        self.unit = self._unit()
        self.block_d, self.block_dv = config.bucket(r.dim), config.bucket(r.dim_v)
        self.by_head = r.bias is not None and r.bias.shape[0] == 1  # neighbours read the same bias
        self.upcast = self.gpu == config.INTERPRETER and r.dtype == torch.bfloat16
        to_unit = 1.0 if self.unit == NATURAL.value else LOG2E
        if r.softcap is not None and self.unit == FOLDED.value:
            self.qk_scale, self.cap = r.softcap * LOG2E, 2 * LOG2E * r.scale / r.softcap
        elif r.softcap is not None:
            self.qk_scale, self.cap = r.scale / r.softcap, r.softcap * to_unit
        else:
            self.qk_scale, self.cap = r.scale * to_unit, 0.0

    def _unit(self) -> int:
        r = self.r
        if not self.half or r.bias is not None:
            return NATURAL.value
        if r.softcap is not None:
            folded = r.alibi is None and r.softcap <= _QUICK_CAP
        else:
            folded = r.scale > (0 if r.alibi is None else _LEAST_SCALE)
        return FOLDED.value if folded else LOG2.value

    def _changes(self) -> str | None:
        """What is done to the scores, as ``config.choose`` tells it apart."""
        r = self.r
        changes = [LIGHT] * (r.alibi is not None) + [LIGHT] * (r.softcap is not None) + [BIAS] * (r.bias is not None)
        changes += [DROPOUT] * (r.dropout_p > 0)
        return None if not changes else changes[0] if len(changes) == 1 else EXTRA

    def config(self, direction: str) -> Config:
        r = self.r
        mask = None if r.mask is None else LISTS if self.mask.verdict is not None else RANGES
        if mask == RANGES and self.mask.window:
            mask = WINDOW
        asked = (direction, self.block_d, self.block_dv, self.half, mask, self._changes(), self.gpu)
        return tune.choose(r.device, *asked) if tune.ENABLED else config.choose(*asked)

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """(batch, head, row, channel)."""
        if not self.ragged:
            return x.stride()
        return 0, x.stride(1), x.stride(0), x.stride(2)

    def stat_strides(self, x: Tensor) -> tuple[int, ...]:
        """(batch, head) of a row statistic; its rows are contiguous."""
        return (0, x.stride(0)) if self.ragged else (x.stride(0), x.stride(1))

    def wide(self, *tensors: Tensor | None) -> bool:
        """Whether offsets within a tile can pass 2**31."""
        rows = 256
        for x in tensors:
            if x is not None:
                _, _, row, channel = self.strides(x)
                if rows * abs(row) + x.shape[-1] * abs(channel) >= 2**31:
                    return True
        _, (_, _, row, column) = self.bias_args()
        return rows * (abs(row) + abs(column)) >= 2**31

    def bias_args(self) -> tuple[Any, tuple[int, ...]]:
        x = self.r.bias
        return (None, (0, 0, 0, 0)) if x is None else (x, broadcast_strides(x))

    def paired(self) -> bool:
        """Whether the bias can be read as pairs of numbers of 16 bits along the keys.

        Strides have to be multiples of 4, not of 2: an even length that is no multiple of 4 would compile a kernel of
        its own, beside those for odd lengths and for strides that are multiples of 16.
        """
        x, (*others, row, column) = self.bias_args()
        if x is None or x.element_size() != 2 or column != 1 or row >= 2**22:
            return False
        return x.data_ptr() % 16 == 0 and all(n % 4 == 0 for n in (*others, row))

    def alibi_args(self) -> tuple[Any, tuple[int, ...]]:
        x = self.r.alibi
        return (None, (0, 0)) if x is None else (x, broadcast_strides(x))

    def dropout_args(self) -> tuple[Any, int, float]:
        """rng, threshold as the int32 of its bits, weight of a survivor."""
        r = self.r
        if r.dropout_p == 0:
            return None, 0, 1.0
        bits = min(threshold(r.dropout_p), 2**32 - 1)
        return r.rng, bits - 2**32 if bits >= 2**31 else bits, 1 / (1 - r.dropout_p) if r.dropout_p < 1 else 0.0

    def section(self, group: int = 1) -> int:
        """How many (batch, head) pairs are worked on at a time, so that their keys and values stay in L2.

        group: how many query heads are one. What batch entries share of the bias they read at the same time.
        """
        r = self.r
        each = max(r.len_k * (r.dim + r.dim_v) * r.q.element_size(), 1)
        n = max(1, _L2_BYTES // each) * r.group // group if self.mask.longest_first else 1
        return -(-n // r.batch) * r.batch if self.by_head else n

    def even(self, cfg: Config) -> bool:
        """Whether all tiles of a list are taken in one loop: masks that are cheap, and no tile that passes an end."""
        r = self.r
        cheap = self.mask.verdict is not None and not self.mask.by_pair and r.bias is None and not self.ragged
        return cfg.one_loop and cheap and r.len_q % cfg.block_m == 0 and r.len_k % cfg.block_n == 0

    def lists(self, work: Work, rows: Config | None, cols: Config | None) -> tuple[Lists, Lists]:
        """Tiles to visit for each tile of queries as ``rows`` cuts them, and of keys as ``cols`` does."""
        if self.mask.verdict is None or (rows is None and cols is None):
            return NO_LISTS, NO_LISTS
        args = self.mask_args
        tables = tuple(x for at in self.mask.documents for x in extremes(work, args[at : at + 6], self.r))
        return tile_lists(work, self.r, self.mask, args + tables, rows, cols)


def follows(r: Request) -> bool:
    """Whether a kernel is launched while the one before it still runs, see ``primitives.follow``."""
    return config.generation(r.device) == config.SM90


def precision(r: Request) -> str:
    """How fp32 is multiplied. PyTorch's setting has three ways to be set, and this one says what came of them."""
    asked = r.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if asked and config.has_tf32(r.device) else "ieee"


def decided_by(r: Request) -> tuple | None:
    """What decides, beside the layout of ``inputs``, how a request is launched. None while that is being tuned."""
    if tune.ENABLED:
        return None
    longest = None if r.ragged is None else (r.ragged.max_q, r.ragged.max_k)
    # What a predicate closes over may have changed: then its recording has another number.
    mask = None if r.mask is None else (*r.mask.code(), *(x.number for x in recordings(r.mask)))
    return r.scale, r.softcap, r.dropout_p, r.want_max_logits, r.keeps_low, longest, mask, precision(r)


def inputs(r: Request) -> tuple[Tensor | None, ...]:
    """The tensors of a request."""
    cu = (None, None) if r.ragged is None else (r.ragged.cu_q, r.ragged.cu_k)
    mask = () if r.mask is None else (*r.mask.tensors(), *(x for t in recordings(r.mask) for x in t.tensors()))
    return r.q, r.k, r.v, r.bias, r.alibi, r.sinks, r.rng, *cu, *mask


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    return tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))


def tile_lists(
    work: Work, r: Request, mask: Lowered, args: tuple, rows: Config | None, cols: Config | None
) -> tuple[Lists, Lists]:
    """``lists.py``, launched."""
    nb = r.batch if mask.by_batch or r.ragged is not None else 1
    nh = r.heads if mask.by_head else 1
    cu_q, cu_k = (None, None) if r.ragged is None else (r.ragged.cu_q, r.ragged.cu_k)
    sizes = (cu_q, cu_k, r.len_q, r.len_k)
    table, verdict = None, mask.verdict
    sides: list[tuple[Tensor, Tensor | None, Config]] = []
    for cfg, column in ((rows, False), (cols, True)):
        if cfg is None:
            continue
        shape = -(-r.len_q // cfg.block_m), -(-r.len_k // cfg.block_n)
        others, n = shape[::-1] if column else shape
        # Strides are multiples of 16, whatever n: Triton compiles for that property.
        pitch = -(-(n + 2) // 16) * 16
        lists = work.made(torch.empty(nb, nh, others, pitch, dtype=torch.int32, device=r.device))
        if mask.by_pair and lists.numel() and n:
            table = work.made(torch.empty(nb, nh, *shape, dtype=torch.int8, device=r.device))
            work.launch(
                classify_kernel, table.numel(), (table, *sizes, *shape, nh), (args,), VERDICT=mask.verdict,
                BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, PDL=follows(r),
            )  # fmt: skip
            verdict = None  # the table says it: one list kernel for all such masks
        sides.append((lists, table, cfg))
    (lists, table, cfg), (more, more_table, other) = sides[0], sides[1] if len(sides) == 2 else (None, None, None)
    programs = [nb * nh * x.shape[2] for x, _, _ in sides]
    if sum(programs):
        pitches = lists.stride(2), 0 if more is None else more.stride(2)
        work.launch(
            list_kernel, sum(programs), (lists, more, table, more_table, *sizes, nh, *pitches, programs[0]),
            (() if verdict is None else args,), VERDICT=verdict, BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n,
            COLUMN=rows is None, MORE_M=other and other.block_m, MORE_N=other and other.block_n,
            CHUNK=16 if config.interpreting() else 512, PDL=follows(r),
        )  # fmt: skip
    found = [(x, (x.stride(0) if nb > 1 else 0, x.stride(1) if nh > 1 else 0, x.stride(2))) for x, _, _ in sides]
    return (found[0] if rows else NO_LISTS), (found[-1] if cols else NO_LISTS)


def extremes(work: Work, ids: tuple, r: Request) -> tuple[Any, ...]:
    """The table of documents, and its stride from one batch entry to the next, of queries and of keys.

    ids: numbers and their strides over (batch, position), of queries and of keys.
    """
    q, q_batch, q_step, k, k_batch, k_step = ids
    sizes = [-(-n // BASE.value) for n in (r.len_q, r.len_k)]
    tables = [
        work.made(torch.empty(x.shape[0], n, 2, dtype=x.dtype, device=r.device))
        for x, n in zip((q, k), sizes, strict=True)
    ]
    programs = [x.shape[0] * -(-n // ENTRIES) for x, n in zip((q, k), sizes, strict=True)]
    args = (*tables, q, k, (q_batch, q_step), (k_batch, k_step), r.len_q, r.len_k, programs[0])
    if sum(programs):
        work.launch(extremes_kernel, sum(programs), args, T=ENTRIES, PDL=follows(r))
    return tables[0], 2 * sizes[0] if q_batch else 0, tables[1], 2 * sizes[1] if k_batch else 0


def on_device(r: Request) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make it the tensors'."""
    return torch.cuda.device(r.device) if r.device.type == "cuda" else contextlib.nullcontext()
