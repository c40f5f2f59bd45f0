"""Baselines: other ways to decide, tuned with as many episodes as the controller that must beat them."""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper.kasmina import blueprints_for
from esper.leyline import EsperError
from esper.leyline.codec import from_dict, to_dict
from esper.leyline.keys import Purpose, mix, uniform
from esper.leyline.storage import decoding, read_json, write_json
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.identify import Identification, Watching, identify
from esper.simic.proof.plans import Plan, Search, Survey, Watch, played, search
from esper.simic.proof.portfolio import Portfolio, choose_plans, play_table
from esper.simic.proof.sweep import conditions, observe_early
from esper.simic.proof.value_of_information import Rule
from esper.simic.workers import Workers, silent
from esper.tamiyo import TRIGGERS, Greedy, GreedyConfig, Planned, PolicyBundle, TriggerConfig, Triggered
from esper.tamiyo.greedy import FLOORS, LOOKS, THRESHOLDS
from esper.tolaria import Episodes, Family, PreviewConfig, Scenarios, utility

LEVELS = ("best fixed", "best per visible condition", "oracle")  # plans, by what they know
PLANS, IDENTIFY = "plans", "identify, then plan"
BEST_OF, HALVING, GREEDY = "best of K", "halving over plans", "preview-greedy"
SEARCHED = (*LEVELS, "best rule", IDENTIFY, BEST_OF, HALVING)  # that choose among plans
LATER = ("identification", "portfolio", "greedy")  # that older files lack
T = TypeVar("T")
Config = TypeVar("Config", TriggerConfig, GreedyConfig)
SHARE = 3  # one candidate in so many goes on to the next rung


@dataclass(frozen=True)
class Tuned:
    """Every control that has something to tune, at its best on training scenarios."""

    family: str
    family_digest: str  # of the family that they were tuned for
    episodes: dict[str, int]  # that each of them took
    triggers: dict[str, TriggerConfig] = field(default_factory=dict)
    fixed: Plan = field(default_factory=lambda: Plan(()))
    visible: list[Plan] = field(default_factory=list)  # by what a policy is told
    oracle: list[list[Plan]] = field(default_factory=list)  # by that, and by the hidden kind
    rule: Rule = field(default_factory=lambda: Rule((None, None, None), ()))
    choices: list[Plan] = field(default_factory=list)  # that the rule counts
    preview_steps: int = 30  # of the previews that the rule looks at
    identification: Identification | None = None
    portfolio: Portfolio | None = None  # plans that are trained side by side
    greedy: GreedyConfig | None = None

    def save(self, path: Path) -> None:
        write_json(path, "set of controls", to_dict(self))

    @classmethod
    def load(cls, path: Path) -> "Tuned":
        try:
            content = read_json(path, "set of controls")
            with decoding(path, "set of controls"):
                plain = {name: value for name, value in content.items() if name not in ("kind", "schema")}
                return from_dict(cls, dict.fromkeys(LATER) | plain, str(path))
        except EsperError as error:
            raise EsperError(f"cannot read tuned controls: {error}; remove the file to tune again") from error


def family_digest(family: Family) -> str:
    return hashlib.sha256(repr(family).encode()).hexdigest()[:16]


def halving(count: int, episodes: int, play: Callable[[Tensor], Tensor], first: int = 0,
            known: int | None = None) -> tuple[int, int]:
    """(the best of so many candidates, episodes it took): all play a few scenarios, the better third more.
    `play` takes jobs [J, 2] (candidate, scenario from `first` on) and returns utilities [J]. The `known` best
    of earlier ones stays to the end, and is replaced only by one that is better on the last scenarios, with
    which nobody was chosen, by two standard errors."""
    sizes = [count]
    while sizes[-1] > SHARE:
        sizes.append(math.ceil(sizes[-1] / SHARE))
    alive, total, seen, used = torch.arange(count), torch.zeros(count, dtype=torch.float64), first, 0
    for size in sizes:
        rank = total[alive] if known is None else torch.where(alive == known, torch.inf, total[alive])
        alive = alive[rank.argsort(descending=True, stable=True)[:size]]
        each = math.ceil(episodes / len(sizes) / size)
        jobs = torch.cartesian_prod(alive, torch.arange(seen, seen + each))
        played = play(jobs).double().view(size, each)
        total[alive] += played.sum(1)
        seen, used = seen + each, used + len(jobs)
    best = int(alive[total[alive].argmax()])
    if known is not None and best != known:
        ahead = (played[alive == best] - played[alive == known]).flatten()
        best = best if ahead.mean() > 2 * ahead.std() / math.sqrt(each) else known  # never for one scenario
    return best, used


