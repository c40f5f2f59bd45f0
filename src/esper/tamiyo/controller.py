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
from esper.tamiyo.network import Acted, FactoredRecurrentActorCritic, NetworkConfig, emptied, exact
from esper.tamiyo.observing import EYES, OBSERVATION, Normaliser, observe


class PolicyInput(NamedTuple):
    """What a controller is shown of N rows in one step."""

    seen: Observation  # not scaled
    masks: ActionMasks
    reset: Tensor  # [N] bool: the memory must be empty
    u: Tensor  # [N, heads] uniform numbers to draw with
    valid: Tensor | None = None  # [N] bool: rows that are not over and waiting; None: none is
    privileged: Tensor | None = None  # [N, W] what the value head alone sees; None: nothing

    @classmethod
    def of(cls, view: View, seed: tuple[int, ...], device: torch.device,
           spec: ObservationSpec = OBSERVATION) -> "PolicyInput":
        """`seed` decides the draws, with the episode's luck and the clock; the spec says what is seen."""
        seen, masks = observe(view, spec), action_masks(view).map(lambda mask: mask.to(device))
        u = uniform(mix(view.luck, Purpose.ACTION, *seed, view.clock), len(view.spec.heads))
        return cls(Observation(*(part.to(device) for part in seen)), masks, (view.clock == 0).to(device),
                   u.to(device), (~view.done).to(device))


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
        return Controller(copy.deepcopy(self.network).to(device), copy.deepcopy(self.normaliser))

    def bound_to(self, spec: ActionSpec) -> "Controller":
        """For hosts with other slots or blueprints; it must see what hosts show."""
        known = [eyes.spec for eyes in EYES.values()]
        nearest = next((spec for spec in known if spec == self.network.observation), known[0])
        for name in ("row", "slot", "candidate"):
            mine, shown = (getattr(seen, name) for seen in (self.network.observation, nearest))
            if mine != shown:
                odd = ", ".join(sorted({f.name for f in {*mine} ^ {*shown}})) or "the order"
                raise EsperError(f"this controller sees other {name} fields than there are: {odd} differ")
        return Controller(self.network.bound_to(spec), self.normaliser)

    def act(self, shown: PolicyInput, hidden: Tensor, explore: float = 0.0,
            greedy: bool = False) -> tuple[Observation, Acted]:
        """(what was seen, scaled; what was done) in one step; rows to reset start with an empty memory."""
        seen, hidden = self.normaliser(shown.seen), emptied(hidden, shown.reset)
        u = None if greedy else shown.u
        return seen, self.network.get_action(seen, shown.masks, hidden, u, explore, shown.privileged)

    @torch.no_grad()
    @exact()
    def value(self, seen: Observation, hidden: Tensor, privileged: Tensor | None = None) -> Tensor:
        """[N]: what a raw observation promises."""
        return self.network.step(self.normaliser(seen), hidden, privileged)[0].value

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
            check_tensors("weights", empty, weights)
            network = FactoredRecurrentActorCritic(spec, config, observation)
            normaliser = Normaliser(observation, limit=float(header["limit"]))
            check_tensors("scales", normaliser.tensors(), scales)
            network.load_state_dict(weights)
            normaliser.load(scales)
            return cls(network.to(device), normaliser)


def inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def check_tensors(what: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """The same names with the same shapes, or one sentence."""
    mine, theirs = ({(name, tensor.shape) for name, tensor in part.items()} for part in (expected, found))
    if wrong := sorted({name for name, _ in mine ^ theirs})[:3]:
        raise StateFormatError(f"these {what} are of another controller: {', '.join(wrong)} differ")
