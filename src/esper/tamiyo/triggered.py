"""Growth by a rule of thumb, as in the literature: when a trigger fires, grow; keep whatever comes of it.

Legend: N rows, S slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import SCORES, EsperError, Facts, Head, LifecycleOp, SeedStage, View
from esper.tamiyo.masks import action_masks, in_time
from esper.tamiyo.scripts import to_spec, waiting

_LOSS, _TRAIN = SCORES.index("loss"), SCORES.index("train_loss")


def _periodic(view: View, facts: Facts, setting: Tensor) -> Tensor:
    """Every so many epochs, from the first on."""
    return view.clock % setting.long().clamp(min=1) == 0


def _converged(view: View, facts: Facts, setting: Tensor) -> Tensor:
    """When the validation loss fell by less than this share in the last epoch."""
    fell = facts.before[:, _LOSS] - facts.scores[:, _LOSS]
    return fell < setting * facts.before[:, _LOSS]  # not before there are two epochs to compare


def _gap(view: View, facts: Facts, setting: Tensor) -> Tensor:
    """While the validation loss is above the training loss by less than this: the network still underfits."""
    return facts.scores[:, _LOSS] - facts.scores[:, _TRAIN] < setting


class Trigger(NamedTuple):
    fires: Callable[[View, Facts, Tensor], Tensor]
    settings: tuple[float, ...]  # worth trying: epochs, shares, or nats
    alone: bool  # does not fire while a seed develops: it would go on firing for the same reason


TRIGGERS: dict[str, Trigger] = {
    "periodic": Trigger(_periodic, (2.0, 3.0, 4.0, 6.0), alone=False),
    "converged": Trigger(_converged, (0.02, 0.05, 0.1, 0.2), alone=True),
    "gap": Trigger(_gap, (-0.1, 0.0, 0.1, 0.3), alone=True),
}


@dataclass(frozen=True)
class TriggerConfig:
    trigger: str
    setting: float
    """What the trigger compares with."""
    blueprint: str
    most: int = 1
    """Seeds of an episode."""
    backwards: bool = False
    """Fill slots from the last to the first."""

    def __post_init__(self) -> None:
        if self.trigger not in TRIGGERS:
            raise EsperError(f"no trigger {self.trigger!r}; choose from {', '.join(TRIGGERS)}")
        if self.most < 1 or (self.trigger == "periodic" and self.setting < 1):
            raise EsperError("a trigger grows at least one seed, and a period is at least one epoch")


class Triggered:
    """Grows one blueprint, slot after slot; fossilizes as soon as it may, and prunes nothing."""

    def __init__(self, *configs: TriggerConfig) -> None:
        """One for every row, or a single one for all."""
        self.configs = configs
        self.setting, self.most, self.backwards = (torch.tensor([getattr(config, name) for config in configs])
                                                   for name in ("setting", "most", "backwards"))
        self.trigger = torch.tensor([list(TRIGGERS).index(c.trigger) for c in configs])

    def __call__(self, view: View) -> Tensor:
        spec, rows = view.spec, len(view.clock)
        if len(self.configs) not in (1, rows):
            raise EsperError(f"{len(self.configs)} triggers for {rows} rows; "
                             "give one to each, or one for all")
        if view.facts is None:
            raise EsperError("triggers read measurements, and this view has none")
        stage = view.seeds.stage
        developing = ((stage >= SeedStage.GERMINATED) & (stage <= SeedStage.HOLDING)).any(1)
        fires = torch.stack([trigger.fires(view, view.facts, self.setting) & ~(developing & trigger.alone)
                             for trigger in TRIGGERS.values()])  # [triggers, N]
        grows = fires[self.trigger.expand(rows), torch.arange(rows)]
        grows &= view.seeds.germinations.sum(1) < self.most
        blueprint = torch.tensor([[spec.blueprints.index(c.blueprint)] for c in self.configs])
        return _grow_and_keep(view, grows[:, None], blueprint.expand(rows, spec.slots), self.backwards)


class Planned:
    """Germinates each seed of a plan in its epoch, or as soon after as it may; keeps as soon as it may."""

    def __init__(self, birth: Tensor, blueprint: Tensor) -> None:
        """[N, S] each: the epoch (0 is the first; -1 is never) and the number of the blueprint."""
        self.birth, self.blueprint = birth, blueprint

    def __call__(self, view: View) -> Tensor:
        due = (self.birth >= 0) & (view.clock[:, None] >= self.birth) & (view.seeds.germinations == 0)
        # What is due now must not wait for what may be kept.
        last = ~in_time(view, wait=int(due.sum(1).amax()))[:, view.spec.defaults[Head.TEMPO]]
        return _grow_and_keep(view, due, self.blueprint, torch.tensor(False), last)


def _grow_and_keep(view: View, grows: Tensor, blueprint: Tensor, backwards: Tensor,
                   hurry: Tensor | None = None) -> Tensor:
    """Actions of rows that fossilize what they may, then advance what they may, then germinate where they
    wish; those in a `hurry` [N] germinate first. `grows` is bool [N, S] or [N, 1], `blueprint` [N, S]; of
    several slots the first is served, or the last if `backwards`."""
    spec, every = view.spec, torch.arange(len(view.clock))
    allowed = dict(zip(spec.ops, action_masks(view).slot.unbind(1), strict=True))  # [N, S] each
    grow, never = allowed[LifecycleOp.GERMINATE] & grows, torch.zeros_like(view.seeds.fading)
    wishes = ((LifecycleOp.GERMINATE, grow), (LifecycleOp.ADVANCE, allowed.get(LifecycleOp.ADVANCE, never)),
              (LifecycleOp.FOSSILIZE, allowed.get(LifecycleOp.FOSSILIZE, never)),
              (LifecycleOp.GERMINATE, never if hurry is None else grow & hurry[:, None]))
    full = waiting(view)
    for op, where in wishes:  # the last one counts
        slot = torch.where(backwards, spec.slots - 1 - where.flip(1).int().argmax(1), where.int().argmax(1))
        full[where.any(1), Head.OP] = int(op)
        full[:, Head.SLOT] = torch.where(where.any(1), slot, full[:, Head.SLOT])
    born = full[:, Head.OP] == LifecycleOp.GERMINATE
    full[:, Head.BLUEPRINT] = torch.where(born, blueprint[every, full[:, Head.SLOT]], full[:, Head.BLUEPRINT])
    return to_spec(spec, full)
