"""Karn: the eyes. Views of a run that read its store and nothing else."""

from esper.karn.live import Summary, panel, summary

__all__ = ["Summary", "panel", "summary"]
