"""Predicates in the kernel: a user's Python function of (b, h, i, j, *captured), recorded and written as Triton.

The function is called once with symbols in place of its arguments, which record what is done to them: arithmetic,
comparisons, & | ^ ~, torch.where and its like, and indexing of captured tensors, ``t[j]`` or ``t[b, i]``. Numbers and
tensors
that it closes over become arguments of the kernel, so that another value compiles nothing. Whole numbers keep
PyTorch's meaning: ``//`` and ``%`` round down, and where a product may pass 32 bits it is computed in 64.

What cannot be recorded (control flow on a symbol, other functions) raises ``Untranslatable`` with the reason.
"""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...masks import Predicate

_INT32 = 2**31 - 1
LONGEST = 2**22  # what is assumed of i and j when products are checked for 32 bits
_BATCH = 2**16
_DEPTH = 4  # of functions that call functions


_numbers = itertools.count()


class Untranslatable(Exception):
    """Why a predicate cannot be compiled into a kernel."""


class Traced:
    """A recorded predicate. ``text(at)`` is its Triton expression, with its arguments from m[at] on."""

    def __init__(self, root: Symbol, tape: _Tape):
        self.root, self.tape = root, tape
        self.reads = frozenset(tape.reads)
        self.number = next(_numbers)  # another for another recording

    def tensors(self) -> list[Tensor]:
        return [x for x in self.tape.inputs if isinstance(x, Tensor)]

    def values(self) -> list:
        values: list = []
        for x in self.tape.inputs:
            if isinstance(x, Tensor):
                x = x.view(torch.uint8) if x.dtype == torch.bool else x
                values += [x, *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))]
            else:
                values.append(x)
        return values

    def text(self, at: int) -> str:
        text = self.root.text
        for n in reversed(range(self.tape.size)):  # §3 before §30 would be wrong the other way round
            text = text.replace(f"§{n}§", f"m[{at + n}]")
        return text


class _Tape:
    """What a recording has met: its arguments in order, and which positions it read."""

    def __init__(self) -> None:
        self.inputs: list[Tensor | int | float] = []
        self.size = 0
        self.reads: set[str] = set()

    def add(self, x: Tensor | int | float) -> int:
        at = self.size
        self.inputs.append(x)
        self.size += 1 + (x.dim() if isinstance(x, Tensor) else 0)
        return at


