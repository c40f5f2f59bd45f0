"""`esper.depths`: how deep a model should be for the compute that there is, told before it is trained."""

import math
import operator
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from esper.door.asked import ENOUGH
from esper.door.places import Survey, bare, copyable, samples_of, survey
from esper.leyline import EsperError

IGNORED = -100
"""The label of what PyTorch's losses leave out."""
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)


class Depth(NamedTuple):
    """A model with other numbers of blocks, trained for the same FLOPs."""

    blocks: int
    """In all its stacks."""
    params: int
    steps: int
    targets: float
    """For each parameter, over all steps."""
    yours: bool


class Depths(tuple[Depth, ...]):
    """From shallow to deep. Made by `depths`."""

    @property
    def best(self) -> Depth:
        """The deepest that still sees enough, or the shallowest."""
        return next((depth for depth in reversed(self) if depth.targets >= ENOUGH), self[0])

    def __str__(self) -> str:
        lines = [f"{'blocks':>6}  {'parameters':>11}  {'steps':>9}  targets per parameter"]
        for depth in self:
            notes = ["yours"] * depth.yours + ["take this one"] * (depth is self.best)
            lines.append(f"{depth.blocks:6d}  {depth.params:11,d}  {depth.steps:9,d}  {depth.targets:21.1f}"
                         + f"  <- {', '.join(notes)}" * bool(notes))
        return "\n".join(lines)


def depths(model: nn.Module, *, example: Any, steps: int, targets: int | None = None,
           blocks: str | Sequence[str] = "auto") -> Depths:
    """A table of depths that a model could have, all with the FLOPs of `steps` steps of it as it is. `best`
    is the deepest that sees at least 20 targets for each parameter. Nothing is trained.

    example: a batch as every step has it: a tensor, (inputs, labels), or a dict of keywords.
    steps: of the optimizer that the model as it is would be trained for.
    targets: labels of a batch, one for each token or sample that the loss asks for; by default those of the
    example's `labels`, or second part, or else its samples.
    blocks: paths of submodules that give back the shape they get; "auto" takes repeated blocks.
    """
    if type(steps) is not int or steps < 1:
        raise EsperError(f"steps is a whole number of at least 1; got {steps!r}")
    each = _labels(example) if targets is None else targets
    if not 0 < each < math.inf:
        raise EsperError(f"a batch has at least one target; got {targets!r}")
    model = bare(model)
    told = survey(model, example)
    stacks = _stacks(model, told, blocks)
    if not told.flops.get("") or not _size(model):
        raise EsperError("this model trains nothing, or does nothing whose FLOPs are counted")
    flops = [statistics.fmean(told.flops.get(path, 0) for path in stack) for stack in stacks]
    params = [statistics.fmean(_size(model.get_submodule(path)) for path in stack) for stack in stacks]
    found: dict[tuple[int, ...], Depth] = {}
    for factor in FACTORS:
        counts = tuple(max(1, round(factor * len(stack))) for stack in stacks)
        more = [count - len(stack) for count, stack in zip(counts, stacks, strict=True)]
        size = _size(model) + sum(map(operator.mul, more, params))
        longer = steps * told.flops[""] / (told.flops[""] + sum(map(operator.mul, more, flops)))
        depth = Depth(sum(counts), round(size), round(longer), longer * each / size, factor == 1)
        found.setdefault(counts, depth)
    return Depths(found.values())


def _size(part: nn.Module) -> int:
    return sum(p.numel() for p in part.parameters() if p.requires_grad)


def _stacks(model: nn.Module, told: Survey, blocks: str | Sequence[str]) -> list[list[str]]:
    """Paths of blocks of one class in one list or parent, several each."""
    known = dict(model.named_modules())
    once = {path for path, outs in told.seen.items() if len(outs) == 1 and isinstance(outs[0], Tensor)}
    asked = [blocks] if isinstance(blocks, str) else blocks
    paths = copyable(model, once, told.even) if blocks == "auto" else asked
    if wrong := [path for path in paths if path not in told.even & once]:
        raise EsperError(f"{wrong[0]!r} is no submodule that runs once and gives back the shape it gets"
                         if wrong[0] in known else f"the model has no submodule {wrong[0]!r}")
    stacks: dict[Any, list[str]] = {}
    for path in paths:
        stacks.setdefault((path.rpartition(".")[0], type(known[path])), []).append(path)
    if not stacks:
        raise EsperError("no repeated blocks were found in this model, parts that give back the shape they "
                         "get; name them with blocks=[...]")
    return list(stacks.values())


def _labels(batch: Any) -> int:
    pair = isinstance(batch, (tuple, list)) and len(batch) > 1
    labels = batch.get("labels") if hasattr(batch, "get") else batch[1] if pair else None
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return int((labels != IGNORED).sum())
    return samples_of(batch)
