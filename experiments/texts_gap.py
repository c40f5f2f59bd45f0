"""Is there anything to decide on gpt hosts of many texts? Plans on every training and validation text, scored at every price.

    python -m experiments.texts_gap

Every plan is played on two runs of every other text; those that are best most often are played on four other runs of all texts (both
regimes, both horizons), with a wider host and a longer training beside them; then on a few texts with wider hosts and with longer
trainings, and on every other text with four times the samples. Each level of knowledge chooses plans on other runs than it is scored
on, and unless it knows the text on other texts. 95 % intervals by a bootstrap over texts, then runs. Outcomes are kept in the folder that --tables names and not played again; the result is
results/texts_gap.json.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.kasmina import blueprints_for
from esper.simic.proof.claims import interval
from esper.simic.proof.evaluator import Evaluator, widened
from esper.simic.proof.plans import Plan
from esper.simic.proof.surveyed import PlanTable, best, identify, price_pairs, survey
from esper.simic.proof.sweep import grid
from esper.simic.proof.universal import digest_of, load_table, save_table, shortlist
from esper.tolaria import Family, Scenarios, ordinary
from experiments.shared import parser, write
from experiments.texts import LIST

SCREEN, MAIN, MORE = 0, 1_000, 2_000  # inits of all plans, of the best, of other hosts and horizons; no two texts share one
MOST = 6  # plans that are played again
OTHERS = [Plan((None, "block")), Plan(("gated_conv", "mlp_heavy"))]  # with more samples, where larger seeds may pay
REGIMES = ("plain", "few samples")
SHORT = (12, 18)  # horizons
WIDER, LONGER = 1.25, 7 / 6  # a host without growth: so many times as wide; trained so many times as long
Cells = Callable[[int, Family], Scenarios]


def all_plans() -> list[Plan]:
    """No growth; every blueprint in both slots and in the first; a gated convolution in the second, and in front of others."""
    seeds = [name for name in blueprints_for("gpt") if name != "noop"]
    grown = [where for name in seeds for where in ((name, name), (name, None))]
    more = [(None, "gated_conv"), ("gated_conv", "mlp_heavy"), ("gated_conv", "attention_4")]
    return [Plan(where) for where in [(None, None), *grown, *more]]


def meagre(family: Family) -> Family:
    """With a quarter of the samples, in as many steps, and a fifth of these where they are few: ordinary hosts of the first tables."""
    samples = family.samples // 4
    few = replace(family.kinds[1], samples=samples // 5)
    return replace(family, samples=samples, batch=family.batch // 4, kinds=(family.kinds[0], few))


def screening(place: int, family: Family) -> Scenarios:
    """Two runs: one regime at the first horizon, the other at the second; texts take turns."""
    drawn = Scenarios.joined([grid(family, 1, horizon, SCREEN + place)[0] for horizon in SHORT])
    return drawn.take(torch.tensor([[0, 3], [1, 2]][place % 2]))


def crossed(place: int, family: Family) -> Scenarios:
    """Four runs: one horizon behind the other, each plain and with few samples, and each horizon with its own init."""
    return Scenarios.joined([grid(family, 1, horizon, MAIN + len(SHORT) * place + at)[0] for at, horizon in enumerate(SHORT)])


def again(horizon: int) -> Cells:
    """Two runs of this horizon."""
    return lambda place, family: grid(family, 1, horizon, MORE + place)[0]


def played_table(path: Path, families: Sequence[Family], plans: Sequence[Plan], cells: Cells) -> PlanTable:
    """Kept in a file."""
    if not path.exists():
        parts, start = [], time.monotonic()
        for place, family in enumerate(families):
            drawn = cells(place, family)
            parts.append(survey(Evaluator(family), plans, drawn, place, len(plans) * len(drawn)))
            print(f"{path.stem}: {place + 1} of {len(families)}, {time.monotonic() - start:.0f} s", flush=True)
        save_table(path, PlanTable.joined(parts), digest_of(families))
    return load_table(path, digest_of(families))


def static_hosts(path: Path, families: Sequence[Family]) -> dict[str, list[list[float]]]:
    """arm -> for each text: score above the bare host, extra parameters and extra FLOPs as shares of the host's."""
    if not path.exists():
        found: dict[str, list[list[float]]] = {"wider host": [], "longer training": []}
        for place, family in enumerate(families):
            evaluator, drawn, wide = Evaluator(family), crossed(place, family), widened(family.host, WIDER)
            none = torch.full((len(drawn), len(family.host.slots)), -1)
            bare = evaluator.from_scratch(none, drawn).delivered.score
            more = wide.cost.params / family.host.cost.params - 1
            longer = evaluator.from_scratch(none, drawn, (drawn.horizon * LONGER).round().long())
            for name, done, params in (("wider host", evaluator.static(wide, drawn), more), ("longer training", longer, 0.0)):
                found[name].append([float((done.delivered.score - bare).mean()), params, float(done.spent.mean())])
        path.write_text(json.dumps(found))
    known: dict[str, list[list[float]]] = json.loads(path.read_text())
    return known


