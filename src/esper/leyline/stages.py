"""The stages of a seed, the legal moves between them, and what each stage means."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum


class SeedStage(IntEnum):
    """Where a seed is in its life."""

    DORMANT = 0  # the slot is empty
    GERMINATED = 1  # weights are written; passed through within one tick on the way to TRAINING
    TRAINING = 2  # incubating: learns without touching the host
    BLENDING = 3  # alpha is moving towards its target, or fading to zero
    HOLDING = 4  # alpha rests at its target: the moment to keep or prune
    FOSSILIZED = 5  # part of the network for good; trains with the host and closes its slot
    PRUNED = 6  # weights are gone
    EMBARGOED = 7  # cooling down: nothing may germinate here yet
    RESETTING = 8  # last tick before the slot is empty again


TRANSITIONS: Mapping[SeedStage, frozenset[SeedStage]] = {
    SeedStage.DORMANT: frozenset({SeedStage.GERMINATED}),
    SeedStage.GERMINATED: frozenset({SeedStage.TRAINING}),
    SeedStage.TRAINING: frozenset({SeedStage.BLENDING, SeedStage.PRUNED}),
    SeedStage.BLENDING: frozenset({SeedStage.HOLDING, SeedStage.PRUNED}),
    SeedStage.HOLDING: frozenset({SeedStage.BLENDING, SeedStage.FOSSILIZED, SeedStage.PRUNED}),
    SeedStage.FOSSILIZED: frozenset(),
    SeedStage.PRUNED: frozenset({SeedStage.EMBARGOED}),
    SeedStage.EMBARGOED: frozenset({SeedStage.RESETTING}),
    SeedStage.RESETTING: frozenset({SeedStage.DORMANT})}


def check_transitions(table: Mapping[SeedStage, Iterable[SeedStage]]) -> None:
    if missing := set(SeedStage) - set(table):
        raise TypeError(f"TRANSITIONS has no row for {sorted(s.name for s in missing)}; add one per stage")


check_transitions(TRANSITIONS)


@dataclass(frozen=True)
class GateConfig:
    """How long a seed stays, and what evidence it needs, to move on. Fit for episodes of 12-30 epochs."""

    min_training: int = 1
    """Epochs in TRAINING before ADVANCE."""
    min_holding: int = 1
    """Epochs in HOLDING before FOSSILIZE."""
    embargo: int = 1
    """Epochs in EMBARGOED before the slot resets."""
    min_contribution: float | None = None
    """Least measured contribution for FOSSILIZE; None asks only that it was measured."""
