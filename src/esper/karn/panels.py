"""Panels: what a run or a proof shows, as data. The terminal, the page and the report draw the same tables.

    with open_run("runs/first") as run:         # a folder that holds run.db, or a store
        table = run.panel("slots", round=7, row=2)
        table.question, table.renderer          # "What grew in this host?", "network"
        table.columns, table.rows, table.units  # all JSON: table.json() is one object
        if run.changed():                       # cheap: ask again only if something was written
            ...

`PANELS` has every panel by name, and `PAGES` the panels of each page. A panel may be asked with `round` (by
default the last), `epoch` (the last of that round), `row` (the first) and `last` (rounds up to `round` that
counts are taken over, by default 10); `run.extent(round)` says what there is to choose from. `compare` takes
several runs. A table without rows has nothing to show.

Renderers: text (one row), line (`round` or `epoch` is x; a first column of text names the lines; `low` and
`high` are a 95 % interval around `gain`), bars (label, then numbers), table, tiles (a tile for each row;
lists have an entry for each slot), network (a cell for each epoch and slot; a slot without a row is empty).
Utilities, gains and rewards are in points, scores and shares in %, times in seconds, as `units` says; None
was not measured. Rounds count from 0, epochs from 1.
"""

import math
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from esper.karn.charts import Z95
from esper.karn.lives import lives_of
from esper.karn.stores import STORE, facts_of, stamp, store_of
from esper.leyline import EsperError, SeedStage
from esper.leyline.storage import is_locked
from esper.nissa import reader

LATE = 5.0, 60.0  # a round is late after so many times its usual length, and at least so many seconds
_POINTS = ("gain low high best difference diff_low diff_high reward reward_gain reward_size reward_compute "
           "reward_credit reward_potential contribution preview evidence error value followed")
_CHANCES = ("chance", "chance_op", "chance_slot", "chance_blueprint")
UNITS: Mapping[str, str] = {
    **dict.fromkeys(_POINTS.split(), "points"),
    **dict.fromkeys(("score", "twin", "share", "entropy_share", "extra_flops", *_CHANCES), "%"),
    **dict.fromkeys(("age", "left", "seconds"), "s"), "rate": "host-epochs/s",
    **dict.fromkeys(("entropy", "kl"), "nats")}
"""column -> unit, where it has one."""
_TIMES = ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min"), (-math.inf, 1, "s"))
Rows = list[tuple[Any, ...]]


def said(value: Any, unit: str = "") -> str:
    """A number in short, as every viewer writes it, with a sign where it is in points; a dash for what was
    not measured; of names nothing that a terminal would obey."""
    if isinstance(value, list):
        return " ".join(said(each, unit) for each in value)
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else "".join(c if c.isprintable() else "?" for c in str(value))
    if unit == "s":
        size, name = next((size, name) for least, size, name in _TIMES if value >= least)
        return f"{value / size:.0f} {name}"
    if isinstance(value, int) and not unit:
        return str(value)
    small = f"{value:.3g}".replace("e-0", "e-") if 0 < abs(value) < 0.01 else ""
    return ("+" if unit == "points" and value > 0 else "") + (small or f"{value:.2f}")


class Table(NamedTuple):
    """The answer of a panel."""

    columns: tuple[str, ...]
    rows: Rows
    question: str
    renderer: str
    none: str = "nothing to show"  # said where there are no rows

    @property
    def units(self) -> dict[str, str]:
        return {name: UNITS[name] for name in self.columns if name in UNITS}

    def json(self) -> dict[str, Any]:
        """Everything, for a page or a program. In a browser 1 is 1.0: fractions without a unit have None."""
        real = [name for name, *had in zip(self.columns, *self.rows, strict=True) if float in map(type, had)]
        return {**self._asdict(), "columns": list(self.columns), "units": dict.fromkeys(real) | self.units,
                "rows": [list(row) for row in self.rows]}


class Panel(NamedTuple):
    """A question, what answers it and how the answer is drawn."""

    page: str
    question: str
    renderer: str
    columns: tuple[str, ...]
    answer: "str | Callable[[Run, Mapping[str, Any]], Rows]"  # SQL, or what reads the run
    none: str = Table._field_defaults["none"]


@dataclass(frozen=True)
class Extent:
    """What there is to choose from."""

    rounds: tuple[int, int] | None  # first and last; None before the first is written
    round: int | None
    epochs: int  # of that round
    rows: list[int]
    slots: list[str]


