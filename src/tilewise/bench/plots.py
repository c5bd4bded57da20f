"""Pictures of rows: speed and memory over the length, and a roofline. They need the extra ``plots`` (matplotlib)."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable
from typing import Any

from .records import Row, grouped, machine, panel, timed, title

_COLUMNS = 3  # panels beside each other
_MARKERS = {"forward": "o", "backward": "s", "both": "^"}


def pictures(rows: list[Row]) -> dict[str, bytes]:
    """PNGs by name: speed, memory, roofline. ValueError without matplotlib, or if no row has a time."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install 'tilewise[plots]'")
    rows = timed(rows)
    if not rows:
        raise ValueError("no row has a time, so there is nothing to plot; the report shows the reasons")
    return {name: _png(draw(rows)) for name, draw in (("speed", speed), ("memory", memory), ("roofline", roofline))}


def speed(rows: list[Row]) -> Any:
    """TFLOP/s over the length, a line for each backend, a panel for each case and direction."""
    return _over_length(rows, "tflops", "TFLOP/s", lambda axes: axes.set_ylim(bottom=0))


def memory(rows: list[Row]) -> Any:
    """Peak memory beyond the inputs over the length, both logarithmic: linear memory has slope 1."""
    rows = [{**row, "peak_mib": row["peak_bytes"] / 2**20} for row in rows if row["peak_bytes"]]
    return _over_length(rows, "peak_mib", "peak MiB", _doublings)


def _doublings(axes: Any) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")


def _over_length(rows: list[Row], key: str, label: str, finish: Callable[[Any], object]) -> Any:
    panels = grouped(rows, panel)
    figure, all_axes = _panels(len(panels))
    colours = _colours(rows)
    for axes, group in zip(all_axes, panels.values(), strict=True):
        for backend, points in grouped(sorted(group, key=lambda row: row["length"]), lambda r: r["backend"]).items():
            lengths = [p["length"] for p in points]
            axes.plot(lengths, [p[key] for p in points], "o-", ms=4, color=colours[backend], label=backend)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["length"] for row in group}), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(title(group[0]), fontsize=9)
        axes.set_xlabel("length")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        finish(axes)
        axes.legend(fontsize=8)
    return figure


def roofline(rows: list[Row]) -> Any:
    """TFLOP/s over FLOPs per byte of the model, below what a matmul and a copy reached in the same run.

    Source: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model".
    """
    rows = [row for row in rows if row["intensity"]]
    panels = grouped(rows, lambda row: (machine(row), row["dtype"]))
    figure, all_axes = _panels(len(panels))
    colours = _colours(rows)
    for axes, group in zip(all_axes, panels.values(), strict=True):
        _roof(axes, group)
        for (backend, direction), points in grouped(group, lambda r: (r["backend"], r["direction"])).items():
            x, y = [p["intensity"] for p in points], [p["tflops"] for p in points]
            marker, label = _MARKERS[direction], f"{backend} {direction}"
            axes.scatter(x, y, s=22, marker=marker, color=colours[backend], label=label, zorder=3)
        axes.set_title(f"{group[0]['dtype']} on {machine(group[0])}", fontsize=9)
        axes.set_xlabel("FLOPs per byte")
        axes.set_ylabel("TFLOP/s")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _roof(axes: Any, group: list[Row]) -> None:
    """Both ceilings: the copy's slope up to the ridge, and the matmul's height."""
    matmul = max(row["matmul_ceiling_tflops"] for row in group)
    copy = max(row["copy_ceiling_gb_per_s"] for row in group) / 1e3  # TB/s: TFLOP/s at one FLOP per byte
    ridge = matmul / copy
    low = min([ridge, *(row["intensity"] for row in group)]) / 4
    high = max([ridge, *(row["intensity"] for row in group)]) * 4
    axes.loglog([low, ridge], [copy * low, matmul], "k--", lw=1, label=f"copy {1e3 * copy:.3g} GB/s")
    axes.loglog([ridge, high], [matmul, matmul], "k-", lw=1, label=f"matmul {matmul:.3g} TFLOP/s")


def _panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot: no window, no state of the process

    across = min(count, _COLUMNS) or 1
    down = math.ceil(count / across) or 1
    figure = Figure(figsize=(5.2 * across, 3.8 * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def _colours(rows: list[Row]) -> dict[str, str]:
    return {name: f"C{n % 10}" for n, name in enumerate(grouped(rows, lambda row: row["backend"]))}


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
