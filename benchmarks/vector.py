"""Growth through Gymnasium's vector interface, against the bare engine.

    python benchmarks/vector.py --json      # one measurement, here and now
    python benchmarks/vector.py --write     # the published figures, to benchmarks/results/

All ways play the same scenarios with actions that are drawn evenly from the mask; the engine neither observes nor pays.
An epoch counts where its row was running. Twins are known before the clock starts; what they took is told beside.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from rich.table import Table

import esper.gym  # noqa: F401
from common import Bench, Result, main, now
from esper.gym.envs import flat_actions, flat_masks
from esper.kasmina.devices import check_device
from esper.leyline import EsperError
from esper.tamiyo import action_masks
from esper.tolaria import MorphogeneticEnv, find_family

PUBLISHED: dict[str, list[dict[str, Any]]] = {"cpu": [{"family": "mlp"}], "cuda": []}


@dataclass(frozen=True)
class VectorBench(Bench):
    """Time epochs of a vector environment, and of the engine inside it.

    Example: python benchmarks/vector.py --family mlp --rows 64 --json
    """

    family: str = "mlp"
    rows: int = 64
    """Hosts that run together."""
    steps: int = 13
    """Steps of a round."""
    rounds: int = 4
    """Interleaved rounds; the median counts."""

    def __post_init__(self) -> None:
        if min(self.rows, self.steps, self.rounds) < 1:
            raise EsperError("--rows, --steps and --rounds must be at least 1")
        check_device(self.device)

    @property
    def name(self) -> str:
        return f"vector-{self.family}-{self.device}"


def drawn(rng: np.random.Generator, masks: Any) -> Any:
    """One action per row, evenly from what is possible."""
    return (rng.random(masks.shape) * (masks > 0)).argmax(1)


class Engine:
    """Rows that end begin anew at once."""

    def __init__(self, config: VectorBench, scenarios: int) -> None:
        family = find_family(config.family)
        self.env, self.rng = MorphogeneticEnv(family, config.rows, device=config.device), np.random.default_rng(0)
        self.pool, self.next = family.scenarios(scenarios), config.rows
        self.actions = flat_actions(self.env.spec)
        self.env.reset(self.pool.take(torch.arange(config.rows)))

    def step(self) -> int:
        env = self.env
        masks = flat_masks(env.spec, self.actions, action_masks(env.view()))
        env.step(self.actions[drawn(self.rng, masks.numpy())])
        rows = env.done.nonzero().flatten()
        if len(rows):
            env.reset(self.pool.take((self.next + torch.arange(len(rows))) % len(self.pool)), rows)
            self.next += len(rows)
        return env.rows


class Vector:
    """The registered environment, in one of its two ways to begin anew."""

    def __init__(self, config: VectorBench, scenarios: int, mode: str) -> None:
        self.env = gymnasium.make_vec(f"Esper/{config.family}-v0", num_envs=config.rows, scenarios=scenarios,
                                      autoreset_mode=mode, device=config.device)
        started = now(config.device)
        self.env.unwrapped.world.twins(self.env.unwrapped.pool)
        self.twins, self.rng = now(config.device) - started, np.random.default_rng(0)
        _, self.info = self.env.reset(options={"scenario": 0})
        self.over = np.zeros(config.rows, dtype=bool)

    def step(self) -> int:
        _, _, ended, _, self.info = self.env.step(drawn(self.rng, self.info["action_mask"]))
        running, self.over = int((~self.over).sum()), ended
        return len(ended) if self.env.metadata["autoreset_mode"].value == "SameStep" else running


def timed(step: Callable[[], int], steps: int, device: str) -> tuple[float, float]:
    """Host-epochs per second of the clock, and of this process."""
    started, busy = now(device), time.process_time()
    epochs = sum(step() for _ in range(steps))
    return epochs / (now(device) - started), epochs / (time.process_time() - busy)


def measure(config: VectorBench) -> Result:
    """Host-epochs per second of the engine and of both vector environments, over rounds that take turns."""
    scenarios = 2 * config.rows
    ways: dict[str, Any] = {"engine": Engine(config, scenarios)}
    ways |= {mode: Vector(config, scenarios, mode) for mode in ("NextStep", "SameStep")}
    told: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(config.rounds + 1):  # the first is a rehearsal
        for way in list(ways) if number % 2 else reversed(list(ways)):
            told[way].append(timed(ways[way].step, config.steps, config.device))
    rates, busy = ({way: [each[kind] for each in values[1:]] for way, values in told.items()} for kind in (0, 1))
    return {
        "bench": "vector", **config.sizes(),
        "host_epochs_per_second": {way: statistics.median(values) for way, values in rates.items()},
        "rounds_host_epochs_per_second": rates, "rounds_host_epochs_per_cpu_second": busy,
        "ratio": _ratio(rates, "NextStep"), "same_step_ratio": _ratio(rates, "SameStep"),
        "cpu_ratio": _ratio(busy, "NextStep"), "same_step_cpu_ratio": _ratio(busy, "SameStep"),
        "twin_seconds_per_scenario": ways["NextStep"].twins / scenarios,
    }


def _ratio(rates: dict[str, list[float]], way: str) -> float:
    return statistics.median(a / b for a, b in zip(rates[way], rates["engine"], strict=True))


def show(result: Result) -> Table:
    table = Table("way", "host-epochs/s", "of the engine", "by CPU time", title="{rows} rows of {family}".format(**result),
                  title_justify="left")
    shares = {"engine": (1.0, 1.0), "NextStep": (result["ratio"], result["cpu_ratio"]),
              "SameStep": (result["same_step_ratio"], result["same_step_cpu_ratio"])}
    for way, rate in result["host_epochs_per_second"].items():
        table.add_row(way, f"{rate:,.0f}", *(f"{100 * share:.0f} %" for share in shares[way]))
    table.caption = f"a scenario's twin takes {1000 * result['twin_seconds_per_scenario']:.1f} ms, once"
    return table


if __name__ == "__main__":
    sys.exit(main(VectorBench, measure, show, PUBLISHED))
