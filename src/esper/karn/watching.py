"""A run in the terminal: pages of panels and a slider through time, all by keys.

Once a second the store is asked whether anything was written; what is on the screen is queried again then.
After that it rests, many times as long as the drawing kept the processor.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.events import Key, Resize
from textual.widgets import Static

from esper.karn.comparing import compare
from esper.karn.drawn import COLOURS, DIM, Place, shown, tiles_across
from esper.karn.panels import PAGES, Extent, Run, open_run, said
from esper.leyline import EsperError

TABS = (*PAGES, "compare")
BY_EPOCH = ("population", "host", "rewards")  # where a step in time is an epoch; elsewhere it is a round
POLL, CLOCK = 1.0, 10  # seconds between questions; questions after which ages are drawn again
TIMES = 200  # as long as a drawing took is rested
MARGIN = 4  # columns beside a page
KEYS = "left right time   up down choose   enter open   l live   ? help   q leave"
HELP = """\
1 to {count}, tab        the pages
left, right       back and on in time: an epoch on {by_epoch}, else a round
shift+left/right  a round there, else ten rounds
home, end         the first and the last moment
l                 live: follow what is written
up, down          choose a host (with shift a line of them), or on compare a run
enter             open the chosen host or run
pgup, pgdn        scroll
?                 this help, and away again
q                 leave

