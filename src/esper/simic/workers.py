"""Where calls run: in this process, in processes beside it, or (`simic.on_ray`) on a cluster. What they
return is the same wherever they run, if the number of threads is. A worker that is lost or hangs is replaced,
and its call is given to another."""

import contextlib
import functools
import io
import os
import platform
import queue
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from esper.leyline import EsperError
from esper.leyline.provenance import VERSION

PREPARATIONS: list[Callable[[], object]] = []
"""What every worker does first: it begins with nothing that was registered here."""
TRIES = 3
"""A call that so many workers were lost with is given up."""
PATIENCE = 300.0
"""Seconds that are waited for the first worker to introduce itself."""
_KEPT = 2000  # characters of what a worker printed
Call = Callable[[], Any]


class Done(NamedTuple):
    """What came of a call, and how."""

    value: Any = None
    seconds: float = 0.0
    log: str = ""  # what its worker printed, the end of it
    error: str = ""  # one sentence, or a traceback if nobody `expected` it
    expected: bool = True
    name: str = ""  # of the call
    worker: str = "here"
    tries: int = 1


class Lost(Exception):
    """The worker is gone."""


class Workers:
    """This process alone: one call after the other."""

    here = True

    def run(self, calls: Mapping[str, Call]) -> Iterator[Done]:
        """Every call once, as they end; who needs an order sorts by name."""
        for name, call in calls.items():
            started, value = time.perf_counter(), call()
            yield Done(value, time.perf_counter() - started, name=name)

    def close(self) -> None: ...

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(eq=False)
class Worker:
    """Somebody who was started; `task` is what it does now."""

    handle: Any
    task: str | None = None
    since: float = 0.0
    name: str = ""  # once it has introduced itself


class Pool(Workers):
    """So many workers. Subclasses say how one is started, asked (which blocks, and raises `Lost` if nobody
    will answer) and stopped."""

    here = False
    start: Callable[[int], Any]
    ask: Callable[[Any, Call], Done]
    stop: Callable[[Any], None]

    def __init__(self, count: int, threads: int = 1, time_limit: float = 0.0) -> None:
        """Each has so many threads, and is given up if a call takes longer than the limit (0: never)."""
        if count < 1 or threads < 1 or time_limit < 0:
            raise EsperError(f"{count} workers, {threads} threads, time limit {time_limit:g}: "
                             "there must be at least 1 worker and thread, and a limit is 0 or more seconds")
        self.count, self.threads, self.time_limit = count, threads, time_limit
        self.workers: list[Worker] = []
        self._answers: queue.Queue[tuple[Worker, Done | None]] = queue.Queue()

    def run(self, calls: Mapping[str, Call]) -> Iterator[Done]:
        left, tries, began = dict(calls), Counter[str](), time.monotonic()
        try:
            while left:
                self._assign(left, tries)
                for worker, done in self._heard():
                    name, worker.task = str(worker.task), None
                    if done is None:
                        self._replace(worker, name, tries, "it ended early, perhaps for want of memory")
                    elif done.error:
                        raise (EsperError if done.expected else RuntimeError)(done.error)
                    elif worker.name:
                        del left[name]
                        yield done._replace(name=name, worker=worker.name, tries=tries[name])
                    else:
                        worker.name = _same(done.value)
                self._look_for_trouble(tries, time.monotonic() - began)
        except BaseException:  # nobody waits for what is still being computed
            self.close()
            raise

    def close(self) -> None:
        workers, self.workers = self.workers, []
        for worker in workers:
            self.stop(worker.handle)

    def _assign(self, left: Mapping[str, Call], tries: Counter[str]) -> None:
        """Workers to those that are missing, calls to those that are free."""
        while len(self.workers) < self.count:
            self.workers.append(Worker(self.start(len(self.workers))))
            first = functools.partial(_introduce, self.threads, tuple(PREPARATIONS))
            self._give(self.workers[-1], "introduction", first)
        given = {worker.task for worker in self.workers}
        free = (worker for worker in self.workers if worker.name and worker.task is None)
        for worker, name in zip(free, [name for name in left if name not in given], strict=False):
            tries[name] += 1
            self._give(worker, name, left[name])

    def _give(self, worker: Worker, name: str, call: Call) -> None:
        worker.task, worker.since = name, time.monotonic()

        def exchange() -> None:  # a thread of its own: a worker that stopped reading blocks nobody else
            done: Done | None = None
            try:
                done = self.ask(worker.handle, call)
            except Exception as error:
                if not isinstance(error, Lost):
                    done = Done(error=str(error) or repr(error), expected=isinstance(error, EsperError))
            self._answers.put((worker, done))

        threading.Thread(target=exchange, daemon=True).start()

    def _heard(self) -> list[tuple[Worker, Done | None]]:
        """What has arrived within a second, of workers that are still ours."""
        heard = []
        with contextlib.suppress(queue.Empty):
            heard.append(self._answers.get(timeout=1.0))
            while True:
                heard.append(self._answers.get_nowait())
        return [each for each in heard if each[0] in self.workers]

    def _look_for_trouble(self, tries: Counter[str], waited: float) -> None:
        for worker in [w for w in self.workers if w.name and w.task is not None]:
            if self.time_limit and time.monotonic() - worker.since > self.time_limit:
                self._replace(worker, str(worker.task), tries, f"it did not answer in {self.time_limit:g} s")
        if waited > PATIENCE and not any(worker.name for worker in self.workers):
            raise EsperError(f"no worker has come within {PATIENCE:g} s; "
                             "see that there are free cores (and devices) for one")

    def _replace(self, worker: Worker, name: str, tries: Counter[str], why: str) -> None:
        self.workers.remove(worker)
        self.stop(worker.handle)
        tries[name] += not worker.name
        if tries[name] >= TRIES:
            raise EsperError(f"{TRIES} workers were lost with {name}, the last one because {why}; "
                             "use fewer workers, or a longer --time-limit")


