"""The folder of a run: what its description says, and the controller that lies in it. `esper runs` lists
such folders, shows panels of one, and compares several."""

import functools
import hashlib
import importlib.util
import json
import math
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from esper.cli.options import RunsCompare, RunsList, RunsShow
from esper.cli.shown import print_rows, print_table
from esper.karn import compare, open_run
from esper.karn.panels import said
from esper.karn.stores import DESCRIPTION, STORE
from esper.leyline import EsperError
from esper.leyline.codec import from_dict, merged, to_dict
from esper.leyline.provenance import provenance
from esper.leyline.storage import decoding, is_locked, read_bytes, read_json, read_state, write_json
from esper.simic.config import LATER
from esper.simic.training import CHECKPOINT, TrainConfig, Training
from esper.simic.workers import PREPARATIONS
from esper.tamiyo import Controller
from esper.tolaria.tasks import task_digest

LISTED = ("run", "state", "family", "seed", "rounds", "gain", "low", "high", "best", "age", "why")


def make_folder(folder: Path) -> None:
    """Where results may be written, or one sentence, before anything is computed."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise EsperError(f"--out {folder} is a file; name a folder")
    try:
        str(folder).encode()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, UnicodeEncodeError) as error:
        raise EsperError(f"cannot make --out {str(folder)!r}: {error}; choose another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EsperError(f"--out {folder} may not be written; choose another folder")


def remove_left(what: str, *paths: Path) -> None:
    """Of files, with those that a store which was not closed leaves beside it."""
    try:
        for path in paths:
            for end in ("", "-wal", "-shm") if path.suffix == ".db" else ("",):
                path.with_name(path.name + end).unlink(missing_ok=True)
    except OSError as error:
        raise EsperError(f"cannot remove what an earlier {what} left: {error}; "
                         "choose another --out") from error


def points(mean: float, low: float, high: float) -> str:
    """A difference in score and its interval; a dash if it was not measured."""
    return "-" if math.isnan(mean) else f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def use_plugins(paths: Sequence[Path]) -> None:
    """Run these Python files, in workers too: they register things. What fails in them is the user's."""
    for path in paths:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise EsperError(f"--plugin {path} is not a Python file")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    if paths:
        PREPARATIONS.append(functools.partial(use_plugins, tuple(map(Path.absolute, paths))))


def write_description(folder: Path, config: TrainConfig, about: dict[str, Any] | None = None) -> None:
    stamp = about or {"made with": provenance(config.env.device), "declared": []}
    write_json(folder / DESCRIPTION, "run", {"config": to_dict(config), "task": _tasks(config), **stamp})


def _tasks(config: TrainConfig) -> Any:
    """What the names of a run's tasks mean: a digest; of a universe, one for each task that a run uses."""
    if config.universe is None:
        return task_digest(config.env.family.task)
    families = (*config.universe.training, *config.universe.validation)
    return {family.task: task_digest(family.task) for family in families}


def note_facts(training: Training) -> None:
    """In the store, now and whenever the run is resumed; without what is private to the machine."""
    made = provenance(training.config.env.device)
    told = ("date", "commit", "version", "python", "torch", "threads", "hardware")
    facts = training.config.facts() | {name: made[name] for name in told}
    training.sink.write("fact", {"round": training.agent.updates, "name": list(facts),
                                 "value": [json.dumps(value, sort_keys=True) for value in facts.values()]})
    training.sink.commit()


def load_run(folder: Path) -> tuple[TrainConfig, dict[str, Any]] | None:
    """What the description in a folder says: its config, and everything else in it. None if there is none."""
    path = folder / DESCRIPTION
    if not os.path.lexists(path):
        return None
    body = read_json(path, "run")
    with decoding(path, "run"):
        config = from_dict(TrainConfig, merged(LATER, body["config"]), str(path))
        before, now, name = body.get("task", ""), _tasks(config), config.env.family.task
        if before != now:
            if isinstance(before, dict) and isinstance(now, dict):
                name = min(dict(before.items() ^ now.items()))
            raise EsperError(f"the run in {folder} was begun when the task {name} had other data; "
                             f"add that again: esper tasks add {name} PATH --replace")
        return config, {name: body[name] for name in ("made with", "declared")}


def load_controller(folder: Path, config: TrainConfig, device: str) -> tuple[Controller, str]:
    """The controller of a run that is over, and the SHA-256 of its file."""
    path, again = folder / CHECKPOINT, f"go on with: esper train --out {shlex.quote(str(folder))} --resume"
    if not path.exists():
        raise EsperError(f"the run in {folder} has no controller; {again}")
    header, tensors = read_state(path, "agent")
    done = header.get("updates")
    if header.get("run") != config.identity:
        raise EsperError(f"{path} belongs to another run than the {DESCRIPTION} beside it; put back its own")
    if not isinstance(done, int) or done < config.rounds:
        raise EsperError(f"the run in {folder} is not over: {done} of {config.rounds} rounds are done; "
                         f"{again}")
    digest = hashlib.sha256(read_bytes(path, "agent")).hexdigest()
    return Controller.decode(header, tensors, device, str(path)), digest


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Every run below a folder, by name; what cannot be read is broken."""
    if not folder.is_dir():
        raise EsperError(f"there is no folder {folder}; name one that holds runs")
    found = {path.parent for name in (STORE, DESCRIPTION) for path in folder.rglob(name)}
    return [dict.fromkeys(LISTED) | {"run": str(each.relative_to(folder))} | _listed(each)
            for each in sorted(found)]


def _listed(folder: Path) -> dict[str, Any]:
    if not (folder / STORE).exists():
        return {"state": "running" if is_locked(folder) else "stopped", "rounds": 0}
    try:
        with open_run(folder) as run:
            state = run.panel("state")
            told = dict(zip(state.columns, state.rows[0], strict=True))
            exam = compare([run])
            judged = dict(zip(exam.columns, exam.rows[0], strict=True))
            rounds = told["round"] if told["planned"] is None else f"{told['round']}/{told['planned']}"
            return ({name: told[name] for name in ("state", "family", "age")} | {"rounds": rounds}
                    | {name: judged[name] for name in ("seed", "gain", "low", "high", "best")})
    except EsperError as error:
        return {"state": "broken", "why": str(error)}


def run(options: RunsList | RunsShow | RunsCompare, console: Console) -> None:
    if isinstance(options, RunsShow):
        pairs = [each.partition("=") for each in options.at]
        if wrong := [name for name, _, number in pairs if not number.isdecimal() or len(number) > 18]:
            raise EsperError(f"--at {wrong[0]} needs a number, as in --at {wrong[0]}=2")
        chosen = {name: int(number) for name, _, number in pairs}
        with open_run(options.run) as shown:
            print_table(shown.panel(options.panel, **chosen), options.json, console)
    elif isinstance(options, RunsCompare):
        with ExitStack() as stack:
            runs = [stack.enter_context(open_run(path)) for path in options.runs]
            print_table(compare(runs, options.policy), options.json, console)
    elif found := runs_in(options.folder):
        if options.json:
            print(json.dumps(found))
            return
        for each in found:
            if each["low"] is not None:
                each["gain"] = points(*(each[name] / 100 for name in ("gain", "low", "high")))
            each["age"] = said(each["age"], "s")
        shown_columns = [name for name in LISTED if name not in ("low", "high")]
        print_rows(shown_columns, [[each[name] for name in shown_columns] for each in found], console)
    else:
        raise EsperError(f"there is no run below {options.folder}; begin one with esper train")
