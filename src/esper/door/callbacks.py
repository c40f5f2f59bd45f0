"""The door into loops of libraries: callbacks for Hugging Face's `Trainer` and for Lightning.

They attach once model, optimizer and schedulers exist, decide at the end of every epoch, and hold the grown
model in `grown` at the end. Checkpoints of the library stay as they are without growth; theirs lies beside.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.door.asked import Evaluate
from esper.door.growing import Growing, attach
from esper.door.keeping import restore, state
from esper.door.places import untouched
from esper.leyline import EsperError
from esper.leyline.storage import read_state, write_state

FILE = "growing.safetensors"
"""What grew, in a checkpoint's folder."""


class Again:
    """Batches that are made anew whenever they are iterated over."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self.make()
        try:
            yield from loader
        finally:
            getattr(loader, "end", int)()  # accelerate counts loaders that are being read


class Guest:
    """What callbacks have in common."""

    growing: Growing | None = None
    grown: nn.Module | None = None
    """Delivered when training is over."""

    def __init__(self, evaluate: Evaluate | None, options: dict[str, Any]) -> None:
        self.evaluate, self.options = evaluate, options
        self.saved: tuple[dict[str, Any], dict[str, Tensor]] | None = None

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, **found: Any) -> None:
        asked, self.grown = found | self.options, None
        with untouched(model, asked["data"]):
            if "example" not in asked:
                asked["example"] = next(iter(asked["data"]))
            growing = self.growing = attach(model, optimizer, **asked)
        self.hook = optimizer.register_state_dict_post_hook(self._without_seeds)
        if self.saved is not None:
            (header, tensors), self.saved = self.saved, None
            restore(growing, header, tensors, FILE)
            for name, value in tensors.items():
                if name.startswith("optimizer."):
                    _, slot, number, key = name.split(".", 3)
                    parameter = list(growing.grafts[int(slot)].seed.parameters())[int(number)]
                    optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What grew, and what the optimizer knows of it."""
        assert self.growing is not None
        header, tensors = state(self.growing)
        for slot in self.growing.joined:
            for number, parameter in enumerate(self.growing.grafts[slot].seed.parameters()):
                states = self.growing.optimizer.state.get(parameter, {}).items()
                tensors |= {f"optimizer.{slot}.{number}.{key}": torch.as_tensor(value).cpu().clone()
                            for key, value in states if value is not None}
        return header, tensors

    def _without_seeds(self, optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        """Optimizer states as they are without growth: libraries load them before seeds are back."""
        assert self.growing is not None
        seeds = {id(p) for graft in self.growing.grafts.values() for p in graft.parameters()}
        numbers: dict[int, int] = {}
        for group, told in zip(optimizer.param_groups, packed["param_groups"], strict=True):
            mine = [n for n, p in zip(told["params"], group["params"], strict=True) if id(p) not in seeds]
            told["params"] = [numbers.setdefault(number, len(numbers)) for number in mine]
        packed["state"] = {numbers[n]: state for n, state in packed["state"].items() if n in numbers}
        return packed

    def deliver(self) -> None:
        if self.growing is not None and self.grown is None:
            self.hook.remove()
            self.grown = self.growing.deliver()


def trainer_callback(trainer: Any, *, evaluate: Evaluate | None = None, **options: Any) -> Any:
    """Let the model of a Hugging Face `Trainer` grow in `trainer.train()`; returns a callback, which has
    joined the trainer and holds the model in `grown` afterwards.

    evaluate: scores the model, higher is better; by default minus the loss on each batch of evaluation data.
    options: of `attach`; example, epochs, loss, data and schedulers are the trainer's own.
    """

    def minus_loss() -> Tensor:
        net = trainer.model_wrapped.eval()
        steps = (trainer.prediction_step(net, batch, prediction_loss_only=True)
                 for batch in trainer.get_eval_dataloader())
        return -torch.stack([loss for loss, *_ in steps])

    def loss(net: nn.Module, batch: Any) -> Tensor:
        with trainer.compute_loss_context_manager():
            value: Tensor = trainer.compute_loss(net, batch)
            return value

    class GrowCallback(Guest, _base("transformers", "TrainerCallback")):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if args.load_best_model_at_end:
                raise EsperError("the best model's weights do not fit what grew later; "
                                 "leave load_best_model_at_end out")
            if self.evaluate is None and trainer.eval_dataset is None:
                raise EsperError("growth needs a score; give the Trainer an eval_dataset, or pass evaluate")
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
            if state.global_step and path.exists():
                self.saved = read_state(path, "growing")
            elif "esper" in state.stateful_callbacks:
                raise EsperError(f"{path} is missing; resume in the output_dir that holds the checkpoint")
            state.stateful_callbacks["esper"] = {}  # lies in every checkpoint
            bare = [getattr(trainer.optimizer, "optimizer", trainer.optimizer),
                    getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)]
            self.begin(trainer.model_wrapped, bare[0], epochs=state.num_train_epochs, loss=loss,
                       data=Again(trainer.get_train_dataloader), schedulers=bare[1:])

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            assert self.growing is not None
            self.growing.end_epoch(self.evaluate or minus_loss)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                write_state(Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE, "growing",
                            *self.state())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.deliver()

    callback = GrowCallback(evaluate, options)
    trainer.add_callback(callback)
    return callback


