"""The environment as a world to learn in: one round is one episode in every row, each epoch paid by a reward.

Legend: N rows.
"""

import torch
from torch import Tensor

from esper.simic.collecting import Outcome
from esper.simic.rewards import Ledger, Standing, Terms, standing
from esper.tamiyo.controller import Glimpse
from esper.tolaria import Measurement, MorphogeneticEnv, Scenarios, Scores, Twins

TOLD = ("noise", "shift", "shuffle", "label_noise", "samples", "one_tap", "width", "frozen",
        "twin_accuracy", "twin_probability", "twin_now", "paid")
"""What the critic alone knows of a row, about -2 to 2 each: its hidden kind, what its twin will score, and what was paid so far.
None of it depends on what is decided next, so advantages stay unbiased; without it, finding out what kind a row is of looks like
the work of the action before."""


class Growth:
    """Call `begin` with the scenarios of a round, then look and step until all rows are over."""

    def __init__(self, env: MorphogeneticEnv, twins: Twins, reward: str = "utility", score: str = "delivered", seed: int = 0,
                 device: torch.device | str = "cpu", tell: bool = False) -> None:
        """`seed` decides the draws of actions; `device` is the controller's; with `tell` its critic is told `TOLD`."""
        self.tell = tell
        self.env, self.twins, self.reward, self.score, self.seed = env, twins, reward, score, seed
        self.device = torch.device(device)
        self.ledger = Ledger(reward, env.rows)
        self.twin = torch.zeros(env.rows, 1, 3)
        self.total = torch.zeros(env.rows)
        self.measured: Measurement | None = None
        self.standing: Standing | None = None
        self.paid: Terms = {}

    @property
    def steps(self) -> int:
        """Epochs of the longest episode: steps of a round."""
        return max(self.env.family.horizons)

    def begin(self, scenarios: Scenarios) -> None:
        self.env.reset(scenarios)
        self.ledger = Ledger(self.reward, self.env.rows)
        self.twin = self.twins(scenarios)
        self.total = torch.zeros(self.env.rows)

    def look(self) -> Glimpse:
        glimpse = Glimpse.of(self.env.view(), self.seed, self.device)
        return glimpse._replace(told=self._told().to(self.device)) if self.tell else glimpse

    def _told(self) -> Tensor:
        """[N, len(TOLD)]."""
        drawn, rows = self.env.scenarios, torch.arange(self.env.rows)
        kind = {name: drawn.of_kind(name).float() for name in TOLD[:5]}
        harm = drawn.impairments(self.env.family.host.stages)
        last, now = (self.twin[rows, (clock - 1).clamp(0, self.twin.shape[1] - 1)] for clock in (drawn.horizon, self.env.clock))
        twin = (torch.stack([last[:, 1], last[:, 2], now[:, 2]], 1) - 0.5) * 5
        return torch.cat([torch.stack([kind["noise"], kind["shift"] / 10, kind["shuffle"], kind["label_noise"],
                                       kind["samples"].log1p() / 10, harm.one_tap.float().mean(1), harm.width.mean(1),
                                       harm.frozen.float().mean(1)], 1), twin, 10 * self.total[:, None]], 1)

    def step(self, actions: Tensor) -> Outcome:
        self.measured = self.env.step(actions.cpu())
        at = (self.measured.clock - 1).clamp(min=0, max=self.twin.shape[1] - 1)
        twin = Scores(*self.twin[torch.arange(self.env.rows), at].unbind(1))
        self.standing = standing(self.env, self.measured, twin, self.score)
        self.paid = self.ledger.pay(self.standing)
        reward = torch.stack(list(self.paid.values())).sum(0)
        self.total = self.total + reward
        done = self.measured.done
        return Outcome(reward.to(self.device), done.to(self.device), torch.zeros_like(done).to(self.device))
