"""Does somebody else's learner learn to grow? sb3-contrib's MaskablePPO on `Esper/FAMILY-v0`, through Gymnasium alone.

    python -m experiments.sb3_learns --seeds 3

Every seed plays the same training scenarios and is examined, with its likeliest actions, on the same validation scenarios.
Beside it: actions drawn evenly from the mask, and the same network before it learned. Points of utility above no growth,
with 95 % half-widths over scenarios; differences are paired.
"""

import time
from typing import Any

import gymnasium
import numpy as np
import torch

import esper.gym  # noqa: F401
from experiments.shared import parser, write


def exam(name: str, choose: Any, scenarios: int) -> np.ndarray:
    """Returns [scenarios] of choose(observations, masks) on the first validation scenarios, one episode each."""
    env = gymnasium.make_vec(name, num_envs=scenarios, split="validation", scenarios=scenarios)
    seen, info = env.reset(options={"scenario": 0})
    assert (info["scenario"] == np.arange(scenarios)).all()
    total, running = np.zeros(scenarios), np.ones(scenarios, dtype=bool)
    while running.any():
        seen, reward, ended, _, info = env.step(choose(seen, info["action_mask"]))
        total += np.where(running, reward, 0)
        running &= ~ended
    return total


def evenly(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return lambda seen, masks: np.array([rng.choice(mask.nonzero()[0]) for mask in masks])


def adapted(name: str, rows: int, scenarios: int, seed: int) -> Any:
    """The vector environment in the shape that Stable-Baselines3 asks for."""
    from stable_baselines3.common.vec_env import VecEnv

    class Adapted(VecEnv):
        def __init__(self) -> None:
            self.env = gymnasium.make_vec(name, num_envs=rows, scenarios=scenarios, autoreset_mode="SameStep")
            super().__init__(rows, self.env.single_observation_space, self.env.single_action_space)

        def reset(self) -> Any:
            seen, self.info = self.env.reset(seed=seed)
            return seen

        def step_async(self, actions: Any) -> None:
            self.actions = actions

        def step_wait(self) -> Any:
            seen, reward, ended, _, self.info = self.env.step(self.actions)
            last = self.info.get("final_obs", [None] * rows)
            return seen, reward, ended, [{"terminal_observation": one} if over else {} for one, over in zip(last, ended, strict=True)]

        def env_method(self, method_name: str, *args: Any, **options: Any) -> Any:
            assert method_name == "action_masks"
            return list(self.info["action_mask"])

        def get_attr(self, attr_name: str, indices: Any = None) -> Any:
            return [None] * rows

        def has_attr(self, attr_name: str) -> bool:
            return attr_name == "action_masks"

        def set_attr(self, *args: Any, **options: Any) -> None: ...

        def env_is_wrapped(self, *args: Any, **options: Any) -> Any:
            return [False] * rows

        def close(self) -> None:
            self.env.close()

    return Adapted()


def learned(name: str, seed: int, options: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """({before, after: returns on validation scenarios}, facts of the run)."""
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(adapted(name, options.rows, options.scenarios, seed), gamma=1.0)
    model = MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=512, n_epochs=6, gamma=1.0, gae_lambda=0.95, learning_rate=7e-4,
                        ent_coef=0.01, seed=seed, device="cpu")
    found = {"before": exam(name, lambda seen, masks: model.predict(env.normalize_obs(seen), action_masks=masks,
                                                                    deterministic=True)[0], options.exam)}
    started = time.perf_counter()
    model.learn(options.steps)
    spent = time.perf_counter() - started
    env.training = False
    found["after"] = exam(name, lambda seen, masks: model.predict(env.normalize_obs(seen), action_masks=masks,
                                                                  deterministic=True)[0], options.exam)
    return found, {"steps": model.num_timesteps, "seconds": round(spent, 1)}


def points(values: np.ndarray) -> list[float]:
    """Mean and 95 % half-width."""
    return [round(100 * float(values.mean()), 2), round(196 * float(values.std(ddof=1)) / len(values) ** 0.5, 2)]


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--family", default="mlp")
    options_of.add_argument("--seeds", type=int, default=3)
    options_of.add_argument("--steps", type=int, default=65_536)
    options_of.add_argument("--rows", type=int, default=64)
    options_of.add_argument("--scenarios", type=int, default=1024)
    options_of.add_argument("--exam", type=int, default=128)
    options = options_of.parse_args()
    torch.set_num_threads(1)
    name, runs = f"Esper/{options.family}-v0", []
    for seed in range(options.seeds):
        chance = exam(name, evenly(seed), options.exam)
        found, facts = learned(name, seed, options)
        runs.append({"seed": seed, **facts, "learned": points(found["after"]), "before learning": points(found["before"]),
                     "random": points(chance), "learned less random": points(found["after"] - chance),
                     "learned less before": points(found["after"] - found["before"])})
        print(runs[-1], flush=True)
        beaten = all(run["learned less random"][0] > run["learned less random"][1] for run in runs)
        write(options, f"sb3-{options.family}",
              {"family": options.family, "exam": options.exam, "runs": runs, "beats random": beaten})


if __name__ == "__main__":
    main()
