"""Esper grows neural networks while they train.

    import esper

    family = esper.find_family("mlp")                         # scenarios on a task, with small hosts
    env = esper.MorphogeneticEnv(family, rows=16)             # sixteen host trainings as one program
    policy = esper.Learned.load("tamiyo-small", env.spec, greedy=True)
    episodes = esper.play(env, policy, family.scenarios(16))  # one decision per host and epoch
    episodes.utility(), episodes.decisions()

Names are imported when they are first used; `dir(esper)` lists them. Each room says what it holds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.door import attach, depths, export, grow, lightning_callback, trainer_callback
    from esper.kasmina import Host, Objective, OptimConfig, Population, register_blueprint, register_objective
    from esper.leyline import ActionSpec, EsperError, LifecycleOp, SeedStage
    from esper.simic import PPOAgent, PPOConfig, RewardWorld, TrainConfig, Training, register_reward
    from esper.simic.proof import prove
    from esper.tamiyo import Controller, Heuristic, Learned, Random, Wait, register_policy
    from esper.tolaria.env import EnvConfig, MorphogeneticEnv
    from esper.tolaria.episodes import Episodes, Twins, play, replay
    from esper.tolaria.families import find_family, register_family
    from esper.tolaria.scenarios import Family, Kind
    from esper.tolaria.tasks import Task, TaskData, load_task, register_task
    from esper.tolaria.universe import Universe, find_universe, ordinary

_ROOMS = ("leyline", "kasmina", "tamiyo", "tolaria", "simic", "simic.proof", "door")
"""Lowest first: none is imported for a name that a lower one has."""
__all__ = [
    "ActionSpec", "Controller", "EnvConfig", "Episodes", "EsperError", "Family", "Heuristic", "Host", "Kind",
    "Learned", "LifecycleOp", "MorphogeneticEnv", "Objective", "OptimConfig", "PPOAgent", "PPOConfig",
    "Population", "Random", "RewardWorld", "SeedStage", "Task", "TaskData", "TrainConfig", "Training",
    "Twins", "Universe", "Wait", "attach", "depths", "export", "find_family", "find_universe", "grow",
    "lightning_callback", "load_task", "ordinary", "play",
    "prove", "register_blueprint", "register_family", "register_objective", "register_policy",
    "register_reward", "register_task", "replay", "trainer_callback",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("esper.leyline.provenance").VERSION
    if name in __all__:
        rooms = (import_module(f"esper.{room}") for room in _ROOMS)
        return next(getattr(room, name) for room in rooms if name in room.__all__)
    raise AttributeError(f"module 'esper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
