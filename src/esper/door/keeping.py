"""Copies of a growing model's whole state, to go back to when growth breaks the training."""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from esper.leyline import SeedStage

if TYPE_CHECKING:
    from esper.door.growing import Growing


class LastGood:
    """Model, optimizer, schedulers, lifecycle and seeds after an epoch that scored a number."""

    def __init__(self, growing: "Growing") -> None:
        optimizer = growing.optimizer
        self.model = copy.deepcopy(growing.host.state_dict())  # with extra states of any type
        self.optimizer: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
        self.groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        host = {id(parameter) for parameter in growing.host.parameters()}  # others: seeds', or a loss's
        self.others = [(p, p.detach().clone()) for params in self.groups for p in params if id(p) not in host]
        self.schedulers = [copy.deepcopy(each.state_dict()) for each in growing.asked.schedulers]
        self.life = copy.deepcopy(dict(growing.life.fields()))
        self.joined = list(growing.joined)
        self.grafts = dict(growing.grafts)

    def put_back(self, growing: "Growing") -> None:
        """All of it, but for seeds that were not kept yet: those are gone, and their slots empty."""
        growing.host.load_state_dict(self.model)
        with torch.no_grad():
            for parameter, value in self.others:
                parameter.copy_(value)
        later = growing.optimizer.param_groups[len(self.groups) :]  # which users added since
        del growing.optimizer.param_groups[len(self.groups) :]
        for group, params in zip(growing.optimizer.param_groups, self.groups, strict=True):
            group["params"][:] = params
        growing.optimizer.load_state_dict(self.optimizer)
        growing.optimizer.param_groups.extend(later)
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
