"""What each level of knowledge is worth, by the measured outcomes of scripted choices: arithmetic only.

Legend: K scenarios, C choices, F features, V visible conditions; in the search for a rule n training
scenarios, S candidates for its first split, J for its second. Decisions are chosen on other inits than they
are scored on; standard errors are clustered by init and take the decisions as given.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from esper.leyline import EsperError

if TYPE_CHECKING:
    from rich.table import Table

NO_GROWTH, RANDOM, FIXED, VISIBLE, RULE, HIDDEN, SCENARIO = LEVELS = (
    "no growth", "random choice", "best fixed", "best fixed per visible condition",
    "best observation-conditioned rule", "best per visible condition and hidden type", "best per scenario")
CUTS = 12  # thresholds per feature: 11 quantiles, and one that parts the present from the missing


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Every choice measured on every scenario, prices subtracted. Column 0 is no growth; ids count from 0."""

    names: list[str]
    chosen_on: np.ndarray  # [K, C] utility on the slice that decisions are chosen with
    scored_on: np.ndarray  # [K, C] utility on the slice that decisions are scored with
    visible: np.ndarray  # [K]
    hidden: np.ndarray  # [K]
    init: np.ndarray  # [K]
    features: np.ndarray  # [K, F] observed before the decision; anything not finite is missing
    feature_names: list[str]

    def __post_init__(self) -> None:
        scenarios, choices = len(self.init), len(self.names)
        wanted = {**dict.fromkeys(("chosen_on", "scored_on"), (scenarios, choices)),
                  **dict.fromkeys(("visible", "hidden"), (scenarios,)),
                  "features": (scenarios, len(self.feature_names))}
        for name, shape in wanted.items():
            if (found := getattr(self, name).shape) != shape:
                raise EsperError(f"outcomes: {name} has shape {found}, expected {shape}.")
        if choices < 2 or self.names[0] != NO_GROWTH:
            raise EsperError(f"outcomes: the first of at least two choices must be {NO_GROWTH!r}, "
                             f"found {self.names[:2]}.")
        if not (np.isfinite(self.chosen_on).all() and np.isfinite(self.scored_on).all()):
            raise EsperError("outcomes: a utility is not finite; give a failed run the utility it deserves.")
        if scenarios == 0 or min(self.visible.min(), self.hidden.min()) < 0:
            raise EsperError("outcomes: expected some scenarios, and ids of conditions and types "
                             "that count from 0.")


class Estimate(NamedTuple):
    value: float
    standard_error: float


@dataclass(frozen=True, eq=False)
class Level:
    """How well one decides who knows this much."""

    name: str
    mean: float
    standard_error: float
    gain: float  # over no growth, scenario by scenario
    gain_error: float
    choices_taken: dict[tuple[int, ...], str]  # most often; by (0,), (visible,), (visible, hidden) or nothing
    scores: np.ndarray = field(repr=False)  # [repeats, K], or [1, K] where nothing is cross-fitted
    init: np.ndarray = field(repr=False)  # [K]


class Split(NamedTuple):
    feature: int
    cut: float | None  # None parts the present from the missing


@dataclass(frozen=True, eq=False)
class Rule:
    """A tree of at most two splits in a row; each of its four leaves holds a choice per visible condition."""

    splits: tuple[Split | None, Split | None, Split | None]  # the first, those of its low and high side
    choices: tuple[tuple[int, ...], ...]  # [4, V], leaves from low-low to high-high

    def decide(self, features: np.ndarray, visible: np.ndarray) -> np.ndarray:
        return np.array(self.choices)[_leaf(self.splits, features), visible]

    def describe(self, feature_names: list[str]) -> str:
        first, low, high = ("no split" if at is None else feature_names[at.feature] + (
            " present" if at.cut is None else f" ≤ {at.cut:.4g}") for at in self.splits)
        return f"{first}; if so: {low}; else: {high}"


def _low(values: np.ndarray, cut: float | np.ndarray) -> np.ndarray:
    return np.isfinite(values) & (values <= cut)  # the missing are on the high side of every cut


def _leaf(splits: tuple[Split | None, ...], features: np.ndarray) -> np.ndarray:
    first, low, high = (~_low(features[:, at.feature], math.inf if at.cut is None else at.cut)
                        if at else np.zeros(len(features), bool) for at in splits)
    return 2 * first + np.where(first, high, low)


