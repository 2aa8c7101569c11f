"""The command line. Every command is a thin wrapper around a function that can be called."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from contextlib import AbstractContextManager, nullcontext

import typer

from weft.environment import check_names
from weft.errors import UserError
from weft.runtime.launch.start import starting
from weft.runtime.launch.supervise import JobFailedError, Terminated

EXAMPLES = """\
Examples:
  weft train text -n 2                    train a bundled GPT on two workers
  weft train job.py -n 4                  train your own script
  weft train job.py -n 4 --strategy "bsp / ring / cast"
                                          train it under another strategy
  weft compare wide --hosts 4 --bandwidth 1gbit
                                          compare strategies side by side
  weft check "asp / ring"                 explain a strategy, or why it is not
                                          valid
  weft train wide -n 4 --system horovod   use a published system's strategy
  weft doctor                             check this machine

Without --strategy a run is synchronous and sends gradients directly between
workers (bsp / direct).
"""

WELCOME = f"""\
Weft: say in one line how PyTorch training is distributed.

{EXAMPLES}
`weft --help` lists all commands, `weft COMMAND --help` the options of one.
"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    epilog="\n\n".join(f"\b\n{part}" for part in EXAMPLES.split("\n\n")),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = ("train", "join", "compare", "check", "answers", "systems", "lab", "export", "doctor")


@app.callback(invoke_without_command=True)
def weft(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Run PyTorch training under a distribution strategy, compare strategies, or use that of a published system."""
    if version:
        from weft import __version__

        typer.echo(f"weft {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(WELCOME, nl=False)


def _template(words: list[str]) -> AbstractContextManager[None]:
    """A template for the processes of `weft train` and `weft compare`, which imports torch during the checks."""
    if not words or words[0] not in ("train", "compare") or {"-h", "--help"} & set(words):
        return nullcontext()
    given = re.search(r" (?:-n|--workers|--hosts)[ =]?([1-9]\d*)", " ".join(words).partition(" -- ")[0])
    emulated = words[0] == "compare" or "--hosts" in words
    module = "weft.lab.child" if emulated else "weft.runtime.launch.child"
    return starting(module, max(1, (os.cpu_count() or 1) // int(given[1] if given else 1)))


def _import_commands(words: list[str]) -> None:
    """Import the command that is called, or all for a list of them."""
    if words and words[0] != "--version":
        for name in words[:1] if words[0] in COMMANDS else COMMANDS:
            importlib.import_module(f"weft.cli.{name}")


def main() -> None:
    """Entry point. Bad input prints one sentence and exits with status 2, without a traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        check_names()
        with _template(sys.argv[1:]):
            _import_commands(sys.argv[1:])
            app()
    except UserError as error:
        sys.stderr.write(f"weft: {error}\n")
        sys.exit(2)
    except Terminated as error:
        sys.stderr.write(f"weft: {error}\n")
        sys.exit(128 + error.number)
    except JobFailedError as error:
        sys.stderr.write(f"weft: {error}\n")
        if error.status != 2 and error.traceback:
            sys.stderr.write(f"\n{error.traceback}")
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.stderr.write("weft: stopped\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