def gains(table: PlanTable, pair: tuple[float, float]) -> np.ndarray:
    """[K, P] above no growth."""
    utility = table.utility(pair)
    return np.asarray(utility - utility[:, :1])


def shrunk(gain: np.ndarray, group: np.ndarray, own: np.ndarray) -> int:
    """The plan that promises most on a text of which runs `own` are known, by what they and all other texts say: the
    mean of the own runs is drawn towards that of the others as far as texts differ less than runs do."""
    mine = group[own][0]
    means = np.stack([gain[group == each].mean(0) for each in np.unique(group) if each != mine])
    within = np.mean([gain[group == each].var(0, ddof=1) for each in np.unique(group) if each != mine], 0)
    count = int((group != mine).sum()) / len(means)
    between = (means.var(0, ddof=1) - within / count).clip(0)
    weight = between / (between + within / own.sum() + 1e-12)
    return int((means.mean(0) + weight * (gain[own].mean(0) - means.mean(0))).argmax())


def levels(table: PlanTable, prices: Sequence[tuple[float, float]], regime: np.ndarray, half: np.ndarray) -> dict[str, np.ndarray]:
    """level of knowledge -> gain over no growth [K], mean over prices. `half` says which runs of a text choose for which others."""
    names = ("a random plan", "one fixed plan", "for each price", "for each price and horizon", "for each price and regime",
             "for each price and text, drawn towards the others", "for each price and text", "for each price, text and regime",
             "the same, chosen and scored on the same runs")
    found = {name: np.zeros(len(table.group)) for name in names}
    for pair in prices:
        gain = gains(table, pair)
        found[names[0]] += gain.mean(1)
        for group in np.unique(table.group):
            mine, others = table.group == group, table.group != group
            found[names[1]][mine] += gain[mine, best(table, prices, others)]
            found[names[2]][mine] += gain[mine, best(table, [pair], others)]
            for name, told in ((names[3], table.horizon), (names[4], regime)):
                for value in np.unique(told):
                    here = told == value
                    found[name][mine & here] += gain[mine & here, best(table, [pair], others & here)]
            for side in (0, 1):
                choose, score = mine & (half != side), mine & (half == side)
                found[names[5]][score] += gain[score, shrunk(gain, table.group, choose)]
                found[names[6]][score] += gain[score, best(table, [pair], choose)]
                for value in np.unique(regime):
                    here = regime == value
                    found[names[7]][score & here] += gain[score & here, best(table, [pair], choose & here)]
            for value in np.unique(regime):
                here = mine & (regime == value)
                found[names[8]][here] += gain[here, best(table, [pair], here)]
    return {name: each / len(prices) for name, each in found.items()}


def told(values: np.ndarray, group: np.ndarray) -> dict[str, float]:
    low, high = interval(values, group=group)
    return {"points": 100 * float(values.mean()), "low": 100 * low, "high": 100 * high}


def said(numbers: dict[str, float]) -> str:
    return f"{numbers['points']:+.2f} ({numbers['low']:+.2f} to {numbers['high']:+.2f})"


