"""The command line. Every command is a thin wrapper around a function that can be called."""

from __future__ import annotations

import importlib
import signal
import sys

import typer

from weft.errors import UserError
from weft.runtime.launch.supervise import JobFailedError, Terminated

EXAMPLES = """\
Weft: a way of distributing PyTorch training is one value.

  weft train text -n 2                                        train a bundled GPT on two local workers
  weft train job.py -n 4 --strategy "bsp / ring / cast"       train your own script under another strategy
  weft compare wide --hosts 4 --bandwidth 1gbit               compare strategies side by side on an emulated cluster
  weft check "asp / ring"                                     explain a strategy, or why it is not valid
  weft train wide -n 4 --system horovod                       use the strategy of a published system
  weft doctor                                                 check this machine

`weft --help` lists all commands, `weft COMMAND --help` the options of one.
"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
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
        typer.echo(EXAMPLES, nl=False)


def main() -> None:
    """Entry point. Bad input prints one sentence and exits with status 2, without a traceback."""
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    for name in [chosen] if chosen in COMMANDS else COMMANDS:
        importlib.import_module(f"weft.cli.{name}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except UserError as error:
        sys.stderr.write(f"weft: {error}\n")
        sys.exit(2)
    except Terminated as error:
        sys.stderr.write(f"weft: {error}\n")
        sys.exit(128 + signal.SIGTERM)
    except JobFailedError as error:
        sys.stderr.write(f"weft: {error}\n" if error.status == 2 else f"weft: {error}\n\n{error.traceback}")
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.stderr.write("weft: stopped\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
