"""Files that Esper writes: safetensors with a JSON header of a stated kind and schema. Never pickle."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from esper.leyline.actions import ActionSpec, Head, LifecycleOp
from esper.leyline.errors import EsperError, StateFormatError

SCHEMA = 1
T = TypeVar("T")


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Where to write a file that appears whole or not at all; a failure leaves what was there before, and nothing else."""
    temporary = Path(f"{path}.writing")
    if not temporary.parent.is_dir():
        raise StateFormatError(f"cannot write {path}: its folder does not exist")
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise EsperError(f"cannot write {path}: {error}; free some space or make it writable") from error


def write_state(path: str | Path, kind: str, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    text = json.dumps({"schema": SCHEMA, **header})
    with whole(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {f"esper.{kind}": text})


def read_state(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(f"esper.{kind}")
            if header is None:
                raise StateFormatError(f"{path} is a safetensors file, but no {kind} saved by Esper")
            parsed: dict[str, Any] = json.loads(header)
            if parsed.get("schema") != SCHEMA:
                raise StateFormatError(f"{path} has schema {parsed.get('schema')}; this version of Esper reads schema {SCHEMA}")
            return parsed, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise StateFormatError(f"cannot read a {kind} from {path}: {error}") from error


def plain(value: Any) -> dict[str, Any]:
    """A config as plain data for a header."""
    if isinstance(value, ActionSpec):
        return {"slots": value.slots, "blueprints": value.blueprints, "heads": value.heads, "ops": value.ops,
                "auto_advance": value.auto_advance, "defaults": [value.defaults[head] for head in Head]}
    assert is_dataclass(value)
    assert not isinstance(value, type)
    return asdict(value)


def rebuilt(kind: type[T], fields: dict[str, Any]) -> T:
    """A frozen config from its plain form, in which tuples became lists."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if kind is ActionSpec:
        fields |= {"heads": tuple(map(Head, fields["heads"])), "ops": tuple(map(LifecycleOp, fields["ops"])),
                   "defaults": dict(zip(Head, fields["defaults"], strict=True))}
    return kind(**fields)
