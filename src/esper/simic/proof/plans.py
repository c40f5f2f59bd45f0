"""Plans: what to grow where and when, whatever happens; and the best of them at every level of knowledge.

Legend: P plans, K scenarios, S slots. Training does not depend on prices: one run is scored at all of them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import ActionSpec
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.sweep import DECIDE_AT, grid, observe_early, priced
from esper.simic.proof.value_of_information import NO_GROWTH, Outcomes, Rule, decide
from esper.tamiyo import Planned
from esper.tolaria import Scenarios

FIRST, SECOND, LAST = 8, 4, 8  # least inits of the three rungs of the search
KEEP = 2  # plans that go on to the last rung from every group of scenarios
Watch = Callable[[str, int, int], object]


class Plan(NamedTuple):
    """A blueprint or none for every slot; slots in order, one per epoch, beginning at `start`."""

    seeds: tuple[str | None, ...]
    start: int = 0

    @property
    def name(self) -> str:
        grown = [f"{seed} @{slot}" for slot, seed in enumerate(self.seeds) if seed]
        return f"{', '.join(grown)} from {self.start}" if grown else NO_GROWTH


def played(plans: Sequence[Plan], spec: ActionSpec) -> Planned:
    """The policy in which every row follows its plan."""
    birth = torch.full((len(plans), spec.slots), -1)
    blueprint = torch.zeros_like(birth)
    for row, plan in enumerate(plans):
        for turn, (slot, seed) in enumerate((slot, seed) for slot, seed in enumerate(plan.seeds) if seed):
            birth[row, slot], blueprint[row, slot] = plan.start + turn, spec.blueprints.index(seed)
    return Planned(birth, blueprint)


class Search(NamedTuple):
    """The best plans at every level of knowledge, and what finding them took."""

    fixed: Plan
    visible: list[Plan]  # by condition
    oracle: list[list[Plan]]  # by condition and hidden kind
    rule: Rule
    choices: list[Plan]  # that the rule counts; all begin when it has seen enough
    episodes: int


class Survey:
    """Plans played on every kind, horizon and some inits."""

    def __init__(self, evaluator: Evaluator, rows: int, watch: Watch) -> None:
        self.evaluator, self.rows, self.watch, self.episodes = evaluator, rows, watch, 0
        self.spec = evaluator.config.spec

    def scenarios(self, start: int, inits: int) -> tuple[Scenarios, Tensor]:
        """([K], init numbers [K])."""
        family = self.evaluator.family
        parts = [grid(family, inits, horizon, start) for horizon in sorted(set(family.horizons))]
        return Scenarios.joined([part for part, _ in parts]), torch.cat([number for _, number in parts])

    def play(self, plans: Sequence[Plan], scenarios: Scenarios) -> Tensor:
        """[K, P, 3]: score, parameters, extra compute."""
        jobs = torch.cartesian_prod(torch.arange(len(plans)), torch.arange(len(scenarios)))
        before, self.episodes = self.episodes, self.episodes + len(jobs)
        ends = self.evaluator.play_jobs(
            jobs, scenarios, self.rows, lambda done: self.watch("plans", before + done, self.episodes),
            lambda numbers: played([plans[number] for number in numbers], self.spec))
        return ends.view(len(plans), len(scenarios), 3).transpose(0, 1)

    def priced(self, scenarios: Scenarios, runs: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(utility [prices * K, P], condition, hidden kind [prices * K]) of runs [K, P, 3]."""
        return priced(self.evaluator.family, scenarios, *runs.double().unbind(2))


