"""Simic: selection pressure. Rewards, rollout, learning rule, training loop; `simic.proof` is the court."""

from esper.simic.buffer import RolloutSpec, Step, TamiyoRolloutBuffer
from esper.simic.causal import PerHead, compute_causal_masks, compute_per_head_advantages
from esper.simic.metrics import Anomaly, AnomalyDetector, PPOUpdateMetrics, Thresholds
from esper.simic.ppo import PPOAgent, PPOConfig
from esper.simic.rewards import REWARDS, register_reward
from esper.simic.training import TrainConfig, Training
from esper.simic.world import Collector, Outcome, RewardWorld, Round

__all__ = [
    "REWARDS", "Anomaly", "AnomalyDetector", "Collector", "Outcome", "PPOAgent", "PPOConfig",
    "PPOUpdateMetrics", "PerHead", "RewardWorld", "RolloutSpec", "Round", "Step", "TamiyoRolloutBuffer",
    "Thresholds", "TrainConfig", "Training", "compute_causal_masks", "compute_per_head_advantages",
    "register_reward",
]