def knowledge(outcomes: Outcomes, folds: int = 2, repeats: int = 10, seed: int = 0) -> list[Level]:
    """One level per entry of LEVELS; a condition or type that training never met gets the coarser choice.
    "Best per scenario" sees the run it is scored on (its other slice), so it keeps that run's luck."""
    visible, hidden, scored, init = outcomes.visible, outcomes.hidden, outcomes.scored_on, outcomes.init
    fold_rng, rule_rng = np.random.default_rng(seed).spawn(2)
    taken = {name: np.zeros((repeats, len(init)), int) for name in (FIXED, VISIBLE, RULE, HIDDEN)}
    for repeat, train, held in _folds(init, folds, repeats, fold_rng):
        best = decide(outcomes, train, rule_rng)
        taken[FIXED][repeat, held] = best.fixed
        taken[VISIBLE][repeat, held] = best.visible[visible[held]]
        taken[HIDDEN][repeat, held] = best.hidden[visible[held], hidden[held]]
        taken[RULE][repeat, held] = best.rule.decide(outcomes.features[held], visible[held])
    rows = np.arange(len(init))
    scores = {name: scored[rows, choice] for name, choice in taken.items()}
    scores |= {NO_GROWTH: scored[None, :, 0], RANDOM: scored[None, :, 1:].mean(2)}
    scores[SCENARIO] = scored[rows, outcomes.chosen_on.argmax(1)][None]
    by = {FIXED: [visible * 0], VISIBLE: [visible], HIDDEN: [visible, hidden]}
    modes = {name: _modes(taken[name], *ids) for name, ids in by.items()}
    return [Level(name, *_estimate(scores[name], init), *_estimate(scores[name] - scores[NO_GROWTH], init),
                  {group: outcomes.names[choice] for group, choice in modes.get(name, {}).items()},
                  scores[name], init) for name in LEVELS]


def gap(levels: list[Level], lower: str, upper: str) -> Estimate:
    """How much the upper level is better than the lower one, paired by scenario."""
    scores = {level.name: level.scores for level in levels}
    return _estimate(scores[upper] - scores[lower], levels[0].init)


def share(levels: list[Level]) -> Estimate:
    """How much of what the hidden type adds to the visible condition the rule captures; NaN within noise."""
    scores, whole = {level.name: level.scores for level in levels}, gap(levels, VISIBLE, HIDDEN)
    if whole.value <= 2 * whole.standard_error:
        return Estimate(math.nan, math.nan)
    part = gap(levels, VISIBLE, RULE).value / whole.value
    rest = scores[RULE] - part * scores[HIDDEN] - (1 - part) * scores[VISIBLE]  # a ratio, to first order
    return Estimate(part, _estimate(rest, levels[0].init).standard_error / whole.value)


class Decisions(NamedTuple):
    """The best choice at every level of knowledge."""

    fixed: int
    visible: np.ndarray  # [V]
    hidden: np.ndarray  # [V, types]
    rule: Rule


def decide(outcomes: Outcomes, train: np.ndarray | None = None,
           rng: np.random.Generator | None = None) -> Decisions:
    """What these scenarios [K] (None is all) suggest; `knowledge` says what that is worth on others."""
    train = np.ones(len(outcomes.init), bool) if train is None else train
    utility = _centred(outcomes.chosen_on)[train]
    visible, hidden = outcomes.visible[train], outcomes.hidden[train]
    conditions, types = int(outcomes.visible.max()) + 1, int(outcomes.hidden.max()) + 1
    fixed = int(utility.sum(0).argmax())
    by_visible = _best(utility, visible, np.full(conditions, fixed))
    by_hidden = _best(utility, visible * types + hidden, np.repeat(by_visible, types))
    rule = _fit_rule(outcomes.features[train], utility, visible, outcomes.init[train], conditions,
                     rng or np.random.default_rng(0))
    return Decisions(fixed, by_visible, by_hidden.reshape(conditions, types), rule)


@dataclass(frozen=True)
class HeadEffect:
    gain: Estimate  # the best setting minus the default, chosen on other inits than it is scored on
    spread: float  # best minus worst mean, in sample: never negative, so no evidence by itself
    best: dict[tuple[int, ...], int]  # by (group,): the setting most often chosen


