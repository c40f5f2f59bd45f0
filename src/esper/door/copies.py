"""The blueprint `copy`: a second block like the one in front of a slot, so that a model grows deeper by
blocks of its own. It is born with what that one has learned, and blends from its input to its output."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from esper.door.asked import COPY, Asked
from esper.door.places import LISTS, Batch, Place, SlotHook, arguments, copy_of, home, samples_of, untouched
from esper.kasmina.blending import Graft
from esper.kasmina.blueprints import Blueprint, Prototype, SeedKind, find_blueprint, kind_of, names_for
from esper.kasmina.foreign import first_of, grow_behind, spelled_out
from esper.leyline import Cost, EsperError

_NUMBERS = ("layer_idx", "layer_id")
"""What blocks of Hugging Face call their place."""


class Repeat(Graft):
    """A block like the one in front of it, called as that was; at an alpha of 1 it is simply the next one."""

    def __init__(self, seed: nn.Module, alpha: float) -> None:
        nn.Module.__init__(self)
        self.seed, self.training = seed, seed.training
        self.register_buffer("alpha", torch.tensor(alpha))

    def follow(self, front: nn.Module) -> None:
        self.training = front.training
        for module, like in zip(self.seed.modules(), front.modules(), strict=True):
            module.training = like.training  # parts of it may be frozen

    def forward(self, h: Tensor, /, *rest: Any, **named: Any) -> Tensor:
        if any(hasattr(each, "get_seq_length") for each in (*rest, *named.values())):
            raise EsperError("a copied block has no place of its own in a cache; pass use_cache=False, "
                             "or set model.config.use_cache = False")
        out = first_of(self.seed(h, *rest, **named))
        if h.is_nested:
            both = zip(h.unbind(), out.unbind(), strict=True)
            return torch.nested.as_nested_tensor([a.lerp(b.to(a.dtype), self.alpha.to(a)) for a, b in both])
        return h.lerp(out.to(h.dtype), self.alpha.to(h))


class Copied(Prototype):
    """A blueprint at one slot that is a submodule of the user's; newborn weights are what that has now."""

    def __init__(self, host: nn.Module, place: Place) -> None:
        self.blueprint = Blueprint(COPY, lambda shape: self.plain(), (), SeedKind.CUSTOM, reach=0)
        self.host, self.path, self.shape = host, place.path, place.shape

    def fresh(self, keys: Tensor) -> Tensor:
        return torch.empty(len(keys), 0)

    def plain(self, row: Tensor | None = None) -> nn.Module:
        """A block of its own, without what grows in the other."""
        like = self.host.get_submodule(self.path)
        with _one_sentence(self.path):
            block = copy_of(like)
        for old, new in zip(like.modules(), block.modules(), strict=True):
            for number, hook in old._forward_hooks.items():
                if isinstance(hook, SlotHook):
                    del new._forward_hooks[number], new._forward_hooks_with_kwargs[number]
        return block

    def graft(self, device: torch.device) -> Repeat:
        """Newborn. The block is where the other is, in its numbers; alpha is where the slot's outputs are."""
        repeat = Repeat(self.plain(), 0.0)
        repeat.alpha = repeat.alpha.to(device)
        return repeat

    def try_out(self, call: tuple[Any, Any, Any], samples: int) -> None:
        """Does a second one run behind the first, called as that was? Its cost is what this takes."""
        (args, kwargs, output) = call
        h, block = first_of(output), self.plain()
        came = list(getattr(args[0], "shape", ())) if args else "keywords alone"
        if came != list(h.shape):
            raise EsperError(f"{self.path} turns {came} into {list(h.shape)}; a copy needs a submodule that "
                             "keeps the shape of its first argument")
        before = h._version
        with _one_sentence(self.path), FlopCounterMode(display=False) as counter:
            Repeat(block, 1.0)(h, *args[1:], **kwargs)
        if h._version != before:
            raise EsperError(f"{self.path} changes its input in place, which a copy shares; "
                             "set inplace=False")
        learned = sum(p.numel() for p in block.parameters() if p.requires_grad)
        self.cost = Cost(learned, counter.get_total_flops() // samples)


@contextmanager
def _one_sentence(path: str) -> Iterator[None]:
    """Whatever a user's block may raise."""
    try:
        yield
    except EsperError:
        raise
    except Exception as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise EsperError(f"{path} cannot be copied ({why}); leave {COPY!r} out of blueprints") from error


def offered(host: nn.Module, places: list[Place], asked: Asked,
            example: Any) -> tuple[list[Place], list[list[Prototype]]]:
    """The slots, and [S][K] what may grow in them; slots that were found and hold none of it are left out."""
    wanted, found = asked.blueprints, dict[str, Any]()
    if asked.deeper:
        found = copies(host, places, example)
        wrong = [each for each in found.values() if isinstance(each, EsperError)]
        if wrong and (asked.slots != "auto" or len(wrong) == len(found)):
            raise wrong[0]
        places = [place for place in places if isinstance(found[place.path], Prototype)]
    kinds = [kind_of(place.shape) for place in places]
    known = [name for name in names_for(set(kinds)) if name != "mixer"]  # it knows one length only
    names = known if wanted is None else list(dict.fromkeys(["noop", *wanted]))
    if unknown := [name for name in names if name not in (*known, COPY)]:
        raise EsperError(f"no blueprint {unknown[0]!r} for these slots; choose from "
                         f"{', '.join((*known[1:], COPY))}")
    if len(names) < 2:
        raise EsperError(f"nothing fits all of {', '.join(place.path for place in places)}; "
                         "choose slots of one kind")
    return places, [[found[place.path] if name == COPY else find_blueprint(kind, name).prototype(place.shape)
                     for name in names] for kind, place in zip(kinds, places, strict=True)]


def copies(host: nn.Module, places: Sequence[Place], example: Any) -> dict[str, Copied | EsperError]:
    """By path: what a copy would be, or why there is none. Nothing is left of the passes that tell."""
    found: dict[str, Copied | EsperError] = {}
    with untouched(host), torch.no_grad(), spelled_out():
        calls = _calls(host, {place.path: host.get_submodule(place.path) for place in places},
                       lambda: host.eval()(*(batch := arguments(example))[0], **batch[1]))
        for place in places:
            try:
                found[place.path] = copied = Copied(host, place)
                copied.try_out(calls[place.path][0], samples_of(example))
            except EsperError as error:
                found[place.path] = error
    return found


def _calls(net: nn.Module, of: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, list[Any]]:
    """What these submodules were called with and gave, each time, as a pass runs."""
    seen: dict[str, list[Any]] = {name: [] for name in of}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[name].append((args, kwargs, output))

    hooks = [module.register_forward_hook(functools.partial(note, name), with_kwargs=True)
             for name, module in of.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def delivered(live: nn.Module, hooks: Mapping[str, int], kept: Mapping[str, Graft],
              batch: Batch) -> nn.Module:
    """A copy of the model without its hooks at these paths, with what grew behind them. Copies become blocks
    like the others of their container, so that it is of the user's classes alone, if it then gives what
    `live` gives on a batch, and its configuration builds it again; else they stay beside their originals."""
    found = [path for path, graft in kept.items() if isinstance(graft, Repeat) and graft.alpha == 1]
    if found:
        try:
            whole = {path: copy_of(kept[path].seed) for path in found}
            net = _stacked(_bare(live, hooks), kept, whole)
            with spelled_out():  # PyTorch's encoder layers have a fast path, but not beside hooks
                if _is_right(net, list(whole.values()), batch, _outputs(live, batch)):
                    return net
        except Exception:  # blocks are counted, settings fixed, a batch out of date: as it grew it is right
            pass
    return grow_behind(_bare(live, hooks), kept)


def _bare(live: nn.Module, hooks: Mapping[str, int]) -> nn.Module:
    net = copy_of(live)
    for path, number in hooks.items():
        front = net.get_submodule(path)
        del front._forward_hooks[number], front._forward_hooks_with_kwargs[number]
    return net


def _stacked(net: nn.Module, kept: Mapping[str, Graft], whole: Mapping[str, nn.Module]) -> nn.Module:
    parts = {path: path.rpartition(".") for path in whole}
    owners: dict[str, Any] = {path: net.get_submodule(owner) for path, (owner, *_) in parts.items()}
    grow_behind(net, {path: graft for path, graft in kept.items() if path not in whole})
    for path in sorted(whole, key=lambda path: int(parts[path][2]), reverse=True):
        blocks, number = owners[path], int(parts[path][2])
        if not isinstance(blocks, LISTS) or list(blocks._modules) != list(
                map(str, range(len(blocks)))):
            raise EsperError(f"{path} is in no list of blocks")
        _tell(net, parts[path][0], len(blocks), number)
        blocks.insert(number + 1, whole[path])
        for place in range(number + 1, len(blocks)):
            for module, name in ((m, name) for m in blocks[place].modules() for name in _NUMBERS):
                if getattr(module, name, None) == place - 1:
                    setattr(module, name, place)
    return net


def _tell(net: nn.Module, owner: str, blocks: int, number: int) -> None:
    """Configurations around these blocks that count them, as Hugging Face's do, count one more: in this
    stage, if there are several, or in all."""
    told: list[Any] = []
    whole = owner
    while owner:
        owner = owner.rpartition(".")[0]
        config: Any = getattr(net.get_submodule(owner), "config", None)
        if config is None or any(config is each for each in told):
            continue
        told.append(config)
        depths = getattr(config, "depths", None)
        if isinstance(depths, (list, tuple)):
            numbers = [int(part) for part in whole[len(owner) :].split(".") if part.isdigit()]
            if numbers and list(depths[numbers[-1] : numbers[-1] + 1]) == [blocks]:
                config.depths = [n + (stage == numbers[-1]) for stage, n in enumerate(depths)]
        elif getattr(config, "num_hidden_layers", None) == blocks:
            for name, value in vars(config).items():
                if "layer" in name and isinstance(value, list) and len(value) == blocks:
                    value.insert(number + 1, copy.deepcopy(value[number]))
            config.num_hidden_layers = blocks + 1


def _is_right(net: nn.Module, inserted: Sequence[nn.Module], batch: Batch, wanted: list[Any]) -> bool:
    """The same outputs, by way of every new block; and models that are saved with a configuration are the
    same when they are built from it."""
    saved: dict[str, nn.Module] = {}
    for name, module in net.named_modules():
        within = set(module.modules())
        if hasattr(module, "save_pretrained") and within.intersection(inserted) and not any(
                module in outer.modules() for outer in saved.values()):  # it is saved with that
            saved[name] = module
    outputs: list[Any] = []
    named = saved | {f"{number} new": block for number, block in enumerate(inserted)}
    calls = _calls(net, named, lambda: outputs.extend(_outputs(net, batch)))
    if not _alike(outputs, wanted) or any(len(calls[name]) != 1 for name in named.keys() - saved.keys()):
        return False
    for name, module in saved.items():
        with untouched(net), torch.no_grad():  # its weights are drawn first
            built = type(module)(copy.deepcopy(module.config)).to(*home(module) or ())
            built.load_state_dict(module.state_dict())
            for args, kwargs, output in calls[name]:
                if not _alike(tree_leaves(built.eval()(*args, **kwargs)), tree_leaves(output)):
                    return False
    return True


def _outputs(net: nn.Module, batch: Batch) -> list[Any]:
    def moved(part: Any) -> Any:
        if not isinstance(part, Tensor) or now is None:
            return part
        return part.to(*now) if part.is_floating_point() else part.to(now[0])

    now = home(net)
    args, kwargs = tree_map(moved, batch)
    with untouched(net), torch.no_grad():
        return tree_leaves(net.eval()(*args, **kwargs))


def _alike(ours: list[Any], theirs: list[Any]) -> bool:
    """Outputs that hold no tensors which could be compared are not."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, Tensor)]
    return bool(pairs) and all(isinstance(b, Tensor) and torch.equal(a, b) for a, b in pairs)
