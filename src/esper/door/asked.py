"""What users pass to the door, checked and brought to one form."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline import EsperError
from esper.tamiyo import POLICIES, PolicyBundle

Score = float | Tensor | Sequence[float]
Evaluate = Callable[[], Score]
Loss = Callable[[nn.Module, Any], Tensor]
NAMED = ("heuristic", "wait", "random")


@dataclass(frozen=True)
class Asked:
    """The options of `attach`."""

    slots: str | Sequence[str] = "auto"
    controller: str | PolicyBundle = "heuristic"
    epochs: int = 30
    budget: str | float | None = None
    price: float = 0.0
    loss: Loss | None = None
    data: Iterable[Any] | None = None
    shadow_steps: int = 30
    schedulers: Sequence[Any] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.loss is None) != (self.data is None):
            raise EsperError("loss and data belong together: a seed that learns behind the model needs both")
        if type(self.epochs) is not int or type(self.shadow_steps) is not int or min(
                self.epochs, self.shadow_steps) < 1:
            raise EsperError("epochs and shadow_steps are whole numbers of at least 1; "
                             f"got {self.epochs} and {self.shadow_steps}")
        if not isinstance(self.schedulers, (list, tuple)) or not all(
                hasattr(each, "load_state_dict") for each in self.schedulers):
            raise EsperError("schedulers is a list of learning-rate schedulers")
        if not 0 <= self.price < math.inf:
            raise EsperError(f"a price of {self.price} is impossible; it must be at least 0")

    def policy(self) -> PolicyBundle:
        if not isinstance(self.controller, str):
            if not callable(self.controller):
                raise EsperError(f"a controller is one of {', '.join(NAMED)} or a policy, "
                                 f"not a {type(self.controller).__name__}")
            return self.controller
        if self.controller not in NAMED:
            raise EsperError(f"no controller {self.controller!r} for models of your own; choose from "
                             f"{', '.join(NAMED)}, or pass a policy. Shipped minds were trained on other "
                             "scores than evaluate() gives")
        return POLICIES[self.controller]()

    def most(self, params: int) -> float:
        """Parameters that may be grown, of a model that has so many."""
        if self.budget is None:
            return math.inf
        text = str(self.budget).strip()
        try:
            number = float(text.removesuffix("%"))
        except ValueError as error:
            raise EsperError(f"a budget of {self.budget!r} means nothing; give a number of parameters, "
                             "or '+20%'") from error
        if not 0 <= number < math.inf:
            raise EsperError(f"a budget of {self.budget!r} is impossible; it must be at least 0")
        return number / 100 * params if text.endswith("%") else number

    def batches(self) -> Iterator[Any]:
        """As many as a seed learns from in an epoch; from the beginning again when they end."""
        done = 0
        while done < self.shadow_steps:
            before = done
            for batch in self.data or ():
                yield batch
                done += 1
                if done == self.shadow_steps:
                    return
            if done == before:
                raise EsperError("data yields no batches, or can be iterated over only once; "
                                 "pass a list or a DataLoader")


def scored(score: Score, samples: int | None = None) -> Tensor:
    """[samples] on the CPU, as many as before; one number is a sample."""
    try:
        values = torch.as_tensor(score, dtype=torch.float64).detach().flatten().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise EsperError(f"evaluate() returned a {type(score).__name__}; expected a number, "
                         "or one for each sample") from error
    if not len(values):
        raise EsperError("evaluate() returned no number; expected one, or one for each sample")
    if samples not in (None, len(values)):
        raise EsperError(f"evaluate() scored {len(values)} samples and {samples} before; always score all")
    return values


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Accumulated gradients are the user's."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad
