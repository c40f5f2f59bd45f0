"""Modules that users bring as hosts: any `nn.Module`, run as R copies by vmap, with slots behind submodules.

Legend: R copies, B batch, T tokens, C channels. A slot interrupts the vmap: its rule gets the outputs of all
copies at once, [R, B, ...], and hands them to the seeds. Dropout draws noise by key and batch norms keep
statistics per copy; whatever else is random or keeps state is refused by name.
"""

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.kasmina.lift import Weights, from_copies, state_of, to_copies
from esper.leyline import EsperError, SlotConfig, SlotShape
from esper.leyline.keys import mix, uniform

AtSlot = Callable[[int, Tensor], Tensor]
LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RMSNorm, nn.RNNBase)
"""Layers whose channels come last: behind them a slot with three dimensions is [B, T, C]."""
FIRST = (nn.Conv1d, nn.BatchNorm1d, nn.GroupNorm, nn.InstanceNorm1d)
"""Layers whose channels come first: behind them it is [B, C, L]."""


class _Running:
    """What the layers of a template share while it runs."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.draws = 0  # of noise, so far in this pass
        self.statistics: Weights = {}
        self.at_slot: AtSlot | None = None


class _KeyedDropout(nn.Module):
    """Dropout whose noise depends on the copy's key, the layer and its turn in the pass alone."""

    def __init__(self, layer: nn.modules.dropout._DropoutNd, number: int, running: _Running) -> None:
        super().__init__()
        self.p, self.number, self.running = layer.p, number, running
        self.by_channel = not isinstance(layer, nn.Dropout)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        assert self.running.key is not None
        self.running.draws += 1
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.by_channel else x.shape
        key = mix(self.running.key, self.number, self.running.draws).reshape(1)
        kept = (uniform(key, math.prod(shape)).view(shape) >= self.p).to(x.dtype)
        return x * (kept / (1 - self.p) if self.p < 1 else kept)


class _RowBatchNorm(nn.Module):
    """Batch norm as plain arithmetic; new running statistics are results, not writes."""

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm, path: str, running: _Running) -> None:
        super().__init__()
        if layer.momentum is None:
            raise EsperError(f"{path} is a batch norm with momentum=None; give it a number")
        self.eps, self.momentum, self.path, self.running = layer.eps, layer.momentum, path, running
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)

    def forward(self, x: Tensor) -> Tensor:
        dims, spread = [d for d in range(x.dim()) if d != 1], (1, -1, *[1] * (x.dim() - 2))
        mean, var = self.running_mean, self.running_var
        if self.training or mean is None:
            mean, var = x.mean(dims), x.var(dims, correction=0)
            if self.running_mean is not None:
                count = x.numel() // x.shape[1]
                fresh = {"mean": mean.detach(), "var": var.detach() * count / max(count - 1, 1)}
                for name, value in fresh.items():
                    at, known = f"{self.path}.running_{name}", self.running.statistics  # may run repeatedly
                    old = known[at] if at in known else getattr(self, f"running_{name}").detach()
                    known[at] = old.lerp(value, self.momentum)
        out = (x - mean.view(spread)) * (var + self.eps).rsqrt().view(spread)  # type: ignore[operator, union-attr]
        return out if self.weight is None else out * self.weight.view(spread) + self.bias.view(spread)


class _Slot(torch.autograd.Function):
    """Hands the outputs of all copies to the seeds of a slot. Only its vmap rule ever runs."""

    generate_vmap_rule = False

    @staticmethod
    def forward(h: Tensor, join: Callable[[Tensor], Tensor]) -> Tensor:
        return h.clone()  # not reached by a pass: copies always differ

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, h: Tensor, join: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        return join(h.movedim(in_dims[0], 0)), 0


def first_of(output: Any) -> Any:
    """What a slot works on: the output, or the first of several."""
    return output[0] if isinstance(output, (tuple, list)) and output else output


