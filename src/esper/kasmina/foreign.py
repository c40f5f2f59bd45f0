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

from esper.kasmina.lift import Weights, state_of
from esper.leyline import EsperError, SlotConfig, SlotShape
from esper.leyline.keys import mix, uniform

AtSlot = Callable[[int, Tensor], Tensor]
LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RMSNorm)
"""Layers whose channels come last: behind them a slot with three dimensions is [B, T, C]."""


class _Running:
    """What the layers of a template share while it runs."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.statistics: Weights = {}
        self.at_slot: AtSlot | None = None


class _KeyedDropout(nn.Module):
    """Dropout whose noise depends on the copy's key and the layer alone."""

    def __init__(self, layer: nn.modules.dropout._DropoutNd, number: int, running: _Running) -> None:
        super().__init__()
        self.p, self.number, self.running = layer.p, number, running
        self.by_channel = not isinstance(layer, nn.Dropout)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        assert self.running.key is not None
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.by_channel else x.shape
        noise = uniform(mix(self.running.key, self.number).reshape(1), math.prod(shape)).view(shape)
        return x * (noise >= self.p).to(x.dtype) / (1 - self.p)


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
                    old = getattr(self, f"running_{name}").detach()
                    self.running.statistics[f"{self.path}.running_{name}"] = old.lerp(value, self.momentum)
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


class Grafted(nn.Module):
    """A submodule and the seed that grew behind it."""

    def __init__(self, body: nn.Module, graft: nn.Module) -> None:
        super().__init__()
        self.body, self.graft = body, graft

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.graft(self.body(*args, **kwargs))
        return out


class Foreign:
    """A user's module: how to build it, how to run copies of it, and where its slots are."""

    def __init__(self, build: Callable[[], nn.Module], example: Tensor, paths: tuple[str, ...],
                 layouts: dict[str, str]) -> None:
        self.plain = build
        self.running = _Running()
        self.template = _prepared(build(), self.running)
        outputs, self.classes = self._trial(paths, example)
        shapes = tuple(_shape(self.template.get_submodule(path), path, out, layouts.get(path, ""))
                       for path, out in outputs.items())
        self.slots = SlotConfig(tuple(outputs), shapes)
        for index, path in enumerate(outputs):
            self.template.get_submodule(path).register_forward_hook(functools.partial(self._hook, index))
        shaped = [(name, tuple(tensor.shape)) for name, tensor in state_of(build())]
        what = repr((shaped, self.slots, tuple(example.shape[1:])))
        self.name = f"{type(self.template).__name__}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"

    def _trial(self, paths: tuple[str, ...], example: Tensor) -> tuple[dict[str, Tensor], int]:
        """({path: what its slot would get} in network order, number of outputs); two copies are tried."""
        net, outputs, entered = self.template, {}, ["it"]
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

        hooks = [names[path].register_forward_hook(functools.partial(seen, path)) for path in paths]
        hooks += [layer.register_forward_pre_hook(lambda layer, args, path=path: entered.append(path))
                  for path, layer in names.items() if path]
        state = {name: buffer.clone() for name, buffer in net.named_buffers()}
        own = {name: tensor.detach() for name, tensor in state_of_prepared(net).items()}
        try:
            with _all_removed(hooks), torch.no_grad():
                out = self._one(net.train(), own, torch.zeros((), dtype=torch.int64), example)
                entered[:] = ["it"]
                outputs_once, outputs = outputs, {}
                torch.func.vmap(functools.partial(self._one, net), (None, 0, None))(
                    own, torch.arange(2), example)
        except RuntimeError as error:
            kind = type(names.get(entered[-1], net)).__name__
            raise EsperError(f"{entered[-1]} ({kind}) cannot run as many copies at once: "
                             f"{str(error).splitlines()[0]}") from error
        for name, before in state.items():
            if not torch.equal(before, net.get_buffer(name)):
                raise EsperError(f"the buffer {name} changes while the module trains; "
                                 "only batch norms may keep state")
        if missing := [path for path in paths if path not in outputs_once]:
            raise EsperError(f"{missing[0]} does not run in a forward pass; choose a submodule that does")
        if not isinstance(out[0], Tensor) or out[0].dim() < 2:
            raise EsperError("the module must return one tensor, [B, outputs] or [B, T, outputs]")
        return outputs_once, out[0].shape[-1]

    def _one(self, net: nn.Module, own: Weights, key: Tensor, sample: Tensor) -> tuple[Tensor, Weights]:
        """One copy: outputs, and new statistics."""
        self.running.key, self.running.statistics = key, {}
        out = torch.func.functional_call(net, own, (sample,))
        return out, self.running.statistics

    def run(self, x: Tensor, weights: Weights, at_slot: AtSlot,
            keys: Tensor | None) -> tuple[Tensor, Weights]:
        """As `Host.run`, of samples [B, R, *inputs]."""
        dtype = next(iter(weights.values())).dtype
        net = self.template.to(x.device, dtype).train(keys is not None)
        keys = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device) if keys is None else keys
        self.running.at_slot = at_slot
        try:
            out, statistics = torch.func.vmap(functools.partial(self._one, net), (0, 0, 1))(weights, keys, x)
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
        h = h if torch.is_grad_enabled() else h.clone()  # a slot may write into what it gets
        if shape.tokens:
            return at_slot(index, h.flatten(1, 2)).view_as(h)
        return at_slot(index, h.transpose(0, 1)).transpose(0, 1) if shape.extent else at_slot(index, h)

    def grown(self, net: nn.Module, grafts: Mapping[int, nn.Module]) -> nn.Module:
        """The plain module with seeds behind its submodules."""
        for index, graft in grafts.items():
            parent, _, name = self.slots.names[index].rpartition(".")
            owner = net.get_submodule(parent)
            setattr(owner, name, Grafted(getattr(owner, name), graft))
        return net


