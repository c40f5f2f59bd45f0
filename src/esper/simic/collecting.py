"""Fill a rollout: a controller acts in a world, step by step, and everything that learning needs is kept.

Legend: N rows.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from esper.leyline import EsperError, Observation
from esper.simic.buffer import Step, TamiyoRolloutBuffer
from esper.simic.ppo import PPOAgent
from esper.tamiyo.controller import Glimpse, emptied


class Outcome(NamedTuple):
    """What came of a step, [N] each."""

    reward: Tensor
    done: Tensor
    truncated: Tensor
    final: Observation | None = None  # what a row that was cut would have seen next; needed where one was


class World(Protocol):
    """N episodes side by side; a row that ended begins anew by itself, and its next glimpse asks for an empty memory."""

    def look(self) -> Glimpse: ...

    def step(self, actions: Tensor) -> Outcome: ...


class Collector:
    """Plays a world with an agent's controller, across rollouts."""

    def __init__(self, agent: PPOAgent, world: World, rows: int) -> None:
        self.agent, self.world = agent, world
        self.hidden = agent.network.get_initial_hidden(rows)

    def fill(self, buffer: TamiyoRolloutBuffer) -> Tensor:
        """Play as many steps as the rollout holds; the value [N] of what follows the last."""
        controller = self.agent.controller
        for _ in range(buffer.spec.steps - buffer.filled):
            glimpse = self.world.look()
            valid = torch.ones_like(glimpse.reset) if glimpse.valid is None else glimpse.valid
            controller.normaliser.update(glimpse.seen, valid)
            seen, acted = controller.act(glimpse, self.hidden, self.agent.explore)
            outcome = self.world.step(acted.actions)
            bootstrap = torch.zeros_like(outcome.reward)
            if outcome.final is None and bool(outcome.truncated.any()):
                raise EsperError("a row was cut, and the world does not say what it would have seen next; give Outcome its final")
            if outcome.final is not None:
                bootstrap = controller.value(outcome.final, acted.hidden, glimpse.told)
            buffer.add(Step(seen, glimpse.masks, acted, outcome.reward, outcome.done, outcome.truncated, bootstrap,
                            glimpse.reset, self.hidden, valid, glimpse.told))
            self.hidden = acted.hidden
        ahead = self.world.look()
        return controller.value(ahead.seen, emptied(self.hidden, ahead.reset), ahead.told)
