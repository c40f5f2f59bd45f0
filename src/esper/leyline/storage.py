"""Files that Esper writes: they appear whole or not at all, with a digest of all they hold. Never pickle:
JSON, or safetensors with a JSON header, of a stated kind and schema."""

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from esper.leyline.errors import EsperError, StateFormatError

SCHEMA = 2


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """A reader sees the old file or the whole new one. A failure leaves what was there, and nothing else."""
    path, data = Path(path), content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    if not path.parent.is_dir():
        raise StateFormatError(f"cannot write {path}: its folder does not exist")
    try:
        _remove_leftovers(path)
        _sync(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, data)
        os.replace(temporary, path)
        _sync(path.parent, os.O_RDONLY)  # the folder's own entry of the new file
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        advice = "free some space or make it writable"
        raise EsperError(f"cannot write {path}: {error.strerror}; {advice}") from error


def _sync(path: Path, flags: int, data: bytes = b"") -> None:
    """A file with this data, or a folder, is on the disk when this ends."""
    handle = os.open(path, flags, 0o666)
    try:
        while data:
            data = data[os.write(handle, data) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(path: Path) -> None:
    """Of writers that were killed: their process is gone, or was this very one."""
    for old in path.parent.glob(f".{path.name}.*.writing"):
        number = old.name.split(".")[-2]
        if number.isdigit() and (int(number) == os.getpid() or not os.path.exists(f"/proc/{number}")):
            old.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time works in a folder; the system lets go of the lock however that process ends."""
    try:
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise EsperError(f"cannot lock {folder}: {error.strerror}; choose another folder") from error
    try:
        _take(handle)
        yield
    except BlockingIOError as error:
        raise EsperError(f"another esper process works in {folder}; "
                         "wait for it, or choose another folder") from error
    finally:
        os.close(handle)


def _take(handle: int) -> None:
    """The lock, or BlockingIOError; a glance by `is_locked` is waited for."""
    for _ in range(4):
        with suppress(BlockingIOError):
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(folder: Path) -> bool:
    """Does a process work in this folder?"""
    try:
        handle = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


def write_json(path: str | Path, kind: str, content: Mapping[str, Any]) -> None:
    """A JSON object of a stated kind that can be read by people, and by `read_json` if nobody changed it."""
    body = {"kind": kind, "schema": SCHEMA, **content}
    atomic_write(path, json.dumps({**body, "sha256": _digest(body, {})}, indent=1, allow_nan=False) + "\n")


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    try:
        body = json.loads(read_bytes(path, kind))
    except (ValueError, RecursionError) as error:
        raise StateFormatError(f"cannot read a {kind} from {path}: {error}") from error
    return _verified(path, kind, body, {})


def read_bytes(path: str | Path, kind: str) -> bytes:
    """The content of a plain file; anything else could be without end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise StateFormatError(f"cannot read a {kind} from {path}: it is not a file")
        return Path(path).read_bytes()
    except OSError as error:
        raise StateFormatError(f"cannot read a {kind} from {path}: {error.strerror}") from error


def write_state(path: str | Path, kind: str, header: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    body = {"kind": kind, "schema": SCHEMA, **header}
    text = json.dumps({**body, "sha256": _digest(body, plain)})
    atomic_write(path, save(plain, {"esper": text}))  # one key: the order of several is not defined


def read_state(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(header, tensors) of a file that `write_state` wrote; anything else is one sentence."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise StateFormatError(f"cannot read a {kind} from {path}: it is not a file")
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if "esper" not in metadata:
                old = any(name.startswith("esper.") for name in metadata)
                raise StateFormatError(f"{path} was written by Esper 0.1 (schema 1); this version reads "
                                       f"schema {SCHEMA}: make it anew, or use 0.1" if old else
                                       f"{path} is a safetensors file, but no {kind} saved by Esper")
            body = json.loads(metadata["esper"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise StateFormatError(f"cannot read a {kind} from {path}: {error}") from error
    return _verified(path, kind, body, tensors), tensors


@contextmanager
def decoding(path: str | Path, kind: str) -> Iterator[None]:
    """Around the reading of a header: whatever is malformed in it is one sentence."""
    try:
        yield
    except StateFormatError:
        raise
    except EsperError as error:
        raise StateFormatError(str(error)) from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise StateFormatError(f"{path} does not describe a {kind}: {error}") from error


def _verified(path: str | Path, kind: str, body: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    if not isinstance(body, dict) or "kind" not in body:
        raise StateFormatError(f"{path} is no {kind} of schema {SCHEMA}; "
                               "if Esper 0.1 wrote it, make it anew or use 0.1")
    if body.pop("sha256", None) != _digest(body, tensors):
        raise StateFormatError(f"{path} does not match its checksum: it was damaged or edited; "
                               "put back the original")
    if body["kind"] != kind or body.get("schema") != SCHEMA:
        raise StateFormatError(f"{path} is a {body['kind']} of schema {body.get('schema')}; "
                               f"expected a {kind} of schema {SCHEMA}")
    return body


def _digest(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    result = hashlib.sha256(json.dumps(body, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        result.update(f" {name} {tensor.dtype} {list(tensor.shape)} ".encode())
        result.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return result.hexdigest()
