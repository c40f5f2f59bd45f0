"""`esper watch` on a planted run: what is on the screen, key by key; live, broken and killed runs."""

import asyncio
import builtins
import html
import os
import re
import signal
import sqlite3
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.containers import VerticalScroll
from textual.pilot import Pilot

from esper.cli import main
from esper.cli.watch import _found
from esper.karn import PAGES, PANELS, watching
from esper.karn.drawn import RENDERERS, STAGES, Place, draw
from esper.karn.panels import Table
from esper.karn.watching import TABS, Watch
from esper.leyline import SeedStage
from esper.nissa import Store
from tests.planted import ENDED, held, plant

SMALL, LARGE = (80, 24), (160, 50)
CELL = 12.2
"""Width of a letter in an exported screen."""


def screen(app: Watch) -> str:
    """What stands on the screen, line by line."""
    lines: dict[float, list[tuple[int, str]]] = {}
    for x, y, text in re.findall(r'<text [^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', app.export_screenshot()):
        lines.setdefault(float(y), []).append((round(float(x) / CELL), html.unescape(text).replace("\xa0", " ")))
    told = []
    for _, parts in sorted(lines.items()):
        line = ""
        for column, text in sorted(parts):
            line = line.ljust(column) + text
        told.append(line.rstrip())
    return "\n".join(told)


def watched(store: Path, what: Callable[[Watch, Pilot[None]], Coroutine[Any, Any, None]],
            size: tuple[int, int] = SMALL, others: tuple[Path, ...] = ()) -> None:
    """Look at a store with a clock that stands still, and without the timer: tests ask by `poll`."""
    async def play() -> None:
        app = Watch(store, lambda: others, clock=lambda: ENDED + 25)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await what(app, pilot)

    asyncio.run(play())


@pytest.fixture(autouse=True)
def _no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL", 3600.0)


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


async def seen(app: Watch, pilot: Pilot[None], *keys: str) -> str:
    """The whole page after some keys, scrolled through."""
    await pilot.press(*keys)
    await pilot.pause()
    parts = [screen(app)]
    while (page := app.query_one(VerticalScroll)).scroll_offset.y < page.max_scroll_y:
        await pilot.press("pagedown")
        await pilot.pause()
        parts.append(screen(app))
    return "\n".join(parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("runs") / "planted")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_every_page_asks_its_questions_and_shows_what_was_planted(folder: Path, size: tuple[int, int]) -> None:
    facts = {
        "overview": ["starved slot gradient since round 1", "stopped  3 of 4 rounds", "gain +4.00 (+3.02 to +4.98)",
                     "● heuristic round 3  gain +1.00 (-0.13 to +2.13)", "● learned round 3  gain +3.00 (+1.87 to +4.13)",
                     "starved           slot gradient  1       -       2", "rollback          hosts          1       2       1",
                     "entropy_collapse  op             0       1       1       0.02  0.02"],
        "population": ["▌2   62.50% +12.50", "▌·T           WAIT", "▸0     50.00% 0.00", "▸F·      FOSSILIZE"],
        "host": ["├─◆ stem  TBHF        FOSSILIZED  mixer      1.00   +3.12 ± 1.56", "├─◇ tail  ····        DORMANT"],
        "tamiyo": ["slot       75.00%         0.50       0.00", "op         50.00%         1.00", "0.03", "attention", "93.75%"],
        "rewards": ["reward            +6.25", "reward_credit     -"]}

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        for number, page in enumerate(PAGES, 1):
            told = await seen(app, pilot, str(number))
            for fact in facts[page]:
                assert fact in told, f"{page}: {fact}\n{told}"
            assert max(map(len, told.splitlines())) <= size[0] + 1
            joined = re.sub(r"\W+", " ", told)
            for name in PAGES[page]:
                assert re.sub(r"\W+", " ", PANELS[name].question)[:50] in joined, name

    watched(folder / "run.db", look, size)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_birth_is_seen_where_and_when_it_was(folder: Path, size: tuple[int, int]) -> None:
    async def look(app: Watch, pilot: Pilot[None]) -> None:
        told = await seen(app, pilot, "2", "down", "down", "left")
        assert "epoch 3 of 4  host 2" in told
        assert "▸·T           WAIT" not in told
        assert "▸·T      GERMINATE" in told
        told = await seen(app, pilot, "left")
        assert "epoch 2 of 4" in told
        assert "▸··           WAIT" in told, "a moment before the slot was empty"
        told = await seen(app, pilot, "right", "enter")
        assert re.search(r"├─◈ tail ··T TRAINING norm 0\.00 - (preview )?\+1\.56 ± 0\.78", flat(told))
        assert re.search(r"▸ 3 +GERMINATE  tail  norm +25\.00%", told)
        assert "followed +9.38" in told
        assert "fate unfinished" in told or re.search(r"\+9\.38 .*unfinished", told)

    watched(folder / "run.db", look, size)


