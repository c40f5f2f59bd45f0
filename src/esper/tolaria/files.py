"""Where samples lie on disk: the data directory, its cache, registered folders, and readers that verify what
they read. Which samples train, validate or test is not decided here."""

import gzip
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from esper.leyline import EsperError
from esper.leyline.codec import from_dict
from esper.leyline.storage import atomic_write, read_json, write_json

Samples = tuple[NDArray[Any], NDArray[Any]]
"""x [n, *inputs] as stored, y [n]; tokens: y as x."""
TRAIN, TEST = "train", "test"
"""The two parts a source keeps apart; the first holds the training and the validation split."""
REPLACE = "replace it with the original"


@dataclass(frozen=True)
class DataFile:
    """A published file: its name without .gz, its part, and the SHA-256 of what it unpacks to."""

    name: str
    part: str
    sha256: str


def data_directory() -> Path:
    if chosen := os.environ.get("ESPER_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "esper"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around a write into the data directory, which is made where it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, EsperError) as error:
        raise EsperError(f"cannot write {path} ({error}); "
                         "set ESPER_DATA to a folder you can write to") from error


@contextmanager
def all_or_nothing(paths: Sequence[Path]) -> Iterator[None]:
    """Around the writing of several files: if it fails, those that are new are gone again."""
    new = [path for path in paths if not path.exists()]
    try:
        yield
    except BaseException:
        for path in new:
            with suppress(OSError):
                path.unlink()
        raise


def cache_path(task: str, part: str) -> Path:
    return data_directory() / f"{task}-{part}.safetensors"


def digest_of(recipe: str, arrays: Samples) -> str:
    """Of values, types, shapes and what they should be: a renamed or outdated cache is a wrong one."""
    result = hashlib.sha256(recipe.encode())
    for array in arrays:
        result.update(f" {array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return result.hexdigest()


def write_cache(path: Path, recipe: str, arrays: Samples) -> None:
    tensors = {name: np.ascontiguousarray(array) for name, array in zip("xy", arrays, strict=True)}
    with writing(path):
        atomic_write(path, save(tensors, {"sha256": digest_of(recipe, arrays)}))


def read_cache(path: Path, recipe: str,
               again: str = "delete it and run again to have it made anew") -> Samples:
    try:
        with safe_open(path, "numpy") as file:
            arrays = file.get_tensor("x"), file.get_tensor("y")
            stored = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError) as error:
        raise EsperError(f"{path} cannot be read as safetensors; {again}") from error
    if stored != digest_of(recipe, arrays):
        raise EsperError(f"{path} does not match its checksum; {again}")
    return arrays


def registered_folders() -> dict[str, str]:
    """task -> the folder that `esper tasks add-data` remembered."""
    path = data_directory() / "folders.json"
    if not os.path.exists(path):
        return {}
    try:
        return from_dict(dict[str, str], read_json(path, "folders")["folders"], str(path))
    except (EsperError, KeyError) as error:
        raise EsperError(f"{error}; delete it and run esper tasks add-data again") from error


def register_folder(task: str, folder: Path) -> None:
    folders, path = registered_folders() | {task: str(folder)}, data_directory() / "folders.json"
    with writing(path):
        write_json(path, "folders", {"folders": folders})


def find_file(folder: Path, name: str) -> Path | None:
    return next((folder / n for n in (name, f"{name}.gz") if os.path.isfile(folder / n)), None)


def _verified(folder: Path, file: DataFile, shape: tuple[int, ...],
              header: bytes = b"") -> tuple[Path, NDArray[np.uint8]]:
    """The bytes behind a file's header, as published. Gzipped files are known by their content, whatever
    their name; at most one byte too many is unpacked: a small file can unpack to any length."""
    path, size = find_file(folder, file.name), len(header) + math.prod(shape)
    if path is None:
        raise EsperError(f"no {file.name} or {file.name}.gz in {folder}; "
                         "give esper tasks add-data the folder that holds the original files")
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            data = (gzip.GzipFile(fileobj=raw) if packed else raw).read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EsperError(f"{path} is a damaged or truncated gzip file; {REPLACE}") from error
    except OSError as error:
        raise EsperError(f"cannot read {path} ({error.strerror}); make it readable or {REPLACE}") from error
    if not data.startswith(header[:4]):
        raise EsperError(f"{path} starts with {data[:4].hex() or 'nothing'}, but an IDX file of its kind "
                         f"starts with {header[:4].hex()}; {REPLACE}")
    if not data.startswith(header):
        shown = " x ".join(map(str, shape))
        raise EsperError(f"{path} does not hold {shown} values by its own header; {REPLACE}")
    if len(data) != size:
        kind = f"truncated: {len(data)} bytes of" if len(data) < size else "too long: more than the"
        raise EsperError(f"{path} is {kind} {size} bytes, decompressed; {REPLACE}")
    check_digest(path, data, file.sha256)
    return path, np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)


def check_digest(path: Path, data: bytes, sha256: str) -> None:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise EsperError(f"{path} has the wrong sha256 checksum; {REPLACE}")


def _check_labels(path: Path, labels: NDArray[np.uint8], classes: int) -> None:
    if not np.array_equal(np.unique(labels), np.arange(classes)):
        raise EsperError(f"{path} has labels from {labels.min()} to {labels.max()}, "
                         f"expected each of 0 to {classes - 1}; {REPLACE}")


def read_idx(folder: Path, files: tuple[DataFile, ...], count: int, inputs: tuple[int, ...],
             classes: int) -> Samples:
    """MNIST's format: a file of images and one of labels, in this order."""
    shapes = (count, *inputs[1:]), (count,)
    headers = [struct.pack(f">{1 + len(shape)}I", 0x0800 | len(shape), *shape) for shape in shapes]
    (_, images), (path, labels) = map(_verified, [folder] * 2, files, shapes, headers)
    _check_labels(path, labels, classes)
    return images.reshape(count, *inputs), labels.astype(np.int64)


def read_cifar(folder: Path, files: tuple[DataFile, ...], count: int, inputs: tuple[int, ...],
               classes: int) -> Samples:
    """CIFAR's format: files of equal length, joined in order; a record is its label byte, then its pixels."""
    batches = []
    for file in files:
        path, batch = _verified(folder, file, (count // len(files), 1 + math.prod(inputs)))
        _check_labels(path, batch[:, 0], classes)
        batches.append(batch)
    records = np.concatenate(batches)
    return records[:, 1:].reshape(count, *inputs), records[:, 0].astype(np.int64)
