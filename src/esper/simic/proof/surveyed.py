"""What plans are worth on many data sets: a table of outcomes, the best plan at every level of knowledge, and
a regression that chooses among plans by what it sees of a host.

Legend: K runs (a family, a scenario), P plans, W epochs watched, F numbers seen, C pairs of prices. Training
does not depend on prices: one run is scored at all of them. All hosts of a table offer the same blueprints.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import ActionSpec, EsperError, View
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.plans import Plan, played
from esper.tamiyo import EYES, Planned, Wait, observe
from esper.tolaria import Family, Scenarios

STARTS = (0, 2)  # epochs at which plans begin
WATCHED = (0, 1, 2)  # epochs that a regression may watch before it chooses
WIDTHS, RIDGES = (1.0, 2.0, 4.0), (0.1, 1.0, 10.0, 100.0)  # of its kernel; and how much it is smoothed
MOST = 0.1  # of score that a plan's gain counts: one data set must not decide for all
EYE = EYES["universal"].spec
Prices = tuple[float, float]
"""Points for as many parameters, and for as many FLOPs of training, as the host has."""


def plans_for(spec: ActionSpec) -> list[Plan]:
    """No growth; every blueprint in all slots, and in the first alone."""
    seeds, slots = [name for name in spec.blueprints if name != "noop"], spec.slots
    shapes = dict.fromkeys([(True,) * slots, (True, *[False] * (slots - 1))])
    grown = [Plan(tuple(name if here else None for here in shape), start)
             for start in STARTS for shape in shapes for name in seeds]
    return [Plan((None,) * slots), *grown]


class PlanTable(NamedTuple):
    """What plans came to."""

    plans: tuple[Plan, ...]
    group: np.ndarray  # [K] data sets by number: those with the same number are never told apart by a split
    horizon: np.ndarray  # [K]
    seen: np.ndarray  # [K, W, F] of the bare host, after 0, 1, ... epochs
    runs: np.ndarray  # [K, P, 3] score; parameters as a share of the host's; extra compute

    @staticmethod
    def joined(parts: Sequence["PlanTable"]) -> "PlanTable":
        if any(part.plans != parts[0].plans for part in parts):
            raise EsperError("hosts of one kind must have as many slots and the same blueprints "
                             "to be compared by plans")
        columns = zip(*(part[1:] for part in parts), strict=True)
        return PlanTable(parts[0].plans, *(np.concatenate(column) for column in columns))

    def steady(self) -> "PlanTable":
        """To choose by: no gain over no growth, the first plan, counts more than `MOST`."""
        runs, bare = self.runs.copy(), self.runs[:, :1, 0]
        runs[..., 0] = bare + (runs[..., 0] - bare).clip(-MOST, MOST)
        return self._replace(runs=runs)

    def utility(self, prices: Prices) -> np.ndarray:
        """[K, P]."""
        score, params, spent = np.moveaxis(self.runs, 2, 0)
        return np.asarray(score - prices[0] * params - prices[1] * spent)


class Looking:
    """Waits, and remembers what there is to see before each of the first epochs."""

    def __init__(self, most: int) -> None:
        self.most, self.seen = most, list[Tensor]()

    def __call__(self, view: View) -> Tensor:
        if len(self.seen) <= self.most:
            self.seen.append(observe(view, EYE).row)
        return Wait()(view)


def survey(evaluator: Evaluator, plans: Sequence[Plan], scenarios: Scenarios, group: int,
           rows: int) -> PlanTable:
    """Every plan on every scenario of a family."""
    spec, looking = evaluator.config.spec, Looking(max(WATCHED))
    evaluator.play(looking, scenarios)
    jobs = torch.cartesian_prod(torch.arange(len(plans)), torch.arange(len(scenarios)))
    ends = evaluator.play_jobs(jobs, scenarios, rows, lambda done: None,
                               lambda numbers: played([plans[number] for number in numbers], spec))
    runs = ends.view(len(plans), len(scenarios), 3).transpose(0, 1).double().numpy()
    runs[..., 1] /= evaluator.family.host.cost.params
    seen = torch.stack(looking.seen, 1).double().numpy()
    return PlanTable(tuple(plans), np.full(len(scenarios), group), scenarios.horizon.numpy(), seen, runs)


def price_pairs(family: Family) -> list[Prices]:
    """All that a family draws, in points for as much as the host has."""
    params = family.host.cost.params
    return [(price * params, flop) for price, flop in itertools.product(family.prices, family.flop_prices)]


def best(table: PlanTable, prices: Sequence[Prices], rows: np.ndarray | None = None) -> int:
    """The plan that is best on average, over these runs and prices; of no runs, over all."""
    mine = np.ones(len(table.group), bool) if rows is None or not rows.any() else rows
    chosen_by = table.steady() if len(np.unique(table.group[mine])) > 1 else table
    return int(np.mean([chosen_by.utility(pair)[mine].mean(0) for pair in prices], 0).argmax())


def _halves(table: PlanTable, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(runs to choose on, runs to score on): every other run of these, both ways round."""
    turn = np.zeros(len(rows), bool)
    turn[np.flatnonzero(rows)[::2]] = True
    yield rows & turn, rows & ~turn
    yield rows & ~turn, rows & turn


