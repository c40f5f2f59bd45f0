"""Models as users bring them, for tests in processes that have no Esper."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.map = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.relu(self.map(self.norm(h)))


class Blocks(nn.Module):
    """Built without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(6, 8), nn.ModuleList([Block(8), Block(8)]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Shared(Blocks):
    """One block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


class Layer(nn.Module):
    """Returns a tuple, as in libraries of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(width, 2, batch_first=True), nn.LayerNorm(width)

    def forward(self, h: Tensor) -> tuple[Tensor, None]:
        n = self.norm(h)
        return h + self.attention(n, n, n, need_weights=False)[0], None


class Speaker(nn.Module):
    """Does not show what it was built with; its head is its embedding."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(vocabulary, width), nn.ModuleList([Layer(width), Layer(width)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)[0]
        return self.head(h.mean(1))


class Squash(nn.Module):
    """A seed of a user's own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels, self.slope = channels, nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan(x * self.slope)
