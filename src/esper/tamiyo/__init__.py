"""Tamiyo: the mind. Every policy that decides how hosts grow."""

from esper.tamiyo.policies import Policy, Random, Scripted, Wait, entry

__all__ = ["Policy", "Random", "Scripted", "Wait", "entry"]
