"""Seals of a run store: digests of complete rows, which tell of damage that SQLite does not see."""

import hashlib
import sqlite3
from collections.abc import Mapping

from esper.nissa.registry import CREATE, SCHEMA, TABLES

SEAL, ALL = "seal", "all"  # the table, and the scope of a whole store


def scope_of(number: int) -> str:
    return f"round {number}"


def by_round(table: str) -> bool:
    return next(iter(TABLES[table])) == "round"


def digest(connection: sqlite3.Connection, scope: str) -> str:
    """SHA-256 of the rows of a scope, table after table and each by its key, one line of ASCII for a row."""
    found, everything = hashlib.sha256(), scope == ALL
    for table, columns in TABLES.items():
        if table != SEAL and (everything or by_round(table)):
            found.update(f"{table} {', '.join(columns)}\n".encode())
            keys = ", ".join(name for name, metric in columns.items() if metric.key)
            query = f"SELECT * FROM {table} {'' if everything else 'WHERE round = ?'} ORDER BY {keys}"
            for row in connection.execute(query, () if everything else (int(scope.split()[1]),)):
                found.update(f"{row!a}\n".encode())
    return found.hexdigest()


def version_of(connection: sqlite3.Connection) -> int:
    """Stores of schema 1 did not say so."""
    return connection.execute("PRAGMA user_version").fetchone()[0] or 1


def tables_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Every table that there is, and how it was made."""
    return dict(connection.execute("SELECT name, sql FROM sqlite_schema"))


def damage(connection: sqlite3.Connection) -> str:
    """What is wrong with a store; nothing, if all of its rows are as they were sealed."""
    checked = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if checked != "ok":
        return " ".join(checked.split()).removeprefix("*** in database main *** ")
    if version_of(connection) != SCHEMA or tables_of(connection) != CREATE:
        return f"its tables are not those of schema {SCHEMA}"
    seals = dict(connection.execute(f"SELECT scope, digest FROM {SEAL}"))
    for scope, sealed in seals.items():
        known = scope == ALL or scope.removeprefix("round ").isdigit()
        if not known or digest(connection, scope) != sealed:
            return f"the rows of {'all tables' if scope == ALL else scope} are not those that were sealed"
    return "" if ALL in seals else _unsealed(connection, seals)


def _unsealed(connection: sqlite3.Connection, seals: Mapping[str, str]) -> str:
    """Every row belongs to a round that is sealed, and no round is missing."""
    found = {number for table in filter(by_round, TABLES)
             for (number,) in connection.execute(f"SELECT DISTINCT round FROM {table}")}
    for number in sorted({*found, *range(max(found, default=0))}):
        if scope_of(number) not in seals:
            return f"{scope_of(number)} has no seal"
    for table in TABLES:
        own = table != SEAL and not by_round(table)
        if own and connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
            return f"table {table} has rows that were never sealed"
    return ""
