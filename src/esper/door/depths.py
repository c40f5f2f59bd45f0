"""`esper.depths`: how deep a model should be for the compute that there is, told before it is trained."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from esper.door.places import Survey, bare, copyable, samples_of, survey
from esper.leyline import EsperError

ENOUGH = 640
"""Targets that each parameter should see for a block, times the width: 20 for one block 32 wide."""
SHOWN = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Depths of the printed table, as shares of the user's."""
IGNORED = -100
"""The label of what PyTorch's losses leave out."""


class Depth(NamedTuple):
    """A model with other numbers of blocks, trained for the same FLOPs."""

    stacks: dict[str, int]
    """Path of a list or parent -> its blocks."""
    params: int
    steps: int
    targets: float
    """For each parameter, over all steps."""
    enough: float
    """What `targets` should be: the deeper and narrower, the more."""

    @property
    def blocks(self) -> int:
        return sum(self.stacks.values())


@dataclass(frozen=True)
class Depths:
    """Every depth up to four times the user's, from shallow to deep. Made by `depths`."""

    every: tuple[Depth, ...]
    yours: Depth
    targets: int
    """Of a step."""

    @property
    def best(self) -> Depth:
        """The deepest that sees enough targets, or the shallowest."""
        return next((depth for depth in reversed(self.every) if depth.targets >= depth.enough), self.every[0])

    def __str__(self) -> str:
        lines = [f"every row costs the FLOPs of {self.yours.steps:,} steps of yours; "
                 f"{self.targets:,} targets a step",
                 f"{'blocks':>11}  {'parameters':>13}  {'steps':>9}  targets each  enough"]
        shown = [min((abs(depth.blocks - share * self.yours.blocks), depth.blocks) for depth in self.every)[1]
                 for share in SHOWN]
        for depth in self.every:
            notes = {"yours": depth is self.yours, "best": depth is self.best,
                     "or deeper": depth is self.best is self.every[-1]}
            if depth.blocks in shown or any(notes.values()):
                parts = "+".join(map(str, depth.stacks.values()))
                told = ", ".join(name for name, true in notes.items() if true)
                lines.append(f"{parts:>11}  {depth.params:13,d}  {depth.steps:9,d}  {depth.targets:12.1f}"
                             f"  {depth.enough:6.1f}" + f"  <- {told}" * bool(told))
        return "\n".join(lines)


def depths(model: nn.Module, *, example: Any, steps: int, targets: int | None = None,
           blocks: str | Sequence[str] = "auto") -> Depths:
    """How deep a model that learns from scratch should be: a table of depths that it could have, all with the
    FLOPs of `steps` steps of it as it is. `best` is the deepest that sees at least 640 targets for each
    parameter and block, divided by the width. Nothing is trained.

    example: a batch as every step has it: a tensor, (inputs, labels), or a dict of keywords.
    steps: of the optimizer that the model as it is would be trained for.
    targets: labels of a step, one for each token or sample that the loss asks for; by default those of the
    example's `labels`, or second part, or else its samples.
    blocks: paths of submodules that give back the shape they get; "auto" takes repeated blocks.
    """
    if not isinstance(model, nn.Module):
        raise EsperError(f"depths takes an nn.Module; got a {type(model).__name__}")
    if type(steps) is not int or steps < 1:
        raise EsperError(f"steps is a whole number of at least 1; got {steps!r}")
    each = _labels(example) if targets is None else targets
    if type(each) is not int or each < 1:
        raise EsperError(f"a step has at least one target; got {each!r}")
    model = bare(model)
    told = survey(model, example)
    stacks = _stacks(model, told, blocks)
    lengths = {name: _like(model, paths[0]) for name, paths in stacks.items()}
    sizes = {name: statistics.median_low(found) for name, found in _sizes(model, stacks).items()}
    flops = {name: statistics.median(told.flops[path] for path in paths) for name, paths in stacks.items()}
    widths = {name: _width(model.get_submodule(first), told.seen[first][0])
              for name, (first, *_) in stacks.items()}
    if not all(flops.values()):
        raise EsperError("PyTorch counts no FLOPs in these blocks; depths cannot tell what they cost")
    found: dict[tuple[int, ...], Depth] = {}
    longest = max(lengths.values())
    for most in range(1, 4 * longest + 1):
        counts = {name: max(1, length - len(stacks[name]), round(length * most / longest))
                  for name, length in lengths.items()}
        more = {name: count - lengths[name] for name, count in counts.items()}
        params = told.cost.params + sum(more[name] * size for name, size in sizes.items())
        cost = told.flops[""] + sum(more[name] * size for name, size in flops.items())
        longer = steps * told.flops[""] / cost
        enough = ENOUGH * sum(count / widths[name] for name, count in counts.items())
        found[tuple(counts.values())] = Depth(counts, params, round(longer), longer * each / params, enough)
    return Depths(tuple(found.values()), found[tuple(lengths.values())], each)


