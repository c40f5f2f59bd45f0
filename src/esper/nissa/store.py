"""The run store: one SQLite file that a run writes and anybody reads. Its tables are the registry's.

Seals are digests of complete rows, which tell of damage that SQLite does not see.
"""

import hashlib
import math
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from esper.leyline import EsperError
from esper.nissa.registry import CREATE, KEYS, SCHEMA, TABLES

SEAL, ALL = "seal", "all"  # the table of seals, and the scope of a whole store
_BY_ROUND = [table for table, columns in TABLES.items() if "round" in columns]  # sealed round by round
_PLAIN: dict[str, Callable[[Any], Any]] = {"TEXT": lambda text: text, "REAL": float, "INTEGER": int}
PATIENCE = 60.0  # seconds that a write waits for another program's lock
_LOCKED, _SHUT = "another program has locked it; let that one end, then resume the run", "make it writable"
_BROKEN = "put back a whole one"
ADVICE = {sqlite3.SQLITE_BUSY: _LOCKED, sqlite3.SQLITE_LOCKED: _LOCKED,
          sqlite3.SQLITE_FULL: "free some space and resume the run",
          sqlite3.SQLITE_IOERR: "see that its disk works and has room, then resume the run",
          sqlite3.SQLITE_CANTOPEN: "see that its folder exists and may be written",
          sqlite3.SQLITE_READONLY: _SHUT, sqlite3.SQLITE_PERM: _SHUT,
          sqlite3.SQLITE_CORRUPT: _BROKEN, sqlite3.SQLITE_NOTADB: _BROKEN}
"""SQLite's code -> what to do."""
_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # damaged text may break the very message about it


class Store:
    """A sink. Rows gather in memory and are written in one transaction by `commit`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.waiting: list[tuple[str, list[tuple[Any, ...]]]] = []
        try:
            self.connection = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self.connection.close()
                raise
        except _ERRORS as error:
            raise _trouble("open", self.path, error) from error

    def _prepare(self) -> None:
        """Make the tables of a new store; a store of another schema is refused and left as it is."""
        if (made := _tables_of(self.connection)) and (version := _version_of(self.connection)) != SCHEMA:
            raise EsperError(f"the run store {self.path} has schema {version}, and this version of Esper "
                             f"writes schema {SCHEMA}; begin a new run in another folder")
        if made not in ({}, CREATE):
            raise EsperError(f"the run store {self.path} lacks the tables of schema {SCHEMA}; {_BROKEN}")
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=NORMAL")
        self.connection.execute("BEGIN IMMEDIATE")
        with self.connection:
            if not _tables_of(self.connection):
                for create in CREATE.values():
                    self.connection.execute(create)
                self.connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def write(self, table: str, columns: Mapping[str, object]) -> None:
        """What a `Sink` takes; unknown names and impossible values are refused."""
        if table not in TABLES:
            raise EsperError(f"the run store has no table {table!r}; there are {', '.join(TABLES)}")
        if unknown := sorted(set(columns) - set(TABLES[table])):
            raise EsperError(f"table {table!r} has no column {', '.join(unknown)}")
        if missing := sorted(set(KEYS[table]) - set(columns)):
            raise EsperError(f"table {table!r} needs {', '.join(missing)}")
        lists = {name: each.tolist() if isinstance(each, Tensor) else each for name, each in columns.items()}
        length = max((len(each) for each in lists.values() if isinstance(each, (list, tuple))), default=1)
        whole = {name: _checked(table, name, each if isinstance(each, (list, tuple)) else [each] * length)
                 for name, each in lists.items()}
        if any(len(values) != length for values in whole.values()):
            raise EsperError(f"table {table!r} got columns of different lengths: "
                             f"{', '.join(f'{name} {len(values)}' for name, values in whole.items())}")
        values = (whole.get(name, [None] * length) for name in TABLES[table])
        self.waiting.append((table, list(zip(*values, strict=True))))

    def commit(self) -> None:
        """Write what is waiting, all or nothing, and seal the rounds that it touches; without rounds, all."""
        rounds = {row[0] for table, rows in self.waiting if table in _BY_ROUND for row in rows}
        scopes = [f"round {number}" for number in rounds] or [ALL] * bool(self.waiting)
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            with self.connection:
                for table, rows in self.waiting:
                    marks = ", ".join("?" * len(TABLES[table]))
                    self.connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
                for scope in scopes:
                    row = scope, _digest(self.connection, scope)
                    self.connection.execute(f"INSERT OR REPLACE INTO {SEAL} VALUES (?, ?)", row)
        except sqlite3.Error as error:
            raise _trouble("write", self.path, error) from error
        self.waiting.clear()

    def close(self) -> None:
        self.connection.close()


def read(path: str | Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """Rows of a read-only query, also while a run writes, and from a store of any schema."""
    try:
        with closing(_readable(path)) as connection:
            return connection.execute(query, values).fetchall()
    except _ERRORS as error:
        raise _trouble("read", path, error) from error


def verify(path: str | Path) -> None:
    """Raise if the store is damaged: its rows must be those that were sealed."""
    try:
        with closing(_readable(path)) as connection:
            connection.execute("BEGIN")  # one moment of a store that is being written
            made, version = _tables_of(connection), _version_of(connection)
            if made and SEAL not in made and version < SCHEMA:
                raise EsperError(f"the run store {path} has schema {version}, which has no seals: it can be "
                                 "read, but not verified")
            found = _damage(connection)
    except _ERRORS as error:
        if ADVICE.get(_code(error), _BROKEN) is not _BROKEN:
            raise _trouble("read", path, error) from error
        found = str(error)
    if found:
        raise EsperError(f"the run store {path} is damaged: {found}; {_BROKEN}")


def _readable(path: str | Path) -> sqlite3.Connection:
    if not Path(path).exists():
        raise EsperError(f"there is no run store at {path}")
    place = Path(path).resolve().as_uri()  # ?, # and % of its name are escaped
    return sqlite3.connect(f"{place}?mode=ro", timeout=PATIENCE, isolation_level=None, uri=True)


def _code(error: Exception) -> int:
    """SQLite's primary code, the low byte of its extended ones."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _trouble(what: str, path: str | Path, error: Exception) -> EsperError:
    advice = ADVICE.get(_code(error))
    return EsperError(f"cannot {what} the run store {path}: {error}{f'; {advice}' if advice else ''}")


