"""Nissa: the senses. The run store and the one registry of what is kept in it."""

from esper.nissa.registry import SCHEMA, TABLES, Metric
from esper.nissa.store import Store, ask, read, reader, verify

__all__ = ["SCHEMA", "TABLES", "Metric", "Store", "ask", "read", "reader", "verify"]
