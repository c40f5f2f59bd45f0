"""Esper grows neural networks while they train.

    import esper

    family = esper.find_family("mlp")                         # scenarios on a task, with small hosts
    env = esper.MorphogeneticEnv(family, rows=16)             # sixteen host trainings as one program
    policy = esper.Learned.load("tamiyo-small", env.spec, greedy=True)
    episodes = esper.play(env, policy, family.scenarios(16))  # one decision per host and epoch
    episodes.utility(), episodes.decisions()

Names are imported when they are first used; `dir(esper)` lists them. The rooms behind them are
`esper.leyline` (contracts), `esper.kasmina` (hosts, seeds, populations), `esper.tolaria` (tasks,
environments, episodes), `esper.tamiyo` (policies, the controller), `esper.simic` (rewards, PPO, training,
proofs), `esper.nissa` (the run store) and `esper.karn` (reports).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.kasmina.blueprints import register_blueprint as register_blueprint
    from esper.kasmina.hosts import Host as Host
    from esper.kasmina.optim import OptimConfig as OptimConfig
    from esper.kasmina.population import Population as Population
    from esper.leyline.actions import ActionSpec as ActionSpec, LifecycleOp as LifecycleOp
    from esper.leyline.errors import EsperError as EsperError
    from esper.leyline.stages import SeedStage as SeedStage
    from esper.simic.ppo import PPOAgent as PPOAgent, PPOConfig as PPOConfig
    from esper.simic.proof.proving import prove as prove
    from esper.simic.training import TrainConfig as TrainConfig, Training as Training
    from esper.simic.world import RewardWorld as RewardWorld
    from esper.tamiyo.controller import Controller as Controller
    from esper.tamiyo.heuristic import Heuristic as Heuristic
    from esper.tamiyo.policies import Learned as Learned, Random as Random
    from esper.tamiyo.scripts import Wait as Wait
    from esper.tolaria.env import EnvConfig as EnvConfig, MorphogeneticEnv as MorphogeneticEnv
    from esper.tolaria.episodes import Episodes as Episodes, Twins as Twins, play as play, replay as replay
    from esper.tolaria.families import find_family as find_family, register_family as register_family
    from esper.tolaria.scenarios import Family as Family, Kind as Kind
    from esper.tolaria.tasks import TaskData as TaskData

_SURFACE = {
    "esper.leyline": ("ActionSpec", "EsperError", "LifecycleOp", "SeedStage"),
    "esper.kasmina": ("Host", "OptimConfig", "Population", "register_blueprint"),
    "esper.tolaria": ("EnvConfig", "Episodes", "Family", "Kind", "MorphogeneticEnv", "TaskData", "Twins",
                      "find_family", "play", "register_family", "replay"),
    "esper.tamiyo": ("Controller", "Heuristic", "Learned", "Random", "Wait"),
    "esper.simic": ("PPOAgent", "PPOConfig", "RewardWorld", "TrainConfig", "Training"),
    "esper.simic.proof": ("prove",),
}
_ROOM_OF = {name: room for room, names in _SURFACE.items() for name in names}
_ROOM_OF["__version__"] = "esper.leyline.provenance"
__all__ = sorted(name for name in _ROOM_OF if not name.startswith("_"))


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    room = import_module(_ROOM_OF[name])
    return room.VERSION if name == "__version__" else getattr(room, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
