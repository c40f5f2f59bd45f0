"""The run store: one SQLite file that a run writes and anybody reads. Its tables are the registry's."""

import itertools
import math
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from esper.leyline import EsperError
from esper.nissa import sealing
from esper.nissa.registry import CREATE, KEYS, SCHEMA, TABLES

_PLAIN: dict[str, Callable[[Any], Any]] = {
    "TEXT": lambda text: text.encode("utf-8", "backslashreplace").decode(), "REAL": float, "INTEGER": int}
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
LONGEST, LARGEST = 10_000_000, 100_000_000  # bytes that a query may make of one value, and of all
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
        """Make the tables of a new store, or bring those of an earlier schema here; a store of any other
        schema is refused and left as it is."""
        made, version = sealing.tables_of(self.connection), sealing.version_of(self.connection)
        if made and version not in (SCHEMA, *sealing.EARLIER):
            raise EsperError(f"the run store {self.path} has schema {version}, and this version of Esper "
                             f"writes schema {SCHEMA}; begin a new run in another folder")
        if made and not sealing.is_whole(self.connection):
            raise EsperError(f"the run store {self.path} lacks the tables of schema {version}; {_BROKEN}")
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=NORMAL")
        self.connection.execute("BEGIN IMMEDIATE")
        with self.connection:
            if made and version != SCHEMA:
                if found := sealing.damage(self.connection):
                    raise _damaged(self.path, found)
                sealing.migrate(self.connection)
            elif not sealing.tables_of(self.connection):
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
        rounds = {row[0] for table, rows in self.waiting if table in sealing.BY_ROUND for row in rows}
        scopes = [f"round {number}" for number in rounds] or [sealing.ALL] * bool(self.waiting)
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            with self.connection:
                for table, rows in self.waiting:
                    marks = ", ".join("?" * len(TABLES[table]))
                    self.connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
                for scope in scopes:
                    sealing.seal(self.connection, scope)
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
            made, version = sealing.tables_of(connection), sealing.version_of(connection)
            if made and sealing.SEAL not in made and version < SCHEMA:
                raise EsperError(f"the run store {path} has schema {version}, which has no seals: it can be "
                                 "read, but not verified")
            found = sealing.damage(connection)
    except _ERRORS as error:
        if ADVICE.get(_code(error), _BROKEN) is not _BROKEN:
            raise _trouble("read", path, error) from error
        found = str(error)
    if found:
        raise _damaged(path, found)


def reader(path: str | Path) -> sqlite3.Connection:
    """A read-only connection with the tables of this schema, which may be used from any thread. A store of an
    earlier schema is copied into memory and brought here; its file stays as it is."""
    try:
        connection = _readable(path, anywhere=True)
        version = sealing.version_of(connection)
        if version == SCHEMA:
            return connection
        with closing(connection):
            if version not in sealing.EARLIER or not sealing.is_whole(connection):
                raise EsperError(f"the run store {path} has schema {version}, and this version of Esper "
                                 f"reads schema {SCHEMA}; use the version that wrote it")
            copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            connection.backup(copy)
            if sealing.version_of(copy) != SCHEMA:  # its run may have brought it here meanwhile
                sealing.migrate(copy)
            copy.execute("PRAGMA query_only = 1")
            return copy
    except _ERRORS as error:
        raise _trouble("read", path, error) from error


def ask(path: str | Path, query: str, most: int = 1000,
        seconds: float = 10.0) -> tuple[list[str], list[tuple[Any, ...]], bool]:
    """(columns, rows, are there more?) of anybody's SELECT: it can change nothing, reach no other file, and
    ends after so many rows or seconds."""
    if most < 1 or not seconds > 0:
        raise EsperError("a query needs at least one row and more than 0 seconds")
    deadline = time.monotonic() + seconds
    with closing(reader(path)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        connection.set_authorizer(lambda action, *about: sqlite3.SQLITE_OK if action in _ALLOWED
                                  else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            found, rows, size = connection.execute(query), list[tuple[Any, ...]](), 0
            for row in itertools.islice(found, min(most, sys.maxsize - 1) + 1):
                rows.append(row)
                size += sum(len(value) for value in row if isinstance(value, (str, bytes)))
                if size > LARGEST:
                    raise EsperError(f"the answer has more than {LARGEST:,} bytes; ask for less")
        except (*_ERRORS, sqlite3.Warning, ValueError) as error:
            if _code(error) == sqlite3.SQLITE_INTERRUPT:
                raise EsperError(f"the query took more than {seconds:g} s; "
                                 "ask for less, or allow more") from error
            raise EsperError(f"cannot answer the query: {error}; it must be one SELECT on the tables of "
                             "docs/store.md") from error
        if found.description is None:
            raise EsperError("the query asks for nothing; it must be one SELECT")
        return [column[0] for column in found.description], rows[:most], len(rows) > most


def _damaged(path: str | Path, found: str) -> EsperError:
    return EsperError(f"the run store {path} is damaged: {found}; {_BROKEN}")


def _readable(path: str | Path, anywhere: bool = False) -> sqlite3.Connection:
    if not Path(path).exists():
        raise EsperError(f"there is no run store at {path}")
    place = Path(path).resolve().as_uri()  # ?, # and % of its name are escaped
    return sqlite3.connect(f"{place}?mode=ro", timeout=PATIENCE, isolation_level=None, uri=True,
                           check_same_thread=not anywhere)


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
