"""The kernels of ``hopper`` on a CPU: their Python source, with PyTorch in the place of Gluon.

A thread for each partition. TMA copies and products are done where they are started, barriers count and block as on the
GPU, named barriers too, and loads and stores must lie inside their tensors. So this shows wrong addresses, masks and
phases and deadlocks, and nothing of layouts, of what is asynchronous, or of speed. Under Triton's interpreter the plain
Triton kernels beside them run too.
"""

import math
import re
import threading
import time
import traceback
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch

import tilewise
from tilewise.backends.hopper import config, launch

SOURCES = Path(tilewise.__file__).parent / "backends" / "hopper"
PATIENCE = 120  # seconds until a wait is a deadlock: machines are busy, and their processes stand still for a while


def raw(x):
    return x.x if isinstance(x, Value) else x


def tensor(x):
    return torch.as_tensor(raw(x))


class Value:
    """A tensor or scalar in registers."""

    class type:
        layout = None

    def __init__(self, x):
        self.x = torch.as_tensor(x)

    shape = property(lambda self: tuple(self.x.shape))
    dtype = property(lambda self: self.x.dtype)
    __hash__ = object.__hash__

    def __bool__(self):
        return bool(self.x)

    def __index__(self):
        return int(self.x)

    __int__ = __index__

    def __getitem__(self, key):
        return Value(self.x[key])

    def __neg__(self):
        return Value(-self.x)

    def reshape(self, shape):
        return Value(self.x.reshape(shape))

    def permute(self, order):
        return Value(self.x.permute(order))

    def to(self, dtype, bitcast=False):
        if not bitcast:
            return Value(self.x.to(dtype))
        x = self.x.to(torch.int32) if self.x.dtype == torch.int64 else self.x  # Python's numbers
        return Value(x.reshape(1, *x.shape).contiguous().view(dtype).reshape(x.shape))


def operator(name, f):
    def left(a, b):
        return NotImplemented if isinstance(b, Pointer) else Value(f(tensor(a), tensor(b)))

    setattr(Value, f"__{name}__", left)
    if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{name}__", lambda a, b: Value(f(tensor(b), tensor(a))))


for name, f in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "mod": torch.fmod,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq,
    "ne": torch.ne,
}.items():  # fmt: skip
    operator(name, f)


class Pointer:
    def __init__(self, base, at=0):
        self.base, self.at = base, at

    def __add__(self, more):
        return Pointer(self.base, Value(tensor(self.at) + tensor(more)))

    def places(self, mask):
        """(where, in the tensor as it lies in memory, and a mask): all that are kept must be inside."""
        size = self.base.untyped_storage().nbytes() // self.base.element_size() - self.base.storage_offset()
        flat = self.base.as_strided((size,), (1,))
        at = tensor(self.at)
        keep, at = torch.broadcast_tensors(torch.ones_like(at, dtype=torch.bool) if mask is None else raw(mask), at)
        assert bool((((at >= 0) & (at < flat.numel())) | ~keep).all()), "outside of the tensor"
        return flat, keep, at


class Shared:
    """Tiles in shared memory."""

    def __init__(self, x):
        self.x = x

    shape = property(lambda self: tuple(self.x.shape))
    dtype = property(lambda self: self.x.dtype)

    def index(self, n):
        return Shared(self.x[int(n)])

    def reshape(self, shape):
        return Shared(self.x.view(shape))

    def permute(self, order):
        return Shared(self.x.permute(order))

    def slice(self, start, length, dim):
        return Shared(self.x.narrow(dim, start, length))

    def load(self, layout):
        return Value(self.x.clone())

    def store(self, value):
        assert value.shape == self.shape
        self.x.copy_(value.x)


class Barrier:
    """Its phase ends once all have arrived, and all bytes that they said would come."""

    def __init__(self):
        self.changed, self.phase, self.count, self.missing, self.bytes = threading.Condition(), 0, 0, 0, 0

    def change(self, arrivals, more):
        with self.changed:
            self.missing, self.bytes = self.missing - arrivals, self.bytes + more
            assert min(self.missing, self.bytes) >= 0
            if self.missing == self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()


class Barriers(list):
    def index(self, n):
        return self[int(n)]


class mbarrier:
    class MBarrierLayout:
        pass

    @staticmethod
    def init(b, count):
        b.count = b.missing = count

    @staticmethod
    def expect(b, size):
        b.change(1, size)

    @staticmethod
    def arrive(b, count=1):
        b.change(count, 0)

    @staticmethod
    def wait(b, phase, pred=True):
        with b.changed:
            done = not pred or b.changed.wait_for(lambda: b.phase & 1 != int(phase) & 1, PATIENCE)
        assert done, "deadlock at an mbarrier"


here = threading.local()  # program: which runs, of how many; threads: of the partition; named: barriers


