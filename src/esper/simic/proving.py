"""The proof: trained controllers against every control, on scenarios and samples that nothing was chosen with.

Legend: n scenarios. This is the only place that opens a test split.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esper.leyline import ActionSpec, EsperError
from esper.leyline.telemetry import Nowhere, Sink
from esper.simic.controls import LEVELS, Tuned, about, in_processes, play_plans, play_rule, schedule, shuffled
from esper.simic.court import BEATEN, Arm, Arms, Claim, finding, interquartile_mean, interval, judge, pooled
from esper.simic.trials import Delivered, Trials
from esper.tamiyo import Heuristic, PolicyBundle, Random, Triggered, Wait
from esper.tolaria import Family, PreviewConfig, ProofKey, Scenarios, open_test

POOLED, SHARED = "pooled", "all"
PILOT, SPARE, REHEARSAL = 100_000, 200_000, 300_000
"""Numbers of their first validation scenarios: of a pilot, of experiments, of a rehearsal. Trainings are watched on those from
0 on."""
MEANS = ("utility", "score", "params", "flops")


@dataclass(frozen=True)
class Mind:
    """Someone who decides, and what it cost to make."""

    name: str
    make: Callable[[ActionSpec], PolicyBundle]
    episodes: int
    """It was trained with."""


@dataclass(frozen=True)
class ProofConfig:
    scenarios: int = 256
    pilot: int = 64
    """Validation scenarios from which the number that is needed is estimated."""
    effect: float = 0.02
    """Difference, in score, that the proof must be able to find."""
    previews: PreviewConfig | None = None
    """As the controllers were trained with."""
    rehearsal: bool = False
    """Validation scenarios and samples instead of the test split, which stays closed. It proves nothing."""

    def __post_init__(self) -> None:
        if self.scenarios < 1 or self.pilot < 2 or self.effect <= 0:
            raise EsperError("a proof needs scenarios, a pilot of at least 2 and an effect above 0")


@dataclass(frozen=True)
class Proof:
    claims: list[Claim]
    """About each controller, then about their mean."""
    verdict: str
    reason: str


def prove(family: Family, minds: Sequence[Mind], tuned: Tuned, config: ProofConfig | None = None, sink: Sink | None = None,
          watch: Callable[[str], object] = lambda what: None, jobs: int = 1, **options: Any) -> Proof:
    """Everything that was measured goes to the sink; `options` go to the environments. With several jobs, controllers and the
    arms that they share are played in processes of their own; minds must then be such that they can be sent there."""
    config, sink = config or ProofConfig(), sink or Nowhere()
    if tuned.about != about(family):
        raise EsperError(f"these controls were tuned for {tuned.family!r} as it was then, not for {family.name!r} as it is; "
                         "tune them again")
    sitting = Sitting(family, config.previews, None, tuned, family.scenarios(config.pilot, "validation", start=PILOT), options)
    before = Court(sitting.scenarios, _hear(sitting, minds, jobs, lambda what: watch(f"pilot: {what}"))).arms
    if config.rehearsal:
        sitting = replace(sitting, scenarios=family.scenarios(config.scenarios, "validation", start=REHEARSAL))
    else:
        held = open_test(family.task, ProofKey("the proof: every arm is scored with it once"))
        sitting = replace(sitting, scenarios=family.scenarios(config.scenarios, "test"), held=held)
    court = Court(sitting.scenarios, _hear(sitting, minds, jobs, watch))
    court.record(sink)
    claims = judge(court.arms, before, config.effect)
    verdict, reason = finding(claims)
    together = judge({POOLED: pooled(court.arms)}, {POOLED: pooled(before)}, config.effect)
    court.conclude([*claims, *together], sink)
    return Proof([*claims, *together], verdict, reason)


Played = dict[str, tuple[Delivered, int | None]]
"""arm -> (what it delivered, episodes that it was tuned or trained with)."""


@dataclass(frozen=True)
class Sitting:
    """One set of scenarios on which every arm is played."""

    family: Family
    previews: PreviewConfig | None
    held: tuple[Tensor, Tensor] | None
    """Samples that arms are scored with; None is the validation slice."""
    tuned: Tuned
    scenarios: Scenarios
    options: dict[str, Any]

    def play(self, mind: Mind | None, watch: Callable[[str], object]) -> Played:
        """A controller's own arms, or those that all of them share."""
        trials = Trials(self.family, self.previews, self.held, **self.options)
        played = {}
        for name, arm, episodes in self._shared(trials) if mind is None else self._own(trials, mind):
            watch(name if mind is None else f"{name} ({mind.name})")
            played[name] = arm(), episodes
        return played

    def _shared(self, trials: Trials) -> Iterator[tuple[str, Callable[[], Delivered], int | None]]:
        tuned, drawn = self.tuned, self.scenarios
        plays: dict[str, Callable[[], Delivered]] = {
            "no growth": lambda: trials.play(Wait(), drawn), "random": lambda: trials.play(Random(), drawn),
            "heuristic": lambda: trials.play(Heuristic(), drawn, previews=True),
            "best rule": lambda: play_rule(trials, tuned, drawn)}
        for name, config in tuned.triggers.items():
            plays[name] = functools.partial(trials.play, Triggered(config), drawn)
        for name in LEVELS:
            plays[name] = functools.partial(play_plans, trials, schedule(tuned, name, trials.family, drawn), drawn)
        return ((name, play, tuned.episodes.get(name)) for name, play in plays.items())

    def _own(self, trials: Trials, mind: Mind) -> Iterator[tuple[str, Callable[[], Delivered], int | None]]:
        drawn = self.scenarios
        policy = mind.make(trials.environment(len(drawn)).spec)
        learned = functools.cache(lambda: trials.play(policy, drawn, previews=True))
        yield "learned", learned, mind.episodes
        yield "shuffled", lambda: trials.play(shuffled(learned(), trials.family, drawn, trials.settled), drawn), None
        yield "from scratch, equal epochs", lambda: trials.from_scratch(learned().blueprint, drawn), None
        yield "from scratch, equal FLOPs", lambda: trials.equal_flops(learned(), drawn), None
        yield "wider host", lambda: trials.wider(learned().params, drawn), None