def head_effects(values: np.ndarray, init: np.ndarray, group: np.ndarray | None = None, folds: int = 2,
                 repeats: int = 10, seed: int = 0) -> HeadEffect:
    """What one action head is worth: values [K, settings], all else equal, the default in column 0; the best
    is chosen in each `group` [K] of scenarios (a condition or hidden type)."""
    group = np.zeros(len(init), int) if group is None else group
    choice = np.zeros((repeats, len(init)), int)
    for repeat, train, held in _folds(init, folds, repeats, np.random.default_rng(seed)):
        best = _best(values[train], group[train], np.zeros(int(group.max()) + 1, int))
        choice[repeat, held] = best[group[held]]
    gain = values[np.arange(len(init)), choice] - values[:, 0]
    spread = sum(np.ptp(values[group == g].mean(0)) * (group == g).mean() for g in np.unique(group))
    return HeadEffect(_estimate(gain, init), float(spread), _modes(choice, group))


def render(levels: list[Level], title: str = "What knowledge is worth, in points") -> "Table":
    from rich.table import Table  # training machines do without it

    table = Table("decided with", title=title, title_justify="left", caption_justify="left")
    for name in ("utility", "over no growth"):
        table.add_column(name, justify="right", no_wrap=True)
    for level in levels:
        gain = "" if level.name == NO_GROWTH else _points(Estimate(level.gain, level.gain_error), "+")
        table.add_row(level.name, _points(Estimate(level.mean, level.standard_error)), gain)
    part, whole = share(levels), _points(gap(levels, VISIBLE, HIDDEN), "+")
    captured = "within noise" if math.isnan(part.value) else f"the rule: {_points(part)} % of it"
    table.caption = f"hidden type over visible condition: {whole}; {captured}"
    return table


def _points(estimate: Estimate, sign: str = "") -> str:
    return f"{100 * estimate.value:{sign}.1f} ± {100 * estimate.standard_error:.1f}"


