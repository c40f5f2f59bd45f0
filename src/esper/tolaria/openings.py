"""The ledger of test splits: who opened which, when and why. It is written before a split is read."""

import datetime
import sys
from pathlib import Path
from typing import Any

from esper.leyline.storage import locked, read_json, write_json
from esper.tolaria import files


def ledger() -> Path:
    return files.data_directory() / "openings.json"


def openings(task: str) -> list[dict[str, Any]]:
    """Every opening of a task's test split, oldest first."""
    return [each for each in _all() if each["task"] == task]


def log_opening(task: str, reason: str) -> None:
    """One more line; if it cannot be written, the split stays closed."""
    path = ledger()
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = {"task": task, "date": now, "reason": reason, "command": " ".join(["esper", *sys.argv[1:]])}
        write_json(path, "ledger of openings", {"openings": [*_all(), line]})


def _all() -> list[dict[str, Any]]:
    return read_json(ledger(), "ledger of openings")["openings"] if ledger().exists() else []
