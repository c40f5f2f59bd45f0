"""The tasks: what there is to learn, where its samples come from, and three fixed splits of which one is
locked.

How a file is read and verified is in `files`; what a scenario does to the samples is not here either.
"""

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina import find_objective
from esper.leyline import EsperError
from esper.leyline.keys import mix
from esper.tolaria import files
from esper.tolaria.files import DataFile, Samples
from esper.tolaria.openings import log_opening

TRAIN, TEST = "train", "test"
"""The two parts a source keeps apart; the first holds the training and the validation split."""


@dataclass(frozen=True)
class Task:
    name: str
    host: str  # kind that it is meant for
    inputs: tuple[int, ...]  # shape of one sample as that host takes it
    classes: int
    sizes: tuple[int, int, int]  # samples that train, validate and test
    reference: str  # what others reach, and who says so
    source: "Generated | Files"
    objective: str = "classification"  # a name of `OBJECTIVES`
    entropy: float = 0.0  # of the labels in nats, for next_token

    def count(self, part: str) -> int:
        return self.sizes[2] if part == TEST else self.sizes[0] + self.sizes[1]


LARGEST = 1e6  # no standardised input is of this size; raw values or a division by almost nothing are


def _tensor(name: str, values: Any) -> Tensor:
    """The memory of a tensor, and a copy of anything else that NumPy reads as numbers."""
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
        return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError) as error:
        raise EsperError(f"{name} is a {type(values).__name__} that holds no numbers; "
                         "give a tensor or a NumPy array") from error


def _checked_inputs(name: str, values: Any) -> Tensor:
    """float32 [n, *inputs], finite and of a size that can be learned from."""
    x = _tensor(name, values)
    if x.dim() < 2 or not x.numel():
        raise EsperError(f"{name} has shape {list(x.shape)}; "
                         "expected [samples, *inputs] and at least one sample")
    if x.is_complex():
        raise EsperError(f"{name} is {x.dtype}; expected real numbers")
    x = x.to(torch.float32)
    low, high = (float(value) for value in x.aminmax())
    if not -LARGEST <= low <= high <= LARGEST:  # nor if it is no number
        raise EsperError(f"{name} reaches from {low:.3g} to {high:.3g}; expected finite numbers of at most "
                         f"{LARGEST:.0e} in size: standardise them")
    return x


def _checked_labels(name: str, values: Any, samples: int, task: Task) -> Tensor:
    """[samples] as the task's objective has them; numbers of any type are taken."""
    y, objective = _tensor(name, values), find_objective(task.objective)
    if y.shape != (samples,):
        raise EsperError(f"{name} has shape {list(y.shape)}; expected a label for each of {samples} samples")
    if objective.label_dtype.is_floating_point:
        if y.is_complex():
            raise EsperError(f"{name} is {y.dtype}; expected real numbers")
    else:
        whole = y.new_zeros(samples, dtype=torch.int64) if y.is_complex() else y.to(torch.int64)
        most = task.classes - 1
        if not torch.equal(whole.to(y.dtype), y):
            raise EsperError(f"{name} is {y.dtype} and holds numbers that are not whole; "
                             f"expected labels from 0 to {most}")
        low, high = (int(value) for value in whole.aminmax())
        if low < 0 or high > most:
            raise EsperError(f"{name} has labels from {low} to {high}; expected 0 to {most}")
    y = y.to(objective.label_dtype)
    try:
        objective.check(y, task.classes)
    except EsperError as error:
        raise EsperError(f"{name}: {error}") from error
    return y


@dataclass(frozen=True)
class TaskData:
    """A task's open splits. The test split is not here, nor in the memory behind these tensors. NumPy arrays
    and other number types become the tensors named below; what cannot be learned is refused."""

    task: Task
    x: Tensor  # float32 [n, *inputs], standardised with the statistics of the training split
    y: Tensor  # [n], int64 class numbers or float32, as the task's objective has them
    validation_x: Tensor
    validation_y: Tensor

    def __post_init__(self) -> None:
        for split in ("", "validation_"):
            x = _checked_inputs(f"{split}x", getattr(self, f"{split}x"))
            y = _checked_labels(f"{split}y", getattr(self, f"{split}y"), len(x), self.task)
            object.__setattr__(self, f"{split}x", x)
            object.__setattr__(self, f"{split}y", y)
        if self.x.shape[1:] != self.validation_x.shape[1:]:
            raise EsperError(f"a sample of x has shape {list(self.x.shape[1:])}, one of validation_x "
                             f"{list(self.validation_x.shape[1:])}; both must be alike")


