"""The tasks: what there is to learn, and three fixed splits of which one is locked. Where samples come from
is in `sources` and `own`."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina import find_objective
from esper.leyline import EsperError
from esper.leyline.plugins import Registry, load_plugins
from esper.tolaria import files, own, readers, sources
from esper.tolaria.files import TEST, TRAIN, Samples
from esper.tolaria.openings import log_opening
from esper.tolaria.sources import Files, Generated, Stored


@dataclass(frozen=True)
class Task:
    """What there is to learn. `from_*` make one of your own data; then every process knows its name."""

    name: str
    host: str  # kind that it is meant for
    inputs: tuple[int, ...]  # shape of one sample as that host takes it
    classes: int
    sizes: tuple[int, int, int]  # samples that train, validate and test
    reference: str  # what others reach, and who says so
    source: Generated | Files | Stored
    objective: str = "classification"  # a name of `OBJECTIVES`
    entropy: float = 0.0  # of the labels in nats, for next_token
    names: tuple[str, ...] = ()  # what its user called each class; each token of a text is a byte's number
    mean: float = 0.0  # of a number to predict: y * deviation + mean undoes its standardisation
    deviation: float = 1.0
    digest: str = ""  # of everything in an own task

    def count(self, part: str) -> int:
        return self.sizes[2] if part == TEST else self.sizes[0] + self.sizes[1]

    @property
    def channels(self) -> int:
        """Parts of a sample that are standardised apart: channels, or the features of an own table."""
        return self.inputs[0] if len(self.inputs) > 1 or self.digest else 1

    @staticmethod
    def from_arrays(name: str, x: Any, y: Any = None, objective: str = "classification", *,
                    replace: bool = False) -> "Task":
        """Make and store a task: x [n, features], [n, channels, length] or [n, channels, height, width] with
        a label for each in y [n]; for next_token, token numbers x [n, T] and y [n, T], or x [n, T + 1]."""
        return _stored(name, lambda: own.prepare(x, y, objective), replace)

    @staticmethod
    def from_dataset(name: str, dataset: Any, objective: str = "classification", *,
                     replace: bool = False) -> "Task":
        """The same from a torch map-style dataset of pairs (x, y)."""
        return _stored(name, lambda: own.prepare(*own.collect(dataset), objective), replace)

    @staticmethod
    def from_text(name: str, text: str | bytes, context: int = 64, *, replace: bool = False) -> "Task":
        """Predict every next byte of a text, in windows of `context` bytes."""
        return _stored(name, lambda: own.prepare_text(text, context), replace)

    @staticmethod
    def from_file(name: str, path: str | Path, objective: str = "", *, target: str = "", context: int = 64,
                  replace: bool = False) -> "Task":
        """From a .npz, .csv or .tsv file, a folder of pictures, or any other file as text."""
        return _stored(name, lambda: readers.read(path, objective, target, context), replace)


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


def _real(name: str, values: Tensor) -> Tensor:
    """As float32."""
    if values.is_complex():
        raise EsperError(f"{name} is {values.dtype}; expected real numbers")
    return values.to(torch.float32)


def _checked_labels(name: str, values: Any, shape: tuple[int, ...], task: Task) -> Tensor:
    """Of this shape, as the task's objective has them; numbers of any type are taken."""
    y, objective, most = _tensor(name, values), find_objective(task.objective), task.classes - 1
    if y.shape != shape:
        many = " x ".join(map(str, shape))
        raise EsperError(f"{name} has shape {list(y.shape)}; expected a label for each of {many} samples")
    if objective.label_dtype.is_floating_point:
        y = _real(name, y)
        try:
            objective.check(y, task.classes)
        except EsperError as error:
            raise EsperError(f"{name}: {error}") from error
        return y
    whole = y.new_zeros(shape, dtype=torch.int64) if y.is_complex() else y.to(torch.int64)
    if not torch.equal(whole.to(y.dtype), y):
        raise EsperError(f"{name} is {y.dtype} and holds numbers that are not whole; "
                         f"expected labels from 0 to {most}")
    low, high = (int(value) for value in whole.aminmax())
    if low < 0 or high > most:
        raise EsperError(f"{name} has labels from {low} to {high}; expected 0 to {most}")
    return whole


