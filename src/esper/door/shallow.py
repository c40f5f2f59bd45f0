"""`esper.start_shallow`: a deep model trains with few of its blocks at first, and wakes the others later.

A block that sleeps gives back what it got. It wakes with what the awake block in front of it has learned by
then. Model, optimizer and keys of the state dict are the user's all the time, and stay as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.door.copies import calls_of
from esper.door.places import arguments, bare, copyable, survey, untouched
from esper.kasmina.foreign import spelled_out, with_first
from esper.leyline import EsperError


def start_shallow(model: nn.Module, optimizer: torch.optim.Optimizer, *, example: Any, steps: int,
                  doublings: Sequence[float] = (0.5,), same_flops: bool = False,
                  blocks: str | Sequence[str] = "auto") -> "Shallow":
    """Train a deep model for less: only some of its blocks run at first; the rest wake as training goes on.

    Call it before the first step of a model that learns from scratch; your loop stays as it is. Blocks wake
    after a step of the optimizer, each as a copy of the awake block in front of it.
    example: a batch that the model takes: a tensor, a tuple that begins with one, or a dict of keywords.
    steps: of the optimizer in the whole training.
    doublings: shares of the steps after which twice as many blocks are awake, at last all: with one of them
    every second block begins, with two every fourth.
    same_flops: spend what is saved on more steps; `Shallow.steps` says how many there are then.
    blocks: paths of submodules that give back the shape they get; "auto" takes repeated blocks.
    """
    return Shallow(model, optimizer, example, steps, tuple(doublings), same_flops, blocks)


class Asleep:
    """What a block does meanwhile: the first thing it gets comes back, in the form of its outputs."""

    def __init__(self, output: Any) -> None:
        self.form = with_first(output, None)

    def __call__(self, h: Tensor, *args: Any, **kwargs: Any) -> Any:
        return with_first(self.form, h)


@contextmanager
def sleeping(model: nn.Module, forms: Mapping[str, Any]) -> Iterator[None]:
    """Blocks that sleep meanwhile; `forms` are outputs by path."""
    for path, form in forms.items():
        vars(model.get_submodule(path))["forward"] = Asleep(form)
    try:
        yield
    finally:
        for path in forms:
            del vars(model.get_submodule(path))["forward"]


class Shallow:
    """A model whose blocks wake while it trains. Made by `start_shallow`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, example: Any, steps: int,
                 doublings: tuple[float, ...], same_flops: bool, blocks: str | Sequence[str]) -> None:
        _check(model, optimizer, steps, doublings)
        self.model = bare(model)
        self.stacks, forms = find_stacks(self.model, example, blocks)
        """Paths of like blocks, one behind the other."""
        self.done = 0
        """Steps of the optimizer, counted until all blocks are awake."""
        self.stage, self._stages = len(doublings), len(doublings)
        costs = [self._forward_flops(example)]
        while self.stage:
            for path, _ in self._woken_in(self.stage):
                vars(self.model.get_submodule(path))["forward"] = Asleep(forms[path])
            self.stage -= 1
            costs.append(self._forward_flops(example))
        shares = [after - before for before, after in zip((0.0, *doublings), (*doublings, 1.0), strict=True)]
        self.flops = sum(share * cost for share, cost in zip(shares, reversed(costs), strict=True)) / costs[0]
        """Training FLOPs, as a share of what the whole model takes for as many steps."""
        self.steps = round(steps / self.flops) if same_flops else steps
        self.wakes = [round(share * self.steps) for share in doublings]
        """After which steps more blocks are awake."""
        inner = getattr(optimizer, "optimizer", optimizer)  # of what accelerate wraps around it
        self._hook = inner.register_step_post_hook(self._after_step)

    @property
    def awake(self) -> list[str]:
        """Paths of the blocks that run now."""
        return [path for stack in self.stacks for path in stack[:: 2 ** (self._stages - self.stage)]]

    def deepen(self) -> None:
        """Wake as many blocks as are awake; at last, all. Planned steps do so by themselves."""
        if self.stage == self._stages:
            raise EsperError("all blocks are awake already")
        for path, front in self._wake():
            self._copy(self.model.get_submodule(front), self.model.get_submodule(path))

    def state_dict(self) -> dict[str, int]:
        """How far it is; the weights are in the model's."""
        return {"done": self.done, "stage": self.stage}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Call it right after `start_shallow`, and load the states of model and optimizer as ever."""
        if state.keys() != self.state_dict().keys() or self.done or state["stage"] > self._stages:
            raise EsperError("this is no state of a training like this one, or it has begun already; load "
                             "right after start_shallow, with as many doublings as before")
        self.done = state["done"]
        while self.stage < state["stage"]:
            self._wake()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.done += 1
        while self.stage < self._stages and self.done >= self.wakes[self.stage]:
            self.deepen()

    def _woken_in(self, stage: int) -> list[tuple[str, str]]:
        """(block, the awake one in front of it) of all that wake when this stage begins."""
        now = 2 ** (self._stages - stage)
        return [(path, stack[number - now]) for stack in self.stacks
                for number, path in enumerate(stack) if number % (2 * now) == now]

    def _wake(self) -> list[tuple[str, str]]:
        self.stage += 1
        woken = self._woken_in(self.stage)
        for path, _ in woken:
            del vars(self.model.get_submodule(path))["forward"]
        if self.stage == self._stages:
            self._hook.remove()
        return woken

    @torch.no_grad()
    def _copy(self, front: nn.Module, block: nn.Module) -> None:
        """What one has learned, and what the optimizer remembers of it."""
        for old, new in zip(front.buffers(), block.buffers(), strict=True):
            new.copy_(old)
        for old, new in zip(front.parameters(), block.parameters(), strict=True):
            new.copy_(old)

    def _forward_flops(self, example: Any) -> int:
        _, _, cost = survey(self.model, example)
        return max(1, cost.flops)


def _check(model: Any, optimizer: Any, steps: Any, doublings: tuple[float, ...]) -> None:
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise EsperError("start_shallow takes an nn.Module and the torch optimizer that trains it")
    if type(steps) is not int or steps < 1:
        raise EsperError(f"steps is a whole number of at least 1; got {steps!r}")
    rising = list(doublings) == sorted(set(doublings))
    if not (doublings and rising and 0 < doublings[0] <= doublings[-1] < 1):
        raise EsperError(f"doublings are rising shares of the training between 0 and 1; got {doublings}")
    if getattr(model, "find_unused_parameters", True) is False:
        raise EsperError("blocks that sleep get no gradients; use "
                         "DistributedDataParallel(model, find_unused_parameters=True)")


def find_stacks(model: nn.Module, example: Any,
                blocks: str | Sequence[str]) -> tuple[list[list[str]], dict[str, Any]]:
    """Blocks of one list or parent that can stand for each other, in the order they run; what each gives."""
    seen, even, _ = survey(model, example)
    known = dict(model.named_modules())
    once = {path for path, outs in seen.items() if len(outs) == 1 and isinstance(outs[0], Tensor)}
    asked = [blocks] if isinstance(blocks, str) else blocks
    named = copyable(model, once, even) if blocks == "auto" else asked
    if wrong := [path for path in named if path not in even & once]:
        raise EsperError(f"{wrong[0]!r} is no submodule that runs once and gives back the shape it gets"
                         if wrong[0] in known else f"the model has no submodule {wrong[0]!r}")
    with untouched(model), torch.no_grad(), spelled_out():
        calls = calls_of(model, {path: known[path] for path in named},
                         lambda: model.eval()(*(batch := arguments(example))[0], **batch[1]))
    stacks: dict[Any, list[str]] = {}
    for path in sorted(named, key=list(seen).index):
        tensors = [each for each in tree_leaves(calls[path][0][2]) if isinstance(each, Tensor)]
        shapes = tuple((name, value.shape) for name, value in known[path].state_dict().items())
        if len(tensors) == 1:  # more of them, nobody could give while it sleeps
            stacks.setdefault((path.rpartition(".")[0], type(known[path]), shapes), []).append(path)
    found = [stack for stack in stacks.values() if len(stack) > 1]
    if not found:
        raise EsperError("no blocks were found that could sleep: several like ones, each giving back one "
                         "tensor of the shape it gets; name them with blocks=[...]")
    return found, {path: calls[path][0][2] for stack in found for path in stack}
