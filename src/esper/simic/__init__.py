"""Simic: selection pressure. What decisions are worth, the rollout, and the learning rule."""

from esper.simic.advantages import PerHead, compute_causal_masks, compute_per_head_advantages
from esper.simic.buffer import RolloutSpec, Step, TamiyoRolloutBuffer
from esper.simic.collecting import Collector, Outcome, World
from esper.simic.metrics import Anomaly, AnomalyDetector, PPOUpdateMetrics, Thresholds
from esper.simic.ppo import PPOAgent, PPOConfig

__all__ = [
    "Anomaly",
    "AnomalyDetector",
    "Collector",
    "Outcome",
    "PPOAgent",
    "PPOConfig",
    "PPOUpdateMetrics",
    "PerHead",
    "RolloutSpec",
    "Step",
    "TamiyoRolloutBuffer",
    "Thresholds",
    "World",
    "compute_causal_masks",
    "compute_per_head_advantages",
]
