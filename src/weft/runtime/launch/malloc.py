"""Keeps freed memory in the process. Large CPU tensors are allocated in every step; by default glibc returns their
memory to the kernel and faults it in again, page by page, which can take longer than computing."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h


def keep_memory() -> bool:
    """Tell glibc to keep freed memory. Returns False if the user has configured or replaced malloc."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if chosen or os.environ.get("LD_PRELOAD"):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # another libc has none
    except (OSError, AttributeError, TypeError):
        return False
    return bool(libc.mallopt(_MMAP_MAX, 0) and libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1))
