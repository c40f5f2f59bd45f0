"""Many workers: the same bits wherever a round is played, and one sentence for whatever goes wrong there."""

import functools
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from esper.cli import main
from esper.leyline import EsperError
from esper.nissa import Store, read
from esper.simic import workers as room
from esper.simic.on_ray import RayWorkers
from esper.simic.proof.sweep import choices, run_sweep
from esper.simic.training import CHECKPOINT, Training
from esper.simic.workers import Call, Done, Lost, Pool, Processes, Workers
from esper.tolaria import EnvConfig, Measurement, MorphogeneticEnv
from tests.test_training import CONFIG, OWN, everything, toys
from tests.workshop import toy_data, toy_family

SHARDED = replace(CONFIG, rows=8, shards=4, rounds=2, exam_every=0, scenarios=8)
SMALL = replace(SHARDED, env=replace(CONFIG.env, previews=None), rows=4, shards=2, rounds=1, scenarios=0)


def order(driver: int) -> Path:
    """While it exists, the next worker of this driver to train dies."""
    return Path(tempfile.gettempdir()) / f"esper-dies-{driver}"


class Mortal(MorphogeneticEnv):
    def step(self, actions: torch.Tensor) -> Measurement:
        try:
            order(os.getppid()).unlink()
        except FileNotFoundError:
            return super().step(actions)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def mortals(config: EnvConfig, rows: int) -> MorphogeneticEnv:
    print("made an environment")
    return Mortal(config, rows, toy_data(inputs=config.family.host.inputs))


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2, time_limit=20) as workers:
        yield workers


def trained(folder: Path, workers: Workers | None = None, make: Any = mortals) -> Training:
    folder.mkdir(parents=True)
    training = Training(SHARDED, folder, Store(folder / "run.db"), make=make, workers=workers)
    training.run()
    return training


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in this process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    trained(folder)
    return folder


def assert_same(one: Path, other: Path) -> None:
    assert (one / CHECKPOINT).read_bytes() == (other / CHECKPOINT).read_bytes()
    for table in ("step", "move", "head", "round"):
        assert everything(one, table) == everything(other, table) != [], table


def test_two_processes_learn_the_same_as_none_and_so_do_those_that_replace_one(alone: Path, two: Processes, tmp_path: Path) -> None:
    trained(tmp_path / "two", two)
    assert_same(alone, tmp_path / "two")
    told = read(tmp_path / "two" / "run.db", "SELECT round, shard, worker, seconds, host_epochs, tries, log FROM worker")
    assert [row[:2] for row in told] == [(number, shard) for number in range(2) for shard in range(4)]
    assert len({row[2] for row in told}) == 2
    assert all(row[3] > 0 and row[4] > 0 and row[5] == 1 for row in told)
    assert "made an environment" in "".join(row[6] for row in told)
    order(os.getpid()).touch()
    trained(tmp_path / "lost", two)
    assert not order(os.getpid()).exists()
    assert_same(alone, tmp_path / "lost")
    assert sum(read(tmp_path / "lost" / "run.db", "SELECT tries > 1 FROM worker ORDER BY tries DESC LIMIT 1")[0]) == 1


