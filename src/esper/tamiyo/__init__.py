"""Tamiyo: the mind. Every policy that decides how hosts grow."""

from esper.tamiyo.policies import POLICIES, Policy, Random, Scripted, Wait, entry

__all__ = ["POLICIES", "Policy", "Random", "Scripted", "Wait", "entry"]
