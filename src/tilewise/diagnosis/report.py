"""The report: attention calls, attention by hand, findings and the step's time; as data and as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .records import ByHand, Call, Finding, size
from .steps import Step, of_one_kind
from .symptoms import findings
from .watch import Watch


class Report:
    """What a watch saw; it grows while the watch is on, and stays readable after. Holds no tensor."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @property
    def calls(self) -> list[Call]:
        """Attention calls, identical ones together, in the order of their first."""
        return list(self._watch.calls.values())

    @property
    def by_hand(self) -> list[ByHand]:
        """Attention written out as matmul, softmax, matmul."""
        return list(self._watch.hands.values())

    @property
    def findings(self) -> list[Finding]:
        """The symptoms, in the article's order; empty for a healthy model."""
        return findings(self._watch)

    @property
    def step(self) -> Step | None:
        """The median step after the first: seconds by part; None if none was timed."""
        return self._watch.times.typical()

    @property
    def unseen(self) -> list[str]:
        """What the doctor could not see."""
        more = self._watch.uncounted
        return sorted(self._watch.unseen) + ([f"{more} calls of further shapes: counted, not examined"] if more else [])

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON's types."""
        step = self.step
        return {
            "healthy": not self.findings,
            "findings": [f.as_dict() for f in self.findings],
            "calls": [_call(c) for c in self.calls],
            "by_hand": [_plain(asdict(h) | {"count": h.count}) for h in self.by_hand],
            "step": None if step is None else {**step._asdict(), **_timed(self._watch)},
            "unseen": self.unseen,
        }

    def __str__(self) -> str:
        found = self.findings
        lines = [headline(self)]
        for n, f in enumerate(found, 1):
            lines += ["", f"{n}. {f.symptom}" + (f": {f.place}" if f.place else "")]
            lines += [f"   {name}: {text}" for name, text in finding_lines(f)]
        if self.calls:
            lines += ["", "attention calls"]
            for c in self.calls:
                lines += [f"  {c.count} x {describe(c)}", *("      " + x for x in call_lines(c))]
        for h in self.by_hand:
            lines += ["", *hand_lines(h)]
        if self.step is not None:
            lines += [
                "",
                step_title(self),
                *(f"  {share:6.1%}  {1e3 * s:9.2f} ms  {part}" for part, s, share in shares(self.step)),
            ]
        lines += ["", "not seen: " + "; ".join(self.unseen)] if self.unseen else []
        return "\n".join(lines)


def headline(r: Report) -> str:
    calls, found = sum(c.count for c in r.calls), len(r.findings)
    hands = sum(h.count for h in r.by_hand)
    said = "no symptom" if not found else "1 symptom" if found == 1 else f"{found} symptoms"
    return f"{said} in {calls} attention calls" + (f", and {hands} written by hand" if hands else "")


def finding_lines(f: Finding) -> list[tuple[str, str]]:
    where = [("in", _modules(f.modules, f.times))] if f.modules else []
    return [*where, ("seen", f.seen), ("check", f.check), ("fix", f.fix)]


def _modules(names: tuple[str, ...], count: int) -> str:
    shown = ", ".join(names[:4]) + (f", ... ({len(names)} modules)" if len(names) > 4 else "")
    return f"{shown} ({count} times)" if count > 1 else shown


def describe(c: Call) -> str:
    """One line: who called what, with which shapes."""
    kv = "" if c.key == c.query and c.value == c.query else f", k {c.key}, v {c.value}"
    parts = [f"{c.api}: q {c.query}{kv}, {c.dtype} on {c.device}"]
    parts += [f"mask {c.mask}"] if c.mask else []
    parts += ["is_causal"] if c.is_causal else []
    parts += [f"dropout_p {c.dropout_p:g}"] if c.dropout_p else []
    parts += ["with gradients"] if c.grads else []
    return ", ".join(parts)


def call_lines(c: Call) -> list[str]:
    """Which kernel, why no faster one, and what is known of its numbers."""
    modules = tuple(n for n in c.modules if n)
    lines = [f"at {c.place}" + (f", in {_modules(modules, 1)}" if modules else "")]
    lines.append(f"ran: {c.ran}" if c.ran else f"raised: {c.error.splitlines()[0] if c.error else ''}")
    lines += [f"  not {name}: {reason}" for name, reasons in c.reasons.items() for reason in reasons]
    if c.on_cuda:
        lines.append(f"on a CUDA GPU (sm_80 or newer) SDPA would run: {c.on_cuda}")
        lines += [f"  not {name}: {reason}" for name, reasons in c.on_cuda_reasons.items() for reason in reasons]
    if c.tilewise and c.api != "tilewise.attention":
        lines.append(f"tilewise.attention would run: {c.tilewise}")
    if c.nan is not None and not c.nan.masked:
        lines.append(f"rows of NaN: {c.nan.total}, not by a mask: look for NaN or inf in q, k, v")
    if c.numerics is not None:
        same = "bit-equal to the dense computation" if c.bit_equal else "not bit-equal to the dense computation"
        verdict = "within the error budget" if c.numerics.ok else "OUTSIDE of the error budget"
        lines.append(f"numbers: {same}, {verdict} (error {c.numerics.error:.2g}, allowed {c.numerics.limit:.2g})")
    return lines + ([f"note: {c.note}"] if c.note else [])


def hand_lines(h: ByHand) -> list[str]:
    modules = tuple(n for n in h.modules if n)
    where = f", in {_modules(modules, 1)}" if modules else ""
    memory = f"{size(h.made_bytes)} a call, {size(h.alive_bytes)} alive at the last product"
    return [
        f"{h.count} x attention by hand: scores {h.shape} {h.dtype}{where}",
        f"  scores at {h.scores}, softmax at {h.softmax}, average at {h.average}",
        f"  {h.tensors} tensors of that size, {memory}",
    ]


def step_title(r: Report) -> str:
    step, (n, alone) = r.step, _timed(r._watch).values()
    assert step is not None
    of = "the first and only one, with its warm-up" if n == 1 else f"median of {n - 1} after the first"
    of += f"; its length is that of {alone} more without the doctor" if alone else ""
    of += ", the doctor's own time included" if r._watch.times.inflated else ""
    return f"{step.kind} step, {1e3 * step.seconds:.1f} ms ({of})"


def _timed(w: Watch) -> dict[str, int]:
    """How many steps were profiled, and how many were timed without the doctor."""
    return {"timed": len(of_one_kind(w.times.steps)), "alone": len(w.times.alone)}


def shares(step: Step) -> list[tuple[str, float, float]]:
    """(part, seconds, share), the largest first."""
    parts = sorted(step.parts.items(), key=lambda item: -item[1])
    return [(part, seconds, seconds / step.seconds if step.seconds else 0.0) for part, seconds in parts]


def _call(c: Call) -> dict[str, Any]:
    return _plain({n: getattr(c, n) for n in c.__dataclass_fields__} | {"count": c.count})


def _plain(x: Any) -> Any:
    """Named tuples as dicts, other tuples as lists."""
    if hasattr(x, "_asdict"):
        return _plain(x._asdict())
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    return [_plain(v) for v in x] if isinstance(x, list | tuple) else x