def make_foreign(module: nn.Module | Callable[[], nn.Module], paths: tuple[str, ...], example: Tensor,
                 layouts: dict[str, str]) -> Foreign:
    """A module, or a function that returns new ones, as a host."""
    if not isinstance(example, Tensor) or example.dim() < 2 or not len(example):
        raise EsperError("example must be a batch of samples, a tensor [B, ...]")
    build = functools.partial(copy.deepcopy, module) if isinstance(module, nn.Module) else module
    if not callable(build) or not isinstance(build(), nn.Module):
        raise EsperError(f"a host is made from an nn.Module or a function that returns one, "
                         f"not from a {type(module).__name__}")
    for path, layout in layouts.items():
        if layout not in ("BCL", "BTC") or path not in paths:
            raise EsperError(f"layouts say BCL or BTC for names of slots; got {layout!r} for {path!r}")
    return Foreign(build, example, paths, layouts)


def state_of_prepared(net: nn.Module) -> Weights:
    running = {f"{path}.{name}": getattr(layer, name) for path, layer in net.named_modules()
               if isinstance(layer, _RowBatchNorm) and layer.running_mean is not None
               for name in ("running_mean", "running_var")}
    return dict(net.named_parameters()) | running


def _prepared(net: nn.Module, running: _Running) -> nn.Module:
    """With dropout by key and batch norms that return their statistics."""
    for number, (path, layer) in enumerate(list(net.named_modules())):
        new: nn.Module | None = None
        if type(layer) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
            new = _KeyedDropout(layer, number, running)
        elif type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            new = _RowBatchNorm(layer, path, running)
        if new is not None:
            parent, _, name = path.rpartition(".")
            setattr(net.get_submodule(parent), name, new)
    return net


@contextmanager
def _all_removed(hooks: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _shape(module: nn.Module, path: str, out: Any, layout: str) -> SlotShape:
    """What a slot behind this submodule holds."""
    if not isinstance(out, Tensor) or not 2 <= out.dim() <= 4 or not out.is_floating_point():
        what = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise EsperError(f"{path} returns {what}; a slot needs [B, C], [B, C, L], [B, C, H, W] or [B, T, C]")
    layers = [layer for layer in module.modules() if list(layer.parameters(recurse=False))]
    last = layout == "BTC" or (not layout and bool(layers) and isinstance(layers[-1], LAST))
    if out.dim() == 3 and last:
        return SlotShape(out.shape[2], tokens=out.shape[1])
    return SlotShape(out.shape[1], tuple(out.shape[2:]))
