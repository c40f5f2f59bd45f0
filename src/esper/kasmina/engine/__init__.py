"""The engine: a whole run as one captured program on CUDA. Wiring is data that its kernels read.

It needs Triton, float32 weights, shadow incubation, and layers that have an op (`program`). Everything else,
a user's own layers too, runs by the general path (`grouped`).
"""

import importlib.util
from typing import TYPE_CHECKING

import torch

from esper.kasmina.engine.epoch import Engines
from esper.kasmina.engine.program import programs_of
from esper.leyline import Head, Style

if TYPE_CHECKING:
    from esper.kasmina.population import Population

__all__ = ["engines_of"]


def usable(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def engines_of(population: "Population") -> Engines | None:
    """None where the general path has to do."""
    if not usable(population.device):
        return None
    exact = population.dtype == torch.float32 and population.compute_dtype in (torch.float32, torch.bfloat16)
    if not exact or population.incubation != "shadow":
        return None
    spec = population.spec
    styles = tuple(Style) if Head.STYLE in spec.heads else (Style(spec.defaults[Head.STYLE]),)
    programs = programs_of(population.host, tuple(map(tuple, population.prototypes)), styles)
    return None if programs is None else Engines(population, programs)
