"""Cloning: a controller learns to do what a teacher does, and what that is worth, before it learns by itself.

Legend: T epochs, N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.leyline import ActionSpec, Observation, View
from esper.simic.buffer import mean_of
from esper.simic.ppo import PPOAgent
from esper.simic.world import RewardWorld
from esper.tamiyo import ActionMasks, PolicyBundle
from esper.tamiyo.controller import PolicyInput
from esper.tolaria import Scenarios

VALUE_WEIGHT, LARGEST_GRADIENT = 0.25, 1.0


@dataclass(frozen=True)
class Lesson:
    """Episodes of a teacher as a controller would have seen them, [T, N, ...] each."""

    spec: ActionSpec
    seen: Observation  # not scaled
    masks: ActionMasks
    privileged: Tensor
    valid: Tensor
    actions: Tensor
    returns: Tensor  # that were still to come


def demonstrate(agent: PPOAgent, world: RewardWorld, teacher: PolicyBundle, scenarios: Scenarios) -> Lesson:
    """The teacher plays; what the agent would have seen of it is kept."""
    shown: list[PolicyInput] = []

    def act(view: View) -> Tensor:
        seen = PolicyInput.of(view, (0,), agent.device, agent.network.observation)
        told = world.privileged() if agent.network.config.privileged else torch.zeros(len(view.clock), 0)
        shown.append(seen._replace(privileged=told.to(agent.device)))
        return teacher(view)

    played = world.play(act, scenarios)
    spec, named = world.env.spec, [step.masks.named() for step in shown]
    masks = {name: torch.stack([each[name] for each in named]) for name in named[0]}
    seen = Observation(*map(torch.stack, zip(*(step.seen for step in shown), strict=True)))
    privileged, valid = (torch.stack([getattr(step, name) for step in shown])
                         for name in ("privileged", "valid"))
    ahead = played.reward.flip(0).cumsum(0).flip(0)
    return Lesson(spec, seen, ActionMasks.from_named(spec, masks), privileged, valid,
                  played.episodes.actions.to(agent.device), ahead.to(agent.device))


def clone(agent: PPOAgent, lessons: Sequence[Lesson], passes: int = 30,
          learning_rate: float = 1e-3) -> list[float]:
    """The mean negative log-probability of what the teacher decided, pass by pass. The value head learns what
    it was worth."""
    spread = torch.cat([lesson.returns.flatten() for lesson in lessons]).std()
    agent.network.rescale_value(spread.clamp(min=1e-4))
    optimizer = torch.optim.AdamW(agent.network.parameters(), lr=learning_rate)
    curve = []
    for _ in range(passes):
        order = torch.randperm(len(lessons), generator=agent.generator).tolist()
        losses = [_learn(agent, lessons[number], optimizer) for number in order]
        curve.append(sum(losses) / len(losses))
    return curve


def _learn(agent: PPOAgent, lesson: Lesson, optimizer: torch.optim.Optimizer) -> float:
    network, count = agent.network.bound_to(lesson.spec), lesson.valid.sum().clamp(min=1)
    said = network.evaluate_actions(agent.controller.normaliser(lesson.seen), lesson.masks, lesson.actions,
                                    None, privileged=lesson.privileged)
    imitation = -mean_of(said.scored.joint, lesson.valid, count)
    missed = ((said.value - lesson.returns) / network.value_scale).square()
    optimizer.zero_grad()
    (imitation + VALUE_WEIGHT * mean_of(missed, lesson.valid, count)).backward()
    nn.utils.clip_grad_norm_(network.parameters(), LARGEST_GRADIENT)
    optimizer.step()
    return float(imitation.detach())