def with_first(output: Any, first: Any) -> Any:
    """The output of a submodule, in its own form, with another first part."""
    if not isinstance(output, (tuple, list)):
        return first
    return getattr(type(output), "_make", type(output))([first, *output[1:]])  # some tuples have names


def _nothing(module: nn.Module, args: Any, output: Any) -> None:
    pass


class Grafted(nn.Module):
    """A submodule and the seed that grew behind it."""

    def __init__(self, body: nn.Module, graft: nn.Module) -> None:
        super().__init__()
        self.body, self.graft = body, graft
        self.register_forward_hook(_nothing)  # PyTorch's fast path of transformers would pass the seed by

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.body(*args, **kwargs)
        return with_first(out, self.graft(first_of(out), *args[1:], **kwargs))

    def __getattr__(self, name: str) -> Any:
        """The rest of a module may read the weights and settings of what a seed grew behind."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # how to copy the body is not how to copy this
                raise
            return getattr(super().__getattr__("body"), name)


class Foreign:
    """A user's module: how to build it, how to run copies of it, and where its slots are."""

    def __init__(self, build: Callable[[], nn.Module], example: Tensor, paths: tuple[str, ...],
                 layouts: dict[str, str]) -> None:
        self.plain = build
        self.running = _Running()
        self.template = _prepared(build(), self.running)
        self._own = tuple(state_of_prepared(self.template))
        self._names = _places(self.template)
        self._constants = {name: buffer.clone() for name, buffer in self.template.named_buffers()
                           if name not in self._own}
        self._moved: dict[tuple[torch.device, torch.dtype], Weights] = {}
        outputs, self.classes = self._trial(paths, example)
        shapes = tuple(shape_of(self.template.get_submodule(path), path, out, len(example), layouts.get(path))
                       for path, out in outputs.items())
        self.slots = SlotConfig(tuple(outputs), shapes)
        for index, path in enumerate(outputs):
            self.template.get_submodule(path).register_forward_hook(functools.partial(self._hook, index))
        shaped = [(name, tuple(tensor.shape)) for name, tensor in state_of(build())]
        what = repr((shaped, self.slots, tuple(example.shape[1:])))
        self.name = f"{type(self.template).__name__}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"

    def _trial(self, paths: tuple[str, ...], example: Tensor) -> tuple[dict[str, Tensor], int]:
        """({path: what its slot would get} in network order, number of outputs); two copies are tried."""
        net, outputs = self.template, {}
        if not paths or len(set(paths)) < len(paths):
            raise EsperError("a host needs at least one slot, and each name once")
        names = dict(net.named_modules())
        if unknown := [path for path in paths if path not in names or not path]:
            known = ", ".join(name for name in list(names)[1:9])
            raise EsperError(f"the module has no submodule {unknown[0]!r} for a slot; there are {known}, ...")

        def seen(path: str, module: nn.Module, args: Any, out: Any) -> None:
            if path in outputs:
                raise EsperError(f"{path} runs more than once in a forward pass; "
                                 "a slot needs a place of its own")
            outputs[path] = out

        if not any(parameter.requires_grad for parameter in net.parameters()):
            raise EsperError("the module has no parameters that learn; a host needs some")
        own = {name: tensor.detach() for name, tensor in state_of_prepared(net).items()}
        hooks = [names[path].register_forward_hook(functools.partial(seen, path)) for path in paths]
        with torch.no_grad(), _all_removed(hooks), _blaming(net, "cannot run the example"):
            out = self._one(net.train(), own, torch.zeros((), dtype=torch.int64), example)[0]
        for name, before in self._constants.items():
            if not torch.equal(before, net.get_buffer(name)):
                raise EsperError(f"the buffer {name} changes while the module trains; "
                                 "only batch norms may keep state")
        if missing := [path for path in paths if path not in outputs]:
            raise EsperError(f"{missing[0]} does not run in a forward pass; choose a submodule that does")
        wanted = example.shape[: 1 if example.is_floating_point() else 2]
        if not isinstance(out, Tensor) or out.shape[:-1] != wanted or not out.is_floating_point():
            what = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise EsperError("a host returns one tensor, [B, outputs], or [B, T, outputs] for tokens [B, T]; "
                             f"this module returns {what} for {list(example.shape)}")
        two = {name: torch.stack([tensor, tensor]) for name, tensor in own.items()}
        with torch.no_grad(), _blaming(net, "cannot run as many copies at once"):
            for training in (True, False):
                self._many(net.train(training), two, torch.arange(2), torch.stack([example, example]), 0)
        return outputs, out.shape[-1]

    def _one(self, net: nn.Module, own: Weights, key: Tensor, sample: Tensor) -> tuple[Tensor, Weights]:
        """One copy: outputs, and new statistics."""
        self.running.key, self.running.draws, self.running.statistics = key, 0, {}
        placed = {place: own[name] for place, name in self._names.items() if name in own}
        out = torch.func.functional_call(net, placed, (sample,), tie_weights=False)
        return out, self.running.statistics

    def _many(self, net: nn.Module, weights: Weights, keys: Tensor, x: Tensor,
              dim: int) -> tuple[Tensor, Weights]:
        """Copies with weights and keys of their own, of samples with the copies along `dim`."""
        dtype = next(iter(weights.values())).dtype
        if (x.device, dtype) not in self._moved:  # buffers that are the same for all copies
            self._moved[x.device, dtype] = {
                name: b.to(x.device, dtype if b.is_floating_point() else b.dtype)
                for name, b in self._constants.items()}

        def one(own: Weights, key: Tensor, sample: Tensor) -> tuple[Tensor, Weights]:
            return self._one(net, self._moved[x.device, dtype] | own, key, sample)

        with spelled_out():
            made: tuple[Tensor, Weights] = torch.func.vmap(one, (0, 0, dim))(weights, keys, x)
        return made

    def run(self, x: Tensor, weights: Weights, at_slot: AtSlot,
            keys: Tensor | None) -> tuple[Tensor, Weights]:
        """As `Host.run`, of samples [B, R, *inputs]."""
        net = self.template.train(keys is not None)
        keys = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device) if keys is None else keys
        self.running.at_slot = at_slot
        try:
            own = {name: weights[name] for name in self._own}
            out, statistics = self._many(net, own, keys, x, 1)
        finally:
            self.running.at_slot = self.running.key = None
        return out.flatten(1, -2), statistics

    def _hook(self, index: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        at_slot = self.running.at_slot
        if at_slot is None:
            return output
        joined: Tensor = _Slot.apply(output, functools.partial(self._join, index, at_slot))
        return joined

    def _join(self, index: int, at_slot: AtSlot, h: Tensor) -> Tensor:
        """Copies' outputs [R, B, ...] to lifted layout, through the slot, and back."""
        shape = self.slots.shapes[index]
        h = h.clone()  # a slot may write into what it gets, and the module into what it gave
        given = from_copies(h.flatten(1, 2) if shape.tokens else h)
        out = at_slot(index, given)
        if out is not given and out._is_view():
            out = out.clone()  # the module may write into it, which autograd forbids for some views
        return out.view_as(h) if shape.tokens else to_copies(out)


def grow_behind(net: nn.Module, grafts: Mapping[str, nn.Module]) -> nn.Module:
    """A module with seeds behind the submodules at these paths."""
    for path, graft in grafts.items():
        body = net.get_submodule(path)
        grown = Grafted(body, graft)
        for owner in list(net.modules()):
            for name in [name for name, child in owner._modules.items() if child is body]:
                setattr(owner, name, grown)  # it may have several names
    return net


def make_foreign(module: nn.Module | Callable[[], nn.Module], paths: tuple[str, ...], example: Tensor,
                 layouts: dict[str, str]) -> Foreign:
    """A module, or a function that returns new ones, as a host."""
    if not isinstance(example, Tensor) or example.dim() < 2 or not len(example):
        raise EsperError("example must be a batch of samples, a tensor [B, ...]")
    make: Any = module
    if isinstance(module, nn.Module):  # as it is now, whatever becomes of it
        make = functools.partial(copy.deepcopy, copy.deepcopy(module))
    if not callable(make) or not isinstance(first := make(), nn.Module):
        raise EsperError(f"a host is made from an nn.Module or a function that returns one, "
                         f"not from a {type(module).__name__}")
    if first is make():
        raise EsperError("the function returns one and the same module; return a new one each time, "
                         "or give the module itself")
    for path, layout in layouts.items():
        if layout not in ("BCL", "BTC") or path not in paths:
            raise EsperError(f"layouts say BCL or BTC for names of slots; got {layout!r} for {path!r}")
    example = example.cpu().float() if example.is_floating_point() else example.cpu()
    return Foreign(lambda: make().to("cpu", torch.float32), example, paths, layouts)


def state_of_prepared(net: nn.Module) -> Weights:
    running = {f"{path}.{name}": getattr(layer, name) for path, layer in net.named_modules()
               if isinstance(layer, _RowBatchNorm) and layer.running_mean is not None
               for name in ("running_mean", "running_var")}
    return dict(net.named_parameters()) | running


def _places(net: nn.Module) -> dict[str, str]:
    """Every place of a tensor in a module -> its name; tied ones have several. A module with two names is
    visited once: `functional_call` would put its tensors in twice, and not all of them back."""
    names: dict[int, str] = {}
    found = [(f"{path}.{name}" if path else name, tensor) for path, layer in net.named_modules()
             for name, tensor in (*layer._parameters.items(), *layer._buffers.items()) if tensor is not None]
    return {place: names.setdefault(id(tensor), place) for place, tensor in found}


def _prepared(net: nn.Module, running: _Running) -> nn.Module:
    """With dropout by key and batch norms that return their statistics."""
    made: dict[nn.Module, nn.Module] = {}
    for number, (path, layer) in enumerate(list(net.named_modules(remove_duplicate=False))):
        if layer in made:
            pass  # one layer under several names
        elif type(layer) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
            made[layer] = _KeyedDropout(layer, number, running)
        elif type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            made[layer] = _RowBatchNorm(layer, path, running)
        if layer in made:
            parent, _, name = path.rpartition(".")
            setattr(net.get_submodule(parent), name, made[layer])
    return net


@contextmanager
def spelled_out() -> Iterator[None]:
    """Attention as products of matrices: its fused forms have no rule for copies, or count no FLOPs."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _blaming(net: nn.Module, what: str) -> Iterator[None]:
    """Errors inside become one sentence that names the submodule that was running."""
    inside = ["the module"]
    hooks = [hook for path, layer in net.named_modules() if path for hook in (
        layer.register_forward_pre_hook(lambda layer, args, path=path: inside.append(path)),
        layer.register_forward_hook(lambda layer, args, out: inside.pop() and None))]
    try:
        with _all_removed(hooks):
            yield
    except EsperError:
        raise
    except Exception as error:
        kind = type(net if len(inside) == 1 else net.get_submodule(inside[-1])).__name__
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise EsperError(f"{inside[-1]} ({kind}) {what}: {why}") from error


@contextmanager
def _all_removed(hooks: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def shape_of(module: nn.Module, path: str, out: Any, batch: int, layout: str | None) -> SlotShape:
    """What a slot behind this submodule holds."""
    if (not isinstance(out, Tensor) or not 2 <= out.dim() <= 4 or len(out) != batch
            or not out.is_floating_point() or (layout and out.dim() != 3)):
        what = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        wrong = f"{what}, which cannot be {layout}" if layout else what
        raise EsperError(f"{path} returns {wrong}; a slot needs [B, C], [B, C, L], [B, C, H, W] or [B, T, C]")
    told = [isinstance(layer, LAST) for layer in module.modules() if isinstance(layer, (*LAST, *FIRST))]
    if out.dim() == 3 and (layout == "BTC" or (not layout and bool(told) and told[-1])):
        return SlotShape(out.shape[2], tokens=out.shape[1])
    return SlotShape(out.shape[1], tuple(out.shape[2:]))
