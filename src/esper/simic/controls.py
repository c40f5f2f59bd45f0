"""Controls: other ways to decide that a controller must beat, tuned with as many episodes as it was trained with.

Legend: n scenarios, S slots.
"""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina import blueprints_for
from esper.leyline import EsperError
from esper.leyline.keys import mix, uniform
from esper.simic.gaps import Rule, Split, decide
from esper.simic.sweep import choices, conditions, observe_early, run_sweep
from esper.simic.trials import Decision, Delivered, Trials
from esper.tamiyo import TRIGGERS, Planned, Scripted, TriggerConfig, Triggered
from esper.tolaria import Family, Scenarios

LEVELS = ("best fixed", "best per visible condition", "oracle")
"""Schedules by what they know."""
SETTLED = 6
"""Epochs that a seed needs from birth to fossil."""
SHARE = 3
"""One candidate in so many goes on to the next rung."""
Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Tuned:
    """Every control that has something to tune, at its best on training scenarios."""

    family: str
    episodes: dict[str, int]
    """That each of them took."""
    triggers: dict[str, TriggerConfig]
    fixed: str
    """A choice of the sweep."""
    visible: list[str]
    """By what a policy is told."""
    oracle: list[list[str]]
    """By that, and by the hidden kind."""
    rule: Rule
    names: list[str]
    """Choices that the rule counts."""
    preview_steps: int
    """Of the previews that the rule looks at."""

    def save(self, path: Path) -> None:
        rule = {"splits": self.rule.splits, "choices": self.rule.choices.tolist()}
        path.write_text(json.dumps(asdict(replace(self, rule=None)) | {"rule": rule}, indent=1) + "\n")  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "Tuned":
        try:
            fields: dict[str, Any] = json.loads(path.read_text())
            splits = (None if split is None else Split(*split) for split in fields["rule"]["splits"])
            rule = Rule(tuple(splits), np.array(fields["rule"]["choices"]))  # type: ignore[arg-type]
            triggers = {name: TriggerConfig(**config) for name, config in fields["triggers"].items()}
            return cls(**fields | {"rule": rule, "triggers": triggers})
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise EsperError(f"cannot read tuned controls from {path}: {error}; remove it to tune again") from error


