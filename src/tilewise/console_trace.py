"""``tilewise trace`` and ``tilewise tiles``: their options and tables. Importing this adds them to the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import cli
from . import tiles as maps
from . import trace as tracing
from .console import Json, app, show, usage
from .maskexpr import parse_mask
from .tiles import Facts

STYLES = {"EMPTY": "dim", "PARTIAL": "yellow", "FULL": "green"}


# --- trace ----------------------------------------------------------------------------------------


@app.command()
def trace(
    scores: Annotated[
        str | None, typer.Option(metavar="S,S,...", help="Given scores, -inf where masked; rows separated by ;.")
    ] = None,
    values: Annotated[str | None, typer.Option(metavar="V,V,...", help="With --scores: a value for each key.")] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="B,H,L,D", help="Random q, k and v of this shape instead.")
    ] = None,
    mask: Annotated[str | None, typer.Option(help='For example "causal & window(4, 0)".')] = None,
    block_m: Annotated[int, typer.Option(help="Queries of a tile.")] = 2,
    block_n: Annotated[int, typer.Option("--block-n", "--block", help="Keys of a tile.")] = 2,
    seed: Annotated[int | None, typer.Option(help="With --shape: another seed gives other numbers.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that steps through the tiles.")] = None,
    as_json: Json = False,
) -> None:
    """A small problem tile by tile: scores, verdicts, and the rows' state (m, l, acc) before and after each."""
    with usage(as_json):
        found = traced(scores, values, shape, mask, block_m, block_n, seed)
        if html is not None:
            write(html, tracing.page(found).encode())
    show(found.to_dict(), as_json, print_trace)
    if html is not None and not as_json:
        print(f"wrote {html}: open it in a browser, and step with the arrow keys")


def traced(
    scores: str | None, values: str | None, shape: str | None, mask: str | None, block_m: int, block_n: int,
    seed: int | None,
) -> tracing.Trace:  # fmt: skip
    """The trace that the options describe; ValueError when they do not go together."""
    term = None if mask is None else parse_mask(mask)
    if shape is not None and scores is None and values is None:
        sizes = cli.parse_shape("--shape B,H,L,D", shape)
        return tracing.random_problem(sizes, term, block_m=block_m, block_n=block_n, seed=seed or 0)
    if scores is None or values is None or shape is not None or seed is not None:
        raise ValueError("give either --scores and --values, or --shape and perhaps --seed")
    v = tracing.parse_numbers("--values", values)
    if v.shape[0] != 1:
        raise ValueError(f"--values takes one number for each key, without ;, got {values!r}")
    s = tracing.parse_numbers("--scores", scores)
    return tracing.of_scores(s, v[0], term, block_m=block_m, block_n=block_n)


def write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None


def print_trace(facts: Facts, to: Console) -> None:
    size = facts["sizes"]
    for line in facts["about"]:
        to.print(line, markup=False, soft_wrap=True)
    to.print(f"tiles of {size['block_m']} queries by {size['block_n']} keys; a row's state is m, l, acc")
    many = size["batch"] * size["heads"] > 1  # else everything is of batch entry 0, head 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in (*(["batch, head"] if many else []), "keys", "verdict", "row", "scores"):
        table.add_column(name, no_wrap=name != "scores")
    for name in ("before", "of the tile alone", "after"):
        table.add_column(name)
    for step in facts["steps"]:
        for cells in _step_rows(step):
            table.add_row(*([f"{step['batch']}, {step['head']}"] if many else []), *cells)
        last = step["cols"][1] == size["len_k"]
        if last:  # of these queries
            table.add_section()
    to.print(table)
    answer = Table(*(["batch, head"] if many else []), "row", "output acc / l", "lse m + log(l)", box=box.SIMPLE_HEAD)
    for b, entry in enumerate(facts["out"]):
        for h, head in enumerate(entry):
            for i, o in enumerate(head):
                where = [f"{b}, {h}"] if many else []
                answer.add_row(*where, str(i), _numbers(o, _rounded), _rounded(facts["lse"][b][h][i]))
    to.print(answer)


