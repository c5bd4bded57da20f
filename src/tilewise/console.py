"""The options and the tables of the ``tilewise`` command, with typer and rich.

Each command collects plain data (``cli.py``, ``demo.py``), then prints it: as one JSON document with ``--json``, else
for people. Progress goes to stderr, and only to a terminal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from . import __version__, cli
from . import demo as demo_parts
from .cli import Facts

app = typer.Typer(
    help="Exact tiled attention for PyTorch: what is here, what would run, and whether it is right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or meta (explain only).")]
HERE = "cuda" if torch.cuda.is_available() else "cpu"


def out() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:  # a file has no width: let tables have theirs
        console.width = 140
    return console


def err() -> Console:
    return Console(stderr=True, highlight=False)


def show(facts: Facts, as_json: bool, for_people: Callable[[Facts, Console], None]) -> None:
    if as_json:
        print(json.dumps(cli.plain(facts), indent=2, allow_nan=False))
    else:
        for_people(facts, out())


@contextmanager
def usage(as_json: bool) -> Iterator[None]:
    """What the user wrote cannot be meant: say so without a traceback, exit code 2."""
    try:
        yield
    except (ValueError, TypeError) as e:
        if as_json:
            print(json.dumps({"error": str(e)}, indent=2))
        else:
            err().print(f"Error: {e}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# --- info -----------------------------------------------------------------------------------------


@app.command()
def info(as_json: Json = False) -> None:
    """Versions, devices, backends, and what each backend can run here."""
    show(cli.info(), as_json, print_info)


def print_info(facts: Facts, to: Console) -> None:
    to.print(", ".join(f"{name} {v or 'not installed'}" for name, v in facts["versions"].items()))
    for device, about in facts["devices"].items():
        to.print(f"[bold]{device}[/]: " + ", ".join(_fact(name, x) for name, x in about.items()))
        to.print(f"  {facts['plain_call'][device]}", style="dim", markup=False)
        to.print(f"  runs on: {facts['automatic'][device] or 'nothing'}")
    env = facts["TILEWISE_BACKEND"]
    known = "" if env is None or all(n.strip() in facts["backends"] for n in env.split(",")) else " (no such backend)"
    to.print(f"TILEWISE_BACKEND: {'not set' if env is None else env + known}", markup=False)
    table = Table("backend", *facts["devices"], title="Can it run that call?", title_justify="left", show_lines=True)
    for name, backend in facts["backends"].items():
        cells = [_reasons(backend["devices"][device]) for device in facts["devices"]]
        table.add_row(Text.assemble((name, "bold"), "\n", (backend["summary"], "dim")), *cells)
    to.print(table)


def _fact(name: str, x: Any) -> str:
    return {"threads": f"{x} threads", "memory_bytes": _bytes(x)}.get(name, str(x)) if isinstance(x, int) else str(x)


def _reasons(reasons: list[dict]) -> Text:
    if not reasons:
        return Text("yes", "green")
    return Text("no: " + "; ".join(r["why"] + (f" (fix: {r['fix']})" if r["fix"] else "") for r in reasons), "yellow")


# --- explain --------------------------------------------------------------------------------------


@app.command()
def explain(
    shape: Annotated[str, typer.Option(metavar="B,Hq,Lq,D", help="Shape of the query.")],
    kv: Annotated[
        str | None, typer.Option(metavar="B,Hkv,Lk,Dv", help="Key and value; left out: as the query.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp64, fp32, bf16 or fp16.")] = "bf16",
    device: Device = HERE,
    mask: Annotated[
        str | None, typer.Option(help='For example "causal & window(256, 0)" or "key_lengths([9, 7])".')
    ] = None,
    softcap: Annotated[float | None, typer.Option(help="c * tanh(s / c) of the scores.")] = None,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0,
    sinks: Annotated[bool, typer.Option("--sinks", help="With attention sinks.")] = False,
    bias: Annotated[str | None, typer.Option(metavar="B,H,Lq,Lk", help="With a bias of this shape.")] = None,
    grad: Annotated[bool, typer.Option(help="Gradients of all inputs, bias and sinks included.")] = False,
    lse: Annotated[bool, typer.Option("--lse", help="The log-sum-exp as an output too.")] = False,
    backend: Annotated[str | None, typer.Option(help="Only this one, or the first of a,b,c.")] = None,
    cost: Annotated[
        bool, typer.Option("--cost", help="FLOPs, bytes and least time too; measures the device, but for meta.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What a call would run, and every reason why not the others. The call itself is not computed.

    Exit code 0 if a backend can run it, 2 if none can.
    """
    with usage(as_json):
        call = cli.Described(shape, kv, dtype, device, mask, softcap, dropout, sinks, bias, grad, lse, backend)
        answer = cli.explain(call)
        counted = {"cost": cli.cost(call)} if cost else {}
    show({"text": str(answer), **answer.to_dict(), **counted}, as_json, print_explanation)
    raise typer.Exit(0 if answer.chosen else 2)


