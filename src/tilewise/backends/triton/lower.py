"""From a mask to what a kernel needs of it: small generated @triton.jit functions and their arguments.

    keep(b, h, i, j, ...)               bool tile: which pairs exist and are attended; evaluated in masked tiles only
    reach_k(b, i0, i1, ...)             for rows i0 .. i1: the keys [lo, hi) outside of which nothing is kept, and
    reach_q(b, j0, j1, ...)             a range in which everything is; the same for a tile of keys
    verdict(b, h, i0, i1, j0, j1, ...)  EMPTY, PARTIAL or FULL of a tile, where ranges cannot say it

Bands and lengths are ranges: nothing is stored, nothing launched. All else gets lists of the tiles to visit, made on
the device by ``lists.py`` from ``verdict``. The text of the functions depends on the structure of the mask alone.
Numbers, sizes and strides are arguments (the tuple ``m``): no new window, length or batch compiles anything.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any as AnyType
from typing import NamedTuple

import torch

from ...masks import BOTTOM_RIGHT, TOP_LEFT, All, Any, Band, Dense, Documents, Lengths, Mask, Not, Predicate, holders
from .predicates import Traced, Untranslatable, trace

_FAR = 2**29  # beyond every position, and sums of three of it fit 32 bits
_PARAMETERS = "len_q, len_k, m"


@dataclass(frozen=True)
class Lowered:
    """The generated functions of a mask's structure; None where there is nothing to compute."""

    keep: AnyType = None
    reach_k: AnyType = None
    reach_q: AnyType = None
    verdict: AnyType = None  # set where lists are needed
    by_batch: bool = False  # the verdict differs between batch entries
    by_head: bool = False
    by_pair: bool = False  # the verdict looks at every pair of a tile
    longest_first: bool = False  # later query tiles see more keys
    window: bool = False  # they see no more, or not for long
    documents: tuple[int, ...] = ()  # where in m those begin


class Arguments(NamedTuple):
    """A leaf's share of the tuple m: its values, and where they start.

    tables: where those of documents start, which ``launch`` makes and appends for what asks the verdict.
    """

    leaf: Mask
    at: int
    traced: Traced | None
    tables: int = 0


def lower(mask: Mask | None) -> tuple[Lowered, tuple]:
    """The functions for a mask, compiled once for each structure, and the arguments of this mask."""
    if mask is None:
        return Lowered(), ()
    leaves, values = _arguments(mask)
    given = {id(x.leaf): x for x in leaves}
    return _remembered(_structure(mask, given), mask, leaves), tuple(values)


def _remembered(structure: tuple, mask: Mask, leaves: list[Arguments]) -> Lowered:
    """Written once a structure: that costs more than launching a kernel, and new functions compile kernels anew."""
    with _lock:
        if structure not in _lowered:
            documents = tuple(x.at for x in leaves if isinstance(x.leaf, Documents))
            _lowered[structure] = _functions(*_write(mask, leaves), documents)
            if len(_lowered) > _MOST:
                _lowered.popitem(last=False)
        _lowered.move_to_end(structure)
        return _lowered[structure]


_MOST = 512  # structures that are remembered, those used last
_lowered: OrderedDict[tuple, Lowered] = OrderedDict()
_lock = threading.Lock()


def untranslatable(mask: Mask | None) -> list[str]:
    """Why predicates in this mask cannot be compiled into a kernel."""
    reasons = []
    for leaf in _leaves(mask):
        if isinstance(leaf, Predicate):
            try:
                trace(leaf)
            except Untranslatable as e:
                reasons.append(str(e))
    return reasons


def recordings(mask: Mask | None) -> list[Traced]:
    """Of its predicates."""
    return [trace(x) for x in _leaves(mask) if isinstance(x, Predicate)] if holders(mask) else []


def _leaves(mask: Mask | None) -> list[Mask]:
    if mask is None:
        return []
    inner = mask.terms if isinstance(mask, All | Any) else (mask.term,) if isinstance(mask, Not) else None
    return [mask] if inner is None else [x for t in inner for x in _leaves(t)]


# --- arguments ------------------------------------------------------------------------------------


