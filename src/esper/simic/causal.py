"""Which heads of an action mattered, given its op: masks and advantages for each head, from `RELEVANCE`."""

from collections import namedtuple

import torch
from torch import Tensor

from esper.leyline import RELEVANCE, EsperError, Head

PerHead = namedtuple("PerHead", "op slot blueprint style tempo alpha_target alpha_speed alpha_curve")
"""One tensor [T, N] for each head."""
assert list(PerHead._fields) == [head.name.lower() for head in Head]
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
