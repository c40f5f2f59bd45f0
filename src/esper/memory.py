"""Process-wide settings that front doors make for CPU training."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt


def keep_freed_memory() -> bool:
    """Ask glibc to keep what a step frees. It would hand activations back to the system and fault them in again, step
    after step. True if the C library knows the setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, 1 << 25)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


def let_threads_sleep() -> None:
    """Threads that wait for each other give their cores away: where other programs run, too, spinning made epochs many times
    slower. Read when torch is loaded, so it must be said before; what the user has set stands."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