Signed numbers are points above a host's twin, which does not grow. Intervals are of 95 %.
A dash was not measured. A highlighted column is the chosen moment."""


class Watch(App[None]):
    """A viewer of one store; `others` finds stores to compare it with."""

    CSS = """
    Static { padding: 0 1; }
    #head, #tabs, #time { height: 1; }
    #head { background: $panel; }
    #foot { height: auto; max-height: 3; }
    VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; }
    """
    TITLE, ENABLE_COMMAND_PALETTE = "esper watch", False
    AUTO_FOCUS = None

    def __init__(self, store: Path, others: Callable[[], Iterable[Path]] = tuple,
                 clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self.store, self.others, self.clock = store, others, clock
        self.seen: Run | None = None
        self.page = self.before = TABS[0]
        self.moment: tuple[int, int] | None = None  # round and epoch; None follows the run
        self.row = self.picked = self.asked = 0
        self.drew, self.used, self.due = False, 0.0, 0.0
        self.listed: list[Path] = []  # runs on `compare`
        self.state = ""
        self.keys: dict[str, Callable[[], object]] = {
            **{str(number): partial(self.turn, page) for number, page in enumerate(TABS, 1)},
            "tab": lambda: self.turn(TABS[(TABS.index(self.page) + 1) % len(TABS)]),
            "shift+tab": lambda: self.turn(TABS[TABS.index(self.page) - 1]),
            "left": lambda: self.step(-1), "shift+left": lambda: self.step(-1, far=True),
            "right": lambda: self.step(1), "shift+right": lambda: self.step(1, far=True),
            "home": lambda: self.jump(False), "end": lambda: self.jump(True), "l": lambda: self.jump(None),
            "up": lambda: self.choose(-1), "down": lambda: self.choose(1), "enter": self.enter,
            "shift+up": lambda: self.choose(-self.across), "shift+down": lambda: self.choose(self.across),
            "pageup": lambda: self.sheet.scroll_page_up(animate=False),
            "pagedown": lambda: self.sheet.scroll_page_down(animate=False),
            "question_mark": lambda: self.turn("help" if self.page != "help" else self.before),
            "q": self.exit}

    def compose(self) -> ComposeResult:
        yield from (Static(id="head"), Static(id="tabs"))
        with VerticalScroll(can_focus=False) as self.sheet:
            yield Static(id="page")
        yield from (Static(id="time"), Static(id="foot"))

    def on_mount(self) -> None:
        self.set_interval(POLL, self.tick)

    def on_resize(self, event: Resize) -> None:
        self._attempt(self.look)

    def on_unmount(self) -> None:
        self._close()

    def on_key(self, event: Key) -> None:
        if event.key in self.keys:
            event.prevent_default().stop()
            self._attempt(self.keys[event.key])

    def _attempt(self, what: Callable[[], object]) -> None:
        """What cannot be read is said in one line; what was drawn before stays."""
        try:
            what()
        except EsperError as error:
            self._say("foot", Text(said(error), "bold red"))
        except (LookupError, TypeError, ValueError) as error:  # a stage, slot or number that no run writes
            told = f"the run store {self.store} is damaged: {error!r}; put back a whole one"
            self._say("foot", Text(told, "bold red"))

    def tick(self) -> None:
        """What the last drawing cost is known only now, when the screen is drawn too."""
        now, used = time.monotonic(), time.process_time()
        if self.drew:
            self.due, self.drew = now + TIMES * (used - self.used), False
        self.used = used
        if now >= self.due:
            self._attempt(self.poll)

    def poll(self) -> None:
        """Draw again if anything was written, if the trainer came or went, and now and then for the clock."""
        known, run = self.seen, self._current()
        self.asked += 1
        if run.changed() or run is not known or run.state() != self.state or self.asked % CLOCK == 0:
            self.drew = True
            self.look()

    def _current(self) -> Run:
        """The store as it lies there now: it may have been replaced."""
        if self.seen is None:
            self.seen = open_run(self.store, self.clock)
        return self.seen.refresh()

    def _close(self) -> None:
        if self.seen is not None:
            self.seen.connection.close()
        self.seen = None

    def turn(self, page: str) -> None:
        """To another page, from its top."""
        self.before, self.page = self.page, page
        self.sheet.scroll_home(animate=False)
        self.look()

    def step(self, by: int, far: bool = False) -> None:
        """Through time; epochs go on in the next round."""
        run = self._current()
        if (span := run.extent().rounds) is None:
            return
        number, epoch = self.moment or (span[1], run.extent().epochs)
        if self.page not in BY_EPOCH or far:
            number += by * (10 if far and self.page not in BY_EPOCH else 1)
        elif epoch + by < 1:
            number, epoch = number - 1, run.extent(number - 1).epochs
        elif epoch + by > run.extent(number).epochs:
            number, epoch = number + 1, 1
        else:
            epoch += by
        if not span[0] <= number <= span[1]:
            return self.jump(by > 0)
        self.moment = number, min(epoch, run.extent(number).epochs)
        self.look()

    def jump(self, end: bool | None) -> None:
        """To the first moment or the last; None follows the run."""
        extent = self._current().extent()
        known = None if end is None else extent.rounds
        self.moment = known and ((known[1], extent.epochs) if end else (known[0], 1))
        self.look()

    def choose(self, by: int) -> None:
        """Another host, or on `compare` another run."""
        if self.page == "compare":
            self.picked = min(max(self.picked + by, 0), len(self.listed) - 1)
        elif self.page in ("population", "host"):
            rows = self._current().extent(self.moment and self.moment[0]).rows or [0]
            place = min(max(rows.index(self.row) + by, 0), len(rows) - 1) if self.row in rows else 0
            self.row = rows[place]
            if self.page == "population":
                self.sheet.scroll_to(y=3 * (place // self.across) - 6, animate=False)
        else:
            self.sheet.scroll_relative(y=by, animate=False)
        self.look()

    @property
    def across(self) -> int:
        return tiles_across(self.size.width - MARGIN)

    def enter(self) -> None:
        """Open what is chosen."""
        if self.page == "population":
            self.turn("host")
        elif self.page == "compare" and self.listed:
            self._close()
            self.store, self.picked, self.moment = self.listed[self.picked], 0, None
            self.turn(TABS[0])

    def look(self) -> None:
        """Ask for what is on the page, and draw it."""
        run = self._current()
        self.state = run.state()
        extent = run.extent(self.moment and self.moment[0])
        self.row = self.row if self.row in extent.rows or not extent.rows else extent.rows[0]
        at = Place(self.size.width - MARGIN, extent.round, self.moment[1] if self.moment else extent.epochs,
                   self.row, self.picked, extent.slots, min(10, max(3, self.size.height // 5 - 1)))
        if self.page == "help":
            self._say("page", Text(HELP.format(count=len(TABS), by_epoch=", ".join(BY_EPOCH))))
        elif self.page == "compare":
            self._compare(at)
        else:
            chosen = {"epoch": at.epoch or 0, "row": self.row}
            chosen |= {} if extent.round is None else {"round": extent.round}
            tables = [run.panel(name, **chosen) for name in PAGES[self.page]]
            over = max((row[0] for row in tables[0].rows), default=0)  # a host may end before its round
            there = at._replace(epoch=min(over, at.epoch or over)) if self.page == "host" else at
            self._say("page", shown(tables, there))
        self._frame(run, extent, at)

    def _compare(self, at: Place) -> None:
        """This run first; what cannot be read is named below."""
        runs, lost = [], []
        with ExitStack() as stack:
            for path in dict.fromkeys((self.store, *self.others())):
                try:
                    runs.append(stack.enter_context(open_run(path, self.clock)))
                except EsperError as error:
                    lost.append(Text(said(error), "red"))
            self.listed = [run.path for run in runs]
            self._say("page", Group(shown([compare(runs)], at), *lost))

    def _frame(self, run: Run, extent: Extent, at: Place) -> None:
        """The lines around the page: what is watched and wrong, the pages, the time, what can be done."""
        planned, done = run.facts().get("rounds"), extent.rounds[1] + 1 if extent.rounds else 0
        far = f"{done} rounds" if planned is None else f"{done} of {planned} rounds"
        head = Text.assemble((f"{said(run.name)}  ", "bold"), (self.state, COLOURS[self.state]), f"  {far}")
        for kind, what, since, closed, *_ in run.panel("incidents").rows:
            head.append(said(f"  ! {kind} {what} since round {since}") if closed is None else "", "bold red")
        self._say("head", head)
        self._say("tabs", Text("  ").join(
            Text(f"{number} {page}", "reverse bold" if page == self.page else "")
            for number, page in enumerate(TABS, 1)))
        self._say("time", self._slider(extent, at))
        stopped = f"nobody trains this run any more; esper train --out {run.path.parent} --resume goes on"
        self._say("foot", Text(said(stopped), "yellow") if self.state == "stopped" else Text(KEYS, DIM))

    def _slider(self, extent: Extent, at: Place) -> Text:
        if extent.rounds is None or at.round is None or at.epoch is None:
            return Text("no round is written yet", DIM)
        first, last = extent.rounds
        told = f"round {at.round} of {first} to {last}  epoch {at.epoch} of {extent.epochs}"
        told += f"  host {at.row}  " if self.page in ("population", "host") else "  "
        wide = max(5, self.size.width - len(told) - 10)
        part = (at.round - first + at.epoch / max(extent.epochs, 1)) / (last - first + 1)
        knob = min(wide - 1, int(part * wide))
        live = (" live", "bold green") if self.moment is None else (" then", "yellow")
        return Text.assemble(told, ("━" * knob, "cyan"), "●", ("─" * (wide - 1 - knob), DIM), live)

    def _say(self, where: str, what: RenderableType) -> None:
        self.query_one(f"#{where}", Static).update(what)
