"""The blueprint `copy`: a second block like the one in front of a slot, so that a model grows deeper by
blocks of its own. It is born with what that one has learned, and blends from its input to its output."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from esper.door.places import Place, SlotHook, arguments, home, samples_of, untouched
from esper.kasmina.blending import Graft
from esper.kasmina.blueprints import Blueprint, Prototype, SeedKind
from esper.kasmina.foreign import Repeat, first_of, grow_behind, spelled_out
from esper.kasmina.lift import Layout
from esper.leyline import Cost, EsperError

COPY = "copy"


class Copied(Prototype):
    """A blueprint at one slot that is a submodule of the user's."""

    def __init__(self, host: nn.Module, place: Place) -> None:
        def build(shape: Any) -> nn.Module:
            """As it is now, without what grows in it."""
            like = host.get_submodule(place.path)
            block = copy.deepcopy(like)
            for old, new in zip(like.modules(), block.modules(), strict=True):
                for number, hook in old._forward_hooks.items():
                    if isinstance(hook, SlotHook):
                        del new._forward_hooks[number], new._forward_hooks_with_kwargs[number]
            return block

        self.blueprint, self.shape = Blueprint(COPY, build, (), SeedKind.CUSTOM, reach=0), place.shape
        self.place, self.layout = place, Layout(build(place.shape))

    def fresh(self, keys: Tensor) -> Tensor:
        return self.layout.flatten(self._built(0)).expand(len(keys), -1)

    def plain(self, row: Tensor) -> nn.Module:
        block = self._built(0)
        self.layout.load(block, row)
        return block

    def try_out(self, call: tuple[Any, Any, Any], samples: int) -> None:
        """Does a second one run behind the first, called as that was? Its cost is what this takes."""
        (args, kwargs, output) = call
        h, path = first_of(output), self.place.path
        came = list(getattr(args[0], "shape", ())) if args else "keywords alone"
        if came != list(h.shape):
            raise EsperError(f"{path} turns {came} into {list(h.shape)}; a copy needs a submodule that keeps "
                             "the shape of its first argument")
        with FlopCounterMode(display=False) as counter:
            Repeat(self._built(0), 1.0).to(h.device, h.dtype)(h, *args[1:], **kwargs)
        self.cost = Cost(self.layout.params, counter.get_total_flops() // samples)


def copies(host: nn.Module, places: Sequence[Place], example: Any) -> dict[str, Copied | EsperError]:
    """By path: what a copy would be, or why there is none. Nothing is left of the passes that tell."""
    calls: dict[str, Any] = {}
    found: dict[str, Copied | EsperError] = {}

    def seen(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[path] = args, kwargs, output

    hooks = [host.get_submodule(place.path).register_forward_hook(
        functools.partial(seen, place.path), with_kwargs=True) for place in places]
    with untouched(host), torch.no_grad(), spelled_out():
        try:
            args, kwargs = arguments(example)
            host.eval()(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        for place in places:
            try:
                copied = found[place.path] = Copied(host, place)
                copied.try_out(calls[place.path], samples_of(example))
            except EsperError as error:
                found[place.path] = error
            except Exception as error:  # whatever a user's block may raise
                why = next(iter(str(error).splitlines()), type(error).__name__)
                found[place.path] = EsperError(f"{place.path} cannot be copied ({why}); "
                                               f"leave {COPY!r} out of blueprints")
    return found


def delivered(net: nn.Module, grafts: Mapping[str, Graft], example: Any) -> nn.Module:
    """A module with what grew behind these paths. Copies become blocks like the others of their container, if
    the network then gives the same on the example: it is of the user's classes alone."""
    wrapped = grow_behind(copy.deepcopy(net), copy.deepcopy(dict(grafts)))
    parts = {path: path.rpartition(".") for path in grafts}
    places: dict[str, tuple[Any, str]] = {path: (net.get_submodule(owner), name)
                                          for path, (owner, _, name) in parts.items()}
    whole = {path: graft for path, graft in grafts.items() if isinstance(graft, Repeat) and graft.alpha == 1
             and isinstance(places[path][0], (nn.Sequential, nn.ModuleList)) and places[path][1].isdigit()}
    grow_behind(net, {path: graft for path, graft in grafts.items() if path not in whole})
    for path in sorted(whole, key=lambda path: int(places[path][1]), reverse=True):
        owner, number = places[path]
        _insert(owner, int(number) + 1, whole[path].seed, getattr(net, "config", None))
    try:
        return net if not whole or _alike(net, wrapped, example) else wrapped
    except Exception:  # its loop knows the number of blocks, or it was changed since the example
        return wrapped


def _insert(blocks: nn.Sequential | nn.ModuleList, at: int, block: nn.Module, config: Any) -> None:
    """And tell those behind, and a model of Hugging Face, which number they have now."""
    if getattr(config, "num_hidden_layers", None) == len(blocks):
        if isinstance(kinds := getattr(config, "layer_types", None), list):
            kinds.insert(at, kinds[at - 1])
        config.num_hidden_layers = len(blocks) + 1
    blocks.insert(at, block)
    for number in range(at, len(blocks)):
        for module in blocks[number].modules():
            if getattr(module, "layer_idx", None) == number - 1:
                module.layer_idx = number  # type: ignore[assignment]


def _alike(net: nn.Module, other: nn.Module, example: Any) -> bool:
    with untouched(net), untouched(other), torch.no_grad():
        args, kwargs = tree_map(functools.partial(_moved, net), arguments(example))
        ours, theirs = (tree_leaves(each.eval()(*args, **kwargs)) for each in (net, other))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, Tensor))


def _moved(net: nn.Module, part: Any) -> Any:
    return part.to(now[0]) if isinstance(part, Tensor) and (now := home(net)) else part
