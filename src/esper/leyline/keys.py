"""Counter-based randomness: a 64-bit integer hash, the same on every device and in any order of rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer; int64 products wrap on every device
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a scenario's key is mixed with: two purposes never share their draws."""

    WEIGHTS, SCENARIO = 0, 1
    SWEEP_RATE, SWEEP = 5, 99
    ACTION, LUCK, SHUFFLED_DECISIONS, UNIVERSE = 7, 20, 21, 22
    SUBSET, LABEL, SHIFT, NOISE, SHUFFLE, ORDER, AUGMENT, DROPOUT = range(10, 18)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: the sign bit does not smear."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix(key: Tensor, *parts: Tensor | int) -> Tensor:
    """A new int64 key from a key and further integers; every argument matters and so does their order."""
    for part in parts:
        step = (part + 1) * _GOLDEN
        if isinstance(step, int):  # wrapped by hand: copying a tensor to a device makes the host wait
            step = (step + 2**63) % 2**64 - 2**63
        key = key + step
        key = (key ^ _shift(key, 30)) * _FIRST
        key = (key ^ _shift(key, 27)) * _SECOND
        key = key ^ _shift(key, 31)
    return key


def uniform(keys: Tensor, count: int) -> Tensor:
    """float32 [R, count] in [0, 1) with 24 random bits each, from int64 keys [R]."""
    bits = _shift(mix(keys[:, None], torch.arange(count, device=keys.device)), 40)
    return bits.to(torch.float32) * 2.0**-24


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Draws of PyTorch's global CPU generator inside depend on the key alone, and leave no trace outside."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(key & (2**63 - 1))  # torch.manual_seed reseeds CUDA too
        yield
