"""Growing hosts as Gymnasium environments: a step is one epoch of training, an action one decision.

Legend: N rows, A actions, S slots, W numbers of an observation.
"""

import itertools
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from esper.leyline import ALPHA_SPEEDS, RELEVANCE, ActionSpec, EsperError, Head
from esper.simic import RewardWorld
from esper.tamiyo import ActionMasks, action_masks, observe
from esper.tolaria import EnvConfig, Family, MorphogeneticEnv, Twins, find_family

LIMIT = 100.0  # observations are cut at +-LIMIT; none of a host that learns comes near it
AHEAD = 32  # twins that are computed at once, at the least: one costs nearly as much as all of them
SPLITS = ("train", "validation")


def flat_actions(spec: ActionSpec) -> Tensor:
    """[A, heads]: every action that a spec can express, once each; WAIT is the first."""
    choices = {head: range(size) for head, size in spec.head_sizes.items()}
    found = []
    for op in sorted(spec.ops):
        asked = [head for head in spec.heads if head is not Head.OP and RELEVANCE[op, head]]
        for values in itertools.product(*(choices[head] for head in asked)):
            chosen = dict(spec.defaults) | dict(zip(asked, values, strict=True))
            chosen[Head.OP] = spec.ops.index(op)
            at_once = Head.ALPHA_SPEED in asked and ALPHA_SPEEDS[chosen[Head.ALPHA_SPEED]] == 0
            if not at_once or chosen[Head.ALPHA_CURVE] == spec.defaults[Head.ALPHA_CURVE]:
                found.append([chosen[head] for head in spec.heads])
    return torch.tensor(found)


def flat_masks(spec: ActionSpec, actions: Tensor, masks: ActionMasks) -> Tensor:
    """bool [N, A]: which of these actions [A, heads] are possible."""
    chosen = {head: torch.full_like(actions[:, 0], spec.defaults[head]) for head in Head}
    chosen |= dict(zip(spec.heads, actions.unbind(1), strict=True))
    op, slot = chosen[Head.OP], chosen[Head.SLOT]
    legal = masks.slot[:, op, slot]
    for (asking, head), mask in masks.values.items():
        legal &= mask[:, slot, chosen[head]] | (op != spec.ops.index(asking))
    return legal


