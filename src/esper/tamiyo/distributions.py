"""The one sampler and the one scorer: masked categoricals, and the joint distribution of a factored action.

Legend: leading dimensions `...` (rows, or time x rows), C choices, O ops, S slots, H heads of the spec.
An action is drawn op -> slot -> alpha_speed -> the rest, each given what came before.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
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
        chosen = {head: torch.full_like(self.op.choices, self.spec.defaults[head]) for head in Head}
        for head, given, asked in self._walk(chosen):
            chosen[head] = torch.where(asked, draw(given, head), chosen[head])
        return torch.stack([chosen[head] for head in self.spec.heads], -1)

    def _walk(self, chosen: Mapping[Head, Tensor]) -> Iterator[tuple[Head, MaskedCategorical, Tensor]]:
        """(head, its categoricals given what is chosen by then, bool [...]: rows whose op asks it)."""
        every = torch.ones_like(self.op.choices, dtype=torch.bool)
        yield Head.OP, self.op, every
        if Head.SLOT in self.spec.heads:
            yield Head.SLOT, self.slot.at(chosen[Head.OP]), every
        for (op, head), table in self.values.items():
            given = table.at(chosen[Head.SLOT])
            given = given.at(chosen[Head.ALPHA_SPEED]) if by_speed(self.spec, head) else given
            yield head, given, chosen[Head.OP] == self.spec.ops.index(op)

    def score(self, actions: Tensor) -> Scored:
        """Of actions [..., H]. What is irrelevant to the op, or had one choice, counts nothing."""
        spec, shape = self.spec, (*self.op.choices.shape, len(self.spec.heads))
        if actions.shape != shape:
            raise EsperError(f"actions have shape {list(actions.shape)}; expected {list(shape)}")
        chosen = dict(zip(spec.heads, actions.unbind(-1), strict=True))
        chosen.setdefault(Head.SLOT, torch.full_like(self.op.choices, spec.defaults[Head.SLOT]))
        scores = dict.fromkeys(spec.heads, torch.zeros_like(self.op.log_probs[..., 0]))
        relevant = dict.fromkeys(spec.heads, torch.zeros_like(self.op.choices, dtype=torch.bool))
        for head, given, asked in self._walk(chosen):
            scores[head] = torch.where(asked, given.log_prob(chosen[head]), scores[head])
            relevant[head] = torch.where(asked, given.choices > 1, relevant[head])
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
        return self._averaged(lambda table, share: share * table.entropy())[0]

    def head_entropies(self) -> tuple[Tensor, Tensor]:
        """([..., H] conditional entropies as shares of their most, [..., H] how likely a head is asked)."""
        return self._averaged(lambda t, share: share * t.entropy() / t.choices.clamp(min=2).log())

    def _averaged(self, term: Callable[[MaskedCategorical, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """([..., H] sums of each head's terms (categoricals, their shares of being asked), how likely it is
        asked). Shares have no gradient; they are made of logarithms: unlikely askers sum to one too."""
        asked, zero = _log(self.op)[..., None] + _log(self.slot), torch.zeros_like(self.op.log_probs[..., 0])
        terms = {Head.OP: [(self.op, zero)], Head.SLOT: [(self.slot, _log(self.op))]}
        for (op, head), table in self.values.items():
            weight = asked[..., self.spec.ops.index(op), :]
            if by_speed(self.spec, head):
                weight = weight[..., None] + _log(self.values[op, Head.ALPHA_SPEED])
            terms.setdefault(head, []).append((table, weight))
        shares, likely = zip(*(_shared(terms[head], zero.dim()) for head in self.spec.heads), strict=True)
        sums = [sum((term(*one).reshape(*zero.shape, -1).sum(-1) for one in mine), zero) for mine in shares]
        return torch.stack(sums, -1), torch.stack(likely, -1)


def by_speed(spec: ActionSpec, head: Head) -> bool:
    """Does this head's distribution depend on the speed that was drawn?"""
    return head == Head.ALPHA_CURVE and Head.ALPHA_SPEED in spec.heads


def _log(choice: MaskedCategorical) -> Tensor:
    """Log-probabilities without gradient, in which the impossible is impossible, not merely unlikely."""
    return torch.where(choice.mask, choice.log_probs.detach(), -torch.inf)


Weighted = tuple[MaskedCategorical, Tensor]


def _shared(terms: list[Weighted], batch: int) -> tuple[list[Weighted], Tensor]:
    """From the log-probability that each categorical is asked: (shares of one, the probability of any)."""
    logs = [torch.where(t.choices > 1, log, -torch.inf).reshape(*log.shape[:batch], -1) for t, log in terms]
    joined = torch.cat(logs, -1)
    share = torch.where(joined > -torch.inf, joined.softmax(-1), 0.0)
    parts = zip(terms, share.split([log.shape[-1] for log in logs], -1), strict=True)
    return [(table, part.view_as(table.choices)) for (table, _), part in parts], joined.logsumexp(-1).exp()
