"""Does the learner learn? Small worlds with known answers, several seeds, both kinds of ratio.

    python -m experiments.ladder --seeds 5

(a) bandit: an op that starts at 1 % probability, one slot and one blueprint are right. (b) cartpole: positions only, with
and without memory. (c) garden: a lifecycle solved exactly by dynamic programming, in three units of reward;
orchard: the real environment, reward and training loop, with a table in place of training. (d), the same weights on other hosts,
is `tests/test_network.py::test_the_same_weights_act_on_any_host`.
"""

import math
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from esper.leyline import LifecycleOp
from esper.simic import PPOAgent, PPOConfig, TrainConfig, Training
from esper.tamiyo import Controller, NetworkConfig
from esper.tolaria import EnvConfig
from experiments.orchard import FAMILY, Orchard, optimum
from experiments.shared import parser, write
from experiments.toys import Bandit, CartPole, Garden, Lottery, WorldCollector

PASSED = {"bandit": ("reward", 0.9, 1.0), "garden": ("share", 0.95, 1.01), "orchard": ("share", 0.9, 1.0001),
          "cartpole": ("reached", 450, 500), "cartpole, no memory": ("reached", 0, 150)}
"""rung -> (number, least, most) of every seed."""
SMALL = NetworkConfig(hidden=64, slot=32, candidate=16, trunk=32)


