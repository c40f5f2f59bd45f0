"""The run store: one SQLite file that a run writes and anybody reads meanwhile. Its tables are the registry's."""

import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from esper.leyline import EsperError
from esper.nissa.registry import TABLES, Metric


class Store:
    """A sink. Rows gather in memory and are written in one transaction by `commit`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.waiting: list[tuple[str, list[tuple[Any, ...]]]] = []
        try:
            self.connection = sqlite3.connect(self.path, isolation_level=None)
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=NORMAL")
            for table, columns in TABLES.items():
                self.connection.execute(_create(table, columns))
        except sqlite3.Error as error:
            raise EsperError(f"cannot open the run store {self.path}: {error}; see that its folder has room and may be "
                             "written") from error

    def write(self, table: str, columns: Mapping[str, object]) -> None:
        """Columns of equal length; a single value stands for all rows. Unknown names and impossible values are refused."""
        if table not in TABLES:
            raise EsperError(f"the run store has no table {table!r}; there are {', '.join(TABLES)}")
        metrics = TABLES[table]
        unknown, keys = set(columns) - set(metrics), {name for name, metric in metrics.items() if metric.key}
        if unknown or not keys <= set(columns):
            raise EsperError(f"table {table!r} has no column {', '.join(sorted(unknown))}" if unknown else
                             f"table {table!r} needs {', '.join(sorted(keys - set(columns)))}")
        lists = {name: _listed(values) for name, values in columns.items()}
        length = max((len(values) for values in lists.values() if values is not None), default=1)
        whole = {name: _checked(table, name, metrics[name], values if values is not None else [columns[name]] * length)
                 for name, values in lists.items()}
        if any(len(values) != length for values in whole.values()):
            raise EsperError(f"table {table!r} got columns of different lengths: "
                             f"{', '.join(f'{name} {len(values)}' for name, values in whole.items())}")
        none = [None] * length
        self.waiting.append((table, list(zip(*(whole.get(name, none) for name in metrics), strict=True))))

    def commit(self) -> None:
        """Write what is waiting, all of it or nothing."""
        try:
            self.connection.execute("BEGIN")
            for table, rows in self.waiting:
                marks = ", ".join("?" * len(TABLES[table]))
                self.connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
            self.connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise EsperError(f"cannot write the run store {self.path}: {error}; free some space and resume the run") from error
        self.waiting.clear()

    def close(self) -> None:
        self.connection.close()


def read(path: str | Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """Rows of a read-only query, also while a run writes."""
    if not Path(path).exists():
        raise EsperError(f"there is no run store at {path}")
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise EsperError(f"cannot read the run store {path}: {error}") from error


def _create(table: str, columns: Mapping[str, Metric]) -> str:
    keys = ", ".join(name for name, metric in columns.items() if metric.key)
    body = ", ".join(f'"{name}" {metric.kind}' for name, metric in columns.items())
    return f"CREATE TABLE IF NOT EXISTS {table} ({body}, PRIMARY KEY ({keys})) WITHOUT ROWID"


def _listed(values: object) -> list[Any] | None:
    """A column as a list; None for a single value."""
    if isinstance(values, Tensor):
        return values.tolist() if values.dim() else None
    return list(values) if isinstance(values, (list, tuple)) else None


def _checked(table: str, name: str, metric: Metric, values: list[Any]) -> list[Any]:
    """NaN and missing are NULL; text is text; numbers lie in their range."""
    out: list[Any] = []
    for value in values:
        plain = value.item() if isinstance(value, Tensor) else value
        if plain is None or (isinstance(plain, float) and not math.isfinite(plain)):
            out.append(None)
            continue
        if metric.kind != "TEXT" and not metric.low <= plain <= metric.high:
            raise EsperError(f"{table}.{name} cannot be {plain}: it lies in {metric.low} .. {metric.high}")
        out.append(plain if metric.kind == "TEXT" else float(plain) if metric.kind == "REAL" else int(plain))
    return out