class Symbol:
    """An expression: Triton text, kind ("int", "float", "bool") and, of an int, the bounds of its value."""

    def __init__(self, tape: _Tape, text: str, kind: str, lo: int = 0, hi: int = 0, reads: str = ""):
        self._tape, self.text, self.kind, self.lo, self.hi, self._reads = tape, text, kind, lo, hi, reads

    @property
    def wide(self) -> bool:
        return self.kind == "int" and (self.lo < -_INT32 or self.hi > _INT32)

    def __bool__(self) -> bool:
        raise Untranslatable("uses if, and, or, not or a chained comparison on b, h, i, j; use torch.where, & | ~")

    def _no(self, *_: Any) -> Any:
        raise Untranslatable("turns b, h, i, j into a Python number or a sequence")

    __int__ = __index__ = __float__ = __len__ = __iter__ = _no
    __hash__ = None  # type: ignore[assignment]

    def __add__(self, o: Any) -> Symbol:
        return _arithmetic(self._tape, "+", self, o)

    def __radd__(self, o: Any) -> Symbol:
        return _arithmetic(self._tape, "+", o, self)

    def __sub__(self, o: Any) -> Symbol:
        return _arithmetic(self._tape, "-", self, o)

    def __rsub__(self, o: Any) -> Symbol:
        return _arithmetic(self._tape, "-", o, self)

    def __mul__(self, o: Any) -> Symbol:
        return _arithmetic(self._tape, "*", self, o)

    def __rmul__(self, o: Any) -> Symbol:
        return _arithmetic(self._tape, "*", o, self)

    def __truediv__(self, o: Any) -> Symbol:
        return _arithmetic(self._tape, "/", self, o)

    def __rtruediv__(self, o: Any) -> Symbol:
        return _arithmetic(self._tape, "/", o, self)

    def __floordiv__(self, o: Any) -> Symbol:
        return _division(self._tape, "floordiv", self, o)

    def __rfloordiv__(self, o: Any) -> Symbol:
        return _division(self._tape, "floordiv", o, self)

    def __mod__(self, o: Any) -> Symbol:
        return _division(self._tape, "mod", self, o)

    def __rmod__(self, o: Any) -> Symbol:
        return _division(self._tape, "mod", o, self)

    def __neg__(self) -> Symbol:
        return 0 - self

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        if self.kind == "bool":
            raise Untranslatable("takes the absolute value of a bool")
        return Symbol(self._tape, f"tl.abs({self.text})", self.kind, 0, max(abs(self.lo), abs(self.hi)))

    abs = __abs__

    def __invert__(self) -> Symbol:
        if self.kind != "bool":
            raise Untranslatable("inverts (~) a number")
        return Symbol(self._tape, f"({self.text} == 0)", "bool")

    def __and__(self, o: Any) -> Symbol:
        return _logic(self._tape, "&", self, o)

    def __or__(self, o: Any) -> Symbol:
        return _logic(self._tape, "|", self, o)

    def __xor__(self, o: Any) -> Symbol:
        return _logic(self._tape, "^", self, o)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lt__(self, o: Any) -> Symbol:
        return _compare(self._tape, "<", self, o)

    def __le__(self, o: Any) -> Symbol:
        return _compare(self._tape, "<=", self, o)

    def __gt__(self, o: Any) -> Symbol:
        return _compare(self._tape, ">", self, o)

    def __ge__(self, o: Any) -> Symbol:
        return _compare(self._tape, ">=", self, o)

    def __eq__(self, o: Any) -> Symbol:  # type: ignore[override]
        return _compare(self._tape, "==", self, o)

    def __ne__(self, o: Any) -> Symbol:  # type: ignore[override]
        return _compare(self._tape, "!=", self, o)

    @classmethod
    def __torch_function__(cls, fn: Callable, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        known = _TORCH.get(fn)
        if known is None or kwargs:
            raise Untranslatable(f"calls {getattr(fn, '__name__', fn)}, which has no translation")
        return known(*args)


class _Captured:
    """A tensor that the predicate reads: to be indexed with as many indices as it has dims."""

    def __init__(self, tape: _Tape, x: Tensor):
        self._tape, self._x, self._at = tape, x, tape.add(x)
        self.shape, self.dtype, self.ndim = x.shape, x.dtype, x.dim()

    def _no(self, *_: Any) -> Any:
        raise Untranslatable("uses a captured tensor other than by indexing it")

    def __getattr__(self, name: str) -> Any:
        raise Untranslatable(f"uses .{name} of a captured tensor; index it, t[i]")

    __bool__ = __int__ = __float__ = __len__ = __iter__ = _no
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = _no
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = __neg__ = _no

    @classmethod
    def __torch_function__(cls, fn: Callable, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise Untranslatable(f"calls {getattr(fn, '__name__', fn)} with a captured tensor; index it, t[i]")

    def __getitem__(self, index: Any) -> Symbol:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim:
            raise Untranslatable(f"indexes a captured tensor of {self.ndim} dims with {len(index)} indices")
        offsets, inside = [], []
        for n, x in enumerate(index):
            s = _symbol(self._tape, x)
            if s.kind != "int":
                raise Untranslatable("indexes a captured tensor with something that is not a whole number")
            size = self.shape[n]
            text = s.text if s.lo >= 0 else f"tl.where({s.text} < 0, {s.text} + {_size(self._tape, size)}, {s.text})"
            offsets.append(f"tl.cast({text}, tl.int64) * §{self._at + 1 + n}§")
            # A tile may reach past the end of the matrix: what it would read there is never used.
            inside.append(f"({text} >= 0) & ({text} < {_size(self._tape, size)})")
        load = f"tl.load(§{self._at}§)"
        if index:
            load = f"tl.load(§{self._at}§ + {' + '.join(offsets)}, mask={' & '.join(inside)}, other=0)"
        if self.dtype == torch.bool:
            return Symbol(self._tape, f"({load} != 0)", "bool")
        if self.dtype.is_floating_point:
            if self.dtype == torch.float64:
                raise Untranslatable("reads a captured float64 tensor")
            return Symbol(self._tape, f"{load}.to(tl.float32)", "float")
        info = torch.iinfo(self.dtype)
        text = load if info.bits == 64 else f"{load}.to(tl.int32)"
        return Symbol(self._tape, text, "int", info.min, info.max)


def _size(tape: _Tape, n: int) -> str:
    """The size of a captured tensor, as an argument: another size compiles nothing."""
    return f"§{tape.add(n)}§"


# --- operations -----------------------------------------------------------------------------------


def _symbol(tape: _Tape, x: Any) -> Symbol:
    if isinstance(x, Symbol):
        return x
    if isinstance(x, bool):
        return Symbol(tape, f"({'i >= 0' if x else 'i < 0'})", "bool")
    if isinstance(x, int):
        if abs(x) > 2**62:
            raise Untranslatable(f"uses the number {x}")
        return Symbol(tape, f"({x})", "int", x, x)
    if isinstance(x, float):
        if x != x or x in (float("inf"), -float("inf")):
            raise Untranslatable(f"uses the number {x}")
        return Symbol(tape, f"({x!r})", "float")
    if isinstance(x, _Captured) and x.ndim == 0:
        return x[()]
    raise Untranslatable(f"uses a {type(x).__name__} in an expression")


def _number(s: Symbol) -> Symbol:
    if s.kind == "bool":
        return Symbol(s._tape, f"tl.where({s.text}, 1, 0)", "int", 0, 1)
    return s


def _operands(a: Symbol, b: Symbol, wide: bool) -> tuple[str, str]:
    if "float" in (a.kind, b.kind):
        return _cast(a, "tl.float32"), _cast(b, "tl.float32")
    if wide:
        return _cast(a, "tl.int64"), _cast(b, "tl.int64")
    return a.text, b.text


def _cast(s: Symbol, dtype: str) -> str:
    return s.text if s.kind == "float" else f"tl.cast({s.text}, {dtype})"


def _arithmetic(tape: _Tape, op: str, x: Any, y: Any) -> Symbol:
    a, b = _number(_symbol(tape, x)), _number(_symbol(tape, y))
    if op == "/":
        return Symbol(tape, f"(tl.cast({a.text}, tl.float32) / tl.cast({b.text}, tl.float32))", "float")
    lo = hi = 0
    if a.kind == b.kind == "int":
        apply = {"+": operator.add, "-": operator.sub, "*": operator.mul}[op]
        ends = [apply(p, q) for p in (a.lo, a.hi) for q in (b.lo, b.hi)]
        lo, hi = min(ends), max(ends)
    kind = "int" if a.kind == b.kind == "int" else "float"
    wide = max(abs(lo), abs(hi)) > _INT32
    left, right = _operands(a, b, wide)
    return Symbol(tape, f"({left} {op} {right})", kind, lo, hi)


def _division(tape: _Tape, name: str, x: Any, y: Any) -> Symbol:
    a, b = _number(_symbol(tape, x)), _number(_symbol(tape, y))
    if a.kind != "int" or b.kind != "int":
        raise Untranslatable("uses // or % on numbers that are not whole")
    wide = a.wide or b.wide
    left, right = _operands(a, b, wide)
    most = max(abs(a.lo), abs(a.hi)) + 1 if name == "floordiv" else max(abs(b.lo), abs(b.hi))
    positive = a.lo >= 0 and b.lo > 0
    lo = 0 if positive else -most
    if positive:  # rounds down by itself
        return Symbol(tape, f"({left} {'//' if name == 'floordiv' else '%'} {right})", "int", lo, most)
    return Symbol(tape, f"{name}({left}, {right})", "int", lo, most)


def _compare(tape: _Tape, op: str, x: Any, y: Any) -> Symbol:
    a, b = _number(_symbol(tape, x)), _number(_symbol(tape, y))
    left, right = _operands(a, b, a.wide or b.wide)
    return Symbol(tape, f"({left} {op} {right})", "bool")


def _logic(tape: _Tape, op: str, x: Any, y: Any) -> Symbol:
    a, b = _symbol(tape, x), _symbol(tape, y)
    if a.kind == b.kind == "bool":
        return Symbol(tape, f"({a.text} {op} {b.text})", "bool")
    if "float" in (a.kind, b.kind):
        raise Untranslatable(f"uses {op} on a floating-point number")
    if min(a.lo, b.lo) < 0:
        raise Untranslatable(f"uses {op} on whole numbers that may be negative")
    a, b = _number(a), _number(b)
    most = (1 << max(a.hi, b.hi).bit_length()) - 1
    left, right = _operands(a, b, a.wide or b.wide)
    return Symbol(tape, f"({left} {op} {right})", "int", 0, most)


def _tape_of(*xs: Any) -> _Tape:
    return next(x._tape for x in xs if isinstance(x, Symbol | _Captured))


def _where(c: Any, x: Any, y: Any) -> Symbol:
    tape = _tape_of(c, x, y)
    a, b = _symbol(tape, x), _symbol(tape, y)
    condition = _symbol(tape, c)
    if a.kind == b.kind == "bool":
        return (condition & a) | (~condition & b)
    a, b = _number(a), _number(b)
    lo, hi = min(a.lo, b.lo), max(a.hi, b.hi)
    left, right = _operands(a, b, a.wide or b.wide)
    kind = "int" if a.kind == b.kind == "int" else "float"
    return Symbol(tape, f"tl.where({condition.text}, {left}, {right})", kind, lo, hi)


def _extreme(name: str) -> Callable:
    def apply(x: Any, y: Any) -> Symbol:
        tape = _tape_of(x, y)
        return _where(_compare(tape, "<" if name == "minimum" else ">", x, y), x, y)

    return apply


def _method(op: Callable) -> Callable:
    def apply(x: Any, y: Any) -> Symbol:
        return op(_symbol(_tape_of(x, y), x), y)

    return apply


_TORCH: dict[Any, Callable] = {
    torch.where: _where,
    torch.minimum: _extreme("minimum"),
    torch.maximum: _extreme("maximum"),
    torch.abs: abs,
    torch.neg: operator.neg,
    torch.logical_and: _method(operator.and_),
    torch.bitwise_and: _method(operator.and_),
    torch.logical_or: _method(operator.or_),
    torch.bitwise_or: _method(operator.or_),
    torch.logical_xor: _method(operator.xor),
    torch.bitwise_xor: _method(operator.xor),
    torch.logical_not: operator.invert,
    torch.bitwise_not: operator.invert,
    torch.add: _method(operator.add),
    torch.sub: _method(operator.sub),
    torch.mul: _method(operator.mul),
    torch.div: _method(operator.truediv),
    torch.floor_divide: _method(operator.floordiv),
    torch.remainder: _method(operator.mod),
    **{getattr(torch, n): _method(getattr(operator, n)) for n in ("eq", "ne", "lt", "le", "gt", "ge")},
}


# --- recording ------------------------------------------------------------------------------------


_cache: weakref.WeakKeyDictionary[Any, tuple[tuple, Traced]] = weakref.WeakKeyDictionary()


def trace(p: Predicate) -> Traced:
    """The recording of a predicate, or Untranslatable. Kept for as long as the mask lives."""
    key = (*(id(x) for x in p.captured), *_identities(p.holder.fn))
    known = _cache.get(p.holder)
    if known is None or known[0] != key:
        known = (key, _record(p))
        _cache[p.holder] = known
    return known[1]


def _record(p: Predicate) -> Traced:
    try:
        return _attempt(p, symbolic=True)
    except Exception:  # a number that must be one: range(n), t[:n]; whatever is wrong is found again here
        pass
    name = getattr(p.holder.fn, "__name__", repr(p.holder.fn))
    try:
        return _attempt(p, symbolic=False)
    except Untranslatable as e:
        raise Untranslatable(f"cannot compile the predicate {name}: it {e}") from None
    except Exception as e:  # the user's function, called with symbols, may fail in any way
        raise Untranslatable(f"cannot compile the predicate {name}: {type(e).__name__}: {e}") from None


def _attempt(p: Predicate, symbolic: bool) -> Traced:
    tape = _Tape()
    fn = _rebound(p.holder.fn, tape, symbolic)
    indices = [_Index(tape, x, hi) for x, hi in (("b", _BATCH), ("h", _BATCH), ("i", LONGEST), ("j", LONGEST))]
    root = fn(*indices, *(_Captured(tape, t) for t in p.captured))
    if not isinstance(root, Symbol) or root.kind != "bool":
        raise Untranslatable(f"returns {root.kind if isinstance(root, Symbol) else type(root).__name__}, not a bool")
    return Traced(root, tape)


class _Index(Symbol):
    """b, h, i or j; notes that it was read."""

    def __init__(self, tape: _Tape, name: str, hi: int):
        self._name = name
        super().__init__(tape, name, "int", 0, hi)

    @property
    def text(self) -> str:
        self._tape.reads.add(self._name)
        return self._name

    @text.setter
    def text(self, _: str) -> None:
        pass


def _closed_over(fn: types.FunctionType) -> dict[str, Any]:
    """What a function reads from around it that may hold numbers or tensors, by name."""
    found = {n: fn.__globals__[n] for n in fn.__code__.co_names if n in fn.__globals__}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        found[name] = cell.cell_contents
    kinds = Tensor | int | float | types.FunctionType | tuple | list
    return {n: x for n, x in found.items() if isinstance(x, kinds) and not isinstance(x, bool)}


def _identities(x: Any, depth: int = 0) -> list[int]:
    """What tells whether a function still closes over the same things."""
    if isinstance(x, types.FunctionType) and depth < _DEPTH:
        return [i for y in _closed_over(x).values() for i in (id(y), *_identities(y, depth + 1))]
    if isinstance(x, tuple | list) and depth < _DEPTH:
        return [i for y in x for i in (id(y), *_identities(y, depth + 1))]
    return []


def _rebound(fn: Any, tape: _Tape, symbolic: bool, depth: int = 0) -> Any:
    """The function with symbols in place of what it, and what it calls, close over."""
    if not isinstance(fn, types.FunctionType) or depth >= _DEPTH:
        return fn
    outer = _closed_over(fn)
    if not outer:
        return fn
    new = {n: _stand_in(x, tape, symbolic, depth) for n, x in outer.items()}
    code = fn.__code__
    cells = tuple(
        types.CellType(new[n]) if n in new else cell
        for n, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)
    )
    made = types.FunctionType(code, {**fn.__globals__, **new}, fn.__name__, fn.__defaults__, cells)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


def _stand_in(x: Any, tape: _Tape, symbolic: bool, depth: int) -> Any:
    if isinstance(x, Tensor):
        return _Captured(tape, x)
    if isinstance(x, types.FunctionType):
        return _rebound(x, tape, symbolic, depth + 1)
    if isinstance(x, tuple | list):
        return type(x)(_stand_in(y, tape, symbolic, depth + 1) for y in x) if type(x) in (tuple, list) else x
    if not symbolic or not isinstance(x, int | float) or isinstance(x, bool):
        return x
    if isinstance(x, float):
        return Symbol(tape, f"§{tape.add(x)}§", "float")
    bound = next((b for b in (2**8, 2**20, _INT32) if abs(x) <= b), 2**62)  # its size class is part of the text
    return Symbol(tape, f"§{tape.add(x)}§", "int", 1 if x > 0 else 0 if x == 0 else -bound, bound)
