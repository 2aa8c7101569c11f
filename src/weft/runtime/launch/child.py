"""One process of a launched run: runs the job as a script, and reports a failure to the launcher."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import logging
import os
import runpy
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from weft.environment import LocalLauncher, ProcessPlace
from weft.errors import JobError, UserError
from weft.runtime.launch.process_groups import TERMINATED, die_with_launcher, end_group_with_parent, name_process


def main() -> None:
    die_with_launcher()
    end_group_with_parent()
    place = ProcessPlace.from_env()
    name_process(f"weft-worker-{place.rank}" if place.server is None else f"weft-server-{place.server}")
    from weft.runtime import run  # imports torch, which takes seconds
    from weft.runtime.loop.step_hooks import require_before_step

    def joined() -> None:
        if not run.joined:
            raise JobError(f"{Path(job).name} trains without weft.init(), so each process works alone; call it first")

    require_before_step(joined)
    _show_log()
    job = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(job).absolute().parent)
    status = 1
    try:
        runpy.run_path(job, run_name="__main__")
        if not run.joined:
            raise JobError(
                f"{Path(job).name} ended without calling weft.init(), so each process worked alone; see `weft --help`"
            )
        run.close()
        _exit(0)
    except SystemExit as leaving:
        if leaving.code is None or leaving.code == 0:
            run.close()
            _exit(0)
        status = leaving.code if isinstance(leaving.code, int) else 1
        if status == TERMINATED:  # the run is saved, and all processes exit
            run.close(well=False)
            _exit(TERMINATED)
        _leave_word("SystemExit", f"the job exited with status {leaving.code}", "", user=status == 2)
    except UserError as error:
        status = 2
        _leave_word(type(error).__name__, str(error), "", user=True)
    except BaseException as error:
        _leave_word(type(error).__name__, str(error), _own_traceback(error), user=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # peers may be gone, so skip orderly shutdown


def _exit(status: int) -> NoReturn:
    """Exit as Python does, except that modules are not freed: that would copy the memory shared with the template."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    for file in (*files, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or not open for writing
            file.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


def _show_log() -> None:
    """Show all messages of process 0. Others would repeat them, except about their own part of a checkpoint."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("weft").setLevel(logging.INFO)
    else:
        logging.getLogger("weft").setLevel(logging.ERROR)
        logging.getLogger("weft.runtime.checkpoint.writer").setLevel(logging.WARNING)


def _own_traceback(error: BaseException) -> str:
    """The traceback from the job's first line on, without the frames that started it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _leave_word(kind: str, message: str, trace: str, *, user: bool) -> None:
    folder = LocalLauncher.from_env().failures
    if folder is None:
        sys.stderr.write(trace or message + "\n")
        return
    word = {"kind": kind, "message": message, "traceback": trace, "user": user, "time": time.time()}
    part = folder / f"{os.environ['RANK']}.part"
    try:
        part.write_text(json.dumps(word), encoding="utf-8")
        part.rename(part.with_suffix(".json"))
    except OSError:
        sys.stderr.write(trace or message + "\n")


if __name__ == "__main__":
    main()
