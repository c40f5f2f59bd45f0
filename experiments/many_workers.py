"""Do one, two and four workers learn the same, and what do they cost? Rounds of `mlp`, played here, in processes and on Ray.

    python -m experiments.many_workers --rounds 6
    python -m experiments.many_workers --rounds 3 --ray        with Ray too, where it is installed
    python -m experiments.many_workers --device cuda           all on one GPU

The first ways play the same four shards with one thread each; the controller after each round must be the same, bit for bit. A
round's seconds are cut into what the busiest worker computes, what the learner does (the update, the checkpoint) and what is left:
waiting and the wire. `threads` is one process with whole rounds and so many threads, which two processes with half a round each must
beat.
"""

import hashlib
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from esper.cli.machine import keep_freed_memory
from esper.leyline.telemetry import Nowhere
from esper.simic import PPOConfig
from esper.simic.on_ray import RayWorkers
from esper.simic.training import TrainConfig, Training
from esper.simic.workers import Processes, Workers
from esper.tolaria import EnvConfig, find_family
from experiments.shared import parser, write

CONFIG = TrainConfig(EnvConfig(find_family("mlp")), rows=64, scenarios=64, exam_every=0, shards=4,
                     ppo=PPOConfig(entropy=(0.1, 0.002), explore=(0.05, 0.0)))


class Watched(Training):
    """Remembers how long the workers were waited for."""

    def _play(self, number: int) -> Any:
        started = time.perf_counter()
        played = super()._play(number)
        self.waited.append(time.perf_counter() - started)
        return played

    waited: list[float]


class Busy(Nowhere):
    """By round: seconds that each worker computed, and epochs of hosts that all of them played."""

    def __init__(self) -> None:
        self.seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.epochs: dict[int, int] = defaultdict(int)

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        if table == "worker":
            self.seconds[columns["round"]][columns["worker"]] += columns["seconds"]
            self.epochs[columns["round"]] += columns["host_epochs"]


def digest(training: Training) -> str:
    result = hashlib.sha256()
    for name, tensor in sorted(training.agent.controller.tensors().items()):
        result.update(name.encode() + tensor.cpu().numpy().tobytes())
    return result.hexdigest()[:16]


def measure(config: TrainConfig, workers: Workers) -> dict[str, Any]:
    """The first round is a rehearsal."""
    sink, curve, ends = Busy(), list[str](), [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder, workers:
        training = Watched(config, Path(folder), sink, workers=workers)
        training.waited = []

        def told(number: int) -> None:
            curve.append(digest(training))
            ends.append(time.perf_counter())

        training.run(watch=told)
    rounds = range(1, config.rounds)
    total = [ends[n + 1] - ends[n] for n in rounds]
    longest = [max(sink.seconds[n].values()) for n in rounds]
    idle = [training.waited[n] - longest[k] for k, n in enumerate(rounds)]
    return {"curve": curve, "seconds": statistics.median(total), "first round": ends[1] - ends[0],
            "host-epochs/s": statistics.median(sink.epochs[n] / t for t, n in zip(total, rounds, strict=True)),
            "computing": statistics.median(longest),
            "learner": statistics.median(t - training.waited[n] for t, n in zip(total, rounds, strict=True)),
            "waiting and wire": statistics.median(idle),
            "share of the round": statistics.median(i / t for i, t in zip(idle, total, strict=True))}


def compared(config: TrainConfig, ray: bool = False, told: Callable[[dict[str, Any]], object] = lambda found: None) -> dict[str, Any]:
    """Every way, one after the other; `told` is given what is known after each."""
    cores = os.cpu_count() or 1
    ways: dict[str, Any] = {"here": (config, Workers)}
    ways |= {f"{n} processes": (config, lambda n=n: Processes(n)) for n in (1, 2, 4)}
    if ray:
        ways |= {f"{n} actors": (config, lambda n=n: RayWorkers(n)) for n in (1, 2, 4)}
    ways["2 halves in 2 processes"] = replace(config, shards=2), lambda: Processes(2)
    counts = sorted({1, cores}) if config.env.device == "cpu" else [1]
    ways |= {f"{n} threads": (replace(config, shards=1, threads=n), Workers) for n in counts}
    found, curves = dict[str, Any](), dict[str, list[str]]()
    for name, (settings, workers) in ways.items():
        found[name] = measure(settings, workers())
        curves[name] = found[name].pop("curve")
        print(name, {key: round(value, 3) for key, value in found[name].items()}, flush=True)
        told(found)
    same = all(curve == curves["here"] for name, curve in curves.items() if ways[name][0] == config)
    best = min(each["seconds"] for name, each in found.items() if "threads" in name)
    return {"rows": config.rows, "shards": config.shards, "rounds": config.rounds, "same curve": same, "curve": curves["here"],
            "ways": found, "two processes against the best of one": best / found["2 halves in 2 processes"]["seconds"],
            "load of the machine": os.getloadavg()}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--family", default="mlp")
    options_of.add_argument("--rounds", type=int, default=6)
    options_of.add_argument("--rows", type=int, default=CONFIG.rows)
    options_of.add_argument("--ray", action="store_true")
    options = options_of.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    env = EnvConfig(find_family(options.family), device=options.device)
    result = compared(replace(CONFIG, env=env, rounds=options.rounds, rows=options.rows, scenarios=options.rows), options.ray)
    print({key: result[key] for key in ("same curve", "two processes against the best of one", "load of the machine")})
    write(options, "many_workers", result)


if __name__ == "__main__":
    main()
