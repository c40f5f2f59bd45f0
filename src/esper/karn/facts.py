"""Facts of a run as a whole, from its store; where none were noted there, from the description beside it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from esper.leyline import EsperError
from esper.leyline.storage import read_json


def facts_of(noted: Iterable[tuple[str, str]], store: Path) -> dict[str, Any]:
    """name -> value, of rows of `fact` by round: where a run was resumed, the latest."""
    try:
        if found := {name: json.loads(value) for name, value in noted}:
            return found
    except (TypeError, ValueError) as error:
        raise EsperError(f"the run store {store} is damaged: a fact is no JSON; "
                         "put back a whole one") from error
    try:
        config = read_json(store.with_name("run.json"), "run")["config"]
        return {"rounds": config["rounds"], "family": config["env"]["family"]["name"], "seed": config["seed"]}
    except (EsperError, LookupError, TypeError):
        return {}
