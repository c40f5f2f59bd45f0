"""Tables on a terminal: plain text in columns, which a pipe can read too."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from esper.karn import Table
from esper.karn.panels import said


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