def tune(evaluator: Evaluator, episodes: int, rows: int = 512, preview_steps: int = 30, watch: Watch = silent,
         workers: Workers | None = None, known: Tuned | None = None,
         keep: Callable[[Tuned], object] = silent) -> Tuned:
    """Every control gets at least so many episodes; those `known` that had as many are kept, triggers and
    preview-greedy are tuned with the rest if they had fewer, plans are searched again. Each part is a call
    for the workers; `keep` is given what is known after each."""
    digest = family_digest(evaluator.family)
    tuned = known if known and known.family_digest == digest else Tuned(evaluator.family.name, digest, {})
    workers = workers or Workers()
    seen, calls = watch if workers.here else silent, dict[str, Callable[[], Any]]()
    if min(tuned.episodes.get(name, 0) for name in SEARCHED) < episodes:  # takes longest
        calls[PLANS] = functools.partial(_search, evaluator, episodes, rows, preview_steps, seen)
    for name in (name for name in TRIGGERS if tuned.episodes.get(name, 0) < episodes):
        best = (tuned.triggers[name], tuned.episodes[name]) if name in tuned.triggers else None
        calls[name] = functools.partial(tune_trigger, [evaluator], name, episodes, rows, seen, best)
    if (had := tuned.episodes.get(GREEDY, 0)) < episodes:
        known_best = (tuned.greedy, had) if tuned.greedy else None
        calls[GREEDY] = functools.partial(tune_greedy, [evaluator], episodes, rows, seen, known_best)
    parts = ((each.name, each.value) for each in workers.run(calls))
    for number, (name, done) in enumerate(parts, 1):
        if name == PLANS:
            found, told, beside = done[0]._asdict(), done[1], done[2]
            used = dict.fromkeys((*LEVELS, "best rule"), found.pop("episodes")) | {IDENTIFY: told.episodes}
            used |= dict.fromkeys((BEST_OF, HALVING), beside.episodes)
            tuned = replace(tuned, preview_steps=preview_steps, identification=told, portfolio=beside,
                            **found)
        elif name == GREEDY:
            tuned, used = replace(tuned, greedy=done[0]), {name: done[1]}
        else:
            triggers = _ordered(tuned.triggers | {name: done[0]})
            tuned, used = replace(tuned, triggers=triggers), {name: done[1]}
        tuned = replace(tuned, episodes=_ordered(tuned.episodes | used))
        keep(tuned)
        if not workers.here:
            watch("controls", number, len(calls))
    return tuned


def _ordered(table: dict[str, T]) -> dict[str, T]:
    """By control, whichever was tuned first: the file is then the same."""
    return {name: table[name] for name in (*SEARCHED, *TRIGGERS, GREEDY) if name in table}


def _search(evaluator: Evaluator, episodes: int, rows: int, preview_steps: int,
            watch: Watch) -> tuple[Search, Identification, Portfolio]:
    """The best plans, an identification that chooses among them, and which to train side by side."""
    found = search(evaluator, episodes, rows, preview_steps, watch)
    nothing = Plan((None,) * len(found.fixed.seeds))
    plans = list(dict.fromkeys([nothing, found.fixed, *found.visible, *itertools.chain(*found.oracle)]))
    told = identify(Survey(evaluator, rows, watch), episodes, found.fixed, plans, watch)
    return found, told, choose_plans(*play_table([evaluator], plans, episodes, rows, watch))