class GrowthVectorEnv(VectorEnv):
    """N hosts as one program. A row that ended begins anew with the next step, which its action does not
    reach (`NextStep`), or at once (`SameStep`: no epoch is lost, the last observation is in the info)."""

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, family: str | Family, num_envs: int = 1, split: str = "train", scenarios: int = 1024,
                 reward: str = "utility", score: str = "delivered", autoreset_mode: str = "NextStep",
                 **changes: Any) -> None:
        """Episodes go through the first `scenarios` of a split in turn; `changes` are of `EnvConfig`."""
        mode = AutoresetMode(autoreset_mode)
        if split not in SPLITS or mode is AutoresetMode.DISABLED:
            raise EsperError(f"choose a split from {', '.join(SPLITS)}, and NextStep or SameStep: "
                             "rows end at horizons of their own")
        if not isinstance(scenarios, int) or scenarios < 1:
            raise EsperError(f"scenarios is {scenarios!r}; expected a whole number of at least 1")
        config = EnvConfig(find_family(family) if isinstance(family, str) else family, **changes)
        self.engine, self.num_envs = MorphogeneticEnv(config, num_envs), num_envs
        twins = Twins(MorphogeneticEnv(replace(config, previews=None), max(num_envs, AHEAD)))
        self.world = RewardWorld(self.engine, twins, reward, score)
        self.pool, self.next = config.family.scenarios(scenarios, split), -1
        self.actions, self.at_once = flat_actions(config.spec), mode is AutoresetMode.SAME_STEP
        self.metadata = self.metadata | {"autoreset_mode": mode}
        self.over, self.scenario = np.zeros(num_envs, bool), np.zeros(num_envs, np.int64)
        width = self._told()[0].shape[1]
        self.single_observation_space = gymnasium.spaces.Box(-LIMIT, LIMIT, (width,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(len(self.actions))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """A seed says with which scenario episodes begin, or options["scenario"] does; else they go on."""
        super().reset(seed=seed)
        if seed is not None or self.next < 0:
            self.next = int(self.np_random.integers(len(self.pool)))
        self.next = int((options or {}).get("scenario", self.next))
        self.over[:] = False
        self._begin(np.arange(self.num_envs))
        return self._told()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One epoch; what the mask excludes is played as WAIT."""
        before, reward, done = self.over, np.zeros(self.num_envs), self.over
        info: dict[str, Any] = {}
        if not before.all():
            measured = self.engine.step(self._chosen(actions))
            reward, done = self.world.pay(measured).reward.double().numpy(), measured.done.numpy().copy()
        ended = done & ~before
        if self.at_once and ended.any():
            seen, last = self._told()
            info = {"final_obs": np.full(self.num_envs, None), "final_info": last}
            for row in ended.nonzero()[0]:
                info["final_obs"][row] = seen[row]
            info |= {f"_{name}": ended for name in info}
        self.over = before if self.at_once else ended
        self._begin((ended if self.at_once else before).nonzero()[0])
        seen, now = self._told()
        return seen, reward, ended, np.zeros_like(ended), info | now

    def _chosen(self, actions: Any) -> Tensor:
        chosen = np.asarray(actions)
        if chosen.dtype.kind not in "iu" or not self.action_space.contains(chosen):
            last = len(self.actions) - 1
            raise EsperError(f"expected {self.num_envs} actions, whole numbers of 0 to {last}, not {actions}")
        return self.actions[np.where(self.mask[np.arange(self.num_envs), chosen], chosen, 0)]

    def _begin(self, rows: Any) -> None:
        """The next scenarios in these rows, with their twins and those that come soon."""
        if not len(rows):
            return
        number = (self.next + np.arange(len(rows))) % len(self.pool)
        self.next, self.scenario[rows] = self.next + len(rows), number
        block = self.world.twins.env.rows
        for first in np.unique(number // block) * block:
            self.world.twins(self.pool.take(torch.arange(first, min(first + block, len(self.pool)))))
        drawn, places = self.pool.take(torch.from_numpy(number)), torch.from_numpy(rows)
        self.engine.reset(drawn, places)
        self.world.open(drawn, None if len(rows) == self.num_envs else places)

    def _told(self) -> tuple[Any, dict[str, Any]]:
        """(observations [N, W], masks [N, A] and scenarios [N]) as they are now."""
        view = self.engine.view()
        seen = torch.cat([part.flatten(1) for part in observe(view)], 1).clamp(-LIMIT, LIMIT).numpy()
        self.mask = flat_masks(self.engine.spec, self.actions, action_masks(view)).to(torch.int8).numpy()
        return seen, {"action_mask": self.mask.copy(), "scenario": self.scenario.copy()}


class GrowthEnv(gymnasium.Env):
    """One host; an episode's undiscounted return is its utility less its twin's."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, family: str | Family, **options: Any) -> None:
        """Options are those of `GrowthVectorEnv`, but for `autoreset_mode`: one host is reset by its user."""
        if "autoreset_mode" in options:
            raise EsperError("autoreset_mode is of make_vec; one host is reset by its user")
        self.one = GrowthVectorEnv(family, 1, **options)
        self.observation_space = self.one.single_observation_space
        self.action_space = self.one.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        return _first(*self.one.reset(seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, reward, ended, _, info = self.one.step(np.array([action]))
        seen, info = _first(seen, info)
        return seen, float(reward[0]), bool(ended[0]), False, info

    def action_masks(self) -> Any:
        """[A]: 1 is possible. The name that sb3-contrib asks for."""
        return self.one.mask[0].copy()


def _first(seen: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return seen[0], {name: value[0] for name, value in info.items()}
