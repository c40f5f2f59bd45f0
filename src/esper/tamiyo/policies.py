"""Every policy behind one door: a view of all N rows in, one legal action per row out."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from esper.leyline import ActionSpec, EsperError, View
from esper.leyline.keys import Purpose, mix, uniform
from esper.leyline.plugins import Registry, load_plugins
from esper.leyline.storage import read_state
from esper.tamiyo.controller import Controller, PolicyInput
from esper.tamiyo.distributions import ActionDistribution, ActionLogits
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.masks import action_masks
from esper.tamiyo.minds import member_for, read_mind, shipped
from esper.tamiyo.scripts import Planned, Scripted, Triggered, Wait


class PolicyBundle(Protocol):
    """From a view of all rows to actions [N, len(spec.heads)]. What it remembers of a row ends at clock 0."""

    def __call__(self, view: View) -> Tensor: ...


class Random:
    """Uniform over possible ops, then slots, then values. Draws depend on luck and clock alone."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __call__(self, view: View) -> Tensor:
        masks, keys = action_masks(view), mix(view.luck, Purpose.ACTION, self.seed, view.clock)
        flat = ActionDistribution(view.spec, ActionLogits.flat(view.spec, masks), masks)
        return flat.sample(uniform(keys, len(view.spec.heads)))


class Learned:
    """A trained controller. It draws from its distribution, or takes the likeliest action if greedy."""

    memory = ("hidden",)

    def __init__(self, controller: Controller, greedy: bool = False, seed: int = 0) -> None:
        self.controller, self.greedy, self.seed = controller, greedy, seed
        self.hidden: Tensor | None = None

    @classmethod
    def load(cls, path: str | Path, spec: ActionSpec, device: torch.device | str = "cpu",
             greedy: bool = False, seed: int = 0) -> "Learned":
        """From a file that an agent saved, or by a shipped mind's name, for hosts with this action spec."""
        if Path(path).is_dir():
            raise EsperError(f"{path} is a folder; name the agent.safetensors of a run, "
                             f"or one of {', '.join(shipped())}")
        if str(path) in shipped():
            controller = member_for(spec, read_mind(path, device)).controller
        else:
            controller = Controller.decode(*read_state(path, "agent"), device, str(path))
        return cls(controller.bound_to(spec), greedy, seed)

    def __call__(self, view: View) -> Tensor:
        if self.hidden is None or len(self.hidden) != len(view.clock):
            self.hidden = self.controller.network.get_initial_hidden(len(view.clock))
        controller = self.controller
        shown = PolicyInput.of(view, (self.seed,), controller.device, controller.network.observation)
        _, acted = controller.act(shown, self.hidden, greedy=self.greedy)
        self.hidden = acted.hidden
        return acted.actions.cpu()


POLICIES = Registry[Callable[..., PolicyBundle]]("policy", Callable, {
    "wait": Wait, "random": Random, "scripted": Scripted, "heuristic": Heuristic, "triggered": Triggered,
    "planned": Planned, "learned": Learned.load})
"""Every kind of policy by name; each is called with what it needs."""
register_policy = POLICIES.add


def named_policies() -> tuple[str, ...]:
    """Those for which a name is enough, at the door and before the court."""
    load_plugins()
    return tuple(name for name in POLICIES if name not in ("scripted", "triggered", "planned", "learned"))
