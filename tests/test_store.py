"""The run store: made from its registry, strict at the door, readable while it is written."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.store import LINES, columns

from esper.leyline import EsperError
from esper.nissa import TABLES, Store, read
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
    parts = " - ".join(f"ifnull(reward_{name}, 0)" for name in ("gain", "size", "compute", "credit", "potential"))
    worst = read(path, f"SELECT max(abs(reward - {parts})) FROM step")
    assert worst[0][0] < 1e-6


def test_missing_is_null_and_never_a_number(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    facts = columns(3, 0, 1) | {"loss": torch.tensor([0.5, torch.nan, torch.inf])}
    del facts["twin"]
    store.write("step", facts)
    store.commit()
    assert read(store.path, "SELECT loss, twin FROM step ORDER BY row") == [(0.5, None), (None, None), (None, None)]


@pytest.mark.parametrize(("change", "message"), [
    ({"fame": 1.0}, "table 'step' has no column fame"), ({"accuracy": 1.5}, r"step.accuracy cannot be 1.5: it lies in 0 .. 1"),
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
    with pytest.raises(EsperError, match="cannot open the run store"):
        Store(tmp_path / "no" / "run.db")


def test_other_processes_read_while_it_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    store.write("step", columns(16, 0, 1))
    store.commit()
    store.connection.execute("BEGIN IMMEDIATE")  # a commit in progress
    code = "from esper.nissa import read; import sys; print(read(sys.argv[1], 'SELECT count(*) FROM step')[0][0])"
    seen = subprocess.run([sys.executable, "-c", code, str(store.path)], capture_output=True, text=True, check=True)
    store.connection.execute("ROLLBACK")
    assert seen.stdout.strip() == "16"


def test_an_epoch_of_256_environments_is_cheap(tmp_path: Path) -> None:
    """As `benchmarks/store.py` measures it beside a reader in another process."""
    store, commits, queries = Store(tmp_path / "run.db"), [], []
    for epoch in range(1, 31):
        store.write("step", columns(256, 0, epoch))
        started = time.perf_counter()
        store.commit()
        commits.append(time.perf_counter() - started)
        started = time.perf_counter()
        read(store.path, "SELECT op, count(*), avg(reward) FROM step WHERE round = 0 GROUP BY op")
        queries.append(time.perf_counter() - started)
    assert 1000 * statistics.median(commits) < LINES["commit_ms"]
    assert 1000 * statistics.median(queries) < LINES["query_ms"]
    store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert store.path.stat().st_size / (256 * 30) < LINES["bytes_per_environment_epoch"]


def test_the_published_figures_hold_their_lines() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "store.json").read_text())
    assert (result["environments"], result["epochs"]) == (256, 30)
    assert all(result[name] < line for name, line in LINES.items())
    said = (f"{result['commit_ms']:.1f} ms to commit an epoch, {result['bytes_per_environment_epoch']:.0f} bytes per environment "
            f"and epoch, {result['query_ms']:.1f} ms for a reader's question")
    assert said in " ".join((ROOT / "experiments" / "README.md").read_text().split())


def test_a_full_disk_stops_with_one_sentence(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
    store.connection.execute(f"PRAGMA max_page_count={pages + 1}")
    for epoch in range(1, 20):
        store.write("step", columns(256, 0, epoch))
    with pytest.raises(EsperError, match=r"cannot write the run store .*full.*; free some space and resume the run"):
        store.commit()
    store.connection.execute("PRAGMA max_page_count=100000")
    store.commit()
    assert read(store.path, "SELECT count(*) FROM step") == [(256 * 19,)], "nothing was lost"
