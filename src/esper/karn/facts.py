"""Facts of a run as a whole, from its store; where none were noted there, from the description beside it."""

import json
import sqlite3
from pathlib import Path
from typing import Any

from esper.leyline import EsperError
from esper.leyline.storage import read_json


def facts_of(connection: sqlite3.Connection, store: Path) -> dict[str, Any]:
    """name -> value; where a run was resumed, the latest."""
    noted = connection.execute("SELECT name, value FROM fact ORDER BY round").fetchall()
    if noted:
        return {name: json.loads(value) for name, value in noted}
    try:
        config = read_json(store.with_name("run.json"), "run")["config"]
        return {"rounds": config["rounds"], "family": config["env"]["family"]["name"], "seed": config["seed"]}
    except (EsperError, LookupError, TypeError):
        return {}
