"""Every column of the run store: name, type, unit, range and what it means. Tables are made from this."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from esper.leyline.telemetry import HEAD_METRICS, UPDATE_METRICS, UpdateMetric

SCHEMA = 3
"""Of these tables; every store says its own (PRAGMA user_version). It rises when a table changes."""


@dataclass(frozen=True)
class Metric:
    """One column. Values outside its range are refused; what was not measured is NULL."""

    kind: str  # INTEGER, REAL or TEXT
    help: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    key: bool = False  # part of what names a row: written again, it replaces the row

    def __post_init__(self) -> None:
        if self.kind not in ("INTEGER", "REAL", "TEXT"):
            raise TypeError(f"a metric is INTEGER, REAL or TEXT; got {self}")


_real, _text = partial(Metric, "REAL"), partial(Metric, "TEXT")
_int = partial(Metric, "INTEGER", low=0)
_key = partial(_int, key=True)
_share = partial(_real, low=0, high=1)
_score = partial(_real, unit="score")
_chance = partial(_real, low=0, high=1.0001)


def _columns(metrics: Mapping[str, UpdateMetric]) -> dict[str, Metric]:
    """What an update reports, as columns."""
    return {name: Metric("INTEGER" if m.whole else "REAL", m.help, m.unit, m.low, m.high)
            for name, m in metrics.items()}


_ROUND = {"round": _key("rounds before this one")}
_WHERE = {**_ROUND, "epoch": _key("of the episode, 1 is the first", low=1), "row": _key("of the environment")}
_ENDS = {"low": _score("end of its 95 % interval"), "high": _score("end of its 95 % interval")}
_WHO = {"controller": _text("it belongs to; all: shared", key=True), "arm": _text("who decided", key=True)}
_REWARD = {"gain": "score above the twin", "size": "price of live seeds", "compute": "price of extra FLOPs",
           "credit": "leave-one-out contributions", "potential": "shaping"}
TABLES: Mapping[str, Mapping[str, Metric]] = {
    "step": {
        **_WHERE, "scenario": _int("its key", low=-math.inf), "op": _text("operation"),
        "slot": _int("chosen, if it matters"), "blueprint": _text("chosen, if it matters"),
        "chance": _chance("of the whole action, when it was drawn"),
        **{f"chance_{head}": _chance(f"of this {head}; NULL: it did not matter or there was no choice")
           for head in ("op", "slot", "blueprint")},
        "value": _real("return that the controller expected from here on", "score"),
        "reward": _real("of this epoch", "score", -10, 10),
        **{f"reward_{name}": _real(f"its part for {why}", "score", -10, 10) for name, why in _REWARD.items()},
        "score": _share("of the network, delivered at the end"),
        "twin": _share("of the twin at the same clock"), "loss": _real("validation", "nats", 0),
        "smooth": _share("smooth validation score"), "train_loss": _real("mean of the epoch", "nats", 0),
        "params": _int("of live seeds"), "spent": _real("extra FLOPs, share of the host's", low=0),
        "rolled_back": _int("by the governor"), "done": _int("the episode ended here")},
    "move": {
        **_WHERE, "slot": _key("of the host"), "source": _text("stage left", key=True),
        "target": _text("stage entered", key=True)},
    "seed": {
        **_WHERE, "slot": _key("of the host; an empty one has no row"),
        "stage": _text("after the epoch"), "blueprint": _text("of the seed"),
        "alpha": _share("after the epoch"), "contribution": _score("smooth score that is lost without it"),
        "preview": _score("smooth score that it would bring, while it incubates"),
        "error": _score("standard error of the one or the other", low=0)},
    "round": {
        **_ROUND, "seconds": _real("of the round", "s", 0),
        "ended": _real("when it was over, since 1970", "s", 0), "host_epochs": _int("trained"),
        "episodes": _int("ended"), "utility": _score("mean return"),
        "utility_error": _score("its standard error", low=0), **_columns(UPDATE_METRICS)},
    "worker": {
        **_ROUND, "shard": _key("of the round"), "worker": _text("who played it: host and process, or here"),
        "seconds": _real("that it took there", "s", 0), "host_epochs": _int("trained, without twins"),
        "tries": _int("of workers; more than 1: others were lost with it", low=1),
        "log": _text("what the worker printed, the end of it")},
    "head": {**_ROUND, "head": _text("of the action", key=True), **_columns(HEAD_METRICS)},
    "anomaly": {
        **_ROUND, "kind": _text("of trouble", key=True), "place": _text("head or metric", key=True),
        "value": _real("that was alarming")},
    "fact": {
        "round": _key("rounds before it was noted: 0, or those before the run was resumed"),
        "name": _text("of the fact", key=True), "value": _text("as JSON")},
    "arm": {
        **_WHO, "scenario": _key("number"), "kind": _text("hidden type"),
        "price": _score("per parameter", low=0),
        "flop_price": _score("per training of the bare host, of extra FLOPs", low=0),
        "horizon": _int("epochs of the episode"), "utility": _score("score less prices"),
        "score": _share("accuracy of the delivered network"),
        "params": _int("grown, in the delivered network"),
        "flops": _real("of the episode, in trainings of the bare host", low=0)},
    "decision": {
        **_WHO, "scenario": _key("number"), "epoch": _key("of the episode, 0 is the first"),
        "op": _text("anything but WAIT"), "slot": _int("it was done in"),
        "blueprint": _text("of a GERMINATE")},
    "summary": {
        **_WHO, "gain": _score("utility above no growth"), **_ENDS,
        "middle": _score("interquartile mean of the gain"), "utility": _score("mean"),
        "score": _share("mean accuracy of the delivered networks"), "params": _real("mean grown", low=0),
        "flops": _real("mean, in trainings of the bare host", low=0),
        "episodes": _int("it was tuned or trained with")},
    "claim": {
        "controller": _text("that it is about", key=True), "control": _text("it is compared with", key=True),
        "asked": _text("beats, matches, half or reported", key=True), "n": _int("scenarios"),
        "difference": _score("mean of paired differences"), **_ENDS,
        "improvement": _share("probability to do better on a scenario"),
        "needed": _int("scenarios that the power estimate asks for"),
        "verdict": _text("holds, fails, refused or reported"), "reason": _text("for a refusal")},
    "exam": {
        "round": _key("rounds of training before it"), "policy": _text("who decided", key=True),
        "scenario": _key("number"), "utility": _score("return"), "score": _share("delivered"),
        "params": _int("of fossils"), "spent": _real("extra FLOPs, share of the host's", low=0)},
    "seal": {
        "scope": _text('"round 7": its rows in all tables; "all": every row', key=True),
        "digest": _text("SHA-256 of those rows, which `verify` computes again")}}
"""table -> column -> metric."""
VIEWS = {"incident": """CREATE VIEW incident AS
WITH alarm AS (SELECT round, kind, substr(place, 1, instr(place || ' at ', ' at ') - 1) AS what, value
               FROM anomaly),
     known AS (SELECT *, round - row_number() OVER (PARTITION BY kind, what ORDER BY round) AS spell
               FROM alarm)
SELECT kind, what, min(round) AS opened,
       CASE WHEN max(round) < (SELECT max(round) FROM round) THEN max(round) + 1 END AS closed,
       count(*) AS rounds, max(value) AS most, min(value) AS least
FROM known GROUP BY kind, what, spell"""}
"""view -> the statement that makes it. An incident is one spell of an anomaly: rounds on end in which it was
alarming; it is closed by the first round in which it is not."""
INCIDENT = {
    "kind": "of trouble", "what": "the head, metric or place", "opened": "first round", "closed":
    "first round in which it was over; NULL: it is open", "rounds": "that it lasted", "most":
    "largest value", "least": "smallest value"}
"""Columns of the view in words."""
KEYS = {table: [name for name, metric in columns.items() if metric.key] for table, columns in TABLES.items()}
"""table -> the columns that name a row."""
CREATE = {table: "CREATE TABLE {} ({}, PRIMARY KEY ({})) WITHOUT ROWID".format(
    table, ", ".join(f'"{name}" {metric.kind}' for name, metric in columns.items()),
    ", ".join(KEYS[table])) for table, columns in TABLES.items()} | VIEWS
"""table or view -> the statement that makes it, as SQLite keeps it."""
