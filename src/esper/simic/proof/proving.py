"""The proof: trained controllers against every control on n scenarios. Only here a test split is opened."""

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import ActionSpec, EsperError
from esper.leyline.telemetry import Nowhere, Sink
from esper.simic.proof import baselines, claims as court
from esper.simic.proof.baselines import LEVELS, Tuned, play_plans
from esper.simic.proof.claims import BEATEN, MEANS, Arm, Arms, Claim, interval, judge, pooled
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.portfolio import play_best_of, play_halving
from esper.simic.workers import Workers, silent
from esper.tamiyo import Heuristic, PolicyBundle, Random, Triggered, Wait
from esper.tolaria import (
    Decision,
    EnvConfig,
    Episodes,
    Family,
    MakeEnv,
    MorphogeneticEnv,
    Scenarios,
    openings,
)
from esper.tolaria.tasks import ProofKey, open_test

POOLED, SHARED = "pooled", "all"
PILOT, SPARE, REHEARSAL = 100_000, 200_000, 300_000
"""First validation scenarios of a pilot, experiments and a rehearsal; trainings are watched on 0 and on."""


@dataclass(frozen=True)
class Contestant:
    """Someone who decides, and what it cost to make."""

    name: str
    make: Callable[[ActionSpec], PolicyBundle]
    episodes: int  # that it was trained with


@dataclass(frozen=True)
class ProofConfig:
    scenarios: int = 256
    pilot: int = 64  # validation scenarios from which the number that is needed is estimated
    effect: float = 0.02  # difference, in score, that the proof must be able to find
    rehearsal: bool = False  # on validation scenarios and samples: the test split stays closed

    def __post_init__(self) -> None:
        if self.scenarios < 1 or self.pilot < 2 or self.effect <= 0:
            raise EsperError("a proof needs scenarios, a pilot of at least 2 and an effect above 0")


@dataclass(frozen=True)
class Proof:
    claims: list[Claim]  # about each controller, then about their mean
    verdict: str
    reason: str
    openings: str  # of the test split, this one included


def prove(env: EnvConfig, contestants: Sequence[Contestant], tuned: Tuned, config: ProofConfig | None = None,
          sink: Sink | None = None, watch: Callable[[str], object] = silent,
          workers: Workers | None = None, make: MakeEnv = MorphogeneticEnv) -> Proof:
    """Every arm is played in `env`, with the previews that the controllers were trained with, and recorded in
    the sink. Controllers and the arms that they share are played by workers, each at a time by one of them;
    contestants must then be such that they can be sent there. `make` makes environments."""
    config, sink, family = config or ProofConfig(), sink or Nowhere(), env.family
    workers = workers or Workers()
    if tuned.family_digest != baselines.family_digest(family):
        raise EsperError(f"these controls were tuned for {tuned.family!r} as it was then, "
                         f"not for {family.name!r} as it is; tune them again")
    pilot = EvaluationSet(env, None, tuned, family.scenarios(config.pilot, "validation", PILOT), make)
    played = pilot.play_all(contestants, workers, lambda what: watch(f"pilot: {what}"))
    before = ProofResults([Part(pilot.scenarios, played)]).arms
    if config.rehearsal:
        chosen = replace(pilot, scenarios=family.scenarios(config.scenarios, "validation", REHEARSAL))
    else:
        asked = [claim for claim in judge(before, before, config.effect) if claim.asked != "reported"]
        most = max((claim.needed for claim in asked), default=0)
        if most > config.scenarios:  # it would be refused for too few
            raise EsperError(f"the pilot asks for {most} scenarios to find the declared effect, so the test "
                             f"split stays closed; use --scenarios {most} in another --out")
        first = secrets.randbits(40)  # nobody could have played these before; the ledger says which they are
        held = opened(family, f"proof of {family.name}: {config.scenarios} scenarios "
                              f"from {first} on, effect {config.effect:g}")
        chosen = replace(pilot, scenarios=family.scenarios(config.scenarios, "test", first), held=held)
    results = ProofResults([Part(chosen.scenarios, chosen.play_all(contestants, workers, watch))])
    results.record(sink)
    claims = judge(results.arms, before, config.effect)
    verdict = court.finding(claims)
    claims += judge({POOLED: pooled(results.arms)}, {POOLED: pooled(before)}, config.effect)
    results.conclude(claims, sink)
    if config.rehearsal:
        return Proof(claims, *verdict, "none: it is closed")
    known = openings(family.task)
    earlier = "; ".join(f"{each['date']}, {each['reason']}" for each in known[:-1])
    told = f"{len(known)}, this one included; before it: {earlier}" if earlier else "this one alone"
    return Proof(claims, *verdict, told)


