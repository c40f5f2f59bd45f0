"""A proof as one page: self-contained HTML from its store and the stores of its controllers' runs alone.

Utilities are shown in points (score x 100). The registry says what the columns of the tables mean.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from esper.karn import charts
from esper.karn.charts import tag
from esper.karn.markup import fold, legend, list_of, note, write_page
from esper.karn.panels import open_run
from esper.karn.run_report import LEARNED, curve_of
from esper.leyline import EsperError
from esper.nissa import TABLES, read

POOLED = "pooled"
_OPENED, _CLOSED = "the test split", "validation samples; the test split stayed closed"
VERDICTS = {"holds": ("Proof", "The proof holds", _OPENED), "fails": ("Proof", "The proof fails", _OPENED),
            "refused": ("Proof", "The proof is refused", _OPENED),
            "rehearsal": ("Rehearsal", "A rehearsal on validation scenarios", _CLOSED),
            "demo": ("Demo", "A demonstration on validation scenarios", _CLOSED)}
"""verdict -> (what the page is, what it says, what accuracies were measured on)"""
ASKED = {"beats": "beats", "matches": "matches", "half": "half of the way between", "reported": "beside"}
FATES = {"FOSSILIZE": "kept", "PRUNE": "pruned"}
Row = dict[str, Any]
Split = Callable[[str, float], tuple[Any, ...]]  # hidden type, price -> the part that an episode belongs to
Column = tuple[str, str, Callable[..., str]]  # "table.column" of what it shows of the store, heading, how


class Seed(NamedTuple):
    """A GERMINATE and its fate: unfinished, if its slot saw neither FOSSILIZE nor PRUNE before the next."""

    controller: str
    arm: str
    kind: str
    price: float
    slot: int
    blueprint: str
    epoch: int
    fate: str = "unfinished"


class Trained(NamedTuple):
    """The training of a controller."""

    rounds: list[charts.Estimate]
    exams: list[charts.Estimate]
    cost: Row  # by column of `round`


@dataclass(frozen=True)
class Evidence:
    """All that the page is made of."""

    arms: list[Row]
    claims: list[Row]
    seeds: list[Seed]
    episodes: list[tuple[str, str, str, float, int]]  # (controller, arm, hidden type, price, count)
    runs: dict[str, Trained | str]  # by controller; where there is none, why

    @property
    def colours(self) -> dict[str, str]:
        known = {row["controller"] for row in self.arms}
        names = sorted((known | set(self.runs)) - {POOLED})
        return dict.fromkeys(known & {POOLED}, "c0") | charts.colours(names)


def write_report(store: Path, runs: Mapping[str, Path], facts: Mapping[str, object], out: Path) -> None:
    """`store`: the proof's. `runs`: by controller; those it cannot read are named. `facts`: for its head."""
    episodes = read(store, "SELECT controller, arm, kind, price, count(*) FROM arm GROUP BY 1, 2, 3, 4")
    evidence = Evidence(rows_of(store, "summary"), rows_of(store, "claim"), seeds_of(store), episodes,
                        {name: _run(path) for name, path in runs.items()})
    shown = [title for title in SECTIONS if evidence.claims or title not in CLAIMED]
    what, head = _head(facts)
    write_page(out, f"{what}: {facts.get('family', store.name)}", head,
               {title: SECTIONS[title](evidence) for title in shown})


def seeds_of(store: Path) -> list[Seed]:
    """Every seed of every arm, with its fate."""
    seeds: list[Seed] = []
    rows = read(store, "SELECT controller, arm, scenario, slot, kind, price, epoch, op, blueprint "
                       "FROM decision JOIN arm USING (controller, arm, scenario) "
                       "ORDER BY controller, arm, scenario, slot, epoch")
    for (controller, arm, _, slot), life in itertools.groupby(rows, key=lambda row: row[:4]):
        before = len(seeds)
        for *_, kind, price, epoch, op, blueprint in life:
            if op == "GERMINATE":
                seeds.append(Seed(controller, arm, kind, price, slot, blueprint, epoch))
            elif op in FATES and len(seeds) > before:
                seeds[-1] = seeds[-1]._replace(fate=FATES[op])
    return seeds


