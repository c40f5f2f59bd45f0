"""Minds: a file of trained controllers, one for every kind of host it knows; some ship with Esper."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from esper.leyline import ActionSpec, EsperError
from esper.leyline.storage import decoding, read_state, write_state
from esper.tamiyo.controller import Controller, inside

FOLDER = Path(__file__).parent.parent / "minds"


class Member(NamedTuple):
    """One controller of a mind."""

    controller: Controller
    about: Mapping[str, Any]  # plain data: the family it was trained on, with what, and what was proven


def shipped() -> dict[str, Path]:
    """name -> file of every mind in the package."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.safetensors"))}


def write_mind(path: str | Path, members: Sequence[Member]) -> None:
    headers = [{"controller": member.controller.header(), "about": dict(member.about)} for member in members]
    tensors = {f"{number}.{name}": tensor for number, member in enumerate(members)
               for name, tensor in member.controller.tensors().items()}
    write_state(path, "mind", {"members": headers}, tensors)


def read_mind(name: str | Path, device: torch.device | str = "cpu") -> list[Member]:
    """All members of a shipped mind, or of one in a file."""
    header, tensors = read_state(shipped().get(str(name), name), "mind")
    with decoding(name, "mind"):
        parts = [inside(tensors, f"{number}.") for number in range(len(header["members"]))]
        return [Member(Controller.decode(each["controller"], part, device, str(name)), each["about"])
                for each, part in zip(header["members"], parts, strict=True)]


def member_for(spec: ActionSpec, members: Sequence[Member]) -> Member:
    """The one trained with most of a host's blueprints and fewest others: at least half of either."""
    offered = set(spec.blueprints) - {"noop"}
    known = [set(member.controller.network.spec.blueprints) - {"noop"} for member in members]
    shared = [len(each & offered) for each in known]
    best = max(range(len(members)), key=lambda number: (shared[number], -len(known[number])))
    if 2 * shared[best] < min(len(known[best]), len(offered)):  # norm is everywhere
        names = ", ".join(sorted(set().union(*known)))
        raise EsperError(f"this mind was trained with {names}; of these this host offers {shared[best]}, and "
                         f"{len(offered) - shared[best]} others: train a controller for it")
    return members[best]
