"""The run store: made from its registry, strict at the door, readable while it is written, sealed."""

import json
import random
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from benchmarks.store import LINES, columns

from esper.leyline import EsperError
from esper.nissa import SCHEMA, TABLES, Store, read, verify
from esper.nissa.registry import Metric

ROOT = Path(__file__).parent.parent


def test_tables_are_the_registry(tmp_path: Path) -> None:
    Store(tmp_path / "run.db").close()
    for table, metrics in TABLES.items():
        made = read(tmp_path / "run.db", f"PRAGMA table_info({table})")
        assert [(row[1], row[2]) for row in made] == [(name, metric.kind) for name, metric in metrics.items()]
        assert {row[1] for row in made if row[5]} == {name for name, metric in metrics.items() if metric.key}
        assert all(metric.help for metric in metrics.values())
    with pytest.raises(TypeError, match="INTEGER, REAL or TEXT"):
        Metric("BLOB", "no")


def test_nothing_is_kept_before_a_commit_and_all_of_it_after(tmp_path: Path) -> None:
    path, store = tmp_path / "run.db", Store(tmp_path / "run.db")
    store.write("step", columns(8, 0, 1))
    assert read(path, "SELECT count(*) FROM step") == [(0,)]
    store.commit()
    assert read(path, "SELECT count(*), sum(round), min(epoch) FROM step") == [(8, 0, 1)]
    store.write("step", columns(8, 0, 1))
    store.commit()
    assert read(path, "SELECT count(*) FROM step") == [(8,)], "the same epoch again replaces itself"
    parts = [f"ifnull(reward_{name}, 0)" for name in ("gain", "size", "compute", "credit", "potential")]
    worst = read(path, f"SELECT max(abs(reward - {' - '.join(parts)})) FROM step")
    assert worst[0][0] < 1e-6


def test_missing_is_null_and_never_a_number(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    facts = columns(3, 0, 1) | {"loss": torch.tensor([0.5, torch.nan, torch.inf])}
    del facts["twin"]
    store.write("step", facts)
    store.commit()
    found = read(store.path, "SELECT loss, twin FROM step ORDER BY row")
    assert found == [(0.5, None), (None, None), (None, None)]


def test_text_that_is_no_unicode_does_not_stop_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    store.write("worker", {"round": 0, "shard": 0, "log": "printed \udce4"})
    store.commit()
    assert read(store.path, "SELECT log FROM worker") == [("printed \\udce4",)]
    verify(store.path)


@pytest.mark.parametrize(("change", "message"), [
    ({"fame": 1.0}, "table 'step' has no column fame"),
    ({"smooth": 1.5}, r"step.smooth cannot be 1.5: it lies in 0 .. 1"),
    ({"loss": torch.rand(2)}, "columns of different lengths: .*loss 2"),
])
def test_what_does_not_fit_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    with pytest.raises(EsperError, match=message):
        store.write("step", columns(3, 0, 1) | change)
    assert not store.waiting
    with pytest.raises(EsperError, match="table 'step' needs epoch, round, row"):
        store.write("step", {"loss": 0.1})
    with pytest.raises(EsperError, match="no table 'fame'"):
        store.write("fame", {})
    with pytest.raises(EsperError, match="there is no run store"):
        read(tmp_path / "none.db", "SELECT 1")
    with pytest.raises(EsperError, match=r"cannot open the run store .*see that its folder exists"):
        Store(tmp_path / "no" / "run.db")


def test_other_processes_read_while_it_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    store.write("step", columns(16, 0, 1))
    store.commit()
    store.connection.execute("BEGIN IMMEDIATE")  # a commit in progress
    code = "from esper.nissa import read; import sys; print(read(sys.argv[1], 'SELECT count(*) FROM step'))"
    seen = subprocess.check_output([sys.executable, "-c", code, store.path], text=True)
    store.connection.execute("ROLLBACK")
    assert seen.strip() == "[(16,)]"


def test_a_round_of_256_environments_is_cheap(tmp_path: Path) -> None:
    """Committed and sealed at its end, as `Training` does; `benchmarks/store.py` measures it beside a reader.

    In time of this process: others may keep the cores busy."""
    store, commits, queries = Store(tmp_path / "run.db"), [], []
    for number in range(3):
        for epoch in range(1, 31):
            store.write("step", columns(256, number, epoch))
        started = time.process_time()
        store.commit()
        commits.append((time.process_time() - started) / 30)
        started = time.process_time()
        read(store.path, "SELECT op, count(*), avg(reward) FROM step WHERE round = ? GROUP BY op", number)
        queries.append(time.process_time() - started)
    assert 1000 * statistics.median(commits) < LINES["commit_ms"]
    assert 1000 * statistics.median(queries) < LINES["query_ms"]
    store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert store.path.stat().st_size / (256 * 30 * 3) < LINES["bytes_per_environment_epoch"]


def test_the_published_figures_hold_their_lines() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "store.json").read_text())
    assert (result["environments"], result["epochs"]) == (256, 30)
    assert all(result[name] < line for name, line in LINES.items())
    said = (f"{result['commit_ms']:.1f} ms to commit an epoch, "
            f"{result['bytes_per_environment_epoch']:.0f} bytes per environment and epoch, "
            f"{result['query_ms']:.1f} ms for a viewer's panels")
    assert said in " ".join((ROOT / "experiments" / "README.md").read_text().split())