def levels(table: PlanTable, prices: Sequence[Prices]) -> dict[str, np.ndarray]:
    """level of knowledge -> gain over no growth [C * K]; plans are chosen and scored on different runs, and
    but for the last level on different data sets."""
    groups = np.unique(table.group)
    found = {name: np.zeros((len(prices), len(table.group))) for name in (
        "a random plan", "one fixed plan", "for each price and horizon", "for each data set, too")}
    random, fixed, visible, known = found.values()
    for number, pair in enumerate(prices):
        gain = table.utility(pair)
        gain = gain - gain[:, :1]
        random[number] = gain.mean(1)
        for group in groups:
            mine, others = table.group == group, table.group != group
            fixed[number, mine] = gain[mine, best(table, prices, others)]
            for horizon in np.unique(table.horizon):
                here, told = mine & (table.horizon == horizon), others & (table.horizon == horizon)
                if here.any() and told.any():
                    visible[number, here] = gain[here, best(table, [pair], told)]
                for choose, score in _halves(table, here):
                    if choose.any() and score.any():
                        known[number, score] = gain[score, best(table, [pair], choose)]
    return {name: gains.ravel() for name, gains in found.items()}


@dataclass(frozen=True)
class Regression:
    """Kernel ridge regression of what every plan comes to, on what was seen of a host."""

    plans: tuple[Plan, ...]
    watched: int
    centre: np.ndarray  # [F]
    spread: np.ndarray  # [F]
    width: float
    ridge: float
    known: np.ndarray  # [K, F] scaled
    dual: np.ndarray  # [K, 3 P]
    mean: np.ndarray  # [3 P]

    def choose(self, seen: np.ndarray, prices: np.ndarray) -> np.ndarray:
        """[N]: the plan that promises most, for what was seen [N, F] at prices [N, 2]."""
        said = _kernel((seen - self.centre) / self.spread, self.known, self.width) @ self.dual + self.mean
        score, params, spent = np.moveaxis(said.reshape(len(seen), -1, 3), 2, 0)
        return np.asarray((score - prices[:, :1] * params - prices[:, 1:] * spent).argmax(1))


def _kernel(some: np.ndarray, others: np.ndarray, width: float) -> np.ndarray:
    apart = (some**2).sum(1)[:, None] + (others**2).sum(1) - 2 * some @ others.T
    return np.asarray(np.exp(-apart.clip(0) / (2 * some.shape[1] * width**2)))


def _allowed(table: PlanTable, watched: int) -> list[int]:
    return [at for at, plan in enumerate(table.plans) if not any(plan.seeds) or plan.start >= watched]


def fit(table: PlanTable, watched: int, width: float, ridge: float,
        rows: np.ndarray | None = None) -> Regression:
    """On these runs (None is all of them)."""
    mine = np.ones(len(table.group), bool) if rows is None else rows
    allowed, seen = _allowed(table, watched), table.seen[mine, watched]
    centre, spread = seen.mean(0), seen.std(0)
    spread[spread < 1e-6] = np.inf  # what never differs says nothing
    runs = table.steady().runs[mine]
    outcome = runs[:, allowed] - runs[:, :1]  # above no growth
    flat = outcome.reshape(len(seen), -1)
    known, mean = (seen - centre) / spread, flat.mean(0)
    dual = np.linalg.solve(_kernel(known, known, width) + ridge * np.eye(len(known)), flat - mean)
    plans = tuple(table.plans[at] for at in allowed)
    return Regression(plans, watched, centre, spread, width, ridge, known, dual, mean)


def identify(table: PlanTable, prices: Sequence[Prices],
             watch: Callable[[str], object] = lambda said: None) -> Regression:
    """The regression that does best on data sets which it was not fitted on."""
    ways = list(itertools.product(WATCHED, WIDTHS, RIDGES))
    worth = [_held_out(table, prices, *way) for way in ways]
    watched, width, ridge = way = ways[int(np.argmax(worth))]
    watch(f"watching {watched} epochs, width {width:g}, ridge {ridge:g}: {100 * max(worth):+.2f} points")
    return fit(table, *way)


def _held_out(table: PlanTable, prices: Sequence[Prices], watched: int, width: float, ridge: float) -> float:
    """Mean gain over no growth on data sets that were held out, one after the other; of a single one, on runs
    that were."""
    total, allowed = 0.0, _allowed(table, watched)
    several = len(np.unique(table.group)) > 1
    fold = table.group if several else np.arange(len(table.group)) % 2
    for each in np.unique(fold):
        mine = fold == each
        found = fit(table, watched, width, ridge, ~mine)
        for pair in prices:
            gain = table.utility(pair)[mine][:, allowed]
            chosen = found.choose(table.seen[mine, watched], np.tile(pair, (int(mine.sum()), 1)))
            total += float((gain[np.arange(len(gain)), chosen] - gain[:, 0]).sum())
    return total / len(table.group) / len(prices)


class Identified:
    """Waits for as many epochs as the regression watches, then follows the plan that it chooses."""

    def __init__(self, found: Regression) -> None:
        self.found = found
        self.then: Planned | None = None

    def __call__(self, view: View) -> Tensor:
        if bool((view.clock == 0).all()):
            self.then = None
        if int(view.clock.max()) < self.found.watched:
            return Wait()(view)
        if self.then is None:
            assert view.facts is not None
            prices = torch.stack([view.price * view.facts.host.params, view.flop_price], 1)
            chosen = self.found.choose(observe(view, EYE).row.double().numpy(), prices.double().numpy())
            self.then = played([self.found.plans[plan] for plan in chosen], view.spec)
        return self.then(view)
