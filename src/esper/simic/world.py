"""A round of training: one episode in every row, each epoch paid by a reward, all kept that learning needs.

Legend: T steps, N rows. A round is a function of a controller's weights and of its scenarios' keys, so it
could be computed anywhere; what comes back is a `Round` and the rollout that it filled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import EsperError, Observation, View
from esper.simic.buffer import Step, TamiyoRolloutBuffer
from esper.simic.ppo import PPOAgent
from esper.simic.rewards import Ledger, RewardInputs, Terms
from esper.tamiyo import PolicyBundle
from esper.tamiyo.controller import PolicyInput
from esper.tamiyo.network import Acted, emptied
from esper.tolaria import Episodes, Measurement, MorphogeneticEnv, Scenarios, Scores, Twins, play

PRIVILEGED = ("noise", "shift", "shuffle", "label_noise", "samples", "one_tap", "width", "frozen",
              "twin_score", "twin_smooth", "twin_now", "paid")
"""What the critic alone knows of a row, about -2 to 2 each: its hidden kind, what its twin will score, and
what was paid so far. None of it depends on what is decided next, so advantages stay unbiased; without it,
finding out what kind a row is of looks like the work of the action before."""


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
        self.counted: list[list[Tensor]] = []  # by step: what its observations added to the statistics
        self._open: tuple[PolicyInput, Observation, Acted, Tensor] | None = None

    def act(self, shown: PolicyInput) -> Tensor:
        """Actions [N, heads] for what is shown; rows that are not over count in the running statistics."""
        controller = self.agent.controller
        valid = torch.ones_like(shown.reset) if shown.valid is None else shown.valid
        self.counted.append(controller.normaliser.update(shown.seen, valid))
        seen, acted = controller.act(shown, self.hidden, self.agent.explore)
        self._open = shown, seen, acted, valid
        return acted.actions

    def add(self, outcome: Outcome) -> None:
        """Close the step."""
        if self._open is None:
            raise EsperError("there is no step to close; call act before add")
        (shown, seen, acted, valid), self._open = self._open, None
        reward, done, truncated, final = outcome
        if final is None and bool(truncated.any()):
            raise EsperError("a row was cut, and nothing says what it would have seen next; "
                             "give Outcome its final")
        bootstrap = (torch.zeros_like(reward) if final is None else
                     self.agent.controller.value(final, acted.hidden, shown.privileged))
        self.buffer.add(Step(seen, shown.masks, acted, reward, done, truncated, bootstrap, shown.reset,
                             self.hidden, valid, shown.privileged))
        self.hidden = acted.hidden

    def value(self, ahead: PolicyInput) -> Tensor:
        """[N]: what follows the last step is worth, for rows that go on."""
        return self.agent.controller.value(ahead.seen, emptied(self.hidden, ahead.reset), ahead.privileged)


class Paid(NamedTuple):
    """What an epoch was paid for, [N] each."""

    inputs: RewardInputs
    terms: Terms
    reward: Tensor  # their sum


@dataclass(frozen=True)
class Round:
    """What came of one round: episodes, and what each of their epochs was paid for, [T, N]."""

    episodes: Episodes
    terms: Terms  # their sum is the reward
    reward: Tensor
    returns: Tensor  # [N], summed epoch by epoch
    inputs: list[RewardInputs]  # [T]
    counted: tuple[Tensor, ...] = ()
    """[T, 3, C, columns] of each part of an observation: what every step added to the running statistics."""


class RewardWorld:
    """Pays for what happens in an environment, epoch by epoch."""

    def __init__(self, env: MorphogeneticEnv, twins: Twins, reward: str = "utility",
                 score: str = "delivered") -> None:
        self.env, self.twins, self.reward, self.score = env, twins, reward, score

    @property
    def steps(self) -> int:
        """Epochs of the longest episode: steps of a round."""
        return max(self.env.family.horizons)

    def play(self, policy: PolicyBundle, scenarios: Scenarios,
             paid: Callable[[Tensor, Tensor], object] = lambda reward, done: None) -> Round:
        """Episodes of a policy, paid for; `paid` is told (reward, done) [N] of every epoch."""
        self.open(scenarios)
        booked: list[Paid] = []

        def pay(measured: Measurement) -> None:
            booked.append(self.pay(measured))
            paid(booked[-1].reward, measured.done)

        episodes = play(self.env, policy, scenarios, watch=pay)
        terms = {name: torch.stack([one.terms[name] for one in booked]) for name in booked[0].terms}
        rewards = torch.stack([one.reward for one in booked])
        return Round(episodes, terms, rewards, self.total, [one.inputs for one in booked])

    def open(self, scenarios: Scenarios, rows: Tensor | None = None) -> None:
        """The books of new episodes in these rows (None is all of them)."""
        twin = self.twins(scenarios)
        if rows is None:
            self.ledger, self.twin = Ledger(self.reward, self.env.rows), twin
            self.total = torch.zeros(self.env.rows)
            return
        longer = max(0, twin.shape[1] - self.twin.shape[1])
        self.twin = nn.functional.pad(self.twin, (0, 0, 0, longer), value=torch.nan)
        self.twin[rows, : twin.shape[1]], self.total[rows] = twin, 0
        self.ledger.reset(rows)

    def pay(self, measured: Measurement) -> Paid:
        """For one epoch of all rows."""
        twin = Scores(*self._twin_at(measured.clock).unbind(1))
        inputs = RewardInputs.of(measured, self.env.scenarios, twin, self.score)
        terms = self.ledger.pay(inputs)
        reward = torch.stack(list(terms.values())).sum(0)
        self.total = self.total + reward
        return Paid(inputs, terms, reward)

    def collect(self, agent: PPOAgent, scenarios: Scenarios, buffer: TamiyoRolloutBuffer,
                seed: tuple[int, ...], privileged: bool = True) -> Round:
        """Episodes of an agent's controller, which fill a rollout; `seed` decides its draws."""
        collector = Collector(agent, self.env.rows, buffer)

        def act(view: View) -> Tensor:
            seen = PolicyInput.of(view, seed, agent.device, agent.network.observation)
            told = self.privileged().to(agent.device) if privileged else None
            return collector.act(seen._replace(privileged=told)).cpu()

        def paid(reward: Tensor, done: Tensor) -> None:
            done = done.to(agent.device)
            collector.add(Outcome(reward.to(agent.device), done, torch.zeros_like(done)))

        played = self.play(act, scenarios, paid)
        return replace(played, counted=tuple(map(torch.stack, zip(*collector.counted, strict=True))))

    def _twin_at(self, clock: Tensor) -> Tensor:
        """[N, scores] of the twins after so many epochs [N]."""
        return self.twin[torch.arange(self.env.rows), (clock - 1).clamp(0, self.twin.shape[1] - 1)]

    def privileged(self) -> Tensor:
        """[N, len(PRIVILEGED)]."""
        drawn = self.env.scenarios
        noise, shift, shuffle, label_noise, samples = (drawn.of_kind(n).float() for n in PRIVILEGED[:5])
        harm = drawn.impairments(self.env.family.host.stages)
        last, now = self._twin_at(drawn.horizon), self._twin_at(self.env.clock)
        twin = (torch.stack([last[:, 1], last[:, 2], now[:, 2]], 1) - 0.5) * 5
        hidden = [noise, shift / 10, shuffle, label_noise, samples.log1p() / 10,
                  harm.one_tap.float().mean(1), harm.width.mean(1), harm.frozen.float().mean(1)]
        return torch.cat([torch.stack(hidden, 1), twin, 10 * self.total[:, None]], 1)
