"""`esper.depths`: how deep a model should be for the compute that there is, told before it is trained."""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from esper.door.asked import ENOUGH
from esper.door.places import bare, samples_of, survey
from esper.door.shallow import find_stacks, sleeping
from esper.leyline import EsperError

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
    stacks, forms = find_stacks(model, example, blocks)
    _, _, whole = survey(model, example)
    flops, params = [], []  # of a block of each stack
    for stack in stacks:
        with sleeping(model, {path: forms[path] for path in stack[1:]}):
            _, _, one = survey(model, example)
        flops.append((whole.flops - one.flops) / (len(stack) - 1))
        params.append(sum(p.numel() for p in model.get_submodule(stack[0]).parameters() if p.requires_grad))
    found: dict[tuple[int, ...], Depth] = {}
    for factor in FACTORS:
        counts = tuple(max(1, round(factor * len(stack))) for stack in stacks)
        more = [count - len(stack) for count, stack in zip(counts, stacks, strict=True)]
        size = whole.params + sum(map(operator.mul, more, params))
        longer = steps * whole.flops / (whole.flops + sum(map(operator.mul, more, flops)))
        found.setdefault(counts, Depth(sum(counts), size, round(longer), longer * each / size, factor == 1))
    return Depths(found.values())


def _labels(batch: Any) -> int:
    pair = isinstance(batch, (tuple, list)) and len(batch) > 1
    labels = batch.get("labels") if hasattr(batch, "get") else batch[1] if pair else None
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return labels.numel()
    return samples_of(batch)