class Run(AbstractContextManager["Run"]):
    """A store that is looked at. It may be written meanwhile."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock = store_of(path), clock
        self._open()
        self._seen = self._version()

    def _open(self) -> None:
        self._file: list[tuple[int, ...]] | None = None
        found, self.connection = stamp(self.path), reader(self.path)
        self._copied = not self.rows("PRAGMA database_list")[0][2]  # of an earlier schema, in memory
        self._file = found

    def refresh(self) -> Self:
        """Opened again, if another file lies there now or this is a copy of one that was written since."""
        upto = None if self._copied else 1
        if self._file is None or stamp(self.path)[:upto] != self._file[:upto]:
            self.connection.close()
            self._open()
            self._seen = -1
        return self

    def __exit__(self, *about: object) -> None:
        self.connection.close()

    @property
    def name(self) -> str:
        return self.path.parent.resolve().name if self.path.name == STORE else self.path.stem

    def rows(self, query: str, **values: object) -> Rows:
        try:
            return self.connection.execute(query, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            raise EsperError(f"cannot read the run store {self.path}: {error}") from error

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """What no run writes, such as text for a number, is damage."""
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            raise EsperError(f"the run store {self.path} is damaged: {error!r}; "
                             "put back a whole one") from error

    def _version(self) -> int:
        return int(self.rows("PRAGMA data_version")[0][0])

    def changed(self) -> bool:
        """Was anything written since this was last asked?"""
        before, self._seen = self._seen, self._version()
        return before != self._seen

    def facts(self) -> dict[str, Any]:
        """What is known of the run as a whole, as `fact` has it; the latest of each name."""
        return facts_of(self.rows("SELECT name, value FROM fact ORDER BY round"), self.path)

    def state(self) -> str:
        """running, finished or stopped."""
        if is_locked(self.path.parent):
            return "running"
        planned = self.facts().get("rounds")
        return "finished" if planned is None or self._done() >= planned else "stopped"

    def _done(self) -> int:
        return int(self.rows("SELECT 1 + ifnull(max(round), -1) FROM round")[0][0])

    def extent(self, round: int | None = None) -> Extent:
        first, last = self.rows("SELECT (SELECT min(round) FROM step), (SELECT max(round) FROM step)")[0]
        number = last if round is None else round
        epochs = self.rows("SELECT ifnull(max(epoch), 0) FROM step WHERE round = :round", round=number)[0][0]
        rows = self.rows("SELECT row FROM step WHERE round = :round AND epoch = 1", round=number)
        slots = self.facts().get("slots")
        if slots is None:
            count = self.rows("SELECT 1 + ifnull(max(slot), -1) FROM seed WHERE round = :round", round=number)
            slots = [str(slot) for slot in range(count[0][0])]
        span = None if last is None else (first, last)
        return Extent(span, number, epochs, [row for (row,) in rows], slots)

    def panel(self, name: str, **selection: int) -> Table:
        """The answer to a question of `PANELS` about some round, epoch and row."""
        if name not in PANELS:
            raise EsperError(f"no panel {name!r}; there are {', '.join(PANELS)}")
        if unknown := sorted(selection.keys() - {"round", "epoch", "row", "last"}):
            raise EsperError(f"a panel has no {unknown[0]} to choose; only round, epoch, row and last")
        panel, extent = PANELS[name], self.extent(selection.get("round"))
        chosen = {"round": extent.round, "epoch": extent.epochs, "row": min(extent.rows, default=0),
                  "last": 10, "z": Z95} | selection
        answer = panel.answer
        with self.trusted():
            rows = self.rows(answer, **chosen) if isinstance(answer, str) else answer(self, chosen)
        return Table(panel.columns, rows, panel.question, panel.renderer, panel.none)


def open_run(path: str | Path, clock: Callable[[], float] = time.time) -> Run:
    """Look at the run in a folder, or at any store. It is never written, and a writer never waits."""
    return Run(path, clock)


def interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """(mean, ends of its 95 % interval) of one utility or more, in points."""
    mean = 100 * statistics.fmean(values)
    half = 100 * Z95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return mean, None if half is None else mean - half, None if half is None else mean + half


def exams_of(run: Run) -> dict[tuple[str, int], dict[int, float]]:
    """(policy, rounds before it) -> scenario -> utility, of every examination."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    with run.trusted():
        for policy, number, scenario, utility in run.rows(
                "SELECT policy, round, scenario, utility FROM exam WHERE utility IS NOT NULL "
                "ORDER BY policy, round"):
            found.setdefault((policy, int(number)), {})[scenario] = float(utility)
    return found


def _state(run: Run, chosen: Mapping[str, Any]) -> Rows:
    recent = run.rows("SELECT ifnull(seconds, 0), ifnull(host_epochs, 0) FROM round "
                      "ORDER BY round DESC LIMIT 10")
    facts, done = run.facts(), run._done()
    planned = facts.get("rounds")
    pace = statistics.fmean(row[0] for row in recent) if recent else 0.0
    rate = sum(row[1] for row in recent) / (len(recent) * pace) if pace else None
    worth = run.panel("learning").rows
    gain = worth[-1][1:] if worth else (None, None, None)
    left = None if planned is None or not pace else max(0, planned - done) * pace
    opened = sum(row[3] is None for row in _incidents(run, chosen))
    return [(run.state(), facts.get("family"), done, planned, _age(run), left, rate, *gain, opened)]


