"""Runs a command on an emulated host: `python -m weft.lab.exec_on_host LAB HOST CPUS COMMAND…`.

Only children of a process are in a process namespace that it has entered. So the process forks, and the one outside
passes signals on, exits with the status of the one on the host, and takes it along when it is killed.
"""

from __future__ import annotations

import os
import signal
import sys

from weft.lab import namespaces
from weft.lab.control_socket import ask_for_namespaces
from weft.runtime.launch.process_groups import die_with_parent


def main() -> None:
    lab, host, cpus, *command = sys.argv[1:]
    enter(lab, int(host), cpus)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"weft: {command[0]} cannot be run: {error.strerror}\n")
        os._exit(127)


def enter(lab: str, host: int, cpus: str) -> None:
    """Go on as a process on a host, on these cores (- for all). The calling process must have a single thread."""
    folder = os.getcwd()
    for kind, fd in ask_for_namespaces(lab, host):
        namespaces.setns(fd, kind)
        os.close(fd)
    try:
        os.chdir(folder)
    except OSError:
        os.chdir("/")
    if cpus != "-":
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    child = os.fork()
    if child == 0:
        die_with_parent()
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
