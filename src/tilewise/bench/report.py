"""Rows as one HTML page that needs nothing else: pictures as data, tables, versions, and why rows failed."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from html import escape

from .plots import pictures
from .records import COLUMNS, Row, grouped, machine, panel, timed, title, worded

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #222 }
h2 { margin-top: 2.2rem } h3 { margin-bottom: .3rem; font-size: 1rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top }
th { border-bottom: 2px solid #888 } .text { text-align: left } img { max-width: 100% }
"""
_CAPTIONS = {
    "speed": "Speed over the length",
    "memory": "Peak memory beyond the inputs, over the length",
    "roofline": "Roofline: speed over arithmetic intensity, and what a matmul and a copy reached in the same run",
}


def page(rows: list[Row]) -> str:
    """The HTML document of rows as ``records.read`` gives them. ValueError without matplotlib, if anything is timed."""
    measured, failed = timed(rows), [row for row in rows if row["reason"] is not None]
    parts = [
        f"<h1>Attention: {len(measured)} measurements, {len(failed)} rows without one</h1>",
        *_surroundings(rows),
        *(_pictures(measured) if measured else ["<p>No row has a time.</p>"]),
        *_tables(measured),
        *_kernels(measured),
        *_failures(failed),
    ]
    head = f'<meta charset="utf-8"><title>tilewise bench</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _surroundings(rows: list[Row]) -> Iterable[str]:
    """Device, versions, seed and ceilings, once for each combination that there is."""
    yield "<h2>Where and with what</h2>"

    def facts(row: Row) -> str:
        found = {name: row.get(name) for name in ("device", "device_facts", "versions", "seed", "rounds")}
        return json.dumps(found, sort_keys=True)

    for group in grouped(rows, facts).values():
        row = group[0]
        about = {"device": row.get("device"), **row.get("device_facts", {}), **row.get("versions", {})}
        about |= {"seed": row.get("seed"), "rounds": row.get("rounds"), "measured": _when(group), "rows": len(group)}
        for dtype, same in grouped(timed(group), lambda r: r["dtype"]).items():
            matmul, copy = same[0]["matmul_ceiling_tflops"], same[0]["copy_ceiling_gb_per_s"]
            about[f"ceilings, {dtype}"] = f"matmul {matmul:.4g} TFLOP/s, copy {copy:.4g} GB/s"
        yield table(("", ""), [(name, "" if x is None else str(x)) for name, x in about.items()], text=2)


def _when(group: list[Row]) -> str:
    times = sorted(row["measured_at"] for row in group if row.get("measured_at"))
    return f"{times[0]} to {times[-1]}" if times else ""


def _pictures(rows: list[Row]) -> Iterable[str]:
    for name, png in pictures(rows).items():
        data = base64.b64encode(png).decode()
        yield f'<h2>{escape(_CAPTIONS[name])}</h2><img alt="{name}" src="data:image/png;base64,{data}">'


def _tables(rows: list[Row]) -> Iterable[str]:
    yield "<h2>Numbers</h2><p>ms is the median of the calls, p20 and p80 are their quantiles, spread is their distance"
    yield "over the median. TFLOP/s count what the mask keeps. Peak is memory beyond the inputs. The bytes of the model"
    yield "are counted, not measured.</p>"
    for group in grouped(rows, panel).values():
        yield f"<h3>{escape(title(group[0]))} — {escape(machine(group[0]))}</h3>"
        ordered = sorted(group, key=lambda row: (row["length"], row["p50_s"]))
        lines = [(row["backend"], str(row["length"]), *worded(row).values()) for row in ordered]
        yield table(("backend", "L", *(heading for heading, _, _ in COLUMNS)), lines, text=1)


def _kernels(rows: list[Row]) -> Iterable[str]:
    yield "<h2>What ran</h2><p>By torch.profiler: kernels on CUDA, PyTorch's operators on a CPU.</p>"
    for row in rows:
        lines = [(k["name"], f"{k['calls']:.3g}", f"{1e3 * k['seconds']:.3g}") for k in row.get("kernels") or []]
        summary = f"{row['backend']}: {title(row, length=True)}"
        yield f"<details><summary>{escape(summary)}</summary>{table(('name', 'calls', 'ms'), lines, text=1)}</details>"


def _failures(rows: list[Row]) -> Iterable[str]:
    yield f"<h2>Rows without a measurement: {len(rows)}</h2>"
    lines = [(row["backend"], title(row, length=True), row["reason"]) for row in rows]
    yield table(("backend", "case", "reason"), lines, text=3) if lines else "<p>None.</p>"


def table(headings: Iterable[str], lines: Iterable[Iterable[str]], text: int) -> str:
    """An HTML table; the first ``text`` columns are words, the others numbers."""

    def line(tag: str, cells: Iterable[str]) -> str:
        made = (f"<{tag}{' class=text' if n < text else ''}>{escape(x)}</{tag}>" for n, x in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    return "<table>" + line("th", headings) + "".join(line("td", cells) for cells in lines) + "</table>"
