"""Policies that follow a plan: waiting, and timed actions.

Legend: N rows, K entries of a script.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline import RELEVANCE, ActionSpec, EsperError, Head, LifecycleOp, View


def to_spec(spec: ActionSpec, full: Tensor) -> Tensor:
    """Full actions [N, heads] as the heads and op numbers of a spec."""
    number = torch.full((len(LifecycleOp),), -1)
    number[torch.tensor(spec.ops)] = torch.arange(len(spec.ops))
    absent = [head for head in Head if head not in spec.heads]
    defaults = torch.tensor([spec.defaults[head] for head in absent], dtype=torch.int64)
    lost = (full[:, absent] != defaults) & torch.tensor(RELEVANCE)[full[:, Head.OP]][:, absent]
    if bool(lost.any()):
        head = absent[int(lost.any(0).nonzero()[0])]
        chose = head.name.lower()
        raise EsperError(f"a policy chose a {chose}, which this action spec leaves at its default")
    full = full.clone()
    full[:, Head.OP] = number[full[:, Head.OP]]
    if bool((full[:, Head.OP] < 0).any()):
        raise EsperError("a policy chose an op that this action spec does not have")
    return full[:, list(spec.heads)]


def waiting(view: View) -> Tensor:
    """Full actions [N, heads] of rows that do nothing."""
    return torch.tensor([view.spec.defaults[head] for head in Head]).repeat(len(view.clock), 1)


class Wait:
    """Never acts: the no-growth control."""

    def __call__(self, view: View) -> Tensor:
        return to_spec(view.spec, waiting(view))


def entry(spec: ActionSpec, epoch: int, op: LifecycleOp, **values: object) -> tuple[int, ...]:
    """One line of a script: act in this epoch (0 is the first), or in the first after it that allows it."""
    return epoch, *ActionSpec.full(spec.slots, spec.blueprints).action(op, **values)


class Scripted:
    """Timed actions, one script per row: each entry is played in its epoch, or as soon after as it may be."""

    def __init__(self, scripts: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """`scripts`: for each row its entries (see `entry`) in order."""
        longest, never = max((len(script) for script in scripts), default=0), (2**31, *[0] * len(Head))
        self.entries = torch.tensor([[*script, *[never] * (longest + 1 - len(script))]
                                     for script in scripts])  # [N, K + 1, 1 + heads]
        self.at = torch.zeros(len(scripts), dtype=torch.int64)

    def __call__(self, view: View) -> Tensor:
        if len(view.clock) != len(self.at):
            raise EsperError(f"{len(self.at)} scripts for {len(view.clock)} rows; give one to each")
        every = torch.arange(len(self.at))
        self.at[view.clock == 0] = 0
        when, full = self.entries[every, self.at].split([1, len(Head)], 1)
        allowed = view.verdicts[every, full[:, Head.SLOT], full[:, Head.OP]]
        acts = (view.clock >= when[:, 0]) & allowed & ~view.done
        self.at += acts
        return to_spec(view.spec, torch.where(acts[:, None], full, waiting(view)))
