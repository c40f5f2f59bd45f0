"""Does every control do what its name says, and does it differ from the others?

    python -m experiments.controls_table --family mlp --scenarios 64

Each control is played with a witness that keeps what it saw when it germinated. One statistic per control says that it behaves
as named; pairs of controls are compared by the share of scenarios in which they decided differently.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from esper.simic.controls import LEVELS, Tuned, play_plans, play_rule, schedule, shuffled, tune
from esper.simic.plans import Plan
from esper.simic.sweep import conditions, observe_early
from esper.simic.trials import Decision, Delivered, Trials
from torch import Tensor

from esper.leyline import SCORES, Head, LifecycleOp, View
from esper.tamiyo import Heuristic, PolicyBundle, Random, Triggered, Wait
from esper.tolaria import Family, PreviewConfig, Scenarios, find_family
from experiments.shared import parser, write

_LOSS, _TRAIN = SCORES.index("loss"), SCORES.index("train_loss")


@dataclass
class Witness:
    """Plays a policy, and keeps what was measured wherever it germinated."""

    policy: PolicyBundle
    clocks: list[int] = field(default_factory=list)
    falls: list[float] = field(default_factory=list)
    """Share by which the loss fell in the epoch before."""
    gaps: list[float] = field(default_factory=list)

    def __call__(self, view: View) -> Tensor:
        actions = self.policy(view)
        assert view.facts is not None
        op = actions[:, view.spec.heads.index(Head.OP)]
        born = op == view.spec.ops.index(LifecycleOp.GERMINATE)
        now, before = view.facts.scores[born], view.facts.before[born]
        self.clocks += view.clock[born].tolist()
        self.falls += (1 - now[:, _LOSS] / before[:, _LOSS]).tolist()
        self.gaps += (now[:, _LOSS] - now[:, _TRAIN]).tolist()
        return actions


@dataclass
class Row:
    """A control, the statistic that its name promises, and whether it keeps the promise."""

    statistic: str
    value: float
    promised: str
    kept: bool
    delivered: Delivered


def kept_by_scenario(decisions: list[Decision], count: int) -> list[int]:
    kept = [0] * count
    for decision in decisions:
        kept[decision.scenario] += decision.op == "FOSSILIZE"
    return kept


def table(trials: Trials, tuned: Tuned, scenarios: Scenarios, mind: PolicyBundle) -> dict[str, Row]:
    """`mind` stands for a controller; its shuffled decisions and its topologies are controls."""
    n, rows = len(scenarios), {}

    def play(name: str, policy: PolicyBundle, statistic: str, promised: str, value: Callable[[Witness, Delivered], float],
             holds: Callable[[float], bool], previews: bool = False) -> None:
        witness = Witness(policy)
        done = trials.play(witness, scenarios, previews)
        rows[name] = Row(statistic, value(witness, done), promised, holds(value(witness, done)), done)

    def births(witness: Witness, done: Delivered) -> float:
        return len(witness.clocks) / n

    play("no growth", Wait(), "seeds per episode", "0", births, lambda v: v == 0)
    play("random", Random(), "evenness of its (slot, blueprint) choices", "above 0.9 of the most",
         lambda w, d: _evenness(d, trials), lambda v: v > 0.9)
    play("heuristic", Heuristic(), "scenarios with fossils that gained by them", "most",
         lambda w, d: _gained(d, trials, scenarios), lambda v: v > 0.5, previews=True)
    promises: dict[str, tuple[str, Callable[[Witness], list[bool]]]] = {
        "periodic": ("births at a multiple of the period",
                     lambda w: [clock % int(tuned.triggers["periodic"].setting) == 0 for clock in w.clocks]),
        "converged": ("births after the loss fell by less than the setting",
                      lambda w: [fall < tuned.triggers["converged"].setting for fall in w.falls]),
        "gap": ("births while the gap was below the setting",
                lambda w: [gap < tuned.triggers["gap"].setting for gap in w.gaps])}
    for name, (statistic, test) in promises.items():
        play(name, Triggered(tuned.triggers[name]), statistic, "all, and some",
             lambda w, d, test=test: sum(test(w)) / max(len(w.clocks), 1), lambda v: v == 1)
    for name in LEVELS:
        plans = schedule(tuned, name, trials.family, scenarios)
        rows[name] = _followed(trials, play_plans(trials, plans, scenarios), plans, scenarios)
    early = observe_early(trials.family, scenarios, tuned.preview_steps, **trials.options)
    chosen = tuned.rule.decide(early.features.double().numpy(), conditions(trials.family, scenarios).numpy())
    plans = [tuned.choices[c] for c in chosen]
    rows["best rule"] = _followed(trials, play_rule(trials, tuned, scenarios), plans, scenarios)
    learned = trials.play(mind, scenarios, previews=True)
    mine = kept_by_scenario(learned.decisions, n)
    play("shuffled", shuffled(learned, trials.family, scenarios, trials.settled), "scenarios with as many seeds kept", "all",
         lambda w, d: sum(map(int.__eq__, mine, kept_by_scenario(d.decisions, n))) / n, lambda v: v == 1)
    rows |= _static(trials, scenarios, learned)
    return rows


def _followed(trials: Trials, done: Delivered, plans: list[Plan], scenarios: Scenarios) -> Row:
    """Was grown what the plans say, as far as there is time for it, and nothing else?"""
    wanted = []
    for plan, horizon in zip(plans, scenarios.horizon.tolist(), strict=True):
        seeds = [(slot, seed) for slot, seed in enumerate(plan.seeds) if seed]
        wanted.append({seed for turn, seed in enumerate(seeds) if plan.start + turn <= horizon - trials.settled})
    grown: list[set[tuple[int, str | None]]] = [set() for _ in plans]
    for decision in done.decisions:
        if decision.op == "GERMINATE":
            grown[decision.scenario].add((decision.slot, decision.blueprint))
    share = sum(a == b for a, b in zip(wanted, grown, strict=True)) / len(plans)
    return Row(f"scenarios in which its plan was grown ({len(set(plans))} plans)", share, "all", share == 1, done)


def _static(trials: Trials, scenarios: Scenarios, learned: Delivered) -> dict[str, Row]:
    same, longer = trials.from_scratch(learned.blueprint, scenarios), trials.equal_flops(learned, scenarios)
    wide = trials.wider(learned.params, scenarios)
    off = float((longer.flops / learned.flops - 1).abs().max())
    equal = float((same.blueprint == learned.blueprint).float().mean())
    step = float(((1 + learned.weight) / scenarios.horizon / learned.flops).max())
    short = float((wide.flops[learned.params > 0] <= 1).sum())
    return {"from scratch, equal epochs": Row("slots with the controller's final seed", equal, "all", equal == 1, same),
            "from scratch, equal FLOPs": Row("largest difference in FLOPs", off, f"within half an epoch ({step / 2:.3f})",
                                             off <= step / 2 + 1e-6, longer),
            "wider host": Row("scenarios with fossils in which it is not wider", short, "none", short == 0, wide)}


def _evenness(done: Delivered, trials: Trials) -> float:
    """Entropy of what was germinated where, as a share of the most it could be."""
    spec = trials.environment(len(done.score)).spec
    born = [(d.slot, d.blueprint) for d in done.decisions if d.op == "GERMINATE"]
    odds = torch.tensor([born.count(choice) for choice in set(born)], dtype=torch.float64) / len(born)
    return float(-(odds * odds.log()).sum() / math.log(spec.slots * (len(spec.blueprints) - 1)))


def _gained(done: Delivered, trials: Trials, scenarios: Scenarios) -> float:
    """Share of scenarios with fossils whose utility is above that of the same scenario without growth."""
    grown = (done.blueprint >= 0).any(1)
    bare = trials.play(Wait(), scenarios)
    return float((done.utility > bare.utility)[grown].float().mean()) if bool(grown.any()) else 0.0


def _plan(done: Delivered, row: int) -> tuple[Decision, ...]:
    return tuple(d._replace(scenario=0) for d in done.decisions if d.scenario == row)


def differences(rows: dict[str, Row], count: int) -> dict[tuple[str, str], float]:
    """For each pair: share of scenarios that differ in a decision; where neither decides, in what was delivered."""
    shares = {}
    names = list(rows)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            a, b = rows[one].delivered, rows[other].delivered
            apart = [_plan(a, row) != _plan(b, row) or bool(a.score[row] != b.score[row]) or bool(a.flops[row] != b.flops[row])
                     for row in range(count)]
            shares[one, other] = sum(apart) / count
    return shares


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--family", default="mlp")
    options_of.add_argument("--scenarios", type=int, default=64)
    options_of.add_argument("--episodes", type=int, default=2000)
    options = options_of.parse_args()
    family: Family = find_family(options.family)
    tuned = tune(family, options.episodes, rows=256, device=options.device)
    trials = Trials(family, PreviewConfig(3, 15), device=options.device)
    drawn = family.scenarios(options.scenarios, "validation")
    rows = table(trials, tuned, drawn, Heuristic())
    for name, row in rows.items():
        print(f"{name:<27} {row.statistic}: {row.value:.3g} ({row.promised}) {'kept' if row.kept else 'BROKEN'}")
    apart = differences(rows, len(drawn))
    least = min(apart, key=lambda pair: apart[pair])
    print(f"the two most alike: {' and '.join(least)}, different in {apart[least]:.0%} of scenarios")
    result: dict[str, Any] = {name: {"statistic": r.statistic, "value": r.value, "promised": r.promised, "kept": r.kept}
                              for name, r in rows.items()}
    result["different in this share of scenarios"] = {f"{a} / {b}": share for (a, b), share in apart.items()}
    result["tuned"] = {name: vars(config) for name, config in tuned.triggers.items()}
    write(options, f"controls-{options.family}", result)


if __name__ == "__main__":
    main()
