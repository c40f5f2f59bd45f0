"""Do one, two and four workers learn the same, and what do they cost? Rounds of `mlp`, played here, in processes and on Ray.

    python -m experiments.many_workers --rounds 6
    python -m experiments.many_workers --rounds 3 --ray        with Ray too, where it is installed

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
from collections.abc import Mapping
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
    """By round: seconds of the worker that computed longest, and of all of them."""

    def __init__(self) -> None:
        self.seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        if table == "worker":
            self.seconds[columns["round"]][columns["worker"]] += columns["seconds"]


def digest(training: Training) -> str:
    result = hashlib.sha256()
    for name, tensor in sorted(training.agent.controller.tensors().items()):
        result.update(name.encode() + tensor.numpy().tobytes())
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
    return {"curve": curve, "seconds": statistics.median(total), "computing": statistics.median(longest),
            "learner": statistics.median(t - training.waited[n] for t, n in zip(total, rounds, strict=True)),
            "waiting and wire": statistics.median(idle),
            "share of the round": statistics.median(i / t for i, t in zip(idle, total, strict=True))}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--rounds", type=int, default=6)
    options_of.add_argument("--rows", type=int, default=CONFIG.rows)
    options_of.add_argument("--ray", action="store_true")
    options = options_of.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    config = replace(CONFIG, rounds=options.rounds, rows=options.rows, scenarios=options.rows)
    cores = os.cpu_count() or 1
    ways: dict[str, Any] = {"here": (config, Workers)}
    ways |= {f"{n} processes": (config, lambda n=n: Processes(n)) for n in (1, 2, 4)}
    if options.ray:
        ways |= {f"{n} actors": (config, lambda n=n: RayWorkers(n)) for n in (1, 2, 4)}
    ways["2 halves in 2 processes"] = replace(config, shards=2), lambda: Processes(2)
    ways |= {f"{n} threads": (replace(config, shards=1, threads=n), Workers) for n in sorted({1, cores})}
    found = {}
    for name, (settings, workers) in ways.items():
        found[name] = measure(settings, workers())
        print(name, {key: round(value, 3) for key, value in found[name].items() if key != "curve"}, flush=True)
    curves = {name: each.pop("curve") for name, each in found.items()}
    same = all(curve == curves["here"] for name, curve in curves.items() if ways[name][0] == config)
    best = min(each["seconds"] for name, each in found.items() if "threads" in name)
    result = {"rows": config.rows, "shards": config.shards, "rounds": config.rounds, "same curve": same, "curve": curves["here"],
              "ways": found, "two processes against the best of one": best / found["2 halves in 2 processes"]["seconds"],
              "load of the machine": os.getloadavg()}
    print({key: result[key] for key in ("same curve", "two processes against the best of one", "load of the machine")})
    write(options, "many_workers", result)


if __name__ == "__main__":
    main()
