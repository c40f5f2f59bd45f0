"""From one module to many: run G copies of a plain `nn.Module`, each with its own weights, as one program.

Legend: G copies, B batch, C channels, P parameters of one copy.
Vectors travel as [G, B, C], everything with an extent as [B, G, C, *extent] (copies folded into channels:
convolutions become grouped, norms get G times the groups), but series on the CPU as [G, C, L, B] (`series`).
So the rank tells the layout: 3 is a vector.
Tokens are vectors, [G, B * T, C]: layers that look at other tokens know T and unfold them.
`LIFTED` lists the layers with such a form; any other module, or a use its rule declines, runs through vmap.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import series
from esper.kasmina.layers import CausalAttention, Embed, InTurn, Modulate, Nothing, Residual, Scaled, Taps
from esper.leyline.keys import uniform

Weights = dict[str, Tensor]  # name -> [G, *shape]
Opening = tuple[tuple[int, ...], float]  # of a norm: the shape of a layer norm, () for whole series; eps


def samples_last(x: Tensor) -> bool:
    """Are these series in the layout of the CPU, [G, C, L, B]?"""
    return x.dim() == 4 and not x.is_cuda


def row_dim(x: Tensor) -> int:
    """Where the copies are."""
    return 0 if x.dim() == 3 or samples_last(x) else 1


def from_copies(x: Tensor) -> Tensor:
    """[G, B, ...] as it travels."""
    if x.dim() == 3:
        return x
    return x.permute(0, 2, 3, 1).contiguous() if samples_last(x) else x.transpose(0, 1)


def to_copies(x: Tensor) -> Tensor:
    """What travels, as [G, B, ...]."""
    if x.dim() == 3:
        return x
    return x.permute(0, 3, 1, 2) if samples_last(x) else x.transpose(0, 1)


def per_row(values: Tensor, x: Tensor) -> Tensor:
    """Shape [G] or [G, C] so that it broadcasts against x."""
    if x.dim() == 3:
        return values.reshape(values.shape[0], 1, -1)
    if samples_last(x):
        return values.reshape(values.shape[0], -1, 1, 1)
    return values.reshape(1, values.shape[0], -1, *[1] * (x.dim() - 3))


def _conv(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return NotImplemented
    weight, bias = w[prefix + "weight"], w.get(prefix + "bias")
    plain = layer.groups == 1 and set(layer.stride) == {1} and set(layer.dilation) == {1}
    if samples_last(x):
        if layer.stride != (1,) or layer.dilation != (1,):
            return NotImplemented
        return series.convolve(x, weight, bias, layer.padding[0], layer.groups)
    if x.is_cuda and plain and set(layer.kernel_size) == {1} and set(layer.padding) == {0}:
        # cuDNN's grouped 1x1 kernels are slower than a batched matrix product.
        out = torch.matmul(weight.flatten(2), x.flatten(3)).unflatten(3, x.shape[3:])
        return out if bias is None else out + per_row(bias, x)
    if x.is_cuda and plain and (torch.are_deterministic_algorithms_enabled()
                                or (x.dim() == 4 and layer.in_channels > 1)):
        # cuDNN's grouped 1-d kernels are slower than this. Its 2-d kernels are fast, but some put several
        # groups into one tile, where a NaN of one row times the zeros between groups spreads to neighbours.
        return _conv_as_matmul(x, weight, bias, layer.padding)
    if x.is_cuda and layer.groups == 1 and x.dim() == 5 and layer.in_channels % 4:
        # cuDNN runs odd channel counts one group at a time; a few channels of zeros make it faster.
        x, weight = (F.pad(t, (0, 0, 0, 0, 0, -layer.in_channels % 4)) for t in (x, weight))
    conv, how = F.conv1d if x.dim() == 4 else F.conv2d, (layer.stride, layer.padding, layer.dilation)
    ragged = x.shape[2] % 8 or weight.shape[1] % 8
    several = min(x.shape[1], x.shape[2], *layer.kernel_size) > 1  # copies, inputs, taps
    if not x.is_cuda and layer.groups == 1 and x.dim() == 5 and ragged and several:
        # oneDNN's grouped 2-d kernels are slower than a loop where channels do not fill blocks of eight.
        biases = [None] * x.shape[1] if bias is None else bias.unbind()
        parts = zip(x.unbind(1), weight.unbind(), biases, strict=True)
        return torch.stack([conv(*part, *how) for part in parts], 1)
    out = conv(x.flatten(1, 2), weight.flatten(0, 1), None if bias is None else bias.flatten(), *how,
               x.shape[1] * layer.groups)
    return out.unflatten(1, (x.shape[1], -1))


def _conv_as_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...]) -> Tensor:
    """Gather the taps, then one batched matrix product: x [B, G, C, *extent], weight [G, O, C, *taps]."""
    taps = F.pad(x, [p for size in reversed(padding) for p in (size, size)])
    for dim, size in enumerate(weight.shape[3:], start=3):
        taps = taps.unfold(dim, size, 1)  # [B, G, C, *extent, *taps]
    end = 3 + len(padding)
    columns = taps.permute(1, 0, *range(3, end), 2, *range(end, taps.dim()))
    flat = columns.reshape(x.shape[1], -1, weight[0, 0].numel())
    out: Tensor = RowLinear.apply(flat, weight.flatten(2), bias)  # [G, B * positions, O]
    out = out.view(x.shape[1], x.shape[0], *taps.shape[3:end], -1)
    return out.permute(1, 0, out.dim() - 1, *range(2, out.dim() - 1)).contiguous()


class RowLinear(torch.autograd.Function):
    """x [G, B, I] times weight [G, O, I], plus bias [G, O]. By hand for the shape of one gradient: `baddbmm`
    returns the weight's transposed, which then has to be copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        flipped = weight.transpose(1, 2)
        return torch.bmm(x, flipped) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, flipped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
        return to_x, torch.bmm(grad.transpose(1, 2), x), grad.sum(1) if ctx.needs_input_grad[2] else None


