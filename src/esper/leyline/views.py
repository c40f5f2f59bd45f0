"""What policies may know: the view of an environment, and the observation that a controller makes of it.

Legend: N rows, S slots, K blueprints, D numbers of a descriptor. A view never holds the twin, the hidden part
of a scenario or the test split: a model in the field has none of them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from esper.leyline.actions import ActionSpec
from esper.leyline.errors import EsperError
from esper.leyline.records import Contribution, Cost

if TYPE_CHECKING:
    from torch import Tensor

SCORES = ("loss", "score", "smooth", "train_loss")
"""Columns of `Facts.scores`: the objective's on the validation slice, and the epoch's mean training loss."""


@dataclass(frozen=True)
class Seeds:
    """The lifecycle of every slot, [N, S] each; the values of an empty slot mean nothing."""

    stage: "Tensor"
    dwell: "Tensor"
    blueprint: "Tensor"
    style: "Tensor"
    tempo: "Tensor"
    target: "Tensor"
    alpha: "Tensor"
    ramp_from: "Tensor"
    ramp_length: "Tensor"
    ramp_at: "Tensor"
    curve: "Tensor"
    fading: "Tensor"
    germinations: "Tensor"
    healthy: "Tensor"


@dataclass(frozen=True)
class About:
    """What is known beforehand of a task and its host."""

    chance: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """Loss, score and smooth score of a network that has learned nothing; by default of a score that is a
    share, with what is missing to 1 as its loss."""
    outputs: int = 1
    extent: int = 1  # places of a sample in the first slot: length, pixels, tokens
    samples: "Tensor | None" = None  # [N] that train; None: nobody knows


@dataclass(frozen=True)
class Facts:
    """What was measured. Scores that were not are NaN; evidence has its own bits."""

    host: Cost
    scores: "Tensor"  # [N, SCORES] after the last epoch
    before: "Tensor"  # [N, SCORES] after the one before it
    spent: "Tensor"  # [N] extra training FLOPs, as a share of the bare host's training
    costs: "Tensor"  # [N, S, 2] parameters and FLOPs of each seed
    contribution: Contribution  # [N, S]
    preview: Contribution  # [N, S] of incubating seeds, switched on
    descriptors: "Tensor"  # [S, K, D] of every blueprint at every slot's shape
    prices: "Tensor"  # [S, K, 2] parameters and FLOPs of every blueprint there
    candidates: Contribution | None = None  # [N, S, K] loss drops if planted now; None: never asked for
    about: About = About()


@dataclass(frozen=True)
class View:
    """What any policy may know of N rows: what is legal, which clock runs, and what was measured."""

    spec: ActionSpec
    luck: "Tensor"  # [N] a random number of the episode, for draws; says nothing about the scenario
    price: "Tensor"  # [N]
    flop_price: "Tensor"  # [N]
    horizon: "Tensor"  # [N]
    clock: "Tensor"  # [N] epochs that are over
    done: "Tensor"  # [N] bool
    verdicts: "Tensor"  # [N, S, ops] bool
    free_targets: "Tensor"  # [N, S, targets] bool
    seeds: Seeds
    facts: Facts | None = None  # None: nothing measures here, so nothing can be observed
    settling: int | None = None  # epochs a seed needs to be kept, beside its first ramp; None: no end


@dataclass(frozen=True)
class Field:
    """One named part of an observation."""

    name: str
    width: int = 1
    scaled: bool = False  # a continuous number: running statistics bring it to mean 0 and spread 1
    known_by: str = ""  # the flag that says whether it was measured; without it the field is zero
    by: str = ""  # a one-hot field of the same part: statistics are kept for each of its values


@dataclass(frozen=True)
class ObservationSpec:
    """The fields of an observation: of the whole row, of each slot, and of each blueprint in each slot."""

    row: tuple[Field, ...]
    slot: tuple[Field, ...]
    candidate: tuple[Field, ...]

    def __post_init__(self) -> None:
        for part in vars(self).values():
            names = [field.name for field in part]
            if len(set(names)) != len(names) or any({f.known_by, f.by} - {"", *names} for f in part):
                raise EsperError("an ObservationSpec needs distinct names and flags that exist; "
                                 f"got {', '.join(names)}")
            keys = {f.by for f in part} - {""}
            if len(keys) > 1 or any(f.width < 2 for f in part if f.name in keys):
                raise EsperError("the statistics of one part of an ObservationSpec can be kept by one field "
                                 "only, a one-hot")

    @property
    def widths(self) -> tuple[int, int, int]:
        row, slot, candidate = (sum(field.width for field in part) for part in vars(self).values())
        return row, slot, candidate


class Observation(NamedTuple):
    """What a controller sees of N rows (or T x N): floats whose last dimension follows an ObservationSpec."""

    row: "Tensor"  # [..., G]
    slot: "Tensor"  # [..., S, F]
    candidate: "Tensor"  # [..., S, K, C]
