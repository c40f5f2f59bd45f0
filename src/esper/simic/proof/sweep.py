"""The sweep: before a controller learns to decide, is there anything to decide? Scripted choices, played.

Legend: K scenarios, C choices, P prices. Training does not depend on prices: all are scored on the same runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.kasmina import blueprints_for
from esper.leyline import ActionSpec, EsperError, LifecycleOp
from esper.leyline.keys import Purpose, mix, uniform
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.value_of_information import NO_GROWTH, Outcomes
from esper.simic.workers import Workers
from esper.tamiyo import Scripted, Wait, entry
from esper.tolaria import EnvConfig, Family, MorphogeneticEnv, Scenarios, batches, play, utility
from esper.tolaria.previews import preview_candidates

Script = list[tuple[int, ...]]
EARLY = "the first epochs"
DECIDE_AT = 2  # epochs that are watched before the first decision; previews are taken then


def full_spec(family: Family) -> ActionSpec:
    """Scripts may use every head."""
    return ActionSpec.full(len(family.host.slots), blueprints_for(family.host))


def seed_script(spec: ActionSpec, epoch: int, slot: int, blueprint: str, **heads: object) -> Script:
    """Germinate, blend and keep one seed, each as soon as its gate allows."""
    grow = entry(spec, epoch, LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint, **{"tempo": 3} | heads)
    return [grow, entry(spec, epoch + 1, LifecycleOp.ADVANCE, slot=slot),
            entry(spec, epoch + 2, LifecycleOp.FOSSILIZE, slot=slot)]


def choices(family: Family) -> dict[str, Script]:
    """Every slot and blueprint, early and late; pairs; prune and try again. No growth comes first."""
    spec = full_spec(family)
    seeds = [name for name in spec.blueprints if name != "noop"]
    table: dict[str, Script] = {NO_GROWTH: []}
    for slot in range(spec.slots):
        table |= {f"{name} @{slot}": seed_script(spec, DECIDE_AT, slot, name) for name in seeds}
    for name in seeds:
        table[f"{name} @0 late"] = seed_script(spec, DECIDE_AT + 3, 0, name)
        pair = (seed_script(spec, DECIDE_AT + slot, slot, name) for slot in (0, 1))
        table[f"{name} @0+1"] = [line for both in zip(*pair, strict=True) for line in both]
    for first, second in ((seeds[-1], seeds[0]), (seeds[0], seeds[-1])):
        prune = entry(spec, DECIDE_AT + 1, LifecycleOp.PRUNE, slot=0)
        again = seed_script(spec, DECIDE_AT + 2, 0, second)
        table[f"{first}, then {second} @0"] = [seed_script(spec, DECIDE_AT, 0, first)[0], prune, *again]
    return table


def head_choices(family: Family, slot: int, blueprint: str) -> dict[str, dict[str, Script]]:
    """For each head of a seed's life: one script per setting, all else equal; the default comes first."""
    spec = full_spec(family)

    def grown(**heads: object) -> Script:
        return seed_script(spec, DECIDE_AT, slot, blueprint, **heads)

    def ramped(**heads: object) -> Script:
        grow, advance, keep = grown(alpha_target=0.5)
        settings = {"alpha_target": 1.0, "alpha_speed": 3} | heads
        raised = entry(spec, DECIDE_AT + 4, LifecycleOp.SET_ALPHA_TARGET, slot=slot, **settings)
        return [grow, advance, raised, (keep[0] + 3, *keep[1:])]

    table = {"style": (grown, (0, 1, 2)), "tempo": (grown, (3, 5, 8)),
             "alpha_target": (grown, (1.0, 0.7, 0.5)),
             "alpha_speed": (ramped, (0, 3, 5, 8)), "alpha_curve": (ramped, (0, 1, 2, 3, 4))}
    return {head: {f"{head} {value}": script(**{head: value}) for value in values}
            for head, (script, values) in table.items()}


