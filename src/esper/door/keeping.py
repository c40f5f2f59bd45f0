"""What is kept of a growing model: copies to go back to when growth breaks the training, and files."""

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.door.copies import Repeat
from esper.leyline import Contribution, EsperError, SeedStage

if TYPE_CHECKING:
    from esper.door.growing import Growing


class LastGood:
    """Model, optimizer, schedulers, lifecycle and seeds after an epoch that scored a number."""

    def __init__(self, growing: "Growing") -> None:
        optimizer = growing.optimizer
        self.model = copy.deepcopy(growing.host.state_dict())  # with extra states of any type
        self.states = {p: copy.deepcopy(dict(state)) for p, state in optimizer.state.items()}
        self.groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self.settings: list[dict[str, Any]] = [
            copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups]
        host = {id(parameter) for parameter in growing.host.parameters()}  # others: seeds', or a loss's
        others: list[Tensor] = [p for params in self.groups for p in params if id(p) not in host]
        others += [buffer for graft in growing.grafts.values() for buffer in graft.buffers()]
        self.others = [(each, each.detach().clone()) for each in others]
        self.schedulers = [copy.deepcopy(each.state_dict()) for each in growing.asked.schedulers]
        self.life = copy.deepcopy(dict(growing.life.fields()))
        self.joined = list(growing.joined)
        self.grafts = dict(growing.grafts)

    def put_back(self, growing: "Growing") -> None:
        """All of it, but for seeds that were not kept yet: those are gone, and their slots empty."""
        growing.drop(list(growing.grafts))  # some may have joined since
        growing.host.load_state_dict(self.model)
        with torch.no_grad():
            for parameter, value in self.others:
                parameter.copy_(value)
        groups = growing.optimizer.param_groups  # those that users added since stay as they are
        for group, params, settings in zip(groups, self.groups, self.settings, strict=False):
            group["params"][:] = params
            group.update(copy.deepcopy(settings))
        for parameter in itertools.chain(*self.groups):
            growing.optimizer.state.pop(parameter, None)
        growing.optimizer.state.update({p: copy.deepcopy(state) for p, state in self.states.items()})
        for scheduler, state in zip(growing.asked.schedulers, self.schedulers, strict=True):
            scheduler.load_state_dict(state)
        for name, value in self.life.items():
            setattr(growing.life, name, value.clone())
        growing.joined = list(self.joined)
        growing.grafts = dict(self.grafts)
        on_trial = [slot for slot in growing.grafts
                    if int(growing.life.stage[0, slot]) != SeedStage.FOSSILIZED]
        growing.drop(on_trial)
        growing.life.clear_slots(torch.tensor(on_trial, dtype=torch.int64))


def state(growing: "Growing") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(header, tensors): what grew, how far it is, and what the controller remembers."""
    header = {"epoch": growing.life.epoch, "open": growing.life.open,
              "slots": [place.path for place in growing.places],
              "widths": [place.shape.channels for place in growing.places],
              "blueprints": list(growing.spec.blueprints), "joined": growing.joined,
              "spent": growing.compute.spent}
    tensors = {f"life.{name}": value for name, value in growing.life.fields()} | {"scores": growing.scores}
    tensors |= {f"candidates.{name}": value for name, value in vars(growing.candidates).items()}
    remembered = {name: getattr(growing.policy, name) for name in getattr(growing.policy, "memory", ())}
    tensors |= {f"policy.{name}": value for name, value in remembered.items() if value is not None}
    for slot, graft in growing.grafts.items():
        if isinstance(graft, Repeat):
            tensors |= {f"seed.{slot}.{name}": tensor.detach().clone() for name, tensor in _all(graft.seed)}
        else:
            tensors[f"seed.{slot}"] = growing.kind(slot).layout.flatten(graft.seed).cpu()
    return header, tensors


def _all(block: nn.Module) -> list[tuple[str, Tensor]]:
    """Also what a state dict would leave out: nobody else knows it."""
    return [*block.named_parameters(), *block.named_buffers()]


def restore(growing: "Growing", header: dict[str, Any], tensors: dict[str, Tensor], path: str) -> None:
    """Of what `state` gave; `path` is where it comes from."""
    if growing.closed or growing.history or growing.grafts:
        raise EsperError("load right after attach; this model was trained already")
    mine, _ = state(growing)
    if any(header[key] != mine[key] for key in ("slots", "widths", "blueprints")):
        raise EsperError(f"{path} is of other slots, widths or blueprints; "
                         f"attach with slots={header['slots']}")
    for name, _ in growing.life.fields():
        setattr(growing.life, name, tensors[f"life.{name}"])
    for name in getattr(growing.policy, "memory", ()):
        setattr(growing.policy, name, tensors.get(f"policy.{name}"))
    growing.candidates = Contribution(*(tensors[f"candidates.{name}"] for name in vars(growing.candidates)))
    growing.life.epoch, growing.life.open = int(header["epoch"]), bool(header["open"])
    growing.compute.spent, growing.scores = float(header["spent"]), tensors["scores"]
    for slot in growing.life.planted[0].nonzero().flatten().tolist():
        growing.plant(slot, tensors.get(f"seed.{slot}", torch.empty(0)))
        with torch.no_grad():
            for name, tensor in _all(growing.grafts[slot].seed):
                if (kept := f"seed.{slot}.{name}") in tensors:
                    tensor.copy_(tensors[kept])
    for slot in header["joined"]:
        growing.join(slot)
    growing.wire()
    growing.good = None  # of the model that will be loaded, before its first step
