"""Simic: selection pressure. What decisions are worth, the rollout, and the learning rule."""

from esper.simic.advantages import PerHead, compute_causal_masks, compute_per_head_advantages
from esper.simic.buffer import RolloutSpec, Step, TamiyoRolloutBuffer
from esper.simic.collecting import Collector, Outcome, World
from esper.simic.growth import Growth
from esper.simic.metrics import Anomaly, AnomalyDetector, PPOUpdateMetrics, Thresholds
from esper.simic.ppo import PPOAgent, PPOConfig
from esper.simic.proving import prove
from esper.simic.rewards import REWARDS

__all__ = [
    "REWARDS",
    "Anomaly",
    "AnomalyDetector",
    "Collector",
    "Growth",
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
    "prove",
]