def _arguments(mask: Mask) -> tuple[list[Arguments], list]:
    leaves, values = [], []  # type: ignore[var-annotated]
    for leaf in _leaves(mask):
        traced = trace(leaf) if isinstance(leaf, Predicate) else None
        leaves.append(Arguments(leaf, len(values), traced))
        values += traced.values() if traced is not None else _values(leaf)
    after = itertools.count(len(values), 4)
    return [x._replace(tables=next(after)) if isinstance(x.leaf, Documents) else x for x in leaves], values


def _values(leaf: Mask) -> list:
    if isinstance(leaf, Band):
        offset = 0 if leaf.align in (None, TOP_LEFT, BOTTOM_RIGHT) else leaf.align
        return [max(-_FAR, min(int(x or 0), _FAR)) for x in (leaf.left, leaf.right, offset)]
    if isinstance(leaf, Lengths):
        return [leaf.lengths, leaf.lengths.stride(0)]
    if isinstance(leaf, Documents):
        ids = (leaf.q_ids, leaf.k_ids)
        return [x for t in ids for x in (t, t.stride(0) if t.shape[0] > 1 else 0, t.stride(1))]
    if isinstance(leaf, Dense):
        x = leaf.mask
        return [x.view(torch.uint8), *(s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True))]
    raise NotImplementedError(f"the triton backend does not know the mask {leaf!r}")


def _structure(mask: Mask, given: dict[int, Arguments]) -> tuple:
    """All that the text depends on."""
    if isinstance(mask, All | Any):
        return (type(mask), *(_structure(t, given) for t in mask.terms))
    if isinstance(mask, Not):
        return Not, _structure(mask.term, given)
    x = given[id(mask)]
    about: tuple = ()
    if isinstance(mask, Band):
        about = mask.left is None, mask.right is None, mask.align == BOTTOM_RIGHT
    elif isinstance(mask, Lengths):
        about = mask.axis, mask.side
    elif x.traced is not None:
        about = (x.traced.root.text,)
    elif isinstance(mask, Documents):
        about = (x.tables,)
    return type(mask), x.at, about, _depends(x, 0), _depends(x, 1)


# --- the text of the functions --------------------------------------------------------------------


class Text(NamedTuple):
    keep: str
    reach_k: str
    reach_q: str
    verdict: str


def _write(mask: Mask, leaves: list[Arguments]) -> tuple[Text, bool, bool, bool, bool, bool]:
    """The text of all functions; whether the verdict differs by batch and head, and needs pairs; whether later rows
    see more."""
    given = {id(x.leaf): x for x in leaves}
    lines: list[str] = []
    keep = _function(f"keep(b, h, i, j, {_PARAMETERS}, TAIL: tl.constexpr)", lines, _kept(mask, given, lines))
    ranges = ["", ""]
    if _is_range(mask):
        for axis, name in ((1, "reach_k"), (0, "reach_q")):
            lines = []
            result = _reach(mask, given, axis, lines)
            ranges[axis] = _function(f"{name}(b, x0, x1, {_PARAMETERS})", lines, ", ".join(result))
        text = Text(keep, ranges[1], ranges[0], "")
    else:
        lines = []
        result = (_verdict(mask, given, lines),)
        signature = f"verdict(b, h, i0, i1, j0, j1, {_PARAMETERS}, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr)"
        text = Text(keep, "", "", _function(signature, lines, result[0]))
    ordered = any(isinstance(x.leaf, Band) and x.leaf.left is None and x.leaf.right is not None for x in leaves)
    window = any(isinstance(x.leaf, Band) and x.leaf.left is not None for x in leaves)
    by_batch, by_head = (any(_depends(x, dim) for x in leaves) for dim in (0, 1))
    return text, by_batch, by_head, any(isinstance(x.leaf, Dense | Predicate) for x in leaves), ordered, window


def _function(signature: str, lines: list[str], result: str) -> str:
    return "\n".join([f"def {signature}:", *(f"    {x}" for x in lines), f"    return {result}"]) + "\n"


