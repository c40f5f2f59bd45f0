"""Users' own tasks: samples are checked, split by their content and stored whole in the data directory.
Nothing is written before everything is checked. Legend: n samples, T tokens of a sample."""

import hashlib
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina import find_objective
from esper.leyline import EsperError
from esper.leyline.codec import from_dict, to_dict
from esper.leyline.storage import read_json, write_json
from esper.tolaria import files
from esper.tolaria.files import TEST, TRAIN, Samples
from esper.tolaria.sources import folder, own_cache

HOSTS = {2: "mlp", 3: "conv1d", 4: "cnn"}  # dimensions of x -> kind of host that takes such samples
NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_-]{0,79}")
FEWEST = 10  # samples of a task
SHARES, TENTHS = (0.6, 0.8), (8, 9)  # where the validation and the test split begin; of a text, in tenths
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Description:
    """What the file of an own task says, in the words of `Task`."""

    host: str
    inputs: tuple[int, ...]
    classes: int
    sizes: tuple[int, int, int]
    objective: str
    names: tuple[str, ...] = ()
    entropy: float = 0.0
    mean: float = 0.0
    deviation: float = 1.0
    digest: str = ""


Made = tuple[Description, dict[str, Samples]]
"""A task that is checked and split, but stored nowhere yet: its samples as a source keeps them apart."""


def _made(description: Description, x: NDArray[Any], y: NDArray[Any]) -> Made:
    """From samples in the order of their splits; the digest is over all of it."""
    cut = sum(description.sizes[:2])
    parts = {TRAIN: (x[:cut], y[:cut]), TEST: (x[cut:], y[cut:])}
    digest = hashlib.sha256(json.dumps(to_dict(description), sort_keys=True).encode())
    for part, samples in parts.items():
        digest.update(files.digest_of(part, samples).encode())
    return replace(description, digest=digest.hexdigest()), parts