def test_a_host_that_ends_before_its_round_is_shown_as_it_ended(tmp_path: Path) -> None:
    store = Store(plant(tmp_path) / "run.db")
    for epoch in (1, 2, 3):
        rows = [0, 1] if epoch < 3 else [1]
        store.write("step", {"round": 3, "epoch": epoch, "row": rows, "op": "WAIT", "score": 0.5, "twin": 0.25})
    store.write("seed", {"round": 3, "epoch": 2, "row": 0, "slot": 1, "stage": "FOSSILIZED", "blueprint": "norm", "alpha": 1.0})
    store.commit()

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        told = await seen(app, pilot, "3")
        assert "epoch 3 of 3  host 0" in told
        assert "├─◆ tail  ·F          FOSSILIZED  norm       1.00" in told
        await pilot.press("2", "down", "enter")
        assert app.row == 1
        assert "nothing to show" in await seen(app, pilot), "no seed in this host"

    watched(store.path, look)


def test_a_chosen_tile_stays_in_sight(tmp_path: Path) -> None:
    store = Store(plant(tmp_path) / "run.db")
    store.write("step", {"round": 3, "epoch": 1, "row": list(range(64)), "op": "WAIT", "score": 0.5, "twin": 0.25})
    store.commit()

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        app.row = 49
        await pilot.press("2", "down")
        await pilot.pause()
        assert "▸50  50.00% +25.00" in screen(app)
        await pilot.press("shift+up")
        assert app.row == 46, "four tiles stand in a line"
        app.row = 1
        await pilot.press("up")
        await pilot.pause()
        assert "▸0   50.00% +25.00" in screen(app)

    watched(store.path, look)


def test_the_slider_goes_through_all_time(folder: Path) -> None:
    async def look(app: Watch, pilot: Pilot[None]) -> None:
        for keys, moment in ((["2", "home"], (0, 1)), (["left"], (0, 1)), (["right"] * 4, (1, 1)), (["left"], (0, 4)),
                             (["shift+right"], (1, 4)), (["end"], (2, 4)), (["right"], (2, 4)), (["l"], None),
                             (["1", "left"], (1, 4)), (["shift+left"], (0, 1)), (["shift+right"], (2, 4))):
            await pilot.press(*keys)
            assert app.moment == moment, keys
        told = await seen(app, pilot, "2", "home", "shift+right", "right")
        assert "round 1 of 0 to 2  epoch 2 of 4" in told
        assert "then" in told
        assert "↺1 WAIT" in told, "the rollback of row 1"
        assert "· op 2.00%" not in told
        told = await seen(app, pilot, "4", "home")
        assert "op         2.00%          1.00       1.00" in told, "the entropy that collapsed"
        assert "slot       75.00%         0.50       1.00" in told, "not yet starved"

    watched(folder / "run.db", look, LARGE)


