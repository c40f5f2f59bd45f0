"""Nissa: the senses. The run store and the one registry of what is kept in it."""

from esper.nissa.registry import SCHEMA, TABLES, Metric
from esper.nissa.store import Store, ask, read, reader, verify
from esper.nissa.trackers import Tracked, Tracker, open_tracker

__all__ = ["SCHEMA", "TABLES", "Metric", "Store", "Tracked", "Tracker", "ask", "open_tracker", "read",
           "reader", "verify"]
