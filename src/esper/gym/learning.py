"""Our masked recurrent PPO on any Gymnasium environment with a `Discrete` action.

Legend: N rows, A actions. To the controller the actions are the slots of one op: each has a one-hot of its
own, so a pointer over slots is a distribution over actions, and a mask of slots a mask of actions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import FlattenObservation
from torch import Tensor

from esper.leyline import ActionSpec, EsperError, Field, Head, LifecycleOp, Observation, ObservationSpec
from esper.simic import Collector, Outcome, PPOAgent, PPOConfig
from esper.tamiyo import ActionMasks, Controller, NetworkConfig
from esper.tamiyo.controller import PolicyInput


class GymWorld:
    """A vector environment as PPO meets it: `look`, then `step`. Masks are read from info["action_mask"]."""

    def __init__(self, env: VectorEnv, seed: int = 0) -> None:
        if env.metadata.get("autoreset_mode") is not AutoresetMode.NEXT_STEP:
            raise EsperError("this vector environment does not reset by NextStep; make one that does")
        space = env.single_action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise EsperError(f"PPO needs a Discrete action here, not a {type(space).__name__}")
        self.env, self.rows, self.first = FlattenObservation(env), env.num_envs, int(space.start)
        actions, ops = int(space.n), (LifecycleOp.WAIT, LifecycleOp.ADVANCE)
        self.spec = ActionSpec(actions, ("none",), (Head.OP, Head.SLOT), ops)
        width = self.env.single_observation_space.shape[0]
        self.observation = ObservationSpec((Field("seen", width, scaled=True),), (Field("action", actions),),
                                           (Field("none"),))
        self.generator = torch.Generator().manual_seed(seed)
        seen, info = self.env.reset(seed=seed)
        self.returns: list[float] = []
        self.total, self.over = np.zeros(self.rows), np.zeros(self.rows, dtype=bool)
        self.fresh = ~self.over
        self._keep(seen, info)

    def _keep(self, seen: Any, info: dict[str, Any]) -> None:
        every, told = np.ones((self.rows, self.spec.slots), dtype=bool), info.get("action_mask")
        if told is not None:  # rows without a mask, or at an episode's end, may do anything
            has = np.broadcast_to(info.get("_action_mask", True), self.rows) & np.asarray(told).any(1)
            every = np.where(has[:, None], np.asarray(told, dtype=bool), every)
        slots, shown = self.spec.slots, torch.as_tensor(np.asarray(seen, dtype=np.float32))
        choices = torch.eye(slots).repeat(self.rows, 1, 1)
        self.seen = Observation(shown, choices, torch.zeros(self.rows, slots, 1, 1))
        self.legal = torch.from_numpy(every)

    def look(self) -> PolicyInput:
        """What a controller is shown; a row that is over waits for its reset."""
        slot = torch.stack([torch.arange(self.spec.slots).expand_as(self.legal) == 0, self.legal], 1)
        op = torch.tensor([False, True]).repeat(self.rows, 1)
        u = torch.rand(self.rows, len(self.spec.heads), generator=self.generator)
        return PolicyInput(self.seen, ActionMasks(op, slot, {}), torch.from_numpy(self.fresh), u,
                           torch.from_numpy(~self.over))

    def step(self, actions: Tensor) -> Outcome:
        """Of actions [N, heads] of the spec."""
        seen, reward, ended, cut, info = self.env.step(actions[:, 1].numpy() + self.first)
        self.total = np.where(self.fresh, 0.0, self.total) + reward
        self.fresh, self.over = self.over, ended | cut
        self.returns += self.total[self.over].tolist()
        self._keep(seen, info)
        ended, cut = (torch.from_numpy(np.asarray(each, dtype=bool)) for each in (ended, cut))
        final = self.seen if bool(cut.any()) else None
        return Outcome(torch.as_tensor(np.asarray(reward, dtype=np.float32)), ended, cut & ~ended, final)


def learn(env: str | VectorEnv, updates: int = 50, rows: int = 16, steps: int = 64, seed: int = 0,
          ppo: PPOConfig | None = None, network: NetworkConfig | None = None,
          watch: Callable[[int, list[float]], object] = lambda update, returns: None) -> PPOAgent:
    """An agent that learned in so many updates of `rows` x `steps`; an id makes a vector environment of so
    many rows. `watch` is told after each update which returns came of it; `agent.save` writes a file."""
    world = GymWorld(gymnasium.make_vec(env, num_envs=rows) if isinstance(env, str) else env, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        controller = Controller.fresh(world.spec, network, world.observation)
    agent = PPOAgent(controller, replace(ppo or PPOConfig(gamma=0.99), updates=updates), seed=seed)
    buffer = agent.buffer(steps, world.rows)
    collector = Collector(agent, world.rows, buffer)
    for update in range(updates):
        known = len(world.returns)
        for _ in range(steps):
            collector.add(world.step(collector.act(world.look())))
        agent.update(buffer, collector.value(world.look()))
        collector.counted.clear()
        watch(update, world.returns[known:])
    return agent
