"""Fill a rollout: a controller acts step by step, and everything that learning needs is kept.

Legend: N rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import EsperError, Observation
from esper.simic.buffer import Step, TamiyoRolloutBuffer
from esper.simic.ppo import PPOAgent
from esper.tamiyo.controller import PolicyInput, emptied
from esper.tamiyo.network import Acted


class Outcome(NamedTuple):
    """What came of a step, [N] each."""

    reward: Tensor
    done: Tensor
    truncated: Tensor
    final: Observation | None = None  # what a row that was cut would have seen next; needed where one was


class Collector:
    """A controller that acts, and remembers each step in a rollout: `act`, then `add` what came of it."""

    def __init__(self, agent: PPOAgent, rows: int, buffer: TamiyoRolloutBuffer) -> None:
        self.agent, self.buffer = agent, buffer
        self.hidden = agent.network.get_initial_hidden(rows)
        self._open: tuple[PolicyInput, Observation, Acted, Tensor] | None = None

    def act(self, shown: PolicyInput) -> Tensor:
        """Actions [N, heads] for what is shown; rows that are not over count in the running statistics."""
        controller = self.agent.controller
        valid = torch.ones_like(shown.reset) if shown.valid is None else shown.valid
        controller.normaliser.update(shown.seen, valid)
        seen, acted = controller.act(shown, self.hidden, self.agent.explore)
        self._open = shown, seen, acted, valid
        return acted.actions

    def add(self, outcome: Outcome) -> None:
        """Close the step."""
        if self._open is None:
            raise EsperError("there is no step to close; call act before add")
        (shown, seen, acted, valid), self._open = self._open, None
        bootstrap = torch.zeros_like(outcome.reward)
        if outcome.final is None and bool(outcome.truncated.any()):
            raise EsperError("a row was cut, and nothing says what it would have seen next; "
                             "give Outcome its final")
        if outcome.final is not None:
            bootstrap = self.agent.controller.value(outcome.final, acted.hidden, shown.privileged)
        self.buffer.add(Step(seen, shown.masks, acted, outcome.reward, outcome.done, outcome.truncated,
                             bootstrap, shown.reset, self.hidden, valid, shown.privileged))
        self.hidden = acted.hidden

    def value(self, ahead: PolicyInput) -> Tensor:
        """[N]: what follows the last step is worth, for rows that go on."""
        return self.agent.controller.value(ahead.seen, emptied(self.hidden, ahead.reset), ahead.privileged)
