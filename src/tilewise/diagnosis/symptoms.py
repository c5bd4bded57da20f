"""From what the watch wrote down to findings: the article's six symptoms, each at its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import prod

from .records import (
    NAN_ROW,
    NOT_EQUAL,
    QUADRATIC,
    REFUSED,
    RUN_TO_RUN,
    SLOW_STEP,
    SYMPTOMS,
    ByHand,
    Call,
    Comparison,
    Finding,
    MaskFacts,
    NanRow,
    large,
    size,
)
from .steps import ATTENTION, COMMUNICATION, ENOUGH, GAPS, LOADING, MOVEMENT, Step, of_one_kind
from .watch import Watch

WASTE = 0.5  # of a step in none of the model's arithmetic: more than in everything else together


def findings(w: Watch) -> list[Finding]:
    """All symptoms, in the article's order."""
    calls, hands = list(w.calls.values()), list(w.hands.values())
    found = [
        *(f for c in calls for f in (*_refused(c), *_nan(c), *_dropout(c), *_mask(c), *_stores(c), *_outside(c))),
        *(f for h in hands for f in (*_nan(h), *_dropout(h), *_by_hand(h))),
        *_compared(w.comparisons.values()),
        *_slow(calls, w),
    ]
    return sorted(_merged(found), key=lambda f: SYMPTOMS.index(f.symptom))


def _merged(found: list[Finding]) -> Iterator[Finding]:
    """The same check at the same place, in several modules or with several lengths, is one: the one of most bytes."""

    def key(f: Finding) -> tuple:
        return f.symptom, str(f.place), f.check

    for _, group in groupby(sorted(found, key=key), key):
        same = list(group)
        most = max(same, key=lambda f: f.bytes)
        others = len({f.seen for f in same}) - 1
        yield most._replace(
            modules=tuple(dict.fromkeys(m for f in same for m in f.modules)),
            times=sum(f.times for f in same),
            seen=most.seen + (f" (and {others} more like it here)" if others else ""),
        )


def _finding(symptom: str, what: Call | ByHand, seen: str, check: str, fix: str, bytes: int = 0) -> Finding:
    where = what.place if isinstance(what, Call) else what.softmax
    return Finding(symptom, where, tuple(n for n in what.modules if n), what.count, seen, check, fix, bytes)


# --- 1 --------------------------------------------------------------------------------------------


def _refused(c: Call) -> Iterator[Finding]:
    if not c.error or c.api != "scaled_dot_product_attention" or "math" in c.allowed:
        return
    reasons = [f"{name}: {reason.why}" for name in c.allowed for reason in c.reasons.get(name, [])]
    changes = [f"for {name}: {'; then '.join(c.changes[name])}" for name in c.allowed if name in c.changes]
    ours = [f"tilewise.attention takes it as it is (backend {c.tilewise})"] if c.tilewise else []
    allowed = ", ".join(c.allowed) or "nothing"
    yield _finding(
        REFUSED,
        c,
        f"sdpa_kernel allows only {allowed}, which cannot take this call. {'. '.join(reasons)}",
        "shrink to a known-good case and add back one thing at a time",
        ", or ".join([*changes, "allow SDPBackend.MATH too", *ours]),
    )


# --- 2 --------------------------------------------------------------------------------------------


def _nan(x: Call | ByHand) -> Iterator[Finding]:
    if x.nan is not None and x.nan.masked:
        yield _finding(
            NAN_ROW,
            x,
            f"{rows(x.nan)}: all keys of these queries are masked, and softmax of nothing but -inf is NaN",
            "look for a query whose keys are all masked: mask.any(-1)",
            "let such a query see one key and ignore its output, or tilewise.attention, which gives 0 and no gradient",
        )


