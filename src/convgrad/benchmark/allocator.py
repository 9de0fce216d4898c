"""Freed memory stays with the process, on both sides: a benchmark times kernels, not the page faults of fresh memory.

glibc gives large blocks back to the system and takes new, zeroed pages for the next result of the same size; clearing
them can take longer than a depthwise convolution (seen: 24 ms of faults for 11 ms of torch's work), and NumPy, which
asks for huge pages, pays less for them than torch. So both sides keep their memory, as with a caching allocator;
`convgrad bench --fresh-memory` shows the C library's own behaviour.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from malloc.h
NEVER = -1


def keep_freed_memory() -> bool:
    """Tell the C library of this process to keep what is freed; False where it cannot be told."""
    try:
        library = ctypes.CDLL(None)
        return bool(library.mallopt(M_MMAP_MAX, 0)) and bool(library.mallopt(M_TRIM_THRESHOLD, NEVER))
    except (OSError, AttributeError):
        return False


def give_back_memory() -> None:
    """Give freed memory back now, before a problem of another size."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