def opened(family: Family, why: str) -> tuple[Tensor, Tensor]:
    """The test split of a family's task, for a proof; the ledger is told why."""
    return open_test(family.task, ProofKey(why))


Played = dict[str, tuple[Episodes, int | None]]  # arm -> what it delivered, episodes that it had
Playing = dict[str, Callable[[], Episodes]]  # arm -> what plays it


@dataclass(frozen=True)
class EvaluationSet:
    """One set of scenarios on which every arm is played."""

    env: EnvConfig
    held: tuple[Tensor, Tensor] | None  # samples that arms are scored with; None is the validation slice
    tuned: Tuned
    scenarios: Scenarios
    make: MakeEnv

    def play_all(self, contestants: Sequence[Contestant], workers: Workers,
                 watch: Callable[[str], object]) -> dict[str, Played]:
        """What all share, and what every contestant has of its own."""
        parts: dict[str, Contestant | None] = {SHARED: None} | {each.name: each for each in contestants}
        told = watch if workers.here else silent
        calls = {who: functools.partial(self.play, each, told) for who, each in parts.items()}
        played: dict[str, Played] = {}
        for done in workers.run(calls):
            played[done.name] = done.value
            if not workers.here:
                watch(f"{len(played)} of {len(parts)} parts")
        return {who: played[who] for who in parts}

    def play(self, mind: Contestant | None, watch: Callable[[str], object]) -> Played:
        """A controller's own arms, or those that all of them share."""
        evaluator, played = Evaluator(self.env, self.held, self.make), {}
        episodes = self.tuned.episodes | ({} if mind is None else {"learned": mind.episodes})
        arms = self._shared(evaluator) if mind is None else self._own(evaluator, mind)
        for name, arm in arms.items():
            watch(name if mind is None else f"{name} ({mind.name})")
            played[name] = arm(), episodes.get(name)
        return played

    def _shared(self, evaluator: Evaluator) -> Playing:
        tuned, drawn = self.tuned, self.scenarios
        plays: Playing = {
            "no growth": lambda: evaluator.play(Wait(), drawn),
            "random": lambda: evaluator.play(Random(), drawn),
            "heuristic": lambda: evaluator.play(Heuristic(), drawn, previews=True),
            "best rule": lambda: baselines.play_rule(evaluator, tuned, drawn),
            baselines.IDENTIFY: lambda: baselines.play_identified(evaluator, tuned, drawn),
            baselines.BEST_OF: lambda: play_best_of(evaluator, tuned.portfolio, drawn),
            baselines.GREEDY: lambda: baselines.play_greedy(evaluator, tuned, drawn)}
        for name, config in tuned.triggers.items():
            plays[name] = functools.partial(evaluator.play, Triggered(config), drawn)
        for name in LEVELS:
            plans = baselines.schedule(tuned, name, evaluator.family, drawn)
            plays[name] = functools.partial(play_plans, evaluator, plans, drawn)
        return plays

    def _own(self, evaluator: Evaluator, mind: Contestant) -> Playing:
        drawn, policy = self.scenarios, mind.make(evaluator.config.spec)
        learned = functools.cache(lambda: evaluator.play(policy, drawn, previews=True))
        return {
            "learned": learned,
            "shuffled": lambda: evaluator.play(baselines.shuffled(
                learned(), evaluator.family, drawn, evaluator.min_epochs_to_keep), drawn),
            baselines.HALVING: lambda: play_halving(
                evaluator, self.tuned.portfolio, learned().spent, drawn),
            "from scratch, equal epochs": lambda: evaluator.from_scratch(learned().blueprint, drawn),
            "from scratch, equal FLOPs": lambda: evaluator.equal_flops(learned(), drawn),
            "wider host": lambda: evaluator.wider(learned().params, drawn)}


