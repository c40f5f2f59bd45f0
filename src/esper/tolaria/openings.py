"""The ledger of test splits: who opened which, when and why. It lies beside the data and is written before a split is read.

Every line carries a digest over itself and the line before it, so that an opening cannot be taken out unseen.
"""

import datetime
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from esper.leyline import EsperError
from esper.tolaria import files


def ledger() -> Path:
    return files.data_directory() / "openings.jsonl"


def openings(task: str) -> list[dict[str, Any]]:
    """Every opening of a task's test split, oldest first."""
    return [line for line in _lines() if line["task"] == task]


def log_opening(task: str, reason: str) -> None:
    """One more line; without it the split stays closed."""
    before = _lines()
    body = {"task": task, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "reason": reason,
            "command": " ".join(["esper", *sys.argv[1:]])}
    line = json.dumps(body | {"sha256": _digest(body, before[-1]["sha256"] if before else "")}) + "\n"
    path = ledger()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise EsperError(f"cannot log the opening of a test split in {path}: {error.strerror}; it stays closed") from error


def _lines() -> list[dict[str, Any]]:
    path, lines, last = ledger(), [], ""
    if not path.exists():
        return []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
            found = line.pop("sha256")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            line, found = {}, None
        if found != _digest(line, last):
            raise EsperError(f"{path} is damaged in line {number}; put back the original, which says what was opened")
        last = found
        lines.append(line | {"sha256": found})
    return lines


def _digest(body: dict[str, Any], before: str) -> str:
    return hashlib.sha256((before + json.dumps(body, sort_keys=True)).encode()).hexdigest()
