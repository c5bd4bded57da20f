"""What the forward and the backward kernel are built from: work items, rings of buffers, named barriers."""

# No ``from __future__ import annotations``: Gluon reads the annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from . import config
from .gluon import tma_load, tma_store

ROWS = gl.constexpr(config.ROWS)
padded = gluon.constexpr_function(config.padded)
stored = gluon.constexpr_function(config.stored)


@gluon.jit
def place(t, n_m, pairs, section, LONGEST_FIRST: gl.constexpr):
    """(tile of queries, batch entry and head) of work item t. The keys and values of a section of heads fit the L2."""
    if LONGEST_FIRST:
        s = t // (n_m * section)
        rest = t - s * n_m * section
        n = min(section, pairs - s * section)
        return n_m - 1 - rest // n, s * section + rest % n
    else:
        pair = t // n_m
        return t - pair * n_m, pair


@aggregate
class Sizes:
    """The problem in numbers: the same for every partition."""

    heads: gl.tensor
    group: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    n_m: gl.tensor
    pairs: gl.tensor
    section: gl.tensor
    low: gl.tensor
    high: gl.tensor

    @gluon.constexpr_function
    def __init__(self, heads, group, len_q, len_k, n_m, pairs, section, low, high):
        self.heads, self.group, self.len_q, self.len_k = heads, group, len_q, len_k
        self.n_m, self.pairs, self.section, self.low, self.high = n_m, pairs, section, low, high


@gluon.jit
def sequence(b, z, ragged):
    """Sequence b of a ragged batch: its first query and key, and ``Sizes`` with its lengths and its diagonal."""
    if ragged[2] is None:
        return 0, 0, z
    else:
        cu_q, cu_k, skew = ragged[0], ragged[1], ragged[3]
        first_q, first_k = gl.load(cu_q + b), gl.load(cu_k + b)
        len_q, len_k = gl.load(cu_q + b + 1) - first_q, gl.load(cu_k + b + 1) - first_k
        down = skew * (len_k - len_q)
        own = Sizes(
            z.heads, z.group, len_q, len_k, z.n_m, z.pairs, z.section, z.low + down, z.high + down
        )  # fmt: skip
        return first_q, first_k, own


@gluon.jit
def plane(b, ragged):
    """Batch entry b as TMA counts: a ragged batch is one."""
    if ragged[2] is None:
        return b
    else:
        return 0


@gluon.constexpr_function
def wgmma_layout(n):
    """Of the result of a product with n columns, in the registers of a warp group."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@gluon.constexpr_function
def rows_layout(columns):
    """Of rows as they lie in memory: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def halves(x):
    """The left and the right half of the columns of a tile in the registers of a warp group: none move."""
    N: gl.constexpr = x.shape[1] // 2
    a, b = gl.split(x.reshape([ROWS, 2, N]).permute((0, 2, 1)))
    LAYOUT: gl.constexpr = wgmma_layout(N)
    return gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT)


@aggregate
class Ring:
    """Buffers that one warp fills and others empty: a barrier each for full and for empty."""

    data: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, data, full, empty):
        self.data, self.full, self.empty = data, full, empty


@gluon.jit
def barriers(N: gl.constexpr, ARRIVALS: gl.constexpr):
    b = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(N):
        mbarrier.init(b.index(n), count=ARRIVALS)
    return b


@gluon.jit
def tiles(desc, N: gl.constexpr, M: gl.constexpr, D: gl.constexpr, HEADS: gl.constexpr = 1):
    """Room for N tiles (1, HEADS, M / HEADS, D) of a tensor."""
    return gl.allocate_shared_memory(desc.dtype, [N, 1, HEADS, M // HEADS, D], desc.layout)


@gluon.jit
def matrix(data, n):
    """Number n of ``tiles``, (M, D)."""
    return data.index(n).reshape([data.shape[2] * data.shape[3], data.shape[4]])


@gluon.jit
def ring(data, N: gl.constexpr, READERS: gl.constexpr):
    return Ring(data, barriers(N, 1), barriers(N, READERS))


@gluon.jit
def await_full(r, it, N: gl.constexpr, pred=True):
    mbarrier.wait(r.full.index(it % N), (it // N) & 1, pred=pred)


@gluon.jit
def await_empty(r, it, N: gl.constexpr):
    mbarrier.wait(r.empty.index(it % N), ((it // N) & 1) ^ 1)


@gluon.jit
def release(r, slot):
    mbarrier.arrive(r.empty.index(slot), count=1)


@gluon.constexpr_function
def _named_asm(op, threads):
    return f"bar.{op} $1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def named_barrier(op: gl.constexpr, number, THREADS: gl.constexpr):
    """ "sync" waits until so many threads have come, "arrive" does not. Triton uses 0, 1 and one for each partition."""
    at = gl.to_tensor(number)
    asm: gl.constexpr = _named_asm(op, THREADS)
    gl.inline_asm_elementwise(asm, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hidden_zero():
    """A zero that the compiler does not see: what is indexed by it is not hoisted out of the loop, to be spilled."""
    zero = gl.to_tensor(0)
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch(desc, b, h, row, r, slot, ROWS_: gl.constexpr, D: gl.constexpr):
    mbarrier.expect(r.full.index(slot), ROWS_ * D * 2)
    tma_load(desc, [b, h, row, 0], r.full.index(slot), r.data.index(slot))


@gluon.jit
def staged(stage, x):
    stage.store(x)
    fence_async_shared()
    return stage


@gluon.jit
def is_odd(x):
    """Whether a NaN or an infinity is in x (M, N): 0 times it is NaN, and so is a sum with NaN in it."""
    total = gl.sum(gl.sum(x * 0.0, 1), 0)
    return total != total


@gluon.jit
def store_rows(desc, view, stage, x, b, h, i, first, length, where, D: gl.constexpr):
    """64 rows of an output, from row i of a sequence on, by way of a stage; view: the stage as TMA takes it.

    first, length: of the sequence. where: (pointer, stride of heads, of rows) of the output of a ragged batch.
    """
    staged(stage, x.to(stage.dtype))
    if where[0] is None:
        tma_store(desc, [b, h, i, 0], view)
    elif i + ROWS <= length:
        tma_store(desc, [0, h, first + i, 0], view)
    else:  # TMA would go on, into the next sequence
        LAYOUT: gl.constexpr = rows_layout(stage.shape[1])
        row = i + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        channels = gl.arange(0, stage.shape[1], gl.SliceLayout(0, LAYOUT))
        at = h * where[1] + (first + row).to(gl.int64) * where[2]
        inside = (row < length)[:, None] & (channels < D)[None, :]
        gl.store(where[0] + at[:, None] + channels[None, :], stage.load(LAYOUT), mask=inside)


# --- work that is handed out ----------------------------------------------------------------------


@gluon.jit
def hand_on(t, ids, done):
    """A work item, to the other partitions. All lanes of a warp store it, and once they have, one of them arrives."""
    await_empty(ids, done, 2)
    ids.data.index(done & 1).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(ids.full.index(done & 1), count=1)


@gluon.jit
def take(ticket, ids, done):
    """The next work item, handed on."""
    t = gl.atomic_add(ticket, 1)
    hand_on(t, ids, done)
    return t


@gluon.jit
def taken(ids, done, WARPS: gl.constexpr):
    await_full(ids, done, 2)
    t = gl.max(ids.data.index(done & 1).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    release(ids, done & 1)
    return t
