"""Facts that rooms hand to each other: slots, costs, evidence, moves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from esper.leyline.errors import EsperError
from esper.leyline.stages import SeedStage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SlotShape:
    """What a seed sees: channels, and extents behind them (none for vectors) or tokens in front of them."""

    channels: int
    extent: tuple[int, ...] = ()
    tokens: int = 0

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one sample: [C, *extent], or [T, C]."""
        return (self.tokens, self.channels) if self.tokens else (self.channels, *self.extent)


@dataclass(frozen=True)
class SlotConfig:
    """The slots of a host in network order: the order in which data meets them."""

    names: tuple[str, ...]
    shapes: tuple[SlotShape, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes) or len(set(self.names)) != len(self.names) or not self.names:
            raise EsperError("a SlotConfig needs one distinct name and one shape per slot, in network order")

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Cost:
    """Trainable parameters, and FLOPs of matrix products and convolutions in one sample's forward pass."""

    params: int
    flops: int


@dataclass(frozen=True)
class Contribution:
    """Effect of each seed or candidate, paired on the same data. Unknown is a mask bit, never a number."""

    value: "Tensor"  # [N, S], or [N, S, K] of candidates
    standard_error: "Tensor"
    known: "Tensor"  # bool


@dataclass(frozen=True)
class Transition:
    """One seed's move between two stages."""

    epoch: int
    row: int
    slot: int
    source: SeedStage
    target: SeedStage


@dataclass(frozen=True)
class Rollback:
    """One row was put back to its last good state."""

    key: int  # of the scenario
    epoch: int  # of the episode, 1 is the first
    rule: str
    action: tuple[int, ...]  # the last one executed in the row, which takes the blame
    ended: bool  # was it the second within a few epochs, which ends the episode?
