"""Background threads whose torch operators run on that thread alone.

With OpenMP, every thread that calls a parallel operator gets a team of its own, as large as `torch.get_num_threads()`.
Between two operators the members of a team spin (`OMP_WAIT_POLICY` is active by default), and they spin on the cores on
which the model computes. A process with an engine thread would so keep twice its threads busy.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch


def start_serial_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread in which torch works with one thread, whatever the rest of the process works with.

    `torch.set_num_threads` sets two things: OpenMP's and MKL's number for the calling thread, and the number that a
    thread starts from when it first asks. So the new thread sets one for itself, and the caller sets its own again.
    """
    if not _openmp():
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread
    ready = threading.Event()

    def run() -> None:
        torch.get_num_threads()  # the first question of a thread sets its number, and would undo the next line
        torch.set_num_threads(1)
        ready.set()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _ONE_AT_A_TIME:
        threads = torch.get_num_threads()
        thread.start()
        ready.wait()
        torch.set_num_threads(threads)
    return thread


_ONE_AT_A_TIME = threading.Lock()


@functools.cache
def _openmp() -> bool:
    """Whether torch's operators are parallel through OpenMP."""
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()
