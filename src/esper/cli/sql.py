"""`esper sql`: a question of one's own to the store of a run."""

import csv
import sys

from rich.console import Console

from esper.cli.options import Sql
from esper.cli.shown import print_rows
from esper.karn.stores import store_of
from esper.nissa import ask


def run(options: Sql, console: Console) -> None:
    columns, rows, more = ask(store_of(options.run), options.query, options.rows, options.seconds)
    if options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    else:
        print_rows(columns, rows, console)
    if more:
        print(f"esper sql: only the first {options.rows} rows; --rows N prints more", file=sys.stderr)
