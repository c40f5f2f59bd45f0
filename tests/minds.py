"""Random minds and rollouts for tests: any action space, any pattern of endings."""

import itertools
from collections.abc import Iterator

import torch
from experiments.toys import WorldCollector
from torch import Tensor

from esper.leyline import RELEVANCE, ActionSpec, Field, Head, LifecycleOp, Observation, ObservationSpec
from esper.simic import Outcome, PPOAgent, PPOConfig, TamiyoRolloutBuffer
from esper.tamiyo import ActionLogits, ActionMasks, Controller, NetworkConfig
from esper.tamiyo.controller import PolicyInput
from esper.tamiyo.masks import mask_sizes

SPEC = ActionSpec.full(3, ("noop", "a", "b"))
SEES = ObservationSpec((Field("x", 3), Field("y", 1, True)), (Field("z", 4),), (Field("w", 2),))
TINY = NetworkConfig(hidden=16, slot=8, candidate=6, trunk=12)


def random_masks(spec: ActionSpec, rows: int, generator: torch.Generator, chance: float = 0.6) -> ActionMasks:
    """Masks that always leave a choice where one can be asked for; op and slot agree."""
    masks = {name: torch.rand(rows, *size, generator=generator) < chance for name, size in mask_sizes(spec).items()}
    for name, mask in masks.items():
        if name != "op":
            mask[..., int(torch.randint(mask.shape[-1], (), generator=generator))] |= ~mask.any(-1)
    slot = masks["slot"] & (torch.rand(rows, len(spec.ops), 1, generator=generator) < 0.8)
    slot[:, 0] = torch.arange(spec.slots) == spec.defaults[Head.SLOT]
    masks |= {"op": slot.any(-1), "slot": slot}
    return ActionMasks.from_named(spec, masks)


def random_logits(spec: ActionSpec, masks: ActionMasks, generator: torch.Generator, scale: float = 1.0) -> ActionLogits:
    flat = ActionLogits.flat(spec, masks)

    def noise(t: Tensor) -> Tensor:
        return scale * torch.randn(t.shape, generator=generator)

    return ActionLogits(noise(flat.op), noise(flat.slot), {pair: noise(t) for pair, t in flat.values.items()})


def every_action(spec: ActionSpec) -> Iterator[tuple[int, ...]]:
    """All actions of a spec with what an op does not use at its default: no two names for one action."""
    for number, op in enumerate(spec.ops):
        values = [range(size) if RELEVANCE[op, head] else (spec.defaults[head],)
                  for head, size in zip(spec.heads, spec.sizes, strict=True) if head is not Head.OP]
        for rest in itertools.product(*values):
            yield (number, *rest)


class Chance:
    """A world of random observations, masks and rewards, in which rows end and are cut at random."""

    def __init__(self, rows: int, seed: int = 0, spec: ActionSpec = SPEC, ends: float = 0.1, cuts: float = 0.1,
                 forced: bool = False, device: str = "cpu") -> None:
        self.rows, self.spec, self.ends, self.cuts, self.forced, self.device = rows, spec, ends, cuts, forced, device
        self.generator = torch.Generator().manual_seed(seed)
        self.fresh = torch.ones(rows, dtype=torch.bool)

    def _seen(self) -> Observation:
        row, slot, candidate = SEES.widths
        shapes = ((row,), (self.spec.slots, slot), (self.spec.slots, len(self.spec.blueprints), candidate))
        return Observation(*(torch.randn(self.rows, *shape, generator=self.generator).to(self.device) for shape in shapes))

    def look(self) -> PolicyInput:
        masks = random_masks(self.spec, self.rows, self.generator)
        if self.forced:
            slot = torch.zeros_like(masks.slot)
            slot[:, 0, self.spec.defaults[Head.SLOT]] = True
            masks = masks._replace(op=slot.any(-1), slot=slot)
        named = {name: mask.to(self.device) for name, mask in masks.named().items()}
        u = torch.rand(self.rows, len(self.spec.heads), generator=self.generator)
        return PolicyInput(self._seen(), ActionMasks.from_named(self.spec, named), self.fresh.to(self.device), u.to(self.device))

    def step(self, actions: Tensor) -> Outcome:
        draw = torch.rand(2, self.rows, generator=self.generator)
        done = draw[0] < self.ends
        truncated = ~done & (draw[1] < self.cuts)
        self.fresh = done | truncated
        reward = torch.randn(self.rows, generator=self.generator)
        return Outcome(reward.to(self.device), done.to(self.device), truncated.to(self.device), self._seen())


def agent(spec: ActionSpec = SPEC, seed: int = 0, device: str = "cpu", network: NetworkConfig = TINY,
          **options: object) -> PPOAgent:
    torch.manual_seed(seed)
    settings: dict[str, object] = {"minibatches": 1, "epochs": 1, "target_kl": 1e9} | options
    return PPOAgent(Controller.fresh(spec, network, SEES, device), PPOConfig(**settings), seed=seed)  # type: ignore[arg-type]


def filled(mind: PPOAgent, rows: int = 8, steps: int = 12, chunk: int = 0, seed: int = 0,
           **options: object) -> tuple[TamiyoRolloutBuffer, Tensor]:
    """(a full rollout of random episodes, the value behind it)."""
    buffer = mind.buffer(steps, rows, chunk)
    world = Chance(rows, seed, mind.network.spec, device=str(mind.device), **options)  # type: ignore[arg-type]
    return buffer, WorldCollector(mind, world, rows).fill(buffer)


def op_index(op: LifecycleOp, spec: ActionSpec = SPEC) -> int:
    return spec.ops.index(op)
