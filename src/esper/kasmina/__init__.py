"""Kasmina: the body. Hosts, blueprints, slots, the lifecycle, and the population that runs them as one program."""

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, SeedKind, blueprints_for, find_blueprint, register_blueprint
from esper.kasmina.hosts import HOSTS, Host, Impairments
from esper.kasmina.lifecycle import Lifecycle
from esper.kasmina.network import GrownNetwork
from esper.kasmina.optim import OptimConfig
from esper.kasmina.population import INCUBATION, Population

__all__ = [
    "BLUEPRINTS",
    "HOSTS",
    "INCUBATION",
    "Blueprint",
    "GrownNetwork",
    "Host",
    "Impairments",
    "Lifecycle",
    "OptimConfig",
    "Population",
    "SeedKind",
    "blueprints_for",
    "find_blueprint",
    "register_blueprint",
]
