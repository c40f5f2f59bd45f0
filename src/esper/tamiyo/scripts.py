"""Policies without a model: waiting, timed actions, plans, and rules of thumb as in the literature.

Legend: N rows, S slots, K entries of a script.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import RELEVANCE, SCORES, ActionSpec, EsperError, Facts, Head, LifecycleOp, SeedStage, View
from esper.tamiyo.masks import action_masks, in_time

_LOSS, _TRAIN = SCORES.index("loss"), SCORES.index("train_loss")


def to_spec(spec: ActionSpec, full: Tensor) -> Tensor:
    """Full actions [N, heads] as the heads and op numbers of a spec."""
    number = torch.full((len(LifecycleOp),), -1)
    number[torch.tensor(spec.ops)] = torch.arange(len(spec.ops))
    defaults = torch.tensor([spec.defaults[head] for head in Head])
    absent = torch.tensor([head not in spec.heads for head in Head])
    lost = (full != defaults) & torch.tensor(RELEVANCE)[full[:, Head.OP]] & absent
    if bool(lost.any()):
        chose = Head(int(lost.any(0).nonzero()[0])).name.lower()
        raise EsperError(f"a policy chose a {chose}, which this action spec leaves at its default")
    full = full.clone()
    full[:, Head.OP] = number[full[:, Head.OP]]
    if bool((full[:, Head.OP] < 0).any()):
        raise EsperError("a policy chose an op that this action spec does not have")
    return full[:, list(spec.heads)]


def waiting(view: View) -> Tensor:
    """Full actions [N, heads] of rows that do nothing."""
    return torch.tensor([view.spec.defaults[head] for head in Head]).repeat(len(view.clock), 1)


def growing(view: View, op: Tensor, slot: Tensor, blueprint: Tensor) -> Tensor:
    """Actions of ops [N] (of LifecycleOp) at slots [N]; what germinates is of a blueprint [N]."""
    full = waiting(view)
    full[:, Head.OP], full[:, Head.SLOT] = op, slot
    grows = op == LifecycleOp.GERMINATE
    full[:, Head.BLUEPRINT] = torch.where(grows, blueprint, full[:, Head.BLUEPRINT])
    return to_spec(view.spec, full)


def developing(view: View) -> Tensor:
    """[N] bool: some seed is neither kept nor gone."""
    stage = view.seeds.stage
    return ((stage >= SeedStage.GERMINATED) & (stage <= SeedStage.HOLDING)).any(1)


class Wait:
    """Never acts: the no-growth control."""

    def __call__(self, view: View) -> Tensor:
        return to_spec(view.spec, waiting(view))


def entry(spec: ActionSpec, epoch: int, op: LifecycleOp, **values: object) -> tuple[int, ...]:
    """One line of a script: act in this epoch (0 is the first), or in the first after it that allows it."""
    return epoch, *ActionSpec.full(spec.slots, spec.blueprints).action(op, **values)


class Scripted:
    """Timed actions, one script per row: each entry is played in its epoch, or as soon after as it may be."""

    def __init__(self, scripts: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """`scripts`: for each row its entries (see `entry`) in order."""
        longest, never = max((len(script) for script in scripts), default=0), (2**31, *[0] * len(Head))
        self.entries = torch.tensor([[*script, *[never] * (longest + 1 - len(script))]
                                     for script in scripts])  # [N, K + 1, 1 + heads]
        self.at = torch.zeros(len(scripts), dtype=torch.int64)

    def __call__(self, view: View) -> Tensor:
        if len(view.clock) != len(self.at):
            raise EsperError(f"{len(self.at)} scripts for {len(view.clock)} rows; give one to each")
        every = torch.arange(len(self.at))
        self.at[view.clock == 0] = 0
        when, full = self.entries[every, self.at].split([1, len(Head)], 1)
        allowed = view.verdicts[every, full[:, Head.SLOT], full[:, Head.OP]]
        acts = (view.clock >= when[:, 0]) & allowed & ~view.done
        self.at += acts
        return to_spec(view.spec, torch.where(acts[:, None], full, waiting(view)))


class Trigger(NamedTuple):
    fires: Callable[[View, Facts, Tensor], Tensor]  # (view, its facts, settings [N]) -> bool [N]
    settings: tuple[float, ...]  # worth trying: epochs, shares, or nats
    alone: bool  # does not fire while a seed develops: it would go on firing for the same reason


TRIGGERS: dict[str, Trigger] = {
    # Every so many epochs, from the first on.
    "periodic": Trigger(lambda view, facts, every: view.clock % every.long().clamp(min=1) == 0,
                        (2.0, 3.0, 4.0, 6.0), alone=False),
    # The validation loss fell by less than this share in the last epoch; NaN before there are two to compare.
    "converged": Trigger(lambda view, facts, share: facts.before[:, _LOSS] - facts.scores[:, _LOSS]
                         < share * facts.before[:, _LOSS], (0.02, 0.05, 0.1, 0.2), alone=True),
    # The validation loss is above the training loss by less than this: the network still underfits.
    "gap": Trigger(lambda view, facts, gap: facts.scores[:, _LOSS] - facts.scores[:, _TRAIN] < gap,
                   (-0.1, 0.0, 0.1, 0.3), alone=True),
}


@dataclass(frozen=True)
class TriggerConfig:
    trigger: str
    setting: float  # what the trigger compares with
    blueprint: str
    most: int = 1  # seeds of an episode
    backwards: bool = False  # fill slots from the last to the first

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
        busy = developing(view)
        fires = torch.stack([trigger.fires(view, view.facts, self.setting) & ~(busy & trigger.alone)
                             for trigger in TRIGGERS.values()])  # [triggers, N]
        grows = fires[self.trigger.expand(rows), torch.arange(rows)]
        grows &= view.seeds.germinations.sum(1) < self.most
        blueprint = torch.tensor([[spec.blueprints.index(c.blueprint)] for c in self.configs])
        blueprint, never = blueprint.expand(rows, spec.slots), torch.zeros_like(view.done)
        return grow_and_keep(view, grows[:, None], blueprint, self.backwards, never)


class Planned:
    """Germinates each seed of a plan in its epoch, or as soon after as it may; keeps as soon as it may."""

    def __init__(self, birth: Tensor, blueprint: Tensor) -> None:
        """[N, S] each: the epoch (0 is the first; -1 is never) and the number of the blueprint."""
        self.birth, self.blueprint = birth, blueprint

    def __call__(self, view: View) -> Tensor:
        due = (self.birth >= 0) & (view.clock[:, None] >= self.birth) & (view.seeds.germinations == 0)
        # What is due now must not wait for what may be kept.
        last = ~in_time(view, wait=int(due.sum(1).amax()))[:, view.spec.defaults[Head.TEMPO]]
        return grow_and_keep(view, due, self.blueprint, torch.tensor(False), last)


class Switched:
    """Follows a plan, and from an epoch on another one: it prunes what that has no use for."""

    def __init__(self, first: Planned, then: Planned, at: int) -> None:
        self.first, self.then, self.at = first, then, at

    def __call__(self, view: View) -> Tensor:
        seeds, after = view.seeds, (view.clock >= self.at)[:, None]
        birth = torch.where(after, self.then.birth, self.first.birth)
        blueprint = torch.where(after, self.then.blueprint, self.first.blueprint)
        lives = (seeds.stage >= SeedStage.GERMINATED) & (seeds.stage <= SeedStage.HOLDING)
        wrong = after & lives & ((birth < 0) | (seeds.blueprint != blueprint))
        due = (birth >= 0) & (view.clock[:, None] >= birth) & (seeds.germinations <= after.long())
        last = ~in_time(view, wait=int(due.sum(1).amax()))[:, view.spec.defaults[Head.TEMPO]]
        return grow_and_keep(view, due, blueprint, torch.tensor(False), last, after & ~wrong, wrong)


def grow_and_keep(view: View, grows: Tensor, blueprint: Tensor, backwards: Tensor, hurry: Tensor,
                   keeps: Tensor | bool = True, prunes: Tensor | bool = False) -> Tensor:
    """Actions of rows that prune where `prunes`, fossilize what they may where `keeps`, then advance, then
    germinate where `grows` ([N, S] or [N, 1]), in the first such slot or the last if `backwards`; those in a
    `hurry` [N] germinate first."""
    spec, every = view.spec, torch.arange(len(view.clock))
    allowed = dict(zip(spec.ops, action_masks(view).slot.unbind(1), strict=True))  # [N, S] each
    grow, never = allowed[LifecycleOp.GERMINATE] & grows, torch.zeros_like(view.seeds.fading)
    wishes = ((LifecycleOp.GERMINATE, grow), (LifecycleOp.ADVANCE, allowed.get(LifecycleOp.ADVANCE, never)),
              (LifecycleOp.FOSSILIZE, allowed.get(LifecycleOp.FOSSILIZE, never) & keeps),
              (LifecycleOp.PRUNE, allowed.get(LifecycleOp.PRUNE, never) & prunes),
              (LifecycleOp.GERMINATE, grow & hurry[:, None]))
    op, slot = waiting(view)[:, [Head.OP, Head.SLOT]].unbind(1)
    for wish, where in wishes:  # the last one counts
        first, last = where.int().argmax(1), spec.slots - 1 - where.flip(1).int().argmax(1)
        slot = torch.where(where.any(1), torch.where(backwards, last, first), slot)
        op = torch.where(where.any(1), int(wish), op)
    return growing(view, op, slot, blueprint[every, slot])