def bandit(seed: int, ratio: str = "joint", updates: int = 100) -> dict[str, float]:
    """(probability of the right op at first, mean reward of the last tenth)."""
    torch.manual_seed(seed)
    world, rows = Bandit(64, seed), 64
    controller = Controller.fresh(world.spec, SMALL, world.observation)
    odds = 0.01 / 0.99 * (len(world.spec.ops) - 1)
    controller.network.op_head[-1].bias.detach()[world.spec.ops.index(LifecycleOp.GERMINATE)] = math.log(odds)
    agent = PPOAgent(controller, PPOConfig(updates=updates, ratio=ratio), seed=seed)
    collector, buffer, rewards, first = WorldCollector(agent, world, rows), agent.buffer(4, rows), [], math.nan
    for update in range(updates):
        last = collector.fill(buffer)
        if update == 0:
            first = float((buffer["actions"][..., 0] == world.spec.ops.index(LifecycleOp.GERMINATE)).float().mean())
        rewards.append(float(buffer["reward"].mean()))
        agent.update(buffer, last)
    return {"germinates at first": first, "reward": statistics.mean(rewards[-max(1, updates // 10) :])}


def lottery(seed: int, tell: bool, updates: int = 100) -> dict[str, float]:
    """How often the last tenth of updates chose right, in a bandit whose rewards are mostly luck."""
    torch.manual_seed(seed)
    world, rows = Lottery(64, seed, tell), 64
    controller = Controller.fresh(world.spec, replace(SMALL, privileged=int(tell)), world.observation)
    agent = PPOAgent(controller, PPOConfig(updates=updates), seed=seed)
    collector, buffer, right = WorldCollector(agent, world, rows), agent.buffer(4, rows), []
    for _ in range(updates):
        last, chosen = collector.fill(buffer), buffer["actions"]
        germinates = chosen[..., 0] == world.spec.ops.index(LifecycleOp.GERMINATE)
        right.append(float((germinates & (chosen[..., 1:] == torch.tensor(world.right)).all(-1)).float().mean()))
        agent.update(buffer, last)
    return {"right": statistics.mean(right[-max(1, updates // 10) :])}


def cartpole(seed: int, ratio: str = "joint", memory: bool = True, updates: int = 60, rows: int = 32) -> dict[str, Any]:
    """Mean return of the last 100 episodes at the end, the best it was, and the curve of it."""
    torch.manual_seed(seed)
    world = CartPole(rows, seed)
    controller = Controller.fresh(world.spec, NetworkConfig(64, 16, 8, 64, memory), world.observation)
    config = PPOConfig(updates=updates, ratio=ratio, gamma=0.99, learning_rate=(2e-3, 2e-4), entropy=(0.01, 0.0),
                       explore=(0.0, 0.0), epochs=6, target_kl=0.05)
    agent = PPOAgent(controller, config, seed=seed)
    collector, buffer, curve = WorldCollector(agent, world, rows), agent.buffer(128, rows, chunk=64), []
    for _ in range(updates):
        agent.update(buffer, collector.fill(buffer))
        curve.append(statistics.mean(world.returns[-100:]))
    rounded = [round(value, 1) for value in curve[4::5]]
    return {"steps": updates * rows * 128, "return": curve[-1], "reached": max(curve), "curve": rounded}


def garden(seed: int, ratio: str = "joint", updates: int = 200, rows: int = 128, unit: float = 1.0) -> dict[str, Any]:
    """Share of the optimum that the learned policy reaches when it takes its likeliest actions; `unit` scales all rewards."""
    torch.manual_seed(seed)
    world = Garden(rows, seed, unit)
    controller = Controller.fresh(world.spec, SMALL, world.observation)
    config = PPOConfig(updates=updates, ratio=ratio, entropy=(0.2, 0.001), explore=(0.05, 0.0))
    agent = PPOAgent(controller, config, seed=seed)
    collector, buffer = WorldCollector(agent, world, rows), agent.buffer(world.horizon, rows)
    for _ in range(updates):
        agent.update(buffer, collector.fill(buffer))
    exam, hidden = Garden(256, seed + 1), controller.network.get_initial_hidden(256)
    for _ in range(exam.horizon):
        _, acted = controller.act(exam.look(), hidden, greedy=True)
        exam.step(acted.actions)
        hidden = acted.hidden
    best = [Garden.optimum(price) for price in range(len(Garden.prices))]
    mine = [statistics.mean(total for price, total in exam.returns if price == p) for p in range(len(best))]
    return {"share": sum(mine) / sum(best), "returns": mine, "optimum": best}


def orchard(seed: int, ratio: str = "joint", updates: int = 200, rows: int = 128) -> dict[str, float]:
    """Share of the optimum that a controller reaches which was trained by `Training`, as `esper train` does it."""
    ppo = PPOConfig(ratio=ratio, entropy=(0.15, 0.001), explore=(0.05, 0.0))
    config = TrainConfig(EnvConfig(FAMILY), updates, rows, exam_every=0, exam_rows=256, seed=seed, score="score", network=SMALL,
                         ppo=ppo)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(config, Path(folder), make=Orchard)
        training.run()
        mine = training.examine("learned", training.learned, updates)
    best = optimum(FAMILY.scenarios(256, "validation"), training.exam[0][0].env)
    return {"share": float(mine.sum() / best.sum()), "utility": float(mine.mean()), "optimum": float(best.mean())}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=5)
    options_of.add_argument("--only", default="", help="one rung, by its name")
    options = options_of.parse_args()
    rungs = {f"{run.__name__}, {ratio}": (run, ratio) for ratio in ("joint", "per_head") for run in (bandit, garden)}
    rungs |= {"cartpole": (cartpole, "joint", True), "cartpole, no memory": (cartpole, "joint", False)}  # one head: ratios agree
    rungs["orchard"] = (orchard, "joint")
    rungs |= {f"garden, rewards x {unit}": (garden, "joint", 200, 128, unit) for unit in (0.01, 100.0)}
    rungs = {name: rung for name, rung in rungs.items() if options.only in ("", name)}
    result: dict[str, Any] = {}
    with ProcessPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        started = {name: [pool.submit(run, seed, *rest) for seed in range(options.seeds)] for name, (run, *rest) in rungs.items()}
        for name, runs in started.items():
            result[name] = [run.result() for run in runs]
            print(name, [{k: v for k, v in one.items() if k != "curve"} for one in result[name]], flush=True)
    for name in rungs:
        key, least, most = PASSED.get(name) or PASSED[name.split(",")[0]]
        result[f"{name}: passed"] = all(least <= one[key] <= most for one in result[name])
    print({name: value for name, value in result.items() if name.endswith("passed")})
    write(options, f"ladder-{options.only}" if options.only else "ladder", result)


if __name__ == "__main__":
    main()
