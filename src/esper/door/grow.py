"""`esper.grow`: the training loop as well, for a model and two loaders of batches."""

import math
import random
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from esper.door.asked import Loss
from esper.door.evidence import Report
from esper.door.growing import Growing, attach
from esper.door.keeping import restore, state
from esper.door.places import generators
from esper.leyline import EsperError
from esper.leyline.storage import decoding, read_state, write_state

WARM_UP = 0.05
"""Share of all steps in which the learning rate rises; then it falls along a cosine."""


@dataclass(frozen=True)
class Grown:
    """What became of a model."""

    module: nn.Module
    """Plain, with what was kept."""
    history: list[Report]
    params: int
    """That were grown and kept."""

    @property
    def score(self) -> float:
        """Of the last epoch, on the validation batches."""
        return self.history[-1].score

    def __str__(self) -> str:
        lines = [f"{'epoch':>5}  {'score':>8}  {'grown':>7}  {'FLOPs':>6}  decision; what seeds were worth"]
        for report in self.history:
            worth = ", ".join(f"{path} {gain:+.4f}" for path, gain in report.contributions.items())
            lines.append(f"{report.epoch:5d}  {report.score:8.4f}  {report.params:7,d}  {report.flops:+6.1%}"
                         f"  {report.decision}{'; ' + worth if worth else ''}")
        return "\n".join(lines)


def grow(model: nn.Module, train: Iterable[Any], validation: Iterable[Any], loss: Loss, *, epochs: int = 30,
         score: Callable[[nn.Module, Any], Any] | None = None, optimizer: torch.optim.Optimizer | None = None,
         lr: float = 1e-3, folder: str | Path | None = None, patience: int = 0,
         tell: Callable[[Report], object] | None = None, **options: Any) -> Grown:
    """Train a model and let it grow; returns it with what was kept.

    train, validation: batches to iterate over again and again, such as DataLoaders.
    loss: `loss(model, batch)`, a number with a gradient; score: likewise without one, or a number for each
    sample, higher is better (default: minus the loss); with an objective it returns (outputs, labels).
    optimizer: AdamW with a learning rate of `lr`, warm-up and a cosine, unless you pass one.
    folder: keeps a checkpoint after every epoch, and goes on from the one that is there, bit for bit.
    patience: stop after so many epochs without a better score; 0 is never. tell: called with each report.
    options: of `attach`.
    """
    if taken := options.keys() & {"example", "data", "schedulers"}:
        raise EsperError(f"grow has {' and '.join(sorted(taken))} of its own; leave it out, or use attach")
    if options.get("objective") and score is None:
        raise EsperError("with an objective, pass a score that returns (outputs, labels) of a batch")
    rated, _ = optimizer is None, _length(validation, "validation")
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    steps = max(1, epochs) * _length(train, "train")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step / steps) if rated else 1.0)
    growing = attach(model, optimizer, example=next(iter(train)), epochs=epochs, loss=loss, data=train,
                     schedulers=[schedule], **options)
    path = None if folder is None else Path(folder) / "grow.safetensors"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    if path is not None and path.exists():
        _load(path, growing)

    def evaluate() -> Tensor | tuple[Tensor, Tensor]:
        with torch.no_grad():
            model.eval()
            parts = [score(model, batch) if score else -loss(model, batch) for batch in validation]
        if growing.objective is not None:
            outputs, labels = zip(*parts, strict=True)
            return torch.cat(outputs), torch.cat(labels)
        return torch.cat([part.detach().double().reshape(-1).cpu() for part in parts])

    while len(growing.history) < epochs and not _stalled(growing.history, patience):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            value = loss(model, batch)
            if not growing.joined and not bool(value.isfinite().all()):
                raise EsperError(f"the loss is {value.detach()} in epoch {len(growing.history)}, and no seed "
                                 "joined yet; look at the data, or lower the learning rate")
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        report = growing.end_epoch(evaluate)
        if tell is not None:
            tell(report)
        if path is not None:
            _save(path, growing)
    history = growing.history
    kept = sum(p.numel() for graft in growing.kept.values() for p in graft.parameters())
    return Grown(growing.deliver(), history, kept)


def _length(batches: Iterable[Any], what: str) -> int:
    once = iter(batches) is batches
    try:
        count = 0 if once else len(cast(Sized, batches))
    except TypeError:  # loaders of streams have a length that cannot be asked for
        count = sum(1 for _ in batches)
    if not count:
        raise EsperError(f"{what} {'can be iterated over only once' if once else 'yields no batches'}; "
                         "pass a list or a DataLoader")
    return count


def rate(done: float) -> float:
    """Share of the learning rate when this share of all steps is done."""
    return min(done / WARM_UP + 1e-3, (1 + math.cos(math.pi * min(done, 1.0))) / 2)


def _stalled(history: list[Report], patience: int) -> bool:
    scores = [report.score for report in history]
    return bool(patience) and len(scores) > patience and max(scores[:-patience]) >= max(scores[-patience:])


def _save(path: Path, growing: Growing) -> None:
    """Everything in one file, which appears whole or not at all."""
    kept, (grown, seeds) = growing.optimizer.state_dict(), state(growing)
    tensors = {f"model.{name}": value for name, value in growing.model.state_dict().items()}
    tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(value)
                for number, state in kept["state"].items()
                for name, value in state.items() if value is not None}
    tensors |= {f"growing.{name}": value for name, value in seeds.items()}
    drawn = generators(growing.host, growing.asked.data)
    tensors |= {f"rng.{number}": each.get_state() for number, each in enumerate(drawn)}
    numpy: Any = np.random.get_state()
    header = {"growing": grown, "groups": kept["param_groups"],
              "schedule": growing.asked.schedulers[0].state_dict(),
              "python": random.getstate(), "numpy": [numpy[0], numpy[1].tolist(), *numpy[2:]],
              "history": [vars(report) for report in growing.history]}
    write_state(path, "grow", header, {name: value.detach().cpu().clone() for name, value in tensors.items()})


def _load(path: Path, growing: Growing) -> None:
    header, tensors = read_state(path, "grow")
    with decoding(path, "grow"):
        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in tensors.items()
                    if name.startswith(prefix)}

        restore(growing, header["growing"], under("growing."), str(path))
        growing.model.load_state_dict(under("model."))
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in under("optimizer.").items():
            number, _, key = name.partition(".")
            states.setdefault(int(number), {})[key] = value
        groups = [{key: tuple(value) if key == "betas" else value for key, value in group.items()}
                  for group in header["groups"]]
        growing.optimizer.load_state_dict({"state": states, "param_groups": groups})
        growing.asked.schedulers[0].load_state_dict(header["schedule"])
        growing.history = [Report(**report) for report in header["history"]]
        for place, each in enumerate(generators(growing.host, growing.asked.data)):
            each.set_state(tensors[f"rng.{place}"])
        python, numpy = header["python"], header["numpy"]
        random.setstate((python[0], tuple(python[1]), python[2]))
        np.random.set_state((numpy[0], np.array(numpy[1], np.uint32), *numpy[2:]))
