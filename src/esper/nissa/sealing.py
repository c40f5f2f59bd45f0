"""Seals: digests of complete rows, which tell of damage that SQLite does not see. Also what brings a store of
an earlier schema to this one."""

import hashlib
import re
import sqlite3
import sys
from array import array
from typing import Any

from esper.nissa.registry import CREATE, SCHEMA, TABLES, VIEWS

SEAL, ALL = "seal", "all"  # the table of seals, and the scope of a whole store
BY_ROUND = [table for table, columns in TABLES.items() if "round" in columns]  # sealed round by round
AT_ONCE = 512  # rows of a digest that are in memory together
EARLIER = {2: "41e23431742ad609006aaf0d435678b1fa22a3d48d4f78b113a0cd869a31780e"}
"""Schema that `migrate` understands -> SHA-256 of the statements that made its tables."""


def version_of(connection: sqlite3.Connection) -> int:
    """Stores of schema 1 did not say so."""
    return connection.execute("PRAGMA user_version").fetchone()[0] or 1


def tables_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Every table and view that there is, and how it was made."""
    return dict(connection.execute("SELECT name, sql FROM sqlite_schema"))


def is_whole(connection: sqlite3.Connection) -> bool:
    """Does it have the tables of the schema that it names, this one or an earlier one?"""
    version, made = version_of(connection), tables_of(connection)
    if version == SCHEMA:
        return made == CREATE
    form = "\n".join(made[table] for table in TABLES if table in made).encode()
    return made.keys() <= TABLES.keys() and hashlib.sha256(form).hexdigest() == EARLIER.get(version)


def seal(connection: sqlite3.Connection, scope: str) -> None:
    row = scope, _digest(connection, scope)
    connection.execute(f"INSERT OR REPLACE INTO {SEAL} VALUES (?, ?)", row)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a whole store of an earlier schema to this one; what was not measured then is NULL."""
    before = [table for table in tables_of(connection) if table in TABLES]
    for table in before:
        connection.execute(f"ALTER TABLE {table} RENAME TO earlier_{table}")
    for table in TABLES:
        connection.execute(CREATE[table])
        if table in before:
            names = ", ".join(f'"{name}"' for name in _columns(connection, f"earlier_{table}")[0])
            connection.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM earlier_{table}")
            connection.execute(f"DROP TABLE earlier_{table}")
    for view in VIEWS.values():
        connection.execute(view)
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    for (scope,) in connection.execute(f"SELECT scope FROM {SEAL}").fetchall():
        seal(connection, scope)


def damage(connection: sqlite3.Connection) -> str:
    """What is wrong with a store; nothing, if all of its rows are as they were sealed."""
    checked = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if checked != "ok":
        return " ".join(checked.split()).removeprefix("*** in database main *** ")
    if not is_whole(connection):
        version = version_of(connection)
        return f"its tables are not those of schema {version if version in EARLIER else SCHEMA}"
    seals = dict(connection.execute(f"SELECT scope, digest FROM {SEAL}"))
    for scope, sealed in seals.items():
        known = scope == ALL or re.fullmatch("round [0-9]+", scope)
        if not known or _digest(connection, scope) != sealed:
            return f"the rows of {'all tables' if scope == ALL else scope} are not those that were sealed"
    if ALL in seals:
        return ""
    there = tables_of(connection)
    found = {number for table in BY_ROUND if table in there
             for (number,) in connection.execute(f"SELECT DISTINCT round FROM {table}")}
    for number in sorted({*found, *range(max(found, default=0))}):  # no round is missing
        if f"round {number}" not in seals:
            return f"round {number} has no seal"
    for table in (table for table in TABLES if table in there and table not in (*BY_ROUND, SEAL)):
        if connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
            return f"table {table} has rows that were never sealed"
    return ""


def _columns(connection: sqlite3.Connection, table: str) -> tuple[list[str], list[str]]:
    """(all columns, those that name a row) of a table as it is."""
    told = connection.execute(f"PRAGMA table_info({table})").fetchall()
    return [row[1] for row in told], [row[1] for row in sorted(told, key=lambda row: row[5]) if row[5]]


def _digest(connection: sqlite3.Connection, scope: str) -> str:
    """SHA-256 of the rows of a scope, table after table and each by its key: so many rows at a time column by
    column, or in stores of an earlier schema one line of ASCII for a row."""
    found, everything, by_row = hashlib.sha256(), scope == ALL, version_of(connection) != SCHEMA
    for table in (table for table in TABLES if table in tables_of(connection)):
        if table != SEAL and (everything or table in BY_ROUND):
            columns, keys = _columns(connection, table)
            found.update(f"{table} {', '.join(columns)}\n".encode())
            where = "" if everything else f"WHERE round = {int(scope.split()[1])}"
            kinds = [TABLES[table][name].kind for name in columns]
            rows = connection.execute(f"SELECT * FROM {table} {where} ORDER BY {', '.join(keys)}")
            while part := rows.fetchmany(AT_ONCE):
                found.update("".join(f"{row!a}\n" for row in part).encode() if by_row else
                             b"".join(map(_bytes, zip(*part, strict=True), kinds)))
    return found.hexdigest()


def _bytes(values: tuple[Any, ...], kind: str) -> bytes:
    """A column in a form that is the same everywhere: its length, and numbers as eight bytes each, behind
    which of them are NULL."""
    try:
        if kind != "TEXT":
            numbers = array("d" if kind == "REAL" else "q", [value or 0 for value in values])
            if sys.byteorder == "big":
                numbers.byteswap()
            return b"%d " % len(values) + bytes([value is None for value in values]) + numbers.tobytes()
    except (TypeError, OverflowError):  # no number: damage, which no seal has
        pass
    return f"{values!a}".encode()
