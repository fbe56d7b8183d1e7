"""What one long document needed goes back to the system, so that a worker is not as large ever after as its largest."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
LARGE = 2**20  # bytes: such a buffer is a mapping of its own
FREE_TOP = 2**22  # bytes that stay free at the end of the heap


def return_large_buffers() -> None:
    """glibc raises the size from which a buffer is a mapping of its own to the largest one that was freed, up to 32
    MiB, and keeps twice of that free: after a document of 4 MB a worker keeps some 20 MB. Fixed sizes turn that off.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, LARGE)
    mallopt(M_TRIM_THRESHOLD, FREE_TOP)