def _hear(sitting: Sitting, minds: Sequence[Mind], jobs: int, watch: Callable[[str], object]) -> dict[str, Played]:
    """What all share, and what every mind has of its own."""
    parts: dict[str, Mind | None] = {SHARED: None} | {mind.name: mind for mind in minds}
    if jobs == 1:
        return {who: sitting.play(mind, watch) for who, mind in parts.items()}
    calls = {who: functools.partial(sitting.play, mind, _silent) for who, mind in parts.items()}
    return in_processes(jobs, calls, lambda done: watch(f"{done} of {len(parts)} parts"))


def _silent(what: str) -> None:
    pass


class Court:
    """What was played on one set of scenarios, by whom; `SHARED` is everybody."""

    def __init__(self, scenarios: Scenarios, played: Mapping[str, Played]) -> None:
        self.scenarios, self.played = scenarios, played
        known = {who: {name: self._arm(name, *each) for name, each in part.items()} for who, part in self.played.items()}
        shared = known.pop(SHARED)
        self.arms: dict[str, Arms] = {who: shared | own for who, own in known.items()}

    def _arm(self, name: str, done: Delivered, episodes: int | None) -> Arm:
        numbers = {what: getattr(done, what).double().numpy() for what in MEANS}
        return Arm(self.scenarios.key.numpy(), **numbers, episodes=episodes or 0,
                   tuned=episodes is not None and name != "learned")

    def record(self, sink: Sink) -> None:
        """Every arm, scenario by scenario."""
        drawn = self.scenarios
        kinds = [drawn.kinds[kind].name for kind in drawn.kind.tolist()]
        for who, (name, (done, _)) in ((who, each) for who, part in self.played.items() for each in part.items()):
            sink.write("arm", {
                "controller": who, "arm": name, "scenario": torch.arange(len(drawn)), "kind": kinds, "price": drawn.price,
                "horizon": drawn.horizon, "utility": done.utility, "score": done.score, "params": done.params,
                "flops": done.flops})
            if done.decisions:
                columns = zip(("scenario", "epoch", "op", "slot", "blueprint"), zip(*done.decisions, strict=True), strict=True)
                sink.write("decision", {"controller": who, "arm": name, **dict(columns)})
            sink.commit()

    def conclude(self, claims: Sequence[Claim], sink: Sink, pool: bool = True) -> None:
        """What every arm comes to, and what is claimed about them; controllers of one making may be pooled."""
        for controller, each in {**self.arms, **({POOLED: pooled(self.arms)} if pool else {})}.items():
            above = {name: arm.utility - each[BEATEN[0]].utility for name, arm in each.items()}
            low, high = zip(*(interval(values) for values in above.values()), strict=True)
            sink.write("summary", {
                "controller": controller, "arm": list(each), "gain": [float(values.mean()) for values in above.values()],
                "low": low, "high": high, "middle": [interquartile_mean(values) for values in above.values()],
                **{name: [float(getattr(arm, name).mean()) for arm in each.values()] for name in MEANS},
                "episodes": [arm.episodes for arm in each.values()]})
        rows = [asdict(claim) for claim in claims]
        if rows:
            sink.write("claim", {name: [row[name] for row in rows] for name in rows[0]})
        sink.commit()
