"""Process-wide settings that commands make: memory that is kept, and threads for the cores to spare."""

import ctypes
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.leyline import EsperError

if TYPE_CHECKING:
    from esper.simic.workers import Workers

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt
_WATCHED = 0.1  # seconds for which the load of the machine is watched


def keep_freed_memory() -> bool:
    """Ask glibc to keep what a step frees instead of faulting it in again. True if the C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, 1 << 25)
                                        and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


def choose_threads() -> str:
    """Leave cores to whoever uses them: threads that wait spin, and small operations then take milliseconds.
    What was changed, in words; nothing if OMP_NUM_THREADS is set or the machine does not tell."""
    import torch

    most = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or most == 1 or not Path("/proc/stat").exists():
        return ""
    before = _ticks()
    time.sleep(_WATCHED)
    idle, total = (after - early for after, early in zip(_ticks(), before, strict=True))
    threads = max(1, min(most, round((os.cpu_count() or 1) * idle / max(total, 1))))
    if threads == most:
        return ""
    torch.set_num_threads(threads)
    return (f"using {threads} of {most} threads, since other processes use the rest; "
            "OMP_NUM_THREADS overrides this")


def open_workers(options: Any, threads: int) -> "Workers":
    """What --workers, --ray, --gpus and --time-limit ask for; each worker has so many threads (0 is 1)."""
    import torch

    from esper.simic.on_ray import RayWorkers
    from esper.simic.workers import Processes, Workers

    if min(options.workers, threads) < 0 or ((options.ray or options.gpus) and not options.workers):
        raise EsperError("--workers and --threads must be at least 0, and --ray and --gpus need --workers")
    if not options.workers:
        if threads:
            torch.set_num_threads(threads)
        return Workers()
    if options.ray:
        address = "" if options.ray == "local" else options.ray
        return RayWorkers(options.workers, max(threads, 1), options.time_limit, address, bool(options.gpus))
    return Processes(options.workers, max(threads, 1), options.time_limit, options.gpus)


def _ticks() -> tuple[int, int]:
    """(idle, all) of all cores since the machine started."""
    numbers = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return numbers[3] + numbers[4], sum(numbers)
