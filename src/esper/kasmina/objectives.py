"""Objectives: what a network is trained for and scored by. All that depends on the kind of label is here.

Legend: R rows, B samples, T tokens of a sample, O outputs. Scores are (loss, score, smooth): the score is in
[0, 1] and what users ask for, `smooth` the same without its steps; all are means over samples: networks
compare sample by sample.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import EsperError
from esper.leyline.plugins import Registry


class Chance(NamedTuple):
    """What a network scores that has learned nothing but the labels' distribution."""

    loss: float
    score: float
    smooth: float


@dataclass(frozen=True)
class Objective:
    """How outputs meet labels. Nothing else knows which kind of objective it is."""

    label_dtype = torch.int64
    tokens = False
    """Are inputs token numbers [B, R, T] with a label for each, or samples with one label?"""
    entropy: float = 0.0
    """Loss in nats of knowing the labels' distribution alone, where it is not known beforehand."""

    def label_shape(self, x: Tensor) -> tuple[int, ...]:
        """Of the labels of samples [B, R, *inputs]."""
        return tuple(x.shape if self.tokens else x.shape[:2])

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """[R]: mean training loss of outputs [R, B, O] on labels [B, R]; tokens: [R, B * T, O], [B, R, T]."""
        raise NotImplementedError

    def samples(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """[3, B, R]: loss, score, smooth of every sample, of float32 outputs [B, R, O] on labels [B, R];
        tokens: [B, R, T, O], [B, R, T]."""
        raise NotImplementedError

    def settle(self, means: Tensor) -> Tensor:
        """Means over samples [3, R] as scores: the last two are brought into [0, 1]."""
        return torch.cat([means[:1], means[1:].clamp(0, 1)])

    def chance(self, outputs: int) -> Chance:
        raise NotImplementedError

    def wrong_labels(self, u: Tensor, labels: Tensor, outputs: int) -> Tensor:
        """Labels that say nothing, by uniform numbers u [R, n]; `labels` [n] are the true ones."""
        raise NotImplementedError

    def check(self, labels: Tensor, outputs: int) -> None:
        """Labels as they must be, or one sentence."""
        raise NotImplementedError


class Classification(Objective):
    """Cross-entropy; the score is accuracy, the smooth one the probability of the right class."""

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        chosen = wide.gather(2, labels.t().unsqueeze(2)).squeeze(2)
        return (wide.logsumexp(2) - chosen).mean(1)

    def samples(self, outputs: Tensor, labels: Tensor) -> Tensor:
        top, guess = outputs.max(2)  # once for both: `argmax` and `logsumexp` are slow over few classes
        chosen = outputs.gather(2, labels[..., None]).squeeze(2)
        loss = (outputs - top[..., None]).exp_().sum(2).log_() + top - chosen
        return torch.stack([loss, (guess == labels).to(torch.float32), (-loss).exp()])

    def settle(self, means: Tensor) -> Tensor:
        return means

    def chance(self, outputs: int) -> Chance:
        return Chance(math.log(outputs), 1 / outputs, 1 / outputs)

    def wrong_labels(self, u: Tensor, labels: Tensor, outputs: int) -> Tensor:
        return (u * outputs).long()

    def check(self, labels: Tensor, outputs: int) -> None:
        if labels.dtype != torch.int64:
            raise EsperError(f"labels are {labels.dtype}; "
                             "classification needs whole class numbers, torch.int64")
        least, most = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if least < 0 or most >= outputs:
            raise EsperError(f"labels go from {least} to {most}; {outputs} classes are 0 to {outputs - 1}")


class Regression(Objective):
    """Squared error of one number, standardised over the training split; scores: the variance explained."""

    label_dtype = torch.float32

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return (wide.squeeze(2) - labels.t()).square().mean(1)

    def samples(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = (outputs.squeeze(2) - labels).square()
        explained = 1 - loss  # standardised labels have variance 1
        return torch.stack([loss, explained, explained])

    def chance(self, outputs: int) -> Chance:
        return Chance(1.0, 0.0, 0.0)

    def wrong_labels(self, u: Tensor, labels: Tensor, outputs: int) -> Tensor:
        return labels[(u * len(labels)).long()]

    def check(self, labels: Tensor, outputs: int) -> None:
        if not labels.is_floating_point() or not bool(labels.isfinite().all()):
            raise EsperError("regression labels must be finite floating-point numbers")
        if outputs != 1:
            raise EsperError(f"a host with {outputs} outputs cannot regress one number; give it 1")


class NextToken(Classification):
    """Cross-entropy of every token; scores: the share of the labels' own (unigram) entropy explained."""

    tokens = True

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return super().losses(outputs, labels.transpose(1, 2).flatten(0, 1))

    def samples(self, outputs: Tensor, labels: Tensor) -> Tensor:
        each = super().samples(outputs.flatten(1, 2), labels.flatten(1, 2))[0]
        loss = each.view(labels.shape).mean(2)  # a sample is a sequence
        explained = 1 - loss / self.chance(outputs.shape[3]).loss
        return torch.stack([loss, explained, explained])

    def settle(self, means: Tensor) -> Tensor:
        return Objective.settle(self, means)

    def chance(self, outputs: int) -> Chance:
        return Chance(self.entropy or math.log(outputs), 0.0, 0.0)


OBJECTIVES = Registry[Objective]("objective", Objective, {
    "classification": Classification(), "regression": Regression(), "next_token": NextToken()})
"""By name, as tasks say it."""
register_objective = OBJECTIVES.add


def find_objective(name: str, entropy: float = 0.0) -> Objective:
    return replace(OBJECTIVES[name], entropy=entropy)
