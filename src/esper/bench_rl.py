"""`esper bench rl`: updates of the learner on made-up rollouts, against sb3-contrib's RecurrentPPO if it is installed."""

import importlib.util
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from esper.bench import check_device
from esper.kasmina import blueprints_for
from esper.leyline import ActionSpec, EsperError, Observation
from esper.simic import Collector, Outcome, PPOAgent, PPOConfig
from esper.tamiyo import OBSERVATION, ActionMasks, Controller, NetworkConfig
from esper.tamiyo.controller import Glimpse


@dataclass(frozen=True)
class RLBench:
    """Time PPO updates on made-up rollouts with default observations and actions.

    Example: esper bench rl --rows 64 --steps 30 --json
    """

    rows: int = 8
    """Environments."""
    steps: int = 128
    """Steps of a rollout."""
    episode: int = 0
    """Steps of an episode; 0 is as many as a rollout's."""
    epochs: int = 4
    """Passes over a rollout."""
    minibatches: int = 4
    """Optimiser steps of a pass."""
    hidden: int = 128
    """Width of the features and the memory, in both learners."""
    updates: int = 5
    """Interleaved rounds of one update each; the median counts."""
    compile: bool = False
    """Compile what can be (needs a C++ compiler on the CPU)."""
    device: str = "cpu"
    """cpu, or cuda (then without sb3-contrib)."""
    json: bool = False
    """Print one JSON object as the last line."""

    def __post_init__(self) -> None:
        if min(self.rows, self.steps, self.epochs, self.minibatches, self.hidden, self.updates) < 1:
            raise EsperError("--rows, --steps, --epochs, --minibatches, --hidden and --updates must be at least 1")
        if self.episode < 0:
            raise EsperError("--episode must be at least 0")
        if self.rows % self.minibatches:
            raise EsperError(f"--rows {self.rows} cannot be cut into {self.minibatches} equal minibatches; change one of them")
        check_device(self.device)


class Noise:
    """Episodes of random observations, masks and rewards, all of the same length."""

    def __init__(self, config: RLBench) -> None:
        self.config, self.at = config, 0
        self.spec = ActionSpec.decisive(3, blueprints_for("conv1d"))
        self.generator = torch.Generator(config.device).manual_seed(0)

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(self.config.rows, *shape, generator=self.generator, device=self.config.device)

    def look(self) -> Glimpse:
        spec, (row, slot, candidate) = self.spec, OBSERVATION.widths
        slots, kinds = spec.slots, len(spec.blueprints)
        seen = Observation(self._random(row), self._random(slots, slot), self._random(slots, kinds, candidate))
        possible = self._random(len(spec.ops), spec.slots) < 0.7
        possible[:, 0] = torch.arange(spec.slots, device=self.config.device) == 0
        values = {p: torch.ones_like(self._random(spec.slots, spec.head_sizes[p[1]]), dtype=torch.bool) for p in spec.pairs}
        masks = ActionMasks(possible.any(2), possible, values)
        first = torch.full((self.config.rows,), self.at == 0, device=self.config.device)
        return Glimpse(seen, masks, first, self._random(len(spec.heads)))

    def step(self, actions: Tensor) -> Outcome:
        self.at = (self.at + 1) % (self.config.episode or self.config.steps)
        over = torch.full((self.config.rows,), self.at == 0, device=self.config.device)
        return Outcome(self._random(), over, torch.zeros_like(over))


class Ours:
    def __init__(self, config: RLBench) -> None:
        world = Noise(config)
        controller = Controller.fresh(world.spec, NetworkConfig(config.hidden), device=config.device)
        ppo = PPOConfig(epochs=config.epochs, minibatches=config.minibatches, target_kl=1e9)
        self.agent = PPOAgent(controller, ppo, compile=config.compile)
        self.collector, self.buffer = Collector(self.agent, world, config.rows), self.agent.buffer(config.steps, config.rows)
        self.parameters = sum(p.numel() for p in controller.network.parameters())

    def seconds(self) -> float:
        last = self.collector.fill(self.buffer)
        started = _now(self.agent.device)
        self.agent.update(self.buffer, last)
        return _now(self.agent.device) - started


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_rl_bench(config: RLBench) -> dict[str, Any]:
    """Transitions that each learner goes through in a second of its update, and the seconds of every round."""
    learners: dict[str, Any] = {"esper": Ours(config)}
    if config.device == "cpu" and importlib.util.find_spec("sb3_contrib") is not None:
        from esper.bench_sb3 import Theirs
        spec, (row, slot, candidate) = learners["esper"].agent.network.spec, OBSERVATION.widths
        width = row + spec.slots * (slot + len(spec.blueprints) * candidate)
        shape = (config.rows, config.steps, config.episode or config.steps, config.epochs, config.minibatches)
        learners["sb3-contrib"] = Theirs(*shape, config.hidden, width, spec.sizes)
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for number in range(config.updates + 2):  # the first two are rehearsals
        for name, learner in learners.items():
            spent = learner.seconds()
            if number > 1:
                seconds[name].append(spent)
    passes = config.rows * config.steps * config.epochs
    result = {
        "bench": "rl", **asdict(config), "parameters": {name: learner.parameters for name, learner in learners.items()},
        "transitions_per_second": {name: passes / statistics.median(values) for name, values in seconds.items()},
        "rounds_seconds": seconds, "torch": torch.__version__, "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    if len(seconds) > 1:
        result["ratio"] = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    return result


def run(config: RLBench, console: Console) -> None:
    with console.status("updates of each learner, one after the other"):
        result = run_rl_bench(config)
    table = Table("learner", "weights", "transitions/s", "update", title=f"{config.rows} environments x {config.steps} steps, "
                  f"{config.epochs} epochs of {config.minibatches} minibatches", title_justify="left")
    for name, rate in result["transitions_per_second"].items():
        milliseconds = 1000 * statistics.median(result["rounds_seconds"][name])
        table.add_row(name, f"{result['parameters'][name]:,}", f"{rate:,.0f}", f"{milliseconds:,.0f} ms")
    console.print(table)
    if "ratio" in result:
        console.print(f"{result['ratio']:.1f}x")
    else:
        console.print("sb3-contrib's RecurrentPPO is compared on the CPU where it is installed: pip install 'esper-morph[bench]'")
    if config.json:
        print(json.dumps(result))
