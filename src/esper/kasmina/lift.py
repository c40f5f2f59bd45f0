"""From one module to many: run G copies of a plain `nn.Module`, each with its own weights, as one program.

Legend: G copies, B batch, C channels, P parameters of one copy.
Vectors travel as [G, B, C], everything with an extent as [B, G, C, *extent] (copies folded into channels:
convolutions become grouped, norms get G times the groups). So the rank tells the layout: 3 is a vector.
`LIFTED` lists the layers with such a form; any other module, or a use its rule declines, runs through vmap.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline.keys import uniform

Weights = dict[str, Tensor]  # name -> [G, *shape]
Opening = tuple[tuple[int, ...], float]  # of a layer norm: shape, eps


class Nothing(nn.Module):
    """The zero function."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Modulate(nn.Module):
    """x * net(x), the product broadcast over x's extent."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return x * self.net(x)


class Scaled(nn.Module):
    """Any module times a learned scale per channel, zero at birth: it starts as the zero function."""

    def __init__(self, body: nn.Module, channels: int) -> None:
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out * self.scale.view(-1, *[1] * (out.dim() - 2))


def row_dim(x: Tensor) -> int:
    """Where the copies are: vectors are copy-major, the rest is batch-major."""
    return 0 if x.dim() == 3 else 1


def per_row(values: Tensor, x: Tensor) -> Tensor:
    """Shape [G] or [G, C] so that it broadcasts against x."""
    if x.dim() == 3:
        return values.reshape(values.shape[0], 1, -1)
    return values.reshape(1, values.shape[0], -1, *[1] * (x.dim() - 3))


def _conv(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return NotImplemented
    weight, bias = w[prefix + "weight"], w.get(prefix + "bias")
    plain = layer.groups == 1 and set(layer.stride) == {1} and set(layer.dilation) == {1}
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
    conv = F.conv1d if x.dim() == 4 else F.conv2d
    out = conv(x.flatten(1, 2), weight.flatten(0, 1), None if bias is None else bias.flatten(), layer.stride,
               layer.padding, layer.dilation, x.shape[1] * layer.groups)
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
    """Acts on the last dimension, as `nn.Linear` does."""
    rows = x if x.dim() == 3 else x.transpose(0, 1).flatten(1, -2)
    out: Tensor = RowLinear.apply(rows, w[prefix + "weight"], w.get(prefix + "bias"))
    return out if x.dim() == 3 else out.unflatten(1, (x.shape[0], *x.shape[2:-1])).transpose(0, 1)


def _group_norm(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if x.dim() == 3:
        return NotImplemented
    weight, bias = (w[prefix + name].flatten() if layer.affine else None for name in ("weight", "bias"))
    return F.group_norm(x.flatten(1, 2), x.shape[1] * layer.num_groups, weight, bias, layer.eps).view(x.shape)


def _layer_norm(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if x.dim() != 3 or (layer.elementwise_affine and layer.bias is None):
        return NotImplemented
    return _affine(layer, w, prefix, F.layer_norm(x, layer.normalized_shape, eps=layer.eps))


def _affine(layer: nn.LayerNorm, w: Weights, prefix: str, normed: Tensor) -> Tensor:
    if not layer.elementwise_affine:
        return normed
    return torch.addcmul(per_row(w[prefix + "bias"], normed), normed, per_row(w[prefix + "weight"], normed))


def _pool(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if x.dim() == 3:
        return NotImplemented
    out: Tensor = layer(x.flatten(1, 2))
    return out.unflatten(1, (x.shape[1], -1))


def _flatten(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    if layer.start_dim != 1 or layer.end_dim != -1:
        return NotImplemented
    return x if x.dim() == 3 else x.flatten(2).transpose(0, 1)


def _sequential(layer: Any, w: Weights, prefix: str, x: Tensor) -> Tensor:
    for name, child in layer._modules.items():
        x = lifted(child, w, x, f"{prefix}{name}.")
    return x


LIFTED: dict[type[nn.Module], Callable[[Any, Weights, str, Tensor], Tensor]] = {
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), _pool),
    nn.Flatten: _flatten,
    nn.GLU: lambda layer, w, prefix, x: F.glu(x, layer.dim + 1 if layer.dim > 0 else layer.dim),
    nn.Sequential: _sequential,
    Modulate: lambda layer, w, prefix, x: x * lifted(layer.net, w, x, prefix + "net."),
    Scaled: lambda layer, w, prefix, x: (lifted(layer.body, w, x, prefix + "body.")
                                         * per_row(w[prefix + "scale"], x)),
    **dict.fromkeys((nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Identity, Nothing),
                    lambda layer, w, prefix, x: layer(x)),
}


def lifted(module: nn.Module, w: Weights, x: Tensor, prefix: str = "") -> Tensor:
    """G copies of `module` on x, copy g with the weights w[name][g]."""
    hooked = module._forward_pre_hooks or module._forward_hooks
    rule = None if hooked else LIFTED.get(type(module))
    out = NotImplemented if rule is None else rule(module, w, prefix, x)
    if out is not NotImplemented:
        return out
    own = {name: w[prefix + name] for name, _ in module.named_parameters()}
    one = functools.partial(torch.func.functional_call, module)
    copies: Tensor = torch.func.vmap(one, (0, row_dim(x)))(own, x)
    return copies if copies.dim() == 3 else copies.transpose(0, 1)  # copy-major; its own rank says the layout


def opening(module: nn.Module) -> Opening | None:
    """The layer norm that a module of vectors begins with, if any: modules that begin alike can share it."""
    first = next(iter(module), module) if type(module) is nn.Sequential else module
    hooked = any(part._forward_pre_hooks or part._forward_hooks for part in (module, first))
    if type(first) is not nn.LayerNorm or hooked or len(first.normalized_shape) > 1:
        return None
    return None if first.elementwise_affine and first.bias is None else (first.normalized_shape, first.eps)


def lifted_rest(module: nn.Module, w: Weights, x: Tensor) -> Tensor:
    """As `lifted`, for x that went through the module's opening already."""
    if isinstance(module, nn.LayerNorm):
        return _affine(module, w, "", x)
    for number, (name, child) in enumerate(module._modules.items()):
        at = f"{name}."
        x = lifted(child, w, x, at) if number else _affine(child, w, at, x)  # type: ignore[arg-type]
    return x


class Layout:
    """Where each parameter of a module lies in a flat row of length P."""

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        self.names = [name for name, _ in named]
        self.shapes = [tuple(p.shape) for _, p in named]
        self.sizes = [p.numel() for _, p in named]
        self.size = sum(self.sizes)

    def split(self, flat: Tensor) -> tuple[Weights, Tensor]:
        """(named views [G, *shape], what lies behind them [G, rest]) of flat rows [G, P + rest]."""
        *parts, rest = flat.split([*self.sizes, flat.shape[1] - self.size], dim=1)
        named = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.view(-1, *shape) for name, shape, part in named}, rest

    def load(self, module: nn.Module, row: Tensor) -> None:
        """Copy one flat row [P] into the module's parameters."""
        with torch.no_grad():
            for parameter, values in zip(module.parameters(), row.split(self.sizes), strict=True):
                parameter.copy_(values.view_as(parameter))

    def flatten(self, module: nn.Module) -> Tensor:
        """[P]: the module's parameters in the order of this layout."""
        return torch.cat([torch.empty(0), *(p.detach().flatten() for p in module.parameters())])


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
