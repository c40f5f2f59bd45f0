"""Series on the CPU: layers of G copies for [G, C, L, B], samples last. What a tap of a convolution sees is
then one block of memory, sums and maxima run along samples, and rows of a population are contiguous. A step
of `conv1d` hosts takes 0.6 times as long as with copies folded into channels.

Legend: G copies, C channels in, O channels out, K taps, L positions, B batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, groups: int) -> Tensor:
    """x [G, C, L, B], weight [G, O, C / groups, K], bias [G, O]; stride and dilation are 1."""
    copies = len(x)
    if groups > 1:  # a group of channels is one more copy
        x, weight = (t.unflatten(1, (groups, -1)).flatten(0, 1) for t in (x, weight))
        bias = None if bias is None else bias.reshape(len(x), -1)
    out: Tensor = Convolution.apply(x, weight, bias, padding)
    return out.unflatten(0, (copies, groups)).flatten(1, 2) if groups > 1 else out


class Convolution(torch.autograd.Function):
    """A sum of products, one for each tap. What a tap sees is a view of the padded series, so nothing is
    gathered: all taps side by side would not fit into caches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        taps, padded = weight.permute(3, 0, 1, 2).contiguous(), _padded(x, padding)
        ctx.padding = padding
        ctx.save_for_backward(padded, taps)
        return _correlate(padded, taps, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        padded, taps = ctx.saved_tensors
        grad = grad.contiguous()
        flat = grad.flatten(2)
        to_weight = torch.stack([torch.bmm(flat, view) for view in
                                 _views(padded, len(taps)).transpose(2, 3).unbind()], 3)
        to_bias = flat.sum(2) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, to_weight, to_bias, None
        back = (taps.flip(0) if len(taps) > 1 else taps).transpose(2, 3)
        return _correlate(_padded(grad, len(taps) - 1 - ctx.padding), back), to_weight, to_bias, None


def _padded(x: Tensor, padding: int) -> Tensor:
    """With so many zeros at both ends; without so many positions, if it is negative."""
    return F.pad(x, (0, 0, padding, padding)) if padding else x.contiguous()


def _views(x: Tensor, taps: int) -> Tensor:
    """What each tap sees of x [G, C, L, B], contiguous: [K, G, C, positions * B]."""
    copies, channels, length, batch = x.shape
    shape = (taps, copies, channels, (length - taps + 1) * batch)
    return x.as_strided(shape, (batch, channels * length * batch, length * batch, 1))


def _correlate(x: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [G, C, L, B], contiguous, with taps [K, G, O, C]; K - 1 positions fewer come out."""
    (tap, *more), (view, *others) = taps.unbind(), _views(x, len(taps)).unbind()
    out = torch.bmm(tap, view) if bias is None else torch.baddbmm(bias.unsqueeze(2), tap, view)
    for tap, view in zip(more, others, strict=True):
        out.baddbmm_(tap, view)
    return out.view(*out.shape[:2], -1, x.shape[3])


class Norm(torch.autograd.Function):
    """`nn.GroupNorm` with scale and shift [G, C]. Sums over positions come first: what is left is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, eps: float, weight: Tensor, bias: Tensor) -> Tensor:
        parts = _by_group(x, groups)
        centred = parts - _mean(parts)
        inverse = _mean(centred * centred).add_(eps).rsqrt_()  # of the deviation
        ctx.groups = groups
        ctx.save_for_backward(centred, inverse, weight)
        scale, shift = (values.reshape(len(parts), -1, 1, 1) for values in (weight, bias))
        return torch.addcmul(shift, centred, inverse * scale).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        centred, inverse, weight = ctx.saved_tensors
        scale, parts = weight.reshape(len(centred), -1, 1, 1), _by_group(grad, ctx.groups)
        count = centred.shape[1] * centred.shape[2]
        sums = parts.sum(2, keepdim=True)  # [G * groups, C / groups, 1, B]
        moved = (parts * centred).sum(2, keepdim=True).mul_(inverse)
        mean, slope = ((t * scale).sum(1, keepdim=True) / -count for t in (sums, moved))
        to_x = torch.addcmul(mean * inverse, parts, inverse * scale)
        to_x.addcmul_(centred, slope * inverse * inverse)
        to_weight, to_bias = (t.sum(3).view(weight.shape) for t in (moved, sums))
        return to_x.reshape(grad.shape), None, None, to_weight, to_bias


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[G, C, L, B] as [G * groups, C / groups, L, B]."""
    return x.reshape(len(x) * groups, -1, *x.shape[2:])


def _mean(parts: Tensor) -> Tensor:
    """Over channels and positions, [G, 1, 1, B]."""
    return parts.flatten(1, 2).mean(1)[:, None, None]


class Normalised(torch.autograd.Function):
    """The same without scale and shift."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, eps: float) -> Tensor:
        parts = _by_group(x, groups)
        normed = parts - _mean(parts)
        inverse = _mean(normed * normed).add_(eps).rsqrt_()
        normed.mul_(inverse)
        ctx.save_for_backward(normed, inverse)
        return normed.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        normed, inverse = ctx.saved_tensors
        parts = grad.reshape(normed.shape)
        to_x = parts - _mean(parts)
        to_x.addcmul_(normed, _mean(parts * normed), value=-1).mul_(inverse)
        return to_x.reshape(grad.shape), None, None


class MaxOfPairs(torch.autograd.Function):
    """The larger of each two neighbours along `dim`, whose size is even, of series or images; of equal ones
    the first gets the gradient. PyTorch's pooling does the same, but keeps places, ten times as slowly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        first, second = x.unflatten(dim, (-1, 2)).unbind(dim + 1)
        ctx.dim = dim
        ctx.save_for_backward(second > first)
        return torch.maximum(first, second)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (later,) = ctx.saved_tensors
        pairs = grad.new_empty(*grad.shape[: ctx.dim + 1], 2, *grad.shape[ctx.dim + 1 :])
        first, second = pairs.unbind(ctx.dim + 1)
        second.copy_(grad).mul_(later)
        first.copy_(grad).sub_(second)
        return pairs.flatten(ctx.dim, ctx.dim + 1), None


class Mean(torch.autograd.Function):
    """Over positions, [G, C, 1, B]. PyTorch's own gradient is a view with strides of zero, which slows down
    whatever comes next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.length = x.shape[2]
        return x.mean(2, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad / ctx.length).repeat(1, 1, ctx.length, 1)
