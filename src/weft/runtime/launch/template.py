"""A process that has imported torch, from which the processes of a run are forked (Linux).

The launcher starts it with one end of a socket, as `python -m weft.runtime.launch.template FD MODULE`. Every request on
the socket is a set of file descriptors: a file with the environment and the arguments, standard output and error, and
the pipe of progress reports if the process has one, which keeps its number. The template forks twice, so that the new
process becomes a child of the launcher, which is the subreaper of everything below it. From there on the launcher
supervises it like a process that it has started itself.

The template runs no operation, starts no thread and initializes no device (OpenBLAS, which numpy loads, ends its own
threads before a fork). A forked process therefore gives the same
bits as a new one. WEFT_FORK=0 starts new processes instead.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import struct
import sys
import time
from typing import Any

from weft.runtime.launch.process_groups import die_with_launcher, die_with_parent

PRELOADED = ("torch", "torch.optim", "torch.distributed", "torch._dynamo", "weft.runtime.run")
"""Modules that every process of a run needs; `torch._dynamo` is imported by the first optimizer."""
MAX_FDS = 4
PID = struct.Struct("!i")


def main() -> None:
    die_with_launcher()
    sock, threads = socket.socket(fileno=int(sys.argv[1])), os.environ.get("OMP_NUM_THREADS")
    gc.disable()  # a third of the time, and a fork would copy the memory that a collection touches
    for name in (*PRELOADED, sys.argv[2]):
        importlib.import_module(name)
    gc.freeze()
    while fds := socket.recv_fds(sock, 1, MAX_FDS)[1]:
        if _forked_twice():
            gc.enable()
            wanted = _become(sock, fds)
            if wanted["threads"] != threads:
                _set_threads(wanted["threads"])
            importlib.import_module(wanted["module"]).main()
            return
        for fd in fds:
            os.close(fd)


def _forked_twice() -> bool:
    """Whether this is the new process, whose parent is the launcher now."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0002)
    return True


def _become(sock: socket.socket, fds: list[int]) -> dict[str, Any]:
    """Take on the environment, the arguments and the files of a requested process, and report its id."""
    die_with_parent()
    os.setsid()
    request, out, err, *passed = fds
    with os.fdopen(request, encoding="utf-8") as file:
        wanted: dict[str, Any] = json.load(file)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.argv = wanted["argv"]
    _reseed()
    sock.send(PID.pack(os.getpid()))
    sock.close()
    for fd, number in zip(passed, wanted["passed"], strict=True):
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
    return wanted


def _set_threads(threads: str) -> None:
    """Replace the number of threads that OpenMP and MKL have read from the environment."""
    import torch

    torch.set_num_threads(int(threads))


def _reseed() -> None:
    """Draw a state for numpy's global random numbers, as a new process does; Python's reseed themselves."""
    import numpy

    numpy.random.seed()


if __name__ == "__main__":
    main()
