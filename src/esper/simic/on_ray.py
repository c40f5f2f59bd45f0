"""Workers on a Ray cluster: an actor each. Ray is imported when the first of them is wanted."""

import contextlib
import importlib
from typing import Any

from esper.leyline import EsperError
from esper.simic.workers import Call, Done, Lost, Pool, answer

GONE = ("RayActorError", "WorkerCrashedError", "ObjectLostError", "NodeDiedError")
FULL = ("ObjectStoreFullError", "OutOfDiskError", "OutOfMemoryError")


class _Actor:
    """Answers calls, one after the other."""

    def answer(self, call: Call) -> Done:
        return answer(call)


class RayWorkers(Pool):
    """Actors that Ray places. One whose node is lost is replaced; one that waits for room is used once it has
    some, so nodes may come and go."""

    def __init__(self, count: int, threads: int = 1, time_limit: float = 0.0, address: str = "",
                 gpus: bool = False) -> None:
        """On the cluster at the address (auto: the one of this machine), or a new one on this machine."""
        super().__init__(count, threads, time_limit)
        try:
            self.ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise EsperError("--ray needs Ray; install it: pip install 'esper-morph[ray]'") from error
        quiet = {"log_to_driver": False, "logging_level": "error"}
        where = {"address": address} if address else {"num_cpus": count * threads, "include_dashboard": False}
        try:
            self.begun = not self.ray.is_initialized()
            if self.begun:
                self.ray.init(**where, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise EsperError(f"no Ray cluster answers at {address or 'this machine'}: "
                             f"{str(error).splitlines()[0]}") from error
        self.actor = self.ray.remote(num_cpus=threads, num_gpus=int(gpus))(_Actor)

    def start(self, place: int) -> Any:
        return self.actor.remote()

    def alive(self, handle: Any) -> bool:
        return True  # Ray tells when it is asked

    def ask(self, handle: Any, call: Call) -> Done:
        try:
            return self.ray.get(handle.answer.remote(call))
        except Exception as error:
            kinds = {kind.__name__ for kind in type(error).__mro__}
            if kinds & set(FULL):
                raise EsperError("Ray's object store is full; give it more (ray start "
                                 "--object-store-memory), or cut rounds into more shards") from error
            if kinds & set(GONE):
                raise Lost from error
            raise

    def stop(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # it may be gone, or Ray itself
            self.ray.kill(handle)

    def close(self) -> None:
        super().close()
        if self.begun:
            self.ray.shutdown()
            self.begun = False
