"""The court for a universe: controllers and controls on data sets that none of them was tuned on.

Legend: n scenarios of each family. Controls are tuned on the training families, for each kind of host apart:
blueprints differ. The oracle is the best plan tuned on a data set itself, on other scenarios.
"""

import functools
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.leyline import EsperError
from esper.leyline.codec import from_dict, to_dict
from esper.leyline.storage import decoding, read_json, read_state, write_json, write_state
from esper.leyline.telemetry import Nowhere, Sink
from esper.simic.proof import baselines, claims as court
from esper.simic.proof.baselines import IDENTIFY, LEVELS, Tuned, family_digest
from esper.simic.proof.claims import UNIVERSE, judge, pooled
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.plans import Plan
from esper.simic.proof.portfolio import Portfolio, choose_plans, play_table, play_widths
from esper.simic.proof.proving import (
    PILOT,
    POOLED,
    REHEARSAL,
    SHARED,
    SPARE,
    Contestant,
    EvaluationSet,
    Part,
    Played,
    Playing,
    Proof,
    ProofConfig,
    ProofResults,
    opened,
)
from esper.simic.proof.surveyed import (
    MOST,
    Identified,
    PlanTable,
    Regression,
    best,
    fit,
    identify,
    plans_for,
    price_pairs,
    survey,
)
from esper.simic.workers import Workers, silent
from esper.tamiyo import TRIGGERS, GreedyConfig, TriggerConfig
from esper.tolaria import EnvConfig, Family, MakeEnv, MorphogeneticEnv, Universe, openings

EnvOf = Callable[[Family], EnvConfig]
SHORTLIST = 8  # plans that are trained side by side, and tuned on a data set itself
OWN = 24  # scenarios with which plans are tuned there
ROWS = 32  # that controls are tuned with: a family has few of the jobs
_COLUMNS = PlanTable._fields[1:]


def digest_of(families: Sequence[Family]) -> str:
    """Of what tables and controls were made with."""
    return hashlib.sha256(repr(tuple(families)).encode()).hexdigest()[:16]


def save_table(path: Path, table: PlanTable, digest: str) -> None:
    tensors = {name: torch.from_numpy(getattr(table, name)) for name in _COLUMNS}
    header = {"plans": [to_dict(plan) for plan in table.plans], "families": digest}
    write_state(path, "plans", header, tensors)


def load_table(path: Path, digest: str) -> PlanTable:
    header, tensors = read_state(path, "plans")
    with decoding(path, "table of plans"):
        if header["families"] != digest:
            raise EsperError(f"{path} is about other families than these; remove it to play plans again")
        plans = tuple(from_dict(Plan, each, f"{path}: plans") for each in header["plans"])
        return PlanTable(plans, *(tensors[name].numpy() for name in _COLUMNS))


