"""Tamiyo: the mind. Observations, masks, distributions, the network, and every policy of growth."""

from esper.tamiyo.controller import Controller
from esper.tamiyo.distributions import ActionDistribution, ActionLogits, MaskedCategorical, Scored
from esper.tamiyo.greedy import Greedy, GreedyConfig
from esper.tamiyo.heuristic import Heuristic, HeuristicConfig
from esper.tamiyo.masks import ActionMasks, action_masks
from esper.tamiyo.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.tamiyo.observing import EYES, OBSERVATION, Normaliser, observe
from esper.tamiyo.policies import POLICIES, Learned, PolicyBundle, Random, named_policies, register_policy
from esper.tamiyo.scripts import TRIGGERS, Planned, Scripted, Switched, TriggerConfig, Triggered, Wait, entry

__all__ = [
    "EYES", "OBSERVATION", "POLICIES", "TRIGGERS", "ActionDistribution", "ActionLogits", "ActionMasks",
    "Controller", "FactoredRecurrentActorCritic", "Greedy", "GreedyConfig", "Heuristic", "HeuristicConfig",
    "Learned", "MaskedCategorical", "NetworkConfig", "Normaliser", "Planned", "PolicyBundle", "Random",
    "Scored", "Scripted", "Switched", "TriggerConfig", "Triggered", "Wait", "action_masks", "entry",
    "named_policies", "observe", "register_policy",
]
