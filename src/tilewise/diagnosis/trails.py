"""Follows tensors from operator to operator by their storages: where each was made, and what it holds.

A storage is known by its address. A weak reference keeps the address from being used again, but not the memory, so that
nothing lives longer than without; it also tells whether the tensor is still alive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .records import Allocation, ByHand, NanRow, Place, dtype_name, large, place

aten = torch.ops.aten
PRODUCTS = (aten.bmm, aten.mm, aten.baddbmm)
SOFTMAX = (aten._softmax, aten._safe_softmax)
_NOISE = (aten.bernoulli_, aten.bernoulli)
_SAME_VALUES = (aten.clone, aten._to_copy, aten.copy_, aten.detach, aten.alias, aten._unsafe_view)
_MOST = 4096  # entries of a table before the dead ones are dropped

SCORES, WEIGHTS, NOISE, OUTPUT = "scores", "weights", "noise", "output"


class Hand:
    """Attention by hand in the making: from the first product on."""

    def __init__(self, y: Tensor) -> None:
        self.scores: Place | None = place()
        self.softmax: Place | None = None
        self.shape, self.dtype = tuple(y.shape), dtype_name(y.dtype)
        self.dropout_p = 0.0
        self.nan: NanRow | None = None
        self.done = False
        self._tensors: dict[int, tuple[StorageWeakRef, int]] = {}

    def grow(self, y: Tensor) -> None:
        ref = StorageWeakRef(y.untyped_storage())
        self._tensors[ref.cdata] = (ref, nbytes(y))

    def finish(self, training: bool | None) -> ByHand:
        """At the last product."""
        self.done = True
        alive = sum(n for ref, n in self._tensors.values() if not ref.expired())
        made = sum(n for _, n in self._tensors.values())
        return ByHand(
            self.scores, self.softmax, place(), self.shape, self.dtype, len(self._tensors), made, alive,
            self.dropout_p, training, self.nan,
        )  # fmt: skip


class Tag(NamedTuple):
    """What a storage holds: scores or weights of a ``Hand``, dropout noise (its p), the output of a ``Call``."""

    ref: StorageWeakRef
    role: str
    numel: int
    subject: Any


class Trails:
    """What is known of the storages that are alive."""

    def __init__(self) -> None:
        self.parameters: set[int | None] = set()
        self._tags: dict[int | None, Tag] = {}
        self._made: dict[int | None, tuple[StorageWeakRef, Allocation]] = {}

    def tag(self, x: Any, role: str, subject: Any) -> None:
        if is_plain(x):
            _put(self._tags, key(x), Tag(StorageWeakRef(x.untyped_storage()), role, x.numel(), subject))

    def tagged(self, x: Any, *roles: str) -> Tag | None:
        found = self._tags.get(key(x)) if is_plain(x) else None
        return found if found is not None and found.role in roles else None

    def made(self, op: Any, inputs: list[Tensor], y: Tensor) -> None:
        """Notes where a large matrix got its memory."""
        if large(tuple(y.shape)) and key(y) not in {key(x) for x in inputs}:
            made = Allocation(tuple(y.shape), dtype_name(y.dtype), nbytes(y), str(op), place())
            _put(self._made, key(y), (StorageWeakRef(y.untyped_storage()), made))

    def memory_of(self, x: Tensor, root: nn.Module | None) -> Allocation:
        """Where x's memory is from: a line, or a buffer or parameter of the module."""
        known = self._made.get(key(x))
        if known is not None:
            return known[1]
        named = () if root is None else (*root.named_buffers(), *root.named_parameters())
        buffer = next((name for name, b in named if key(b) == key(x)), "")
        return Allocation(tuple(x.shape), dtype_name(x.dtype), nbytes(x), buffer=buffer)

    # --- attention by hand ------------------------------------------------------------------------

    def product(self, inputs: list[Tensor], y: Tensor) -> Hand | None:
        """A matrix product: the average that completes a hand, which is returned, or perhaps the scores of one.

        Products with a parameter (nn.Linear) are no scores.
        """
        for x in inputs:
            tag = self.tagged(x, WEIGHTS)
            if tag is not None and tag.numel == x.numel():
                return None if tag.subject.done else tag.subject
        if y.dim() >= 2 and min(y.shape[-2:]) > 1 and not any(key(x) in self.parameters for x in inputs):
            self._grow(Hand(y), SCORES, y)
        return None

    def softmax(self, x: Tensor, dim: int, y: Tensor) -> Hand | None:
        """A softmax: of a hand's scores, which is returned, or of something else."""
        tag = self.tagged(x, SCORES)
        if tag is None or dim not in (-1, y.dim() - 1):
            return None
        hand: Hand = tag.subject
        hand.softmax, hand.shape = place(), tuple(y.shape)
        self._grow(hand, WEIGHTS, y)
        return hand

    def follow(self, op: Any, inputs: list[Tensor], args: tuple, y: Tensor) -> None:
        """Scores and weights pass through element by element operators, an output through copies only."""
        if op in _NOISE:
            keep = args[1] if len(args) > 1 and isinstance(args[1], float) else 0.5
            self.tag(y, NOISE, round(1 - keep, 6))
            return
        for x in inputs:
            tag = self.tagged(x, SCORES, WEIGHTS, OUTPUT)
            if tag is None or y.numel() != tag.numel:
                continue
            if tag.role == OUTPUT:
                if op in _SAME_VALUES:
                    self.tag(y, OUTPUT, tag.subject)
            elif not tag.subject.done:
                self._dropped(op, tag, inputs, args)
                if key(x) != key(y):
                    self._grow(tag.subject, tag.role, y)
            return

    def _dropped(self, op: Any, tag: Tag, inputs: list[Tensor], args: tuple) -> None:
        """Dropout of the weights: in one operator, or as a product with noise."""
        if tag.role != WEIGHTS:
            return
        if op is aten.native_dropout and args[2] is not False:
            tag.subject.dropout_p = float(args[1])
        for x in inputs:
            if (noise := self.tagged(x, NOISE)) is not None:
                tag.subject.dropout_p = noise.subject

    def _grow(self, hand: Hand, role: str, y: Tensor) -> None:
        self.tag(y, role, hand)
        hand.grow(y)


def _put(table: dict, name: int | None, value: Any) -> None:
    if len(table) >= _MOST:
        for dead in [k for k, entry in table.items() if entry[0].expired()]:
            del table[dead]
    table[name] = value


def is_plain(x: Any) -> bool:
    """A tensor of values: no subclass, nothing traced, vmapped or nested, no meta tensor."""
    if type(x) not in (Tensor, nn.Parameter) or x.device.type == "meta" or x.layout != torch.strided or x.is_nested:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def key(x: Tensor) -> int | None:
    """The address of the storage."""
    return x.untyped_storage()._cdata if is_plain(x) else None


def nbytes(x: Tensor) -> int:
    """Of the whole storage: an expanded tensor has few, a view has those of all it is a view of."""
    return x.untyped_storage().nbytes()
