"""Large CPU tensors come and go with every step. glibc gives their memory back to the kernel each time and faults it in
again, page by page, which can take longer than computing. A training process keeps it instead."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h


def keep_memory() -> bool:
    """Tell glibc to keep what is freed. Returns whether it does: not where the user has set or replaced malloc."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if chosen or os.environ.get("LD_PRELOAD"):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # another libc has none
    except (OSError, AttributeError, TypeError):
        return False
    return bool(libc.mallopt(_MMAP_MAX, 0) and libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1))
