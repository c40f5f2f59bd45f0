"""Identify, then plan: the control that could make learning unnecessary. It watches a host for some epochs,
with some seeds planted meanwhile, tells by a logistic regression which kind it faces, and follows the plan
that is best for what it believes; that plan may prune.

Legend: N rows, K scenarios, P plans, F features, H horizons, T kinds. It is told the kinds of the scenarios
that it is tuned with, and never of those that it plays.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import SCORES, EsperError, View
from esper.simic.proof.plans import Plan, Survey, Watch, played
from esper.tamiyo import Planned, Switched
from esper.tolaria import Scenarios, play, utility

WATCHED = (1, 2, 4)  # epochs before it decides; 0 is tried, too
FINALISTS = 3  # ways of watching that are tried with most of the episodes
FOLDS = 2


@dataclass(frozen=True)
class Identification:
    """What was tuned: how to watch, whom one faces by what one saw, and what each plan is worth there."""

    watched: int
    first: Plan
    plans: list[Plan]
    horizons: list[int]
    weights: list[list[list[float]]]  # [H, F + 1, T] of features as they are; the last is the bias
    worth: list[list[list[list[float]]]]  # [H, T, P, 3] mean score, parameters, extra compute
    episodes: int

    def beliefs(self, features: np.ndarray, horizon: np.ndarray) -> np.ndarray:
        """[N, T]: how likely each kind is."""
        weights = np.array(self.weights)[self._at(horizon)]
        logits = np.einsum("nf,nft->nt", features, weights[:, :-1]) + weights[:, -1]
        odds = np.exp(logits - logits.max(1, keepdims=True))
        return np.asarray(odds / odds.sum(1, keepdims=True))

    def choose(self, features: np.ndarray, horizon: np.ndarray, price: np.ndarray,
               flop_price: np.ndarray) -> np.ndarray:
        """[N]: the plan that promises most."""
        worth = np.array(self.worth)[self._at(horizon)]
        score, params, spent = np.einsum("nt,ntpc->cnp", self.beliefs(features, horizon), worth)
        return np.asarray((score - price[:, None] * params - flop_price[:, None] * spent).argmax(1))

    def _at(self, horizon: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.horizons, horizon).clip(max=len(self.horizons) - 1)


class Watching:
    """Plants a first plan and remembers what there is to see in so many epochs; then it follows `then`, or
    what an identification chooses."""

    def __init__(self, first: Plan, watched: int, then: Planned | None = None,
                 found: Identification | None = None) -> None:
        self.first, self.watched, self.then, self.found = first, watched, then, found
        self.scores, self.features = torch.empty(0), torch.empty(0)

    def __call__(self, view: View) -> Tensor:
        rows, facts = len(view.clock), view.facts
        if facts is None:
            raise EsperError("identification reads measurements, and this view has none")
        if bool((view.clock == 0).all()):
            self.scores = torch.zeros(rows, self.watched, len(SCORES))
        clock = int(view.clock.max())  # rows of a play begin together
        if 1 <= clock <= self.watched:
            self.scores[:, clock - 1] = facts.scores
        if clock == self.watched:
            evidence = [part.value * part.known for part in (facts.contribution, facts.preview)]
            self.features = torch.cat([self.scores.flatten(1), *evidence], 1).double().nan_to_num()
            if self.found is not None:
                told = (tensor.double().numpy() for tensor in (view.horizon, view.price, view.flop_price))
                plans = self.found.choose(self.features.numpy(), *told)
                self.then = played([self.found.plans[plan] for plan in plans], view.spec)
        first = played([self.first] * rows, view.spec)
        return Switched(first, self.then or first, self.watched)(view)


class _Tried(NamedTuple):
    """One way of watching, on K scenarios."""

    features: np.ndarray  # [K, F]
    runs: np.ndarray  # [K, P, 3]


def identify(survey: Survey, episodes: int, fixed: Plan, plans: Sequence[Plan],
             watch: Watch) -> Identification:
    """At least so many episodes: every way of watching with every plan on a few inits, then the best ways on
    more. `fixed` may be planted meanwhile, or what it has in the last slot, where it disturbs least."""
    begin, choices = survey.episodes, list(dict.fromkeys(Plan(plan.seeds) for plan in plans))
    nothing = Plan((None,) * survey.spec.slots)
    firsts = dict.fromkeys([nothing, Plan(fixed.seeds), Plan((*nothing.seeds[1:], fixed.seeds[-1]))])
    family = survey.evaluator.family
    times = [watched for watched in WATCHED if watched < max(family.horizons)]
    ways = [(nothing, 0), *((first, watched) for watched in times for first in firsts)]
    cells = len(family.kinds) * len(set(family.horizons)) * (len(choices) + 1)
    start = 0
    for share in (0.4, 1.0):
        left = episodes * share - (survey.episodes - begin)
        inits = max(FOLDS, math.ceil(left / (cells * len(ways))))
        drawn, init = survey.scenarios(start, inits)
        tried = [_try(survey, way, choices, drawn) for way in ways]
        worth = [-_cross_fitted(survey, way, choices, one, drawn, init)
                 for way, one in zip(ways, tried, strict=True)]
        order = np.argsort(worth, kind="stable")  # of equals the one that watches least
        if not start:
            order = order[:FINALISTS]
            ways, kept = [ways[at] for at in order], [(tried[at], drawn) for at in order]
        start += inits
        watch("identification", survey.episodes - begin, episodes)
    best = int(order[0])
    one = _Tried(*(np.concatenate(both) for both in zip(kept[best][0], tried[best], strict=True)))
    return _fitted(survey, ways[best], choices, one, Scenarios.joined([kept[best][1], drawn]),
                   survey.episodes - begin)


def _try(survey: Survey, way: tuple[Plan, int], plans: Sequence[Plan], drawn: Scenarios) -> _Tried:
    evaluator, (first, watched) = survey.evaluator, way
    looking = Watching(first, watched)
    play(evaluator.environment(len(drawn)), looking, drawn, most=watched + 1)
    jobs = torch.cartesian_prod(torch.arange(len(plans)), torch.arange(len(drawn)))
    ends = evaluator.play_jobs(
        jobs, drawn, survey.rows, lambda done: None,
        lambda numbers: Watching(first, watched, played([plans[number] for number in numbers], survey.spec)))
    survey.episodes += len(jobs) + len(drawn)
    runs = ends.view(len(plans), len(drawn), 3).transpose(0, 1).double()
    return _Tried(looking.features.numpy(), runs.numpy())


def _fitted(survey: Survey, way: tuple[Plan, int], plans: Sequence[Plan], one: _Tried, drawn: Scenarios,
            episodes: int = 0, chosen: np.ndarray | None = None) -> Identification:
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    kinds, kind, horizon = len(survey.evaluator.family.kinds), drawn.kind.numpy(), drawn.horizon.numpy()
    weights, worth, horizons = [], [], sorted(set(survey.evaluator.family.horizons))
    for each in horizons:
        mine = (horizon == each) & (True if chosen is None else chosen)
        mean, spread = one.features[mine].mean(0), one.features[mine].std(0) + 1e-9
        fitted = np.zeros((one.features.shape[1] + 1, kinds))
        if way[1] and kinds > 1:
            model = LogisticRegression(max_iter=2000).fit((one.features[mine] - mean) / spread, kind[mine])
            coefficient, bias = model.coef_, model.intercept_
            if kinds == 2:  # of the second against the first
                coefficient, bias = np.pad(coefficient, ((1, 0), (0, 0))), np.pad(bias, (1, 0))
            fitted[:-1] = (coefficient / spread).T
            fitted[-1] = bias - (coefficient * (mean / spread)).sum(1)
        weights.append(fitted.tolist())
        worth.append([one.runs[mine & (kind == number)].mean(0).tolist() for number in range(kinds)])
    return Identification(way[1], way[0], list(plans), horizons, weights, worth, episodes)


def _cross_fitted(survey: Survey, way: tuple[Plan, int], plans: Sequence[Plan], one: _Tried,
                  drawn: Scenarios, init: Tensor) -> float:
    """Mean utility of one way over all prices, fitted on other inits than it is scored on."""
    family, total = survey.evaluator.family, 0.0
    for fold in range(FOLDS):
        held = init.numpy() % FOLDS == fold
        found = _fitted(survey, way, plans, one, drawn, chosen=~held)
        for price, flop_price in itertools.product(family.prices, family.flop_prices):
            told = (np.full(held.sum(), value) for value in (price, flop_price))
            plan = found.choose(one.features[held], drawn.horizon.numpy()[held], *told)
            score, params, spent = torch.from_numpy(one.runs[held.nonzero()[0], plan]).unbind(1)
            total += float(utility(score, params, spent, price, flop_price).sum())
    return total / len(drawn) / len(family.prices) / len(family.flop_prices)
