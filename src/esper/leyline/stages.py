"""The stages of a seed, the legal moves between them, and what each stage means."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum


class SeedStage(IntEnum):
    """Where a seed is in its life."""

    DORMANT = 0
    """The slot is empty."""
    GERMINATED = 1
    """Weights are written; passed through within one tick on the way to TRAINING."""
    TRAINING = 2
    """Incubating: learns without touching the host."""
    BLENDING = 3
    """Alpha is moving towards its target, or fading to zero."""
    HOLDING = 4
    """Alpha rests at its target: the moment to keep or prune."""
    FOSSILIZED = 5
    """Part of the network for good; trains with the host and closes its slot."""
    PRUNED = 6
    """Weights are gone."""
    EMBARGOED = 7
    """Cooling down: nothing may germinate here yet."""
    RESETTING = 8
    """Last tick before the slot is empty again."""


TRANSITIONS: Mapping[SeedStage, frozenset[SeedStage]] = {
    SeedStage.DORMANT: frozenset({SeedStage.GERMINATED}),
    SeedStage.GERMINATED: frozenset({SeedStage.TRAINING}),
    SeedStage.TRAINING: frozenset({SeedStage.BLENDING, SeedStage.PRUNED}),
    SeedStage.BLENDING: frozenset({SeedStage.HOLDING, SeedStage.PRUNED}),
    SeedStage.HOLDING: frozenset({SeedStage.BLENDING, SeedStage.FOSSILIZED, SeedStage.PRUNED}),
    SeedStage.FOSSILIZED: frozenset(),
    SeedStage.PRUNED: frozenset({SeedStage.EMBARGOED}),
    SeedStage.EMBARGOED: frozenset({SeedStage.RESETTING}),
    SeedStage.RESETTING: frozenset({SeedStage.DORMANT}),
}


def check_transitions(table: Mapping[SeedStage, Iterable[SeedStage]]) -> None:
    missing = set(SeedStage) - set(table)
    if missing:
        raise TypeError(f"TRANSITIONS has no row for {sorted(s.name for s in missing)}; add one per stage")


check_transitions(TRANSITIONS)


@dataclass(frozen=True)
class GateConfig:
    """How long a seed stays, and what evidence it needs, before it may move on. Fit for episodes of 12-30 epochs."""

    min_training: int = 1
    """Epochs in TRAINING before ADVANCE."""
    min_holding: int = 1
    """Epochs in HOLDING before FOSSILIZE."""
    embargo: int = 1
    """Epochs in EMBARGOED before the slot resets."""
    min_contribution: float | None = None
    """Least measured contribution for FOSSILIZE; None asks only that it was measured."""
