"""The governor: checks every row after its epoch and puts a row that broke back to its last good state,
alone.

A transaction: check first, keep a copy of what passed, and only then let the next epoch change it. The clock
does not rewind, and since data and noise are keyed by the clock, the retry meets other data.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina import Population


@dataclass(frozen=True)
class GovernorConfig:
    """Limits in units of the task: chance is the loss of a network that has learned nothing. A row's own
    history is that of its training loss, which hardly ever rises; validation loss rises in good health,
    too."""

    worst: float = 4.0
    """A loss above so many times chance is broken."""
    jump: float = 0.15
    """A training loss this share of chance above the epoch before is a jump."""
    drift: float = 0.25
    """One this share above the best of the last epochs is a jump when it lasts for two epochs."""
    memory: int = 3
    """Epochs of history."""
    patience: int = 3
    """A second rollback within so many epochs ends the episode."""


RULES = ("", "non-finite", "far above chance", "jump", "lasting jump")


class Governor:
    """History, last good state and rollbacks of N rows."""

    def __init__(self, population: Population, config: GovernorConfig) -> None:
        self.population, self.config = population, config
        self.chance = population.objective.chance(population.host.classes).loss
        rows = population.rows
        self.history = torch.full((rows, config.memory), math.nan)  # training losses of good epochs
        self.high = torch.zeros(rows, dtype=torch.bool)  # the last epoch was above the best of them
        self.last = torch.full((rows,), -(10**6))  # clock of the last rollback
        self.saved = population.snapshot(torch.arange(rows))

    def reset(self, rows: Tensor) -> None:
        self.history[rows], self.high[rows], self.last[rows] = math.nan, False, -(10**6)
        self._keep(rows)

    def forget(self, rows: Tensor) -> None:
        """These rows [k] were changed on purpose: their losses may rise."""
        self.history[rows], self.high[rows] = math.nan, False

    def verdicts(self, loss: Tensor, train_loss: Tensor) -> Tensor:
        """[N]: which of RULES each row breaks, 0 is none, from its validation and training losses [N]."""
        best = self.history.nan_to_num(nan=math.inf).amin(1)
        weights = [bank.isfinite().all(1) for name, bank in self.population.tensors().items()
                   if name.startswith("bank.") and bank.dim() == 2]
        sound = loss.isfinite() & train_loss.isfinite() & torch.stack(weights).all(0).cpu()
        verdict = torch.zeros(len(loss), dtype=torch.int64)
        drifting = train_loss > best + self.config.drift * self.chance  # never in the first epoch
        verdict[drifting & self.high] = RULES.index("lasting jump")
        verdict[train_loss > self.history[:, -1] + self.config.jump * self.chance] = RULES.index("jump")
        far = torch.maximum(loss, train_loss) > self.config.worst * self.chance
        verdict[far] = RULES.index("far above chance")
        verdict[~sound] = RULES.index("non-finite")
        self.high = drifting & (verdict == 0)
        return verdict

    def settle(self, verdict: Tensor, over: Tensor, train_loss: Tensor, clock: Tensor) -> Tensor:
        """Keep rows that passed, put back others and those that were `over` before. bool [N]: episodes that
        end. A seed that is germinated again gets other weights: births are counted on."""
        bad, good = (verdict > 0) & ~over, ((verdict == 0) & ~over).nonzero().flatten()
        again = bad & (clock - self.last <= self.config.patience)
        back = (bad | over).nonzero().flatten()
        if len(back):
            births = self.population.life.germinations[back]
            self.population.restore(back, {name: t[back.to(t.device)] for name, t in self.saved.items()})
            self.population.life.germinations[back] = births
            self.last[bad] = clock[bad]
        self._keep(good)
        self.history[good] = torch.cat([self.history[good, 1:], train_loss[good, None]], 1)
        return again

    def _keep(self, rows: Tensor) -> None:
        for name, tensor in self.population.tensors().items():
            where = rows.to(tensor.device)
            if len(rows) == len(tensor):
                self.saved[name].copy_(tensor)
            else:
                self.saved[name][where] = tensor[where]