def test_keys_turn_pages_and_help_lists_them(folder: Path) -> None:
    async def look(app: Watch, pilot: Pilot[None]) -> None:
        for expected in (*TABS[1:], TABS[0]):
            await pilot.press("tab")
            assert app.page == expected
        await pilot.press("shift+tab")
        assert app.page == "compare"
        told = await seen(app, pilot, "question_mark")
        assert "live: follow what is written" in told
        await pilot.press("question_mark")
        assert app.page == "compare"
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running

    watched(folder / "run.db", look)


def test_a_round_appears_when_it_is_written_unless_one_looks_back(tmp_path: Path) -> None:
    store = Store(plant(tmp_path / "run") / "run.db")

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        asked: list[str] = []
        app.seen.connection.set_trace_callback(asked.append)
        for _ in range(5):
            app.poll()
        assert not any("step" in query or "head" in query for query in asked), "nothing new: nothing is queried"
        assert sum("data_version" in query for query in asked) == 5
        store.write("round", {"round": 3, "utility": 0.08, "utility_error": 0.005, "ended": ENDED + 30, "seconds": 10.0})
        store.write("step", {"round": 3, "epoch": 1, "row": [0, 1], "op": "WAIT", "score": 0.5, "twin": 0.25})
        store.commit()
        app.poll()
        told = await seen(app, pilot)
        assert "gain +8.00 (+7.02 to +8.98)" in told
        assert "finished  4 of 4 rounds" in told
        assert not any("head" in query for query in asked), "another page"
        assert "50.00% +25.00" in await seen(app, pilot, "2")
        await pilot.press("1", "left")
        store.write("round", {"round": 4, "utility": 0.16, "utility_error": 0.005})
        store.write("step", {"round": 4, "epoch": 1, "row": 0, "op": "WAIT"})
        store.commit()
        app.poll()
        told = await seen(app, pilot)
        assert "round 2 of 0 to 4" in told
        assert "gain +4.00 (+3.02 to +4.98)" in told

    watched(store.path, look)


def test_after_a_drawing_it_rests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = [100.0], [5.0]
    polls: list[float] = []

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: used[0], time=lambda: ENDED))
        app.used, app.due, app.drew = used[0], 0.0, False
        monkeypatch.setattr(app, "poll", lambda: polls.append(now[0]))

        def second(drew: bool, cost: float) -> None:
            app.tick()
            app.drew, now[0], used[0] = drew, now[0] + 1, used[0] + cost

        second(False, 0.5)  # a key was pressed: no reason to rest
        second(True, 4 / watching.TIMES)
        for _ in range(6):
            second(False, 0.0)
        assert polls == [100.0, 101.0, 106.0, 107.0]

    watched(folder / "run.db", look)


def test_a_killed_trainer_is_told(tmp_path: Path) -> None:
    plant(tmp_path)

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        app.poll()
        told = await seen(app, pilot)
        assert "running  3 of 4 rounds" in told
        assert "resume" not in told
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        app.poll()
        told = await seen(app, pilot)
        assert "stopped  3 of 4 rounds" in told
        assert "nobody trains this run any more" in told

    with held(tmp_path) as trainer:
        watched(tmp_path / "run.db", look)


def test_a_store_that_is_missing_broken_or_replaced_is_one_line(tmp_path: Path) -> None:
    store = tmp_path / "run" / "run.db"

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        assert "there is no run store" in screen(app)
        await pilot.press("2", "left", "down", "end", "6", "enter", "question_mark", "1")
        plant(tmp_path / "run")
        app.poll()
        assert "Is it alive" in (await seen(app, pilot))
        store.unlink()
        await pilot.press("2")
        await pilot.pause()
        assert "there is no run store" in screen(app)
        assert "Is it alive" in screen(app), "what was seen last stays"
        store.write_text("nonsense " * 1000)
        await pilot.press("3")
        await pilot.pause()
        assert "cannot read the run store" in screen(app)
        store.unlink()
        plant(tmp_path / "run", gain=0.5)
        told = await seen(app, pilot, "1")
        assert "cannot read" not in told
        assert "gain +53.00" in told
        with sqlite3.connect(store) as connection:
            connection.execute("DROP TABLE head")
            connection.execute("UPDATE seed SET stage = 'ASLEEP'")
        await pilot.press("4")
        await pilot.pause()
        assert "no such table: head" in flat(screen(app))
        await pilot.press("2")
        await pilot.pause()
        assert "is damaged: KeyError('ASLEEP'); put back a whole one" in flat(screen(app))

    watched(store, look)


