"""Panels of a planted run, to the digit; questions of one's own; runs of a folder."""

import csv
import inspect
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from esper.cli import main
from esper.karn import PAGES, PANELS, Run, compare, open_run, panels
from esper.karn.drawn import RENDERERS
from esper.leyline import EsperError
from esper.leyline.storage import locked
from esper.nissa import SCHEMA, Store, ask, read, verify
from esper.nissa.registry import INCIDENT
from esper.simic.metrics import AnomalyDetector
from esper.simic.training import Training
from tests.planted import BIRTH, ENDED, EPOCHS, FACTS, KEPT, plant

Z = 1.96
SPREAD = Z * 100 * (4 * 0.01**2 / 3) ** 0.5 / 2
"""Half an interval of four utilities that lie 0.01 around their mean, in points."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("runs") / "planted")


@pytest.fixture
def run(folder: Path) -> Run:
    return open_run(folder, clock=lambda: ENDED + 25)


ANSWERS = {
    "state": [("stopped", "toys", 3, 4, 5.0, 10.0, 3.2, 4.0, 4 - Z / 2, 4 + Z / 2, 1)],
    "learning": [(number, gain, gain - Z / 2, gain + Z / 2) for number, gain in enumerate((1.0, 2.0, 4.0))],
    "exams": [("heuristic", 3, 1.0, 1 - SPREAD, 1 + SPREAD, 4),
              *(("learned", n, float(n), n - SPREAD, n + SPREAD, 4) for n in (1, 2, 3))],
    "arms": [],
    "incidents": [("starved", "slot gradient", 1, None, 2, 0.0, 0.0), ("rollback", "hosts", 1, 2, 1, 1.0, 1.0),
                  ("entropy_collapse", "op", 0, 1, 1, 0.02, 0.02)],
    "cost": [(3, 30.0, 96, 12, None, None)],
    "lives": [(0, 0, "mixer", 1, 2, 4, 4, "kept", 3.125, 1.5625, 25.0),
              (2, 1, "norm", 3, None, None, None, "unfinished", 1.5625, 0.78125, None)],
    "hosts": [(0, 4, 200, "FOSSILIZE", 50.0, 50.0, 0.0, 0, 1, ["FOSSILIZED", "DORMANT"], ["mixer", None], [1.0, None]),
              (1, 4, 201, "WAIT", 56.25, 50.0, 6.25, 0, 1, ["DORMANT", "DORMANT"], [None, None], [None, None]),
              (2, 4, 202, "WAIT", 62.5, 50.0, 12.5, 0, 1, ["DORMANT", "TRAINING"], [None, "norm"], [None, 0.0]),
              (3, 4, 203, "WAIT", 68.75, 50.0, 18.75, 0, 1, ["DORMANT", "DORMANT"], [None, None], [None, None])],
    "host": [(1, 50.0, 50.0, 0.0, 3.125, 1.0, 10), *((n, 50.0, 50.0, 0.0, 6.25, 1.0, 10 * (n == 4)) for n in (2, 3, 4))],
    "slots": [(epoch, 0, stage, "mixer", (0.0, 0.5, 1.0, 1.0)[epoch - 1], 3.125 if epoch > 1 else None,
               6.25 if epoch == 1 else None, 1.5625) for epoch, stage in enumerate(KEPT, 1)],
    "decisions": [(1, "GERMINATE", 0, "mixer", 25.0, 50.0, 50.0, 50.0, 12.5, 21.875, 0, "kept"),
                  (2, "WAIT", None, None, 50.0, 50.0, None, None, 12.5, 18.75, 0, None),
                  (3, "WAIT", None, None, 50.0, 50.0, None, None, 12.5, 12.5, 0, None),
                  (4, "FOSSILIZE", 0, None, 25.0, 50.0, 50.0, None, 12.5, 6.25, 0, None)],
    "heads": [("blueprint", n, 100.0, 0.25, 1.0) for n in range(3)] + [
        ("op", n, (2.0, 50.0, 50.0)[n], 1.0, 1.0) for n in range(3)] + [
        ("slot", n, 75.0, 0.5, float(n == 0)) for n in range(3)],
    "update": [(n, 1.5 - n / 4, 0.01 * (1 + n), 0.1, 0.5, 0.25 * n, 1.0, 0.001) for n in range(3)],
    "actions": [("WAIT", 45, 93.75), ("GERMINATE", 2, 100 / 24), ("FOSSILIZE", 1, 100 / 48)],
    "blueprints": [("attention", 0, 0, 0.0), ("mixer", 1, 1, 50.0), ("norm", 1, 0, 50.0)],
    "rewards": [(n, 6.25 - part, 6.25, -part, 0.0, None, None) for n, part in enumerate((0.78125, 0.0, 0.78125, 0.0), 1)],
}


def flat(rows: list[tuple]) -> list:
    return [pytest.approx(value, abs=1e-9) if isinstance(value, float) else value for row in rows for value in row]


@pytest.mark.parametrize("name", PANELS)
def test_every_panel_shows_what_was_planted(name: str, run: Run) -> None:
    table = run.panel(name)
    assert table.columns == PANELS[name].columns
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert [value for row in table.rows for value in row] == flat(ANSWERS[name])
    assert table.question[-1] in "?."
    assert table.renderer in RENDERERS
    assert json.loads(json.dumps(table.json()))["rows"] == [list(row) for row in table.rows]


def test_every_panel_has_a_page_and_every_answer_a_panel() -> None:
    assert sorted(name for names in PAGES.values() for name in names) == sorted(PANELS) == sorted(ANSWERS)


def test_the_pages_in_words_name_every_panel_and_every_incident() -> None:
    text = (Path(__file__).parent.parent / "docs" / "panels.md").read_text()
    for name, panel in PANELS.items():
        assert f"| `{name}` | {panel.page} | {panel.question} | {panel.renderer} |" in text
    source = inspect.getsource(AnomalyDetector._signs) + inspect.getsource(Training._report) + inspect.getsource(panels)
    named = re.search(r"Incidents open and close: (.*?)\.", text, re.DOTALL)
    assert named is not None
    for kind in re.findall(r"`(\w+)`", named[1] + "`stalled`"):
        assert f'"{kind}"' in source, kind


def test_the_view_has_the_columns_that_are_described(folder: Path) -> None:
    assert [row[1] for row in read(folder / "run.db", "PRAGMA table_info(incident)")] == list(INCIDENT)


def test_a_birth_is_where_and_when_it_was(run: Run) -> None:
    before, after = (run.panel("hosts", epoch=epoch).rows[BIRTH["row"]] for epoch in (BIRTH["epoch"] - 1, BIRTH["epoch"]))
    assert (before[9], after[9]) == (["DORMANT", "DORMANT"], ["DORMANT", "TRAINING"])
    assert after[10][BIRTH["slot"]] == BIRTH["blueprint"]
    slots = run.panel("slots", row=BIRTH["row"]).rows
    assert slots == [(epoch, 1, "TRAINING", "norm", 0.0, None, 1.5625, 0.78125) for epoch in (3, 4)]
    assert run.panel("decisions", row=BIRTH["row"]).rows[2][1:4] == ("GERMINATE", 1, "norm")
    assert run.panel("decisions", row=BIRTH["row"]).rows[2][-1] == "unfinished"
    assert not run.panel("slots", round=1, row=BIRTH["row"]).rows


def test_a_selection_is_taken_or_refused(run: Run) -> None:
    assert [row[7] for row in run.panel("hosts", round=1, epoch=1).rows] == [0, 0, 0, 0]
    assert [row[7] for row in run.panel("hosts", round=1).rows] == [0, 1, 0, 0], "the rollback at epoch 2"
    assert run.panel("actions", last=1).rows[0] == ("WAIT", 13, 81.25)
    assert run.panel("actions", round=1).rows == [("WAIT", 32, 100.0)]
    extent = run.extent(1)
    assert (extent.rounds, extent.round, extent.epochs, extent.rows) == ((0, 2), 1, EPOCHS, [0, 1, 2, 3])
    assert extent.slots == FACTS["slots"]
    with pytest.raises(EsperError, match="no panel 'fame'; there are state, learning"):
        run.panel("fame")
    with pytest.raises(EsperError, match="a panel has no slot to choose; only round, epoch, row and last"):
        run.panel("hosts", slot=1)


def test_an_empty_store_has_nothing_to_show(tmp_path: Path) -> None:
    Store(tmp_path / "run.db").close()
    with open_run(tmp_path) as run:
        assert [name for name in PANELS if run.panel(name).rows] == ["state"]
        assert run.panel("state").rows == [("finished", None, 0, *[None] * 7, 0)]
        assert run.extent().rounds is None


def test_news_are_cheap_to_ask_for(tmp_path: Path) -> None:
    store = Store(plant(tmp_path / "run") / "run.db")
    with open_run(store.path) as run:
        assert not run.changed()
        store.write("round", {"round": 3, "utility": 0.08, "utility_error": 0.005})
        store.commit()
        assert (run.changed(), run.changed()) == (True, False)
        assert run.panel("learning").rows[-1][:2] == (3, 8.0)
        assert ("starved", "slot gradient", 1, 3) in [row[:4] for row in run.panel("incidents").rows], "it is over"
        assert run.state() == "finished"


def test_a_run_that_is_late_is_an_incident_while_somebody_works_on_it(tmp_path: Path) -> None:
    plant(tmp_path)
    for late in (59, 61):  # five times the usual ten seconds, and a minute at least
        with open_run(tmp_path, clock=lambda late=late: ENDED + 20 + late) as run:
            assert run.panel("incidents").rows[0][0] == "starved"
            with locked(tmp_path):
                assert run.state() == "running"
                expected = ("stalled", "round", 3, None, 0, 61.0, 61.0) if late > 60 else ANSWERS["incidents"][0]
                assert run.panel("incidents").rows[0] == expected
                assert run.panel("state").rows[0][-1] == 1 + (late > 60)
    assert run.path.parent == tmp_path


@pytest.mark.parametrize(("gain", "verdict"), [(0.05, "better"), (-0.05, "worse")])
def test_a_difference_is_paired_and_judged(gain: float, verdict: str, folder: Path, tmp_path: Path) -> None:
    with open_run(folder) as first, open_run(plant(tmp_path / "other", gain, seed=6)) as other:
        rows = compare([first, other]).rows
        assert [row[:3] for row in rows] == [("planted", 5, 3), ("other", 6, 3)]
        assert rows[1][8:] == (*[pytest.approx(100 * gain)] * 3, verdict)
        unlike = compare([first, other], "heuristic").rows[1]
        assert unlike[8:] == (0.0, 0.0, 0.0, "may be luck")
        assert compare([first, other], "nobody").rows[1][2:] == (*[None] * 9, "not examined")
    with pytest.raises(EsperError, match="no run to compare"):
        compare([])


def test_other_families_are_not_paired(folder: Path, tmp_path: Path) -> None:
    store = Store(plant(tmp_path / "other", 0.01) / "run.db")
    store.write("fact", {"round": 3, "name": "family", "value": '"cats"'})
    store.commit()
    with open_run(folder) as first, open_run(store.path) as other:
        mean, low, high, verdict = compare([first, other]).rows[1][8:]
    half = Z * 100 * (2 * (4 * 0.01**2 / 3) / 4) ** 0.5
    assert (mean, low, high) == (pytest.approx(1.0), pytest.approx(1 - half), pytest.approx(1 + half))
    assert verdict == "may be luck"


def old(path: Path) -> Path:
    """A store as Esper wrote it when schemas were 2."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((Path(__file__).parent / "schema2.sql").read_text())
    return path


