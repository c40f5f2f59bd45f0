"""How seeds join a host: ramps of alpha, and the three styles, for all rows of a slot at once.

Legend: R rows of a pass, G rows of one blueprint group, B batch, C channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.lift import row_dim, samples_last
from esper.leyline import ALPHA_SPEEDS, TEMPOS, AlphaCurve, Style

_STEEPNESS = {AlphaCurve.SIGMOID_GENTLE: 6.0, AlphaCurve.SIGMOID: 12.0, AlphaCurve.SIGMOID_SHARP: 24.0}


def curve_value(curve: AlphaCurve, t: float) -> float:
    """Progress of a ramp at time t in [0, 1]; 0 at 0 and 1 at 1."""
    if curve is AlphaCurve.LINEAR:
        return t
    if curve is AlphaCurve.COSINE:
        return (1 - math.cos(math.pi * t)) / 2
    half = math.tanh(_STEEPNESS[curve] / 4)
    return (math.tanh(_STEEPNESS[curve] * (t - 0.5) / 2) / half + 1) / 2


LONGEST_RAMP = max(*TEMPOS, *ALPHA_SPEEDS)
# A table, because a transcendental function may differ in its last bit between devices.
CURVES = torch.tensor([[[curve_value(curve, min(k / max(length, 1), 1.0)) for k in range(LONGEST_RAMP + 1)]
                        for length in range(LONGEST_RAMP + 1)] for curve in AlphaCurve])  # [curve, length, k]


@dataclass
class SlotRows:
    """Which rows of a pass each group of seeds serves, and which of them are not plain sums."""

    groups: list[Tensor]  # [G] each, distinct rows
    padding: list[int]  # further copies each group runs with, so that shapes recur from epoch to epoch
    special: Tensor  # rows that are not plain sums: first those whose style is MULTIPLY, then the gated ones
    products: int  # how many of the special rows are products
    total: int

    def __post_init__(self) -> None:
        order = torch.cat(self.groups) if self.groups else self.special
        self.covered = len(order) == self.total
        # Is one group all rows, as under a plan, or where there is one row? Then nothing is copied.
        self.whole = self.covered and len(self.groups) == 1 and not any(self.padding)
        # Position of each row among the concatenated groups; rows of no group read a row of zeros behind.
        self.inverse = torch.full((self.total,), len(order), device=order.device)
        self.inverse[order] = torch.arange(len(order), device=order.device)
        self._parts = [torch.cat([rows, rows[:1].expand(extra)])
                       for rows, extra in zip(self.groups, self.padding, strict=True)]
        self.padded = torch.cat(self._parts) if self._parts else order
        self.sizes = [len(rows) for rows in self._parts]

    def gather(self, h: Tensor) -> tuple[Tensor, ...]:
        if self.whole:
            return (h,)
        if row_dim(h) == 0:  # then parts of the whole are contiguous
            return h.index_select(0, self.padded).split(self.sizes)
        return tuple(h.index_select(1, rows) for rows in self._parts)

    def divide(self, special: Tensor) -> tuple[Tensor, Tensor]:
        """(products, gated ones) as views of the special rows."""
        products, gated = special.split([self.products, len(self.special) - self.products], row_dim(special))
        return products, gated

    def scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """The groups' rows at their places, zeros elsewhere; what padding computed is dropped."""
        dim = row_dim(parts[0])
        if self.whole:
            return parts[0].clone() if len(self.special) else parts[0]  # special rows are written over
        if any(self.padding):
            parts = [part.narrow(dim, 0, len(rows)) for part, rows in zip(parts, self.groups, strict=True)]
        shape = list(parts[0].shape)
        shape[dim] = self.total
        if parts[0].is_cuda:
            out = parts[0].new_empty(shape) if self.covered else parts[0].new_zeros(shape)
            for rows, part in zip(self.groups, parts, strict=True):
                out.index_copy_(dim, rows, part)
            return out
        shape[dim] = 0 if self.covered else 1  # `index_copy_` is slower on the CPU
        return torch.cat([*parts, parts[0].new_zeros(shape)], dim).index_select(dim, self.inverse)


