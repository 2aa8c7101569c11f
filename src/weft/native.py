"""Compiles the C++ sources of this package once per machine, if there is a compiler."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)


def load(source: Path, flags: Sequence[str], without: str) -> ctypes.CDLL | None:
    """The library built from one source; None if it cannot be built. `without` names the consequence in the log."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log.info("no C++ compiler was found, so %s", without)
        return None
    try:
        return ctypes.CDLL(str(_built(source, compiler, flags)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("%s could not be built (%s), so %s", source.name, error, without)
        return None


def _built(source: Path, compiler: str, flags: Sequence[str]) -> Path:
    """The library for this source, compiler and processor, from the user's cache or newly built."""
    about = [source.read_bytes(), " ".join([compiler, *flags]).encode(), _processor().encode()]
    name = f"{source.stem}-{hashlib.sha256(b'/'.join(about)).hexdigest()[:16]}.so"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    if (home / name).exists():
        return home / name
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as aside:
        made = Path(aside) / name
        command = [compiler, *flags, "-o", str(made), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        os.replace(made, home / name)
    return home / name


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("flags")), platform.machine())
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
