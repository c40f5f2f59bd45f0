"""Tolaria: the workshop. Tasks and data, scenarios, training, evidence, the governor and the environment."""

from esper.tolaria.env import EnvConfig, MakeEnv, Measurement, MorphogeneticEnv
from esper.tolaria.episodes import Decision, Episodes, Twins, batches, charges, play, replay, utility
from esper.tolaria.evaluation import Evidence, Scores, evaluate
from esper.tolaria.families import FAMILIES, find_family, register_family
from esper.tolaria.governor import Governor, GovernorConfig
from esper.tolaria.openings import openings
from esper.tolaria.previews import PreviewConfig, preview_candidates
from esper.tolaria.scenarios import Family, Kind, Scenarios
from esper.tolaria.tasks import TASKS, ProofKey, Task, TaskData, load_task, open_test, register_task
from esper.tolaria.universe import Universe, find_universe, ordinary

__all__ = [
    "FAMILIES", "TASKS", "Decision", "EnvConfig", "Episodes", "Evidence", "Family", "Governor",
    "GovernorConfig", "Kind", "MakeEnv", "Measurement", "MorphogeneticEnv", "PreviewConfig", "ProofKey",
    "Scenarios", "Scores", "Task", "TaskData", "Twins", "Universe", "batches", "charges", "evaluate",
    "find_family", "find_universe", "load_task", "open_test", "openings", "ordinary", "play",
    "preview_candidates", "register_family", "register_task", "replay", "utility",
]