@dataclass
class Sweep:
    """Runs of every choice on every scenario."""

    family: Family
    names: list[str]
    scenarios: Scenarios  # [K]
    init: Tensor  # [K]
    score: Tensor  # [K, C, 2] of what was delivered, on both halves of the validation slice
    params: Tensor  # [K, C] of fossils
    spent: Tensor  # [K, C]
    features: Tensor  # [K, F]
    feature_names: list[str]
    rollbacks: int

    def outcomes(self) -> Outcomes:
        """Every scenario at every pair of prices."""
        worth, told, kind = priced(self.family, self.scenarios, self.score, self.params[..., None],
                                   self.spent[..., None])  # worth [P * K, C, 2]
        count = len(kind) // len(self.init)
        return Outcomes(self.names, worth[..., 0], worth[..., 1], told, kind, self.init.repeat(count).numpy(),
                        self.features.repeat(count, 1).double().numpy(), self.feature_names)


def prices_of(family: Family) -> list[tuple[float, float]]:
    return [(a, b) for a in family.prices for b in family.flop_prices]


def conditions(family: Family, scenarios: Scenarios) -> Tensor:
    """[K]: what a policy is told of a scenario (prices and horizon), as a number from 0."""
    mine = torch.stack([scenarios.price, scenarios.flop_price], 1)
    pairs = mine[:, None] == torch.tensor(prices_of(family))
    horizons = scenarios.horizon[:, None] == torch.tensor(sorted(set(family.horizons)))
    return pairs.all(2).int().argmax(1) * horizons.shape[1] + horizons.int().argmax(1)


