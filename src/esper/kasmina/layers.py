"""Layers that hosts and seeds are made of beside PyTorch's own: plain modules, without copies.

Legend: B batch, T tokens, C channels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    """Any module times a learned scale per channel, zero at birth: it starts as the zero function. With
    `tokens`, samples are [T, C]."""

    def __init__(self, body: nn.Module, channels: int, tokens: int = 0) -> None:
        super().__init__()
        self.body, self.channels, self.tokens = body, channels, tokens
        self.scale = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out * (self.scale if self.tokens else self.scale.view(-1, *[1] * (out.dim() - 2)))


class Residual(nn.Module):
    """body(x) + x; where the body changes the shape, a shortcut changes x too."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.body(x)
        return out


class InTurn(nn.Module):
    """What two bodies, each added to its input, add to x in all."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.first(x)
        return change + self.second(x + change)


class Embed(nn.Module):
    """Token numbers [B, T] to vectors [B, T, C], each with its position added."""

    def __init__(self, vocabulary: int, length: int, channels: int) -> None:
        super().__init__()
        self.vocabulary, self.length, self.channels = vocabulary, length, channels
        self.token, self.position = nn.Embedding(vocabulary, channels), nn.Embedding(length, channels)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.token(x) + self.position.weight[: x.shape[1]]
        return out


class CausalAttention(nn.Module):
    """Every token [B, T, C] looks at itself and the tokens before it, with heads of so many numbers each."""

    def __init__(self, channels: int, heads: int, size: int, length: int) -> None:
        super().__init__()
        self.channels, self.heads, self.size, self.length = channels, heads, size, length
        self.mix, self.out = nn.Linear(channels, 3 * heads * size), nn.Linear(heads * size, channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.attend(self.mix(x)))
        return out

    def attend(self, mixed: Tensor) -> Tensor:
        """Queries, keys and values [..., T, 3 * heads * size] to what tokens take from each other."""
        query, key, value = (part.transpose(-3, -2) for part in
                             mixed.unflatten(-1, (3, self.heads, -1)).unbind(-3))  # [..., heads, T, d]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=mixed.device).triu(1)
        return (scores.masked_fill(later, -math.inf).softmax(-1) @ value).transpose(-3, -2).flatten(-2)


class Taps(nn.Module):
    """Every token [B, T, C] beside the tokens right before it, [B, T, taps * C]; zeros before the first."""

    def __init__(self, taps: int, length: int) -> None:
        super().__init__()
        self.taps, self.length = taps, length

    def forward(self, x: Tensor) -> Tensor:
        padded, size = F.pad(x, (0, 0, self.taps - 1, 0)), x.shape[-2]
        return torch.cat([padded.narrow(-2, at, size) for at in range(self.taps)], -1)