def _checked(split: str, x: Any, y: Any, task: Task) -> tuple[Tensor, Tensor]:
    """Samples of a split as its task has them, or one sentence."""
    name, x = f"{split}x", _tensor(f"{split}x", x)
    if find_objective(task.objective).tokens:
        if x.dim() != 2 or not x.numel():
            raise EsperError(f"{name} has shape {list(x.shape)}; expected tokens [samples, length]")
        x = _checked_labels(name, x, tuple(x.shape), task)
        return x, _checked_labels(f"{split}y", y, tuple(x.shape), task)
    if x.dim() < 2 or not x.numel():
        raise EsperError(f"{name} has shape {list(x.shape)}; "
                         "expected [samples, *inputs] and at least one sample")
    x = _real(name, x)
    low, high = (float(value) for value in x.aminmax())
    if not -LARGEST <= low <= high <= LARGEST:  # nor if it is no number
        raise EsperError(f"{name} reaches from {low:.3g} to {high:.3g}; expected finite numbers of at most "
                         f"{LARGEST:.0e} in size: standardise them, and look for outliers")
    return x, _checked_labels(f"{split}y", y, (len(x),), task)


@dataclass(frozen=True)
class TaskData:
    """A task's open splits. The test split is not here, nor in the memory behind these tensors. NumPy arrays
    and other number types become the tensors named below; what cannot be learned is refused."""

    task: Task
    x: Tensor  # float32 [n, *inputs], standardised with the statistics of the training split; int64 tokens
    y: Tensor  # [n], int64 class numbers or float32, as the task's objective has them; a label per token
    validation_x: Tensor
    validation_y: Tensor

    def __post_init__(self) -> None:
        for split in ("", "validation_"):
            x, y = _checked(split, getattr(self, f"{split}x"), getattr(self, f"{split}y"), self.task)
            object.__setattr__(self, f"{split}x", x)
            object.__setattr__(self, f"{split}y", y)
        if self.x.shape[1:] != self.validation_x.shape[1:]:
            raise EsperError(f"a sample of x has shape {list(self.x.shape[1:])}, one of validation_x "
                             f"{list(self.validation_x.shape[1:])}; both must be alike")


@dataclass(frozen=True)
class ProofKey:
    """Opens the test split. Constructed by the proof alone; a test reads the sources to make sure of it."""

    reason: str  # what the test split is opened for


TASKS = {task.name: task for task in (
    Task("mnist1d", "conv1d", (1, 40), 10, (3_000, 1_000, 1_000),
         "linear 32%, MLP 68%, CNN 94%, human 96% (Greydanus & Kobak 2024)",
         Generated("mnist1d", "mnist1d", sources.make_mnist1d,
                   "6feec4a017698c7fe237c8854cbd2e338c6dd5c16240f6fa79daefaaa129e169")),
    Task("digits", "mlp", (64,), 10, (1_000, 397, 400), "kNN and SVM about 97-98% (scikit-learn examples)",
         Generated("scikit-learn", "sklearn", partial(sources.from_sklearn, "digits", np.uint8, np.int64),
                   "5575a4764b4cb8cb334b3e766d5633f250b4751c03bcfa4110ee6a3d461a3bb7")),
    Task("diabetes", "mlp", (10,), 1, (260, 90, 92), "ridge explains 40-50% (scikit-learn examples)",
         Generated("scikit-learn", "sklearn", partial(sources.from_sklearn, "diabetes", float, float),
                   "42af70f1c53828726cea04091f5389b4a6d3acc0c346942eee1c30861d15ca91"),
         objective="regression", mean=156.1423076923077, deviation=79.02462456084336),
    Task("mnist", "cnn", (1, 28, 28), 10, (50_000, 10_000, 10_000),
         "linear 88-92%, CNN above 99% (LeCun 1998 and later)", Files(files.read_idx, sources.MNIST)),
    Task("fashion", "cnn", (1, 28, 28), 10, (50_000, 10_000, 10_000), "small CNNs about 91-93% (Xiao 2017)",
         Files(files.read_idx, sources.FASHION, places=("/usr/share/datasets/fashion-mnist",))),
    Task("cifar10", "cnn", (3, 32, 32), 10, (45_000, 5_000, 10_000),
         "small CNNs about 75-85%, large ones above 95% (commonly reported)",
         Files(files.read_cifar, sources.CIFAR10, unpack=readers.unpack_sheets)),
)}


MAKERS = Registry[Callable[[], Task]]("task", Callable, {})  # of tasks that packages bring


def register_task(name: str, make: Callable[[], tuple[Any, Any]], objective: str = "classification") -> None:
    """Make a task known by its name: `make()` returns x and y as `Task.from_arrays` takes them. It is called
    when the task is first used; from then on the data directory has it."""
    if name in TASKS:
        raise EsperError(f"{name} is a built-in task; choose another name")
    MAKERS.add(name, lambda: Task.from_arrays(name, *make(), objective))


def all_tasks() -> dict[str, Task]:
    """Built-in tasks, then packages' and users' own by name."""
    load_plugins()
    return TASKS | {name: find_task(name) for name in sorted({*MAKERS, *own.names()})}


