"""Kasmina: the body. Hosts, blueprints, slots, the lifecycle, and the population that runs them as one."""

from esper.kasmina.blending import GrownNetwork
from esper.kasmina.blueprints import (
    BLUEPRINTS,
    Blueprint,
    SeedKind,
    blueprints_for,
    find_blueprint,
    register_blueprint,
)
from esper.kasmina.config import INCUBATION, PopulationConfig
from esper.kasmina.devices import check_device
from esper.kasmina.hosts import HOSTS, Host, Impairments
from esper.kasmina.lifecycle import Lifecycle
from esper.kasmina.objectives import OBJECTIVES, Objective, find_objective, register_objective
from esper.kasmina.optim import OptimConfig
from esper.kasmina.population import Population

__all__ = [
    "BLUEPRINTS", "HOSTS", "INCUBATION", "OBJECTIVES", "Blueprint", "GrownNetwork", "Host", "Impairments",
    "Lifecycle", "Objective", "OptimConfig", "Population", "PopulationConfig", "SeedKind", "blueprints_for",
    "check_device", "find_blueprint", "find_objective", "register_blueprint", "register_objective",
]
