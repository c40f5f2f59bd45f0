"""The one sampler and the one scorer: masked categoricals, and the joint distribution of a factored action.

Legend: leading dimensions `...` (rows, or time x rows), C choices, O ops, S slots, H heads of the spec.
An action is drawn op -> slot -> alpha_speed -> the rest, each given what came before.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import ALPHA_SPEEDS, ActionSpec, EsperError, Head, InvalidStateMachineError
from esper.tamiyo.masks import ActionMasks, Pair

MASKED = -1e4  # logit of what is impossible: far below any other, and finite in half precision too
AT_ONCE = ALPHA_SPEEDS.index(0)


class MaskedCategorical:
    """Softmax over the possible choices, mixed with the uniform distribution over them: each keeps the
    probability `explore / choices` at least, and a gradient, which clamping would stop."""

    def __init__(self, logits: Tensor, mask: Tensor, explore: Tensor | float = 0.0,
                 validate: bool = True) -> None:
        """logits [..., C] of any float type; mask bool [..., C]; validate: every row must have a choice."""
        if logits.shape != mask.shape:
            raise EsperError(f"a mask of shape {list(mask.shape)} for logits of shape {list(logits.shape)}; "
                             "they must be equal")
        if validate and len(none := (~mask.any(-1)).nonzero()):
            raise InvalidStateMachineError(f"a mask allows nothing at {none[0].tolist()}")
        self.mask, self.choices = mask, mask.sum(-1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        plain = torch.where(mask, wide, MASKED).log_softmax(-1)
        share = torch.as_tensor(explore, dtype=wide.dtype, device=wide.device)
        uniform = (share / self.choices.clamp(min=1)[..., None]).expand_as(plain)
        mixed = torch.logaddexp(plain + torch.log1p(-share), torch.where(mask, uniform, 0.0).log())
        single = (self.choices == 1)[..., None]
        self.log_probs = torch.where(single & mask, 0.0, torch.where(mask, mixed, MASKED))

    @property
    def probs(self) -> Tensor:
        return torch.where(self.mask, self.log_probs.exp(), 0.0)

    def sample(self, u: Tensor) -> Tensor:
        """[...]: choices by uniform numbers u in [0, 1); equal numbers give equal choices on every device."""
        cumulative = self.probs.cumsum(-1)
        wanted = (u * cumulative[..., -1]).unsqueeze(-1)
        return ((cumulative <= wanted) | (cumulative <= 0)).sum(-1).clamp(max=self.mask.shape[-1] - 1)

    def mode(self) -> Tensor:
        return self.log_probs.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.probs * self.log_probs).sum(-1)

    def at(self, index: Tensor) -> "MaskedCategorical":
        """Of many categoricals [batch, I, ...], those at `index` [batch] of the dimension after the batch."""
        place, picked = index.dim(), object.__new__(MaskedCategorical)  # nothing is computed again
        wide = index.view(*index.shape, *[1] * (self.mask.dim() - place))
        wide = wide.expand(*index.shape, 1, *self.mask.shape[place + 1 :])
        picked.mask, picked.log_probs = (t.gather(place, wide).squeeze(place)
                                         for t in (self.mask, self.log_probs))
        picked.choices = picked.mask.sum(-1)
        return picked


class ActionLogits(NamedTuple):
    """What a network says, in the shape of `ActionMasks`; a curve has a dimension of speeds, if chosen."""

    op: Tensor  # [..., O]
    slot: Tensor  # [..., O, S]
    values: Mapping[Pair, Tensor]  # [..., S, C], or [..., S, speeds, C] of a curve

    @classmethod
    def flat(cls, spec: ActionSpec, masks: ActionMasks) -> "ActionLogits":
        """No preference at all."""
        zeros = functools.partial(torch.zeros_like, dtype=torch.float32)
        values = {pair: zeros(mask) for pair, mask in masks.values.items()}
        values |= {pair: mask.unsqueeze(-2).repeat_interleave(len(ALPHA_SPEEDS), -2)
                   for pair, mask in values.items() if by_speed(spec, pair[1])}
        return cls(zeros(masks.op), zeros(masks.slot), values)


class Scored(NamedTuple):
    """The log-probabilities of actions."""

    joint: Tensor  # [...] of the whole action
    heads: Tensor  # [..., H], zero where a head is irrelevant
    relevant: Tensor  # bool [..., H]: it matters under the op, and there was a choice


class ActionDistribution:
    """The joint distribution of an action under a spec."""

    def __init__(self, spec: ActionSpec, logits: ActionLogits, masks: ActionMasks,
                 explore: Tensor | float = 0.0, validate: bool = True) -> None:
        if validate:
            masks.check(spec, tuple(logits.op.shape[:-1]), logits.op.device)
        self.spec, self.values = spec, {}
        self.op = MaskedCategorical(logits.op, masks.op, explore, False)
        self.slot = MaskedCategorical(logits.slot, masks.slot, explore, False)
        for pair in spec.pairs:
            said, mask = logits.values[pair], masks.values[pair]
            if by_speed(spec, pair[1]):  # at once has no shape: the curve is then its default
                default = torch.arange(mask.shape[-1], device=mask.device) == spec.defaults[Head.ALPHA_CURVE]
                at_once = torch.arange(said.shape[-2], device=mask.device) == AT_ONCE
                mask = torch.where(at_once[:, None], default, mask.unsqueeze(-2)).expand_as(said)
            self.values[pair] = MaskedCategorical(said, mask, explore, False)

    def sample(self, u: Tensor) -> Tensor:
        """Actions [..., H] by uniform numbers u [..., H]."""
        return self._draw(lambda distribution, head: distribution.sample(u[..., self.spec.heads.index(head)]))

    def mode(self) -> Tensor:
        """The likeliest op, then the likeliest slot for it, and so on."""
        return self._draw(lambda distribution, head: distribution.mode())

    def _draw(self, draw: Callable[[MaskedCategorical, Head], Tensor]) -> Tensor:
        spec, op = self.spec, draw(self.op, Head.OP)
        chosen = {head: torch.full_like(op, spec.defaults[head]) for head in Head} | {Head.OP: op}
        if Head.SLOT in spec.heads:
            chosen[Head.SLOT] = draw(self.slot.at(op), Head.SLOT)
        for pair in self.values:
            drawn = draw(self._given(pair, chosen), pair[1])
            chosen[pair[1]] = torch.where(op == spec.ops.index(pair[0]), drawn, chosen[pair[1]])
        return torch.stack([chosen[head] for head in spec.heads], -1)

    def _given(self, pair: Pair, chosen: Mapping[Head, Tensor]) -> MaskedCategorical:
        table = self.values[pair].at(chosen[Head.SLOT])
        return table.at(chosen[Head.ALPHA_SPEED]) if by_speed(self.spec, pair[1]) else table

    def score(self, actions: Tensor) -> Scored:
        """Of actions [..., H]. What is irrelevant to the op, or had one choice, counts nothing."""
        spec, shape = self.spec, (*self.op.choices.shape, len(self.spec.heads))
        if actions.shape != shape:
            raise EsperError(f"actions have shape {list(actions.shape)}; expected {list(shape)}")
        chosen = dict(zip(spec.heads, actions.unbind(-1), strict=True))
        op = chosen[Head.OP]
        chosen.setdefault(Head.SLOT, torch.full_like(op, spec.defaults[Head.SLOT]))
        zero, never = torch.zeros_like(self.op.log_prob(op)), torch.zeros_like(op, dtype=torch.bool)
        scores = dict.fromkeys(spec.heads, zero) | {Head.OP: self.op.log_prob(op)}
        relevant = dict.fromkeys(spec.heads, never) | {Head.OP: self.op.choices > 1}
        if Head.SLOT in spec.heads:
            which = self.slot.at(op)
            scores[Head.SLOT], relevant[Head.SLOT] = which.log_prob(chosen[Head.SLOT]), which.choices > 1
        for pair in self.values:
            (name, head), given = pair, self._given(pair, chosen)
            mine = op == spec.ops.index(name)
            scores[head] = torch.where(mine, given.log_prob(chosen[head]), scores[head])
            relevant[head] = torch.where(mine, given.choices > 1, relevant[head])
        heads, matters = (torch.stack([part[head] for head in spec.heads], -1) for part in (scores, relevant))
        return Scored(heads.sum(-1), heads, matters)

    def entropy(self) -> Tensor:
        """[...] of the joint action: H(op) + sum of p(op) (H(slot) + sum of p(slot) H(value)), in nats."""
        values = torch.zeros_like(self.slot.log_probs)  # [..., O, S]
        for (op, head), table in self.values.items():
            entropy = table.entropy()
            if by_speed(self.spec, head):  # the speed is averaged out
                entropy = (self.values[op, Head.ALPHA_SPEED].probs * entropy).sum(-1)
            row = torch.arange(len(self.spec.ops), device=entropy.device) == self.spec.ops.index(op)
            values = values + row[:, None] * entropy.unsqueeze(-2)
        below = self.slot.entropy() + (self.slot.probs * values).sum(-1)
        return self.op.entropy() + (self.op.probs * below).sum(-1)

    def conditional_entropies(self) -> Tensor:
        """[..., H] in nats: each head's entropy, averaged over what would ask it; zero where nothing can.
        Weights have no gradient and sum to one: a head that is hardly ever asked keeps its own."""
        return self._averaged(self._asked(), lambda table, share: share * table.entropy())

    def head_entropies(self) -> tuple[Tensor, Tensor]:
        """([..., H] conditional entropies as shares of their most, [..., H] how likely a head is asked)."""
        asked = self._asked()
        each = self._averaged(asked, lambda t, share: share * t.entropy() / t.choices.clamp(min=2).log())
        return each, torch.stack([likely for _, likely in asked], -1)

    def _averaged(self, asked: list["Asked"], term: Callable[[MaskedCategorical, Tensor], Tensor]) -> Tensor:
        """[..., H]: the sum of each head's terms over everything behind the batch."""
        zero = torch.zeros_like(self.op.log_probs[..., 0])
        return torch.stack([sum((term(*one).reshape(*zero.shape, -1).sum(-1) for one in shares), zero)
                            for shares, _ in asked], -1)

    def _asked(self) -> list["Asked"]:
        """Of each head, without gradients. Shares are made of logarithms: unlikely askers sum to one too."""
        asked, zero = _log(self.op)[..., None] + _log(self.slot), torch.zeros_like(self.op.log_probs[..., 0])
        terms = {Head.OP: [(self.op, zero)], Head.SLOT: [(self.slot, _log(self.op))]}
        for (op, head), table in self.values.items():
            weight = asked[..., self.spec.ops.index(op), :]
            if by_speed(self.spec, head):
                weight = weight[..., None] + _log(self.values[op, Head.ALPHA_SPEED])
            terms.setdefault(head, []).append((table, weight))
        return [_shared(terms[head], zero.dim()) if head in terms else ([], zero) for head in self.spec.heads]