def _checked(table: str, name: str, values: Sequence[Any]) -> list[Any]:
    """NaN and missing are NULL; text is text; numbers lie in their range."""
    metric, out = TABLES[table][name], list[Any]()
    for value in values:
        plain = value.item() if isinstance(value, Tensor) else value
        missing = plain is None or (isinstance(plain, float) and not math.isfinite(plain))
        if not missing and metric.kind != "TEXT" and not metric.low <= plain <= metric.high:
            raise EsperError(f"{table}.{name} cannot be {plain}: it lies in {metric.low} .. {metric.high}")
        out.append(None if missing else _PLAIN[metric.kind](plain))
    return out


def _digest(connection: sqlite3.Connection, scope: str) -> str:
    """SHA-256 of the rows of a scope, table after table and each by its key, one line of ASCII for a row."""
    found, everything = hashlib.sha256(), scope == ALL
    for table, columns in TABLES.items():
        if table != SEAL and (everything or table in _BY_ROUND):
            found.update(f"{table} {', '.join(columns)}\n".encode())
            where = "" if everything else f"WHERE round = {int(scope.split()[1])}"
            for row in connection.execute(f"SELECT * FROM {table} {where} ORDER BY {', '.join(KEYS[table])}"):
                found.update(f"{row!a}\n".encode())
    return found.hexdigest()


def _version_of(connection: sqlite3.Connection) -> int:
    """Stores of schema 1 did not say so."""
    return connection.execute("PRAGMA user_version").fetchone()[0] or 1


def _tables_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Every table that there is, and how it was made."""
    return dict(connection.execute("SELECT name, sql FROM sqlite_schema"))


def _damage(connection: sqlite3.Connection) -> str:
    """What is wrong with a store; nothing, if all of its rows are as they were sealed."""
    checked = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if checked != "ok":
        return " ".join(checked.split()).removeprefix("*** in database main *** ")
    if _version_of(connection) != SCHEMA or _tables_of(connection) != CREATE:
        return f"its tables are not those of schema {SCHEMA}"
    seals = dict(connection.execute(f"SELECT scope, digest FROM {SEAL}"))
    for scope, sealed in seals.items():
        known = scope == ALL or re.fullmatch("round [0-9]+", scope)
        if not known or _digest(connection, scope) != sealed:
            return f"the rows of {'all tables' if scope == ALL else scope} are not those that were sealed"
    if ALL in seals:
        return ""
    found = {number for table in _BY_ROUND
             for (number,) in connection.execute(f"SELECT DISTINCT round FROM {table}")}
    for number in sorted({*found, *range(max(found, default=0))}):  # no round is missing
        if f"round {number}" not in seals:
            return f"round {number} has no seal"
    for table in (table for table in TABLES if table not in (*_BY_ROUND, SEAL)):
        if connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
            return f"table {table} has rows that were never sealed"
    return ""
