"""``tilewise doctor``: a script under the doctor, and its report, with typer and rich."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .console import Json, app, err, show, usage
from .diagnosis import Report, run_script
from .diagnosis import report as wording


@app.command(
    context_settings={"allow_interspersed_args": False, "allow_extra_args": True, "ignore_unknown_options": True}
)
def doctor(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", help="A Python script; what follows it is its own.")],
    as_json: Json = False,
) -> None:
    """Run a script as it is and report on its attention: kernels, reasons, and six symptoms with their fixes.

    Exit code 0 if healthy, 1 if there are symptoms or the script failed, 2 if there is no such script. With --json
    the script's own output goes to stderr.
    """
    with usage(as_json), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        run = run_script(script, context.args)
    if run.error:
        err().print(run.error, style="red", markup=False, soft_wrap=True)
    facts = {"script": script, "error": run.error, **run.report.as_dict()}
    show(facts, as_json, lambda _, to: print_report(run.report, bool(run.error), to))
    raise typer.Exit(1 if run.error or not facts["healthy"] else 0)


def print_report(report: Report, failed: bool, to: Console) -> None:
    found = report.findings
    to.rule("[bold]tilewise doctor" + (", up to the error" if failed else ""), align="left")
    to.print(wording.headline(report), style="bold red" if found else "bold green", markup=False)
    for n, f in enumerate(found, 1):
        to.print()
        to.print(Text.assemble((f"{n}. {f.symptom}", "bold red"), f": {f.place}" if f.place else ""), soft_wrap=True)
        for name, text in wording.finding_lines(f):
            to.print(
                Text.assemble("   ", (f"{name}: ", "bold"), (text, "green" if name == "fix" else "")), soft_wrap=True
            )
    if report.calls:
        to.print()
        to.print("attention calls", style="bold")
    for c in report.calls:
        to.print(Text.assemble("  ", (f"{c.count} x ", "bold"), wording.describe(c)), soft_wrap=True)
        for line in wording.call_lines(c):
            to.print(Text("      " + line, _style(line)), soft_wrap=True)
    for h in report.by_hand:
        to.print()
        to.print("\n".join(wording.hand_lines(h)), markup=False, soft_wrap=True)
    if report.step is not None:
        to.print()
        to.print(wording.step_title(report), style="bold", markup=False)
        to.print(_step_table(report))
    if report.unseen:
        to.print("not seen: " + "; ".join(report.unseen), style="dim", markup=False, soft_wrap=True)


def _style(line: str) -> str:
    return "bold" if line.startswith(("ran:", "raised:")) else "yellow" if line.startswith("  not ") else "dim"


def _step_table(report: Report) -> Table:
    step: Any = report.step
    table = Table("part of the step")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for part, seconds, share in wording.shares(step):
        table.add_row(part, f"{1e3 * seconds:.2f} ms", f"{share:.1%}")
    return table
