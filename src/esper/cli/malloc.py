"""One process-wide setting that front doors make for CPU training."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt


def keep_freed_memory() -> bool:
    """Ask glibc to keep what a step frees. It would hand activations back to the system and fault them in again, step
    after step. True if the C library knows the setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, 1 << 25)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
