"""What users pass to the door, checked and brought to one form."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline import ActionSpec, EsperError
from esper.tamiyo import POLICIES, Learned, Planned, PolicyBundle, named_policies
from esper.tamiyo.minds import member_for, read_mind, shipped

Score = float | Tensor | Sequence[float] | tuple[Tensor, Tensor]
Evaluate = Callable[[], Score]
Loss = Callable[[nn.Module, Any], Tensor]
ENOUGH = 20.0
"""Labels that a training shows for each parameter, as to language models that are best for their compute."""
COPY = "copy"
"""The blueprint that is another block like the front one."""


@dataclass(frozen=True)
class Asked:
    """The options of `attach`."""

    slots: str | Sequence[str] = "auto"
    controller: str | PolicyBundle | Mapping[str, str] = "heuristic"
    blueprints: Sequence[str] | None = None
    epochs: int = 30
    budget: str | float | None = None
    flops: str | float | None = None
    price: float = 0.0
    targets: float | None = None
    loss: Loss | None = None
    data: Iterable[Any] | None = None
    objective: str | None = None
    shadow_steps: int = 30
    previews: int | None = None
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
        if self.previews is not None and (type(self.previews) is not int or self.previews < 0 or (
                self.previews and self.loss is None)):
            raise EsperError("previews is a whole number of epochs, 0 for none, and needs loss and data")
        if self.blueprints is not None and not (isinstance(self.blueprints, (list, tuple)) and all(
                isinstance(name, str) for name in self.blueprints)):
            raise EsperError(f"blueprints is a list of names; got {self.blueprints!r}")
        if self.targets is not None and not (
                type(self.targets) in (int, float) and 0 < self.targets < math.inf):
            raise EsperError(f"targets are the labels that all epochs show, a number; got {self.targets!r}")
        if not 0 <= self.price < math.inf:
            raise EsperError(f"a price of {self.price} is impossible; it must be at least 0")

    def most(self, params: int) -> float:
        """Parameters that may grow in a model that has so many."""
        enough = math.inf if self.targets is None else self.targets / ENOUGH - params
        return min(share(self.budget, params, "parameters"), enough)

    @property
    def deeper(self) -> bool:
        """Whether copies of the model's own blocks may grow."""
        return COPY in (self.blueprints or ())

    def policy(self, spec: ActionSpec, paths: Sequence[str]) -> PolicyBundle:
        """Who decides. A plan names blueprints by slot, all to be planted at once."""
        if isinstance(self.controller, Mapping):
            numbers = {name: number for number, name in enumerate(spec.blueprints)}
            if not (self.controller.keys() <= set(paths) and set(self.controller.values()) <= numbers.keys()):
                raise EsperError(f"a plan names slots ({', '.join(paths)}) and their blueprints "
                                 f"({', '.join(numbers)}); got {dict(self.controller)}")
            plan = [numbers.get(self.controller.get(path, ""), -1) for path in paths]
            return Planned(torch.tensor([[min(number, 0) for number in plan]]), torch.tensor([plan]).clamp(0))
        names = (*named_policies(), *shipped())
        if not isinstance(self.controller, str):
            if not callable(self.controller):
                raise EsperError(f"a controller is one of {', '.join(names)}, a file, a plan or a policy, "
                                 f"not a {type(self.controller).__name__}")
            return self.controller
        if self.controller in named_policies():
            return POLICIES[self.controller]()
        if self.controller not in shipped() and not Path(self.controller).exists():
            raise EsperError(f"no controller {self.controller!r}; choose from {', '.join(names)}, or name "
                             "the agent.safetensors of a run")
        return Learned.load(self.controller, spec, greedy=True)

    def preview_every(self, spec: ActionSpec) -> int:
        """Epochs from one preview of all candidates to the next, 0 is never; a mind has its own."""
        if self.previews is not None or str(self.controller) not in shipped():
            return self.previews or 0
        return int(member_for(spec, read_mind(str(self.controller))).about["run"]["config"]["preview_every"])

    def batches(self) -> Iterator[Any]:
        """`shadow_steps` of them, from the beginning again when they end."""
        assert self.data is not None
        left = self.shadow_steps
        while left:
            before = left
            for batch in itertools.islice(self.data, left):
                left -= 1
                yield batch
            if left == before:
                raise EsperError("data yields no batches, or can be iterated over only once; "
                                 "pass a list or a DataLoader")


def share(given: str | float | None, of: float, what: str) -> float:
    """A budget as a number: of a share like '+20%', so much of this."""
    if given is None:
        return math.inf
    text = str(given).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError as error:
        raise EsperError(f"a budget of {given!r} means nothing; give a number of {what}, "
                         "or '+20%'") from error
    if not 0 <= number < math.inf:
        raise EsperError(f"a budget of {given!r} is impossible; it must be at least 0")
    return number / 100 * of if text.endswith("%") else number


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Accumulated gradients are the user's."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


def refuse_vanishing(optimizer: torch.optim.Optimizer) -> None:
    """An epsilon that is 0 in the parameters' numbers makes 0 / 0 of a seed's first gradients."""
    for group in optimizer.param_groups:
        eps, numbers = group.get("eps", 1.0), {p.dtype for p in group["params"] if p.is_floating_point()}
        if not group.get("fused") and any(float(torch.tensor(eps, dtype=dtype)) == 0 for dtype in numbers):
            raise EsperError(f"eps={eps} of {type(optimizer).__name__} is 0 in float16; set eps=1e-4, or "
                             "keep float32 weights and use autocast")