def trigger_candidates(family: Family, trigger: str) -> list[TriggerConfig]:
    blueprints = [name for name in blueprints_for(family.host) if name != "noop"]
    counts = sorted({1, len(family.host.slots)})
    table = itertools.product(TRIGGERS[trigger].settings, blueprints, counts, (False, True))
    return [TriggerConfig(trigger, *row) for row in table]


def greedy_candidates(family: Family) -> list[GreedyConfig]:
    counts = sorted({1, len(family.host.slots)})
    return [GreedyConfig(threshold, floor, count, *look) for threshold, floor, count, look
            in itertools.product(THRESHOLDS, FLOORS, counts, LOOKS)]


def tune_trigger(evaluators: Sequence[Evaluator], name: str, episodes: int, rows: int, watch: Watch,
                 known: tuple[TriggerConfig, int] | None = None) -> tuple[TriggerConfig, int]:
    """(the best settings, episodes it took), on all evaluators together; their hosts are of one kind."""
    return _tune_policy(evaluators, name, trigger_candidates(evaluators[0].family, name), Triggered,
                        lambda config: None, episodes, rows, watch, known)


def tune_greedy(evaluators: Sequence[Evaluator], episodes: int, rows: int, watch: Watch,
                known: tuple[GreedyConfig, int] | None = None) -> tuple[GreedyConfig, int]:
    """(the best settings, episodes it took), on all evaluators together."""
    candidates = list(dict.fromkeys(each for one in evaluators for each in greedy_candidates(one.family)))
    return _tune_policy(evaluators, GREEDY, candidates, Greedy, _looks, episodes, rows, watch, known)


def _tune_policy(evaluators: Sequence[Evaluator], name: str, candidates: list[Config],
                 decides: Callable[..., PolicyBundle], looks: Callable[[Config], PreviewConfig | None],
                 episodes: int, rows: int, watch: Watch,
                 known: tuple[Config, int] | None) -> tuple[Config, int]:
    """Scenarios are dealt to the evaluators in turn; candidates that look alike are played together.
    Continues on other scenarios if the best of so many earlier episodes is known."""
    done, dealt = 0, len(evaluators)
    place, before = (candidates.index(known[0]), known[1]) if known and known[0] in candidates else (None, 0)
    kinds = list(dict.fromkeys(map(looks, candidates)))
    kind = torch.tensor([kinds.index(looks(candidate)) for candidate in candidates])
    seeing = [(which, number, looking(evaluator, look)) for which, look in enumerate(kinds)
              for number, evaluator in enumerate(evaluators)]

    def told(count: int) -> object:
        return watch(name, before + done + count, episodes)

    def play(jobs: Tensor) -> Tensor:
        nonlocal done
        worth = torch.empty(len(jobs))
        for which, number, evaluator in seeing:
            mine = ((kind[jobs[:, 0]] == which) & (jobs[:, 1] % dealt == number)).nonzero().flatten()
            if not len(mine):
                continue
            some = jobs[mine]  # numbers stay: what one draws is the same in every family
            drawn = evaluator.family.scenarios(int(some[:, 1].max()) + 1)
            looks_on = evaluator.config.previews is not None  # at as few hosts as there are: each is dear
            ends = evaluator.play_jobs(some, drawn, min(rows, len(some)) if looks_on else rows, told,
                                       lambda numbers: decides(*(candidates[number] for number in numbers)),
                                       looks_on)
            (score, params, spent), drawn = ends.unbind(1), drawn.take(some[:, 1])
            worth[mine], done = utility(score, params, spent, drawn.price, drawn.flop_price), done + len(mine)
        return worth

    best, used = halving(len(candidates), episodes - before, play, before, place)
    return candidates[best], before + used


def looking(evaluator: Evaluator, previews: PreviewConfig | None) -> Evaluator:
    """The same, with other previews."""
    return Evaluator(replace(evaluator.config, previews=previews), evaluator.held, evaluator.make)