def test_a_store_of_the_schema_before_is_looked_at_as_it_is_and_goes_on(tmp_path: Path) -> None:
    path = old(tmp_path / "run.db")
    before = path.read_bytes()
    verify(path)
    with open_run(path) as run:
        assert run.panel("learning").rows == [(0, 37.5, None, None)]
        assert run.panel("incidents").rows == [("starved", "op gradient", 0, None, 1, 0.0, 0.0)]
        assert run.panel("actions").rows == [("PRUNE", 1, 50.0), ("WAIT", 1, 50.0)]
    assert ask(path, "SELECT op, chance FROM step ORDER BY row")[1] == [("WAIT", None), ("PRUNE", None)]
    assert path.read_bytes() == before, "who looks changes nothing"
    store = Store(path)
    verify(path)
    store.write("seed", {"round": 1, "epoch": 1, "row": 0, "slot": 0, "stage": "TRAINING"})
    store.commit()
    verify(path)
    assert read(path, "PRAGMA user_version") == [(SCHEMA,)]
    assert read(path, "SELECT op, reward FROM step ORDER BY row") == [("WAIT", 0.5), ("PRUNE", 0.25)]


def test_a_damaged_store_of_the_schema_before_is_not_brought_along(tmp_path: Path) -> None:
    path = old(tmp_path / "run.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE step SET reward = 9")
        connection.commit()
    with pytest.raises(EsperError, match=r"damaged: the rows of round 0 are not those that were sealed"):
        Store(path)
    assert read(path, "PRAGMA user_version") == [(2,)]