def survey_all(env_of: EnvOf, families: Sequence[Family], sources: Sequence[str], count: int,
               make: MakeEnv = MorphogeneticEnv, watch: Callable[[str], object] = silent) -> PlanTable:
    """All plans on so many training scenarios of every family, no two of them with the same number: what is
    drawn by a number is the same in every family."""
    parts: list[PlanTable] = []
    for family, source in zip(families, sources, strict=True):
        evaluator = Evaluator(env_of(family), make=make)
        plans, drawn = plans_for(evaluator.config.spec), family.scenarios(count, start=len(parts) * count)
        rows = -(-len(plans) * count // 2)  # two batches: short episodes, then long ones
        parts.append(survey(evaluator, plans, drawn, sources.index(source), rows))
        watch(f"{len(parts)} of {len(families)}: {family.name}")
    return PlanTable.joined(parts)


def by_condition(table: PlanTable, family: Family) -> list[Plan]:
    """The best plan for everything that a policy is told, in the order of `conditions`."""
    told = [(pair, horizon) for pair in price_pairs(family) for horizon in sorted(set(family.horizons))]
    return [table.plans[best(table, [pair], table.horizon == horizon)] for pair, horizon in told]


def shortlist(table: PlanTable, family: Family) -> list[Plan]:
    """No growth, then the plans that are best most often: at a pair of prices, for a source of data."""
    cells = [(pair, table.group == group) for pair in price_pairs(family) for group in np.unique(table.group)]
    votes = np.bincount([best(table, [pair], rows) for pair, rows in cells], minlength=len(table.plans))
    votes[0] = len(cells) + 1
    return [table.plans[at] for at in np.argsort(-votes, kind="stable")[:SHORTLIST] if votes[at]]


@dataclass(frozen=True)
class KindControls:
    """Controls of one kind of host, at their best on training families."""

    fixed: Plan
    few: list[Plan]  # that are worth training side by side
    way: tuple[int, float, float]  # of the regression: epochs watched, width, ridge
    portfolio: Portfolio
    triggers: dict[str, TriggerConfig]
    greedy: GreedyConfig
    episodes: dict[str, int]

    def tuned(self, family: Family, visible: list[Plan], oracle: Sequence[Plan],
              episodes: dict[str, int]) -> Tuned:
        """As the court for one family takes them."""
        kinds = len(family.kinds)
        return Tuned(family.name, family_digest(family), episodes, self.triggers, self.fixed, visible,
                     [[plan] * kinds for plan in oracle], portfolio=self.portfolio, greedy=self.greedy)


@dataclass(frozen=True)
class Controls:
    """Of every kind of host."""

    families: str  # digest of those that they were tuned on
    asked: int  # episodes that each was to have
    kinds: dict[str, KindControls] = field(default_factory=dict)

    @property
    def episodes(self) -> dict[str, int]:
        """That each control had, of all kinds of hosts together: as a controller's are counted."""
        names = dict.fromkeys(name for each in self.kinds.values() for name in each.episodes)
        return {name: sum(each.episodes[name] for each in self.kinds.values()) for name in names}

    def save(self, path: Path) -> None:
        write_json(path, "set of controls", to_dict(self))

    @classmethod
    def load(cls, path: Path) -> "Controls":
        content = read_json(path, "set of controls")
        with decoding(path, "set of controls"):
            plain = {name: content[name] for name in ("families", "asked", "kinds")}
            return from_dict(cls, plain, str(path))


def tune_kind(env_of: EnvOf, families: Sequence[Family], table: PlanTable, episodes: int,
              make: MakeEnv = MorphogeneticEnv, watch: Callable[[str], object] = silent,
              workers: Workers | None = None) -> KindControls:
    """Every control gets at least so many episodes, each in a call for the workers; plans had those of their
    table."""
    family, evaluators = families[0], [Evaluator(env_of(each), make=make) for each in families]
    told = {(np.round(price_pairs(each), 9).tobytes(), each.horizons) for each in families}
    if len(told) > 1:
        raise EsperError(f"{family.host.kind} hosts of a universe must have the same horizons, and the same "
                         "prices relative to the host, for controls to be tuned on all of them")
    few, used = shortlist(table, family), table.runs.shape[0] * table.runs.shape[1]
    found, grid = identify(table, price_pairs(family)), 4 * len(family.kinds) * len(family.horizons)
    stride = len(evaluators) * grid * len(few) // max(episodes, 1)  # each is played on all of a grid
    some = evaluators[:: stride | 1]  # odd: sizes of hosts often take turns
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(baselines.tune_trigger, evaluators, name, episodes, ROWS, silent)
        for name in TRIGGERS}
    calls[baselines.GREEDY] = functools.partial(baselines.tune_greedy, evaluators, episodes, ROWS, silent)
    calls[baselines.BEST_OF] = functools.partial(_portfolio, some, few, episodes)
    done: dict[str, Any] = {}
    for each in (workers or Workers()).run(calls):
        done[each.name] = each.value
        watch(f"tuned {each.name}, {len(done)} of {len(calls)}")
    portfolio, greedy = done[baselines.BEST_OF], done[baselines.GREEDY]
    spent = dict.fromkeys((*LEVELS, IDENTIFY), used) | {name: done[name][1] for name in TRIGGERS}
    spent |= dict.fromkeys((baselines.BEST_OF, baselines.HALVING), used + portfolio.episodes)
    way = found.watched, found.width, found.ridge
    return KindControls(table.plans[best(table, price_pairs(family))], few, way, portfolio,
                        {name: done[name][0] for name in TRIGGERS}, greedy[0],
                        spent | {baselines.GREEDY: greedy[1]})


def _portfolio(evaluators: Sequence[Evaluator], plans: Sequence[Plan], episodes: int) -> Portfolio:
    """Chosen as plans are: one data set must not decide for all."""
    table, plans, used = play_table(evaluators, plans, episodes, ROWS, silent)
    bare = table.score[:, :1]
    return choose_plans(replace(table, score=bare + (table.score - bare).clip(-MOST, MOST)), plans, used)


@dataclass(frozen=True)
class UniverseSet(EvaluationSet):
    """Scenarios of one family of a universe."""

    regression: Regression = None  # type: ignore[assignment]

    def _shared(self, evaluator: Evaluator) -> Playing:
        plays = super()._shared(evaluator)
        del plays["best rule"]  # it knows kinds of damage
        plays[IDENTIFY] = lambda: evaluator.play(Identified(self.regression), self.scenarios)
        return plays

    def _own(self, evaluator: Evaluator, mind: Contestant) -> Playing:
        plays = super()._own(evaluator, mind)
        budget = functools.cache(lambda: plays["learned"]().spent)
        return plays | {"static widths, halved": lambda: play_widths(evaluator, budget(), self.scenarios)}