def _depends(x: Arguments, dim: int) -> bool:
    """Whether a leaf differs along the batch (0) or the heads (1)."""
    if isinstance(x.leaf, Dense):
        return x.leaf.mask.shape[dim] > 1
    if x.traced is not None:
        return ("b", "h")[dim] in x.traced.reads
    if isinstance(x.leaf, Documents):
        return dim == 0 and max(x.leaf.q_ids.shape[0], x.leaf.k_ids.shape[0]) > 1
    return dim == 0 and isinstance(x.leaf, Lengths)


def _is_range(mask: Mask) -> bool:
    if isinstance(mask, All | Any):
        return all(_is_range(t) for t in mask.terms)
    return isinstance(mask, Band | Lengths)


def _diagonal(leaf: Band, at: int) -> str:
    """What is added to i to give the band's diagonal."""
    return "(len_k - len_q)" if leaf.align == BOTTOM_RIGHT else f"m[{at + 2}]"


def _length(leaf: Lengths, at: int) -> tuple[str, str]:
    """The range [lo, hi) of real positions."""
    n, total = f"tl.load(m[{at}] + b * m[{at + 1}]).to(tl.int32)", ("len_q", "len_k")[leaf.axis]
    return ("0", n) if leaf.side == "right" else (f"({total} - {n})", total)


# Element by element.


def _kept(mask: Mask, given: dict[int, Arguments], lines: list[str]) -> str:
    """Which pairs exist and are attended. Bands and lengths that are &-ed are a range of keys for each query: computed
    once a row, it leaves an element two comparisons."""
    lo, hi, rest = "", "(tl.where(i < len_q, len_k, 0) if TAIL else len_k)", []
    for term in _factors(mask):
        at = given[id(term)].at if isinstance(term, Band | Lengths) else 0
        if isinstance(term, Band):
            d = _diagonal(term, at)
            below = f"i + {d} - m[{at}]" if term.left is not None else ""
            above = f"i + {d} + m[{at + 1}] + 1" if term.right is not None else ""
        elif isinstance(term, Lengths) and term.axis == 1:
            below, above = _length(term, at)
        elif isinstance(term, Lengths):
            hi, below, above = f"tl.where({_keep(term, given)}, {hi}, 0)", "", ""
        else:
            rest.append(_keep(term, given))
            continue
        lo = f"tl.maximum({lo}, {below})" if lo and below else lo or below
        hi = f"tl.minimum({hi}, {above})" if above else hi
    names = _named((hi, lo) if lo else (hi,), lines)
    return " & ".join([f"(j < {names[0]})", *(f"(j >= {x})" for x in names[1:]), *rest])


def _factors(mask: Mask) -> list[Mask]:
    """The masks whose conjunction this one is."""
    return [x for t in mask.terms for x in _factors(t)] if isinstance(mask, All) else [mask]


def _keep(mask: Mask, given: dict[int, Arguments]) -> str:
    if isinstance(mask, All | Any):
        return "(" + (" & " if isinstance(mask, All) else " | ").join(_keep(t, given) for t in mask.terms) + ")"
    if isinstance(mask, Not):
        return f"(({_keep(mask.term, given)}) == 0)"
    at, traced = given[id(mask)].at, given[id(mask)].traced
    if isinstance(mask, Band):
        d = f"i + {_diagonal(mask, at)}"  # sums of a row: one comparison an element
        terms = [f"(j >= {d} - m[{at}])"] * (mask.left is not None)
        terms += [f"(j <= {d} + m[{at + 1}])"] * (mask.right is not None)
        return f"({' & '.join(terms)})" if terms else "((i >= 0) & (j >= 0))"
    if isinstance(mask, Lengths):
        lo, hi = _length(mask, at)
        x = "ij"[mask.axis]
        return f"(({x} >= {lo}) & ({x} < {hi}))"
    if isinstance(mask, Documents):
        q, k = (
            f"load_number(m[{a}], {x}, {n}, b * m[{a + 1}], m[{a + 2}], TAIL)"
            for a, x, n in ((at, "i", "len_q"), (at + 3, "j", "len_k"))
        )
        return f"({q} == {k})"
    if isinstance(mask, Dense):
        terms = [f"tl.cast({x}, tl.int64) * m[{at + 1 + n}]" for n, x in enumerate("bhij")]
        return f"(tl.load(m[{at}] + {' + '.join(terms)}, mask=(i < len_q) & (j < len_k), other=0) != 0)"
    assert traced is not None
    return f"({traced.text(at)})"