def _stacks(model: nn.Module, told: Survey, blocks: str | Sequence[str]) -> dict[str, list[str]]:
    """By the list or parent that they are in (and their class, if there are several): paths of blocks."""
    known = dict(model.named_modules())
    once = {path for path, outs in told.seen.items() if len(outs) == 1 and isinstance(outs[0], Tensor)}
    asked = [blocks] if isinstance(blocks, str) else list(dict.fromkeys(blocks))
    paths = copyable(model, once, told.even) if blocks == "auto" else asked
    for path in paths:
        if path not in told.even & once or any(path.startswith(f"{outer}.") for outer in paths):
            raise EsperError(f"{path!r} is no block, which runs once, gives back the shape it gets and is in "
                             "no other" if path in known else f"the model has no submodule {path!r}")
        if not all(p.requires_grad for p in known[path].parameters()):
            raise EsperError(f"{path} is frozen; depths is for models that learn from scratch")
    if not paths:
        raise EsperError("no repeated blocks were found in this model, parts that give back the shape they "
                         "get; name them with blocks=[...]")
    found: dict[tuple[str, type], list[str]] = {}
    for path in paths:
        found.setdefault((path.rpartition(".")[0], type(known[path])), []).append(path)
    several = Counter(parent for parent, _ in found)
    return {parent + f" ({kind.__name__})" * (several[parent] > 1): paths
            for (parent, kind), paths in found.items()}


def _like(model: nn.Module, path: str) -> int:
    """Blocks of its class in its list or parent: a first one may change the shape, and always stays."""
    kind = type(model.get_submodule(path))
    return sum(type(child) is kind for child in model.get_submodule(path.rpartition(".")[0]).children())


def _sizes(model: nn.Module, stacks: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """Parameters of every block that nothing else has, too."""
    blocks = {path: model.get_submodule(path) for paths in stacks.values() for path in paths}
    inside = {module for block in blocks.values() for module in block.modules()}
    owners = Counter(p for block in blocks.values() for p in block.parameters())
    for module in model.modules():
        owners.update(() if module in inside else module.parameters(recurse=False))
    return {name: [sum(p.numel() for p in blocks[path].parameters() if owners[p] == 1) for path in paths]
            for name, paths in stacks.items()}


def _width(block: nn.Module, out: Tensor) -> int:
    """Channels of what a block gives: the extent that its parameters have most often."""
    sizes = Counter(size for p in block.parameters() for size in p.shape)
    return max(out.shape[1:] or out.shape, key=lambda size: sizes[size])


def _labels(batch: Any) -> int:
    if hasattr(batch, "get"):
        if batch.get("labels") is None:
            raise EsperError("the example has no labels; say with targets= how many a step has")
        labels = batch["labels"]
    else:
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return int((labels != IGNORED).sum())
    return samples_of(batch)