def test_shards_change_numbers_and_workers_do_not(alone: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    Training(replace(SHARDED, shards=1), whole, Store(whole / "run.db"), make=toys).run()
    assert len(everything(whole, "step")) == len(everything(alone, "step"))
    assert (whole / CHECKPOINT).read_bytes() != (alone / CHECKPOINT).read_bytes()


def _first(marker: Path, trouble: Callable[[], object]) -> str:
    """Once trouble, then an answer."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return "answered"
    trouble()
    return "not reached"


def test_a_worker_that_hangs_is_replaced(two: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two, "time_limit", 4.0)
    calls = {"slow": functools.partial(_first, tmp_path / "slow", functools.partial(time.sleep, 60)), "fast": functools.partial(int, 3)}
    found = {done.name: done for done in two.run(calls)}
    assert (found["slow"].value, found["slow"].tries, found["fast"].value) == ("answered", 2, 3)


class Friends(Pool):
    """Threads of this process; the first call that is no introduction is `lost`, after so many seconds."""

    def __init__(self, count: int, lost: float) -> None:
        super().__init__(count)
        self.lost, self.places = [lost], list[int]()

    def start(self, place: int) -> int:
        self.places.append(place)
        return place

    def alive(self, handle: int) -> bool:
        return True

    def ask(self, handle: int, call: Any) -> Done:
        if call.func is room._introduce:
            return Done(room._introduce(1, ()))
        if handle == 0 and self.lost:
            time.sleep(self.lost.pop())
            raise Lost
        return Done(call())

    def stop(self, handle: int) -> None: ...


def test_who_replaces_a_worker_takes_its_place_and_its_device() -> None:
    with Friends(3, 0.0) as workers:
        assert {done.value for done in workers.run({str(n): functools.partial(int, n) for n in range(3)})} == {0, 1, 2}
        assert workers.places == [0, 1, 2, 0]


def test_a_worker_that_is_lost_late_is_replaced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE", 0.3)
    with Friends(1, 0.5) as workers:
        assert [done.tries for done in workers.run({"asked": functools.partial(int, 3)})] == [2]


def test_who_answered_while_nobody_listened_does_not_hang() -> None:
    tries = []
    with Friends(2, 0.1) as workers:
        workers.lost.clear()
        workers.time_limit = 0.3
        for done in workers.run({"fast": functools.partial(int, 3), "slow": functools.partial(time.sleep, 0.1)}):
            tries.append(done.tries)
            time.sleep(0.5)
    assert tries == [1, 1]


def test_workers_that_died_while_they_had_nothing_to_do_are_replaced(two: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"asked": functools.partial(int, 3)}
    list(two.run(asked))
    monkeypatch.setattr(room, "TRIES", 1)
    for worker in [each for each in two.workers if each.task is None]:
        worker.handle[0].kill()
        worker.handle[0].join()
    assert [(done.value, done.tries) for done in two.run(asked)] == [(3, 1)]


def _tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((3,), float(number)) for number in range(count)]


def test_tensors_travel_without_a_file_for_each(two: Processes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (done,) = two.run({"many": functools.partial(_tensors, 200)})
    assert float(done.value[199][0]) == 199
    assert len(os.listdir("/proc/self/fd")) < before + 20


class Unreadable:
    def __reduce__(self) -> Any:
        return os.listdir, ("/no such folder",)


def test_a_call_that_a_worker_cannot_read_says_so(two: Processes) -> None:
    with pytest.raises(RuntimeError, match=r"FileNotFoundError.*no such folder"):
        list(two.run({"asked": functools.partial(int, Unreadable())}))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "VERSION", "9.9")
    with Processes(1) as workers, pytest.raises(EsperError, match=r"has esper 0\.\S+, and here it is 9.9; install the same"):
        list(workers.run({"asked": functools.partial(int, 3)}))


class Tampered(Workers):
    """Plays what it is given, and spoils what comes back."""

    here = False

    def __init__(self, spoil: Callable[[dict[str, Any], dict[str, np.ndarray]], object]) -> None:
        self.spoil = spoil

    def run(self, calls: Mapping[str, Call]) -> Iterator[Done]:
        for done in super().run(calls):
            if done.value is not None:
                about, arrays = json.loads(done.value[0]), dict(done.value[1])
                self.spoil(about, arrays)
                done = done._replace(value=(json.dumps(about), arrays))
            yield done


def fill(name: str, value: float) -> Callable[[dict[str, Any], dict[str, np.ndarray]], object]:
    return lambda about, arrays: arrays.update({name: np.full_like(arrays[name], value)})


@pytest.mark.parametrize(("spoil", "sentence"), [
    (fill("episodes.scenarios.key", 7), "what came back for round 0 has other scenarios; nothing was learned"),
    (lambda about, arrays: about.update(number=5), "has another round; nothing was learned from it"),
    (fill("counted.0", np.nan), "has statistics that are no numbers"),
    (fill("rollout.reward", np.nan), "'reward' is nan .* nothing was learned from this rollout"),
    (lambda about, arrays: arrays.update({"rollout.value": arrays["rollout.value"][:, :1]}), "has another number of rows"),
    (fill("rollout.log_prob", -1), "replaying the rollout gives log-probabilities"),
])
def test_nonsense_is_one_sentence_and_no_update(spoil: Any, sentence: str, tmp_path: Path) -> None:
    training = Training(SMALL, tmp_path, make=toys, workers=Tampered(spoil))
    before = {name: t.clone() for name, t in training.agent.network.state_dict().items()}
    with pytest.raises(EsperError, match=sentence):
        training.run()
    assert training.agent.updates == 0
    assert all(torch.equal(t, before[name]) for name, t in training.agent.network.state_dict().items())
    assert not (tmp_path / CHECKPOINT).exists()


def test_parcels_lose_nothing(alone: Path, tmp_path: Path) -> None:
    trained(tmp_path / "packed", Tampered(lambda about, arrays: None))
    assert_same(alone, tmp_path / "packed")


def test_threads_are_those_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    Training(replace(SMALL, threads=2), tmp_path, make=toys).run()
    assert seen == [2, 1, 2, 1], "for each of two shards, and the learner keeps its own"
    assert (SHARDED.threads_of_a_shard, replace(SHARDED, shards=1).threads_of_a_shard) == (1, torch.get_num_threads())


def test_a_sweep_by_processes_is_the_same(two: Processes) -> None:
    family = toy_family(task="digits", host=replace(toy_family().host, inputs=(64,)), horizons=(6,), samples=80, validation=60)
    table = dict(list(choices(family).items())[:3])
    one, other = (run_sweep(EnvConfig(family), table, 4, 16, 2, workers=each) for each in (None, two))
    for name in ("score", "params", "spent", "features", "init"):
        assert torch.equal(getattr(one, name).nan_to_num(-9), getattr(other, name).nan_to_num(-9)), name
    assert one.rollbacks == other.rollbacks


def test_work_that_workers_are_lost_with_is_given_up(two: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TRIES", 1)
    with pytest.raises(EsperError, match=r"1 workers were lost with this, the last one because it ended early.*fewer workers"):
        list(two.run({"this": functools.partial(os._exit, 1)}))
    assert not two.workers, "nobody is left behind"


@pytest.mark.parametrize(("words", "sentence"), [
    (["train", "--workers", "3"], "--workers 3 is more than the 1 shards of a round; begin the run with --shards 3"),
    (["train", "--shards", "3"], "rows 4 cannot be played in 3 shards of equal size"),
    (["train", "--ray", "local"], "--ray and --gpus need --workers"),
    (["train", "--gpus", "0", "1"], "--ray and --gpus need --workers"),
    (["train", "--workers", "-1"], "--workers and --threads must be at least 0"),
    (["train", "--workers", "1", "--ray", "local"], r"--ray needs Ray; install it: pip install 'esper-morph\[ray\]'"),
    (["train", "--workers", "1", "--time-limit", "-5"], "a limit is 0 or more seconds"),
])
def test_what_cannot_be_meant_is_one_sentence(words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "own.toml").write_text(OWN)
    assert main([*words, "--out", str(tmp_path / "run"), "--config", str(tmp_path / "own.toml")]) == 2
    told = capsys.readouterr().err
    assert re.search(sentence, told), told
    assert told.count("\n") == 1
    assert not (tmp_path / "run" / "run.json").exists()


class Handle:
    """An actor of a Ray that computes in this process."""

    def __init__(self, actor: Any) -> None:
        self.answer = SimpleNamespace(remote=lambda call: functools.partial(actor.answer, call))


def pretended(get: Callable[[Callable[[], Any]], Any]) -> ModuleType:
    made: Any = ModuleType("ray")
    made.is_initialized, made.init, made.shutdown, made.kill = (lambda: False), (lambda **told: None), (lambda: None), (lambda actor: None)
    made.remote = lambda **asked: lambda kind: SimpleNamespace(remote=lambda: Handle(kind()))
    made.get = get
    return made


class ObjectStoreFullError(Exception):
    pass


class RayActorError(Exception):
    pass


class ActorDiedError(RayActorError):
    pass


@pytest.mark.parametrize(("trouble", "sentence"), [
    (ObjectStoreFullError, "Ray's object store is full; give it more .* or cut rounds into more shards"),
    (ActorDiedError, "3 workers were lost with introduction"),
])
def test_troubles_of_ray_are_one_sentence(trouble: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: Callable[[], Any]) -> Any:
        raise trouble("details\nover several lines")

    monkeypatch.setitem(sys.modules, "ray", pretended(fails))
    with RayWorkers(1) as workers, pytest.raises(EsperError, match=sentence) as told:
        list(workers.run({"asked": functools.partial(int, 3)}))
    assert "\n" not in str(told.value)
    monkeypatch.setitem(sys.modules, "ray", pretended(lambda call: call()))
    with RayWorkers(2) as workers:
        assert {done.name: done.value for done in workers.run({"a": functools.partial(int, 3), "b": functools.partial(int, 4)})} == {"a": 3, "b": 4}


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.filterwarnings("ignore")
def test_actors_of_ray_learn_the_same(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with RayWorkers(2) as workers:
        trained(tmp_path / "ray", workers)
    assert_same(alone, tmp_path / "ray")
