"""What an update reports, and what in it is alarming."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from esper.leyline.telemetry import HEAD_METRICS, UPDATE_METRICS, UpdateMetric

REDUCERS: dict[str, Callable[[list[float]], float]] = {  # what is no number is the most and the least of all
    "mean": lambda values: sum(values) / len(values),
    "max": lambda values: max(values, key=lambda value: math.inf if math.isnan(value) else value),
    "min": lambda values: min(values, key=lambda value: -math.inf if math.isnan(value) else value),
    "sum": sum,
    "last": lambda values: values[-1],
}


@dataclass(frozen=True)
class PPOUpdateMetrics:
    """One update; `METRICS` says what each number is. Numbers by head are named as the spec's heads are."""

    policy_loss: float
    value_loss: float
    entropy: float
    kl: float
    clip_fraction: float
    ratio_max: float
    ratio_min: float
    grad_norm: float
    value_error: float
    replay_error: float
    head_entropy: dict[str, float]
    head_grad_norm: dict[str, float]
    head_learnable: dict[str, float]
    advantage_mean: float
    advantage_std: float
    explained_variance: float
    steps: int
    skipped: int
    stopped_early: bool
    learning_rate: float
    anomalies: tuple["Anomaly", ...]

    def single(self) -> dict[str, Any]:
        """Everything that is one number."""
        return {name: getattr(self, name) for name in UPDATE_METRICS}

    def by_head(self) -> dict[str, list[Any]]:
        """What is known of every head, as columns."""
        columns = {name: list(getattr(self, f"head_{name}").values()) for name in HEAD_METRICS}
        return {"head": list(self.head_entropy), **columns}


METRICS = {**UPDATE_METRICS, **{f"head_{name}": metric for name, metric in HEAD_METRICS.items()},
           "anomalies": UpdateMetric("last", "open when the update ended")}
"""metric -> what it is; one for every field of `PPOUpdateMetrics`."""


def check_metrics(kind: type, table: Mapping[str, UpdateMetric]) -> None:
    """Raise unless the table has a row with a known reducer for each field of the dataclass."""
    names = {f.name for f in fields(kind)}
    if names != set(table) or not {metric.reducer for metric in table.values()} <= set(REDUCERS):
        odd = ", ".join(sorted(names ^ set(table))) or "reducers"
        raise TypeError(f"{kind.__name__} and its table differ in {odd}; "
                        f"give every metric one of {', '.join(REDUCERS)}")


check_metrics(PPOUpdateMetrics, METRICS)


def reduced(name: str, values: list[float]) -> float:
    """The values of one metric over an update as one number; NaN if there are none."""
    return float(REDUCERS[METRICS[name].reducer](values)) if values else math.nan


@dataclass(frozen=True)
class Thresholds:
    """When a number is alarming. One object for the agent and its detector."""

    ratio_max: float = 5.0
    ratio_min: float = 0.1
    head_entropy: float = 0.05  # least share of its most that a head's conditional entropy should keep
    head_grad_norm: float = 1e-7  # a head that could learn and has a smaller gradient is starved
    head_learnable: float = 1e-3  # a head that matters in a smaller share of steps is starved
    value_error: float = 5.0  # in units of the value's scale
    explained_variance: float = 0.0  # values that explain less of the returns are stale: a mean is as good
    fire_after: int = 3  # updates in a row before a creeping anomaly is reported
    clear_factor: float = 1.5  # it is over when the number is this much better than its threshold


AT = " at "  # between a metric and the place of its extreme


@dataclass(frozen=True)
class Anomaly:
    """Something alarming that is open."""

    kind: str  # as `AnomalyDetector._signs` has it
    where: str  # the head, or the metric; of a ratio also the step of the episode, the op and the head
    value: float

    @property
    def key(self) -> tuple[str, str]:
        """What stays the same while it is open; where exactly a ratio is worst may change."""
        return self.kind, self.where.partition(AT)[0]


class _Sign(NamedTuple):
    """One number to watch: alarming when `value` is beyond `threshold`, above it or below it."""

    kind: str
    where: str
    value: float
    threshold: float
    above: bool = False
    at_once: bool = False

    def beyond(self, factor: float = 1.0) -> bool:
        limit = self.threshold / factor if self.above else self.threshold * factor
        return self.value > limit if self.above else self.value < limit


class AnomalyDetector:
    """Watches updates. Explosions and non-finite numbers fire at once, what creeps after some updates."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self.counts: dict[tuple[str, str], int] = {}
        self.open: dict[tuple[str, str], Anomaly] = {}

    def __call__(self, numbers: dict[str, float], heads: dict[str, dict[str, float]],
                 places: Mapping[str, str] | None = None) -> tuple[Anomaly, ...]:
        """What is open after this update; `places` says for some of its numbers where they come from."""
        exact = {name: f"{name}{AT}{place}" for name, place in (places or {}).items()}
        signs = {(sign.kind, sign.where): sign for sign in self._signs(numbers, heads)}
        for key in self.open.keys() - signs.keys():  # no longer asked
            self.counts.pop(key, None)
            del self.open[key]
        for key, sign in signs.items():
            if sign.beyond():
                self.counts[key] = self.counts.get(key, 0) + 1
                if sign.at_once or self.counts[key] >= self.thresholds.fire_after:
                    self.open[key] = Anomaly(sign.kind, exact.get(sign.where, sign.where), sign.value)
            elif key not in self.open or not sign.beyond(self.thresholds.clear_factor):
                self.counts.pop(key, None)
                self.open.pop(key, None)
        return tuple(self.open.values())

    def _signs(self, numbers: dict[str, float], heads: dict[str, dict[str, float]]) -> Iterable[_Sign]:
        limit = self.thresholds
        yield _Sign("ratio_explosion", "ratio_max", numbers["ratio_max"], limit.ratio_max, True, True)
        yield _Sign("ratio_collapse", "ratio_min", numbers["ratio_min"], limit.ratio_min, False, True)
        yield _Sign("value_error", "value_error", numbers["value_error"], limit.value_error, True)
        explained = "explained_variance"
        yield _Sign("stale_values", explained, numbers[explained], limit.explained_variance)
        by_head = {f"{name} {head}": value for name, part in heads.items() for head, value in part.items()}
        for name, value in (numbers | by_head).items():
            yield _Sign("non_finite", name, float(not math.isfinite(value)), 0.0, above=True, at_once=True)
        for name, share in heads["head_learnable"].items():
            yield _Sign("starved", f"{name} learnable", share, limit.head_learnable)
            if share > limit.head_learnable:  # a head nobody asked says nothing about its entropy or gradient
                entropy, gradient = heads["head_entropy"][name], heads["head_grad_norm"][name]
                yield _Sign("entropy_collapse", name, entropy, limit.head_entropy)
                yield _Sign("starved", f"{name} gradient", gradient, limit.head_grad_norm)

    def state(self) -> dict[str, Any]:
        return {"counts": [[*key, count] for key, count in self.counts.items()],
                "open": [[a.kind, a.where, a.value] for a in self.open.values()]}

    def restore(self, state: dict[str, Any]) -> None:
        self.counts = {(kind, where): count for kind, where, count in state["counts"]}
        self.open = {anomaly.key: anomaly for anomaly in (Anomaly(*parts) for parts in state["open"])}
