"""sb3-contrib's RecurrentPPO for `rl.py`: same widths, sequences, minibatches and epochs, as many numbers."""

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn


class Features(BaseFeaturesExtractor):
    """As wide as Esper's; most of its weights are in front of the memory too."""

    def __init__(self, space: gymnasium.spaces.Box, hidden: int) -> None:
        super().__init__(space, hidden)
        into, out = nn.Linear(space.shape[0], 64), nn.Linear(64, hidden)
        self.net = nn.Sequential(into, nn.ReLU(), out, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Noise(VecEnv):
    """Episodes of random observations and rewards, all of the same length."""

    def __init__(self, rows: int, episode: int, width: int, sizes: tuple[int, ...]) -> None:
        seen = gymnasium.spaces.Box(0, 1, (width,), np.float32)
        super().__init__(rows, seen, gymnasium.spaces.MultiDiscrete(sizes))
        self.episode, self.at, self.random = episode, 0, np.random.default_rng(0)

    def _seen(self) -> Any:
        return self.random.random((self.num_envs, *self.observation_space.shape), np.float32)

    def reset(self) -> Any:
        self.at = 0
        return self._seen()

    def step_async(self, actions: Any) -> None: ...

    def step_wait(self) -> Any:
        self.at = (self.at + 1) % self.episode
        seen, over = self._seen(), np.full(self.num_envs, self.at == 0)
        infos = [{"terminal_observation": row} if self.at == 0 else {} for row in seen]
        return seen, self.random.random(self.num_envs, np.float32), over, infos

    def close(self) -> None: ...

    def get_attr(self, *args: Any, **options: Any) -> Any:
        return [None] * self.num_envs

    def set_attr(self, *args: Any, **options: Any) -> None: ...

    def env_method(self, *args: Any, **options: Any) -> Any:
        return [None] * self.num_envs

    def env_is_wrapped(self, *args: Any, **options: Any) -> Any:
        return [False] * self.num_envs


class _Nothing(BaseCallback):
    def _on_step(self) -> bool:
        return True


class Theirs:
    """One learner, `width` numbers in and `sizes` choices out."""

    def __init__(self, rows: int, steps: int, episode: int, epochs: int, minibatches: int, hidden: int,
                 width: int, sizes: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        policy = {"lstm_hidden_size": hidden, "shared_lstm": True, "enable_critic_lstm": False,
                  "net_arch": [64], "features_extractor_class": Features,
                  "features_extractor_kwargs": {"hidden": hidden}}
        self.model = RecurrentPPO("MlpLstmPolicy", Noise(rows, episode, width, sizes), n_steps=steps,
                                  n_epochs=epochs, batch_size=rows * steps // minibatches, device="cpu",
                                  policy_kwargs=policy)
        self.parameters = sum(p.numel() for p in self.model.policy.parameters())
        _, self.callback = self.model._setup_learn(10**9, _Nothing())

    def seconds(self) -> float:
        model = self.model
        model.collect_rollouts(model.env, self.callback, model.rollout_buffer, model.n_steps)
        started = time.perf_counter()
        model.train()
        return time.perf_counter() - started