class Processes(Pool):
    """Local processes. They end with this one, however that ends."""

    def __init__(self, count: int, threads: int = 1, time_limit: float = 0.0,
                 devices: Sequence[str] = ()) -> None:
        """With devices (numbers of GPUs) each worker sees one of them, in turn."""
        super().__init__(count, threads, time_limit)
        self.devices = devices

    def start(self, number: int) -> Any:
        context = get_context("spawn")
        mine, theirs = context.Pipe()
        device = self.devices[number % len(self.devices)] if self.devices else ""
        process = context.Process(target=_serve, args=(theirs, os.getpid(), device), daemon=True)
        process.start()
        theirs.close()  # ours alone would keep it open: a worker that dies must be heard
        return process, mine

    def ask(self, handle: Any, call: Call) -> Done:
        try:
            handle[1].send(call)
            return handle[1].recv()
        except (EOFError, OSError) as error:
            raise Lost from error

    def stop(self, handle: Any) -> None:
        process, connection = handle
        process.kill()
        process.join()
        connection.close()


def versions() -> dict[str, str]:
    """What must be the same for bits to be."""
    return {"esper": VERSION, "torch": torch.__version__, "python": platform.python_version()}


def _introduce(threads: int, preparations: tuple[Callable[[], object], ...]) -> dict[str, str]:
    """The first call of a worker: it prepares, and says who it is and what it computes with."""
    torch.set_num_threads(threads)
    for prepare in preparations:
        prepare()
    return {"name": f"{platform.node()}:{os.getpid()}", **versions()}


def _same(told: dict[str, str]) -> str:
    """The worker's name, if it computes with what is here."""
    for what, mine in versions().items():
        if told[what] != mine:
            raise EsperError(f"worker {told['name']} has {what} {told[what]}, and here it is {mine}; "
                             "install the same on both")
    return told["name"]


def answer(call: Call) -> Done:
    """In a worker: what comes of a call, whatever that is."""
    printed, started, done = io.StringIO(), time.perf_counter(), Done()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            done = Done(call())
        except EsperError as wrong:
            done = Done(error=str(wrong))
        except Exception:
            done = Done(error=f"in worker {os.getpid()}: {traceback.format_exc()}", expected=False)
    return done._replace(seconds=time.perf_counter() - started, log=printed.getvalue()[-_KEPT:])


def _serve(connection: Any, parent: int, device: str) -> None:
    """A process: Ctrl-C is the parent's to answer, and without a parent there is nothing to work for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if device:
        os.environ["CUDA_VISIBLE_DEVICES"] = device

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(answer(connection.recv()))


def silent(*told: object) -> None:
    """Watches nothing; a lambda could not be sent to a process."""