def _figures(done: Episodes) -> dict[str, Tensor]:
    """[n] each; FLOPs in trainings of the bare host."""
    return dict(zip(MEANS, (done.utility(), done.delivered.score, done.params, 1 + done.spent), strict=True))


class Part(NamedTuple):
    """What was played on one family's scenarios, by whom; `SHARED` is everybody."""

    scenarios: Scenarios
    played: Mapping[str, Played]
    name: str = ""  # of the family, where there are several
    source: int | None = None  # of its data, by number


class ProofResults:
    """What was played on all scenarios, family by family."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        known = {who: {name: self._arm(who, name) for name in played}
                 for who, played in parts[0].played.items()}
        shared = known.pop(SHARED)
        self.arms: dict[str, Arms] = {who: shared | own for who, own in known.items()}

    def _arm(self, who: str, name: str) -> Arm:
        done = [part.played[who][name] for part in self.parts]
        figures = [_figures(each) for each, _ in done]
        numbers = {each: torch.cat([one[each] for one in figures]).double().numpy() for each in MEANS}
        keys = torch.cat([part.scenarios.key for part in self.parts]).numpy()
        sources = [torch.full((len(part.scenarios),), part.source) for part in self.parts
                   if part.source is not None]
        episodes, group = done[0][1], torch.cat(sources).numpy() if sources else None
        return Arm(keys, **numbers, episodes=episodes or 0, group=group,
                   tuned=episodes is not None and name != "learned")

    def record(self, sink: Sink) -> None:
        """Every arm, scenario by scenario."""
        first = 0
        for part in self.parts:
            self._record(sink, part, first)
            first += len(part.scenarios)

    def _record(self, sink: Sink, part: Part, first: int) -> None:
        drawn, before = part.scenarios, f"{part.name}: " if part.name else ""
        kinds = [before + drawn.kinds[kind].name for kind in drawn.kind.tolist()]
        about = {"scenario": first + torch.arange(len(drawn)), "price": drawn.price,
                 "flop_price": drawn.flop_price, "kind": kinds, "horizon": drawn.horizon}
        every = ((who, *each) for who, played in part.played.items() for each in played.items())
        for who, name, (done, _) in every:
            sink.write("arm", {"controller": who, "arm": name, **about, **_figures(done)})
            if decisions := [d._replace(scenario=first + d.scenario) for d in done.decisions()]:
                columns = zip(Decision._fields, zip(*decisions, strict=True), strict=True)
                sink.write("decision", {"controller": who, "arm": name, **dict(columns)})
            sink.commit()

    def conclude(self, claims: Sequence[Claim], sink: Sink, pool: bool = True) -> None:
        """What every arm comes to, and what is claimed; controllers of one making may be pooled."""
        for controller, each in {**self.arms, **({POOLED: pooled(self.arms)} if pool else {})}.items():
            above = [arm.utility - each[BEATEN[0]].utility for arm in each.values()]
            group = each[BEATEN[0]].group
            low, high = zip(*(interval(values, group=group) for values in above), strict=True)
            sink.write("summary", {
                "controller": controller, "arm": list(each), "low": low, "high": high,
                "gain": [float(values.mean()) for values in above],
                "middle": [court.interquartile_mean(values) for values in above],
                **{name: [float(getattr(arm, name).mean()) for arm in each.values()] for name in MEANS},
                "episodes": [arm.episodes for arm in each.values()]})
        if claims:
            sink.write("claim", {f.name: [getattr(claim, f.name) for claim in claims] for f in fields(Claim)})
        sink.commit()