def _step_rows(step: Facts) -> list[list[Text | str]]:
    (i0, i1), (j0, j1) = step["rows"], step["cols"]
    keys, verdict = _span(j0, j1), Text(step["verdict"], STYLES[step["verdict"]])
    if step["scores"] is None:
        return [[keys, verdict, _span(i0, i1), Text("skipped", "dim"), "", "", ""]]
    states = (step["before"], step["tile"], step["after"])
    return [
        [keys, verdict, str(i), _numbers(step["scores"][n], _number), *(_state(x, n) for x in states)]
        for n, i in enumerate(range(i0, i1))
    ]


def _span(first: int, stop: int) -> str:
    return str(first) if stop == first + 1 else f"{first}-{stop - 1}"


def _state(x: Facts, row: int) -> str:
    acc = _numbers(x["acc"][row], _number)
    return f"{_number(x['m'][row])}, {_number(x['l'][row])}, " + (f"[{acc}]" if len(x["acc"][row]) > 1 else acc)


def _numbers(xs: list, each: Callable[[float | str], str]) -> str:
    return ", ".join(each(x) for x in xs)


def _number(x: float | str) -> str:
    """Four decimals, or four digits where these say little; "-inf" and "nan" are text already."""
    if isinstance(x, str):
        return x
    if x != 0 and not 1e-3 <= abs(x) < 1e6:
        return f"{x:.4g}"
    return f"{x:.4f}".rstrip("0").rstrip(".")


def _rounded(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.5g}"


# --- tiles ----------------------------------------------------------------------------------------


@app.command()
def tiles(
    mask: Annotated[str, typer.Option(help='For example "causal & window(256, 0)" or "key_lengths([9, 7])".')],
    length: Annotated[str, typer.Option(metavar="L", help="Tokens; or queries,keys where these differ.")],
    block_m: Annotated[int, typer.Option(help="Queries of a tile.")] = 128,
    block_n: Annotated[int, typer.Option(help="Keys of a tile.")] = 128,
    png: Annotated[Path | None, typer.Option(help="Write the picture as a PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """The tile map of a mask: what is skipped, what is masked, what is taken whole."""
    with usage(as_json):
        len_q, len_k = maps.parse_length(length)
        facts = maps.tile_facts(mask, len_q, len_k, block_m, block_n)
        if png is not None:
            write(png, maps.png(facts))
    show(facts, as_json, print_tiles)
    if png is not None and not as_json:
        print(f"wrote {png}")


def print_tiles(facts: Facts, to: Console) -> None:
    to.print(
        f"{facts['mask']}, {facts['len_q']} queries, {facts['len_k']} keys, "
        f"tiles of {facts['block_m']} x {facts['block_n']}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    scale = (1, 1)
    for b, lines in enumerate(facts["maps"]):
        if facts["batch"] > 1:
            to.print(f"batch entry {b}")
        small, scale = maps.shrink(lines)
        for line in small:
            to.print("  " + "".join(2 * maps.MARKS[x] for x in line), markup=False)
    one = "a tile" if scale == (1, 1) else f"{scale[0]} x {scale[1]} tiles, {maps.MARKS['P']} also where these differ"
    to.print(f"each pair of characters is {one}\n", style="dim")
    for letter, name in (("F", "full"), ("P", "partial"), ("E", "empty")):
        share = facts[name] / facts["total"]
        to.print(f"{maps.MARKS[letter]} {facts[name]:>7} of {facts['total']} ({share:6.1%})  {maps.WORDS[letter]}")
    to.print(
        f"FLOPs: the tiles visited hold {facts['share_visited']:.1%} of the unmasked problem's, "
        f"the pairs kept {facts['share_visible']:.1%}"
    )
