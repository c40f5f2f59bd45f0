"""Karn: the eyes. Views of a run or a proof that read stores and nothing else."""

from esper.karn.live import Summary, panel, summary
from esper.karn.report import write_report

__all__ = ["Summary", "panel", "summary", "write_report"]
