"""What a launcher sees of its processes: their lines, their end, and nobody else's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from weft.runtime.launch import supervise

PIECE = b"\r 12%|#### | 1234/9999 [01:23<09:59, 12.3it/s, loss=1.234]" + b" " * 40


def relayed(*chunks: bytes) -> tuple[list[str], supervise.Child]:
    process: Any = None
    child, lines = supervise.Child(0, process), list[str]()
    for chunk in chunks:
        supervise._relay(child, 3, chunk, lambda rank, line: lines.append(line))
    return lines, child


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\ntw", b"o", b""], ["one", "two"]),
        ([b"one\r\n", b"two\r", b"\n"], ["one", "two"]),
        ([b"\r10%\r20%", b"\r30%", b"\ndone\n"], ["30%", "done"]),
        ([b"10%\r20%\r", b""], ["20%"]),
        ([b"x" * (supervise._LONGEST_LINE + 1), b"\n"], ["x" * supervise._LONGEST_LINE, "x"]),
        ([b""], []),
    ],
)
def test_lines_are_as_a_terminal_shows_them(chunks: list[bytes], lines: list[str]) -> None:
    assert relayed(*chunks)[0] == lines


@pytest.mark.parametrize("piece", [PIECE, PIECE.replace(b"\r", b" "), b"\r" * 100])
def test_an_endless_line_is_not_kept(piece: bytes) -> None:
    _, child = relayed(*[piece] * 20_000)
    assert len(child.rest[3]) <= supervise._LONGEST_LINE


REUSED = """
import subprocess, time
from pathlib import Path
from weft.runtime.launch import supervise

def start(*command):
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

worker = start("true")
child = supervise.Child(1, worker)
while not child.over():
    time.sleep(0.01)
Path("/proc/sys/kernel/ns_last_pid").write_text(str(worker.pid - 1))  # numbers come round
stranger = start("sleep", "30")
assert stranger.pid == worker.pid, "the number was not given again"
supervise.end_all([child])
time.sleep(0.2)
print("stranger", stranger.poll())
stranger.kill()
"""


def test_a_number_that_is_anothers_by_now_is_not_signalled() -> None:
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    command = [*apart, sys.executable, "-c", REUSED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "stranger None\n", done.stderr
