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
from esper.leyline.records import Contribution, Cost, Rollback, SlotConfig, SlotShape, Transition
from esper.leyline.stages import TRANSITIONS, GateConfig, SeedStage, check_transitions
from esper.leyline.views import SCORES, Facts, Field, Observation, ObservationSpec, Seeds, View

__all__ = [
    "ALPHA_SPEEDS", "ALPHA_TARGETS", "RELEVANCE", "SCORES", "TEMPOS", "TRANSITIONS", "ActionSpec",
    "AlphaCurve", "Contribution", "Cost", "EsperError", "Facts", "Field", "GateConfig", "Head",
    "InvalidStateMachineError", "LifecycleOp", "Observation", "ObservationSpec", "Rollback", "SeedStage",
    "Seeds", "SlotConfig", "SlotShape", "StateFormatError", "Style", "Transition", "View",
    "check_transitions", "relevance_table",
]