def _linear(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    """Acts on the last dimension, as `nn.Linear` does; of series that is the positions."""
    if samples_last(x):
        out = torch.matmul(w[prefix + "weight"].unsqueeze(1), x)
        return out + w[prefix + "bias"][:, None, :, None] if layer.bias is not None else out
    rows = x if x.dim() == 3 else x.transpose(0, 1).flatten(1, -2)
    out = RowLinear.apply(rows, w[prefix + "weight"], w.get(prefix + "bias"))
    return out if x.dim() == 3 else out.unflatten(1, (x.shape[0], *x.shape[2:-1])).transpose(0, 1)


def _group_norm(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if x.dim() == 3:
        return NotImplemented
    weight, bias = (w[prefix + name] if layer.affine else None for name in ("weight", "bias"))
    if samples_last(x):
        out: Tensor = (series.Norm.apply(x, layer.num_groups, layer.eps, weight, bias) if layer.affine
                       else series.Normalised.apply(x, layer.num_groups, layer.eps))
        return out
    weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
    return F.group_norm(x.flatten(1, 2), x.shape[1] * layer.num_groups, weight, bias, layer.eps).view(x.shape)


def _layer_norm(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if x.dim() != 3 or (layer.elementwise_affine and layer.bias is None):
        return NotImplemented
    return _affine(w, prefix, F.layer_norm(x, layer.normalized_shape, eps=layer.eps))


def _affine(w: Weights, prefix: str, normed: Tensor) -> Tensor:
    """The scale and shift of a norm, if it has them."""
    if prefix + "weight" not in w:
        return normed
    return torch.addcmul(per_row(w[prefix + "bias"], normed), normed, per_row(w[prefix + "weight"], normed))


def _pool(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if x.dim() == 3 or samples_last(x):
        return NotImplemented
    out: Tensor = layer(x.flatten(1, 2))
    return out.unflatten(1, (x.shape[1], -1))


def _mean_pool(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if samples_last(x) and layer.output_size in (1, (1,)):
        mean: Tensor = series.Mean.apply(x)
        return mean
    return _pool(layer, w, prefix, x)


def _max_pool(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    """On the CPU by halving each dimension of the extent in turn, the last one first."""
    pairs = all(_everywhere(getattr(layer, name), size) for name, size in
                (("kernel_size", 2), ("stride", 2), ("padding", 0), ("dilation", 1)))
    if x.is_cuda or x.dim() == 3 or not pairs or layer.return_indices or layer.ceil_mode:
        return _pool(layer, w, prefix, x)
    for dim in (2,) if samples_last(x) else range(x.dim() - 1, 2, -1):
        whole = x.narrow(dim, 0, x.shape[dim] - 1) if x.shape[dim] % 2 else x
        x = series.MaxOfPairs.apply(whole, dim)
    return x


def _everywhere(size: Any, wanted: int) -> bool:
    return set(size if isinstance(size, tuple) else (size,)) == {wanted}


def _flatten(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if layer.start_dim != 1 or layer.end_dim != -1:
        return NotImplemented
    if samples_last(x):
        return x.flatten(1, 2).transpose(1, 2)
    return x if x.dim() == 3 else x.flatten(2).transpose(0, 1)


def _glu(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if samples_last(x):
        return F.glu(x, layer.dim % 3) if layer.dim % 3 else NotImplemented
    return F.glu(x, layer.dim + 1 if layer.dim > 0 else layer.dim)


def _embed(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    """Token numbers [G, B, T]; the copies' tables lie behind one another."""
    tables, places = w[prefix + "token.weight"], w[prefix + "position.weight"]
    first = torch.arange(len(x), device=x.device)[:, None, None] * tables.shape[1]
    return (F.embedding(x + first, tables.flatten(0, 1)) + places[:, None, : x.shape[2]]).flatten(1, 2)


def _causal(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    mixed = lifted(layer.mix, w, x, prefix + "mix.").unflatten(1, (-1, layer.length))
    return lifted(layer.out, w, layer.attend(mixed).flatten(1, 2), prefix + "out.")


def _in_turn(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    change = lifted(layer.first, w, x, prefix + "first.")
    return change + lifted(layer.second, w, x + change, prefix + "second.")


def _scaled(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    """A body of tokens is somebody's own: it gets them as [B, T, C]."""
    scale = per_row(w[prefix + "scale"], x)
    if not layer.tokens:
        return lifted(layer.body, w, x, prefix + "body.") * scale
    tokens = x.unflatten(1, (-1, layer.tokens))
    return _by_copy(layer.body, w, prefix + "body.", tokens).flatten(1, 2) * scale


def _commute(first: Any, second: Any) -> bool:
    """A ReLU and a max pool behind it, neither of which anybody watches."""
    return (type(first) is nn.ReLU and type(second) in (nn.MaxPool1d, nn.MaxPool2d)
            and not second.return_indices and not any(map(_hooked, (first, second))))


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _sequential(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    children = list(layer._modules.items())
    for at, ((_, first), (_, second)) in enumerate(itertools.pairwise(children)):
        if _commute(first, second):
            children[at : at + 2] = children[at + 1], children[at]  # the same, of fewer numbers
    for name, child in children:
        x = lifted(child, w, x, f"{prefix}{name}.")
    return x


LIFTED: dict[type[nn.Module], Callable[[Any, Weights, str, Tensor], Tensor]] = {
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d), _max_pool),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), _mean_pool),
    nn.Flatten: _flatten,
    nn.GLU: _glu,
    nn.Sequential: _sequential,
    Modulate: lambda layer, w, prefix, x: x * lifted(layer.net, w, x, prefix + "net."),
    Scaled: _scaled,
    Residual: lambda layer, w, prefix, x: (lifted(layer.shortcut, w, x, prefix + "shortcut.")
                                           + lifted(layer.body, w, x, prefix + "body.")),
    InTurn: _in_turn,
    Embed: _embed,
    CausalAttention: _causal,
    Taps: lambda layer, w, prefix, x: layer(x.unflatten(1, (-1, layer.length))).flatten(1, 2),
    **dict.fromkeys((nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Identity, Nothing),
                    lambda layer, w, prefix, x: layer(x)),
}


def lifted(module: nn.Module, w: Weights, x: Tensor, prefix: str = "") -> Tensor:
    """G copies of `module` on x, copy g with the weights w[name][g]."""
    rule = None if _hooked(module) else LIFTED.get(type(module))
    out = NotImplemented if rule is None else rule(module, w, prefix, x)
    if out is not NotImplemented:
        return out
    return from_copies(_by_copy(module, w, prefix, to_copies(x)))  # its own rank says the layout


def _by_copy(module: nn.Module, w: Weights, prefix: str, x: Tensor) -> Tensor:
    """Any module by vmap, of samples [G, B, ...]."""
    own = {name: w[prefix + name] for name, _ in module.named_parameters()}
    copies: Tensor = torch.func.vmap(functools.partial(torch.func.functional_call, module))(own, x)
    return copies


def opening(module: nn.Module, series: bool) -> Opening | None:
    """The norm that a module of vectors, or of series, begins with: modules that begin alike can share it."""
    first = next(iter(module), module) if type(module) is nn.Sequential else module
    if _hooked(module) or _hooked(first):
        return None
    if series:
        return ((), first.eps) if type(first) is nn.GroupNorm and first.num_groups == 1 else None
    if type(first) is not nn.LayerNorm or len(first.normalized_shape) > 1:
        return None
    return None if first.elementwise_affine and first.bias is None else (first.normalized_shape, first.eps)


def lifted_rest(module: nn.Module, w: Weights, x: Tensor) -> Tensor:
    """As `lifted`, for x that went through the module's opening already."""
    if type(module) is not nn.Sequential:
        return _affine(w, "", x)
    first, *others = module._modules.items()
    x = _affine(w, f"{first[0]}.", x)
    for name, child in others:
        x = lifted(child, w, x, f"{name}.")
    return x


def state_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What belongs to one copy of a module: its parameters, then running statistics of batch norms."""
    running = [(f"{path}.{name}", getattr(layer, name)) for path, layer in module.named_modules()
               if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats
               for name in ("running_mean", "running_var")]
    return [*module.named_parameters(), *running]


class Layout:
    """Where each parameter of a module lies in a flat row of length P; running statistics lie behind them."""

    def __init__(self, module: nn.Module) -> None:
        named = state_of(module)
        self.names = [name for name, _ in named]
        self.shapes = [tuple(p.shape) for _, p in named]
        self.sizes = [p.numel() for _, p in named]
        self.size = sum(self.sizes)
        self.learned = [p.requires_grad for _, p in named]
        self.params = sum(size for size, learned in zip(self.sizes, self.learned, strict=True) if learned)
        first = {id(parameter): name for name, parameter in reversed(list(module.named_parameters()))}
        self.shared = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)
                       if name != first[id(p)]}  # other name -> the one in `names`

    def split(self, flat: Tensor) -> tuple[Weights, Tensor]:
        """(named views [G, *shape], what lies behind them [G, rest]) of flat rows [G, P + rest]."""
        *parts, rest = flat.split([*self.sizes, flat.shape[1] - self.size], dim=1)
        named = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.view(-1, *shape) for name, shape, part in named}, rest

    def load(self, module: nn.Module, row: Tensor) -> None:
        """Copy one flat row [P] into the module."""
        with torch.no_grad():
            for (_, own), values in zip(state_of(module), row.split(self.sizes), strict=True):
                own.copy_(values.view_as(own))

    def flatten(self, module: nn.Module) -> Tensor:
        """[P]: the module's state in the order of this layout."""
        parts = [own.detach().flatten() for _, own in state_of(module)]
        return torch.cat([torch.empty(0, device=parts[0].device if parts else None), *parts])

    def free(self) -> Tensor:
        """float [P]: 1 where a number learns, 0 for statistics and frozen parameters."""
        return torch.cat([torch.full((size,), float(learned))
                          for size, learned in zip(self.sizes, self.learned, strict=True)])


def initial_range(module: nn.Module) -> tuple[Tensor, Tensor]:
    """(centre [P], radius [P]) of PyTorch's own uniform initialisation; constant parameters keep theirs."""
    centres, radii = [], []
    owners = dict(module.named_modules())
    for name, parameter in module.named_parameters():
        values = parameter.detach().flatten()
        constant = bool((values == values[0]).all()) and (len(values) > 1 or float(values[0]) in (0.0, 1.0))
        fan_in = owners[name.rpartition(".")[0]].weight[0].numel()
        centres.append(values if constant else torch.zeros_like(values))
        radii.append(torch.full_like(values, 0.0 if constant else 1 / math.sqrt(fan_in)))
    return (torch.cat(centres), torch.cat(radii)) if centres else (torch.empty(0), torch.empty(0))


def draw_rows(extent: tuple[Tensor, Tensor], keys: Tensor) -> Tensor:
    """float32 [R, P]: rows within (centre, radius), [P] or [R, P] each; a function of the keys [R] alone."""
    centre, radius = (t.to(keys.device) for t in extent)
    return centre + radius * (2 * uniform(keys, centre.shape[-1]) - 1)