def rows(nan: NanRow) -> str:
    """Index tuples for people: "batch 1, head 0-3, query 5-7; batch 2, head 0, query 1"."""
    queries: dict[tuple[int, ...], list[int]] = {}
    for row in nan.rows:
        queries.setdefault(row[:-1], []).append(row[-1])
    outer: dict[str, list[tuple[int, ...]]] = {}
    for heads, indices in queries.items():
        outer.setdefault(ranges(indices), []).append(heads)
    parts = [", ".join((*box, f"{nan.axes[-1]} {text}")) for text, heads in outer.items() for box in _boxes(nan, heads)]
    more = f" and {nan.total - len(nan.rows)} more rows" if nan.total > len(nan.rows) else ""
    return "; ".join(parts) + more


def _boxes(nan: NanRow, heads: list[tuple[int, ...]]) -> Iterator[tuple[str, ...]]:
    """One text for all (batch, head) pairs if they fill a rectangle, else one for each."""
    sides = [sorted(set(side)) for side in zip(*heads, strict=True)]
    whole = len(heads) == prod(len(side) for side in sides)
    for box in [sides] if whole else [[[i] for i in head] for head in heads]:
        yield tuple(f"{axis} {ranges(side)}" for axis, side in zip(nan.axes, box, strict=False))


def ranges(numbers: list[int]) -> str:
    """[5, 6, 7, 9] -> "5-7, 9"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


# --- 3 --------------------------------------------------------------------------------------------


def _dropout(x: Call | ByHand) -> Iterator[Finding]:
    if x.dropout_p > 0 and x.training is False:
        yield _finding(
            RUN_TO_RUN,
            x,
            f"dropout_p is {x.dropout_p:g} in eval mode: attention weights are dropped at random",
            "dropout_p must be 0 at inference: it is applied whatever the module's mode",
            "dropout_p=self.dropout if self.training else 0.0",
        )


# --- 4 --------------------------------------------------------------------------------------------


def _mask(c: Call) -> Iterator[Finding]:
    m = c.mask
    if m is None or not large(m.shape) or m.memory.bytes < m.shape[-2] * m.shape[-1]:  # few bytes: it is expanded
        return
    made = m.memory
    if made.buffer:
        born = f"the buffer {made.buffer!r}"
    else:
        born = f"made by {made.operator} at {made.place}" if made.place else "made before the doctor watched"
    yield _finding(
        QUADRATIC,
        c,
        f"attn_mask {m.dtype} {m.shape} takes {size(made.bytes)} of its own, {born}",
        "profile the allocation: full weights, a bias or a mask kept before SDPA",
        _mask_fix(m),
        made.bytes,
    )._replace(place=made.place or c.place)


def _mask_fix(m: MaskFacts) -> str:
    if m.same_as == "masks.causal()":
        return "it is the causal mask: is_causal=True, or tilewise.attention(q, k, v, masks.causal())"
    if m.same_as.startswith("no mask"):
        return "it masks nothing: leave attn_mask out"
    if m.same_as:
        return f"tilewise.attention(q, k, v, {m.same_as}) is the same and stores nothing of that size"
    return "keep dims of size 1 where it broadcasts, or say it as tilewise masks, which need no L x L tensor"


def _stores(c: Call) -> Iterator[Finding]:
    """SDPA's math kernel, and the fast path of nn.MultiheadAttention on a CPU, store the scores and the weights."""
    kernel = "the math kernel" if c.ran == "math" else "the fast path" if (c.ran, c.device) == ("native", "cpu") else ""
    shape = (*c.query[:-1], c.key[-2])
    if not kernel or not large(shape):
        return
    each = prod(shape) * {"float64": 8, "float32": 4}.get(c.dtype, 2)
    why = "; ".join(f"{name} {reason.why}" for name, reasons in c.reasons.items() for reason in reasons)
    changes = [f"for {name}: {'; then '.join(steps)}" for name, steps in c.changes.items()]
    yield _finding(
        QUADRATIC,
        c,
        f"{kernel} ran: it stores {shape} scores and weights, {size(each)} each" + (f". Why: {why}" if why else ""),
        "name the kernel that ran: calling SDPA is not running flash",
        ", or ".join([*changes, f"tilewise.attention{f' (backend {c.tilewise})' if c.tilewise else ''}: linear in L"]),
        2 * each,
    )


