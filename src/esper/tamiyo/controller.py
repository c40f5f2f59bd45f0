"""A controller: the network and the statistics that scale what it sees, to run, save and load as one."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.leyline import ActionSpec, EsperError, Observation, ObservationSpec, StateFormatError, View
from esper.leyline.codec import from_dict, to_dict
from esper.leyline.keys import Purpose, mix, uniform
from esper.leyline.storage import decoding
from esper.tamiyo.masks import ActionMasks, action_masks
from esper.tamiyo.network import Acted, FactoredRecurrentActorCritic, NetworkConfig, exact
from esper.tamiyo.observing import OBSERVATION, Normaliser, observe


class PolicyInput(NamedTuple):
    """What a controller is shown of N rows in one step."""

    seen: Observation  # not scaled
    masks: ActionMasks
    reset: Tensor  # [N] bool: the memory must be empty
    u: Tensor  # [N, heads] uniform numbers to draw with
    valid: Tensor | None = None  # [N] bool: rows that are not over and waiting; None: none is
    privileged: Tensor | None = None  # [N, W] what the value head alone sees; None: nothing

    @classmethod
    def of(cls, view: View, seed: tuple[int, ...], device: torch.device) -> "PolicyInput":
        """`seed` decides the draws, with the episode's luck and the clock."""
        named = {name: mask.to(device) for name, mask in action_masks(view).named().items()}
        seen = Observation(*(part.to(device) for part in observe(view)))
        u = uniform(mix(view.luck, Purpose.ACTION, *seed, view.clock), len(view.spec.heads))
        return cls(seen, ActionMasks.from_named(view.spec, named), (view.clock == 0).to(device), u.to(device),
                   (~view.done).to(device))


def emptied(hidden: Tensor, reset: Tensor) -> Tensor:
    return torch.where(reset[:, None, None], 0.0, hidden)


class Controller:
    """Sees, decides, and is written to files."""

    def __init__(self, network: FactoredRecurrentActorCritic, normaliser: Normaliser) -> None:
        self.network, self.normaliser = network, normaliser
        normaliser.to(self.device)

    @classmethod
    def fresh(cls, spec: ActionSpec, config: NetworkConfig | None = None,
              observation: ObservationSpec = OBSERVATION, device: torch.device | str = "cpu") -> "Controller":
        network = FactoredRecurrentActorCritic(spec, config, observation)
        return cls(network.to(device), Normaliser(observation))

    @property
    def device(self) -> torch.device:
        return self.network.trunk_op.device

    def on(self, device: torch.device | str) -> "Controller":
        """A copy of it there."""
        made = copy.deepcopy(self)
        return Controller(made.network.to(device), made.normaliser)

    def bound_to(self, spec: ActionSpec) -> "Controller":
        """For hosts with other slots or blueprints; it must see what hosts show."""
        for name in ("row", "slot", "candidate"):
            mine, shown = (getattr(seen, name) for seen in (self.network.observation, OBSERVATION))
            if mine != shown:
                odd = sorted({f.name for f in {*mine} ^ {*shown}}) or ["the order"]
                raise EsperError(f"this controller sees other {name} fields than there are: "
                                 f"{', '.join(odd)} differ")
        return Controller(self.network.bound_to(spec), self.normaliser)

    def act(self, shown: PolicyInput, hidden: Tensor, explore: float = 0.0,
            greedy: bool = False) -> tuple[Observation, Acted]:
        """(what was seen, scaled; what was done) in one step; rows to reset start with an empty memory."""
        seen, u = self.normaliser(shown.seen), None if greedy else shown.u
        return seen, self.network.get_action(seen, shown.masks, emptied(hidden, shown.reset), u, explore,
                                             shown.privileged)

    @torch.no_grad()
    @exact()
    def value(self, seen: Observation, hidden: Tensor, privileged: Tensor | None = None) -> Tensor:
        """[N]: what a raw observation promises."""
        decided, _ = self.network(Observation(*(part.unsqueeze(0) for part in self.normaliser(seen))), hidden,
                                  privileged=None if privileged is None else privileged.unsqueeze(0))
        value: Tensor = decided.value[0]
        return value

    def header(self) -> dict[str, Any]:
        net = self.network
        parts = {"spec": net.spec, "network": net.config, "observation": net.observation}
        return {name: to_dict(part) for name, part in parts.items()} | {"limit": self.normaliser.limit}

    def tensors(self) -> dict[str, Tensor]:
        weights = {f"network.{name}": t.detach().cpu() for name, t in self.network.state_dict().items()}
        return weights | {f"normaliser.{name}": t for name, t in self.normaliser.tensors().items()}

    @classmethod
    def decode(cls, header: dict[str, Any], tensors: dict[str, Tensor], device: torch.device | str,
               path: str) -> "Controller":
        """From what `header` and `tensors` gave; `path` is for sentences."""
        with decoding(path, "controller"):
            observation = from_dict(ObservationSpec, header["observation"], f"{path}: observation")
            spec = from_dict(ActionSpec, header["spec"], f"{path}: spec")
            config = from_dict(NetworkConfig, header["network"], f"{path}: network")
            with torch.device("meta"):  # a crafted size must not be allocated before it is compared
                empty = FactoredRecurrentActorCritic(spec, config, observation).state_dict()
            weights, scales = inside(tensors, "network."), inside(tensors, "normaliser.")
            check_tensors("weights", {name: t.shape for name, t in empty.items()}, weights)
            network = FactoredRecurrentActorCritic(spec, config, observation)
            normaliser = Normaliser(observation, limit=float(header["limit"]))
            check_tensors("scales", {name: t.shape for name, t in normaliser.tensors().items()}, scales)
            network.load_state_dict(weights)
            normaliser.load(scales)
            return cls(network.to(device), normaliser)


def inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def check_tensors(what: str, expected: Mapping[str, torch.Size], found: Mapping[str, Tensor]) -> None:
    """The same names with the same shapes, or one sentence."""
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if wrong := {name for name, _ in expected.items() ^ shapes.items()}:
        names = ", ".join(sorted(wrong)[:3])
        raise StateFormatError(f"these {what} are of another controller: {names} differ")