def halving(count: int, episodes: int, play: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """(the best of so many candidates, episodes that it took): all play a few scenarios, the better third some more, and so on.

    `play` takes jobs [J, 2] (candidate, number of the scenario) and returns utilities [J]. At least `episodes` are played.
    """
    sizes = [count]
    while sizes[-1] > SHARE:
        sizes.append(math.ceil(sizes[-1] / SHARE))
    alive, total, seen, used = torch.arange(count), torch.zeros(count, dtype=torch.float64), 0, 0
    for size in sizes:
        alive = alive[total[alive].argsort(descending=True, stable=True)[:size]]
        each = math.ceil(episodes / len(sizes) / size)
        jobs = torch.cartesian_prod(alive, torch.arange(seen, seen + each))
        total[alive] += play(jobs).double().view(size, each).sum(1)
        seen, used = seen + each, used + len(jobs)
    return int(alive[total[alive].argmax()]), used


def tune(family: Family, episodes: int, rows: int = 512, preview_steps: int = 30,
         watch: Watch = lambda what, done, total: None, **options: Any) -> Tuned:
    """Every control gets at least so many episodes; `options` go to the environments."""
    trials, triggers, used = Trials(family, **options), {}, {}
    for name in TRIGGERS:
        triggers[name], used[name] = _tune_trigger(trials, name, episodes, rows, watch)
    table = choices(family)
    inits = max(4, math.ceil(episodes / (len(table) * len(family.kinds) * len(set(family.horizons)))))
    sweep = run_sweep(family, table, inits, rows, preview_steps, watch=lambda done, total: watch("sweep", done, total), **options)
    outcomes = sweep.outcomes()
    both = (outcomes.chosen_on + outcomes.scored_on) / 2  # nothing is scored here: choose with all there is
    best, names = decide(replace(outcomes, chosen_on=both)), sweep.names
    played = len(sweep.init) * len(table)
    used |= dict.fromkeys((*LEVELS, "best rule"), played)
    return Tuned(family.name, used, triggers, names[best.fixed], [names[c] for c in best.visible],
                 [[names[c] for c in row] for row in best.hidden], best.rule, names, preview_steps)


def trigger_candidates(family: Family, trigger: str) -> list[TriggerConfig]:
    blueprints = [name for name in blueprints_for(family.host.kind) if name != "noop"]
    counts = sorted({1, len(family.host.slots)})
    table = itertools.product(TRIGGERS[trigger].settings, blueprints, counts, (False, True))
    return [TriggerConfig(trigger, *row) for row in table]


def _tune_trigger(trials: Trials, name: str, episodes: int, rows: int, watch: Watch) -> tuple[TriggerConfig, int]:
    candidates, done = trigger_candidates(trials.family, name), 0

    def play(jobs: Tensor) -> Tensor:
        nonlocal done
        utilities = []
        for part in jobs.split(rows):
            padded = torch.cat([part, part[:1].expand(rows - len(part), 2)])
            scenarios = trials.family.scenarios(int(padded[:, 1].max()) + 1).take(padded[:, 1])
            policy = Triggered(*(candidates[number] for number in padded[:, 0].tolist()))
            utilities.append(trials.play(policy, scenarios).utility[: len(part)])
            done += len(part)
            watch(name, done, episodes)
        return torch.cat(utilities)

    best, used = halving(len(candidates), episodes, play)
    return candidates[best], used


def schedule(tuned: Tuned, level: str, family: Family, scenarios: Scenarios) -> list[str]:
    """The choice that a level of knowledge makes for each scenario."""
    told = conditions(family, scenarios).tolist()
    if level == "best fixed":
        return [tuned.fixed] * len(told)
    if level == "best per visible condition":
        return [tuned.visible[condition] for condition in told]
    if level == "oracle":
        return [tuned.oracle[condition][kind] for condition, kind in zip(told, scenarios.kind.tolist(), strict=True)]
    raise EsperError(f"no schedule is called {level!r}")


def play_schedule(trials: Trials, names: list[str], scenarios: Scenarios) -> Delivered:
    table = choices(trials.family)
    return trials.play(Scripted([table[name] for name in names]), scenarios, full=True)


def play_rule(trials: Trials, tuned: Tuned, scenarios: Scenarios) -> Delivered:
    """The rule watches as the sweep did, decides, and pays for what it looked at."""
    early = observe_early(trials.family, scenarios, tuned.preview_steps, **trials.options)
    told = conditions(trials.family, scenarios).numpy()
    chosen = tuned.rule.decide(early.features.double().numpy(), told)
    done = play_schedule(trials, [tuned.names[c] for c in chosen], scenarios)
    return replace(done, utility=done.utility - scenarios.flop_price * early.spent, flops=done.flops + early.spent)


def shuffled(decisions: list[Decision], family: Family, scenarios: Scenarios, seed: int = 0) -> Planned:
    """A controller's own seeds, as many in every scenario, but at the times, in the slots and of the blueprints of others.

    Only seeds that were kept count. Each column is permuted over all seeds by itself; two seeds of a row never share a slot.
    """
    kept, names, slots = _kept(decisions), blueprints_for(family.host.kind), len(family.host.slots)
    orders = [uniform(mix(torch.tensor([seed]), 21, column), len(kept))[0].argsort().tolist() for column in range(3)]
    times, places, blueprints = ([kept[at][column] for at in order] for column, order in zip((1, 3, 4), orders, strict=True))
    birth = torch.full((len(scenarios), slots), -1)
    kind = torch.zeros_like(birth)
    for (row, *_), epoch, place, blueprint in zip(kept, times, places, blueprints, strict=True):
        free = [(place + turn) % slots for turn in range(slots) if birth[row, (place + turn) % slots] < 0]
        if free:  # a controller may keep no more seeds than there are slots
            latest = int(scenarios.horizon[row]) - SETTLED - slots + len(free)  # in time to be kept, after those before
            birth[row, free[0]], kind[row, free[0]] = max(min(epoch, latest), 0), names.index(blueprint)
    return Planned(birth, kind)


def _kept(decisions: list[Decision]) -> list[Decision]:
    """The GERMINATE of every seed that became a fossil."""
    born: dict[tuple[int, int], Decision] = {}
    kept = []
    for decision in decisions:
        place = decision.scenario, decision.slot
        if decision.op == "GERMINATE":
            born[place] = decision
        elif decision.op == "FOSSILIZE":
            kept.append(born[place])
    return kept