def _by_hand(h: ByHand) -> Iterator[Finding]:
    if large(h.shape):
        yield _finding(
            QUADRATIC,
            h,
            f"attention by hand: {h.tensors} tensors of {h.shape} {h.dtype}, {size(h.made_bytes)} in all, "
            f"{size(h.alive_bytes)} alive at the last product (scores at {h.scores}, average at {h.average})",
            "profile the allocation: full weights kept",
            "tilewise.attention(q, k, v, mask) in place of matmul, softmax and matmul",
            h.made_bytes,
        )


# --- 5 --------------------------------------------------------------------------------------------


def _compared(comparisons: Iterable[Comparison]) -> Iterator[Finding]:
    for x in comparisons:
        seen = f"{x.operator} says that an attention output is not its baseline"
        fix = "compare with a tolerance by dtype: torch.testing.assert_close(out, baseline)"
        if x.call is not None and x.call.numerics is not None:
            if x.call.numerics.ok:
                seen += f". Not a bug: within the error budget. {_error(x.call)}"
            else:
                seen += f". It is OUTSIDE of the error budget. {_error(x.call)}"
                fix = "find the first argument with which it differs: start from q, k, v alone"
        modules = () if x.call is None else tuple(n for n in x.call.modules if n)
        check = "the order of the sums differs: compare both with fp64, not with each other"
        yield Finding(NOT_EQUAL, x.place, modules, x.times, seen, check, fix)


def _error(c: Call) -> str:
    m = c.numerics
    assert m is not None
    return f"Error against fp64 {m.error:.2g}, of the dense computation in {c.dtype} {m.dense_error:.2g}, allowed {m.limit:.2g}"  # noqa: E501


def _outside(c: Call) -> Iterator[Finding]:
    """Worse than not bit-equal: wrong beyond rounding, whether or not someone compared. NaN rows have a finding."""
    if c.numerics is not None and not c.numerics.ok and c.nan is None:
        yield _finding(
            NOT_EQUAL,
            c,
            f"the output of {c.ran} is OUTSIDE of the error budget: {c.numerics.note}. {_error(c)}",
            "compare with the dense computation in fp64 on a small input",
            "tilewise.attention(..., backend='dense') as the baseline",
        )


# --- 6 --------------------------------------------------------------------------------------------

_WASTE_FIX = {
    GAPS: "move that Python out of the step: load data in workers (DataLoader num_workers); where the GPU waits for "
    "launches, torch.compile or CUDA graphs",
    LOADING: "DataLoader(num_workers=..., pin_memory=True), or prepare the data once",
    MOVEMENT: "keep tensors on the device and in one layout: look for .to(), .cpu(), .contiguous() and cat in the loop",
    COMMUNICATION: "overlap communication with the backward, or make its messages fewer and larger",
}


def _slow(calls: list[Call], w: Watch) -> Iterator[Finding]:
    """Every attention call ran a fast kernel, and yet most of the step is neither that nor the model's arithmetic."""
    fast = [c for c in calls if c.ran not in (None, "math", "native", "dense", "torch_math")]
    step = w.times.typical()
    if step is None or w.times.inflated or len(of_one_kind(w.times.steps)) <= ENOUGH:
        return
    if not fast or len(fast) < len(calls):
        return
    waste = {part: step.parts.get(part, 0.0) / step.seconds for part in _WASTE_FIX}
    if sum(waste.values()) <= WASTE:
        return
    most, total = w.lines.most_common(3), w.lines.total()
    where = ", ".join(f"{line} ({n / total:.0%})" for line, n in most)
    seen = _shares(step) + (f". The time without an operator is at {where}" if most else "")
    fix = _WASTE_FIX[max(waste, key=lambda part: waste[part])]
    yield Finding(SLOW_STEP, most[0][0] if most else None, (), 1, seen, "profile the whole step, not the kernel", fix)


def _shares(step: Step) -> str:
    top = sorted(step.parts.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{part} {seconds / step.seconds:.0%}" for part, seconds in top)
    return f"attention is {step.parts.get(ATTENTION, 0.0) / step.seconds:.0%} of the step; the most is {shares}"
