"""The proof: trained controllers against every control, on scenarios and samples that nothing was chosen with.

Legend: n scenarios. This is the only place that opens a test split.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from esper.leyline import ActionSpec, EsperError
from esper.leyline.telemetry import Nowhere, Sink
from esper.simic.controls import LEVELS, Tuned, about, play_plans, play_rule, schedule, shuffled
from esper.simic.court import BEATEN, Arm, Arms, Claim, finding, interquartile_mean, interval, judge, pooled
from esper.simic.trials import Delivered, Trials
from esper.tamiyo import Heuristic, PolicyBundle, Random, Triggered, Wait
from esper.tolaria import Family, PreviewConfig, ProofKey, Scenarios, open_test

POOLED, SHARED = "pooled", "all"
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
          watch: Callable[[str], object] = lambda what: None, **options: Any) -> Proof:
    """Everything that was measured goes to the sink; `options` go to the environments."""
    config, sink = config or ProofConfig(), sink or Nowhere()
    if tuned.about != about(family):
        raise EsperError(f"these controls were tuned for {tuned.family!r} as it was then, not for {family.name!r} as it is; "
                         "tune them again")
    pilot = family.scenarios(config.pilot, "validation", start=100_000)  # not those that trainings are watched on
    rehearsal = Trials(family, config.previews, **options)
    before = _Court(rehearsal, tuned, pilot, Nowhere(), lambda what: watch(f"pilot: {what}")).hear(minds)
    held = open_test(family.task, ProofKey("the proof: every arm is scored with it once"))
    trials = Trials(family, config.previews, held, **options)
    court = _Court(trials, tuned, family.scenarios(config.scenarios, "test"), sink, watch)
    arms = court.hear(minds)
    claims = judge(arms, before, config.effect)
    verdict, reason = finding(claims)
    together = judge({POOLED: pooled(arms)}, {POOLED: pooled(before)}, config.effect)
    court.conclude(arms | {POOLED: pooled(arms)}, [*claims, *together])
    return Proof([*claims, *together], verdict, reason)


class _Court:
    """Plays every arm on one set of scenarios."""

    def __init__(self, trials: Trials, tuned: Tuned, scenarios: Scenarios, sink: Sink, watch: Callable[[str], object]) -> None:
        self.trials, self.tuned, self.scenarios, self.sink, self.watch = trials, tuned, scenarios, sink, watch
        self.spec = trials.environment(len(scenarios)).spec

    def hear(self, minds: Sequence[Mind]) -> dict[str, Arms]:
        """For every controller its own arms and the ones that all share."""
        shared = self._shared()
        return {mind.name: shared | self._own(mind) for mind in minds}

    def _shared(self) -> dict[str, Arm]:
        trials, tuned, drawn = self.trials, self.tuned, self.scenarios
        plays: dict[str, Callable[[], Delivered]] = {
            "no growth": lambda: trials.play(Wait(), drawn), "random": lambda: trials.play(Random(), drawn),
            "heuristic": lambda: trials.play(Heuristic(), drawn, previews=True),
            "best rule": lambda: play_rule(trials, tuned, drawn)}
        for name, config in tuned.triggers.items():
            plays[name] = functools.partial(trials.play, Triggered(config), drawn)
        for name in LEVELS:
            plays[name] = functools.partial(play_plans, trials, schedule(tuned, name, trials.family, drawn), drawn)
        return {name: self._arm(SHARED, name, play(), tuned.episodes.get(name)) for name, play in plays.items()}

    def _own(self, mind: Mind) -> dict[str, Arm]:
        trials, drawn = self.trials, self.scenarios
        learned = trials.play(mind.make(self.spec), drawn, previews=True)
        others = {
            "shuffled": trials.play(shuffled(learned, trials.family, drawn, trials.settled), drawn),
            "from scratch, equal epochs": trials.from_scratch(learned.blueprint, drawn),
            "from scratch, equal FLOPs": trials.equal_flops(learned, drawn),
            "wider host": trials.wider(learned.params, drawn)}
        arms = {"learned": self._arm(mind.name, "learned", learned, mind.episodes)}
        return arms | {name: self._arm(mind.name, name, delivered, None) for name, delivered in others.items()}

    def _arm(self, controller: str, name: str, done: Delivered, episodes: int | None) -> Arm:
        drawn = self.scenarios
        self.watch(name if controller == SHARED else f"{name} ({controller})")
        self.sink.write("arm", {
            "controller": controller, "arm": name, "scenario": torch.arange(len(drawn)),
            "kind": [drawn.kinds[kind].name for kind in drawn.kind.tolist()], "price": drawn.price, "horizon": drawn.horizon,
            "utility": done.utility, "score": done.score, "params": done.params, "flops": done.flops})
        if done.decisions:
            columns = dict(zip(("scenario", "epoch", "op", "slot", "blueprint"), zip(*done.decisions, strict=True), strict=True))
            self.sink.write("decision", {"controller": controller, "arm": name, **columns})
        self.sink.commit()
        numbers = {what: getattr(done, what).double().numpy() for what in MEANS}
        return Arm(drawn.key.numpy(), **numbers, episodes=episodes or 0, tuned=episodes is not None and name != "learned")

    def conclude(self, arms: dict[str, Arms], claims: list[Claim]) -> None:
        for controller, each in arms.items():
            above = {name: arm.utility - each[BEATEN[0]].utility for name, arm in each.items()}
            low, high = zip(*(interval(values) for values in above.values()), strict=True)
            self.sink.write("summary", {
                "controller": controller, "arm": list(each), "gain": [float(values.mean()) for values in above.values()],
                "low": low, "high": high, "middle": [interquartile_mean(values) for values in above.values()],
                **{name: [float(getattr(arm, name).mean()) for arm in each.values()] for name in MEANS},
                "episodes": [arm.episodes for arm in each.values()]})
        rows = [asdict(claim) for claim in claims]
        self.sink.write("claim", {name: [row[name] for row in rows] for name in rows[0]})
        self.sink.commit()
