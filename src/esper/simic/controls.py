"""Controls: other ways to decide that a controller must beat, tuned with as many episodes as it was trained with.

Legend: n scenarios, S slots.
"""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina import blueprints_for
from esper.leyline import EsperError
from esper.leyline.keys import mix, uniform
from esper.leyline.storage import whole
from esper.simic.gaps import Rule, Split
from esper.simic.plans import Plan, Search, Watch, played, search
from esper.simic.sweep import conditions, observe_early
from esper.simic.trials import Delivered, Trials, batches
from esper.tamiyo import TRIGGERS, Planned, TriggerConfig, Triggered
from esper.tolaria import Family, Scenarios

LEVELS = ("best fixed", "best per visible condition", "oracle")
"""Plans by what they know."""
PLANS = "plans"
SHARE = 3
"""One candidate in so many goes on to the next rung."""


@dataclass(frozen=True)
class Tuned:
    """Every control that has something to tune, at its best on training scenarios."""

    family: str
    about: str
    """Digest of the family that they were tuned for."""
    episodes: dict[str, int]
    """That each of them took."""
    triggers: dict[str, TriggerConfig]
    fixed: Plan
    visible: list[Plan]
    """By what a policy is told."""
    oracle: list[list[Plan]]
    """By that, and by the hidden kind."""
    rule: Rule
    choices: list[Plan]
    """That the rule counts."""
    preview_steps: int
    """Of the previews that the rule looks at."""

    def save(self, path: Path) -> None:
        fields = {name: getattr(self, name) for name in ("family", "about", "episodes", "fixed", "visible", "oracle", "choices",
                                                         "preview_steps")}
        splits = [None if s is None else [s.feature, None if math.isinf(s.cut) else s.cut] for s in self.rule.splits]
        fields["rule"] = {"splits": splits, "choices": self.rule.choices.tolist()}
        fields["triggers"] = {name: asdict(config) for name, config in self.triggers.items()}
        with whole(path) as temporary:
            temporary.write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Tuned":
        try:
            fields: dict[str, Any] = json.loads(path.read_text())
            splits = (None if s is None else Split(s[0], math.inf if s[1] is None else s[1]) for s in fields["rule"]["splits"])
            rule = Rule(tuple(splits), np.array(fields["rule"]["choices"]))  # type: ignore[arg-type]
            triggers = {name: TriggerConfig(**config) for name, config in fields["triggers"].items()}
            fields["episodes"] = {name: int(count) for name, count in fields["episodes"].items()}
            lists = {name: list(map(_plan, fields[name])) for name in ("visible", "choices")}
            oracle = [list(map(_plan, row)) for row in fields["oracle"]]
            return cls(**fields | lists | {"rule": rule, "triggers": triggers, "oracle": oracle, "fixed": _plan(fields["fixed"])})
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, EsperError) as error:
            raise EsperError(f"cannot read tuned controls from {path}: {error}; remove it to tune again") from error


def _plan(fields: list[Any]) -> Plan:
    return Plan(tuple(fields[0]), int(fields[1]))


def about(family: Family) -> str:
    return hashlib.sha256(repr(family).encode()).hexdigest()[:16]


def halving(count: int, episodes: int, play: Callable[[Tensor], Tensor], first: int = 0,
            known: int | None = None) -> tuple[int, int]:
    """(the best of so many candidates, episodes that it took): all play a few scenarios, the better third some more, and so on.

    `play` takes jobs [J, 2] (candidate, number of the scenario, from `first` on) and returns utilities [J]. At least `episodes`
    are played. The `known` candidate is the best of earlier ones: it stays to the end, and is replaced only by one that is better
    on the last scenarios, with which nobody was chosen, by two standard errors.
    """
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
        best = best if ahead.mean() > 2 * ahead.std() / math.sqrt(each) else known  # one scenario has no error
    return best, used


def in_processes(jobs: int, calls: Mapping[str, Callable[[], Any]], watch: Callable[[int], object]) -> dict[str, Any]:
    """What each call returns, run in so many processes that share the threads of this one; `watch` is told how many are done."""
    share = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (share,)) as pool:
        waiting = {name: pool.submit(call) for name, call in calls.items()}
        try:
            for number, each in enumerate(as_completed(waiting.values())):
                each.result()
                watch(number + 1)
        except BrokenProcessPool as error:
            raise EsperError(f"one of {jobs} processes ended early, perhaps for want of memory; use fewer jobs") from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return {name: each.result() for name, each in waiting.items()}


def _silent(what: str, done: int, total: int) -> None:
    pass


def tune(family: Family, episodes: int, rows: int = 512, preview_steps: int = 30, watch: Watch = _silent, jobs: int = 1,
         known: Tuned | None = None, **options: Any) -> Tuned:
    """Every control gets at least so many episodes; those `known` that had as many are kept, triggers that had fewer are tuned
    with the rest, plans are searched again. `options` go to the environments. With several jobs the three triggers and the plans
    are tuned in processes of their own."""
    kept: Any = known if known is not None and known.about == about(family) else None
    before = kept.episodes if kept else {}
    seen = watch if jobs == 1 else _silent
    calls: dict[str, Callable[[], Any]] = {
        PLANS: functools.partial(_search, family, episodes, rows, preview_steps, seen, options),  # takes longest
        **{name: functools.partial(_tune_trigger, family, name, episodes, rows, seen, options,
                                   (kept.triggers[name], before[name]) if kept and name in before else None)
           for name in TRIGGERS}}
    calls = {name: call for name, call in calls.items() if before.get(LEVELS[0] if name == PLANS else name, 0) < episodes}
    if jobs == 1:
        done = {name: call() for name, call in calls.items()}
    else:
        done = in_processes(jobs, calls, lambda number: watch("controls", number, len(calls)))
    plans, steps = (done[PLANS], preview_steps) if PLANS in done else (kept, kept.preview_steps)
    used = before | {name: done[name][1] for name in TRIGGERS if name in done}
    if PLANS in done:
        used |= dict.fromkeys((*LEVELS, "best rule"), plans.episodes)
    triggers = {name: done[name][0] if name in done else kept.triggers[name] for name in TRIGGERS}
    return Tuned(family.name, about(family), used, triggers, plans.fixed, plans.visible, plans.oracle, plans.rule, plans.choices,
                 steps)


