"""Karn: the eyes. Views of a run or a proof that read stores and nothing else."""

from esper.karn.comparing import compare
from esper.karn.live import Summary, panel, summary
from esper.karn.panels import PAGES, PANELS, Run, Table, open_run
from esper.karn.report import write_report
from esper.karn.run_report import write_run_report

__all__ = ["PAGES", "PANELS", "Run", "Summary", "Table", "compare", "open_run", "panel", "summary",
           "write_report", "write_run_report"]