def named_barrier(op, number, total):
    here.named(op, int(number), total)


class Named:
    """The named barriers of a program."""

    def __init__(self):
        self.changed, self.threads, self.turns = threading.Condition(), {}, {}

    def __call__(self, op, number, total):
        with self.changed:
            turn = self.turns.setdefault(number, 0)
            self.threads[number] = self.threads.get(number, 0) + here.threads
            if self.threads[number] == total:
                self.threads[number], self.turns[number] = 0, turn + 1
                self.changed.notify_all()
            elif op == "sync":
                assert self.changed.wait_for(lambda: self.turns[number] > turn, PATIENCE), "deadlock at a named barrier"


class Descriptor:
    """How TMA sees a tensor."""

    layout = None

    def __init__(self, x, *block):
        self.x, self.block, self.dtype = x, block, x.dtype

    def window(self, at):
        """Where a tile is in the tensor, and the part of the tile that is inside."""
        sizes = [max(0, min(int(a) + n, end) - int(a)) for a, n, end in zip(at, self.block, self.x.shape, strict=True)]
        return tuple(slice(int(a), int(a) + n) for a, n in zip(at, sizes, strict=True)), tuple(map(slice, sizes))


class tma:
    @staticmethod
    def load(desc, at, barrier, shared):
        assert shared.shape == desc.block
        inside, there = desc.window(at)
        shared.x.zero_()
        shared.x[there] = desc.x[inside]
        barrier.change(0, -shared.x.numel() * shared.x.element_size())

    @staticmethod
    def store(desc, at, shared):
        assert shared.shape == desc.block
        inside, there = desc.window(at)
        desc.x[inside] = shared.x[there]

    @staticmethod
    def add(desc, at, shared):
        assert shared.shape == desc.block
        inside, there = desc.window(at)
        desc.x[inside] += shared.x[there]

    @staticmethod
    def store_wait(pending):
        """Copies are done."""


def without_layout(*shape, **how):
    return None


class gl:
    """The part of ``gluon.language`` that the kernels use."""

    int8, int32, int64, float32, tensor = torch.int8, torch.int32, torch.int64, torch.float32, Value
    shared_memory_descriptor = Shared
    NVMMADistributedLayout = SliceLayout = DotOperandLayout = BlockedLayout = SwizzledSharedLayout = without_layout
    adding = threading.Lock()

    def constexpr(x):
        return x

    def static_range(n):
        return range(n)

    def to_tensor(x):
        return Value(raw(x))

    def zeros(shape, dtype, layout):
        return Value(torch.zeros(shape, dtype=dtype))

    def full(shape, x, dtype, layout):
        return Value(tensor(x).to(dtype).expand(shape))

    def arange(start, end, layout):
        return Value(torch.arange(start, end))

    def exp2(x):
        return Value(torch.exp2(x.x))

    def log(x):
        return Value(torch.log(x.x))

    def abs(x):
        return Value(x.x.abs())

    def maximum(a, b):
        return Value(torch.fmax(*torch.broadcast_tensors(tensor(a), tensor(b))))

    def minimum(a, b):
        return Value(torch.fmin(*torch.broadcast_tensors(tensor(a), tensor(b))))

    def where(keep, a, b):
        return Value(torch.where(tensor(keep), raw(a), raw(b)))

    def sum(x, axis):
        return Value(x.x.sum(axis))

    def max(x, axis):
        """NaN is passed by, as on the GPU."""
        return Value(torch.where(x.x.isnan(), -math.inf, x.x).amax(axis) if x.x.is_floating_point() else x.x.amax(axis))

    class NVMMASharedLayout:
        get_default_for = without_layout

    def convert_layout(x, layout):
        return x

    def split(x):
        return Value(x.x[..., 0]), Value(x.x[..., 1])

    def program_id(axis):
        return Value(here.program[0])

    def num_programs(axis):
        return here.program[1]

    def load(pointer, mask=None, other=0.0):
        flat, keep, at = pointer.places(mask)
        return Value(torch.where(keep, flat[torch.where(keep, at, 0)], torch.as_tensor(other, dtype=flat.dtype)))

    def store(pointer, x, mask=None):
        flat, keep, at = pointer.places(mask)
        flat[at[keep]] = tensor(x).to(flat.dtype).expand(at.shape)[keep]

    def atomic_add(pointer, x):
        with gl.adding:
            old = gl.load(pointer)
            gl.store(pointer, old + x)
        return old

    def allocate_shared_memory(dtype, shape, layout):
        """Nothing in it is a number yet."""
        if isinstance(layout, mbarrier.MBarrierLayout):
            return Barriers(Barrier() for _ in range(shape[0]))
        return Shared(torch.full(shape, math.nan if dtype.is_floating_point else 0, dtype=dtype))

    def warp_specialize(partitions, warps, registers):
        named, program = Named(), here.program

        def run(f, args, number):
            here.named, here.program, here.threads = named, program, 32 * number
            f(*args)

        beside([(run, (*p, number)) for p, number in zip(partitions, (4, *warps), strict=True)])


