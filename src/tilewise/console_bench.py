"""``tilewise bench``, ``plot`` and ``report``: their options and tables. Importing this adds them to the command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import cli
from .bench import adapters, ncu, plots, records, report
from .bench.cases import DIRECTIONS, Axes, Case
from .bench.runner import WRONG, Settings, sweep
from .cli import Facts
from .console import HERE, Json, app, err, show, usage
from .maskexpr import parse_mask

INTERRUPTED = 130  # the exit code of a shell command that Ctrl-C ended
T = TypeVar("T")


# --- bench ----------------------------------------------------------------------------------------


@app.command()
def bench(
    backend: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Backends and packages. Left out: all that need no L x L.")
    ] = None,
    length: Annotated[str, typer.Option(metavar="N,N,...", help="Queries, and as many keys.")] = "256,1024",
    dim: Annotated[str, typer.Option(metavar="N,N,...", help="Head dims D.")] = "64",
    heads: Annotated[str, typer.Option(metavar="N,N,...", help="Query heads.")] = "8",
    kv_heads: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Key/value heads. Left out: as many as heads.")
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,N,...", help="Batch sizes.")] = "1",
    dtype: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="fp64, fp32, bf16, fp16. Left out: bf16 on CUDA, else fp32.")
    ] = None,
    mask: Annotated[list[str] | None, typer.Option(help='"full" or such as "window(256, 0)"; repeatable.')] = None,
    causal: Annotated[
        str, typer.Option(metavar="no|yes|no,yes", help="Each mask as it is, joined with causal.")
    ] = "no",
    dropout: Annotated[str, typer.Option(metavar="P,P,...", help="Dropout probabilities.")] = "0",
    direction: Annotated[
        str, typer.Option(metavar="A,B,...", help="forward, backward (alone), both (a training step).")
    ] = "forward,backward",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each backend.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = HERE,
    count_dram: Annotated[
        bool, typer.Option("--ncu", help="Run each cell once more under ncu: bytes that DRAM moved.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append each row, as it is measured, as JSONL.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Speed and memory over a sweep of shapes, every result checked before it is timed.

    A backend that cannot run a case, fails or is wrong has a row with the reason. Ctrl-C keeps what is measured.
    Exit code 1 if a result is wrong or nothing could be timed, 130 after Ctrl-C.
    """
    with usage(as_json):
        cases = _cases(length, dim, heads, kv_heads, batch, dtype, mask, causal, dropout, device)
        how = _settings(backend, direction, rounds, seed, device, count_dram)
        if out is not None:
            _touch(out)
    facts = _sweep(cases, how, out)
    show(facts, as_json, print_rows)
    raise typer.Exit(INTERRUPTED if facts["interrupted"] else 0 if facts["ok"] else 1)


def _cases(
    length: str, dim: str, heads: str, kv_heads: str | None, batch: str, dtype: str | None, mask: list[str] | None,
    causal: str, dropout: str, device: str,
) -> list[Case]:  # fmt: skip
    """Every case that the options name; ValueError for what cannot be read."""
    for text in mask or []:
        if text != "full":
            parse_mask(text)
    dtypes = _list("--dtype", dtype or ("bf16" if device.startswith("cuda") else "fp32"), cli.parse_dtype)
    return Axes(
        batch=_list("--batch", batch, _size),
        heads=_list("--heads", heads, _size),
        kv_heads=() if kv_heads is None else _list("--kv-heads", kv_heads, _size),
        length=_list("--length", length, _size),
        dim=_list("--dim", dim, _size),
        dtype=tuple(str(d).removeprefix("torch.") for d in dtypes),
        mask=tuple(mask or ["full"]),
        causal=_list("--causal", causal, _yes),
        dropout=_list("--dropout", dropout, _probability),
    ).cases()


def _settings(backend: str | None, direction: str, rounds: int, seed: int, device: str, count_dram: bool) -> Settings:
    cli.check_device(device)
    kind = device.partition(":")[0]
    if kind == "meta":
        raise ValueError("there is nothing to measure on meta: nothing is computed there")
    if device not in ("cuda", *cli.devices()):
        raise ValueError(f"there is no device {device!r} here; there are {', '.join(cli.devices())}")
    if count_dram and kind != "cuda":
        raise ValueError(f"--ncu counts what a GPU's memory moves, and the device is {device}; use --device cuda")
    names = adapters.usual(device) if backend is None else _list("--backend", backend, lambda n: adapters.get(n).name)
    directions = _list("--direction", direction, _direction)
    return Settings(device, names, directions, rounds, seed, ncu.program() if count_dram else None)


