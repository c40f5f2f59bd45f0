"""Does every control do what its name says, and does it differ from the others?

    python -m experiments.controls_table --family mlp --scenarios 64

Each control is played with a witness that keeps what it saw when it germinated. One statistic per control says that it behaves
as named; pairs of controls are compared by the share of scenarios in which they decided differently.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.leyline import SCORES, Head, LifecycleOp, View
from esper.simic.proof.baselines import LEVELS, Tuned, play_plans, play_rule, schedule, shuffled, tune
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.plans import Plan
from esper.simic.proof.sweep import conditions, observe_early
from esper.tamiyo import Heuristic, PolicyBundle, Random, Triggered, Wait
from esper.tolaria import Decision, EnvConfig, Episodes, PreviewConfig, Scenarios, find_family
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
    delivered: Episodes


def kept_by_scenario(decisions: list[Decision], count: int) -> list[int]:
    kept = [0] * count
    for decision in decisions:
        kept[decision.scenario] += decision.op == "FOSSILIZE"
    return kept


def table(evaluator: Evaluator, tuned: Tuned, scenarios: Scenarios, mind: PolicyBundle) -> dict[str, Row]:
    """`mind` stands for a controller; its shuffled decisions and its topologies are controls."""
    n, rows = len(scenarios), {}

    def play(name: str, policy: PolicyBundle, statistic: str, promised: str, value: Callable[[Witness, Episodes], float],
             holds: Callable[[float], bool], previews: bool = False) -> None:
        witness = Witness(policy)
        done = evaluator.play(witness, scenarios, previews)
        rows[name] = Row(statistic, value(witness, done), promised, holds(value(witness, done)), done)

    def births(witness: Witness, done: Episodes) -> float:
        return len(witness.clocks) / n

    play("no growth", Wait(), "seeds per episode", "0", births, lambda v: v == 0)
    play("random", Random(), "evenness of its (slot, blueprint) choices", "above 0.9 of the most",
         lambda w, d: _evenness(d, evaluator), lambda v: v > 0.9)
    play("heuristic", Heuristic(), "scenarios with fossils that gained by them", "most",
         lambda w, d: _gained(d, evaluator, scenarios), lambda v: v > 0.5, previews=True)
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
        plans = schedule(tuned, name, evaluator.family, scenarios)
        rows[name] = _followed(evaluator, play_plans(evaluator, plans, scenarios), plans, scenarios)
    early = observe_early(evaluator, scenarios, tuned.preview_steps)
    chosen = tuned.rule.decide(early.features.double().numpy(), conditions(evaluator.family, scenarios).numpy())
    plans = [tuned.choices[c] for c in chosen]
    rows["best rule"] = _followed(evaluator, play_rule(evaluator, tuned, scenarios), plans, scenarios)
    learned = evaluator.play(mind, scenarios, previews=True)
    mine = kept_by_scenario(learned.decisions(), n)
    mixed = shuffled(learned, evaluator.family, scenarios, evaluator.min_epochs_to_keep)
    play("shuffled", mixed, "scenarios with as many seeds kept", "all",
         lambda w, d: sum(map(int.__eq__, mine, kept_by_scenario(d.decisions(), n))) / n, lambda v: v == 1)
    rows |= _static(evaluator, scenarios, learned)
    return rows


def _followed(evaluator: Evaluator, done: Episodes, plans: list[Plan], scenarios: Scenarios) -> Row:
    """Was grown what the plans say, as far as there is time for it, and nothing else?"""
    wanted = []
    for plan, horizon in zip(plans, scenarios.horizon.tolist(), strict=True):
        seeds = [(slot, seed) for slot, seed in enumerate(plan.seeds) if seed]
        wanted.append({seed for turn, seed in enumerate(seeds) if plan.start + turn <= horizon - evaluator.min_epochs_to_keep})
    grown: list[set[tuple[int, str | None]]] = [set() for _ in plans]
    for decision in done.decisions():
        if decision.op == "GERMINATE":
            grown[decision.scenario].add((decision.slot, decision.blueprint))
    share = sum(a == b for a, b in zip(wanted, grown, strict=True)) / len(plans)
    return Row(f"scenarios in which its plan was grown ({len(set(plans))} plans)", share, "all", share == 1, done)


def _static(evaluator: Evaluator, scenarios: Scenarios, learned: Episodes) -> dict[str, Row]:
    same, longer = evaluator.from_scratch(learned.blueprint, scenarios), evaluator.equal_flops(learned, scenarios)
    wide = evaluator.wider(learned.params, scenarios)
    mine = 1 + learned.spent
    off = float(((1 + longer.spent) / mine - 1).abs().max())
    equal = float((same.blueprint == learned.blueprint).float().mean())
    step = float(((1 + learned.flops) / scenarios.horizon / mine).max())
    short = float((wide.spent[learned.params > 0] <= 0).sum())
    return {"from scratch, equal epochs": Row("slots with the controller's final seed", equal, "all", equal == 1, same),
            "from scratch, equal FLOPs": Row("largest difference in FLOPs", off, f"within half an epoch ({step / 2:.3f})",
                                             off <= step / 2 + 1e-6, longer),
            "wider host": Row("scenarios with fossils in which it is not wider", short, "none", short == 0, wide)}


def _evenness(done: Episodes, evaluator: Evaluator) -> float:
    """Entropy of what was germinated where, as a share of the most it could be."""
    spec = evaluator.config.spec
    born = [(d.slot, d.blueprint) for d in done.decisions() if d.op == "GERMINATE"]
    odds = torch.tensor([born.count(choice) for choice in set(born)], dtype=torch.float64) / len(born)
    return float(-(odds * odds.log()).sum() / math.log(spec.slots * (len(spec.blueprints) - 1)))


def _gained(done: Episodes, evaluator: Evaluator, scenarios: Scenarios) -> float:
    """Share of scenarios with fossils whose utility is above that of the same scenario without growth."""
    grown = (done.blueprint >= 0).any(1)
    bare = evaluator.play(Wait(), scenarios)
    return float((done.utility() > bare.utility())[grown].float().mean()) if bool(grown.any()) else 0.0


def _plans(done: Episodes) -> list[list[Decision]]:
    """What was decided in each scenario."""
    plans: list[list[Decision]] = [[] for _ in range(len(done))]
    for decision in done.decisions():
        plans[decision.scenario].append(decision)
    return plans


def differences(rows: dict[str, Row], count: int) -> dict[tuple[str, str], float]:
    """For each pair: share of scenarios that differ in a decision; where neither decides, in what was delivered."""
    told = {name: list(zip(_plans(row.delivered), row.delivered.delivered.score.tolist(), row.delivered.spent.tolist(),
                           strict=True)) for name, row in rows.items()}
    return {(one, other): sum(a != b for a, b in zip(told[one], told[other], strict=True)) / count
            for one, other in itertools.combinations(rows, 2)}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--family", default="mlp")
    options_of.add_argument("--scenarios", type=int, default=64)
    options_of.add_argument("--episodes", type=int, default=2000)
    options = options_of.parse_args()
    evaluator = Evaluator(EnvConfig(find_family(options.family), previews=PreviewConfig(3, 15), device=options.device))
    tuned = tune(evaluator, options.episodes, rows=256)
    drawn = evaluator.family.scenarios(options.scenarios, "validation")
    rows = table(evaluator, tuned, drawn, Heuristic())
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