def find_task(name: str) -> Task:
    """A built-in task, one that was added to the data directory, or one that a package brings."""
    if isinstance(name, str) and name in TASKS:
        return TASKS[name]
    if own.known(name):
        return _own(name, own.describe(name))
    if name not in MAKERS:
        raise EsperError(f"no task {name!r}; choose from {', '.join((*TASKS, *MAKERS, *own.names()))}")
    return MAKERS[name]()


def task_digest(name: str) -> str:
    """Of everything in an own task: what a name means may change. Empty for built-in tasks, which do not."""
    return find_task(name).digest


remove_task, data_directory = own.remove, files.data_directory


def _own(name: str, description: own.Description) -> Task:
    return Task(name, reference="own data", source=Stored(), **vars(description))


def _stored(name: str, make: Callable[[], own.Made], replace: bool) -> Task:
    """Check everything that loading will check, then keep the task under its name."""
    if not isinstance(name, str) or not own.NAME.fullmatch(name):
        raise EsperError(f"a task cannot be called {name!r}; use letters, digits, - and _")
    if name in TASKS:
        raise EsperError(f"{name} is a built-in task; choose another name")
    description, parts = made = make()
    task = _own(name, description)
    _data(task, parts[TRAIN])
    _checked("test_", *_opener(task, parts[TRAIN][0])(parts[TEST]), task)
    own.store(name, made, replace)
    return task


def where(task: Task) -> str | None:
    """"built in", the folder that would be read, or None where data is missing. Nothing is verified."""
    return task.source.where(task)


def _opener(task: Task, x: NDArray[Any]) -> Callable[[Samples], tuple[Tensor, Tensor]]:
    """What makes samples such as hosts take: tokens are whole, numbers are standardised. `x` begins with the
    training split, which gives each channel's mean and deviation; constant ones of own tasks have 1."""
    if find_objective(task.objective).tokens:
        return lambda samples: (torch.from_numpy(samples[0].astype(np.int64)),
                                torch.from_numpy(samples[1].astype(np.int64)))
    pairs = [(part.flat[0], 1.0) if task.digest and part.min() == part.max() else
             (part.mean(dtype=np.float64), part.std(dtype=np.float64))
             for part in x[: task.sizes[0]].reshape(task.sizes[0], task.channels, -1).swapaxes(0, 1)]
    kind = np.promote_types(x.dtype, np.float32)
    mean, deviation = np.array(pairs, kind).T.reshape(2, task.channels, *[1] * (len(task.inputs) - 1))
    if not deviation.all():
        raise EsperError(f"all training samples of {task.name} are the same; "
                         f"{task.source.remedy(task)} with the original files")

    def opened(samples: Samples) -> tuple[Tensor, Tensor]:
        scaled, y = samples[0].astype(kind), samples[1]
        scaled -= mean
        scaled /= deviation
        if y.dtype.kind == "f":
            y = ((y - task.mean) / task.deviation).astype(np.float32)
        return torch.from_numpy(scaled.astype(np.float32, copy=False)), torch.from_numpy(y)

    return opened


def _data(task: Task, samples: Samples, whole: bool = False) -> TaskData:
    (x, y), cut = _opener(task, samples[0])(samples), task.sizes[0]
    used = None if whole else cut
    return TaskData(task, x[:used], y[:used], x[cut:], y[cut:])


def load_task(name: str, whole: bool = False) -> TaskData:
    """The open splits. With `whole`, validation samples train as well: a paper's use; they choose nothing."""
    task = find_task(name)
    return _data(task, task.source.read(task, TRAIN), whole)


def open_test(name: str, key: ProofKey) -> tuple[Tensor, Tensor]:
    """The test split, for the proof. The opening is logged."""
    task = find_task(name)
    if not isinstance(key, ProofKey):
        raise EsperError(f"the test split of {name} opens with a ProofKey, not a {type(key).__name__}; "
                         "use the validation split")
    opened = _opener(task, task.source.read(task, TRAIN)[0])
    log_opening(name, key.reason)
    return opened(task.source.read(task, TEST))


def add_data(name: str, path: str | Path) -> Path:
    """Verify a task's files in a folder, then remember it. A failed check leaves everything as it was."""
    task, folder = find_task(name), Path(path).expanduser().absolute()
    if not isinstance(task.source, Files):
        able = ", ".join(t.name for t in TASKS.values() if isinstance(t.source, Files))
        raise EsperError(f"{name} is {'your own' if task.digest else 'built in'} and takes no files; "
                         f"tasks that take files are {able}")
    if not os.path.isdir(folder):
        raise EsperError(f"{folder} is not a folder; name the one that holds {task.source.files[0].name}")
    folder = task.source.unpack(folder, task.source.files)
    _opener(task, task.source.verify(task, TRAIN, folder)[0])
    task.source.verify(task, TEST, folder)
    files.register_folder(name, folder)
    return folder
