"""Every column of the run store: name, type, unit, range and what it means. Tables are made from this."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from esper.leyline.telemetry import HEAD_METRICS, UPDATE_METRICS, UpdateMetric

SCHEMA = 2
"""Of these tables; every store says its own (PRAGMA user_version). It rises when a table changes."""


@dataclass(frozen=True)
class Metric:
    """One column. Values outside its range are refused; what was not measured is NULL."""

    kind: str
    """INTEGER, REAL or TEXT."""
    help: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    key: bool = False
    """Part of what names a row: written again, it replaces the row."""

    def __post_init__(self) -> None:
        if self.kind not in ("INTEGER", "REAL", "TEXT"):
            raise TypeError(f"a metric is INTEGER, REAL or TEXT; got {self}")


def _key(help: str, low: float = 0) -> Metric:
    return Metric("INTEGER", help, low=low, key=True)


def _real(help: str, unit: str = "", low: float = -math.inf, high: float = math.inf) -> Metric:
    return Metric("REAL", help, unit, low, high)


def _int(help: str, low: float = 0) -> Metric:
    return Metric("INTEGER", help, low=low)


def _text(help: str, key: bool = False) -> Metric:
    return Metric("TEXT", help, key=key)


def _columns(metrics: Mapping[str, UpdateMetric]) -> dict[str, Metric]:
    """What an update reports, as columns."""
    return {name: Metric("INTEGER" if m.whole else "REAL", m.help, m.unit, m.low, m.high)
            for name, m in metrics.items()}


_WHERE = {"round": _key("rounds before this one"), "epoch": _key("of the episode, 1 is the first", low=1),
          "row": _key("of the environment")}
_WHO = {"controller": _text("it belongs to; all: shared", key=True), "arm": _text("who decided", key=True)}
_REWARD = {"gain": "score above the twin", "size": "price of live seeds", "compute": "price of extra FLOPs",
           "credit": "leave-one-out contributions", "potential": "shaping"}
TABLES: Mapping[str, Mapping[str, Metric]] = {
    "step": {
        **_WHERE, "scenario": _int("its key", low=-math.inf), "op": _text("operation"),
        "slot": _int("chosen, if it matters"), "blueprint": _text("chosen, if it matters"),
        "reward": _real("of this epoch", "score", -10, 10),
        **{f"reward_{name}": _real(f"its part for {why}", "score", -10, 10) for name, why in _REWARD.items()},
        "score": _real("of the network, delivered at the end", "", 0, 1),
        "twin": _real("of the twin at the same clock", "", 0, 1), "loss": _real("validation", "nats", 0),
        "smooth": _real("smooth validation score", "", 0, 1),
        "train_loss": _real("mean of the epoch", "nats", 0),
        "params": _int("of live seeds"), "spent": _real("extra FLOPs, share of the host's", "", 0),
        "rolled_back": _int("by the governor"), "done": _int("the episode ended here"),
    },
    "move": {
        **_WHERE, "slot": _key("of the host"), "source": _text("stage left", key=True),
        "target": _text("stage entered", key=True),
    },
    "round": {
        "round": _key("rounds before this one"), "seconds": _real("of the round", "s", 0),
        "host_epochs": _int("trained"), "episodes": _int("ended"), "utility": _real("mean return", "score"),
        "utility_error": _real("its standard error", "score", 0), **_columns(UPDATE_METRICS),
    },
    "head": {
        "round": _key("rounds before this one"), "head": _text("of the action", key=True),
        **_columns(HEAD_METRICS),
    },
    "anomaly": {
        "round": _key("rounds before this one"), "kind": _text("of trouble", key=True),
        "place": _text("head or metric", key=True), "value": _real("that was alarming"),
    },
    "arm": {
        **_WHO, "scenario": _key("number"), "kind": _text("hidden type"),
        "price": _real("per parameter", "score", 0),
        "flop_price": _real("per training of the bare host, of extra FLOPs", "score", 0),
        "horizon": _int("epochs of the episode"), "utility": _real("score less prices", "score"),
        "score": _real("accuracy of the delivered network", "", 0, 1),
        "params": _int("grown, in the delivered network"),
        "flops": _real("of the episode, in trainings of the bare host", "", 0),
    },
    "decision": {
        **_WHO, "scenario": _key("number"), "epoch": _key("of the episode, 0 is the first"),
        "op": _text("anything but WAIT"), "slot": _int("it was done in"),
        "blueprint": _text("of a GERMINATE"),
    },
    "summary": {
        **_WHO, "gain": _real("utility above no growth", "score"),
        "low": _real("end of its 95 % interval", "score"), "high": _real("end of its 95 % interval", "score"),
        "middle": _real("interquartile mean of the gain", "score"), "utility": _real("mean", "score"),
        "score": _real("mean accuracy of the delivered networks", "", 0, 1),
        "params": _real("mean grown", "", 0), "flops": _real("mean, in trainings of the bare host", "", 0),
        "episodes": _int("it was tuned or trained with"),
    },
    "claim": {
        "controller": _text("that it is about", key=True), "control": _text("it is compared with", key=True),
        "asked": _text("beats, matches, half or reported", key=True), "n": _int("scenarios"),
        "difference": _real("mean of paired differences", "score"),
        "low": _real("end of its 95 % interval", "score"), "high": _real("end of its 95 % interval", "score"),
        "improvement": _real("probability to do better on a scenario", "", 0, 1),
        "needed": _int("scenarios that the power estimate asks for"),
        "verdict": _text("holds, fails, refused or reported"), "reason": _text("for a refusal"),
    },
    "exam": {
        "round": _key("rounds of training before it"), "policy": _text("who decided", key=True),
        "scenario": _key("number"), "utility": _real("return", "score"),
        "score": _real("delivered", "", 0, 1), "params": _int("of fossils"),
        "spent": _real("extra FLOPs, share of the host's", "", 0),
    },
    "seal": {
        "scope": _text('"round 7": its rows in all tables; "all": every row', key=True),
        "digest": _text("SHA-256 of those rows, which `verify` computes again"),
    },
}
"""table -> column -> metric."""
CREATE = {table: "CREATE TABLE {} ({}, PRIMARY KEY ({})) WITHOUT ROWID".format(
    table, ", ".join(f'"{name}" {metric.kind}' for name, metric in columns.items()),
    ", ".join(name for name, metric in columns.items() if metric.key)) for table, columns in TABLES.items()}
"""table -> the statement that makes it, as SQLite keeps it."""
