"""Runs as one page, from panels: what each learned, which is better, what grew and why, what it cost."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import Any

from esper.karn import charts
from esper.karn.charts import Estimate, tag
from esper.karn.comparing import compare
from esper.karn.markup import figure, fold, legend, list_of, note, table_of, write_page
from esper.karn.panels import TERMS, Run, open_run
from esper.karn.stores import stores_below
from esper.leyline.stages import SeedStage

LEARNED = "learned"
HOSTS = 24  # whose lives are drawn
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95 % of 2 to 10 values; of more, the normal's."""
STAGES = {SeedStage.TRAINING: "c2 pale", SeedStage.BLENDING: "c1", SeedStage.HOLDING: "c3",
          SeedStage.FOSSILIZED: "kept", SeedStage.PRUNED: "pruned"}
TOLD = ("family", "task", "seed", "rounds", "rows", "date", "commit", "version", "hardware")
Runs = Mapping[str, Run]  # by a name of its own


def write_run_report(paths: Sequence[Path], out: Path) -> None:
    """`paths`: folders of runs, stores, or folders that hold runs."""
    stores = list(dict.fromkeys(store for path in paths for store in stores_below(path)))
    with ExitStack() as stack:
        opened = [stack.enter_context(open_run(store)) for store in stores]
        names = [run.name for run in opened]
        runs = {name if names.count(name) == 1 else f"{name} ({number})": run
                for number, (name, run) in enumerate(zip(names, opened, strict=True))}
        told = {title: section(runs) for title, section in SECTIONS.items()}
        write_page(out, f"{'Run' if len(runs) == 1 else 'Runs'}: {', '.join(runs)}", _head(runs),
                   {title: inner for title, inner in told.items() if inner})


def curve_of(run: Run, panel: str) -> list[Estimate]:
    """(round, gain, half of its interval) of the controller, in `learning` or `exams`."""
    table = run.panel(panel)
    points = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return [(each["round"], each["gain"], None if each["high"] is None else each["high"] - each["gain"])
            for each in points if each["gain"] is not None and each.get("policy", LEARNED) == LEARNED]


def over_seeds(lines: Sequence[Sequence[Estimate]]) -> list[Estimate]:
    """Means of several trainings where all have come so far; the interval is of the trainings' luck."""
    shared = set.intersection(*({x for x, _, _ in line} for line in lines))
    means: list[Estimate] = []
    for x in sorted(shared):
        values = [y for line in lines for at, y, _ in line if at == x]
        spread = statistics.stdev(values) / math.sqrt(len(values))
        times = T95[len(values) - 2] if len(values) < len(T95) + 2 else charts.Z95
        means.append((x, statistics.fmean(values), times * spread))
    return means


def _head(runs: Runs) -> str:
    parts = []
    for name, run in runs.items():
        (state, _, done, planned, _, _, _, gain, low, high, trouble), = run.panel("state").rows
        ends = "" if low is None else f" ({figure(low, 'points')} to {figure(high, 'points')})"
        said = [f"{name}: {state} after round {done}" + ("" if planned is None else f" of {planned}")]
        said += [] if gain is None else [f"its last round gained {figure(gain, 'points')} points{ends}"]
        said += [f"open incidents: {trouble}"] if trouble else []
        known = {key: fact for key, fact in run.facts().items() if key in TOLD}
        parts += [tag("p", escape("; ".join(said) + "."), class_="said"), list_of(known)]
    return "".join(parts)


def _compared(runs: Runs) -> str:
    if len(runs) == 1:
        return ""
    table = compare(list(runs.values()))
    rows = [(name, *row[1:]) for name, row in zip(runs, table.rows, strict=True)]
    return note(table.question) + table_of(table._replace(rows=rows))


def _learning(runs: Runs) -> str:
    parts, colours, groups = [], charts.colours(list(runs)), dict[Any, list[str]]()
    for name, run in runs.items():
        groups.setdefault(run.facts().get("group", name), []).append(name)
    for panel, title in {"learning": "gain of a round, points", "exams": "gain of an exam, points"}.items():
        lines = {name: (colours[name], curve_of(run, panel)) for name, run in runs.items()}
        for names in groups.values():
            if len(names) > 1 and (mean := over_seeds([lines[name][1] for name in names])):
                lines[f"mean of {len(names)} seeds: {', '.join(names)}"] = "c0", mean
        if any(line for _, line in lines.values()):
            parts.append(charts.curves(lines, "rounds", title))
            colours |= {name: class_ for name, (class_, _) in lines.items()}
    said = ("With 95 % intervals: of the scenarios' luck for a run, of the training's luck for a mean of "
            "seeds (runs that differ in nothing else).")
    return note(said) + legend(colours) + tag("div", *parts, class_="pair") if parts else ""


