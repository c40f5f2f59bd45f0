"""Trackers: what rounds and examinations come to, told as they end to tools beside the store."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from esper.leyline import EsperError
from esper.leyline.telemetry import UPDATE_METRICS, Sink

FIGURES = {"round": {"utility": "train/return", "utility_error": "train/return_error"} | {
               name: f"train/{name}" for name in ("seconds", "episodes", "host_epochs", *UPDATE_METRICS)},
           "exam": {"utility": "eval/gain"} | {name: f"eval/{name}" for name in ("score", "params", "spent")}}
"""table -> column -> name of its mean; that of another policy than the learned one is eval/POLICY/..."""


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> object:
        """Finite figures by name; the step is how many rounds are done."""


class Tracked:
    """A sink that hands everything to another, and tells trackers of rounds and examinations it has kept."""

    def __init__(self, sink: Sink, trackers: Sequence[Tracker]) -> None:
        self.sink, self.trackers, self._waiting = sink, trackers, list[tuple[int, dict[str, float]]]()

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        self.sink.write(table, columns)
        if table in FIGURES:
            who = columns.get("policy", "learned")
            told = {name if who == "learned" else name.replace("/", f"/{who}/"):
                    float(torch.as_tensor(columns[column], dtype=torch.float64).mean())
                    for column, name in FIGURES[table].items()}
            finite = {name: value for name, value in told.items() if math.isfinite(value)}
            self._waiting.append((columns["round"] + (table == "round"), finite))

    def commit(self) -> None:
        self.sink.commit()
        waiting, self._waiting = self._waiting, []
        for tracker in self.trackers:
            for step, values in waiting:
                tracker.log(step, values)


class _JsonLines:
    def __init__(self, path: str) -> None:
        self.path = path
        open(path, "a").close()  # to know now whether it can be written

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


class _TensorBoard:
    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


TRACKERS: Mapping[str, Callable[[str], Tracker]] = {"jsonl": _JsonLines, "tensorboard": _TensorBoard}


def open_tracker(asked: str) -> Tracker:
    """Of KIND:PATH."""
    kind, _, where = asked.partition(":")
    if kind not in TRACKERS or not where:
        raise EsperError(f"--log {asked} is not KIND:PATH with KIND one of {', '.join(TRACKERS)}")
    try:
        return TRACKERS[kind](where)
    except (ImportError, OSError) as error:  # TensorBoard is not among Esper's requirements
        raise EsperError(f"cannot write --log {asked}: {error}") from error
