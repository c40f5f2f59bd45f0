"""What is measured at the door, and what users are told of it."""

import math
from dataclasses import dataclass

from torch import Tensor

from esper.leyline import Contribution


@dataclass(frozen=True)
class Report:
    """What `end_epoch` found and did."""

    epoch: int
    score: float
    decision: str
    """An op and where, and what stopped it if something did."""
    contributions: dict[str, float]
    """Slot -> how much lower the score is without its seed."""
    params: int
    """Of all live seeds."""


def note(evidence: Contribution, slot: int, differences: Tensor) -> None:
    """A mean difference in score over samples, and its error."""
    if bool(differences.isfinite().all()):
        error = differences.std() / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        evidence.value[0, slot], evidence.standard_error[0, slot] = differences.mean(), error
        evidence.known[0, slot] = True