def _age(run: Run) -> float | None:
    ended = run.rows("SELECT max(ended) FROM round")[0][0]
    return None if ended is None else run.clock() - ended


def _incidents(run: Run, chosen: Mapping[str, Any]) -> Rows:
    """Those of the store, and whether the next round is late, which only the clock can tell."""
    known = run.rows("SELECT kind, what, opened, closed, rounds, most, least FROM incident "
                     "ORDER BY closed IS NOT NULL, opened DESC, kind, what")
    lengths = run.rows("SELECT seconds FROM round WHERE seconds IS NOT NULL ORDER BY round DESC LIMIT 10")
    age, seconds = _age(run), [length for (length,) in lengths]
    late = max(LATE[1], LATE[0] * statistics.median(seconds)) if seconds else math.inf
    if age is None or age <= late or run.state() != "running":
        return known
    return [("stalled", "round", run._done(), None, 0, age, age), *known]


def _exams(run: Run, chosen: Mapping[str, Any]) -> Rows:
    return [(policy, number, *interval(list(found.values())), len(found))
            for (policy, number), found in exams_of(run).items()]


def _hosts(run: Run, chosen: Mapping[str, Any]) -> Rows:
    hosts = run.rows("SELECT row, max(epoch), scenario, op, 100 * score, 100 * twin, 100 * (score - twin), "
                     "ifnull(sum(rolled_back), 0), ifnull(done, 0) FROM step "
                     "WHERE round = :round AND epoch <= :epoch GROUP BY row ORDER BY row", **chosen)
    seeds: dict[tuple[int, int], dict[int, tuple[Any, ...]]] = {}
    for row, epoch, slot, *about in run.rows("SELECT row, epoch, slot, stage, blueprint, alpha FROM seed "
                                             "WHERE round = :round AND epoch <= :epoch", **chosen):
        seeds.setdefault((row, epoch), {})[slot] = tuple(about)
    empty, slots = (SeedStage.DORMANT.name, None, None), range(len(run.extent(chosen["round"]).slots))
    found = []
    for host in hosts:
        cells = [seeds.get(host[:2], {}).get(slot, empty) for slot in slots]
        found.append((*host, *([cell[part] for cell in cells] for part in range(len(empty)))))
    return found


def _blueprints(run: Run, chosen: Mapping[str, Any]) -> Rows:
    """Those that were never used stand first."""
    window = "round > :round - :last AND round <= :round"
    sources = {"step": "blueprint IS NOT NULL", "move JOIN seed USING (round, epoch, row, slot)":
               "target = 'FOSSILIZED'"}
    born, kept = (dict[str, int](run.rows(f"SELECT blueprint, count(*) FROM {source} WHERE {where} "
                                          f"AND {window} GROUP BY 1", **chosen))
                  for source, where in sources.items())
    names = {*run.facts().get("blueprints", ()), *born, *kept}
    every = sum(born.values()) or 1
    return sorted(((name, born.get(name, 0), kept.get(name, 0), 100 * born.get(name, 0) / every)
                   for name in names), key=lambda row: (row[1], row[0]))


_HOST = " FROM step WHERE round = :round AND row = :row "
_LAST_EXAM = ("FROM exam WHERE policy = 'learned' AND round = "
              "(SELECT max(round) FROM exam WHERE policy = 'learned')")
TERMS = ("reward", "reward_gain", "reward_size", "reward_compute", "reward_credit", "reward_potential")
_UPDATE = ("entropy", "kl", "clip_fraction", "value_error", "explained_variance", "grad_norm",
           "learning_rate")