@dataclass(frozen=True)
class ProofKey:
    """Opens the test split. Constructed by the proof alone; a test reads the sources to make sure of it."""

    reason: str  # what the test split is opened for


@contextmanager
def _global_randomness_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _make_mnist1d() -> Samples:
    """The published set: generator defaults, spelled out so that a later package cannot move them."""
    generator = import_module("mnist1d.data")
    arguments = generator.get_dataset_args()
    vars(arguments).update(num_samples=5000, train_split=0.8, final_seq_length=40, shuffle_seq=False, seed=42)
    made = generator.make_dataset(arguments)
    x = np.concatenate([made["x"], made["x_test"]]).astype(np.float32)
    return x[:, None], np.concatenate([made["y"], made["y_test"]]).astype(np.int64)


def _make_digits() -> Samples:
    made = import_module("sklearn.datasets").load_digits()
    order = mix(torch.tensor(1797), torch.arange(len(made.target))).argsort().numpy()  # writers are mixed
    return made.data.astype(np.uint8)[order], made.target.astype(np.int64)[order]


@dataclass(frozen=True)
class Generated:
    """Samples an installed package makes. They are kept in the data directory, and then suffice."""

    package: str
    module: str
    make: Callable[[], Samples]
    """All samples: training, validation, test."""
    labels: str
    """SHA-256 of all labels: a package version that orders samples differently would move the splits."""

    def where(self, task: Task) -> str | None:
        if all(os.path.isfile(files.cache_path(task.name, part)) for part in (TRAIN, TEST)):
            return "built in"
        try:
            return "built in" if find_spec(self.module) else None
        except ValueError:  # the module's own import was blocked
            return None

    def remedy(self, task: Task) -> str:
        return f"install {self.package}"

    def read(self, task: Task, part: str) -> Samples:
        path = files.cache_path(task.name, part)
        if not os.path.isfile(path):
            self._keep(task)
        return files.read_cache(path, self._recipe(part))

    def _recipe(self, part: str) -> str:
        return f"{part} {self.labels}"

    def _keep(self, task: Task) -> None:
        try:
            with _global_randomness_kept():
                x, y = self.make()
        except ImportError as error:
            raise EsperError(f"{task.name} is not in {files.data_directory()} and cannot be made without "
                             f"the {self.package} package; {self.remedy(task)}") from error
        labels = hashlib.sha256(y.tobytes()).hexdigest()
        if x.shape != (sum(task.sizes), *task.inputs) or labels != self.labels:
            raise EsperError(f"the installed {self.package} package makes other {task.name} samples than the "
                             "splits were fixed for; install the version that constraints.txt names")
        cut = task.count(TRAIN)
        for part, kept in ((TRAIN, slice(None, cut)), (TEST, slice(cut, None))):
            files.write_cache(files.cache_path(task.name, part), self._recipe(part), (x[kept], y[kept]))


@dataclass(frozen=True)
class Files:
    """Published files in a folder that the user registered, or where a system package puts them."""

    reader: Callable[[Path, tuple[DataFile, ...], int, tuple[int, ...], int], Samples]
    files: tuple[DataFile, ...]
    places: tuple[str, ...] = ()

    def where(self, task: Task) -> str | None:
        """The folder to read: the registered one if any, else a known place; None if a file is absent."""
        registered = files.registered_folders().get(task.name)
        folders = [registered] if registered else self.places
        names = [file.name for file in self.files]
        return next((f for f in folders if all(files.find_file(Path(f), name) for name in names)), None)

    def remedy(self, task: Task) -> str:
        return f"esper tasks add-data {task.name} DIR"

    def read(self, task: Task, part: str) -> Samples:
        folder = self.where(task) or files.registered_folders().get(task.name)
        if folder is None:
            names = ", ".join(file.name for file in self.files)
            raise EsperError(f"the files of {task.name} are missing; get {names} and run {self.remedy(task)}")
        return self.verify(task, part, Path(folder))

    def verify(self, task: Task, part: str, folder: Path) -> Samples:
        chosen = tuple(file for file in self.files if file.part == part)
        return self.reader(folder, chosen, task.count(part), task.inputs, task.classes)


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