failed = []  # what threads raised


def beside(calls):
    """All at a time. What one raises is raised here."""

    def run(f, args):
        try:
            with torch.no_grad():
                f(*args)
        except BaseException:
            failed.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=call) for call in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise AssertionError(failed[0])


class gluon:
    def jit(f=None, do_not_specialize=()):
        return f or (lambda g: g)

    def constexpr_function(f):
        return f


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    product = a.x.float() @ b.x.float()
    return Value(acc.x + product if use_acc else product)


def warpgroup_mma_wait(pending, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


def quick_tanh(s, factor):
    return 1 - 2 / (1 + gl.exp2(s * factor))


def seen(at):
    assert not failed, "another thread did"
    time.sleep(0.0005)  # others run meanwhile
    return gl.load(at)


def _kernel(*files):
    """The functions of the sources, without their imports."""
    names = {
        "gl": gl, "gluon": gluon, "mbarrier": mbarrier, "tma": tma, "config": config, "quick_tanh": quick_tanh,
        "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait, "aggregate": lambda c: c,
        "fence_async_shared": lambda: None, "tma_load": tma.load, "tma_store": tma.store, "builtin": lambda f: f,
    }  # fmt: skip
    for name in files:
        source = (SOURCES / name).read_text()
        source = re.sub(r"^from \S+ import (\((.|\n)*?^\)|.*)$", "", source, flags=re.MULTILINE)
        exec(compile(source, name, "exec"), names)
    # What is in assembly, or of the compiler's own.
    names |= {"hidden_zero": lambda: 0, "named_barrier": named_barrier, "tma_add": tma.add, "seen": seen}
    names |= {"fence_proxy": lambda: None, "publish": gl.store}
    return names


def list_tiles(kernel, grid, args, **constants):
    """In the place of ``ragged.items_kernel``, which tests/test_hopper_ragged.py runs."""
    cu_q, cu_k, items, out, lse, top, sequences = args[:7]
    block = constants["BLOCK_M"]
    lengths = sorted((int(cu_k[n + 1] - cu_k[n]), n) for n in range(sequences))
    tiles = [(n, t) for _, n in lengths for t in range(-(-int(cu_q[n + 1] - cu_q[n]) // block))]
    items[0] = len(tiles)
    items[1 : 1 + 2 * len(tiles)] = torch.tensor(tiles, dtype=torch.int32).flatten()
    for rows in (slice(0, int(cu_q[0])), slice(int(cu_q[-1]), None)):
        out[rows] = 0
        for x in (lse, top):
            if x is not None:
                x[:, rows] = -math.inf


@contextmanager
def on_cpu(programs=3):
    """Within the block ``launch`` runs its own code, and the kernels as this module does."""
    from tilewise.backends.hopper.backward import backward_kernel
    from tilewise.backends.hopper.kernel import forward_kernel
    from tilewise.backends.hopper.queries import queries_kernel
    from tilewise.backends.hopper.ragged import items_kernel
    from tilewise.backends.triton.config import interpreting
    from tilewise.backends.triton.start import Tiled

    forward = _kernel("pipeline.py", "kernel.py")["forward_kernel"]
    backward = _kernel("pipeline.py", "columns.py", "roles.py", "backward.py")["backward_kernel"]
    queries = _kernel("pipeline.py", "columns.py", "kernel.py", "queries.py")["queries_kernel"]
    counter = torch.zeros(2, dtype=torch.int32)

    def given(x):
        return Descriptor(x.x, *x.block) if isinstance(x, Tiled) else Pointer(x) if isinstance(x, torch.Tensor) else x

    def program(kernel, n, grid, args, constants):
        here.program = n, grid
        kernel(*map(given, args), **constants)

    def run(kernel, grid, args, masks=(), **constants):
        if kernel is forward_kernel:
            for n in range(grid):  # one after the other
                program(forward, n, grid, args, constants)
            assert not counter.any(), "the next launch begins at 0"
        elif kernel is backward_kernel:  # they wait for each other
            beside([(program, (backward, n, grid, args, constants)) for n in range(grid)])
        elif kernel is queries_kernel:
            beside([(program, (queries, n, grid, args, constants)) for n in range(grid)])
        elif interpreting():
            kernel[(grid,)](*args, *masks, **constants)
        else:
            assert kernel is items_kernel
            list_tiles(kernel, grid, args, **constants)

    with (
        mock.patch.object(launch, "_counter", return_value=counter),
        mock.patch.object(launch, "processors", return_value=programs),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch("tilewise.backends.triton.start.launch", run),
    ):
        yield
