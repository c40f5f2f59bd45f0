"""Updates of the learner on made-up rollouts, against those of another one.

    python benchmarks/rl.py --json      # one measurement, here and now
    python benchmarks/rl.py --write     # every published figure, to benchmarks/results/

The other one is sb3-contrib's RecurrentPPO on the CPU, where it is installed (the package's extra `bench`).
Elsewhere it is our own update, computed one sequence after the other; both take the same optimiser steps.
"""

import importlib.util
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from common import Bench, Result, main, now
from esper.kasmina import blueprints_for
from esper.kasmina.devices import check_device
from esper.leyline import ActionSpec, EsperError, Observation
from esper.simic import Collector, Outcome, PPOAgent, PPOConfig
from esper.tamiyo import OBSERVATION, ActionMasks, Controller, NetworkConfig
from esper.tamiyo.controller import PolicyInput

PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "cpu": [{"rows": 8, "steps": 128, "updates": 7}, {"rows": 8, "steps": 128, "episode": 40, "updates": 7},
            {"rows": 32, "steps": 30, "updates": 7}, {"rows": 256, "steps": 30, "updates": 7}],
    "cuda": [{"rows": 256, "steps": 30, "updates": 7, "device": "cuda", "compile": compile}
             for compile in (False, True)],
}
SB3, LOOP = "sb3-contrib", "loop of sequences"
REFERENCES = {SB3: "sb3-contrib's RecurrentPPO", LOOP: "our own update, one sequence after the other"}


@dataclass(frozen=True)
class RLBench(Bench):
    """Time PPO updates on made-up rollouts with default observations and actions.

    Example: python benchmarks/rl.py --rows 64 --steps 30 --json
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

    def __post_init__(self) -> None:
        if min(self.rows, self.steps, self.epochs, self.minibatches, self.hidden, self.updates) < 1:
            raise EsperError("--rows, --steps, --epochs, --minibatches, --hidden and --updates "
                             "must be at least 1")
        if self.episode < 0:
            raise EsperError("--episode must be at least 0")
        if self.rows % self.minibatches:
            raise EsperError(f"--rows {self.rows} cannot be cut into {self.minibatches} equal minibatches; "
                             "change one of them")
        check_device(self.device)

    @property
    def name(self) -> str:
        shape = f"{self.rows}x{self.steps}" + (f"-by-{self.episode}" if self.episode else "")
        return f"rl-{shape}-{self.device}{'-compiled' * self.compile}"


class Noise:
    """Episodes of random observations, masks and rewards, all of the same length."""

    def __init__(self, config: RLBench) -> None:
        self.config, self.at = config, 0
        self.spec = ActionSpec.decisive(3, blueprints_for("conv1d"))
        self.generator = torch.Generator(config.device).manual_seed(0)

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(self.config.rows, *shape, generator=self.generator, device=self.config.device)

    def look(self) -> PolicyInput:
        spec, (row, slot, candidate) = self.spec, OBSERVATION.widths
        slots, kinds = spec.slots, len(spec.blueprints)
        widths = (row,), (slots, slot), (slots, kinds, candidate)
        seen = Observation(*(self._random(*width) for width in widths))
        possible = self._random(len(spec.ops), spec.slots) < 0.7
        possible[:, 0] = torch.arange(spec.slots, device=self.config.device) == 0
        shapes = {pair: (self.config.rows, spec.slots, spec.head_sizes[pair[1]]) for pair in spec.pairs}
        values = {pair: torch.ones(shape, dtype=torch.bool, device=self.config.device)
                  for pair, shape in shapes.items()}
        masks = ActionMasks(possible.any(2), possible, values)
        first = torch.full((self.config.rows,), self.at == 0, device=self.config.device)
        return PolicyInput(seen, masks, first, self._random(len(spec.heads)))

    def step(self, actions: Tensor) -> Outcome:
        self.at = (self.at + 1) % (self.config.episode or self.config.steps)
        over = torch.full((self.config.rows,), self.at == 0, device=self.config.device)
        return Outcome(self._random(), over, torch.zeros_like(over))


class Learner:
    """Fills a rollout of noise, then times what learning from it takes."""

    def __init__(self, config: RLBench, pieces: int = 1) -> None:
        """A minibatch is computed in so many `pieces`; its optimiser step is the same."""
        self.world = world = Noise(config)
        torch.manual_seed(0)
        controller = Controller.fresh(world.spec, NetworkConfig(config.hidden), device=config.device)
        ppo = PPOConfig(epochs=config.epochs, minibatches=config.minibatches, accumulate=pieces,
                        target_kl=1e9)
        self.agent = PPOAgent(controller, ppo, compile=config.compile)
        self.buffer = self.agent.buffer(config.steps, config.rows)
        self.collector = Collector(self.agent, config.rows, self.buffer)
        self.parameters = sum(p.numel() for p in controller.network.parameters())

    def seconds(self) -> float:
        for _ in range(self.buffer.spec.steps):
            self.collector.add(self.world.step(self.collector.act(self.world.look())))
        last = self.collector.value(self.world.look())
        started = now(self.agent.device)
        self.agent.update(self.buffer, last)
        return now(self.agent.device) - started


def reference(config: RLBench) -> tuple[str, Any]:
    """(name, learner) to compare with."""
    if config.device != "cpu" or importlib.util.find_spec("sb3_contrib") is None:
        return LOOP, Learner(config, pieces=config.rows // config.minibatches)
    from sb3 import Theirs

    spec, (row, slot, candidate) = Noise(config).spec, OBSERVATION.widths
    width = row + spec.slots * (slot + len(spec.blueprints) * candidate)
    shape = (config.rows, config.steps, config.episode or config.steps, config.epochs, config.minibatches)
    return SB3, Theirs(*shape, config.hidden, width, spec.sizes)


def measure(config: RLBench) -> Result:
    """Transitions that each learner goes through in a second of its update, and how their seconds compare."""
    name, other = reference(config)
    learners = {"esper": Learner(config), name: other}
    seconds: dict[str, list[float]] = {each: [] for each in learners}
    for number in range(config.updates + 2):  # the first two are rehearsals
        for each, learner in learners.items():
            spent = learner.seconds()
            if number > 1:
                seconds[each].append(spent)
    passes = config.rows * config.steps * config.epochs
    rates = {each: passes / statistics.median(spent) for each, spent in seconds.items()}
    return {
        "bench": "rl",
        **config.sizes(),
        "parameters": {each: learner.parameters for each, learner in learners.items()},
        "transitions_per_second": rates,
        "rounds_seconds": seconds,
        "reference": REFERENCES[name],
        "ratio": statistics.median(b / a for a, b in zip(seconds["esper"], seconds[name], strict=True)),
    }


def show(result: Result) -> Table:
    title = "{rows} environments x {steps} steps, {epochs} epochs of {minibatches} minibatches"
    table = Table("learner", "weights", "transitions/s", "update", title=title.format(**result),
                  title_justify="left")
    for name, rate in result["transitions_per_second"].items():
        milliseconds = 1000 * statistics.median(result["rounds_seconds"][name])
        table.add_row(name, f"{result['parameters'][name]:,}", f"{rate:,.0f}", f"{milliseconds:,.0f} ms")
    table.caption = f"{result['ratio']:.1f} times as fast as {result['reference']}"
    return table


if __name__ == "__main__":
    sys.exit(main(RLBench, measure, show, PUBLISHED))