TASKS = {task.name: task for task in (
    Task("mnist1d", "conv1d", (1, 40), 10, (3_000, 1_000, 1_000),
         "linear 32%, MLP 68%, CNN 94%, human 96% (Greydanus & Kobak 2024)",
         Generated("mnist1d", "mnist1d", _make_mnist1d,
                   "6feec4a017698c7fe237c8854cbd2e338c6dd5c16240f6fa79daefaaa129e169")),
    Task("digits", "mlp", (64,), 10, (1_000, 397, 400), "kNN and SVM about 97-98% (scikit-learn examples)",
         Generated("scikit-learn", "sklearn", _make_digits,
                   "5575a4764b4cb8cb334b3e766d5633f250b4751c03bcfa4110ee6a3d461a3bb7")),
    Task("mnist", "cnn", (1, 28, 28), 10, (50_000, 10_000, 10_000),
         "linear 88-92%, CNN above 99% (LeCun 1998 and later)", Files(files.read_idx, MNIST)),
    Task("fashion", "cnn", (1, 28, 28), 10, (50_000, 10_000, 10_000), "small CNNs about 91-93% (Xiao 2017)",
         Files(files.read_idx, FASHION, places=("/usr/share/datasets/fashion-mnist",))),
    Task("cifar10", "cnn", (3, 32, 32), 10, (45_000, 5_000, 10_000),
         "small CNNs about 75-85%, large ones above 95% (commonly reported)",
         Files(files.read_cifar, CIFAR10)),
)}


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise EsperError(f"no task {name!r}; choose from {', '.join(TASKS)}")
    return TASKS[name]


def where(task: Task) -> str | None:
    """"built in", the folder whose files would be read, or None where the data is missing. Looks, but
    verifies nothing."""
    return task.source.where(task)


def present(task: Task) -> bool:
    return where(task) is not None


def _scale(task: Task, x: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and deviation of each channel over the training split; a flat sample is one channel."""
    channels = task.inputs[0] if len(task.inputs) > 1 else 1
    flat = x[: task.sizes[0]].reshape(task.sizes[0], channels, -1)
    pairs = [(flat[:, c].mean(dtype=np.float64), flat[:, c].std(dtype=np.float64)) for c in range(channels)]
    mean, deviation = np.array(pairs, np.float32).T.reshape(2, channels, *[1] * (len(task.inputs) - 1))
    if not deviation.all():
        raise EsperError(f"all training samples of {task.name} are the same; "
                         f"{task.source.remedy(task)} with the original files")
    return mean, deviation


def _standardised(x: NDArray[Any], scale: tuple[NDArray[np.float32], NDArray[np.float32]]) -> Tensor:
    scaled = x.astype(np.float32)
    scaled -= scale[0]
    scaled /= scale[1]
    return torch.from_numpy(scaled)


def load_task(name: str, whole: bool = False) -> TaskData:
    """The open splits. With `whole`, validation samples train as well: a paper's use; they choose nothing."""
    task = find_task(name)
    raw, labels = task.source.read(task, TRAIN)
    x, y, cut = _standardised(raw, _scale(task, raw)), torch.from_numpy(labels), task.sizes[0]
    used = None if whole else cut
    return TaskData(task, x[:used], y[:used], x[cut:], y[cut:])


def open_test(name: str, key: ProofKey) -> tuple[Tensor, Tensor]:
    """The test split, for the proof. The opening is logged."""
    task = find_task(name)
    if not isinstance(key, ProofKey):
        raise EsperError(f"the test split of {name} opens with a ProofKey, not a {type(key).__name__}; "
                         "use the validation split")
    scale = _scale(task, task.source.read(task, TRAIN)[0])
    log_opening(name, key.reason)
    x, y = task.source.read(task, TEST)
    return _standardised(x, scale), torch.from_numpy(y)


def add_data(name: str, path: str | Path) -> Path:
    """Verify a task's files in a folder, then remember it. A failed check leaves everything as it was."""
    task, folder = find_task(name), Path(path).expanduser().absolute()
    if not isinstance(task.source, Files):
        able = ", ".join(t.name for t in TASKS.values() if isinstance(t.source, Files))
        raise EsperError(f"{name} is built in and takes no files; tasks that take files are {able}")
    if not os.path.isdir(folder):
        raise EsperError(f"{folder} is not a folder; name the one that holds {task.source.files[0].name}")
    _scale(task, task.source.verify(task, TRAIN, folder)[0])
    task.source.verify(task, TEST, folder)
    files.register_folder(name, folder)
    return folder
