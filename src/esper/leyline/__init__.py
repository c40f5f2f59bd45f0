"""Leyline: the contracts every room shares. Enums, tables, specs, records and errors; no behaviour."""

from esper.leyline.actions import (
    ALPHA_SPEEDS,
    ALPHA_TARGETS,
    RELEVANCE,
    TEMPOS,
    ActionSpec,
    AlphaCurve,
    Head,
    LifecycleOp,
    Style,
    relevance_table,
)
from esper.leyline.errors import EsperError, InvalidStateMachineError, StateFormatError
from esper.leyline.records import Contribution, Cost, Rollback, SlotConfig, SlotShape, Transition, View
from esper.leyline.stages import TRANSITIONS, GateConfig, SeedStage, check_transitions

__all__ = [
    "ALPHA_SPEEDS",
    "ALPHA_TARGETS",
    "RELEVANCE",
    "TEMPOS",
    "TRANSITIONS",
    "ActionSpec",
    "AlphaCurve",
    "Contribution",
    "Cost",
    "EsperError",
    "GateConfig",
    "Head",
    "InvalidStateMachineError",
    "LifecycleOp",
    "Rollback",
    "SeedStage",
    "SlotConfig",
    "SlotShape",
    "StateFormatError",
    "Style",
    "Transition",
    "View",
    "check_transitions",
    "relevance_table",
]
