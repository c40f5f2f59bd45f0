"""Which head an advantage belongs to: nobody learns from a choice that had no effect.

Legend: T steps, N rows. Everything derives from `RELEVANCE`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import RELEVANCE, EsperError, Head


class PerHead(NamedTuple):
    """One tensor [T, N] for each head."""

    op: Tensor
    slot: Tensor
    blueprint: Tensor
    style: Tensor
    tempo: Tensor
    alpha_target: Tensor
    alpha_speed: Tensor
    alpha_curve: Tensor


if PerHead._fields != tuple(head.name.lower() for head in Head):
    raise TypeError("PerHead needs one field for each Head, in its order")

_OPS = tuple(tuple(op for op in range(len(RELEVANCE)) if RELEVANCE[op, head]) for head in range(len(Head)))
"""For each head the ops under which it matters: the columns of `RELEVANCE`."""


def compute_causal_masks(ops: Tensor) -> PerHead:
    """bool: does the head matter under the op that was taken? `ops` [T, N] are numbers of `LifecycleOp`."""
    if ops.dim() != 2:
        raise EsperError(f"ops have shape {list(ops.shape)}; expected [T, N]")
    return PerHead(*(torch.stack([ops == op for op in mine]).any(0) for mine in _OPS))


def compute_per_head_advantages(advantages: Tensor, ops: Tensor) -> PerHead:
    """Advantages [T, N] for each head, zero where it did not matter. The op's are the given tensor itself."""
    if advantages.shape != ops.shape:
        raise EsperError(f"advantages have shape {list(advantages.shape)} and ops {list(ops.shape)}; "
                         "both must be [T, N]")
    return PerHead(advantages, *(torch.where(mask, advantages, 0) for mask in compute_causal_masks(ops)[1:]))
