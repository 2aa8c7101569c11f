"""What the kernel is asked for: namespaces of one's own, as root or as an ordinary user (who is root inside only)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NEWNS, NEWUTS, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(result, f"mount {target}")


def bind(source: str, target: str) -> None:
    mount(source, target, "", _MS_BIND)


def hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def isolate() -> bool:
    """Namespaces of one's own for users (where needed), networks, mounts, processes and host names.

    Returns whether a user namespace was needed. Children of this process, not the process itself, are in the new
    process namespace. Raises OSError where the kernel says no.
    """
    apart = NEWNET | NEWNS | NEWPID | NEWUTS
    if os.geteuid() == 0:
        try:
            unshare(apart)
            return False
        except PermissionError:
            pass  # root in a container that may do no more than a user
    user, group = os.geteuid(), os.getegid()
    unshare(NEWUSER | apart)
    me = Path("/proc/self")
    (me / "setgroups").write_text("deny")
    (me / "uid_map").write_text(f"0 {user} 1")
    (me / "gid_map").write_text(f"0 {group} 1")
    return True


def private_mounts() -> None:
    """Nothing that is mounted from here on shows outside; /run is empty, and /proc shows this namespace's processes."""
    mount("", "/", "", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", "/run", "tmpfs", 0, "mode=755")
    try:
        mount("proc", "/proc", "proc")
    except OSError:
        pass  # refused inside some containers: the outer /proc stays, and serves
