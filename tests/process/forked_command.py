"""`weft` in a process that is forked from one which has imported torch: most of a short command is that import."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile

from weft import cli

FOLDER = "TESTS_FOLDER"
"""The variable with the folder in which the command runs."""

for name in cli.COMMANDS:
    importlib.import_module(f"weft.cli.{name}")


def main() -> None:
    os.chdir(os.environ.pop(FOLDER))
    sys.argv[0] = "weft"
    tempfile.tempdir = None  # TMPDIR is this command's own
    cli.main()
