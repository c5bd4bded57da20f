"""A call like one before: the same allocations and launches again, with the tensors of this call.

What a call makes of shapes, strides and numbers (tiles, grids, some fifty arguments of each kernel) takes several times
as long as launching its kernels. So it is done once: ``Work`` writes down what a call allocates and launches, a
``Script`` does that again for tensors that lie as those did. Nothing that is read from a tensor may decide what is
launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import start
from .start import Tiled

_MOST = 1024  # calls that are remembered
_ALIGNED = 256  # bytes: more than any kernel is compiled for

Tensors = tuple[Tensor | None, ...]


class Room(NamedTuple):
    """An allocation: where its numbers lie, and what they are, if that matters."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    value: float | None

    def make(self, device: torch.device) -> Tensor:
        x = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        return x if self.value is None else x.fill_(self.value)


class Launch(NamedTuple):
    """A launch without its addresses. Slots say which go where: of the inputs, then of the rooms, then of the parts."""

    call: Callable[..., None]
    arguments: list
    addresses: list[tuple[int, int]]  # (position, slot)
    masks: list[tuple[int, list, list[tuple[int, int]]]]  # position of a tuple, the tuple, and its addresses
    maps: list[tuple[int, int, tuple, tuple, tuple]]  # (position, slot) of a descriptor, and how the tensor lies

    def run(self, addresses: list[int], stream: int) -> None:
        args = self.arguments.copy()
        args[_STREAM] = stream
        for at, slot in self.addresses:
            args[at] = addresses[slot]
        for at, values, inner in self.masks:
            values = values.copy()
            for n, slot in inner:
                values[n] = addresses[slot]
            args[at] = tuple(values)
        for at, slot, shape, strides, made in self.maps:
            args[at] = start.encoded(addresses[slot], shape, strides, made)[0]
        self.call(*args)


_STREAM = 3  # its position in the arguments, see ``start.Compiled``


class Script(NamedTuple):
    """What a call does. What only its kernels see is one allocation, the last of the rooms."""

    rooms: list[Room]
    parts: list[tuple[int, int]]  # (slot, bytes from its address)
    launches: list[Launch]
    results: list[int | None]  # which room

    def run(self, addresses: list[int], device: torch.device) -> Tensors:
        made = [room.make(device) for room in self.rooms]
        every = addresses + [x.data_ptr() for x in made]
        for slot, offset in self.parts:
            every.append(every[slot] + offset)
        stream = start.stream(device.index)
        for x in self.launches:
            x.run(every, stream)
        return tuple([None if n is None else made[n] for n in self.results])


class Work:
    """What a call does, done and written down."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, float | None]] = []
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._launched: list[tuple[start.Compiled | None, int, tuple, tuple]] = []

    def made(self, x: Tensor, value: float | None = None) -> Tensor:
        """A tensor that was just allocated, filled with the value if there is one."""
        self._made.append((x, value))
        return x if value is None else x.fill_(value)

    def part(self, x: Tensor, first: int) -> Tensor:
        """x[first:] of a tensor that was made."""
        self._parts.append((x[first:], x))
        return self._parts[-1][0]

    def launch(self, kernel: Any, grid: int, args: tuple, masks: tuple = (), **options: Any) -> None:
        """``start.launch``."""
        self._launched.append((start.launch(kernel, grid, args, masks, **options), grid, args, masks))

    def script(self, addresses: list[int], results: Tensors) -> Script | None:
        """To do it again; None where a launch is left to Triton, or takes a tensor neither given nor made here."""
        slots = {address: n for n, address in reversed(list(enumerate(addresses)))}
        own = [(x, value) for x, value in self._made if value is not None or any(x is y for y in results)]
        scratch = [x for x, _ in self._made if not any(x is y for y, _ in own)]
        rooms = [Room(tuple(x.shape), x.stride(), x.dtype, value) for x, value in own]
        slots |= {x.data_ptr(): len(addresses) + n for n, (x, _) in enumerate(own)}
        parts: list[tuple[int, int]] = []
        if scratch:
            sizes = [-(-x.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED for x in scratch]
            room = len(addresses) + len(rooms)
            parts = [(room, sum(sizes[:n])) for n in range(len(sizes))]
            slots |= {x.data_ptr(): room + 1 + n for n, x in enumerate(scratch)}
            rooms.append(Room((sum(sizes),), (1,), torch.uint8, None))
        for part, x in self._parts:
            slots[part.data_ptr()] = len(addresses) + len(rooms) + len(parts)
            parts.append((slots[x.data_ptr()], part.data_ptr() - x.data_ptr()))
        launches = []
        for compiled, grid, args, masks in self._launched:
            if compiled is None or any(x.data_ptr() not in slots for x in _tensors(args, masks)):
                return None
            launches.append(_launch(compiled, grid, args, masks, slots))
        which = [None if x is None else [x is y for y, _ in own].index(True) for x in results]
        return Script(rooms, parts, launches, which)


def _tensors(args: tuple, masks: tuple) -> list[Tensor]:
    every = [x.x if isinstance(x, Tiled) else x for x in (*args, *(y for m in masks for y in m))]
    return [x for x in every if isinstance(x, Tensor)]


def _launch(compiled: start.Compiled, grid: int, args: tuple, masks: tuple, slots: dict[int, int]) -> Launch:
    found = Launch(compiled.call, compiled.arguments(grid, 0, args, masks), [], [], [])
    at = len(found.arguments) - len(compiled.constants) - len(masks) - sum(map(_width, args))
    described = iter(compiled.maps)
    for x in args:
        if isinstance(x, Tiled):
            found.maps.append((at, slots[x.x.data_ptr()], x.shape, x.strides, next(described)))
        elif isinstance(x, Tensor):
            found.addresses.append((at, slots[x.data_ptr()]))
        at += _width(x)
    for n, m in enumerate(masks):
        inner = [(k, slots[x.data_ptr()]) for k, x in enumerate(m) if isinstance(x, Tensor)]
        if inner:
            found.masks.append((at + n, list(found.arguments[at + n]), inner))
    return found


def _width(x: Any) -> int:
    """How many arguments of the launcher it is: a descriptor comes with its shape and strides, that of 1 as well."""
    return 2 + len(x.shape) + len(x.strides) if isinstance(x, Tiled) else 1


_NEW = Script([], [], [], [])  # of a call that was not seen yet
_scripts: dict[tuple, Script | None] = {}


def repeated(about: tuple | None, inputs: Tensors, device: torch.device, make: Callable[[Work], Tensors]) -> Tensors:
    """make(work), or what it did when it was called for such inputs.

    about: everything beside the inputs that decides what is done; None if that cannot be said. The results are made
    by the work, or None.
    """
    if about is None or not start.remembers(device):
        return make(Work())
    given = [x for x in inputs if x is not None]
    addresses = [x.data_ptr() for x in given]
    lies = [(x.shape, x.stride(), x.dtype, address % 16 == 0) for x, address in zip(given, addresses, strict=True)]
    same = () if len(set(addresses)) == len(addresses) else tuple([addresses.index(x) for x in addresses])
    key = about, device, tuple([x is None for x in inputs]), tuple(lies), same
    script = _scripts.get(key, _NEW)
    if script is _NEW:
        work = Work()
        results = make(work)
        if len(_scripts) >= _MOST:
            _scripts.clear()
        _scripts[key] = work.script(addresses, results)
        return results
    return make(Work()) if script is None else script.run(addresses, device)