def _array(name: str, values: Any) -> NDArray[Any]:
    """Numbers or text from arrays, tensors and lists."""
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
        if array.dtype == object:
            array = array.astype(str if all(isinstance(each, str) for each in array.flat) else np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise EsperError(f"{name} cannot be read as one array of numbers ({str(error).splitlines()[0]}); "
                         "its samples must be of one shape and hold numbers alone") from error
    if array.dtype.kind not in "biufU":
        raise EsperError(f"{name} holds {array.dtype}; expected real numbers, or text as class names")
    return array.astype(np.uint8) if array.dtype == bool else array


def _check_finite(name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind == "U":
        raise EsperError(f"{name} holds text; expected numbers")
    wrong = np.argwhere(~(np.abs(array) <= LARGEST)) if array.dtype.kind == "f" else ()  # nor if it is NaN
    for sample, *place in wrong[:1]:
        column = ", column " + ", ".join(map(str, place)) if place else ""
        raise EsperError(f"{name} holds {array[(sample, *place)]} in sample {sample}{column} (counted from 0)"
                         "; expected finite numbers")


def _inputs(x: NDArray[Any]) -> NDArray[Any]:
    if x.ndim not in HOSTS or not x[:1].size:
        raise EsperError(f"x has shape {list(x.shape)}; expected [samples, features], [samples, channels, "
                         "length] or [samples, channels, height, width]")
    _check_finite("x", x)
    x = x if x.dtype in (np.uint8, np.float32) else x.astype(np.float64)
    return x + x.dtype.type(0)  # -0.0 is 0.0: equal samples have equal bytes


def _classes(name: str, values: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class numbers 0 .. k-1 in the order of what was given, and that as text."""
    if values.dtype.kind != "U":
        _check_finite(name, values)
        with np.errstate(invalid="ignore"):  # beyond an int64
            whole = values.astype(np.int64)
        if (wrong := whole != values).any():
            raise EsperError(f"{name} holds {values[wrong][0]}, which is not whole; classes are whole "
                             "numbers or text, other numbers are for the objective regression")
        values = whole
    found, numbers = np.unique(values, return_inverse=True)
    if len(found) < 2:
        raise EsperError(f"{name} holds {str(found[0])!r} alone; a task needs at least two classes")
    return numbers.reshape(values.shape).astype(np.int64), tuple(map(str, found))


def prepare(x: Any, y: Any, objective: str, held: int = 0) -> Made:
    """Check and split samples: x [n, *inputs] and a label for each; for next_token whole numbers x [n, T] and
    y [n, T], or x [n, T + 1] without y. The last `held` samples are the test split if there are any."""
    kind, x = find_objective(objective), np.atleast_1d(_array("x", x))
    if y is None and not kind.tokens:
        raise EsperError(f"y is missing; {objective} needs a label for each sample")
    if kind.tokens and (x.ndim != 2 or x.shape[1] < 1 + (y is None)):
        raise EsperError(f"x has shape {list(x.shape)}; expected tokens [samples, length]")
    x, y = (x[:, :-1], x[:, 1:]) if y is None else (x, _array("y", y))
    if y.shape != (expected := x.shape if kind.tokens else x.shape[:1]):
        raise EsperError(f"y has shape {list(y.shape)} and x {list(x.shape)}; "
                         f"expected y of shape {list(expected)}")
    if len(x) < FEWEST:
        raise EsperError(f"there are {len(x)} samples; a task needs at least {FEWEST}")
    names: tuple[str, ...] = ()
    if kind.tokens:
        (x, y), names = _classes("x and y", np.stack([x, y]))
    elif kind.label_dtype.is_floating_point:
        x = _inputs(x)
        _check_finite("y", y)
        y = y.astype(np.float64) + 0.0
    else:
        x, (y, names) = _inputs(x), _classes("y", y)
        if 2 * len(names) > len(y):
            raise EsperError(f"y has {len(names)} classes in {len(y)} samples; give at least two of each, or "
                             "the objective regression if y is a number to predict")
    order, sizes = _split(x, y, held)
    x, y, known = x[order], y[order], y[order[: sizes[0]]]
    if kind.tokens:
        return _sequences(x, y, names, sizes)
    made = Description(HOSTS[x.ndim], x.shape[1:], len(names) or 1, sizes, objective, names)
    if missing := set(range(len(names))) - set(known.tolist()):
        raise EsperError(f"class {names[min(missing)]!r} has no sample in the training split"
                         f"{' that is not in the test split' if held else ''}; give more of it, or none")
    if not names:
        if known.min() == known.max() or not known.std():
            raise EsperError(f"y is {known[0]} in all training samples; there is nothing to predict")
        made = replace(made, mean=float(known.mean()), deviation=float(known.std()))
    return _made(made, x, y)


def prepare_text(text: str | bytes, context: int) -> Made:
    """Tokens are bytes: three contiguous parts, each cut into windows of `context` that do not overlap."""
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise EsperError(f"a context of {context!r} tokens is impossible; give a whole number of at least 1")
    if not isinstance(text, (str, bytes)):
        raise EsperError(f"a text cannot be a {type(text).__name__}; give str or bytes")
    data = np.frombuffer(text.encode(errors="replace") if isinstance(text, str) else text, np.uint8)
    if len(data) < (least := 10 * (context + 1)):  # a window in each split
        raise EsperError(f"the text has {len(data)} bytes; with a context of {context} it needs {least}")
    tokens, names = _classes("the text", data)
    windows = []
    for part in np.split(tokens, [len(data) * tenths // 10 for tenths in TENTHS]):
        end = (len(part) - 1) // context * context
        windows.append(np.stack([part[:end], part[1 : end + 1]]).reshape(2, -1, context))
    train, validation, test = (part.shape[1] for part in windows)
    x, y = np.concatenate(windows, axis=1)
    return _sequences(x, y, names, (train, validation, test))


def _sequences(x: NDArray[np.int64], y: NDArray[np.int64], names: tuple[str, ...],
               sizes: tuple[int, int, int]) -> Made:
    shares = np.bincount(y[: sizes[0]].ravel()) / y[: sizes[0]].size
    entropy = -sum(float(share) * math.log(share) for share in shares if share)
    if not entropy:
        raise EsperError("all labels of the training split are the same token; there is nothing to predict")
    small = np.min_scalar_type(len(names) - 1)
    description = Description("gpt", x.shape[1:], len(names), sizes, "next_token", names, entropy)
    return _made(description, x.astype(small), y.astype(small))


def _split(x: NDArray[Any], y: NDArray[Any], held: int) -> tuple[NDArray[np.int64], tuple[int, int, int]]:
    """(order, sizes of the three splits). Samples are in the order of a hash of their bytes: equal ones lie
    side by side, and no cut goes between those. What is in a given test split does not train."""
    keys = [hashlib.sha256(one.tobytes() + two.tobytes()).digest() for one, two in zip(x, y, strict=True)]
    first = len(keys) - held
    tests = set(keys[first:])
    order = sorted((i for i in range(first) if keys[i] not in tests), key=keys.__getitem__)
    starts = [p for p in range(1, len(order)) if keys[order[p]] != keys[order[p - 1]]]
    splits = 2 if held else 3
    if len(starts) < splits - 1:
        raise EsperError(f"there are {len(starts) + bool(order)} different samples to split; "
                         f"{splits} splits need at least as many")

    def nearest(share: float, able: list[int]) -> int:
        return min(able, key=lambda place: abs(place - share * len(order)))

    if held:
        begin, end = nearest(SHARES[0] / SHARES[1], starts), len(order)
    else:
        begin = nearest(SHARES[0], starts[:-1])
        end = nearest(SHARES[1], [place for place in starts if place > begin])
    return np.array([*order, *range(first, len(keys))]), (begin, end - begin, held or len(order) - end)


def collect(dataset: Any) -> tuple[list[Any], list[Any]]:
    """x and y of a map-style dataset of pairs."""
    x, y = [], []
    try:
        for number in range(len(dataset)):
            sample, label = dataset[number]
            if not isinstance(sample, (Tensor, np.ndarray, list, tuple)):
                raise EsperError(f"x of sample {number} is a {type(sample).__name__}; expected a tensor or "
                                 "an array: add a transform to the dataset")
            x.append(np.asarray(sample))
            y.append(np.asarray(label) if isinstance(label, Tensor) else label)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise EsperError(f"a {type(dataset).__name__} cannot be read ({error}); "
                         "give a map-style dataset of pairs (x, y)") from error
    return x, y


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.json") if NAME.fullmatch(path.stem))


def known(name: str) -> bool:
    return isinstance(name, str) and bool(NAME.fullmatch(name)) and (folder() / f"{name}.json").is_file()


def describe(name: str) -> Description:
    path = folder() / f"{name}.json"
    try:
        return from_dict(Description, read_json(path, "task").get("task"), str(path))
    except EsperError as error:
        raise EsperError(f"{error}; or run esper tasks add {name} PATH --replace") from error


def store(name: str, made: Made, replace: bool) -> None:
    """Keep a task under its name: its data first, then the description that points to it."""
    description, parts = made
    digest, path = description.digest, folder() / f"{name}.json"
    if not replace and known(name) and describe(name).digest != digest:
        raise EsperError(f"there is already a task {name!r} with other data; replace it with --replace "
                         "(replace=True), or choose another name")
    kept = [*(own_cache(name, digest, part) for part in parts), path]
    with files.all_or_nothing(kept):
        for cache, (part, samples) in zip(kept, parts.items(), strict=False):
            files.write_cache(cache, f"{part} {digest}", samples)
        with files.writing(path):
            write_json(path, "task", {"task": to_dict(description)})
    _forget(name, kept)


def remove(name: str) -> None:
    """Take an own task and its samples away."""
    if not known(name):
        raise EsperError(f"there is no task {name!r} of your own; "
                         f"there are {', '.join(names()) or 'none'}, and built-in tasks stay")
    _forget(name, [])


def _forget(name: str, kept: list[Path]) -> None:
    for path in sorted(folder().glob(f"{name}.*"), reverse=True):  # the description comes first
        if path not in kept:
            with files.writing(path):
                path.unlink(missing_ok=True)