QUESTIONS = {
    "DELETE FROM step": "not authorized", "DROP TABLE step": "not authorized", "PRAGMA user_version = 9": "not authorized",
    "ATTACH 'other.db' AS other": "not authorized", "VACUUM INTO 'copy.db'": "authorization denied", "CREATE TEMP TABLE a (b)": "not authorized",
    "SELECT fame FROM step": "no such column: fame", "SELECT 1; DELETE FROM step": "one statement", "": "asks for nothing",
    "SELECT load_extension('x')": "not authorized", "SELECT zeroblob(1000000000)": "too big",
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT sum(x) FROM n": "took more than 0.2 s; ask for less"}


@pytest.mark.parametrize("query", QUESTIONS)
def test_a_question_changes_nothing_and_ends(query: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    with pytest.raises(EsperError, match=QUESTIONS[query]):
        ask(folder / "run.db", query, seconds=0.2)
    assert time.monotonic() - started < 5
    assert not list(tmp_path.iterdir())
    verify(folder / "run.db")


def test_a_question_gets_so_many_rows(folder: Path) -> None:
    query = "SELECT epoch, row FROM step ORDER BY round, epoch, row"
    assert ask(folder / "run.db", query, most=2) == (["epoch", "row"], [(1, 0), (1, 1)], True)
    assert ask(folder / "run.db", query, most=48)[2] is False
    assert len(ask(folder / "run.db", query, most=2**70)[1]) == 48
    for wrong in ({"most": 0}, {"seconds": 0}, {"seconds": float("nan")}):
        with pytest.raises(EsperError, match="at least one row and more than 0 seconds"):
            ask(folder / "run.db", query, **wrong)
    with pytest.raises(EsperError, match="more than 100,000,000 bytes; ask for less"):
        ask(folder / "run.db", "SELECT zeroblob(9000000) FROM step")


def test_the_command_prints_csv_and_says_what_it_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = "SELECT blueprint, chance, op || ',' AS odd FROM step WHERE slot IS NOT NULL ORDER BY epoch"
    assert main(["sql", str(folder), query, "--csv", "--rows", "3"]) == 0
    said = capsys.readouterr()
    assert list(csv.reader(io.StringIO(said.out))) == [
        ["blueprint", "chance", "odd"], ["mixer", "0.25", "GERMINATE,"], ["norm", "0.25", "GERMINATE,"], ["", "0.25", "FOSSILIZE,"]]
    assert said.err == ""
    assert main(["sql", str(folder), "SELECT row FROM step", "--rows", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.split() == ["row", "0"]
    assert said.err == "esper sql: only the first 1 rows; --rows N prints more\n"
    assert main(["sql", str(folder), "DELETE FROM step"]) == 2
    assert main(["sql", str(folder / "none"), "SELECT 1"]) == 2
    assert "there is no run store" in capsys.readouterr().err


def test_runs_of_a_folder_are_told_by_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("stopped", "running", "deep/down/finished", "broken", "torn", "odd"):
        plant(tmp_path / name)
    store = Store(tmp_path / "deep" / "down" / "finished" / "run.db")
    store.write("fact", {"round": 3, "name": "rounds", "value": "3"})
    store.commit()
    store.close()
    with closing(sqlite3.connect(tmp_path / "odd" / "run.db")) as connection, connection:
        connection.execute("UPDATE exam SET utility = 'x'")
    (tmp_path / "broken" / "run.db").write_bytes(b"no store")
    whole = (tmp_path / "torn" / "run.db").read_bytes()
    (tmp_path / "torn" / "run.db").write_bytes(whole[:9000])
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text("{}")
    with locked(tmp_path / "running"):
        assert main(["runs", str(tmp_path), "--json"]) == 0
        found = {each["run"]: each for each in json.loads(capsys.readouterr().out)}
        assert main(["runs", str(tmp_path)]) == 0
    states = {name: each["state"] for name, each in found.items()}
    assert states == {"stopped": "stopped", "running": "running", "deep/down/finished": "finished", "broken": "broken",
                      "torn": "broken", "odd": "broken", "begun": "stopped"}
    assert (found["running"]["family"], found["running"]["rounds"], found["running"]["best"]) == ("toys", "3/4", 3.0)
    assert "not a database" in found["broken"]["why"]
    shown = capsys.readouterr().out
    assert f"+3.0 ({3 - SPREAD:+.1f} to {3 + SPREAD:+.1f})" in shown
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    assert main(["runs", str(tmp_path / "running"), "--json"]) == 0, "a run itself is below its folder"
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / "empty")]) == 2


def test_panels_and_comparisons_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", str(folder), "slots", "--at", "row=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0][:4] == [3, 1, "TRAINING", "norm"]
    assert main(["runs", "show", str(folder), "blueprints"]) == 0
    assert "attention  0           0     0.00" in capsys.readouterr().out
    assert main(["runs", "compare", str(folder), str(folder)]) == 0
    assert "may be luck" in capsys.readouterr().out
    assert main(["runs", "show", str(folder), "fame"]) == 2
    for wrong in ("x", "9" * 20, "9" * 5000):
        assert main(["runs", "show", str(folder), "slots", "--at", f"row={wrong}"]) == 2
        assert "--at row needs a number, as in --at row=2" in capsys.readouterr().err


KILLED = """
import sys
from benchmarks.store import columns
from esper.nissa import Store
store = Store(sys.argv[1])
for number in range(10**6):
    for epoch in range(1, 4):
        store.write("step", columns(16, number, epoch))
    store.write("round", {"round": number, "seconds": 1.0})
    store.commit()
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_rounds(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "run.db"], stdout=subprocess.PIPE, text=True, cwd=root,
                               env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root), str(root / "benchmarks")])})
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(5)]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with open_run(tmp_path) as run:
        assert run.rows("SELECT count(*) FROM (SELECT round FROM step GROUP BY round HAVING count(*) != 48)") == [(0,)]
        assert run.rows("SELECT max(round) >= 4, count(*) = 1 + max(round) FROM round") == [(1, 1)]
    assert told[-1] == "4\n"
    verify(tmp_path / "run.db")