def print_explanation(facts: Facts, to: Console) -> None:
    text = Text(facts["text"])
    text.highlight_regex(r"(?m)^runs: .*$", "bold green" if facts["chosen"] else "bold red")
    text.highlight_regex(r"(?m)^\w+: can run it$", "green")
    text.highlight_regex(r"(?m)^\w+: cannot$", "yellow")
    to.print(text, soft_wrap=True)
    if "cost" in facts:
        print_cost(facts["cost"], to)


def print_cost(facts: Facts, to: Console) -> None:
    c, measured = facts["ceilings"], facts["ceilings"] is not None
    table = Table("", "FLOPs", "bytes", "FLOPs/byte", *(["time, at least"] if measured else []), box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("standard", "tiled"):
        for which, work in facts[name].items():
            time = [f"{1e3 * work['predicted_seconds']:.3g} ms"] if measured else []
            flops, intensity = f"{work['flops']:.3e}", f"{work['intensity']:.1f}"
            table.add_row(f"{name} {which}", flops, _bytes(work["bytes"]), intensity, *time)
    to.print(table)
    one, out, stats = (_bytes(facts[f"{name}_bytes"]) for name in ("score_matrix", "output", "statistics"))
    (m, n), (bm, bn), cache = facts["machine"].values()
    lines = [
        f"{facts['pairs']:,} pairs of a query and a key, of which the mask keeps {facts['visible']:,}",
        f"intermediates in memory: S and P of standard, {one} each; the log-sum-exp of tiled, {stats}; O is {out}",
        f"tiles of {m} x {n} forward and {bm} x {bn} backward, a cache of {_bytes(cache)}",
    ]
    if measured:
        flops, copied = c["matmul_flops_per_s"] / 1e9, c["copy_bytes_per_s"] / 1e9
        lines.append(f"time, at least: max(FLOPs / {flops:.4g} GFLOP/s, bytes / {copied:.4g} GB/s), as measured now")
    to.print(*lines, sep="\n", soft_wrap=True)


# --- verify ---------------------------------------------------------------------------------------


@app.command()
def verify(
    backend: Annotated[
        list[str] | None, typer.Option(help="Backend to judge; repeatable. Left out: the automatic ones.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp64, fp32, bf16, fp16; repeatable. Left out: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few problems of each family.")] = False,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Judge backends against the dense computation in fp64: outputs and gradients.

    A check passes when the error is at most twice that of the dense computation in the same dtype, plus a few
    roundings. Exit code 1 if any fails, or if nothing could be checked.
    """
    with usage(as_json):
        todo = cli.jobs(backend or [], dtype or [], quick, device)
    facts = cli.verify(todo, device, _progress)
    show(facts, as_json, print_verdicts)
    raise typer.Exit(0 if facts["ok"] else 1)


def _progress(todo: list) -> Iterable:
    return track(todo, "judging", console=err(), transient=True, disable=not err().is_terminal)


def print_verdicts(facts: Facts, to: Console) -> None:
    to.print(_verdict_table(facts, wide=to.width >= 110))
    for f in facts["failures"]:
        to.print(
            f"FAIL {f['problem']} | {f['backend']} {f['dtype']} {f['quantity']}: {f['note']} "
            f"(error {f['error']:.3g}, dense {f['dense_error']:.3g}, limit {f['limit']:.3g})",
            style="red", markup=False, soft_wrap=True,
        )  # fmt: skip
    if not facts["checks"]:
        to.print("Nothing was checked." + (" A refusal:" if facts["refused"] else ""))
        to.print(*(r["note"] for r in facts["refused"][:1]), markup=False, soft_wrap=True)
    misses = len(facts["failures"])
    to.print(f"{facts['checks']} checks, {misses} failed", style="bold green" if facts["ok"] else "bold red")


def _verdict_table(facts: Facts, wide: bool) -> Table:
    title = f"Errors against fp64 on {facts['device']}, root mean square"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("backend", "dtype", "family"):
        table.add_column(name, no_wrap=True)
    for name in ("checks", "refused", "worst", "dense", "/ limit", ""):
        table.add_column(name, no_wrap=True, justify="right")
    if wide:
        table.add_column("the worst check", overflow="ellipsis", style="dim")
    for row in facts["rows"]:
        passed = Text("ok", "green") if row["checks"] else Text("-", "dim")
        table.add_row(
            row["backend"], row["dtype"], row["family"], str(row["checks"]), str(row["refused"] or ""),
            _number(row["error"], ".2e"), _number(row["dense_error"], ".2e"), _number(row["ratio"], ".2g"),
            passed if row["ok"] else Text("FAIL", "bold red"), *([Text(row["worst"] or "")] if wide else []),
        )  # fmt: skip
    return table


def _number(x: float | None, spec: str) -> str:
    return "" if x is None else format(x, spec)


# --- demo -----------------------------------------------------------------------------------------


@app.command()
def demo(
    length: Annotated[int, typer.Option(min=1, help="Tokens of the long sequence.")] = 16384,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Left out: the faster of one and all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """A real model, a long sequence and an explanation, on this CPU, in a minute or two."""
    with err().status("starting") if err().is_terminal else _silent() as status:
        facts = demo_parts.demo(length, threads, status.update)
    show(facts, as_json, print_demo)
    raise typer.Exit(0 if facts["ok"] else 1)


@contextmanager
def _silent() -> Iterator[Any]:
    class Status:
        def update(self, text: str) -> None: ...

    yield Status()


def print_demo(facts: Facts, to: Console) -> None:
    to.rule("[bold]1. The same sentences, three attention functions", align="left")
    print_sentences(facts["sentences"], to)
    to.print()
    to.rule("[bold]2. A long sequence, forward and backward", align="left")
    print_long(facts["long_sequence"], to)
    to.print()
    to.rule("[bold]3. What would run, and why not the others", align="left")
    print_explanation(facts["explain"], to)


def print_sentences(facts: Facts, to: Console) -> None:
    if "missing" in facts:
        to.print(f"Left out: it needs a model. {facts['missing']}", style="yellow", markup=False)
        return
    runs, (batch, tokens) = facts["runs"], facts["tokens"]
    to.print(f"{facts['model']}: {batch} sentences padded to {tokens} tokens, {facts['padding']} of them padding")
    found = Table("query", "nearest sentence", "cosine")
    for query, which, cosine in zip(
        demo_parts.QUERIES, runs["tilewise"]["nearest"], runs["tilewise"]["similarity"], strict=True
    ):
        found.add_row(query, demo_parts.SENTENCES[which], f"{cosine:.3f}")
    to.print(found)
    table = Table("attention", "time", "largest difference of an embedding", "calls of tilewise::forward")
    for name, run in runs.items():
        table.add_row(
            name, f"{1e3 * run['seconds']:.1f} ms", f"{run['largest_difference']:.1e}", str(run["tilewise_calls"])
        )
    to.print(table)
    same = facts["same_nearest"]
    to.print("All three find the same sentences." if same else "They DISAGREE.", style="green" if same else "bold red")


def print_long(facts: Facts, to: Console) -> None:
    b, h, n, d = facts["shape"]
    to.print(
        f"{b} sequence, {h} heads, D = {d}, {facts['dtype']}, causal, {facts['threads']} threads. "
        f"Memory beyond the inputs, which are {_bytes(facts['inputs_bytes'])} at {n} tokens; "
        f"one L x L matrix of scores would be {_bytes(facts['one_score_matrix_bytes'])}."
    )
    table = Table("tokens", "tiled: peak", "of it results", "time", "dense: peak", "time", "largest difference")
    for column in table.columns:
        column.justify = "right"
    for row in facts["rows"]:
        tiled, dense = row["tiled"], row["dense"]
        table.add_row(
            str(row["length"]), _bytes(tiled["peak_bytes"]), _bytes(tiled["kept_bytes"]), f"{tiled['seconds']:.2f} s",
            _bytes(dense["peak_bytes"]) + ("" if dense["measured"] else " computed"),
            f"{dense['seconds']:.2f} s" if dense["measured"] else "not run",
            _number(row.get("largest_difference"), ".1e"),
        )  # fmt: skip
    to.print(table)
    to.print(
        "Peaks are measured allocation by allocation. 'computed': a L + b L^2 through the measured dense peaks.",
        style="dim",
    )


def _bytes(n: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if n >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{n / 2**10:.1f} KiB" if n else "0 B"


# Further commands, each in a file of its own that adds itself to ``app``.
from . import console_bench  # noqa: E402, F401  isort: skip
from . import console_doctor  # noqa: E402, F401  isort: skip
from . import console_trace  # noqa: E402, F401  isort: skip