def of_plans(table: PlanTable, prices: Sequence[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """What each plan comes to on average: points of score, shares of the host, points after prices."""
    after = np.mean([gains(table, pair) for pair in prices], 0)
    return {plan.name: {"score": 100 * float((table.runs[:, at, 0] - table.runs[:, 0, 0]).mean()),
                        "parameters": float(table.runs[:, at, 1].mean()), "FLOPs": float(table.runs[:, at, 2].mean()),
                        **told(after[:, at], table.group)} for at, plan in enumerate(table.plans) if at}


def by_text(table: PlanTable, prices: Sequence[tuple[float, float]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """text -> score of the bare host, the best plan at the mean of prices, points of all plans after prices."""
    after, found = np.mean([gains(table, pair) for pair in prices], 0), {}
    for place, name in enumerate(names):
        mine = table.group == place
        mean = after[mine].mean(0)
        points = {plan.name: round(100 * float(each), 3) for plan, each in zip(table.plans, mean, strict=True)}
        found[name] = {"bare": 100 * float(table.runs[mine, 0, 0].mean()), "best": table.plans[int(mean.argmax())].name, "points": points}
    return found


def at_chance(table: PlanTable, regime: np.ndarray) -> dict[str, float]:
    """regime -> share of its runs in which the bare host ends no better than knowing how often each byte occurs."""
    return {name: float((table.runs[regime == at, 0, 0] <= 0).mean()) for at, name in enumerate(REGIMES)}


def summary(table: PlanTable, prices: Sequence[tuple[float, float]], regime: np.ndarray, half: np.ndarray) -> dict[str, Any]:
    """What levels of knowledge are worth, and how much more than one fixed plan."""
    worth = levels(table, prices, regime, half)
    return {name: {"gain": told(each, table.group), "less one fixed plan": told(each - worth["one fixed plan"], table.group)}
            for name, each in worth.items()}


def analysed(table: PlanTable, prices: Sequence[tuple[float, float]], names: Sequence[str]) -> dict[str, Any]:
    """Of the four runs of every text, in the order of `crossed`; runs of one init choose for those of the other."""
    run = np.arange(len(table.group)) % 4
    regime, half = run % 2, run // 2
    plain = table._replace(**{name: getattr(table, name)[regime == 0] for name in PlanTable._fields[1:]})
    lines: list[str] = []
    identify(table, prices, lines.append)
    found = {"levels": summary(table, prices, regime, half),
             "levels, plain runs alone": summary(plain, prices, regime[regime == 0], half[regime == 0]),
             "one fixed plan": table.plans[best(table, prices)].name,
             "for each pair of prices": {f"{pair[0]:g}, {pair[1]:g}": table.plans[best(table, [pair])].name for pair in prices},
             "for each regime": {name: table.plans[best(table, prices, regime == at)].name for at, name in enumerate(REGIMES)},
             "for each horizon": {str(each): table.plans[best(table, prices, table.horizon == each)].name for each in SHORT},
             "regression": lines[0], "runs at chance": at_chance(table, regime), "plans": of_plans(table, prices),
             "texts": by_text(table, prices, names)}
    for what in ("levels", "levels, plain runs alone"):
        for name, each in found[what].items():
            print(f"{what}: {name}: {said(each['gain'])}; less one fixed plan {said(each['less one fixed plan'])}")
    print(f"regression, other texts held out: {lines[0]}; at chance: {found['runs at chance']}", flush=True)
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tables", type=Path, default=Path(__file__).parent / "universe" / "texts-gap")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    options.tables.mkdir(parents=True, exist_ok=True)
    names = [source["name"] for source in json.loads(LIST.read_text())["sources"] if source["split"] != "test"]
    families = [meagre(ordinary(f"{name}-t", "gpt", "tiny")) for name in names]
    prices, few = price_pairs(families[0]), range(0, len(names), 6)
    screen = played_table(options.tables / "screen.safetensors", families[::2], all_plans(), screening)
    plans = shortlist(screen, families[0])[:MOST]
    print("shortlist:", "; ".join(plan.name for plan in plans), flush=True)
    result: dict[str, Any] = {"texts": names, "screen": of_plans(screen, prices)}
    table = played_table(options.tables / "main.safetensors", families, plans, crossed)
    result["main"] = analysed(table, prices, names)
    static = static_hosts(options.tables / "static.json", families)
    for name, rows in static.items():
        score, params, spent = np.array(rows).T
        after = np.mean([score - pair[0] * params - pair[1] * spent for pair in prices], 0)
        result[name] = {"score": 100 * score.mean(), "parameters": params.mean(), "FLOPs": spent.mean(),
                        **told(after, np.arange(len(after)))}
        print(f"{name}: score {100 * score.mean():+.2f}, FLOPs {spent.mean():.2f}, after prices {said(result[name])}", flush=True)
    for size, horizon in (("tiny", 36), ("medium", 18)):
        some = [replace(meagre(ordinary(f"{names[place]}-t", "gpt", size)), horizons=(horizon,)) for place in few]
        more = played_table(options.tables / f"{size}-{horizon}.safetensors", some, plans, again(horizon))
        result[f"{size} hosts, {horizon} epochs"] = {
            "plans": of_plans(more, price_pairs(some[0])),
            "texts": by_text(more, price_pairs(some[0]), [names[place] for place in few])}
        for plan, found in result[f"{size} hosts, {horizon} epochs"]["plans"].items():
            print(f"{size}, {horizon} epochs: {plan}: score {found['score']:+.2f}, after prices {said(found)}", flush=True)
    rich = [ordinary(f"{name}-t", "gpt", "tiny") for name in names[::2]]
    more = played_table(options.tables / "fuller.safetensors", rich, [*plans, *OTHERS], crossed)
    result["four times the samples"] = analysed(more, prices, names[::2])
    write(options, "texts_gap", result)


if __name__ == "__main__":
    main()