def rows_of(store: Path, table: str) -> list[Row]:
    """Everything in a table, by column."""
    rows = read(store, f"SELECT {', '.join(TABLES[table])} FROM {table}")
    return [dict(zip(TABLES[table], row, strict=True)) for row in rows]


def cost_of(run: Path) -> Row:
    """Of a training: how many rounds, and sums of columns of `round`."""
    counts = read(run, "SELECT count(*), sum(episodes), sum(host_epochs), sum(seconds) FROM round")
    return dict(zip(("round", "episodes", "host_epochs", "seconds"), counts[0], strict=True))


def _run(path: Path) -> Trained | str:
    try:
        with open_run(path) as run:
            return Trained(curve_of(run, "learning"), curve_of(run, "exams"), cost_of(path))
    except EsperError as error:
        return str(error)


def _points(*values: float) -> str:
    return " … ".join(f"{100 * value:+.2f}" for value in values)


_count, _share = "{:,.0f}".format, "{:.2f}".format
_EPISODES: Column = "summary.episodes", "episodes tuned or trained", _count
ARMS: tuple[Column, ...] = (
    ("summary.arm", "arm", lambda arm: tag("b" if arm == LEARNED else "span", escape(arm))),
    ("summary.gain", "gain above no growth, points", _points),
    ("summary.low summary.high", "95 % interval", _points),
    ("summary.middle", "interquartile mean, points", _points),
    ("summary.score", "accuracy, %", lambda score: f"{100 * score:.1f}"),
    ("summary.params", "grown parameters", _count), ("summary.flops", "FLOPs, host trainings", _share),
    _EPISODES)
CLAIMS: tuple[Column, ...] = (
    ("claim.asked", "asked", escape), ("claim.control", "control", escape), ("claim.n", "n", _count),
    ("claim.difference", "difference, points", _points), ("claim.low claim.high", "95 % interval", _points),
    ("claim.improvement", "probability of improvement", _share), ("claim.needed", "scenarios needed", _count),
    ("claim.verdict", "verdict", lambda verdict: tag("span", escape(verdict), class_=verdict)),
    ("claim.reason", "reason", escape))
COSTS: tuple[Column, ...] = (
    ("summary.arm", "who", escape), ("round.round", "rounds", _count),
    ("round.host_epochs", "host-epochs of training", _count),
    ("round.seconds", "seconds of training", _count), _EPISODES,
    ("summary.flops", "FLOPs of one use", _share))


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    head, body = [], [""] * len(rows)
    for shown, heading, show in columns:
        (table, *_), names = zip(*(name.split(".") for name in shown.split()), strict=True)
        metric = TABLES[table][names[0]]
        side, unit = "" if metric.kind == "TEXT" else "n", f" [{metric.unit}]" if metric.unit else ""
        head.append(tag("th", escape(heading), class_=side, title=metric.help + unit))
        for place, values in enumerate([row.get(name) for name in names] for row in rows):
            body[place] += tag("td", "" if None in values else show(*values), class_=side)
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *(tag("tr", cells) for cells in body)))
    return tag("div", table, class_="wide")


def _fold(name: str, about: str, *inner: str) -> str:
    """Open for all controllers together, closed for each."""
    return fold(name, about, *inner, opened=name == POOLED)


def _head(facts: Mapping[str, object]) -> tuple[str, str]:
    """What the page is, and how it begins."""
    verdict, why = str(facts.get("verdict", "unknown")), facts.get("reason", "no reason was given")
    what, said, measured = VERDICTS.get(verdict, ("Proof", f"The verdict is {verdict}", ""))
    scored = note(f"Accuracies are of delivered networks on {measured}.") if measured else ""
    return what, tag("p", escape(f"{said}: {why}."), class_=f"verdict {verdict}") + scored + list_of(facts)


def _together(evidence: Evidence) -> list[Row]:
    """One row for every arm: means over controllers where these are pooled, else each under its own name."""
    pooled = [row for row in evidence.arms if row["controller"] == POOLED]
    if pooled or not evidence.arms:
        return pooled
    learned = [row | {"arm": row["controller"]} for row in evidence.arms if row["arm"] == LEARNED]
    first = evidence.arms[0]["controller"]
    return [row for row in evidence.arms if row["controller"] == first and row["arm"] != LEARNED] + learned