class Gather(torch.autograd.Function):
    """h -> one tensor per group of rows. Backward copies; `index_select` would add, atomically on CUDA."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, rows: SlotRows) -> tuple[Tensor, ...]:
        ctx.rows = rows
        return rows.gather(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.rows.scatter(grads), None


class GatherAll(torch.autograd.Function):
    """h -> the rows of all groups, one behind the other; h begins with rows."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, rows: SlotRows) -> Tensor:
        ctx.rows = rows
        return h.index_select(0, rows.padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows = ctx.rows
        split = grad.is_cuda or any(rows.padding)
        return rows.scatter(grad.split(rows.sizes) if split else [grad]), None


class Blend(torch.autograd.Function):
    """h + alpha * d(h, s) for the rows of every group; other rows pass through untouched.

    d is s, or h * tanh(s) for products, or g * s for gated rows, where the gate g in (0, 1) is one number per
    row and sample, from h's channel means and `gate_weights` [gated, C + 1]. `outputs` are the groups' s.
    Written by hand because plain autograd would pass over h four more times.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, alpha: Tensor, rows: SlotRows, gate_weights: Tensor,
                *outputs: Tensor) -> Tensor:
        dim, delta, strength = row_dim(h), rows.scatter(outputs), _spread(_leading(alpha, h), h)
        saved = [strength]
        if len(rows.special):
            special, inputs = delta.index_select(dim, rows.special), h.index_select(dim, rows.special)
            product, gated = rows.divide(special)
            h_product, h_gated = rows.divide(inputs)
            factor, seed = product.tanh(), gated.clone()
            means = _channel_means(h_gated)
            score = (means * _leading(gate_weights[:, :-1], h)).sum(2) + _leading(gate_weights[:, -1], h)
            gate = _spread(torch.sigmoid(score), h)
            torch.mul(factor, h_product, out=product)
            gated.mul_(gate)
            delta.index_copy_(dim, rows.special, special)
            saved += [gate_weights, h_product, factor, means, seed, gate]
        ctx.rows = rows
        ctx.save_for_backward(*saved)
        return torch.addcmul(h, delta, strength)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        strength, *saved = ctx.saved_tensors
        rows, dim = ctx.rows, row_dim(grad)
        through = grad * strength  # d loss / d delta
        if not saved:
            return (grad, None, None, None, *rows.gather(through))
        gate_weights, h_product, factor, means, seed, gate = saved
        special = through.index_select(dim, rows.special)
        product, gated = rows.divide(special)
        to_h = torch.empty_like(special)  # what the special rows send to h beside the identity
        h_from_product, h_from_gate = rows.divide(to_h)
        torch.mul(product, factor, out=h_from_product)
        product.mul_(h_product).mul_(1 - factor * factor)
        score = _by_sample(gated * seed) * _by_sample(gate * (1 - gate))  # d loss / d (means . w + b)
        grad_gate = torch.cat([(score.unsqueeze(2) * means).sum(1 - dim), score.sum(1 - dim).unsqueeze(1)], 1)
        per_channel = score.unsqueeze(2) * _leading(gate_weights[:, :-1], grad) / _positions(grad)
        h_from_gate.copy_(per_channel.transpose(1, 2).unsqueeze(2) if samples_last(grad) else
                          per_channel.reshape(*per_channel.shape, *[1] * (grad.dim() - 3)))
        gated.mul_(gate)
        through.index_copy_(dim, rows.special, special)
        grad_h = grad.index_add(dim, rows.special, to_h)  # distinct rows: nothing is added twice
        return (grad_h, None, None, grad_gate, *rows.gather(through))


class StraightThrough(torch.autograd.Function):
    """Returns h itself and sends its gradient to the ghost too: no arithmetic touches h, so no NaN can."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, ghost: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad


def _leading(values: Tensor, h: Tensor) -> Tensor:
    """[R] or [R, C] with a dimension for samples put in where h has it beside the rows."""
    return values.unsqueeze(1 - row_dim(h))


def _spread(values: Tensor, h: Tensor) -> Tensor:
    """Numbers by row and sample, in h's order of these, as they are multiplied with h."""
    if samples_last(h):
        return values[:, None, None, :]
    return values.reshape(*values.shape, *[1] * (h.dim() - 2))


def _by_sample(h: Tensor) -> Tensor:
    """Sums over channels and extent: numbers by row and sample."""
    return h.sum((1, 2)) if samples_last(h) else h.flatten(2).sum(2)


def _channel_means(h: Tensor) -> Tensor:
    """Means over the extent: vectors [R, B, C], or [B, R, C] where h begins with samples."""
    if h.dim() == 3:
        return h
    return h.mean(2).transpose(1, 2) if samples_last(h) else h.flatten(3).mean(3)


def _positions(h: Tensor) -> int:
    return h.shape[2] if samples_last(h) else math.prod(h.shape[3:])


class Graft(nn.Module):
    """One seed at one slot of a plain network."""

    alpha: Tensor

    def __init__(self, seed: nn.Module, style: Style, alpha: float, tokens: bool,
                 gate: nn.Module | None = None) -> None:
        """`gate`, a linear map to one number, weighs samples by the means of their channels, and each of
        `tokens` [B, T, C] by itself."""
        super().__init__()
        self.seed, self.style, self.tokens, self.gate = seed, style, tokens, gate
        # A buffer: a state dict without it would be another network.
        self.register_buffer("alpha", torch.tensor(alpha))

    def delta(self, h: Tensor) -> Tensor:
        s: Tensor = self.seed(h)
        if self.style is Style.MULTIPLY:
            return h * torch.tanh(s)
        if self.gate is None:
            return s
        if self.tokens:
            return torch.sigmoid(self.gate(h)) * s
        means = h.flatten(2).mean(2) if h.dim() > 2 else h
        return torch.sigmoid(self.gate(means)).reshape(-1, *[1] * (h.dim() - 1)) * s

    def follow(self, front: nn.Module) -> None:
        """Modes are those of the submodule in front."""
        self.train(front.training)

    def forward(self, h: Tensor, /, *rest: Any, **named: Any) -> Tensor:
        """What else the submodule in front was called with is not for a seed."""
        if h.is_nested:  # encoders of PyTorch leave padding out when they evaluate
            return torch.nested.as_nested_tensor([self(sample[None])[0] for sample in h.unbind()])
        return h + (self.alpha * self.delta(h)).to(h.dtype)  # autocast runs norms in float32


class GrownNetwork(nn.Module):
    """A row as a plain module: stages and the seeds that grew after them, `nn.Identity` where none lives."""

    def __init__(self, stages: nn.ModuleList, grafts: nn.ModuleList, head: nn.Module) -> None:
        super().__init__()
        self.stages, self.grafts, self.head = stages, grafts, head

    def forward(self, x: Tensor) -> Tensor:
        for stage, graft in zip(self.stages, self.grafts, strict=True):
            x = graft(stage(x))
        out: Tensor = self.head(x)
        return out
