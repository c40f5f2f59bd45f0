"""The folder of a run: what its description says, read strictly, and the controller that lies in it."""

import hashlib
import json
import os
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from esper.leyline import EsperError
from esper.leyline.storage import plain, read_state
from esper.simic.training import CHECKPOINT, TrainConfig
from esper.tamiyo import Controller
from esper.tolaria import Family, find_family

DESCRIPTION, STORE = "run.json", "run.db"


def make_folder(folder: Path) -> None:
    """Where results may be written, or one sentence."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise EsperError(f"--out {folder} is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EsperError(f"cannot make --out {folder}: {error}; choose another folder") from error


def described(config: TrainConfig) -> Any:
    """As it reads in a file, in which tuples are lists."""
    return json.loads(json.dumps(plain(config)))


def stored(folder: Path) -> tuple[Family, TrainConfig] | None:
    """What the description in a folder says; None if there is none."""
    path = folder / DESCRIPTION
    try:
        told = json.loads(path.read_bytes())
        if not isinstance(told, dict) or not isinstance(told.get("family"), str) or "config" not in told:
            raise EsperError("it does not name a family and a config")
        family, config = find_family(told["family"]), changed(TrainConfig(), told["config"], "config")
        if described(config) != told["config"]:
            raise EsperError("its config is not complete, or of another version of Esper")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EsperError(f"cannot read {path}: {error}; make it a file that may be read") from error
    except (ValueError, RecursionError, EsperError) as error:
        raise EsperError(f"{path} is damaged: {error}; put back a whole one, or begin a new run in another folder") from error
    return family, config


def changed(config: Any, keys: Any, source: str) -> Any:
    """A frozen config with some keys changed; unknown ones and other types are refused."""
    if not isinstance(keys, dict):
        raise EsperError(f"{source} is {keys!r}; expected a table of keys")
    known = {f.name: getattr(config, f.name) for f in fields(config)}
    if unknown := sorted(set(keys) - set(known)):
        raise EsperError(f"{source} has no use for {', '.join(unknown)}; there are {', '.join(known)}")
    values = {}
    for name, value in keys.items():
        if is_dataclass(known[name]):
            values[name] = changed(known[name], value, f"{source}, [{name}]")
            continue
        values[name] = _alike(known[name], value)
        if values[name] is None:
            raise EsperError(f"{source}: {name} is {value!r}; expected something like {known[name]!r}")
    return replace(config, **values)


def _alike(known: Any, value: Any) -> Any:
    """The value in the type of a known one: lists are tuples, whole numbers may be floats; None if it is something else."""
    if isinstance(known, tuple) and isinstance(value, (list, tuple)) and len(value) == len(known):
        parts = tuple(map(_alike, known, value))
        return None if None in parts else parts
    if isinstance(known, float) and type(value) is int:
        return float(value)
    return value if type(value) is type(known) else None


@dataclass(frozen=True)
class Trained:
    """The controller of a run that is over."""

    controller: Controller
    digest: str
    """SHA-256 of its file."""


def trained(folder: Path, config: TrainConfig, device: str) -> Trained:
    path, again = folder / CHECKPOINT, f"go on with: esper train --out {folder} --resume"
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise EsperError(f"the run in {folder} has no controller: {error}; {again}") from error
    header, tensors = read_state(path, "agent")
    done = header.get("updates")
    if not isinstance(done, int) or done < config.rounds:
        raise EsperError(f"the run in {folder} is not over: {done} of {config.rounds} rounds are done; {again}")
    return Trained(Controller.decode(header, tensors, device), digest)
