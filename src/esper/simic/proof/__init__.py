"""The court: baselines, their evaluator, claims and the proof. The only place that opens a test split."""

from esper.simic.proof.proving import Contestant, Proof, ProofConfig, prove

__all__ = ["Contestant", "Proof", "ProofConfig", "prove"]
