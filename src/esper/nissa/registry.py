"""Every column of the run store: name, type, unit, range, how it is summed up, what it means. Tables are made from this."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

REDUCERS = ("mean", "sum", "last", "max", "min", "none")


@dataclass(frozen=True)
class Metric:
    """One column. Values outside its range are refused; what was not measured is NULL."""

    kind: str
    """INTEGER, REAL or TEXT."""
    help: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    reducer: str = "mean"
    key: bool = False
    """Part of what names a row: written again, it replaces the row."""

    def __post_init__(self) -> None:
        if self.kind not in ("INTEGER", "REAL", "TEXT") or self.reducer not in REDUCERS:
            raise TypeError(f"a metric is INTEGER, REAL or TEXT and reduced by one of {', '.join(REDUCERS)}; got {self}")


def _key(help: str, low: float = 0) -> Metric:
    return Metric("INTEGER", help, low=low, reducer="none", key=True)


def _real(help: str, unit: str = "", low: float = -math.inf, high: float = math.inf, reducer: str = "mean") -> Metric:
    return Metric("REAL", help, unit, low, high, reducer)


def _int(help: str, low: float = 0, reducer: str = "none") -> Metric:
    return Metric("INTEGER", help, low=low, reducer=reducer)


def _text(help: str, key: bool = False) -> Metric:
    return Metric("TEXT", help, reducer="none", key=key)


_WHERE = {"round": _key("rounds before this one"), "epoch": _key("of the episode, 1 is the first", low=1),
          "row": _key("of the environment")}
_WHO = {"controller": _text("it belongs to; all: shared", key=True), "arm": _text("who decided", key=True)}
_REWARD = {"gain": "score above the twin", "size": "price of live seeds", "compute": "price of extra FLOPs",
           "credit": "leave-one-out contributions", "potential": "shaping"}
TABLES: Mapping[str, Mapping[str, Metric]] = {
    "step": {
        **_WHERE, "scenario": _int("its key", low=-math.inf), "op": _text("operation"), "slot": _int("chosen, if it matters"),
        "blueprint": _text("chosen, if it matters"), "reward": _real("of this epoch", "score", -10, 10, "sum"),
        **{f"reward_{name}": _real(f"its part for {what}", "score", -10, 10, "sum") for name, what in _REWARD.items()},
        "score": _real("of the network, delivered at the end", "", 0, 1, "last"),
        "twin": _real("of the twin at the same clock", "", 0, 1, "last"),
        "loss": _real("validation", "nats", 0, reducer="last"), "accuracy": _real("validation", "", 0, 1, "last"),
        "train_loss": _real("mean of the epoch", "nats", 0, reducer="last"),
        "params": _int("of live seeds", reducer="last"),
        "spent": _real("extra FLOPs, share of the host's", "", 0, reducer="last"),
        "rolled_back": _int("by the governor", reducer="sum"),
        "done": _int("the episode ended here", reducer="sum"),
    },
    "move": {
        **_WHERE, "slot": _key("of the host"), "source": _text("stage left", key=True),
        "target": _text("stage entered", key=True),
    },
    "round": {
        "round": _key("rounds before this one"), "seconds": _real("of the round", "s", 0, reducer="sum"),
        "host_epochs": _int("trained", reducer="sum"), "episodes": _int("ended", reducer="sum"),
        "utility": _real("mean return", "score"), "utility_error": _real("its standard error", "score", 0),
        "policy_loss": _real("clipped surrogate"), "value_loss": _real("clipped", "", 0), "entropy": _real("joint", "nats", 0),
        "kl": _real("joint, from behaviour", "nats"), "clip_fraction": _real("of ratios", "", 0, 1),
        "ratio_max": _real("joint", "", 0, reducer="max"), "ratio_min": _real("joint", "", 0, reducer="min"),
        "grad_norm": _real("before clipping", "", 0), "value_error": _real("in units of its scale", "", 0),
        "replay_error": _real("largest", "", 0, reducer="max"), "advantage_mean": _real("before normalisation"),
        "advantage_std": _real("before normalisation", "", 0), "explained_variance": _real("of returns", "", high=1),
        "steps": _int("of the optimiser", reducer="sum"), "skipped": _int("for non-finite gradients", reducer="sum"),
        "stopped_early": _int("by the KL", reducer="sum"), "learning_rate": _real("of this update", "", 0, reducer="last"),
    },
    "head": {
        "round": _key("rounds before this one"), "head": _text("of the action", key=True),
        "entropy": _real("conditional, share of its most", "", 0, 1.0001), "grad_norm": _real("of its last weights", "", 0),
        "learnable": _real("share of steps at which it mattered and had a choice", "", 0, 1),
    },
    "anomaly": {
        "round": _key("rounds before this one"), "kind": _text("of trouble", key=True),
        "place": _text("head or metric", key=True), "value": _real("that was alarming"),
    },
    "arm": {
        **_WHO, "scenario": _key("of the proof"), "kind": _text("hidden type"), "price": _real("per parameter", "score", 0),
        "horizon": _int("epochs of the episode"), "utility": _real("score less prices", "score"),
        "score": _real("accuracy on the test split", "", 0, 1), "params": _int("grown, in the delivered network"),
        "flops": _real("of the episode, in trainings of the bare host", "", 0),
    },
    "decision": {
        **_WHO, "scenario": _key("of the proof"), "epoch": _key("of the episode, 0 is the first"),
        "op": _text("anything but WAIT"), "slot": _int("it was done in"), "blueprint": _text("of a GERMINATE"),
    },
    "summary": {
        **_WHO, "gain": _real("utility above no growth", "score"), "low": _real("end of its 95 % interval", "score"),
        "high": _real("end of its 95 % interval", "score"), "middle": _real("interquartile mean of the gain", "score"),
        "utility": _real("mean", "score"), "score": _real("mean accuracy on the test split", "", 0, 1),
        "params": _real("mean grown", "", 0), "flops": _real("mean, in trainings of the bare host", "", 0),
        "episodes": _int("it was tuned or trained with"),
    },
    "claim": {
        "controller": _text("that it is about", key=True), "control": _text("it is compared with", key=True),
        "asked": _text("beats, matches, half or reported", key=True), "n": _int("scenarios"),
        "difference": _real("mean of paired differences", "score"), "low": _real("end of its 95 % interval", "score"),
        "high": _real("end of its 95 % interval", "score"),
        "improvement": _real("probability to do better on a scenario", "", 0, 1),
        "needed": _int("scenarios that the power estimate asks for"), "verdict": _text("holds, fails, refused or reported"),
        "reason": _text("for a refusal"),
    },
    "exam": {
        "round": _key("rounds of training before it"), "policy": _text("who decided", key=True), "scenario": _key("number", 0),
        "utility": _real("return", "score"), "score": _real("delivered", "", 0, 1), "params": _int("of fossils"),
        "spent": _real("extra FLOPs, share of the host's", "", 0),
    },
}
"""table -> column -> metric."""