# Ranges. Each leaf gives (lo, hi, full_lo, full_hi) of the other axis for positions x0 .. x1 of its own.


def _reach(mask: Mask, given: dict[int, Arguments], axis: int, lines: list[str]) -> tuple[str, ...]:
    """axis: of the range, 1 for keys."""
    if isinstance(mask, All | Any):
        parts = [_reach(t, given, axis, lines) for t in mask.terms]
        result = parts[0]
        for part in parts[1:]:
            result = (_intersect if isinstance(mask, All) else _unite)(result, part, lines)
        return result
    at = given[id(mask)].at
    if isinstance(mask, Band):
        d = _diagonal(mask, at)
        below, above = (f"m[{at}]", mask.left), (f"m[{at + 1}]", mask.right)
        if axis == 0:  # i runs from j - diagonal - right to j - diagonal + left
            d, below, above = f"(0 - {d})", above, below
        lo, full_lo = ("0", "0") if below[1] is None else (f"x0 + {d} - {below[0]}", f"x1 + {d} - {below[0]}")
        hi, full_hi = str(_FAR), str(_FAR)
        if above[1] is not None:
            hi, full_hi = f"x1 + {d} + {above[0]} + 1", f"x0 + {d} + {above[0]} + 1"
        return _named((lo, hi, full_lo, full_hi), lines)
    assert isinstance(mask, Lengths)
    lo, hi = _length(mask, at)
    if mask.axis == axis:
        lo, hi = _named((lo, hi), lines)
        return lo, hi, lo, hi
    lo, hi = _named((lo, hi), lines)
    some, every = f"(x1 >= {lo}) & (x0 < {hi})", f"(x0 >= {lo}) & (x1 < {hi})"
    return _named(("0", f"tl.where({some}, {_FAR}, 0)", "0", f"tl.where({every}, {_FAR}, 0)"), lines)


