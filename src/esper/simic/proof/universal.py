"""The court for a universe: controllers and controls on data sets that none of them was tuned on.

Legend: n scenarios of each family. Controls are tuned on the training families, for each kind of host apart:
blueprints differ. The oracle is the best plan tuned on a data set itself, on other scenarios.
"""

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
)
from esper.simic.proof.surveyed import (
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
from esper.tolaria import EnvConfig, Family, MakeEnv, MorphogeneticEnv, Universe
from esper.tolaria.tasks import ProofKey, open_test

EnvOf = Callable[[Family], EnvConfig]
SHORTLIST = 8  # plans that are trained side by side, and tuned on a data set itself
OWN = 8  # scenarios with which plans are tuned there
ROWS = 32  # that controls are tuned with: a family has few of the jobs
_COLUMNS = PlanTable._fields[1:]


def save_table(path: Path, table: PlanTable) -> None:
    tensors = {name: torch.from_numpy(getattr(table, name)) for name in _COLUMNS}
    write_state(path, "plans", {"plans": [to_dict(plan) for plan in table.plans]}, tensors)


def load_table(path: Path) -> PlanTable:
    header, tensors = read_state(path, "plans")
    with decoding(path, "table of plans"):
        plans = tuple(from_dict(Plan, each, f"{path}: plans") for each in header["plans"])
        return PlanTable(plans, *(tensors[name].numpy() for name in _COLUMNS))


def survey_all(env_of: EnvOf, families: Sequence[Family], sources: Sequence[str], count: int,
               split: str = "train", start: int = 0, plans: Sequence[Plan] = (),
               make: MakeEnv = MorphogeneticEnv, watch: Callable[[str], object] = silent) -> PlanTable:
    """Plans (all there are, by default) on so many scenarios of every family, no two of them with the same
    number: what is drawn by a number is the same in every family."""
    parts: list[PlanTable] = []
    for family, source in zip(families, sources, strict=True):
        evaluator = Evaluator(env_of(family), make=make)
        some = plans or plans_for(evaluator.config.spec)
        rows = -(-len(some) * count // 2)  # two batches: short episodes, then long ones
        first = start + len(parts) * count
        parts.append(survey(evaluator, some, family.scenarios(count, split, first),
                            sources.index(source), rows))
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
    visible: list[Plan]  # by what a policy is told
    few: list[Plan]  # that are worth training side by side
    way: tuple[int, float, float]  # of the regression: epochs watched, width, ridge
    portfolio: Portfolio
    triggers: dict[str, TriggerConfig]
    greedy: GreedyConfig
    episodes: dict[str, int]

    def tuned(self, family: Family, oracle: Sequence[Plan]) -> Tuned:
        """As the court for one family takes them."""
        kinds = len(family.kinds)
        return Tuned(family.name, family_digest(family), self.episodes, self.triggers, self.fixed,
                     self.visible, [[plan] * kinds for plan in oracle], portfolio=self.portfolio,
                     greedy=self.greedy)


@dataclass(frozen=True)
class Controls:
    """Of every kind of host."""

    universe: str
    kinds: dict[str, KindControls] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        write_json(path, "set of controls", to_dict(self))

    @classmethod
    def load(cls, path: Path) -> "Controls":
        content = read_json(path, "set of controls")
        with decoding(path, "set of controls"):
            return from_dict(cls, {name: content[name] for name in ("universe", "kinds")}, str(path))


def tune_kind(env_of: EnvOf, families: Sequence[Family], table: PlanTable, episodes: int,
              make: MakeEnv = MorphogeneticEnv, watch: Callable[[str], object] = silent,
              workers: Workers | None = None) -> KindControls:
    """Every control gets at least so many episodes, each in a call for the workers; plans had those of their
    table."""
    family, evaluators = families[0], [Evaluator(env_of(each), make=make) for each in families]
    few, used = shortlist(table, family), table.runs.shape[0] * table.runs.shape[1]
    found, grid = identify(table, price_pairs(family)), 4 * len(family.kinds) * len(family.horizons)
    some = evaluators[:: max(1, len(evaluators) * grid * len(few) // max(episodes, 1))]  # all of a grid each
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
    return KindControls(table.plans[best(table, price_pairs(family))], by_condition(table, family), few,
                        (found.watched, found.width, found.ridge), portfolio,
                        {name: done[name][0] for name in TRIGGERS}, greedy[0],
                        spent | {baselines.GREEDY: greedy[1]})


def _portfolio(evaluators: Sequence[Evaluator], plans: Sequence[Plan], episodes: int) -> Portfolio:
    return choose_plans(*play_table(evaluators, plans, episodes, ROWS, silent))


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

    def set_of(self, family: Family, split: str, first: int, count: int, why: str = "") -> UniverseSet:
        """Scenarios of a family; with a reason why, its test split is opened."""
        mine, env = self.controls.kinds[family.host.kind], self.env_of(family)
        own = survey_all(self.env_of, [family], [family.task], OWN, "validation", SPARE, mine.few, self.make)
        held = open_test(family.task, ProofKey(why)) if why else None
        return UniverseSet(env, held, mine.tuned(family, by_condition(own, family)),
                           family.scenarios(count, split, first), self.make,
                           fit(self.tables[family.host.kind], *mine.way))

    def play(self, families: Sequence[Family], split: str, first: int, count: int, why: str,
             contestants: Sequence[Contestant], workers: Workers,
             watch: Callable[[str], object]) -> ProofResults:
        """Every arm on every family."""
        who: dict[str, Contestant | None] = {SHARED: None} | {each.name: each for each in contestants}
        sets = {family.name: self.set_of(family, split, first, count, why) for family in families}
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
    return Proof(claims, *verdict, "none: it is closed" if config.rehearsal else
                 f"of every test family's task, for this proof: {why}")
