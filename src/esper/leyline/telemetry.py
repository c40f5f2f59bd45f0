"""The one way out for facts about a run: columns for a table. Writers do not know who keeps them, or how."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Sink(Protocol):
    """Takes rows as columns. Nothing is kept before `commit`, and everything is after it."""

    def write(self, table: str, columns: Mapping[str, object]) -> None:
        """Columns of equal length; a single value stands for all rows."""

    def commit(self) -> None: ...


class Nowhere:
    """A sink that keeps nothing."""

    def write(self, table: str, columns: Mapping[str, object]) -> None: ...

    def commit(self) -> None: ...


class UpdateMetric(NamedTuple):
    """A number that every update of the controller reports."""

    reducer: str  # how the optimiser steps of an update become one number
    help: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False


UPDATE_METRICS: Mapping[str, UpdateMetric] = {
    "policy_loss": UpdateMetric("mean", "clipped surrogate, per step that had a choice"),
    "value_loss": UpdateMetric("mean", "half the squared error of the value, clipped", low=0),
    "entropy": UpdateMetric("mean", "of the joint action", "nats", 0),
    "kl": UpdateMetric("mean", "of the joint action from behaviour to now (k3 estimate)", "nats"),
    "clip_fraction": UpdateMetric("mean", "share of ratios outside the clip range", "", 0, 1),
    "ratio_max": UpdateMetric("max", "largest joint ratio", low=0),
    "ratio_min": UpdateMetric("min", "smallest joint ratio", low=0),
    "grad_norm": UpdateMetric("mean", "before clipping", low=0),
    "value_error": UpdateMetric("mean", "mean absolute error of the value, in units of its scale", low=0),
    "replay_error": UpdateMetric("max", "largest difference of a replayed log-probability or (relative) "
                                 "value from the stored one", low=0),
    "advantage_mean": UpdateMetric("last", "before normalisation"),
    "advantage_std": UpdateMetric("last", "before normalisation", low=0),
    "explained_variance": UpdateMetric("last", "of returns by values, before the update", high=1),
    "steps": UpdateMetric("sum", "optimiser steps taken", low=0, whole=True),
    "skipped": UpdateMetric("sum", "steps left out for a non-finite gradient", low=0, whole=True),
    "stopped_early": UpdateMetric("last", "the joint KL passed its limit", low=0, whole=True),
    "learning_rate": UpdateMetric("last", "of this update", low=0)}
HEAD_METRICS: Mapping[str, UpdateMetric] = {
    "entropy": UpdateMetric(
        "last", "conditional entropy of the head while acting, as a share of its most", "", 0, 1.0001),
    "grad_norm": UpdateMetric("mean", "gradient norm of the head's own weights", low=0),
    "learnable": UpdateMetric("last", "share of steps at which the head mattered and had a choice", "", 0, 1)}
"""Of every head of the action."""
