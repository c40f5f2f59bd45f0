"""Where calls run: in this process, in processes beside it, or (`simic.on_ray`) on a cluster. What they
return is the same wherever they run, if the number of threads is. A worker that is lost or hangs is replaced,
and its call is given to another."""

import contextlib
import copyreg
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
from multiprocessing.reduction import ForkingPickler
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

    place: int
    handle: Any
    task: str | None = None
    since: float = 0.0
    name: str = ""  # once it has introduced itself


class Pool(Workers):
    """So many workers. Subclasses say how one is started in which place, whether it is alive, how it is asked
    (which blocks, and raises `Lost` if nobody will answer) and stopped."""

    here = False
    start: Callable[[int], Any]
    alive: Callable[[Any], bool]
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
        left, tries = dict(calls), Counter[str]()
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
                if self._answers.empty():  # who has answered meanwhile does not hang
                    self._look_for_trouble(tries)
        except BaseException:  # nobody waits for what is still being computed
            self.close()
            raise

    def close(self) -> None:
        workers, self.workers = self.workers, []
        for worker in workers:
            self.stop(worker.handle)

    def _assign(self, left: Mapping[str, Call], tries: Counter[str]) -> None:
        """Workers to those that are missing, calls to those that are free."""
        for worker in [w for w in self.workers if w.task is None and not self.alive(w.handle)]:
            self._remove(worker)  # it died while it had nothing to do: no call is to blame
        for place in sorted({*range(self.count)} - {worker.place for worker in self.workers}):
            self.workers.append(Worker(place, self.start(place)))
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

    def _look_for_trouble(self, tries: Counter[str]) -> None:
        waited = {worker: time.monotonic() - worker.since for worker in self.workers}
        if waited and all(not worker.name and waited[worker] > PATIENCE for worker in waited):
            raise EsperError(f"no worker has come within {PATIENCE:g} s; "
                             "see that there are free cores (and devices) for one")
        for worker in waited:
            if worker.name and worker.task and 0 < self.time_limit < waited[worker]:
                self._replace(worker, worker.task, tries, f"it did not answer in {self.time_limit:g} s")

    def _remove(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.stop(worker.handle)

    def _replace(self, worker: Worker, name: str, tries: Counter[str], why: str) -> None:
        self._remove(worker)
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

    def start(self, place: int) -> Any:
        context = get_context("spawn")
        mine, theirs = context.Pipe()
        device = self.devices[place % len(self.devices)] if self.devices else ""
        process = context.Process(target=_serve, args=(theirs, os.getpid(), device), daemon=True)
        process.start()
        theirs.close()  # ours alone would keep it open: a worker that dies must be heard
        return process, mine

    def alive(self, handle: Any) -> bool:
        return bool(handle[0].is_alive())

    def ask(self, handle: Any, call: Call) -> Done:
        told = _sent(call)
        try:
            handle[1].send_bytes(told)
            return ForkingPickler.loads(handle[1].recv_bytes())
        except (EOFError, OSError) as error:
            raise Lost from error

    def stop(self, handle: Any) -> None:
        handle[0].kill()  # whoever waits at the pipe hears of it; nobody else closes it
        handle[0].join()


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
            call = functools.partial(_unpickled, connection.recv_bytes())
            connection.send_bytes(_sent(answer(call)))


def _sent(thing: Any) -> bytes:
    """As multiprocessing sends things, but tensors by value: torch would keep a file open for each."""
    buffer = io.BytesIO()
    sender = ForkingPickler(buffer)
    sender.dispatch_table = copyreg.dispatch_table
    sender.dump(thing)
    return buffer.getvalue()


def _unpickled(told: bytes) -> Any:
    """A call that cannot be read here is an answer like any other."""
    return ForkingPickler.loads(told)()


def silent(*told: object) -> None:
    """Watches nothing; a lambda could not be sent to a process."""
