"""Episodes: the one loop over epochs, the one record of what happened in it, and the one formula of what it
was worth.

Legend: T epochs, N rows, S slots.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.leyline import EsperError, Head, LifecycleOp, SeedStage, StateFormatError, View
from esper.leyline.codec import from_dict, to_dict
from esper.leyline.provenance import provenance
from esper.leyline.storage import decoding, read_state, write_state
from esper.tolaria.env import EnvConfig, Measurement, MorphogeneticEnv
from esper.tolaria.evaluation import Scores
from esper.tolaria.scenarios import Family, Scenarios
from esper.tolaria.tasks import TaskData

Policy = Callable[[View], Tensor]
Samples = Iterator[tuple[Tensor, Tensor]]


def charges(params: Tensor, spent: Tensor, price: Any, flop_price: Any) -> dict[str, Tensor]:
    """What is paid for grown parameters, and for extra training FLOPs (in trainings of the bare host)."""
    return {"size": price * params, "compute": flop_price * spent}


def utility(score: Tensor, params: Tensor, spent: Tensor, price: Any, flop_price: Any) -> Tensor:
    """The score less what it cost."""
    charged = charges(params, spent, price, flop_price)
    return score - charged["size"] - charged["compute"]


class Decision(NamedTuple):
    """Anything but WAIT."""

    scenario: int  # its place among the N
    epoch: int  # 0 is the first
    op: str
    slot: int
    blueprint: str | None  # of a GERMINATE


@dataclass(frozen=True)
class Episodes:
    """What happened in N episodes: where they were played, what was decided, measured and delivered."""

    config: EnvConfig
    scenarios: Scenarios  # [N]
    actions: Tensor  # [T, N, heads]
    measured: Mapping[str, Tensor]
    """Every number of every `Measurement`, [T, N] or [T, N, S], under the names of `Measurement.tensors`."""
    delivered: Scores
    """[N] of host and fossils at the end, on the samples that were asked for or the validation slice."""
    blueprint: Tensor  # [N, S] of fossils, -1 is none
    params: Tensor  # [N] of fossils
    flops: Tensor  # [N] of the fossils' forward pass, as a share of the bare host's
    spent: Tensor  # [N] extra training FLOPs, in trainings of the bare host for the episode
    moves: tuple[tuple[int, int, int, str, str], ...] = ()
    """(epoch, row, slot, stage left, stage entered) of every seed; 1 is the first epoch."""

    def __len__(self) -> int:
        return len(self.scenarios)

    def utility(self, price: Any = None, flop_price: Any = None) -> Tensor:
        """[N]: what each episode was worth at its own prices, or at others."""
        drawn = self.scenarios
        return utility(self.delivered.score, self.params, self.spent, drawn.price if price is None else price,
                       drawn.flop_price if flop_price is None else flop_price)

    def decisions(self) -> list[Decision]:
        """Epoch by epoch, row by row."""
        spec, wait = self.config.spec, self.config.spec.ops.index(LifecycleOp.WAIT)
        made = []
        for epoch, actions in enumerate(self.actions):
            chosen = dict(zip(spec.heads, actions.unbind(1), strict=True))
            for row in (chosen[Head.OP] != wait).nonzero().flatten().tolist():
                op, grown = spec.ops[int(chosen[Head.OP][row])], None
                if op is LifecycleOp.GERMINATE:
                    grown = spec.blueprints[int(chosen[Head.BLUEPRINT][row])]
                made.append(Decision(row, epoch, op.name, int(chosen[Head.SLOT][row]), grown))
        return made

    def save(self, path: str | Path) -> None:
        """A file that `esper replay` plays again."""
        header = {"env": to_dict(self.config), "moves": self.moves, **provenance(self.config.device)}
        write_state(path, "trace", header, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Every number under a flat name; with `config` and `moves`, all that there is."""
        groups = {"scenarios": self.scenarios.columns(), "measured": self.measured,
                  "delivered": vars(self.delivered)}
        plain = {name: getattr(self, name) for name in ("actions", "blueprint", "params", "flops", "spent")}
        return plain | {f"{group}.{name}": t for group, part in groups.items() for name, t in part.items()}

    @classmethod
    def of(cls, config: EnvConfig, tensors: Mapping[str, Tensor],
           moves: Iterable[Sequence[Any]]) -> "Episodes":
        """From what `tensors` gave."""
        groups: dict[str, dict[str, Tensor]] = {"scenarios": {}, "measured": {}, "delivered": {}, "": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups[group if rest else ""][rest or name] = tensor
        drawn = Scenarios(**groups["scenarios"], kinds=config.family.kinds)
        return cls(config, drawn, delivered=Scores(**groups["delivered"]), measured=groups["measured"],
                   moves=tuple((m[0], m[1], m[2], m[3], m[4]) for m in moves), **groups[""])

    @classmethod
    def load(cls, path: str | Path) -> tuple["Episodes", dict[str, Any]]:
        """(episodes, the header with what they were played with)."""
        header, tensors = read_state(path, "trace")
        with decoding(path, "trace"):
            config = from_dict(EnvConfig, header["env"], f"{path}: env")
            if not len(tensors.get("actions", ())) or not any(n.startswith("measured.") for n in tensors):
                raise StateFormatError(f"{path} records no epoch: there is nothing to play again")
            return cls.of(config, tensors, header["moves"]), header


def play(env: MorphogeneticEnv, policy: Policy, scenarios: Scenarios, *,
         samples: Callable[[], Samples] | None = None, fossils: Tensor | None = None,
         watch: Callable[[Measurement], object] = lambda measured: None, most: int | None = None) -> Episodes:
    """One episode in every row, all started together, until the last of them is done, or for `most` epochs.

    `samples` score the delivered networks, None is what the last epoch measured. `fossils` [N, S] are
    blueprints to begin with, as untrained as their hosts (-1 is none). `watch` is told every measurement.
    """
    env.reset(scenarios)
    if fossils is not None:
        env.install(fossils)
    life = env.population.life
    life.drain_transitions()
    actions: list[Tensor] = []
    measured: list[dict[str, Tensor]] = []
    moves: list[tuple[int, int, int, str, str]] = []
    while not bool(env.done.all()) and len(actions) != most:
        actions.append(policy(env.view()))
        measurement = env.step(actions[-1])
        measured.append({name: t.clone() for name, t in measurement.tensors().items()})
        moves += [(len(actions), m.row, m.slot, m.source.name, m.target.name)
                  for m in life.drain_transitions()]
        watch(measurement)
    assert env.measured is not None
    delivered = env.measured.evidence.delivered if samples is None else env.evaluate(samples()).delivered
    fossil = life.at(SeedStage.FOSSILIZED)
    params, flops = ((cost * fossil).sum(1) for cost in env.population.costs())
    return Episodes(env.config, env.scenarios.take(torch.arange(env.rows)), torch.stack(actions),
                    {name: torch.stack([m[name] for m in measured]) for name in measured[0]}, delivered,
                    torch.where(fossil, life.blueprint, -1), params, flops / env.family.host.cost.flops,
                    env.spent.float(), tuple(moves))


def replay(episodes: Episodes, device: str = "", data: TaskData | None = None) -> list[str]:
    """Play recorded episodes again: the measurements that differ in any bit, one "name, epoch, row" each."""
    return replayed(episodes, device, data)[1]


def replayed(episodes: Episodes, device: str = "",
             data: TaskData | None = None) -> tuple[MorphogeneticEnv, list[str]]:
    """(the environment as the episodes left it, what `replay` says)."""
    config = episodes.config
    env = MorphogeneticEnv(config, len(episodes), data, device=device or config.device)
    recorded = iter(episodes.actions)
    again = play(env, lambda view: next(recorded), episodes.scenarios, most=len(episodes.actions))
    same = len(again.actions)
    different = [] if same == len(episodes.actions) else [f"length, epoch {same + 1}, every row"]
    for name, before in episodes.measured.items():
        mine, tensor = again.measured[name], before[:same]
        unequal = (mine != tensor) & ~(mine.isnan() & tensor.isnan())  # whole numbers are never NaN
        different += [f"{name}, epoch {place[0] + 1}, row {place[1]}" for place in unequal.nonzero().tolist()]
    return env, different


class TwinScores:
    """What scenarios of a family do without growth, as far as it is known: same weights at birth, same data,
    same order."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.known: dict[tuple[int, int, int, float], Tensor] = {}  # scenario -> Scores [epochs, 3]

    @staticmethod
    def _names(scenarios: Scenarios) -> list[tuple[int, int, int, float]]:
        columns = (scenarios.key, scenarios.kind, scenarios.horizon, scenarios.lr)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def missing(self, scenarios: Scenarios) -> Tensor:
        """Places of those that are not known, each scenario once."""
        first = {name: row for row, name in reversed(list(enumerate(self._names(scenarios))))}
        return torch.tensor([row for name, row in first.items() if name not in self.known], dtype=torch.int64)

    def __call__(self, scenarios: Scenarios) -> Tensor:
        """[N, epochs of the longest, 3]: the twins' Scores after each epoch, NaN behind the last."""
        found = [self.known[name] for name in self._names(scenarios)]
        out = torch.full((len(found), max(map(len, found)), 3), torch.nan)
        for row, scores in enumerate(found):
            out[row, : len(scores)] = scores
        return out

    def put(self, scenarios: Scenarios, scores: Tensor) -> None:
        """What was computed elsewhere, as a call of this gave it."""
        for row, name in enumerate(self._names(scenarios)):
            self.known[name] = scores[row, : name[2]].clone()

    def forget(self) -> None:
        """Scenarios that will not be met again."""
        self.known.clear()

    def save(self, path: str | Path) -> None:
        names = torch.tensor([name[:3] for name in self.known], dtype=torch.int64).view(-1, 3)
        longest = max((len(t) for t in self.known.values()), default=0)
        padded = [torch.cat([t, torch.full((longest - len(t), 3), torch.nan)]) for t in self.known.values()]
        lr = torch.tensor([name[3] for name in self.known], dtype=torch.float64)
        scores = torch.stack(padded) if padded else torch.empty(0, 0, 3)
        write_state(path, "twins", {"family": to_dict(self.family)},
                    {"names": names, "lr": lr, "scores": scores})

    def load(self, path: str | Path) -> None:
        header, tensors = read_state(path, "twins")
        with decoding(path, "set of twins"):
            if from_dict(Family, header["family"], f"{path}: family") != self.family:
                raise StateFormatError(f"{path} holds twins of another family")
            rows = zip(tensors["names"].tolist(), tensors["lr"].tolist(), tensors["scores"], strict=True)
            self.known |= {(key, kind, horizon, rate): values[:horizon].clone()
                           for (key, kind, horizon), rate, values in rows}


class Twins(TwinScores):
    """Computes what is not known, once."""

    def __init__(self, env: MorphogeneticEnv) -> None:
        """`env` plays the twins; its rows are theirs alone."""
        super().__init__(env.family)
        self.env = env

    def __call__(self, scenarios: Scenarios) -> Tensor:
        missing = self.missing(scenarios)
        for part in missing.split(self.env.rows) if len(missing) else ():
            self._compute(scenarios.take(_filled(part, self.env.rows)))
        return super().__call__(scenarios)

    def _compute(self, scenarios: Scenarios) -> None:
        waiting = torch.tensor([self.env.spec.action(LifecycleOp.WAIT)]).repeat(self.env.rows, 1)
        measured = play(self.env, lambda view: waiting, scenarios).measured
        scores = [measured[f"all_on.{name}"].T for name in ("loss", "score", "smooth")]
        self.put(scenarios, torch.stack(scores, 2))


def batches(horizon: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Episodes [J] by their horizons, so many at a time: (which, the same filled up to `rows`). Short ones
    come first, so that few rows wait for longer ones to end."""
    if rows < 1:
        raise EsperError("episodes are played at least one at a time")
    for part in horizon.argsort(stable=True).split(rows):
        yield part, _filled(part, rows)


def _filled(part: Tensor, rows: int) -> Tensor:
    return torch.cat([part, part[:1].expand(rows - len(part))])
