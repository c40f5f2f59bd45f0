"""Where a model can grow: its slots, found by running it once without leaving a trace."""

import contextlib
import copy
import functools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.door.asked import Asked
from esper.kasmina.blending import Graft
from esper.kasmina.blueprints import kind_of
from esper.kasmina.foreign import first_of, shape_of, spelled_out, with_first
from esper.leyline import Cost, EsperError, SlotShape

MOST_SLOTS = 12
LISTS = (nn.Sequential, nn.ModuleList)
Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with."""


class Place(NamedTuple):
    """A slot: behind which submodule, what it holds, and in which numbers."""

    path: str
    shape: SlotShape
    device: torch.device
    dtype: torch.dtype


class SlotHook:
    """A slot's live seed works on the output. Copied and pickled models are without it, like state dicts."""

    def __init__(self, host: nn.Module, active: Mapping[int, Graft], slot: int, place: Place) -> None:
        self.host, self.active, self.slot, self.place = host, active, slot, place

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        graft = self.active.get(self.slot)
        if graft is None:
            return None  # the output stays the very tensor that it was
        if not torch.compiler.is_compiling() and any(p.grad is not None for p in graft.parameters()):
            grads = [p.grad for p in self.host.parameters() if p.requires_grad]
            if grads and all(grad is None for grad in grads):  # `model.zero_grad()` after a skipped step
                graft.zero_grad()
        (path, shape, *_), h = self.place, first_of(output)
        held = () if getattr(h, "is_nested", False) else tuple(getattr(h, "shape", ()))
        dims = 3 if shape.tokens else 2 + len(shape.extent)
        if len(held) != dims or held[-1 if shape.tokens else 1] != shape.channels:
            raise EsperError(f"{path} gave {shape.channels} channels in {dims} dimensions when attached, "
                             f"and now a shape of {held}; attach anew when a model changes its shapes")
        if graft.training != module.training:
            graft.follow(module)
        return with_first(output, graft(h, *args[1:], **kwargs))

    def __reduce__(self) -> Any:  # a function that does nothing, and that needs no Esper to be read
        return getattr, (contextlib.nullcontext(), "__exit__")


def home(model: nn.Module) -> tuple[torch.device, torch.dtype] | None:
    """Where a model is, and in which numbers."""
    return next(((p.device, p.dtype) for p in model.parameters() if p.is_floating_point()), None)


def generators(model: nn.Module, data: Any = None) -> list[torch.Generator]:
    """All that a loop draws from in PyTorch: the CPU's, a loader's own, those of the model's devices."""
    loader = (data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None))
    found = (getattr(each, "generator", None) for each in loader)
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    return [torch.default_generator, *(each for each in found if isinstance(each, torch.Generator)),
            *(torch.cuda.default_generators[device] for device in devices)]


@contextmanager
def untouched(model: nn.Module, data: Any = None) -> Iterator[None]:
    """Whatever runs inside leaves modes, buffers and every random state as they were."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    python, numpy = random.getstate(), np.random.get_state()
    drawn = [(each, each.get_state()) for each in generators(model, data)]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in drawn:
            generator.set_state(state)
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                old = buffers.get(name)  # a cache that was made anew, in another size, stays
                if old is not None and old.shape == buffer.shape and not torch.equal(buffer, old):
                    buffer.copy_(old)


def arguments(batch: Any) -> Batch:
    """From a batch as people have them: a tensor, a tuple whose first part is one, or keywords."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return (), dict(batch)
    return (batch[0] if isinstance(batch, (tuple, list)) else batch,), {}


def samples_of(batch: Any) -> int:
    """Samples of a batch."""
    several = batch if isinstance(batch, (tuple, list)) else [batch]
    parts = batch.values() if hasattr(batch, "keys") else several
    return next((len(part) for part in parts if isinstance(part, Tensor) and part.dim()), 1)


class Survey(NamedTuple):
    """What one forward pass tells of a model."""

    seen: dict[str, list[Any]]
    """Path -> its outputs, in network order."""
    even: set[str]
    """Paths whose output has the shape of their first argument."""
    cost: Cost
    """For a sample."""
    flops: dict[str, int]
    """Path -> those of the whole pass; the model is ''."""


