"""Trials: every way of deciding goes through the same executor, on the same scenarios, and is scored alike.

Legend: n scenarios, S slots.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.kasmina import Host
from esper.leyline import Head, LifecycleOp, SeedStage
from esper.tamiyo import PolicyBundle, Wait
from esper.tolaria import Family, MorphogeneticEnv, PreviewConfig, Scenarios

WIDTHS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Shares by which a static host may be wider; the smallest that has the parameters is taken, at the price of those asked for."""


class Decision(NamedTuple):
    """Anything but WAIT."""

    scenario: int  # its place among the n
    epoch: int  # 0 is the first
    op: str
    slot: int
    blueprint: str | None  # of a GERMINATE


@dataclass
class Delivered:
    """What came of n episodes; [n] each but `blueprint`."""

    utility: Tensor
    score: Tensor
    params: Tensor
    flops: Tensor
    """In trainings of the bare host for the episode."""
    blueprint: Tensor
    """[n, S] of fossils, -1 is none."""
    weight: Tensor
    """FLOPs of the fossils, in those of the bare host."""
    decisions: list[Decision]


def batches(horizon: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Episodes [J] by their horizons, so many at a time: (which, the same filled up with the first of them to `rows`).

    Short ones come first, so that few rows wait for longer ones to end.
    """
    for part in horizon.argsort(stable=True).split(rows):
        yield part, torch.cat([part, part[:1].expand(rows - len(part))])


class Trials:
    """Plays n scenarios at a time. Scores are accuracies on the validation slice, or on samples that were held out."""

    def __init__(self, family: Family, previews: PreviewConfig | None = None, held: tuple[Tensor, Tensor] | None = None,
                 **options: Any) -> None:
        """`previews` is for policies that ask for them; `options` go to the environments."""
        self.family, self.previews, self.held, self.options = family, previews, held, options
        self._known: dict[tuple[object, ...], MorphogeneticEnv] = {}

    @property
    def settled(self) -> int:
        """Epochs that a seed needs from its birth until it may be a fossil."""
        env = self.environment(1)
        return env.settling + env.shortest_ramp

    def environment(self, rows: int, previews: bool = False, host: Host | None = None) -> MorphogeneticEnv:
        """Made once for every kind of arm."""
        name = (rows, previews, host)
        if name not in self._known:
            family = self.family if host is None else replace(self.family, host=host)
            self._known[name] = MorphogeneticEnv(family, rows, previews=self.previews if previews else None, **self.options)
        return self._known[name]

    def play(self, policy: PolicyBundle, scenarios: Scenarios, previews: bool = False) -> Delivered:
        """`previews`: it looks at candidates."""
        env = self.environment(len(scenarios), previews)
        env.reset(scenarios)
        return self._finish(env, policy)

    def from_scratch(self, blueprint: Tensor, scenarios: Scenarios, epochs: Tensor | None = None) -> Delivered:
        """Topologies [n, S], untrained, for as many epochs as the episode has or as told [n]; schedules are of that length."""
        env = self.environment(len(scenarios))
        env.reset(scenarios if epochs is None else replace(scenarios, horizon=epochs))
        env.install(blueprint)
        done = self._finish(env, Wait())
        flops = done.flops * env.scenarios.horizon / scenarios.horizon
        return replace(done, flops=flops, utility=_utility(scenarios, done.score, done.params, flops))

    def equal_flops(self, grown: Delivered, scenarios: Scenarios) -> Delivered:
        """Its topologies from scratch, for as many epochs as its FLOPs pay for."""
        epochs = (scenarios.horizon * grown.flops / (1 + grown.weight)).round().long().clamp(min=1)
        return self.from_scratch(grown.blueprint, scenarios, epochs)

    def wider(self, params: Tensor, scenarios: Scenarios) -> Delivered:
        """Static hosts with at least so many more parameters [n], charged for these; NaN where no host is wide enough."""
        base = self.family.host
        hosts = [replace(base, widths=tuple(math.ceil(w * share) for w in base.widths)) for share in WIDTHS]
        extra = torch.tensor([host.cost.params - base.cost.params for host in hosts])
        choice = (extra[None] < params[:, None]).sum(1)
        parts = []
        for number in choice.clamp(max=len(hosts) - 1).unique().tolist():
            rows = (choice.clamp(max=len(hosts) - 1) == number).nonzero().flatten()
            parts.append((rows, self._wide(hosts[number], scenarios.take(rows))))
        order = torch.cat([rows for rows, _ in parts]).argsort()
        names = ("score", "flops", "blueprint", "weight")
        joined = {name: torch.cat([getattr(done, name) for _, done in parts])[order] for name in names}
        utility = _utility(scenarios, joined["score"], params, joined["flops"])
        return Delivered(torch.where(choice < len(hosts), utility, torch.nan), params=params, decisions=[], **joined)

    def _wide(self, host: Host, scenarios: Scenarios) -> Delivered:
        env = self.environment(len(scenarios), host=host)
        env.reset(scenarios)
        done = self._finish(env, Wait())
        del self._known[len(scenarios), False, host]  # of a size that will not come again
        return replace(done, flops=done.flops * host.cost.flops / self.family.host.cost.flops)

    def _finish(self, env: MorphogeneticEnv, policy: PolicyBundle) -> Delivered:
        """Play episodes that have begun to their ends."""
        decisions: list[Decision] = []
        spec, epoch = env.spec, 0
        while not bool(env.done.all()):
            actions = policy(env.view())
            env.step(actions)
            chosen = dict(zip(spec.heads, actions.unbind(1), strict=True))
            for row in (chosen[Head.OP] != spec.ops.index(LifecycleOp.WAIT)).nonzero().flatten().tolist():
                op = spec.ops[int(chosen[Head.OP][row])]
                blueprint = spec.blueprints[int(chosen[Head.BLUEPRINT][row])] if op is LifecycleOp.GERMINATE else None
                decisions.append(Decision(row, epoch, op.name, int(chosen[Head.SLOT][row]), blueprint))
            epoch += 1
        samples = env.validation() if self.held is None else env.held_out(*self.held)
        score, life = env.evaluate(samples).delivered.accuracy, env.population.life
        fossil = life.at(SeedStage.FOSSILIZED)
        params, weight = ((cost * fossil).sum(1) for cost in env.population.costs())
        flops = 1 + env.spent.float()
        return Delivered(_utility(env.scenarios, score, params, flops), score, params, flops,
                         torch.where(fossil, life.blueprint, -1), weight / env.family.host.cost.flops, decisions)


def _utility(scenarios: Scenarios, score: Tensor, params: Tensor, flops: Tensor) -> Tensor:
    return score - scenarios.price * params - scenarios.flop_price * (flops - 1)
