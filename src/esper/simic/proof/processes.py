"""Calls in processes of their own. Workers end with the process that started them, however that ends."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

import torch

from esper.leyline import EsperError

PREPARATIONS: list[Callable[[], object]] = []
"""What every worker does first: it begins with nothing that was registered here."""


def in_processes(jobs: int, calls: Mapping[str, Callable[[], Any]]) -> Iterator[tuple[str, Any]]:
    """(name, what its call returns), as they end, in so many processes that share the threads of this one."""
    given = max(1, torch.get_num_threads() // jobs), os.getpid(), tuple(PREPARATIONS)
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, given) as pool:
        waiting = {pool.submit(call): name for name, call in calls.items()}
        try:
            for each in as_completed(waiting):
                yield waiting[each], each.result()
        except BrokenProcessPool as error:
            raise EsperError(f"one of {jobs} processes ended early, perhaps for want of memory; "
                             "use fewer jobs") from error
        except BaseException:  # nobody waits for what is still being computed
            workers = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()
            raise


def silent(*told: object) -> None:
    """Watches nothing; a lambda could not be sent to a process."""


def _begin(threads: int, parent: int, preparations: tuple[Callable[[], object], ...]) -> None:
    """In a worker: Ctrl-C is the parent's to answer, and without a parent there is nothing to work for."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    for prepare in preparations:
        prepare()