def _folds(init: np.ndarray, folds: int, repeats: int,
           rng: np.random.Generator) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(repeat, training [K], held out [K]): whole inits are held out, each once per repeat."""
    distinct, index = np.unique(init, return_inverse=True)
    if not 2 <= folds <= len(distinct):
        raise EsperError(f"gaps: cannot part {len(distinct)} inits in {folds} folds; "
                         "measure at least 4 inits, and use 2 folds.")
    for repeat in range(repeats):
        fold = (rng.permutation(len(distinct)) % folds)[index]
        for held in range(folds):
            yield repeat, fold != held, fold == held


def _centred(utility: np.ndarray) -> np.ndarray:
    return utility - utility.mean(1, keepdims=True)  # changes no comparison, and keeps float32 sums small


def _best(utility: np.ndarray, group: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """[G] the choice with the highest utility in each group; its fallback [G] where a group is empty."""
    sums = np.zeros((len(fallback), utility.shape[1]))
    np.add.at(sums, group, utility)
    return np.where(np.bincount(group, minlength=len(fallback)) > 0, sums.argmax(1), fallback)


def _modes(choice: np.ndarray, *ids: np.ndarray) -> dict[tuple[int, ...], int]:
    """The choice [repeats, K] most often taken by the scenarios that share all ids [K]."""
    groups, index = np.unique(np.stack(ids, 1), axis=0, return_inverse=True)
    taken = (np.bincount(choice[:, index == at].ravel()).argmax() for at in range(len(groups)))
    return {tuple(group): int(most) for group, most in zip(groups.tolist(), taken, strict=True)}


def _estimate(scores: np.ndarray, init: np.ndarray) -> Estimate:
    """Mean of scores [repeats, K]; its error is that of one repeat: repeats share inits, so that of their
    mean would be a fifth too small where choices are nearly tied."""
    distinct, index = np.unique(init, return_inverse=True)
    off = np.array([np.bincount(index, row - row.mean()) for row in scores])  # [repeats, inits]
    variance = (off**2).sum(1).mean() * len(distinct) / (len(distinct) - 1) / len(init) ** 2
    return Estimate(float(scores.mean()), float(np.sqrt(variance)))


def _fit_rule(features: np.ndarray, utility: np.ndarray, visible: np.ndarray, init: np.ndarray,
              conditions: int, rng: np.random.Generator) -> Rule:
    """Searches always find something: the depth (0, 1 or 2) that other inits confirm is used."""
    confirmed = np.zeros(3)
    for _, train, held in _folds(init, 2, 1, rng):
        for depth, rule in enumerate(_grow(features[train], utility[train], visible[train], conditions)):
            confirmed[depth] += utility[held, rule.decide(features[held], visible[held])].sum()
    return _grow(features, utility, visible, conditions)[confirmed.argmax()]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small products: threads that wait for each other made them 40 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def _grow(features: np.ndarray, utility: np.ndarray, visible: np.ndarray, conditions: int) -> list[Rule]:
    """The best rules of depth 0, 1 and 2. A first split that is useless alone may be right (exclusive or), so
    the most even split of every feature is tried, too, beside those of the 16 most promising ones."""
    min_leaf = max(10, 4 * conditions)
    columns, cuts, low = _candidates(features, min_leaf)
    pairs = zip(columns.tolist(), cuts.tolist(), strict=True)
    splits = [*(Split(column, None if math.isinf(cut) else cut) for column, cut in pairs), None]
    second = np.hstack([low, np.ones((len(low), 1))]).astype(np.float32)
    alone = _split_values(second[:, -1:], second, utility, visible, min_leaf)[0, 0]
    uneven = np.abs(low.mean(0) - 0.5)
    mine = [np.flatnonzero(columns == column) for column in np.unique(columns)]
    promising = sorted((at[alone[at].argmax()] for at in mine), key=lambda at: -alone[at])[:16]
    first = sorted({*promising, *(at[uneven[at].argmin()] for at in mine), len(columns)})
    values = _split_values(second[:, first], second, utility, visible, min_leaf)
    place = values.max(2).sum(0).argmax()
    at_low, at_high = values[:, place].argmax(1)
    by_visible = _best(utility, visible, np.full(conditions, utility.sum(0).argmax()))
    rules = []
    for shape in ((None, None, None), (splits[alone.argmax()], None, None),
                  (splits[first[place]], splits[at_low], splits[at_high])):
        table = _best(utility, _leaf(shape, features) * conditions + visible, np.tile(by_visible, 4))
        rules.append(Rule(shape, tuple(map(tuple, table.reshape(4, conditions).tolist()))))
    return rules


def _candidates(features: np.ndarray, min_leaf: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Feature [J], cut [J] and low side [n, J] of all splits at quantiles that leave enough on both sides."""
    present = np.isfinite(features)
    ordered = np.sort(np.where(present, features, np.nan), axis=0)  # the missing come last
    places = (np.arange(1, CUTS)[:, None] * present.sum(0) + CUTS - 1) // CUTS - 1
    after = np.minimum(places + 1, np.maximum(present.sum(0) - 1, 0))  # midway, or neighbours change sides
    between = (np.take_along_axis(ordered, places, 0) + np.take_along_axis(ordered, after, 0)) / 2
    quantiles = np.vstack([between, np.full(features.shape[1], np.inf)])
    each = [np.unique(cuts) for cuts in quantiles.T]
    columns, cuts = np.repeat(np.arange(len(each)), [len(cuts) for cuts in each]), np.concatenate(each)
    low = _low(features[:, columns], cuts)
    usable = np.minimum(low.sum(0), (~low).sum(0)) >= min_leaf
    return columns[usable], cuts[usable], low[:, usable]


def _split_values(first: np.ndarray, second: np.ndarray, utility: np.ndarray, visible: np.ndarray,
                  min_leaf: int) -> np.ndarray:
    """[2, S, J] utility of the low and high side of each first split [n, S], divided by each second [n, J]. 1
    is low; the last column of both is all low, which is no split: its sums are those of whole sides."""
    value = np.zeros((4, first.shape[1], second.shape[1]), np.float32)
    for condition in np.unique(visible):
        rows = visible == condition
        inside, divided, best = first[rows], second[rows], np.full_like(value, -np.inf)
        for column in utility[rows].astype(np.float32).T:
            for leaf, total in zip(best, _leaves(inside, divided, column), strict=True):
                np.maximum(leaf, total, out=leaf)
        value += best
    small = np.stack(_leaves(first, second, np.ones(len(first), np.float32))) < min_leaf
    small[..., -1] = False
    value[small] = -np.inf
    return value.reshape(2, 2, *value.shape[1:]).sum(1)


def _leaves(first: np.ndarray, second: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, ...]:
    """4 x [S, J]: the sum of the weights in the leaves low-low, low-high, high-low and high-high."""
    low_low = torch.mm(torch.from_numpy(first * weight[:, None]).T, torch.from_numpy(second)).numpy()
    high_low = low_low[-1:] - low_low
    return low_low, low_low[:, -1:] - low_low, high_low, high_low[:, -1:] - high_low