def survey(model: nn.Module, example: Any) -> Survey:
    seen: dict[str, list[Any]] = {}
    even: set[str] = set()
    flops: dict[str, int] = {}

    def begin(path: str, module: nn.Module, args: Any) -> None:
        flops[path] = flops.get(path, 0) - counter.get_total_flops()

    def note(path: str, module: nn.Module, args: Any, output: Any) -> None:
        flops[path] += counter.get_total_flops()
        seen.setdefault(path, []).append(out := first_of(output))
        if args and getattr(args[0], "shape", None) == getattr(out, "shape", ()):
            even.add(path)

    hooks = [hook for path, module in model.named_modules() if path for hook in (
        module.register_forward_pre_hook(functools.partial(begin, path)),
        module.register_forward_hook(functools.partial(note, path)))]
    counter = FlopCounterMode(display=False)
    try:
        with untouched(model), torch.no_grad(), spelled_out(), counter:
            args, kwargs = arguments(example)
            model.eval()(*args, **kwargs)
    except Exception as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise EsperError(f"the model does not run on the example ({why}); "
                         "pass a batch as the training loop has it") from error
    finally:
        for hook in hooks:
            hook.remove()
    params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    flops[""] = counter.get_total_flops()
    return Survey(seen, even, Cost(params, flops[""] // samples_of(example)), flops)


def find_places(model: nn.Module, asked: Asked, example: Any) -> tuple[list[Place], Cost]:
    """The slots that were asked for, or found, in network order."""
    slots, layouts = asked.slots, asked.layouts
    known = dict(model.named_modules())
    if not (layouts.keys() <= known.keys() and set(layouts.values()) <= {"BCL", "BTC"}):
        raise EsperError(f"layouts say BCL or BTC for paths of slots; got {layouts}")
    seen, even, cost, _ = survey(model, example)
    batch = samples_of(example)
    if slots != "auto":
        named = [slots] if isinstance(slots, str) else list(slots)
        for path in named:
            if path not in known or not path:
                raise EsperError(f"the model has no submodule {path!r} for a slot; "
                                 f"there are {', '.join(list(known)[1:7])}, ...")
            if path not in seen or len(seen[path]) > 1:
                raise EsperError(f"{path} runs {len(seen.get(path, []))} times in a forward pass; "
                                 "a slot needs a submodule that runs once")
        paths = [path for path in seen if path in set(named)]
    else:
        able = {path for path, (out, *again) in seen.items() if not again and isinstance(out, Tensor)
                and 2 <= out.dim() <= 4 and out.is_floating_point() and len(out) == batch}
        paths = _blocks(model, able)
        if asked.deeper:  # a layer behind a layer of its kind is no block
            paths = copyable(model, able, even) or [path for path in paths if any(known[path].children())]
        paths.sort(key=list(seen).index)
    places = []
    for path in paths:
        out = seen[path][0]
        shape = shape_of(model.get_submodule(path), path, out, batch, layouts.get(path))
        places.append(Place(path, shape, out.device, out.dtype))
    if slots == "auto" and places:  # of one kind, or nothing fits all of them
        kind, _ = Counter(kind_of(place.shape) for place in places).most_common(1)[0]
        places = [place for place in places if kind_of(place.shape) == kind]
        step = -(-len(places) // MOST_SLOTS)
        places = places[step - 1 :: step]
    if not places:
        raise EsperError(f"no {'blocks to copy' if asked.deeper else 'slots'} were found in this model; "
                         "name submodules with slots=[...]")
    return places, cost


def copyable(model: nn.Module, able: set[str], even: set[str]) -> list[str]:
    """Blocks that keep the shape of what they get and stand beside others of their class: most of the class
    keep it, or all but the first of each list do. Others, as stages of a residual net, are looked into."""
    known = dict(model.named_modules())
    home = {path: path.rpartition(".")[0] for path in known}
    classes: dict[Any, list[str]] = {}
    around: dict[Any, set[type]] = {}
    for path, block in known.items():
        parts, is_list = list(block.children()), type(block) in LISTS
        of_blocks = is_list and len({*map(type, parts)}) == 1 and any(parts[0].children())
        if path in able and parts and not of_blocks:
            kind = (type(block), home[path] if is_list else "")
            classes.setdefault(kind, []).append(path)
            around.setdefault(kind, set()).update(type(known[above]) for above in _above(path))
    chosen: list[str] = []
    for kind in sorted(classes, key=lambda kind: len(around[kind])):  # outer ones first
        own = [path for path in classes[kind] if not set(_above(path)).intersection(chosen)]
        later = [path for before, path in pairwise(own) if home[before] == home[path]]
        lists = [known[home[path]] for path in own]
        several = later or any(type(each) is nn.ModuleList and len(each) == 1 for each in lists)
        if (later and even.issuperset(later)) or (several and 2 * len(even.intersection(own)) > len(own)):
            chosen += own
    return [path for path in chosen if path in even and not set(_above(path)).intersection(chosen)]


def _above(path: str) -> Iterator[str]:
    while path:
        yield (path := path.rpartition(".")[0])


def _blocks(model: nn.Module, able: set[str]) -> list[str]:
    """Repeated blocks: children of one type in a container, the outermost ones; else the outermost several
    parts that have weights, but for the last, which is the head."""
    found: list[str] = []
    for path, module in model.named_modules():
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        kinds = Counter(type(child) for _, child in children)
        for name, child in children:
            repeated = kinds[type(child)] > 1 and len(list(child.children())) > 0
            inside = any(name.startswith(f"{outer}.") for outer in found)
            if repeated and name in able and not inside:
                found.append(name)
    if found:
        return found
    parts = {"": model}
    while len(parts) == 1:  # a network may be the one part of its class
        ((path, only),) = parts.items()
        parts = {f"{path}.{name}".lstrip("."): child for name, child in only.named_children()
                 if next(child.parameters(), None) is not None}
    return [path for path in list(parts)[:-1] if path in able]


def copy_of(net: nn.Module) -> nn.Module:
    """Of all but what it remembers of a pass, as old weight norms do: that is left as numbers."""
    passing = {id(value): value.detach().clone() for module in net.modules()
               for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf}
    return copy.deepcopy(net, passing)


def bare(model: nn.Module) -> nn.Module:
    """The user's own module inside what torch.compile and DistributedDataParallel return."""
    while type(model).__name__ in ("OptimizedModule", "DistributedDataParallel"):
        model = next(model.children())
    return model
