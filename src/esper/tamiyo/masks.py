"""What can be done: masks over every head, given the op and the slot.

Legend: N rows (any leading dimensions), S slots, O ops of the spec. An impossible action cannot be expressed,
nor one that must fail, nor two names of the same action: what has no effect has one choice, its default.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import TEMPOS, ActionSpec, EsperError, Head, InvalidStateMachineError, LifecycleOp, View

Pair = tuple[LifecycleOp, Head]


class ActionMasks(NamedTuple):
    """True is possible. `values` has one mask per pair of `ActionSpec.pairs`."""

    op: Tensor  # [N, O]
    slot: Tensor  # [N, O, S]
    values: Mapping[Pair, Tensor]  # [N, S, size of the head]

    def named(self) -> dict[str, Tensor]:
        """Every mask under a flat name, in the order of `from_named`."""
        return {"op": self.op, "slot": self.slot} | {_name(pair): mask for pair, mask in self.values.items()}

    def map(self, function: Callable[[Tensor], Tensor]) -> "ActionMasks":
        return ActionMasks(function(self.op), function(self.slot),
                           {pair: function(mask) for pair, mask in self.values.items()})

    @classmethod
    def from_named(cls, spec: ActionSpec, named: Mapping[str, Tensor]) -> "ActionMasks":
        return cls(named["op"], named["slot"], {pair: named[_name(pair)] for pair in spec.pairs})

    def check(self, spec: ActionSpec, shape: tuple[int, ...], device: torch.device) -> None:
        """Raise for a mask of another shape, dtype or device, and for a choice without a possible value."""
        sizes, named = mask_sizes(spec), self.named()
        for name, size in sizes.items():
            if (mask := named.get(name)) is None:
                raise EsperError(f"there is no mask {name!r}; this action spec needs {', '.join(sizes)}")
            if mask.shape != (*shape, *size):
                raise EsperError(f"mask {name!r} has shape {list(mask.shape)}; expected {[*shape, *size]}")
            if mask.dtype != torch.bool or mask.device.type != device.type:
                raise EsperError(f"mask {name!r} is {mask.dtype} on {mask.device.type}; "
                                 f"expected torch.bool on {device.type}")
        asked = {"op": torch.ones_like(self.op[..., 0]), "slot": self.op}
        asked |= {_name(pair): self.slot[..., spec.ops.index(pair[0]), :] for pair in self.values}
        empty = {name: asked[name] & ~mask.any(-1) for name, mask in named.items()}
        if bool(torch.stack([places.any() for places in empty.values()]).any()):  # one transfer for all
            name, places = next((name, places) for name, places in empty.items() if bool(places.any()))
            raise InvalidStateMachineError(f"mask {name!r} allows nothing at {places.nonzero()[0].tolist()}; "
                                           "every choice that can be asked for needs a possible value")


def mask_sizes(spec: ActionSpec) -> dict[str, tuple[int, ...]]:
    """Flat name -> shape behind the leading dimensions."""
    ops, values = len(spec.ops), {_name(p): (spec.slots, spec.head_sizes[p[1]]) for p in spec.pairs}
    return {"op": (ops,), "slot": (ops, spec.slots)} | values


def _name(pair: Pair) -> str:
    return f"{pair[0].name.lower()}.{pair[1].name.lower()}"


def action_masks(view: View) -> ActionMasks:
    """From stages and gate verdicts; a row that is done may only WAIT."""
    spec, default = view.spec, view.spec.defaults
    slot = view.verdicts[:, :, list(spec.ops)].transpose(1, 2) & ~view.done[:, None, None]  # [N, O, S]
    values = {pair: _values(view, *pair) for pair in spec.pairs}
    for number, op in enumerate(spec.ops):
        if op is LifecycleOp.SET_ALPHA_TARGET:  # a target must be free, chosen or not
            free = view.free_targets[..., default[Head.ALPHA_TARGET], None]
            slot[:, number] &= values.get((op, Head.ALPHA_TARGET), free).any(-1)
        if op is LifecycleOp.GERMINATE:  # in time to be kept, or not at all
            timely = in_time(view)[:, None, default[Head.TEMPO], None]
            slot[:, number] &= values.get((op, Head.TEMPO), timely).any(-1)
        if Head.SLOT not in spec.heads:
            slot[:, number] &= _only(spec.slots, default[Head.SLOT])
        if op is LifecycleOp.WAIT:  # names no slot
            slot[:, number] = _only(spec.slots, default[Head.SLOT])
    assert slot.shape == (len(view.clock), len(spec.ops), spec.slots)
    return ActionMasks(slot.any(2), slot, values)


def _values(view: View, op: LifecycleOp, head: Head) -> Tensor:
    spec, size = view.spec, view.spec.head_sizes[head]
    every = torch.ones(*view.free_targets.shape[:2], size, dtype=torch.bool)
    default = _only(size, spec.defaults[head])
    if head is Head.BLUEPRINT:
        real = torch.tensor([name != "noop" for name in spec.blueprints])
        return every & (real if bool(real.any()) else default)
    if head is Head.TEMPO:
        return every & in_time(view)[:, None]
    if op is LifecycleOp.SET_ALPHA_TARGET and head is Head.STYLE:  # a seed keeps the style it was born with
        return torch.nn.functional.one_hot(view.seeds.style, size).bool()
    if op is LifecycleOp.SET_ALPHA_TARGET and head is Head.ALPHA_TARGET:
        return view.free_targets.clone()
    if op is LifecycleOp.PRUNE and head is Head.ALPHA_SPEED:  # a seed without effect has nothing to fade
        return torch.where((view.seeds.alpha > 0)[..., None], every, _only(size, 0))
    if head is Head.ALPHA_CURVE and Head.ALPHA_SPEED not in spec.heads:  # at once or from nothing: no curve
        fades = (view.seeds.alpha > 0)[..., None] | (op is not LifecycleOp.PRUNE)
        return torch.where(fades & (spec.defaults[Head.ALPHA_SPEED] != 0), every, default)
    return every


def in_time(view: View, wait: int = 0) -> Tensor:
    """bool [N, tempos]: would a seed born now, or after a wait, with this tempo be kept before the end?"""
    if view.settling is None:
        return torch.ones(len(view.clock), len(TEMPOS), dtype=torch.bool)
    ramp = torch.tensor(TEMPOS)
    if LifecycleOp.SET_ALPHA_TARGET in view.spec.ops:  # it can end a ramp: one epoch of it, one at speed 0
        ramp = ramp.clamp(max=2)
    return (view.horizon - view.clock - wait)[:, None] >= ramp + view.settling


def _only(size: int, choice: int) -> Tensor:
    return torch.arange(size) == choice