def _list(option: str, text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """Values separated by commas, each once; ValueError names the option."""
    try:
        return tuple(dict.fromkeys(read(word.strip()) for word in text.split(",")))
    except ValueError as e:
        raise ValueError(f"{option} {text!r}: {e}") from None


def _size(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise ValueError(f"{word!r} is not a size; sizes are integers from 1, separated by commas")
    return int(word)


def _probability(word: str) -> float:
    p = float(word)
    if not 0 <= p < 1:
        raise ValueError(f"a dropout probability is at least 0 and below 1, got {word}")
    return p


def _yes(word: str) -> bool:
    if word not in ("no", "yes"):
        raise ValueError(f"{word!r} is neither no nor yes")
    return word == "yes"


def _direction(word: str) -> str:
    if word not in DIRECTIONS:
        raise ValueError(f"unknown direction {word!r}; there are {', '.join(DIRECTIONS)}")
    return word


def _touch(path: Path) -> None:
    try:
        path.open("ab").close()
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None


def _sweep(cases: list[Case], how: Settings, out: Path | None) -> Facts:
    """All rows, also if Ctrl-C ends the sweep; each is in the file before the next is measured."""
    rows: list[Facts] = []
    interrupted = False
    console = err()
    try:
        with console.status("starting") if console.is_terminal else nullcontext() as status:
            for row in sweep(cases, how, status.update if status else lambda _: None):
                if out is not None:
                    records.append(out, row)
                rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    wrong = any((row["reason"] or "").startswith(WRONG) for row in rows)
    return {"ok": bool(records.timed(rows)) and not wrong, "interrupted": interrupted, "rows": rows}


_NARROW = ("ms", "spread", "TFLOP/s", "of matmul", "step ms", "peak MiB", "predicted / measured")


def print_rows(facts: Facts, to: Console) -> None:
    """A table for each case, then the reasons."""
    for group in records.grouped(records.timed(facts["rows"]), _case).values():
        heading = records.title(group[0], length=True)
        table = Table(title=Text(heading), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("backend", no_wrap=True)
        for name in _NARROW:
            table.add_column(name, justify="right", no_wrap=True)
        for row in sorted(group, key=lambda row: row["p50_s"]):
            words = records.worded(row)
            table.add_row(row["backend"], *(words[name] for name in _NARROW))
        to.print(table)
    reasons = records.grouped((r for r in facts["rows"] if r["reason"]), lambda r: (r["backend"], r["reason"]))
    for (backend, reason), group in reasons.items():
        bad = reason.startswith(WRONG)
        what = records.title(group[0], length=True) if len(group) == 1 else f"{len(group)} rows"
        to.print(f"{backend} ({what}): {reason}", style="red" if bad else "yellow", markup=False, soft_wrap=True)
    if not facts["rows"]:
        to.print("Nothing was measured.")
    if facts["interrupted"]:
        to.print(f"Interrupted after {len(facts['rows'])} rows.", style="bold red")


def _case(row: Facts) -> tuple[Any, ...]:
    return (*(row[name] for name in records.CASE), row["direction"])


# --- plot and report --------------------------------------------------------------------------------

Rows = Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Rows that tilewise bench --out wrote.")]


@app.command()
def plot(
    file: Rows,
    png_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to. Left out: beside FILE.")] = None,
    as_json: Json = False,
) -> None:
    """Pictures of a sweep: speed.png, memory.png and roofline.png."""
    with usage(as_json):
        made = plots.pictures(records.read(file))
        written = [_write((png_dir or file.parent) / f"{name}.png", png) for name, png in made.items()]
    show({"files": written}, as_json, _print_files)


@app.command(name="report")
def report_(
    file: Rows,
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")],
    as_json: Json = False,
) -> None:
    """A sweep as one HTML page that needs no network: pictures, tables, versions, and why rows failed."""
    with usage(as_json):
        written = _write(html, report.page(records.read(file)).encode())
    show({"files": [written]}, as_json, _print_files)


def _write(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None
    return str(path)


def _print_files(facts: Facts, to: Console) -> None:
    for name in facts["files"]:
        to.print(f"wrote {name}", markup=False, soft_wrap=True)