def lightning_callback(monitor: str = "val_loss", mode: str = "min", *, evaluate: Evaluate | None = None,
                       **options: Any) -> Any:
    """Let a `LightningModule` grow in `fit`: a callback for Lightning's `Trainer`, which holds the module in
    `grown` afterwards.

    monitor: what `validation_step` logs, or returns under "loss", for each batch; mode: "min" or "max" of it
    is best. evaluate: scores the module instead, higher is better.
    options: of `attach`; example, epochs, loss, data and schedulers are the trainer's own.
    """
    if mode not in ("min", "max"):
        raise EsperError(f"mode is min or max, not {mode!r}")

    class GrowCallback(Guest, _base("lightning.pytorch", "Callback", "pytorch_lightning")):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if len(trainer.optimizers) != 1:
                raise EsperError(f"growth needs one optimizer; this module has {len(trainer.optimizers)}")

            def stepped(step: Callable[..., Any], batch: Any) -> Any:
                with trainer.strategy.precision_plugin.forward_context():
                    out = step(trainer.strategy.batch_to_device(batch), 0)
                return out["loss"] if isinstance(out, dict) else out

            def loss(net: nn.Module, batch: Any) -> Tensor:
                with heard(module):
                    value: Tensor = stepped(module.training_step, batch)
                    return value

            def monitored() -> Tensor:
                module.eval()
                with heard(module) as said:
                    loaders = trainer.val_dataloaders
                    several = isinstance(loaders, (list, tuple))
                    batches = itertools.chain(*loaders if several else [() if loaders is None else loaders])
                    given = [stepped(module.validation_step, batch) for batch in batches]
                values = said.get(monitor, given)
                if not values or not all(isinstance(value, (Tensor, float)) for value in values):
                    raise EsperError(f"validation_step must log {monitor!r} as a number for each batch; "
                                     "name what it logs with monitor, or pass evaluate")
                told = torch.tensor([float(value) for value in values], dtype=torch.float64)
                return -told if mode == "min" else told

            self.score = self.evaluate or monitored
            epochs = {"epochs": trainer.max_epochs} if (trainer.max_epochs or 0) > 0 else {}
            self.begin(trainer.model, trainer.optimizers[0], loss=loss, data=trainer.train_dataloader,
                       schedulers=[config.scheduler for config in trainer.lr_scheduler_configs], **epochs)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            assert self.growing is not None
            self.growing.end_epoch(self.score)

        def state_dict(self) -> dict[str, Any]:
            return {} if self.growing is None else dict(zip(("header", "tensors"), self.state(), strict=True))

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if state_dict:
                self.saved = state_dict["header"], state_dict["tensors"]

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            self.deliver()

    return GrowCallback(evaluate, options)


@contextmanager
def heard(module: Any) -> Iterator[dict[str, list[Any]]]:
    """What a LightningModule logs is told here, by name, and to nobody else."""
    said: dict[str, list[Any]] = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        said.setdefault(name, []).append(value)

    def log_dict(values: Any, *_: Any, **__: Any) -> None:
        for name, value in values.items():
            log(name, value)

    module.log, module.log_dict = log, log_dict  # on the object, before those of its class
    try:
        yield said
    finally:
        del module.log, module.log_dict


def _base(package: str, name: str, other: str = "") -> Any:
    """A library's class, of the package that is in use."""
    named = sorted(filter(None, (package, other)), key=lambda each: each not in sys.modules)
    for each in named:
        try:
            return getattr(import_module(each), name)
        except ImportError:
            continue
    raise EsperError(f"{' or '.join(named)} is not installed; pip install {package.partition('.')[0]}")
