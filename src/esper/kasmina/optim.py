"""Row-wise optimisers: every host and every seed is a segment with its own learning rate, decay, clip norm
and step count, exactly as if it had its own `torch.optim` optimiser and its own `clip_grad_norm_`.

Legend: K segments with T elements in all; a part is G segments of P elements each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import EsperError


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser that every host and every seed has to itself."""

    kind: str = "adamw"
    """"adamw" or "sgd" (with momentum)."""
    lr: float = 1e-2
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    host_clip: float = 1.0
    """Largest gradient norm of a host."""
    seed_clip: float = 1.0
    """Largest gradient norm of a seed."""

    def __post_init__(self) -> None:
        if self.kind not in UPDATES:
            raise EsperError(f"no optimiser {self.kind!r}; choose from {', '.join(UPDATES)}")


@dataclass
class Segments:
    """All segments of a pack: flat weights and moments, and one number of each kind per segment. `shapes` are
    the (G, P) of the parts in which equally long segments lie together."""

    shapes: list[tuple[int, int]]
    theta: Tensor  # [T]
    first: Tensor  # [T]
    second: Tensor  # [T]
    steps: Tensor  # [K] int64
    lr: Tensor  # [K]
    decay: Tensor  # [K]
    clip: Tensor  # [K]
    decays: bool  # does any segment decay at all?
    trainable: Tensor | None  # [G, P] of the hosts, the first part: 0 where an impairment froze a weight

    def __post_init__(self) -> None:
        self.theta_views = self.views(self.theta)

    def views(self, flat: Tensor) -> list[Tensor]:
        """One [G, P] view per part of a vector laid out like theta."""
        parts = flat.split([count * size for count, size in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def columns(self, values: Tensor) -> list[Tensor]:
        """Per-segment values [K] as one [G, 1] column per part."""
        return list(values.unsqueeze(1).split([count for count, _ in self.shapes]))


def _adamw(config: OptimConfig, seg: Segments, grad: Tensor) -> None:
    beta1, beta2 = config.betas
    seg.first.lerp_(grad, 1 - beta1)
    seg.second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    steps = seg.steps.double()  # 1 - 0.999 ** 1 has few digits left in float32
    unbias, step = (1 - beta2**steps).rsqrt().to(grad.dtype), (-seg.lr / (1 - beta1**steps)).to(grad.dtype)
    change = seg.second.sqrt()
    views = seg.views(change)
    torch._foreach_mul_(views, seg.columns(unbias))
    torch.div(seg.first, change.add_(config.eps), out=change)
    torch._foreach_mul_(views, seg.columns(step))
    if seg.decays:
        torch._foreach_mul_(seg.theta_views, seg.columns(1 - seg.lr * seg.decay))
    seg.theta.add_(change)


def _sgd(config: OptimConfig, seg: Segments, grad: Tensor) -> None:
    seg.first.mul_(config.momentum).add_(grad)
    parts = (seg.theta_views, seg.views(seg.first), seg.columns(seg.decay), seg.columns(-seg.lr))
    for theta, first, decay, step in zip(*parts, strict=True):
        first.addcmul_(theta, decay)
        theta.addcmul_(first, step)


UPDATES = {"adamw": _adamw, "sgd": _sgd}


@torch.no_grad()
def update(config: OptimConfig, seg: Segments, grad: Tensor) -> Tensor:
    """Clip `grad` [T] in place and step in place; returns the gradient norms [K] before clipping."""
    hosts, before, grads = seg.theta_views[0], None, seg.views(grad)
    if seg.trainable is not None:
        grads[0].mul_(seg.trainable)
        before = hosts.clone()
    norms = torch.cat([torch.linalg.vector_norm(view, dim=1) for view in grads])
    torch._foreach_mul_(grads, seg.columns((seg.clip / (norms + 1e-6)).clamp(max=1.0)))
    seg.steps += 1
    UPDATES[config.kind](config, seg, grad)
    if before is not None and seg.trainable is not None:
        hosts.copy_(torch.where(seg.trainable > 0, hosts, before))  # weight decay must not reach them either
    return norms
