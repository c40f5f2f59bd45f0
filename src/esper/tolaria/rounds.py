"""Rounds: play episodes to their end, record them, replay them, and know what would have happened without growth.

Legend: T epochs, N rows.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.kasmina import Host, OptimConfig
from esper.kasmina.population import DTYPES
from esper.leyline import ActionSpec, GateConfig, LifecycleOp, StateFormatError, View
from esper.leyline.storage import plain, read_state, rebuilt, write_state
from esper.tolaria.env import Measurement, MorphogeneticEnv
from esper.tolaria.governor import GovernorConfig
from esper.tolaria.previews import PreviewConfig
from esper.tolaria.scenarios import Family, Kind, Scenarios
from esper.tolaria.tasks import TaskData

Decide = Callable[[View], Tensor]


@dataclass
class Trace:
    """A recorded round: where it started, what was done, what was measured."""

    header: dict[str, Any]
    scenarios: Scenarios
    actions: Tensor  # [T, N, heads]
    measured: dict[str, Tensor]  # [T, N, ...]

    def save(self, path: str | Path) -> None:
        tensors = {"actions": self.actions}
        tensors |= {f"scenarios.{name}": t for name, t in self.scenarios.columns().items()}
        tensors |= {f"measured.{name}": t for name, t in self.measured.items()}
        write_state(path, "trace", self.header, tensors)

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        header, tensors = read_state(path, "trace")
        columns = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith("scenarios.")}
        measured = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith("measured.")}
        return cls(header, Scenarios(**columns, kinds=_family(header["family"]).kinds), tensors["actions"], measured)


def play(env: MorphogeneticEnv, decide: Decide, scenarios: Scenarios,
         watch: Callable[[Measurement], object] | None = None, most: int | None = None) -> Trace:
    """One episode in every row, all started together, until the last of them is done, or for `most` epochs."""
    env.reset(scenarios)
    actions: list[Tensor] = []
    measured = []
    while not bool(env.done.all()) and len(actions) != most:
        actions.append(decide(env.view()))
        measurement = env.step(actions[-1])
        measured.append({name: t.clone() for name, t in measurement.tensors().items()})
        if watch is not None:
            watch(measurement)
    stacked = {name: torch.stack([m[name] for m in measured]) for name in measured[0]}
    return Trace(_header(env), env.scenarios.take(torch.arange(env.rows)), torch.stack(actions), stacked)


def replay(trace: Trace, device: str | None = None, data: TaskData | None = None) -> list[str]:
    """Run a recorded round again: the names of measurements that differ in any bit, one "name, epoch, row" each."""
    header = trace.header
    env = _environment(header, len(trace.scenarios), device or str(header["device"]), data)
    again = play(env, _Recorded(trace.actions), trace.scenarios, most=len(trace.actions))
    same = len(again.actions)
    different = [] if same == len(trace.actions) else [f"length, epoch {same + 1}, every row"]
    for name, recorded in trace.measured.items():
        mine, tensor = again.measured[name], recorded[:same]
        unequal = ~((mine == tensor) | (mine.isnan() & tensor.isnan())) if mine.is_floating_point() else mine != tensor
        different += [f"{name}, epoch {place[0] + 1}, row {place[1]}" for place in unequal.nonzero().tolist()]
    return different


class _Recorded:
    def __init__(self, actions: Tensor) -> None:
        self.actions, self.at = actions, 0

    def __call__(self, view: View) -> Tensor:
        self.at += 1
        return self.actions[self.at - 1]


def _header(env: MorphogeneticEnv) -> dict[str, Any]:
    population = env.population
    return {"family": plain(env.family), "device": population.device.type, "torch": torch.__version__,
            "python": platform.python_version(), "threads": torch.get_num_threads(), "incubation": population.incubation,
            "deterministic": torch.are_deterministic_algorithms_enabled(), "compile": population.compile,
            "dtype": str(population.dtype), "compute_dtype": str(population.compute_dtype),
            "gates": plain(population.life.gates), "governor": plain(env.governor.config), "spec": plain(env.spec),
            "previews": None if env.previews is None else plain(env.previews)}


def _environment(header: dict[str, Any], rows: int, device: str, data: TaskData | None) -> MorphogeneticEnv:
    return MorphogeneticEnv(
        _family(header["family"]), rows, spec=rebuilt(ActionSpec, header["spec"]), gates=rebuilt(GateConfig, header["gates"]),
        governor=rebuilt(GovernorConfig, header["governor"]), incubation=header["incubation"], device=device, data=data,
        dtype=DTYPES[header["dtype"]], compute_dtype=DTYPES[header["compute_dtype"]], compile=header["compile"],
        previews=None if header["previews"] is None else rebuilt(PreviewConfig, header["previews"]))


def _family(fields: dict[str, Any]) -> Family:
    parts = {"host": rebuilt(Host, fields["host"]), "optim": rebuilt(OptimConfig, fields["optim"]),
             "kinds": [rebuilt(Kind, kind) for kind in fields["kinds"]]}
    return rebuilt(Family, fields | parts)


class Twins:
    """What each scenario does without growth: same weights at birth, same data in the same order. Computed once."""

    def __init__(self, env: MorphogeneticEnv) -> None:
        """`env` plays the twins; its rows are theirs alone."""
        self.env = env
        self.epochs = 0
        """Host-epochs that were played for them."""
        self.known: dict[tuple[int, int, int, float], Tensor] = {}  # scenario -> [epochs, 3]: loss, accuracy, probability

    @staticmethod
    def _names(scenarios: Scenarios) -> list[tuple[int, int, int, float]]:
        columns = (scenarios.key, scenarios.kind, scenarios.horizon, scenarios.lr)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def __call__(self, scenarios: Scenarios) -> Tensor:
        """[N, epochs of the longest, 3]: the twins' loss, accuracy and probability after each epoch, NaN behind the last."""
        names = self._names(scenarios)
        first = {name: row for row, name in reversed(list(enumerate(names)))}
        missing = torch.tensor([row for name, row in first.items() if name not in self.known], dtype=torch.int64)
        for part in missing.split(self.env.rows) if len(missing) else ():
            self._compute(scenarios.take(torch.cat([part, part[:1].expand(self.env.rows - len(part))])))
        longest = max(len(self.known[name]) for name in names)
        out = torch.full((len(names), longest, 3), torch.nan)
        for row, name in enumerate(names):
            out[row, : len(self.known[name])] = self.known[name]
        return out

    def _compute(self, scenarios: Scenarios) -> None:
        waiting = torch.tensor([self.env.spec.action(LifecycleOp.WAIT)]).repeat(self.env.rows, 1)
        measured = play(self.env, lambda view: waiting, scenarios).measured
        self.epochs += int(scenarios.horizon.sum())
        scores = torch.stack([measured[f"all_on.{name}"] for name in ("loss", "accuracy", "probability")], 2)  # [T, N, 3]
        for row, name in enumerate(self._names(scenarios)):
            self.known[name] = scores[: name[2], row].clone()

    def save(self, path: str | Path) -> None:
        names = torch.tensor([name[:3] for name in self.known], dtype=torch.int64).view(-1, 3)
        longest = max((len(t) for t in self.known.values()), default=0)
        padded = [torch.cat([t, torch.full((longest - len(t), 3), torch.nan)]) for t in self.known.values()]
        lr = torch.tensor([name[3] for name in self.known], dtype=torch.float64)
        scores = torch.stack(padded) if padded else torch.empty(0, 0, 3)
        write_state(path, "twins", {"family": plain(self.env.family)}, {"names": names, "lr": lr, "scores": scores})

    def load(self, path: str | Path) -> None:
        header, tensors = read_state(path, "twins")
        if _family(header["family"]) != self.env.family:
            raise StateFormatError(f"{path} holds twins of another family")
        rows = zip(tensors["names"].tolist(), tensors["lr"].tolist(), tensors["scores"], strict=True)
        for (key, kind, horizon), rate, values in rows:
            self.known[key, kind, horizon, rate] = values[:horizon].clone()