def priced(family: Family, scenarios: Scenarios, score: Tensor, params: Tensor,
           spent: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(utility [P * K, ...], condition, hidden kind [P * K]) of K scenarios at every pair of prices."""
    prices = prices_of(family)
    worth = torch.cat([utility(score, params, spent, a, b) for a, b in prices]).double()
    told = torch.cat([conditions(family, replace(scenarios, price=torch.full_like(scenarios.price, a),
                                                 flop_price=torch.full_like(scenarios.flop_price, b)))
                      for a, b in prices])
    return worth.numpy(), told.numpy(), scenarios.kind.repeat(len(prices)).numpy()


def grid(family: Family, inits: int, horizon: int, start: int = 0) -> tuple[Scenarios, Tensor]:
    """(every kind with each of these inits, [K] init numbers) at one horizon."""
    number = torch.arange(start, start + inits).repeat_interleave(len(family.kinds))
    drawn = family.draw(mix(torch.full_like(number, Purpose.SWEEP), number))
    kind = torch.arange(len(family.kinds)).repeat(inits)
    rate = (uniform(mix(drawn.key, Purpose.SWEEP_RATE), 1)[:, 0] * len(family.lrs)).long()
    lr = torch.tensor(family.lrs, dtype=torch.float64)[rate]
    return replace(drawn, kind=kind, horizon=torch.full_like(kind, horizon), lr=lr), number


def run_sweep(config: EnvConfig, scripts: dict[str, Script], inits: int, rows: int = 512,
              preview_steps: int = 30, record: Path | None = None,
              watch: Callable[[int, int], object] = lambda done, total: None,
              workers: Workers | None = None) -> Sweep:
    """Play every script on `inits` inits of every kind and horizon, `rows` at a time; `record` the first. The
    workers play one such batch at a time each."""
    if inits < 4:
        raise EsperError(f"a sweep of {inits} inits cannot be cross-fitted; use at least 4")
    family, names, parts, done, rollbacks = config.family, list(scripts), list[tuple[Any, ...]](), 0, 0
    total = len(set(family.horizons)) * inits * len(family.kinds) * len(scripts)
    workers = workers or Workers()
    _kept.clear()  # a task may have other data since
    for horizon in sorted(set(family.horizons)):
        scenarios, number = grid(family, inits, horizon)
        jobs = torch.cartesian_prod(torch.arange(len(scenarios)), torch.arange(len(names)))
        calls: dict[str, Callable[[], Any]] = {EARLY: partial(_early, config, scenarios, preview_steps)}
        places, together = {}, min(rows, len(jobs))
        for part, padded in batches(scenarios.horizon[jobs[:, 0]], together):
            scenario, choice = jobs[padded].unbind(1)
            places[f"batch {len(calls)}"] = part
            calls[f"batch {len(calls)}"] = partial(
                _play_batch, replace(config, spec=full_spec(family)), together, scenarios.take(scenario),
                [scripts[names[number]] for number in choice.tolist()], record)
            record = None
        values = torch.empty(len(jobs), 4)
        for each in workers.run(calls):
            if each.name == EARLY:
                early: Early = each.value
                continue
            part = places[each.name]
            values[part], harmed = each.value[0][: len(part)], each.value[1]
            done, rollbacks = done + len(part), rollbacks + harmed
            watch(done, total)
        parts.append((scenarios, number, values.view(len(scenarios), len(names), 4), early.features))
    drawn, *columns = zip(*parts, strict=True)
    init, values, features = map(torch.cat, columns)
    score, params, spent = values[..., :2], values[..., 2], values[..., 3]
    return Sweep(family, names, Scenarios.joined(drawn), init, score, params, spent, features, early.names,
                 rollbacks)


def _early(config: EnvConfig, scenarios: Scenarios, preview_steps: int) -> "Early":
    return observe_early(Evaluator(config), scenarios, preview_steps)


_kept: dict[str, MorphogeneticEnv] = {}  # the last environment of this process, for the next batch


def _play_batch(config: EnvConfig, rows: int, scenarios: Scenarios, scripts: list[Script],
                record: Path | None) -> tuple[Tensor, int]:
    """([rows, 4] scores on both halves, parameters and compute of what was delivered; rollbacks)"""
    if (key := f"{config} {rows}") not in _kept:
        _kept.clear()
        _kept[key] = MorphogeneticEnv(config, rows)
    env = _kept[key]
    before, episodes = len(env.rollbacks), play(env, Scripted(scripts), scenarios)
    if record is not None:
        episodes.save(record)
    ends = torch.stack([*halves(env), episodes.params.float(), episodes.spent], 1)
    return ends, len(env.rollbacks) - before


def halves(env: MorphogeneticEnv) -> list[Tensor]:
    """[N] each, of rows at their horizon: host and fossils on either half of the validation slice."""
    half = len(env.feed.validation_x) // 2
    return [env.evaluate(env.validation(*part)).delivered.score for part in ((0, half), (half, 2 * half))]


class Early(NamedTuple):
    features: Tensor  # [K, F]
    names: list[str]
    spent: Tensor  # [K] on previews, in trainings of the bare host


def observe_early(evaluator: Evaluator, scenarios: Scenarios, preview_steps: int) -> Early:
    """What is known when the first decision is due: curves of the first epochs, and candidate previews."""
    env = evaluator.make(replace(evaluator.config, previews=None), len(scenarios))
    measured = play(env, Wait(), scenarios, most=DECIDE_AT).measured
    shown = {"train loss": "train_loss", "loss": "all_on.loss", "accuracy": "all_on.score"}
    columns = {f"{name} {epoch}": measured[key][epoch - 1]
               for epoch in range(1, DECIDE_AT + 1) for name, key in shown.items()}
    columns["gap"] = columns[f"loss {DECIDE_AT}"] - columns[f"train loss {DECIDE_AT}"]
    columns["slope"] = columns[f"loss {DECIDE_AT}"] - columns["loss 1"]
    if preview_steps:
        previews = preview_candidates(env, preview_steps)
        value = torch.where(previews.known, previews.value, torch.nan)  # [K, S, blueprints]
        columns |= {f"preview {name} @{slot}": value[:, slot, number] for slot in range(env.spec.slots)
                    for number, name in enumerate(env.spec.blueprints) if name != "noop"}
    return Early(torch.stack(list(columns.values()), 1), list(columns), env.spent.float())