def _means(utility: np.ndarray, condition: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """[G, P]: over everything, in every condition, and in every condition for every kind."""
    both = condition * (int(kind.max()) + 1) + kind
    return np.stack([utility[group == value].mean(0)
                     for group in (condition * 0, condition, both) for value in np.unique(group)])


def singles(spec: ActionSpec) -> list[Plan]:
    """No growth, then every real blueprint in every slot at once."""
    seeds = [name for name in spec.blueprints if name != "noop"]
    alone = [Plan(tuple(name if place == slot else None for place in range(spec.slots)))
             for slot in range(spec.slots) for name in seeds]
    return [Plan((None,) * spec.slots), *alone]


def combined(means: np.ndarray, spec: ActionSpec) -> list[Plan]:
    """From what singles are worth in every group [G, P]: the best seeds of slots with and without each other,
    and once with the second best in its place; begun at once, and begun when a rule has seen enough."""
    seeds = [name for name in spec.blueprints if name != "noop"]
    found: dict[Plan, None] = dict.fromkeys(singles(spec)[:1])
    for group in (means[:, 1:] - means[:, :1]).reshape(len(means), spec.slots, len(seeds)):
        order = np.argsort(-group, 1)
        best, second = ([seeds[at] for at in order[:, rank]] for rank in (0, min(1, len(seeds) - 1)))
        needy = np.argsort(-group.max(1))
        every = range(spec.slots)
        shapes = (list(itertools.product((False, True), repeat=spec.slots)) if spec.slots <= 4 else
                  [tuple(slot in needy[: count + 1] for slot in every) for count in every])
        made = [tuple(best[slot] if shape[slot] else None for slot in every) for shape in shapes]
        made += [tuple(second[at] if at == slot else name for at, name in enumerate(best)) for slot in every]
        found |= {Plan(plan, start): None for plan in made if any(plan) for start in (0, DECIDE_AT)}
    return list(found)


def search(evaluator: Evaluator, episodes: int, rows: int, preview_steps: int, watch: Watch) -> Search:
    """At least so many episodes: singles everywhere, then what they suggest, then the best on more inits."""
    family, survey = evaluator.family, Survey(evaluator, rows, watch)
    drawn, _ = survey.scenarios(0, FIRST)
    worth = _means(*survey.priced(drawn, survey.play(singles(survey.spec), drawn)))
    plans = combined(worth, survey.spec)
    drawn, init = survey.scenarios(FIRST, SECOND)
    runs = survey.play(plans, drawn)
    kept = _best(_means(*survey.priced(drawn, runs)), plans)
    plans, runs = [plans[at] for at in kept], runs[:, kept]
    cells = len(family.kinds) * len(set(family.horizons)) * len(plans)
    inits = max(LAST, math.ceil((episodes - survey.episodes) / cells))
    more, numbers = survey.scenarios(FIRST + SECOND, inits)
    runs, everything = torch.cat([runs, survey.play(plans, more)]), Scenarios.joined([drawn, more])
    early = observe_early(evaluator, everything, preview_steps)
    gains, told, kind = survey.priced(everything, runs)
    count = len(gains) // len(everything)
    init_numbers = torch.cat([init, numbers]).repeat(count).numpy()
    features = early.features.repeat(count, 1).double().numpy()
    late = [at for at, plan in enumerate(plans) if at == 0 or plan.start == DECIDE_AT]

    def outcomes(columns: list[int]) -> Outcomes:
        some, names = gains[:, columns], [plans[at].name for at in columns]
        return Outcomes(names, some, some, told, kind, init_numbers, features, early.names)

    best = decide(outcomes(list(range(len(plans)))))
    oracle = [[plans[at] for at in row] for row in best.hidden]
    return Search(plans[best.fixed], [plans[at] for at in best.visible], oracle,
                  decide(outcomes(late)).rule, [plans[at] for at in late], survey.episodes)


def _best(means: np.ndarray, plans: Sequence[Plan]) -> list[int]:
    """No growth, and the best few of every group [G, P]: among all plans, and among those that begin late."""
    late = np.array([plan.start == DECIDE_AT for plan in plans])
    ranked = [np.argsort(-np.where(allowed, means, -np.inf), 1)[:, :KEEP]
              for allowed in (np.ones_like(late), late)]
    return np.unique([0, *np.ravel(ranked)]).tolist()
