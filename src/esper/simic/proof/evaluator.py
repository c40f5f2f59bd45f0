"""The evaluator: every way of deciding is played on n scenarios (with S slots) alike, and scored alike."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from esper.kasmina import Host
from esper.tamiyo import PolicyBundle, Wait
from esper.tolaria import EnvConfig, Episodes, Family, MakeEnv, MorphogeneticEnv, Scenarios, Scores
from esper.tolaria.episodes import batches, play

WIDTHS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Shares by which a static host may be wider; the smallest that has the parameters asked for is taken."""

KEPT = 2
"""Environments that an evaluator keeps: on a GPU the buffers of one may take gigabytes."""


def widened(host: Host, share: float) -> Host:
    return replace(host, widths=tuple(math.ceil(width * share) for width in host.widths))


def _ends(env: MorphogeneticEnv, done: Episodes) -> Tensor:
    return torch.stack([done.delivered.score, done.params.float(), done.spent], 1)


class Evaluator:
    """Plays n scenarios at a time, scored on the validation slice or on samples that were held out."""

    def __init__(self, config: EnvConfig | Family, held: tuple[Tensor, Tensor] | None = None,
                 make: MakeEnv = MorphogeneticEnv) -> None:
        """The previews of `config` are for policies that ask for them; `make` makes environments."""
        self.config = EnvConfig(config) if isinstance(config, Family) else config
        self.held, self.make = held, make
        self._kept: dict[tuple[int, bool], MorphogeneticEnv] = {}

    @property
    def family(self) -> Family:
        return self.config.family

    @property
    def min_epochs_to_keep(self) -> int:
        """Epochs that a seed needs from its birth until it may be a fossil."""
        env = self.environment(1)
        return env.settling + env.shortest_ramp

    def environment(self, rows: int, previews: bool = False) -> MorphogeneticEnv:
        """The last few that were asked for are kept."""
        kept, key = self._kept, (rows, previews)
        found = kept.pop(key, None)
        while len(kept) >= KEPT:
            del kept[next(iter(kept))]
        kept[key] = found or self.make(self.config if previews else replace(self.config, previews=None), rows)
        return kept[key]

    def play(self, policy: PolicyBundle, scenarios: Scenarios, previews: bool = False) -> Episodes:
        """`previews`: it looks at candidates."""
        return self._finish(self.environment(len(scenarios), previews), policy, scenarios)

    def play_jobs(self, jobs: Tensor, scenarios: Scenarios, rows: int, watch: Callable[[int], object],
                  policy: Callable[[list[int]], PolicyBundle], previews: bool = False,
                  read: Callable[[MorphogeneticEnv, Episodes], Tensor] = _ends) -> Tensor:
        """[J, ...] of jobs [J, 2] (who decides, scenario) what `read` [rows, ...] finds in an environment and
        its episodes: score, parameters and extra compute. `policy` is asked for one that decides for these in
        its rows; `watch` is told how many are done."""
        parts, ends, finished = [], [], 0
        for part, padded in batches(scenarios.horizon[jobs[:, 1]], rows):
            who, scenario = jobs[padded].unbind(1)
            done = self.play(policy(who.tolist()), scenarios.take(scenario), previews)
            ends.append(read(self.environment(rows, previews), done)[: len(part)])
            parts.append(part)
            finished += len(part)
            watch(finished)
        return torch.cat(ends)[torch.cat(parts).argsort()]

    def from_scratch(self, blueprint: Tensor, scenarios: Scenarios, epochs: Tensor | None = None) -> Episodes:
        """Topologies [n, S], untrained, for the episode's epochs and schedule or as long as told [n]."""
        shown = scenarios if epochs is None else replace(scenarios, horizon=epochs)
        done = self._finish(self.environment(len(scenarios)), Wait(), shown, blueprint)
        trainings = (1 + done.spent) * shown.horizon / scenarios.horizon
        return replace(done, scenarios=scenarios, spent=trainings - 1)

    def equal_flops(self, grown: Episodes, scenarios: Scenarios) -> Episodes:
        """Its topologies from scratch, for as many epochs as its FLOPs pay for."""
        epochs = (scenarios.horizon * (1 + grown.spent) / (1 + grown.flops)).round().long().clamp(min=1)
        return self.from_scratch(grown.blueprint, scenarios, epochs)

    def wider(self, params: Tensor, scenarios: Scenarios) -> Episodes:
        """Static hosts with at least so many more parameters [n], charged for these; NaN where none has."""
        base = self.family.host
        hosts = [widened(base, share) for share in WIDTHS]
        extra = torch.tensor([host.cost.params - base.cost.params for host in hosts])
        choice = (extra[None] < params[:, None]).sum(1)
        taken = choice.clamp(max=len(hosts) - 1)
        rows = {number: (taken == number).nonzero().flatten() for number in taken.unique().tolist()}
        parts = [self.static(hosts[number], scenarios.take(mine)) for number, mine in rows.items()]
        order = torch.cat(list(rows.values())).argsort()
        columns = ((part.flops, part.spent, part.blueprint, *vars(part.delivered).values()) for part in parts)
        flops, spent, blueprint, *scores = (torch.cat(each)[order] for each in zip(*columns, strict=True))
        delivered = Scores(*(torch.where(choice < len(hosts), score, torch.nan) for score in scores))
        return replace(parts[0], scenarios=scenarios, params=params, flops=flops, spent=spent, measured={},
                       moves=(), blueprint=blueprint, delivered=delivered,
                       actions=torch.empty(0, len(scenarios), 0))

    def static(self, host: Host, scenarios: Scenarios) -> Episodes:
        """Another host in place of the family's, without growth."""
        config = replace(self.config, previews=None, family=replace(self.family, host=host))
        done = self._finish(self.make(config, len(scenarios)), Wait(), scenarios)
        return replace(done, spent=(1 + done.spent) * host.cost.flops / self.family.host.cost.flops - 1)

    def _finish(self, env: MorphogeneticEnv, policy: PolicyBundle, scenarios: Scenarios,
                fossils: Tensor | None = None) -> Episodes:
        samples = env.validation if self.held is None else functools.partial(env.held_out, *self.held)
        return play(env, policy, scenarios, samples=samples, fossils=fossils)
