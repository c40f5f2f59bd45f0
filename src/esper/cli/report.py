"""`esper report`: runs as one page."""

from rich.console import Console

from esper.cli import options
from esper.karn import write_run_report


def run(options: options.Report, console: Console) -> None:
    write_run_report(options.runs, options.out)
    console.print(f"the report: {options.out}")
