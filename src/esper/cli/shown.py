"""Tables on a terminal: plain text in columns, which a pipe can read too."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from esper.karn import Table

_TIMES = ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min"), (0, 1, "s"))


def said(value: Any) -> str:
    """Numbers in short; a dash for what was not measured."""
    if isinstance(value, float):
        return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.2f}"
    if isinstance(value, list):
        return " ".join(map(said, value))
    return "-" if value is None else str(value)


def said_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    size, unit = next((size, unit) for least, size, unit in _TIMES if seconds >= least or not least)
    return f"{seconds / size:.0f} {unit}"


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]], console: Console) -> None:
    lines = [columns, *([said(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        told = "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True))
        console.print(told.rstrip(), soft_wrap=True)


def print_table(table: Table, as_json: bool, console: Console) -> None:
    if as_json:
        print(json.dumps(table.json()))
        return
    console.print(table.question, style="bold", soft_wrap=True)
    print_rows(table.columns, table.rows, console)
    if table.units:
        units = ", ".join(f"{name} in {unit}" for name, unit in table.units.items())
        console.print(units, style="dim", soft_wrap=True)