def test_a_full_disk_stops_with_one_sentence(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
    store.connection.execute(f"PRAGMA max_page_count={pages + 1}")
    for epoch in range(1, 20):
        store.write("step", columns(256, 0, epoch))
    with pytest.raises(EsperError, match=r"cannot write the run store .*full.*; free some space and resume"):
        store.commit()
    store.connection.execute("PRAGMA max_page_count=100000")
    store.commit()
    assert read(store.path, "SELECT count(*) FROM step") == [(256 * 19,)], "nothing was lost"


def test_a_lock_is_waited_for_and_then_called_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "run.db")
    store.write("step", columns(4, 0, 1))
    with closing(sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.5, other.execute, ("ROLLBACK",))
        release.start()
        store.commit()
        release.join()
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr("esper.nissa.store.PATIENCE", 0.0)
        with pytest.raises(EsperError, match=r"cannot open the run store .*another program has locked it"):
            Store(store.path)
    assert read(store.path, "SELECT count(*) FROM step") == [(4,)]


@pytest.mark.parametrize("name", ["why?.db", "a#b.db", "100%41.db", "two words.db"])
def test_any_name_can_be_read_and_nothing_is_made_beside_it(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path / name)
    store.write("step", columns(2, 0, 1))
    store.commit()
    store.close()
    verify(store.path)
    with pytest.raises(EsperError, match="readonly"):
        read(store.path, "DELETE FROM step")
    assert {path.name for path in tmp_path.iterdir()} <= {name, f"{name}-wal", f"{name}-shm"}


def test_a_store_of_another_schema_is_read_but_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with closing(sqlite3.connect(path)) as old:
        old.execute("CREATE TABLE round (round INTEGER PRIMARY KEY, utility REAL) WITHOUT ROWID")
        old.execute("INSERT INTO round VALUES (0, 0.5)")
        old.commit()
    for version, said in ((0, 1), (SCHEMA + 1, SCHEMA + 1)):
        with closing(sqlite3.connect(path)) as old:
            old.execute(f"PRAGMA user_version = {version}")
        before = path.read_bytes()
        with pytest.raises(EsperError, match=f"has schema {said}, .* writes schema {SCHEMA}; begin a new"):
            Store(path)
        assert path.read_bytes() == before
        assert read(path, "SELECT utility FROM round") == [(0.5,)]
    with closing(sqlite3.connect(path)) as old:
        old.execute(f"PRAGMA user_version = {SCHEMA}")
    with pytest.raises(EsperError, match=f"lacks the tables of schema {SCHEMA}; put back a whole one"):
        Store(path)
    with closing(sqlite3.connect(path)) as old:
        old.execute("PRAGMA user_version = 0")
    with pytest.raises(EsperError, match="has schema 1, which has no seals"):
        verify(path)


def sealed(path: Path, rounds: int = 3) -> Path:
    """Rounds as a run writes them; the examination at the end of one has the number of the next."""
    store = Store(path)
    for number in range(rounds):
        store.write("step", columns(12, number, 1))
        store.commit()
        store.write("round", {"round": number, "utility": 0.1 * number, "seconds": 3.5})
        store.write("exam", {"round": number + 1, "policy": "learned", "scenario": [0, 1], "utility": 0.2})
        store.commit()
    store.close()
    return path


