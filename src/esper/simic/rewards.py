"""Rewards: what an epoch was worth. Each is the change of a level: a closed loop of decisions earns nothing.

Legend: N rows, S slots. A level is a sum of named terms, [N] each; an episode's return is its last level, the
first being zero. At the end only host and fossils count: what was not committed is worth nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import EsperError, SeedStage
from esper.leyline.plugins import Registry
from esper.tolaria import Measurement, Scenarios, Scores, charges

SCORES_OF: Mapping[str, tuple[str, str]] = {
    "score": ("score", "score"), "smooth": ("smooth", "smooth"), "delivered": ("smooth", "score")}
"""name -> what a network is scored by while its episode runs, and when it is delivered (its return)."""
LIVE = torch.tensor([SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED])
Terms = dict[str, Tensor]


@dataclass
class RewardInputs:
    """What levels are computed from after an epoch, [N] each; of an episode that is over, fossils alone."""

    score: Tensor  # of the network
    twin: Tensor  # its score at the same clock; a row that never germinated is its own twin
    params: Tensor  # [N, S] of live seeds
    spent: Tensor
    price: Tensor
    flop_price: Tensor
    contribution: Tensor  # [N, S] of blended seeds, zero where it was not measured
    stage: Tensor  # [N, S]
    over: Tensor

    @property
    def cost(self) -> Terms:
        charged = charges(self.params.sum(1), self.spent, self.price, self.flop_price)
        return {name: -term for name, term in charged.items()}

    @classmethod
    def of(cls, measured: Measurement, scenarios: Scenarios, twin: Scores, score: str) -> "RewardInputs":
        """After an epoch; `twin` is what the twins scored at the same clock."""
        if score not in SCORES_OF:
            raise EsperError(f"no score {score!r}; choose from {', '.join(SCORES_OF)}")
        running, final = SCORES_OF[score]
        evidence, over, stage = measured.evidence, measured.done, measured.stage
        counted = torch.where(over[:, None], stage == SeedStage.FOSSILIZED, torch.isin(stage, LIVE))
        now = torch.where(over, getattr(evidence.delivered, final), getattr(evidence.all_on, running))
        beside = torch.where(over, getattr(twin, final), getattr(twin, running))
        own = measured.germinations.sum(1) == 0
        credit = torch.where(evidence.contribution.known & counted, evidence.contribution.value, 0.0)
        return cls(now, torch.where(own, now, beside), measured.seed_params * counted, measured.spent,
                   scenarios.price, scenarios.flop_price, credit, stage, over)


def _utility(now: RewardInputs) -> Terms:
    """Score above the twin, less what was grown and spent."""
    return {"gain": now.score - now.twin, **now.cost}


def _terminal(now: RewardInputs) -> Terms:
    """Utility, paid once at the end."""
    return {name: torch.where(now.over, term, 0.0) for name, term in _utility(now).items()}


def _contribution(now: RewardInputs) -> Terms:
    """What leaving each seed out would cost, less what was grown and spent."""
    return {"credit": now.contribution.sum(1), **now.cost}


def _shaped(now: RewardInputs) -> Terms:
    """Contribution, and a potential that leads to a finished life, taken back at the end."""
    potential = torch.zeros_like(now.score)
    for stage, value in zip(LIVE, (0.005, 0.01, 0.015, 0.02), strict=True):
        potential = potential + value * (now.stage == stage).float().sum(1)
    return {"potential": torch.where(now.over, 0.0, potential), **_contribution(now)}


REWARDS = Registry[Callable[[RewardInputs], Terms]]("reward", Callable, {
    "utility": _utility, "terminal": _terminal, "contribution": _contribution, "shaped": _shaped})
"""name -> level. `utility` is the default."""
register_reward = REWARDS.add


class Ledger:
    """Pays N rows the change of their level, term by term. A row that was over already is paid nothing."""

    def __init__(self, reward: str, rows: int) -> None:
        self.level, self.rows = REWARDS[reward], rows
        self.before: Terms = {}
        self.closed = torch.zeros(rows, dtype=torch.bool)

    def reset(self, rows: Tensor) -> None:
        """New episodes begin in these rows."""
        for term in self.before.values():
            term[rows] = 0
        self.closed[rows] = False

    def pay(self, now: RewardInputs) -> Terms:
        """Terms [N] of this epoch's reward; their sum is the reward."""
        terms, zero = self.level(now), torch.zeros(self.rows)
        paid = {name: torch.where(self.closed, 0.0, term - self.before.get(name, zero))
                for name, term in terms.items()}
        self.before, self.closed = terms, self.closed | now.over
        return paid