def _arms(evidence: Evidence) -> str:
    rows = _together(evidence)
    rows.sort(key=lambda row: -math.inf if row["gain"] is None else row["gain"], reverse=True)
    pooled = "; controllers are pooled" if any(row["controller"] == POOLED for row in rows) else ""
    return note(f"Means over all scenarios, best first{pooled}.") + _table(ARMS, rows)


def _order(claim: Row) -> tuple[int, float]:
    return list(ASKED).index(claim["asked"]), -(claim["difference"] or 0)


def _claims(evidence: Evidence) -> str:
    folds = ""
    for name in evidence.colours:
        rows = sorted((row for row in evidence.claims if row["controller"] == name), key=_order)
        about = ", ".join(f"{n} {verdict}" for verdict, n in Counter(row["verdict"] for row in rows).items())
        folds += _fold(name, f": {about}", _table(CLAIMS, rows))
    return folds


def _forest(evidence: Evidence) -> str:
    claims: dict[str, list[Row]] = {}
    for name, row in itertools.product(evidence.colours, evidence.claims):
        if row["controller"] == name:
            claims.setdefault(f"{ASKED[row['asked']]} {row['control']}", []).append(row)
    groups = {}
    for label, rows in sorted(claims.items(), key=lambda item: _order(item[1][0])):
        spans = [_span(row, evidence.colours) for row in rows if row["difference"] is not None]
        groups[label if spans else f"{label}: no evidence"] = spans
    said = note("Utility of the controller less the control's on the same scenarios, with 95 % intervals. "
                 "Hollow: the claim fails or is refused.")
    return said + legend(evidence.colours) + charts.forest(groups, "points")


def _span(claim: Row, colours: Mapping[str, str]) -> charts.Span:
    low, value, high = (100 * claim[name] for name in ("low", "difference", "high"))
    hollow = " hollow" if claim["verdict"] in ("fails", "refused") else ""
    title = f"{claim['controller']}: {value:+.2f}, {claim['verdict']}"
    return colours[claim["controller"]] + hollow, title, low, value, high


def _pareto(evidence: Evidence) -> str:
    rows = [row for row in _together(evidence) if row["score"] is not None]
    axes = {"params": "grown parameters", "flops": "FLOPs, in host trainings"}
    plots = [charts.scatter({row["arm"]: (row[name], 100 * row["score"]) for row in rows}, title,
                            "accuracy, %", LEARNED) for name, title in axes.items()]
    said = note("Means over all scenarios. Filled and joined: the Pareto front.")
    return said + tag("div", *plots, class_="pair")


def _grown(evidence: Evidence) -> str:
    axes = sorted({seed.blueprint for seed in evidence.seeds}), sorted({seed.slot for seed in evidence.seeds})
    parts = [note("Numbers: seeds of the learned arm that were kept, by blueprint and slot. Bars: "
                   "germinations per episode by epoch (0 is the first), in full colour if kept. Colours are "
                   "per episode too; one scale under each heading.")]
    for name in evidence.colours:
        seeds = [seed for seed in evidence.seeds if seed.arm == LEARNED and name in (POOLED, seed.controller)]
        played = [each for each in evidence.episodes if each[1] == LEARNED and name in (POOLED, each[0])]
        about = f": {len(seeds)} germinated, {sum(seed.fate == 'kept' for seed in seeds)} kept"
        splits = [tag("h3", title) + _panels(seeds, played, axes, split) for title, split in SPLITS.items()]
        parts.append(_fold(name, about, *splits))
    return "".join(parts)