def _named(values: tuple[str, ...], lines: list[str]) -> tuple[str, ...]:
    names = tuple(f"t{len(lines) + n}" for n in range(len(values)))
    lines += [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    return names


def _intersect(a: tuple[str, ...], b: tuple[str, ...], lines: list[str]) -> tuple[str, ...]:
    ops = ("maximum", "minimum", "maximum", "minimum")
    return _named(tuple(f"tl.{op}({x}, {y})" for op, x, y in zip(ops, a, b, strict=True)), lines)


def _unite(a: tuple[str, ...], b: tuple[str, ...], lines: list[str]) -> tuple[str, ...]:
    """The hull of what may be kept; of two full ranges their union where they touch, else the longer."""
    a_hi = f"tl.where({a[1]} > {a[0]}, {a[1]}, 0)"
    b_hi = f"tl.where({b[1]} > {b[0]}, {b[1]}, 0)"
    a_lo = f"tl.where({a[1]} > {a[0]}, {a[0]}, {_FAR})"
    b_lo = f"tl.where({b[1]} > {b[0]}, {b[0]}, {_FAR})"
    lo, hi = _named((f"tl.minimum({a_lo}, {b_lo})", f"tl.maximum({a_hi}, {b_hi})"), lines)
    # Full ranges may reach outside of the matrix: what counts is what lies inside.
    sizes = [f"(tl.minimum({x[3]}, {_FAR}) - tl.maximum({x[2]}, 0))" for x in (a, b)]
    (touch,) = _named(
        (f"({sizes[0]} > 0) & ({sizes[1]} > 0) & ({a[2]} <= {b[3]}) & ({b[2]} <= {a[3]})",), lines
    )  # fmt: skip
    (left,) = _named((f"{sizes[0]} >= {sizes[1]}",), lines)
    full = _named(
        (
            f"tl.where({touch}, tl.minimum({a[2]}, {b[2]}), tl.where({left}, {a[2]}, {b[2]}))",
            f"tl.where({touch}, tl.maximum({a[3]}, {b[3]}), tl.where({left}, {a[3]}, {b[3]}))",
        ),
        lines,
    )
    return lo, hi, *full


# Verdicts of a tile: 0, 1, 2, combined by three-valued logic.


def _verdict(mask: Mask, given: dict[int, Arguments], lines: list[str]) -> str:
    if isinstance(mask, All | Any):
        names = [_verdict(t, given, lines) for t in mask.terms]
        result = names[0]
        for name in names[1:]:
            (result,) = _named((f"tl.{'minimum' if isinstance(mask, All) else 'maximum'}({result}, {name})",), lines)
        return result
    if isinstance(mask, Not):
        return _named((f"2 - {_verdict(mask.term, given, lines)}",), lines)[0]
    at = given[id(mask)].at
    if isinstance(mask, Band):
        d = _diagonal(mask, at)
        near, far = _named((f"j0 - i1 - {d}", f"j1 - i0 - {d}"), lines)
        left, right = mask.left is not None, mask.right is not None
        full = [f"({near} >= -m[{at}])"] * left + [f"({far} <= m[{at + 1}])"] * right
        empty = [f"({far} < -m[{at}])"] * left + [f"({near} > m[{at + 1}])"] * right
        if not full:
            return _named((f"tl.where({near} <= {_FAR}, 2, 2)",), lines)[0]
        return _verdict_of(" & ".join(full), " | ".join(empty), lines)
    if isinstance(mask, Lengths):
        lo, hi = _named(_length(mask, at), lines)
        x0, x1 = ("i0", "i1") if mask.axis == 0 else ("j0", "j1")
        return _verdict_of(f"({x0} >= {lo}) & ({x1} < {hi})", f"({x1} < {lo}) | ({x0} >= {hi})", lines)
    if isinstance(mask, Documents):
        table = given[id(mask)].tables
        q, k = (
            f"extremes(m[{a}], m[{a + 1}], b, {x}0, {x}1, {n})"
            for a, x, n in ((table, "i", "BLOCK_M"), (table + 2, "j", "BLOCK_N"))
        )
        n = len(lines)
        lines += [f"t{n}, t{n + 1} = {q}", f"t{n + 2}, t{n + 3} = {k}", "", ""]
        q0, q1, k0, k1 = (f"t{n + x}" for x in range(4))
        return _verdict_of(f"({q0} == {q1}) & ({k0} == {k1}) & ({q0} == {k0})", f"({q1} < {k0}) | ({k1} < {q0})", lines)
    n = len(lines)
    lines += [
        "i = i0 + tl.arange(0, BLOCK_M)[:, None]",
        "j = j0 + tl.arange(0, BLOCK_N)[None, :]",
        f"t{n} = whole((i <= i1) & (j <= j1), {_keep(mask, given)})",
    ]
    return f"t{n}"


def _verdict_of(full: str, empty: str, lines: list[str]) -> str:
    return _named((f"tl.where({full}, 2, tl.where({empty}, 0, 1))",), lines)[0]


# --- from text to functions -----------------------------------------------------------------------


def _functions(
    text: Text, by_batch: bool, by_head: bool, by_pair: bool, ordered: bool, window: bool, documents: tuple[int, ...]
) -> Lowered:
    made = {name: jit(source) if source else None for name, source in text._asdict().items()}
    return Lowered(
        **made, by_batch=by_batch, by_head=by_head, by_pair=by_pair, longest_first=ordered, window=window,
        documents=documents,
    )  # fmt: skip


def jit(source: str) -> Callable:
    """The @triton.jit function of a source text. Triton reads the text back through ``linecache``."""
    import triton
    import triton.language as tl

    from . import lists, primitives

    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    file, name = f"<tilewise mask {digest}>", source[4 : source.index("(")]
    source = "@triton.jit\n" + source
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, AnyType] = {
        "triton": triton, "tl": tl, "extremes": lists.extremes, "whole": lists.whole, "floordiv": lists.floordiv,
        "mod": lists.mod, "load_number": primitives.load_number, "__name__": "tilewise.backends.triton.generated",
    }  # fmt: skip
    exec(compile(source, file, "exec"), scope)
    return scope[name]
