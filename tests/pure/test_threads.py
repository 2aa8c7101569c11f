"""Background threads: one core each, whatever the process computes with."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

OPENMP = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()

THREADS = """
import os, threading, torch
from weft.threads import start_serial_thread

def work():
    torch.rand(4096, 512).mul_(2).add_(1)
    torch.rand(512, 512) @ torch.rand(512, 512)

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(4)
work()
before, seen = threads(), []

def background():
    work()
    seen.append((threads(), torch.get_num_threads()))

{start}
print(seen[0][0] - before, seen[0][1], torch.get_num_threads())
later = []
plain = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
plain.start()
plain.join()
print(later[0])
"""


def counted(start: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", THREADS.format(start=start)], capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(not OPENMP, reason="torch is built without OpenMP")
def test_a_background_thread_gets_no_team_and_the_process_keeps_its_threads() -> None:
    assert counted("start_serial_thread(background, 'x').join()") == [1, 1, 4, 4]


@pytest.mark.skipif(not OPENMP, reason="torch is built without OpenMP")
def test_a_plain_thread_would_get_a_team() -> None:
    more, own, _, _ = counted("t = threading.Thread(target=background); t.start(); t.join()")
    assert more > 1
    assert own == 4