def schedule(tuned: Tuned, level: str, family: Family, scenarios: Scenarios) -> list[Plan]:
    """The plan that a level of knowledge has for each scenario."""
    if level not in LEVELS:
        raise EsperError(f"no schedule is called {level!r}")
    known = {LEVELS[0]: lambda told, kind: tuned.fixed, LEVELS[1]: lambda told, kind: tuned.visible[told],
             LEVELS[2]: lambda told, kind: tuned.oracle[told][kind]}[level]
    return list(map(known, conditions(family, scenarios).tolist(), scenarios.kind.tolist()))


def play_plans(evaluator: Evaluator, plans: list[Plan], scenarios: Scenarios) -> Episodes:
    return evaluator.play(played(plans, evaluator.config.spec), scenarios)


def play_rule(evaluator: Evaluator, tuned: Tuned, scenarios: Scenarios) -> Episodes:
    """The rule watches as the search did, decides, and pays for what it looked at, if anything."""
    looks = any(split is not None for split in tuned.rule.splits)
    early = observe_early(evaluator, scenarios, tuned.preview_steps if looks else 0)
    told = conditions(evaluator.family, scenarios).numpy()
    chosen = tuned.rule.decide(early.features.double().numpy(), told)
    done = play_plans(evaluator, [tuned.choices[c] for c in chosen], scenarios)
    return replace(done, spent=done.spent + early.spent)


def play_identified(evaluator: Evaluator, tuned: Tuned, scenarios: Scenarios) -> Episodes:
    found = tuned.identification
    if found is None:
        raise EsperError("these controls have no identification; tune them again")
    return evaluator.play(Watching(found.first, found.watched, found=found), scenarios)


def _looks(config: GreedyConfig) -> PreviewConfig:
    return PreviewConfig(config.every, config.steps)


def play_greedy(evaluator: Evaluator, tuned: Tuned, scenarios: Scenarios) -> Episodes:
    """It looks at previews of its own, and pays for them."""
    if tuned.greedy is None:
        raise EsperError("these controls have no preview-greedy; tune them again")
    seeing = looking(evaluator, _looks(tuned.greedy))
    return seeing.play(Greedy(tuned.greedy), scenarios, previews=True)


def shuffled(learned: Episodes, family: Family, scenarios: Scenarios, settled: int, seed: int = 0) -> Planned:
    """A controller's own seeds, as many in every scenario, with the times, slots and blueprints of others,
    each permuted by itself. Only fossils count, which need `settled` epochs; no two share a slot."""
    kept, slots = births(learned), len(family.host.slots)
    mixed = kept.clone()
    for column in range(3):
        keys = mix(torch.tensor([seed]), Purpose.SHUFFLED_DECISIONS, column)
        mixed[:, 1 + column] = kept[uniform(keys, len(kept))[0].argsort(), 1 + column]
    birth = torch.full((len(scenarios), slots), -1)
    kind = torch.zeros_like(birth)
    for row, epoch, place, blueprint in mixed.tolist():
        free = [(place + turn) % slots for turn in range(slots) if birth[row, (place + turn) % slots] < 0]
        latest = int(scenarios.horizon[row]) - settled - slots + len(free)  # in time to be kept
        birth[row, free[0]], kind[row, free[0]] = max(min(epoch, latest), 0), blueprint
    return Planned(birth, kind)


def births(done: Episodes) -> Tensor:
    """[seeds, 4] of every fossil: scenario, epoch of its birth, slot, blueprint."""
    born = {(d.scenario, d.slot): d.epoch for d in done.decisions() if d.op == "GERMINATE"}  # the last counts
    places = (done.blueprint >= 0).nonzero().tolist()
    seeds = [(row, born[row, slot], slot, int(done.blueprint[row, slot])) for row, slot in places]
    return torch.tensor(seeds, dtype=torch.int64).view(-1, 4)
