"""Nissa: the senses. The run store and the one registry of what is kept in it."""

from esper.nissa.registry import TABLES, Metric
from esper.nissa.store import Store, read

__all__ = ["TABLES", "Metric", "Store", "read"]
