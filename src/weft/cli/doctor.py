"""`weft doctor`: check this machine."""

from __future__ import annotations

import typer

from weft.cli import app
from weft.cli._checks import run_checks
from weft.cli._command import Command
from weft.cli._show import JsonOption, console, emit, table


@app.command(cls=Command)
def doctor(json: JsonOption = None) -> None:
    """Check this machine, with a remedy for each failed check."""
    checks = run_checks()
    wrong = [each for each in checks if not each.ok]
    fit = not any(each.required for each in wrong)
    rows = [{"check": each.check, "ok": each.ok, "found": each.found, "remedy": each.remedy} for each in checks]
    emit({"ok": fit, "rows": rows}, json)
    out = console(json)
    shown = [[each.check, "ok" if each.ok else "!!", each.found] for each in checks]
    table(out, ["check", "", "found"], shown)
    for each in wrong:
        word = "" if each.required else " (optional)"
        out.print(f"\n!! {each.check}{word}: {each.remedy}", markup=False)
    out.print("\nThis machine can train." if fit else "\nThis machine cannot train yet; see above.")
    if not fit:
        raise typer.Exit(1)
