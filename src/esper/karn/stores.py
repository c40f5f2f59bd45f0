"""Where stores of runs lie, when they were written, and the facts of a run as a whole."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from esper.leyline import EsperError
from esper.leyline.storage import read_json

STORE, DESCRIPTION = "run.db", "run.json"


def facts_of(noted: Iterable[tuple[str, str]], store: Path) -> dict[str, Any]:
    """name -> value, of rows of `fact` by round: where a run was resumed, the latest. Where none were noted,
    from the description beside the store."""
    try:
        if found := {name: json.loads(value) for name, value in noted}:
            return found
    except (TypeError, ValueError) as error:
        raise EsperError(f"the run store {store} is damaged: a fact is no JSON; "
                         "put back a whole one") from error
    try:
        config = read_json(store.with_name(DESCRIPTION), "run")["config"]
        return {"rounds": config["rounds"], "family": config["env"]["family"]["name"], "seed": config["seed"]}
    except (EsperError, LookupError, TypeError):
        return {}


def store_of(path: str | Path) -> Path:
    """The store of a folder, or the file itself."""
    return Path(path) / STORE if Path(path).is_dir() else Path(path)


def stamp(store: Path) -> list[tuple[int, ...]]:
    """Which file lies there, and when it and its log were written; nothing of what is missing or empty."""
    found: list[tuple[int, ...]] = []
    with suppress(OSError):
        for path in (store, f"{store}-wal"):
            it = os.stat(path)
            found += [(it.st_dev, it.st_ino), (it.st_mtime_ns, it.st_size)] if it.st_size else []
    return found


def written(store: Path) -> float:
    """When a store, what was not yet moved into it, or the description of its run was written."""
    beside = (store, store.with_name(f"{store.name}-wal"), store.with_name(DESCRIPTION))
    return max((path.stat().st_mtime for path in beside if path.exists()), default=0.0)


def stores_below(path: str | Path) -> list[Path]:
    """The store of a run, or those of all runs below a folder."""
    if (store := store_of(path)).exists():
        return [store]
    if found := sorted(Path(path).rglob(STORE)) if Path(path).is_dir() else []:
        return found
    raise EsperError(f"there is no run in {path}; begin one with esper train --out {path}")