PANELS: Mapping[str, Panel] = {
    "state": Panel("overview", "Is it alive, and how far is it?", "text", (
        "state", "family", "round", "planned", "age", "left", "rate", "gain", "low", "high", "open"), _state),
    "learning": Panel(
        "overview", "Does the controller learn? Gain of a round over the hosts' twins.", "line",
        ("round", "gain", "low", "high"),
        "SELECT round, 100 * utility, 100 * (utility - :z * utility_error), "
        "100 * (utility + :z * utility_error) FROM round ORDER BY round"),
    "exams": Panel(
        "overview", "How good is it on scenarios that it does not train on, beside others?", "line",
        ("policy", "round", "gain", "low", "high", "n"), _exams),
    "incidents": Panel("overview", "What went wrong, and is it over?", "table", (
        "kind", "what", "opened", "closed", "rounds", "most", "least"), _incidents, "nothing"),
    "arms": Panel(
        "overview", "How far above no growth are the best plans and the other arms of a proof?", "table",
        ("arm", "controller", "gain", "low", "high", "score", "episodes"),
        "SELECT arm, controller, 100 * gain, 100 * low, 100 * high, 100 * score, episodes FROM summary "
        "ORDER BY gain DESC, arm, controller",
        "Not measured here: a training plays no plans. esper prove does, and its store opens like a run."),
    "cost": Panel(
        "overview", "What did training cost, and what does a grown network cost? The latter in the last "
        "examination: parameters of its seeds, and FLOPs beyond the bare host's.", "text",
        ("rounds", "seconds", "host_epochs", "episodes", "grown_params", "extra_flops"),
        "SELECT count(*), sum(seconds), sum(host_epochs), sum(episodes), (SELECT avg(params) " + _LAST_EXAM +
        "), (SELECT 100 * avg(spent) " + _LAST_EXAM + ") FROM round HAVING count(*) > 0"),
    "hosts": Panel("population", "How does every host stand after this epoch?", "tiles", (
        "row", "epoch", "scenario", "op", "score", "twin", "gain", "rollbacks", "done", "stages",
        "blueprints", "alphas"), _hosts),
    "lives": Panel(
        "population", "Which seeds were born, and when and why was each kept or pruned? Evidence is what it "
        "brought, or would have brought, when that was decided; the chance is that of the decision.", "table",
        ("row", "slot", "blueprint", "born", "blended", "decided", "ended", "fate", "evidence", "error",
         "chance"), lambda run, chosen: lives_of(run.rows, chosen["round"])),
    "host": Panel("host", "Does this host learn better than its twin?", "line",
        ("epoch", "score", "twin", "gain", "reward", "loss", "params"),
        "SELECT epoch, 100 * score, 100 * twin, 100 * (score - twin), 100 * reward, loss, params" + _HOST +
        "ORDER BY epoch"),
    "slots": Panel("host", "What grew in this host?", "network",
        ("epoch", "slot", "stage", "blueprint", "alpha", "contribution", "preview", "error"),
        "SELECT epoch, slot, stage, blueprint, alpha, 100 * contribution, 100 * preview, 100 * error "
        "FROM seed WHERE round = :round AND row = :row ORDER BY epoch, slot"),
    "decisions": Panel("host", "What was decided in this host, how surely, and what followed?", "table",
        ("epoch", "op", "slot", "blueprint", *_CHANCES, "value", "followed", "rolled_back", "fate"),
        "WITH said AS (SELECT *, sum(reward) OVER (ORDER BY epoch DESC) AS followed" + _HOST + ") "
        f"SELECT epoch, op, slot, blueprint, {', '.join(f'100 * {name}' for name in _CHANCES)}, 100 * value, "
        "100 * followed, ifnull(rolled_back, 0), CASE op WHEN 'GERMINATE' THEN ifnull("
        "(SELECT CASE target WHEN 'PRUNED' THEN 'pruned' ELSE 'kept' END FROM move "
        "WHERE move.round = said.round AND move.row = said.row AND move.slot = said.slot "
        "AND move.epoch >= said.epoch AND target IN ('FOSSILIZED', 'PRUNED') ORDER BY move.epoch LIMIT 1), "
        "'unfinished') END FROM said ORDER BY epoch"),
    "heads": Panel("tamiyo", "Which head has stopped exploring, or cannot learn?", "line",
        ("head", "round", "entropy_share", "learnable", "grad_norm"),
        "SELECT head, round, 100 * entropy, learnable, grad_norm FROM head ORDER BY head, round"),
    "update": Panel("tamiyo", "Are the updates sound?", "line", ("round", *_UPDATE),
                    f"SELECT round, {', '.join(_UPDATE)} FROM round ORDER BY round"),
    "actions": Panel("tamiyo", "What does it do?", "bars", ("op", "count", "share"),
        "SELECT op, count(*), 100.0 * count(*) / sum(count(*)) OVER () FROM step "
        "WHERE round > :round - :last AND round <= :round GROUP BY op ORDER BY 2 DESC, op"),
    "blueprints": Panel("tamiyo", "Which blueprint is never used?", "bars", (
        "blueprint", "germinated", "kept", "share"), _blueprints),
    "rewards": Panel(
        "rewards", "What is it paid for? Means over the hosts of a round.", "line", ("epoch", *TERMS),
        f"SELECT epoch, {', '.join(f'100 * avg({name})' for name in TERMS)} FROM step "
        "WHERE round = :round GROUP BY epoch ORDER BY epoch")}
"""name -> panel."""
PAGES: Mapping[str, list[str]] = {page: [name for name, panel in PANELS.items() if panel.page == page]
                                  for page in dict.fromkeys(panel.page for panel in PANELS.values())}
"""page -> its panels; the page `compare` is `compare` of several runs."""