@dataclass(frozen=True)
class Universal:
    """All that a proof on a universe needs to know."""

    universe: Universe
    env_of: EnvOf
    controls: Controls
    tables: Mapping[str, PlanTable]  # by kind of host
    make: MakeEnv = MorphogeneticEnv

    def set_of(self, family: Family, own: PlanTable, split: str, first: int, count: int,
               why: str = "") -> UniverseSet:
        """Scenarios of a family, of which plans have their `own` table; with a reason why, its test split is
        opened."""
        mine, table = self.controls.kinds[family.host.kind], self.tables[family.host.kind]
        held = opened(family, why) if why else None
        tuned = mine.tuned(family, by_condition(table, family), by_condition(own, family),
                           self.controls.episodes)
        return UniverseSet(self.env_of(family), held, tuned, family.scenarios(count, split, first),
                           self.make, fit(table, *mine.way))

    def play(self, families: Sequence[Family], split: str, first: int, count: int, why: str,
             contestants: Sequence[Contestant], workers: Workers,
             watch: Callable[[str], object]) -> ProofResults:
        """Every arm on every family. Scenarios have numbers of their own: what a number draws is the same in
        every family."""
        who: dict[str, Contestant | None] = {SHARED: None} | {each.name: each for each in contestants}
        surveys = {family.name: functools.partial(
            survey, Evaluator(self.env_of(family), make=self.make),
            self.controls.kinds[family.host.kind].few,
            family.scenarios(OWN, "validation", SPARE + place * OWN), 0, ROWS)
            for place, family in enumerate(families)}
        own = {each.name: each.value for each in workers.run(surveys)}
        sets = {family.name: self.set_of(family, own[family.name], split, first + place * count, count, why)
                for place, family in enumerate(families)}
        calls = {f"{name}, {each}": functools.partial(sets[name].play, mind, silent)
                 for name in sets for each, mind in who.items()}
        done: dict[str, Played] = {}
        for each in workers.run(calls):
            done[each.name] = each.value
            watch(f"{len(done)} of {len(calls)} parts")
        sources = self.universe.source_of(families)
        return ProofResults([
            Part(each.scenarios, {one: done[f"{name}, {one}"] for one in who}, name, sources.index(source))
            for (name, each), source in zip(sets.items(), sources, strict=True)])


def prove_universe(court_of: Universal, contestants: Sequence[Contestant], config: ProofConfig,
                   sink: Sink | None = None, watch: Callable[[str], object] = silent,
                   workers: Workers | None = None) -> Proof:
    """As `prove`, with `config.scenarios` of each test family; the pilot, and a rehearsal, are on validation
    families."""
    universe, sink, workers = court_of.universe, sink or Nowhere(), workers or Workers()
    if not universe.test and not config.rehearsal:
        raise EsperError(f"universe {universe.name!r} has no test families, so nothing can be proven; "
                         "use --rehearsal")
    before = court_of.play(universe.validation, "validation", PILOT, config.pilot, "", contestants, workers,
                           lambda what: watch(f"pilot: {what}")).arms
    asked = [claim for claim in judge(before, before, config.effect, UNIVERSE) if claim.asked != "reported"]
    most, count = max((claim.needed for claim in asked), default=0), config.scenarios * len(universe.test)
    if most > count and not config.rehearsal:  # it would be refused for too few
        raise EsperError(f"the pilot asks for {most} scenarios to find the declared effect, so no test split "
                         f"is opened; use --scenarios {-(-most // len(universe.test))} in another --out")
    if config.rehearsal:
        results = court_of.play(universe.validation, "validation", REHEARSAL, config.scenarios, "",
                                contestants, workers, watch)
    else:
        first = secrets.randbits(40)  # nobody could have played these before; the ledger says which they are
        why = (f"proof of the universe {universe.name}: {config.scenarios} scenarios of each family "
               f"from {first} on, effect {config.effect:g}")
        results = court_of.play(universe.test, "test", first, config.scenarios, why, contestants, workers,
                                watch)
    results.record(sink)
    claims = judge(results.arms, before, config.effect, UNIVERSE)
    verdict = court.finding(claims)
    together = {POOLED: pooled(results.arms)}
    claims += judge(together, {POOLED: pooled(before)}, config.effect, UNIVERSE)
    results.conclude(claims, sink)
    if config.rehearsal:
        return Proof(claims, *verdict, "none: it is closed")
    counts = [len(openings(task)) for task in dict.fromkeys(family.task for family in universe.test)]
    again = f"{sum(each > 1 for each in counts)} of them had been opened before"
    return Proof(claims, *verdict, f"of {len(counts)} tasks, for this {why}; {again}")