def contents(path: Path) -> dict[str, list]:
    return {table: read(path, f"SELECT * FROM {table}") for table in TABLES}


def behind(path: Path, change: str) -> None:
    """A change that no commit knows of."""
    with closing(sqlite3.connect(path)) as other:
        other.execute(change)
        other.commit()


def test_a_commit_seals_what_it_writes_and_nothing_else(tmp_path: Path) -> None:
    verify(sealed(tmp_path / "run.db"))
    scopes = "SELECT scope FROM seal ORDER BY scope"
    assert read(tmp_path / "run.db", scopes) == [(f"round {number}",) for number in range(4)]
    store = Store(tmp_path / "run.db")
    store.write("step", columns(12, 3, 1))
    store.commit()
    verify(store.path)  # killed in the middle of round 3
    store.write("step", columns(12, 3, 1))  # and begun again
    store.write("round", {"round": 3, "utility": 0.5})
    store.commit()
    verify(store.path)
    behind(store.path, "INSERT INTO round (round) VALUES (4)")
    with pytest.raises(EsperError, match=r"damaged: round 4 has no seal; put back"):
        verify(store.path)
    behind(store.path, "DELETE FROM round WHERE round = 4")
    verify(store.path)
    behind(store.path, "INSERT INTO arm (controller, arm, scenario) VALUES ('all', 'random', 7)")
    with pytest.raises(EsperError, match="table arm has rows that were never sealed"):
        verify(store.path)


def test_what_has_no_rounds_is_sealed_as_a_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "proof.db")
    for arm in ("random", "heuristic"):
        store.write("arm", {"controller": "all", "arm": arm, "scenario": [0, 1]})
        store.commit()
        verify(store.path)
    assert read(store.path, "SELECT scope FROM seal") == [("all",)]
    behind(store.path, "UPDATE arm SET utility = 1 WHERE arm = 'random' AND scenario = 1")
    with pytest.raises(EsperError, match="the rows of all tables are not those that were sealed"):
        verify(store.path)


@pytest.mark.parametrize("change", [
    "UPDATE step SET loss = 0.25 WHERE round = 1 AND row = 3", "DELETE FROM round WHERE round = 2",
    "UPDATE exam SET round = 7 WHERE round = 2", "DELETE FROM seal WHERE scope = 'round 1'",
    "UPDATE seal SET scope = 'sound 2' WHERE scope = 'round 2'", "UPDATE seal SET scope = '7' WHERE scope = 'round 2'",
    "UPDATE seal SET scope = 'round ²' WHERE scope = 'round 2'", "DROP TABLE head", "PRAGMA user_version = 0",
])
def test_what_is_changed_behind_the_seals_is_found(change: str, tmp_path: Path) -> None:
    path = sealed(tmp_path / "run.db")
    behind(path, change)
    with pytest.raises(EsperError, match=r"the run store .*run.db is damaged: .*; put back a whole one$"):
        verify(path)


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """One bit, one byte or a block changed, or the end cut off."""
    place, size, kind = draw.randrange(len(whole)), draw.choice((16, 512, 4096)), draw.randrange(4)
    before, here, rest = whole[:place], whole[place:place + 1], whole[place + 1:]
    block = bytes(min(size, len(whole) - place))
    return [before + bytes([here[0] ^ 1 << draw.randrange(8)]) + rest, before + draw.randbytes(1) + rest,
            before + block + whole[place + len(block):], before][kind]


def test_a_damaged_store_never_passes_with_other_contents(tmp_path: Path) -> None:
    path, draw, refused = sealed(tmp_path / "run.db"), random.Random(0), []
    whole, before = path.read_bytes(), contents(path)
    for number in range(100):
        copy = tmp_path / f"{number}.db"
        copy.write_bytes(damaged(whole, draw))
        try:
            verify(copy)
        except EsperError as error:
            refused.append(str(error))
        else:
            assert contents(copy) == before
    assert len(refused) > 30
    assert all("is damaged: " in told for told in refused)