def _frontier(runs: Runs) -> str:
    """Of the last examination of every policy of every run."""
    dots: dict[str, tuple[float, float, float]] = {}
    for name, run in runs.items():
        for policy, params, spent, score in run.rows(
                "SELECT policy, avg(params), avg(spent), 100 * avg(score) FROM exam AS e WHERE round = "
                "(SELECT max(round) FROM exam WHERE policy = e.policy) GROUP BY policy"):
            if None not in (params, spent, score):
                dots[policy if len(runs) == 1 else f"{name} {policy}"] = params, spent, score
    plots = [charts.scatter({name: (dot[place], dot[2]) for name, dot in dots.items()}, cost, "score, %",
                            LEARNED)
             for place, cost in enumerate(("grown parameters", "extra FLOPs, host trainings"))]
    said = "Means of the last examination. Filled and joined: no other is cheaper and as good."
    return note(said) + tag("div", *plots, class_="pair") if dots else ""


def _genealogy(runs: Runs) -> str:
    parts = [note("Seeds of the last round. A band is a slot; epochs go from left to right. Why a seed was "
                  "kept or pruned: the evidence that was known then, and the chance of the decision."),
             legend({stage.name.lower(): class_ for stage, class_ in STAGES.items()})]
    for name, run in runs.items():
        lives, extent = run.panel("lives"), run.extent()
        if not lives.rows:
            continue
        hosts = sorted({row[0] for row in lives.rows})
        fates = ", ".join(f"{sum(row[7] == fate for row in lives.rows)} {fate}"
                          for fate in ("kept", "pruned", "unfinished"))
        named = [(row[0], extent.slots[row[1]] if row[1] < len(extent.slots) else row[1], *row[2:])
                 for row in lives.rows]
        drawn = [_life(run, host, extent.slots, extent.epochs) for host in hosts[:HOSTS]]
        more = note(f"{len(hosts) - HOSTS} more hosts grew seeds.") if len(hosts) > HOSTS else ""
        drawn = [tag("div", *drawn, class_="lives"), more]
        parts.append(fold(name, f": {len(lives.rows)} born, {fates}", *drawn,
                          fold("Every seed", "", note(lives.question),
                               table_of(lives._replace(rows=named))), opened=len(runs) == 1))
    return "".join(parts) if len(parts) > 2 else ""


def _life(run: Run, host: int, slots: Sequence[str], epochs: int) -> str:
    wide, seen, names = 100 / max(epochs, 1), dict[int, str | None](), list[str]()
    marks = [charts.block(0, 16 * slot, 100, 14, "empty") for slot in range(len(slots))]
    for epoch, slot, stage, blueprint, *_ in run.panel("slots", row=host).rows:
        x, y = wide * (epoch - 1), 16 * slot
        class_ = STAGES.get(SeedStage.__members__.get(stage, SeedStage.PRUNED), "pruned")
        marks.append(charts.block(x, y, wide, 14, class_, f"{blueprint}, {stage}"))
        if blueprint not in (None, seen.get(slot)):
            names.append(charts.words(blueprint, x, y + 11, dx=2))
        seen[slot] = blueprint
    return tag("div", tag("h4", escape(f"host {host}")), charts.drawing(16 * len(slots), marks + names))


def _lines(panel: str, columns: Sequence[str], x: str) -> Callable[[Runs], str]:
    """A chart for each run with a line for each column, or for each name in its first."""

    def draw(runs: Runs) -> str:
        plots, colours, question = [], dict[str, str](), ""
        for name, run in runs.items():
            table, lines = run.panel(panel), dict[str, list[Estimate]]()
            at, question = table.columns.index(x), table.question
            for row, column in itertools.product(table.rows, columns):
                if (value := row[table.columns.index(column)]) is not None:
                    label = str(row[0]) if at else column.replace("_", " ")
                    lines.setdefault(label, []).append((row[at], value, None))
            colours |= charts.colours(list(lines))
            drawn = {each: (colours[each], line) for each, line in lines.items()}
            title = ", ".join([name] * (len(runs) > 1) + [table.units[columns[0]]])
            plots += [charts.curves(drawn, f"{x}s", title)] if lines else []
        return note(question) + legend(colours) + tag("div", *plots, class_="pair") if plots else ""

    return draw


def _tables(*panels: str) -> Callable[[Runs], str]:
    def draw(runs: Runs) -> str:
        found = [(name, run.panel(panel)) for panel in panels for name, run in runs.items()]
        parts = [tag("div", tag("h3", escape(name)) if len(runs) > 1 else "", note(table.question),
                     table_of(table) if table.rows else note(table.none)) for name, table in found]
        return tag("div", *parts, class_="pair")

    return draw


SECTIONS: Mapping[str, Callable[[Runs], str]] = {
    "Which is better": _compared, "Learning curves": _learning, "Score against cost": _frontier,
    "Genealogy of seeds": _genealogy,
    "What it does, in the last ten rounds": _tables("actions", "blueprints"),
    "Rewards of the last round": _lines("rewards", TERMS, "epoch"),
    "Is it certain": _lines("heads", ("entropy_share",), "round"), "Incidents": _tables("incidents"),
    "Costs": _tables("cost")}
"""title -> markup; a section without any is left out."""
