"""Tolaria: the workshop. Tasks and data, scenarios, training, evidence, the governor and the environment."""

from esper.tolaria.env import Measurement, MorphogeneticEnv
from esper.tolaria.evaluation import Evidence, Scores, evaluate
from esper.tolaria.families import FAMILIES, find_family
from esper.tolaria.governor import Governor, GovernorConfig
from esper.tolaria.previews import PreviewConfig, preview_candidates
from esper.tolaria.rounds import Trace, Twins, play, replay
from esper.tolaria.scenarios import Family, Kind, Scenario, Scenarios
from esper.tolaria.tasks import TASKS, ProofKey, Task, TaskData, add_data, load_task, open_test, present

__all__ = [
    "FAMILIES",
    "TASKS",
    "Evidence",
    "Family",
    "Governor",
    "GovernorConfig",
    "Kind",
    "Measurement",
    "MorphogeneticEnv",
    "PreviewConfig",
    "ProofKey",
    "Scenario",
    "Scenarios",
    "Scores",
    "Task",
    "TaskData",
    "Trace",
    "Twins",
    "add_data",
    "evaluate",
    "find_family",
    "load_task",
    "open_test",
    "play",
    "present",
    "preview_candidates",
    "replay",
]
