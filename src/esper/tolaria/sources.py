"""Where samples come from: installed packages, published files known by digest, or a user's stored ones."""

import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from esper.leyline import EsperError
from esper.leyline.keys import mix
from esper.tolaria import files
from esper.tolaria.files import TEST, TRAIN, DataFile, Samples

if TYPE_CHECKING:
    from esper.tolaria.tasks import Task


def make_mnist1d() -> Samples:
    """The published set: generator defaults, spelled out so that a later package cannot move them."""
    generator = import_module("mnist1d.data")
    arguments = generator.get_dataset_args()
    vars(arguments).update(num_samples=5000, train_split=0.8, final_seq_length=40, shuffle_seq=False, seed=42)
    made = generator.make_dataset(arguments)
    x = np.concatenate([made["x"], made["x_test"]]).astype(np.float32)
    return x[:, None], np.concatenate([made["y"], made["y_test"]]).astype(np.int64)


def from_sklearn(name: str, inputs: type, labels: type) -> Samples:
    """One of scikit-learn's sets, in an order of ours: the writers of digits are mixed."""
    made = getattr(import_module("sklearn.datasets"), f"load_{name}")()
    count = len(made.target)
    order = mix(torch.tensor(count), torch.arange(count)).argsort().numpy()
    return made.data.astype(inputs)[order], made.target.astype(labels)[order]


@dataclass(frozen=True)
class Generated:
    """Samples an installed package makes. They are kept in the data directory, and then suffice."""

    package: str
    module: str
    make: Callable[[], Samples]  # all samples: training, validation, test
    labels: str
    """SHA-256 of all labels: a package version that orders samples differently would move the splits."""

    def where(self, task: "Task") -> str | None:
        if all(os.path.isfile(files.cache_path(task.name, part)) for part in (TRAIN, TEST)):
            return "built in"
        try:
            return "built in" if find_spec(self.module) else None
        except ValueError:  # the module's own import was blocked
            return None

    def remedy(self, task: "Task") -> str:
        return f"install {self.package}"

    def read(self, task: "Task", part: str) -> Samples:
        path = files.cache_path(task.name, part)
        if not os.path.isfile(path):
            self._keep(task)
        return files.read_cache(path, f"{part} {self.labels}")

    def _keep(self, task: "Task") -> None:
        python, numpy = random.getstate(), np.random.get_state()
        try:
            x, y = self.make()
        except ImportError as error:
            raise EsperError(f"{task.name} is not in {files.data_directory()} and cannot be made without "
                             f"the {self.package} package; {self.remedy(task)}") from error
        finally:  # some packages seed the global generators
            random.setstate(python)
            np.random.set_state(numpy)
        labels = hashlib.sha256(y.tobytes()).hexdigest()
        if x.shape != (sum(task.sizes), *task.inputs) or labels != self.labels:
            raise EsperError(f"the installed {self.package} package makes other {task.name} samples than the "
                             "splits were fixed for; install the version that constraints.txt names")
        cut = task.count(TRAIN)
        for part, kept in ((TRAIN, slice(None, cut)), (TEST, slice(cut, None))):
            files.write_cache(files.cache_path(task.name, part), f"{part} {self.labels}", (x[kept], y[kept]))


@dataclass(frozen=True)
class Files:
    """Published files in a folder that the user registered, or where a system package puts them."""

    reader: Callable[[Path, tuple[DataFile, ...], int, tuple[int, ...], int], Samples]
    files: tuple[DataFile, ...]
    places: tuple[str, ...] = ()
    unpack: Callable[[Path, tuple[DataFile, ...]], Path] = lambda folder, originals: folder
    """The folder of the original files, made from another form of them where it holds one."""

    def where(self, task: "Task") -> str | None:
        """The folder to read: the registered one if any, else a known place; None if a file is absent."""
        registered = files.registered_folders().get(task.name)
        folders = [registered] if registered else self.places
        names = [file.name for file in self.files]
        return next((f for f in folders if all(files.find_file(Path(f), name) for name in names)), None)

    def remedy(self, task: "Task") -> str:
        return f"esper tasks add-data {task.name} DIR"

    def read(self, task: "Task", part: str) -> Samples:
        folder = self.where(task) or files.registered_folders().get(task.name)
        if folder is None:
            names = ", ".join(file.name for file in self.files)
            raise EsperError(f"the files of {task.name} are missing; get {names} and run {self.remedy(task)}")
        return self.verify(task, part, Path(folder))

    def verify(self, task: "Task", part: str, folder: Path) -> Samples:
        chosen = tuple(file for file in self.files if file.part == part)
        return self.reader(folder, chosen, task.count(part), task.inputs, task.classes)


def folder() -> Path:
    """Of users' own tasks."""
    return files.data_directory() / "tasks"


def own_cache(name: str, digest: str, part: str) -> Path:
    return folder() / f"{name}.{digest[:16]}.{part}.safetensors"


@dataclass(frozen=True)
class Stored:
    """Samples of an own task, in the data directory."""

    def where(self, task: "Task") -> str | None:
        here = all(os.path.isfile(own_cache(task.name, task.digest, part)) for part in (TRAIN, TEST))
        return str(folder()) if here else None

    def remedy(self, task: "Task") -> str:
        return f"esper tasks add {task.name} PATH --replace"

    def read(self, task: "Task", part: str) -> Samples:
        path = own_cache(task.name, task.digest, part)
        return files.read_cache(path, f"{part} {task.digest}", f"run {self.remedy(task)}")


def _known(sums: str) -> tuple[DataFile, ...]:
    """From lines of SHA-256 and name, as `sha256sum` prints them of decompressed files."""
    rows = [line.split() for line in sums.strip().splitlines()]
    tests = ("t10k", "test")
    return tuple(DataFile(name, TEST if name.startswith(tests) else TRAIN, sha256) for sha256, name in rows)


MNIST = _known("""
    ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db  train-images-idx3-ubyte
    65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5  train-labels-idx1-ubyte
    0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7  t10k-images-idx3-ubyte
    ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2  t10k-labels-idx1-ubyte
""")
FASHION = _known("""
    c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888  train-images-idx3-ubyte
    bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9  train-labels-idx1-ubyte
    5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b  t10k-images-idx3-ubyte
    0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34  t10k-labels-idx1-ubyte
""")
CIFAR10 = _known("""
    cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5  data_batch_1.bin
    a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed  data_batch_2.bin
    bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67  data_batch_3.bin
    014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48  data_batch_4.bin
    755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add  data_batch_5.bin
    8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b  test_batch.bin
""")
