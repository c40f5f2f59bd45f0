"""Preview-greedy: grow what previews promise most of for its cost, prune what does not earn it.

Legend: N rows, S slots, K blueprints.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import EsperError, Facts, SeedStage, View
from esper.tamiyo.scripts import grow_and_keep

LOOKS = ((99, 5), (99, 15), (3, 5))  # (epochs from a preview to the next, shadow steps) worth trying
THRESHOLDS = (0.25, 0.5, 1.0, 2.0, 4.0)
FLOORS = (0.003, 0.03)


@dataclass(frozen=True)
class GreedyConfig:
    threshold: float  # loss drop for each unit of score that it costs, above which a candidate is planted
    floor: float = 0.01  # score that a candidate costs at the least, however small it is
    most: int = 1  # seeds of an episode
    every: int = 99  # epochs from a preview to the next; the first follows the first epoch
    steps: int = 5  # shadow steps of each candidate

    def __post_init__(self) -> None:
        if self.floor <= 0 or min(self.most, self.every, self.steps) < 1:
            raise EsperError("preview-greedy needs a floor above 0, and most, every and steps of at least 1")


def cost(view: View, facts: Facts, each: Tensor) -> Tensor:
    """Score that seeds cost from now on, of parameters and FLOPs [N, ..., 2]."""
    left = 1 - view.clock / view.horizon
    paid = torch.stack([view.price, view.flop_price * left / max(facts.host.flops, 1)], 1)
    return (each * paid.view(-1, *[1] * (each.dim() - 2), 2)).sum(-1)


class Greedy:
    """Plants the candidate with the largest drop for its cost, if that is above its threshold, and waits
    otherwise; once in every slot. In the end it keeps what contributes its cost and prunes the rest."""

    def __init__(self, *configs: GreedyConfig) -> None:
        """One for every row, or a single one for all."""
        self.configs = configs
        self.threshold, self.floor, self.most = (torch.tensor([getattr(config, name) for config in configs])
                                                 for name in ("threshold", "floor", "most"))

    def __call__(self, view: View) -> Tensor:
        facts, seeds, rows = view.facts, view.seeds, len(view.clock)
        if facts is None:
            raise EsperError("preview-greedy reads measurements, and this view has none")
        if len(self.configs) not in (1, rows):
            raise EsperError(f"{len(self.configs)} settings for {rows} rows; give one to each or one for all")
        best, blueprint = self._promise(view, facts).max(2)  # [N, S]
        few = seeds.germinations.sum(1) < self.most
        grows = (best > self.threshold[:, None]) & (best == best.amax(1, keepdim=True)) & few[:, None]
        seen, holding = facts.contribution, seeds.stage == SeedStage.HOLDING
        fails = holding & seen.known & (seen.value < cost(view, facts, facts.costs))
        never = torch.zeros_like(view.done)
        return grow_and_keep(view, grows, blueprint, torch.tensor(False), never, ~fails, fails)

    def _promise(self, view: View, facts: Facts) -> Tensor:
        """[N, S, K]: drop for its cost; nothing where it was not seen, or something grew before."""
        fresh, seen = view.seeds.germinations == 0, facts.candidates
        if seen is None:  # who sees no preview waits
            return torch.full((*fresh.shape, len(view.spec.blueprints)), -torch.inf)
        costs = cost(view, facts, facts.prices.expand(len(fresh), *facts.prices.shape))
        real = torch.tensor([name != "noop" for name in view.spec.blueprints])
        promise = seen.value / (self.floor[:, None, None] + costs)
        return torch.where(seen.known & real & fresh[..., None], promise, -torch.inf)