Asked = tuple[list[tuple[MaskedCategorical, Tensor]], Tensor]
"""([(categoricals, their shares of being asked)], [...] how likely the head is asked)."""


def by_speed(spec: ActionSpec, head: Head) -> bool:
    """Does this head's distribution depend on the speed that was drawn?"""
    return head == Head.ALPHA_CURVE and Head.ALPHA_SPEED in spec.heads


def _log(choice: MaskedCategorical) -> Tensor:
    """Log-probabilities without gradient, in which the impossible is impossible, not merely unlikely."""
    return torch.where(choice.mask, choice.log_probs.detach(), -torch.inf)


def _shared(terms: list[tuple[MaskedCategorical, Tensor]], batch: int) -> Asked:
    """From the log-probability that each categorical is asked: (shares of one, the probability of any)."""
    logs = [torch.where(table.choices > 1, log, -torch.inf) for table, log in terms]
    logs = [log.reshape(*log.shape[:batch], -1) for log in logs]
    joined = torch.cat(logs, -1)
    share = torch.where(joined > -torch.inf, joined.softmax(-1), 0.0)
    parts = zip(terms, share.split([log.shape[-1] for log in logs], -1), strict=True)
    return [(table, part.view_as(table.choices)) for (table, _), part in parts], joined.logsumexp(-1).exp()