def _search(family: Family, episodes: int, rows: int, preview_steps: int, watch: Watch, options: dict[str, Any]) -> Search:
    return search(Trials(family, **options), episodes, rows, preview_steps, watch)


def trigger_candidates(family: Family, trigger: str) -> list[TriggerConfig]:
    blueprints = [name for name in blueprints_for(family.host.kind) if name != "noop"]
    counts = sorted({1, len(family.host.slots)})
    table = itertools.product(TRIGGERS[trigger].settings, blueprints, counts, (False, True))
    return [TriggerConfig(trigger, *row) for row in table]


def _tune_trigger(family: Family, name: str, episodes: int, rows: int, watch: Watch,
                  options: dict[str, Any], known: tuple[TriggerConfig, int] | None) -> tuple[TriggerConfig, int]:
    """Continues on other scenarios if the best of so many earlier episodes is known."""
    trials, candidates = Trials(family, **options), trigger_candidates(family, name)
    place, before = (candidates.index(known[0]), known[1]) if known is not None and known[0] in candidates else (None, 0)
    done = before

    def play(jobs: Tensor) -> Tensor:
        nonlocal done
        scenarios, utilities = family.scenarios(int(jobs[:, 1].max()) + 1).take(jobs[:, 1]), torch.empty(len(jobs))
        for part, padded in batches(scenarios.horizon, rows):
            policy = Triggered(*(candidates[number] for number in jobs[padded, 0].tolist()))
            utilities[part] = trials.play(policy, scenarios.take(padded)).utility[: len(part)]
            done += len(part)
            watch(name, done, episodes)
        return utilities

    best, used = halving(len(candidates), episodes - before, play, before, place)
    return candidates[best], before + used


def schedule(tuned: Tuned, level: str, family: Family, scenarios: Scenarios) -> list[Plan]:
    """The plan that a level of knowledge has for each scenario."""
    told = conditions(family, scenarios).tolist()
    if level == "best fixed":
        return [tuned.fixed] * len(told)
    if level == "best per visible condition":
        return [tuned.visible[condition] for condition in told]
    if level == "oracle":
        return [tuned.oracle[condition][kind] for condition, kind in zip(told, scenarios.kind.tolist(), strict=True)]
    raise EsperError(f"no schedule is called {level!r}")


def play_plans(trials: Trials, plans: list[Plan], scenarios: Scenarios) -> Delivered:
    return trials.play(played(plans, trials.environment(len(scenarios)).spec), scenarios)


def play_rule(trials: Trials, tuned: Tuned, scenarios: Scenarios) -> Delivered:
    """The rule watches as the search did, decides, and pays for what it looked at, if it looks at anything."""
    looks = any(split is not None for split in tuned.rule.splits)
    early = observe_early(trials.family, scenarios, tuned.preview_steps if looks else 0, **trials.options)
    chosen = tuned.rule.decide(early.features.double().numpy(), conditions(trials.family, scenarios).numpy())
    done = play_plans(trials, [tuned.choices[c] for c in chosen], scenarios)
    return replace(done, utility=done.utility - scenarios.flop_price * early.spent, flops=done.flops + early.spent)


def shuffled(learned: Delivered, family: Family, scenarios: Scenarios, settled: int, seed: int = 0) -> Planned:
    """A controller's own seeds, as many in every scenario, but at the times, in the slots and of the blueprints of others.

    Only fossils count, and `settled` epochs are what one needs. Each column is permuted over all seeds by itself; two seeds of a
    row never share a slot.
    """
    kept, slots = births(learned), len(family.host.slots)
    orders = [uniform(mix(torch.tensor([seed]), 21, column), len(kept))[0].argsort() for column in range(3)]
    rows, times, places, blueprints = (kept[:, 0], *(kept[order, 1 + column] for column, order in enumerate(orders)))
    birth = torch.full((len(scenarios), slots), -1)
    kind = torch.zeros_like(birth)
    for row, epoch, place, blueprint in torch.stack([rows, times, places, blueprints], 1).tolist():
        free = [(place + turn) % slots for turn in range(slots) if birth[row, (place + turn) % slots] < 0]
        latest = int(scenarios.horizon[row]) - settled - slots + len(free)  # in time to be kept, after those before
        birth[row, free[0]], kind[row, free[0]] = max(min(epoch, latest), 0), blueprint
    return Planned(birth, kind)


def births(done: Delivered) -> Tensor:
    """[seeds, 4] of every fossil: scenario, epoch of its birth, slot, blueprint."""
    born = {(d.scenario, d.slot): d.epoch for d in done.decisions if d.op == "GERMINATE"}  # the last one counts
    places = (done.blueprint >= 0).nonzero().tolist()
    seeds = [(row, born[row, slot], slot, int(done.blueprint[row, slot])) for row, slot in places]
    return torch.tensor(seeds, dtype=torch.int64).view(-1, 4)
