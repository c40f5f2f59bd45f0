"""Experiments: each module is one, run from the repository root as `python -m experiments.NAME`."""