def _panels(seeds: Sequence[Seed], played: Sequence[tuple[str, str, str, float, int]],
            axes: tuple[list[str], list[int]], split: Split) -> str:
    """A heatmap and a histogram for every part of a split."""
    episodes: Counter[tuple[Any, ...]] = Counter()
    for _, _, kind, price, n in played:
        episodes[split(kind, price)] += n
    parts = [(split(seed.kind, seed.price), seed) for seed in seeds]
    kept = [(part, seed) for part, seed in parts if seed.fate == "kept"]
    cells = Counter((part, seed.blueprint, seed.slot) for part, seed in kept)
    late, soon = (Counter((part, seed.epoch) for part, seed in each) for each in (kept, parts))
    strongest = max((n / episodes[part] for (part, *_), n in cells.items()), default=0.0)
    tallest = max((n / episodes[part] for (part, _), n in soon.items()), default=0.0)
    epochs = range(1 + max((seed.epoch for seed in seeds), default=0))
    left = 12 + charts.LETTER * max(map(len, axes[0]), default=0)
    panels = []
    for part, n in sorted(episodes.items()):
        counts = {place: cells[part, *place] for place in itertools.product(*axes)}
        bars = [(late[part, epoch] / n, soon[part, epoch] / n) for epoch in epochs]
        title = ", ".join(each if isinstance(each, str) else f"price {1e5 * each:g}" for each in part)
        said = note(f"{n} episodes, {sum(counts.values())} kept")
        drawn = charts.heat(counts, *axes, strongest * n, left), charts.histogram(bars, tallest, left)
        panels.append(tag("div", tag("h4", escape(title)), said, *drawn))
    return tag("div", *panels, class_="grid")


def _funnel(evidence: Evidence) -> str:
    fates, rows = Counter((seed.arm, seed.controller, seed.fate) for seed in evidence.seeds), []
    for arm, controller in sorted({key[:2] for key in fates}, key=lambda key: (key[0] != LEARNED, key)):
        counts = {fate: fates[arm, controller, fate] for fate in (*FATES.values(), "unfinished")}
        episodes = sum(n for who, what, *_, n in evidence.episodes if (what, who) == (arm, controller))
        rows.append((f"{arm} ({controller})" if controller in evidence.colours else arm,
                     f"{sum(counts.values()):,} → {' · '.join(f'{n:,}' for n in counts.values())}",
                     {fate: n / episodes for fate, n in counts.items()}))
    return (note("Numbers: germinated → kept · pruned · unfinished (neither decided). Bars: per episode.")
            + legend({fate: fate for fate in (*FATES.values(), "unfinished")}) + charts.stacks(rows))


def _learning(evidence: Evidence) -> str:
    known = {name: run for name, run in evidence.runs.items() if isinstance(run, Trained)}
    notes = "".join(note(f"{name}: {run}") for name, run in evidence.runs.items() if isinstance(run, str))
    if not known:
        return notes + note("Without run stores nothing is known of how the controllers were trained.")
    colours = {name: evidence.colours[name] for name in known}
    titles = {"rounds": "utility of a round, points", "exams": "mean utility of an examination, points"}
    plots = [charts.curves({name: (colours[name], getattr(run, what)) for name, run in known.items()},
                           "rounds", title) for what, title in titles.items()]
    notes += note("With 95 % intervals, where more than one episode tells of them.")
    return notes + legend(colours) + tag("div", *plots, class_="pair")


def _costs(evidence: Evidence) -> str:
    names = ("round", "host_epochs", "seconds", "episodes")
    runs = {name: {key: run.cost[key] for key in names[:3]}
            for name, run in evidence.runs.items() if isinstance(run, Trained)}
    rows = [row | {"arm": f"{LEARNED} ({row['controller']})"} | runs.get(row["controller"], {})
            for row in evidence.arms if row["arm"] == LEARNED and row["controller"] != POOLED]
    tuned = [row for row in evidence.arms
             if row["arm"] != LEARNED and row["controller"] == POOLED and row["episodes"]]
    total = {name: sum(row[name] or 0 for row in rows) for name in names if all(name in row for row in rows)}
    said = note("What was spent beforehand, and what one use costs, in trainings of the bare host. "
                 "Host-epochs are those of episodes and their twins; previews and examinations are not "
                 "counted in them.")
    return said + _table(COSTS, [*rows, {"arm": "all controllers"} | total, *tuned])


SPLITS: Mapping[str, Split] = {
    "By hidden type": lambda kind, price: (kind,),
    "By price, in points per 1,000 parameters": lambda kind, price: (price,),
    "By hidden type and price": lambda kind, price: (kind, price)}
CLAIMED = ("Claims", "Paired differences")
"""Sections of a proof; other pages claim nothing."""
SECTIONS: Mapping[str, Callable[[Evidence], str]] = {
    "Arms": _arms, "Claims": _claims, "Paired differences": _forest, "Score against cost": _pareto,
    "What was grown, where and when": _grown, "Seed funnel": _funnel, "Learning curves": _learning,
    "Total cost": _costs}