def test_runs_are_compared_and_opened(tmp_path: Path) -> None:
    first, better, broken = (tmp_path / name / "run.db" for name in ("first", "second", "third"))
    plant(first.parent)
    plant(better.parent, gain=0.05, seed=6)
    broken.parent.mkdir()
    broken.write_text("no store")

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        told = await seen(app, pilot, "6")
        assert re.search(r"▸ first +5 +3 +\+3\.00", told)
        assert re.search(r"difference \+5\.00 \(\+5\.00 to \+5\.00\)  verdict better", told)
        assert re.search(r"cannot read the run store \S*third", flat(told))
        await pilot.press("down", "enter")
        await pilot.pause()
        assert app.store == better
        assert screen(app).startswith(" second  stopped")

    watched(first, look, SMALL, (first, better, broken))


def test_a_proof_shows_its_arms_and_names_are_harmless(tmp_path: Path) -> None:
    store = Store(tmp_path / "proof.db")
    store.write("summary", {"arm": ["learned", "best plan", "a\x1b[31mb"], "controller": "mine", "gain": [0.071, 0.057, 0.0],
                            "low": [0.064, 0.05, 0.0], "high": [0.079, 0.06, 0.0], "score": 0.69, "episodes": 100})
    store.commit()

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        told = await seen(app, pilot, "2", "down", "home", "left", "3", "4", "5", "1")
        assert "no round is written yet" in told
        assert re.search(r"learned +mine +\+7\.10 \(\+6\.40 to \+7\.90\)  69\.00%", told)
        assert re.search(r"best plan +mine +\+5\.70 \(\+5\.00 to \+6\.00\)", told)
        assert "a?[31mb" in told

    watched(store.path, look)


def test_every_renderer_and_stage_is_drawn_at_any_width(folder: Path) -> None:
    assert set(STAGES) == {stage.name for stage in SeedStage}
    letters = [letter for letter, _ in STAGES.values()]
    assert len(set(letters)) == len(letters), "colour is never the only sign"
    for kind in RENDERERS:
        assert "nothing to show" in draw(Table(("round",), [], "What?", kind), Place(40)).plain
    wide = Table(("arm", *"abcdefgh"), [("long name", *range(8))], "Which?", "table")
    assert "h 7" in draw(wide, Place(20)).plain, "what does not fit stands below"


def test_the_newest_run_is_found_or_one_sentence_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch"]) == 2
    assert capsys.readouterr().err == ("esper watch: there is no runs; name the folder of a run, "
                                       "or begin one with esper train\n")
    (tmp_path / "runs").mkdir()
    assert main(["watch"]) == 2
    assert "there is no run below runs" in capsys.readouterr().err
    for age, name in enumerate(("new", "old")):
        store = plant(tmp_path / "runs" / name) / "run.db"
        for path in store.parent.iterdir():
            os.utime(path, (ENDED - age, ENDED - age))
    assert _found(Path("runs")) == Path("runs/new/run.db")
    assert _found(Path("runs/old")) == Path("runs/old/run.db")
    assert main(["watch"]) == 0
    told = capsys.readouterr().out
    assert "Is it alive, and how far is it?" in told, "without a terminal the overview is printed"
    assert "gain +4.00 (+3.02 to +4.98)" in told


def test_without_textual_one_sentence_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("esper.karn.watching"):
            raise ModuleNotFoundError("No module named 'textual'", name="textual")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["watch", str(folder)]) == 2
    assert capsys.readouterr().err == ("esper watch: esper watch needs the package textual; "
                                       "install it with: pip install 'esper-morph[watch]'\n")
