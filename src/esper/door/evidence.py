"""What is measured at the door, and what users and policies are told of it.

Scores are an objective's of every sample, [3, n]: loss, score, smooth. Without an objective users give one
number, which stands for all three.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper.kasmina.objectives import Objective
from esper.leyline import Contribution, EsperError, SeedStage
from esper.leyline.keys import Purpose, mix
from esper.leyline.views import About, Facts, Seeds, View

if TYPE_CHECKING:
    from esper.door.growing import Growing

LOSS, SCORE, SMOOTH = range(3)
AT_ONCE = 2**24
"""Outputs that are judged at a time."""


@dataclass(frozen=True)
class Report:
    """What `end_epoch` found and did."""

    epoch: int
    score: float
    decision: str
    """An op and where, and what stopped it if something did."""
    contributions: dict[str, float]
    """Slot -> how much lower the score is without its seed."""
    params: int
    """Of all live seeds."""
    flops: float
    """Extra training FLOPs so far, as a share of what training the bare model takes in all `epochs`."""


def note(evidence: Contribution, where: tuple[int, ...], differences: Tensor) -> None:
    """A mean difference over samples, and its error."""
    if bool(differences.isfinite().all()):
        error = differences.std() / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        place = (0, *where)
        evidence.value[place], evidence.standard_error[place] = differences.mean(), error
        evidence.known[place] = True


def by_sample(returned: Any, objective: Objective | None, samples: int | None = None) -> Tensor:
    """[3, n] on the CPU of what evaluate() returned, of as many samples as before; one number is a sample."""
    if (objective is None) == isinstance(returned, tuple):
        raise EsperError("evaluate() returned " + (
            "a tuple; pass objective= to attach, or return a number or one for each sample"
            if objective is None else "no tuple; with an objective it returns (outputs, labels)"))
    try:
        if objective is None:
            told = torch.as_tensor(returned, dtype=torch.float64).detach().flatten().cpu()
            values = torch.stack([-told, told, told])
        else:
            values = _judged(objective, *returned)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
        what = ("a number, or one for each sample" if objective is None else
                "(outputs, labels) of the objective's shapes")
        raise EsperError(f"evaluate() returned a {type(returned).__name__}; expected {what}") from error
    if not values.shape[1]:
        raise EsperError("evaluate() returned no number; expected one, or one for each sample")
    if samples not in (None, count := values.shape[1]):
        raise EsperError(f"evaluate() scored {count} samples and {samples} before; always score all")
    return values


def _judged(objective: Objective, outputs: Tensor, labels: Tensor) -> Tensor:
    labels, outputs = labels.detach().cpu(), outputs.detach()
    if objective.label_dtype.is_floating_point:  # standardised, as tasks are
        labels, outputs = labels.float().flatten(), outputs.float().cpu().reshape(-1, 1)
        mean, spread = labels.mean(), labels.std().clamp(min=1e-12)
        labels, outputs = (labels - mean) / spread, (outputs - mean) / spread
    objective.check(labels.flatten(), outputs.shape[-1])
    if objective.tokens:
        shares = labels.flatten().bincount() / labels.numel()
        objective = replace(objective, entropy=float(torch.special.entr(shares).sum()))
    if len(outputs) != len(labels):
        raise ValueError
    size = max(1, AT_ONCE // outputs[0].numel())  # logits of many tokens: whole copies would not fit
    parts = [objective.samples(some.float().cpu().unsqueeze(1), their.unsqueeze(1)) for some, their in
             zip(outputs.split(size), labels.split(size), strict=True)]
    return torch.cat(parts, 1).squeeze(2).double()


def settled(values: Tensor, objective: Objective | None) -> Tensor:
    """[3]: means over samples; what is missing to 1 is the loss, where a user's score is a share."""
    means = values.mean(1)
    if objective is None:
        return means + torch.tensor([float(0 <= means[SCORE] <= 1), 0, 0])
    return objective.settle(means[:, None])[:, 0]


def _about(growing: "Growing") -> About:
    """Of a score alone nothing is known but that it is a share."""
    shape = growing.places[0].shape
    extent = max(1, math.prod(shape.extent) * (shape.tokens or 1))
    if growing.objective is None:
        return About(extent=extent)
    loss, score, smooth = growing.objective.chance(growing.outputs)
    return About((loss, score, smooth), growing.outputs, extent)


def seen(growing: "Growing") -> View:
    """What policies read: the same as in a population, of one row."""
    life, asked, one, clock = growing.life, growing.asked, torch.ones(1), torch.tensor([growing.life.epoch])
    costs = torch.zeros(1, growing.spec.slots, 2)
    for slot in growing.grafts:
        costs[0, slot] = torch.tensor([growing.kind(slot).cost.params, growing.kind(slot).cost.flops])
    table = torch.tensor([[(p.cost.params, p.cost.flops) for p in row] for row in growing.prototypes])
    told = torch.tensor([[p.descriptor for p in row] for row in growing.prototypes])
    empty = (life.stage == SeedStage.DORMANT)[..., None]
    candidates = Contribution(*(tensor * empty for tensor in vars(growing.candidates).values()))
    facts = Facts(growing.cost, growing.scores[1:], growing.scores[:1], one * growing.compute.spent, costs,
                  growing.gains, growing.previews, told, table, candidates if growing.every else None,
                  _about(growing))
    return View(spec=growing.spec, luck=mix(torch.tensor([asked.seed]), Purpose.LUCK),
                price=one * asked.price, flop_price=one * 0, horizon=torch.tensor([asked.epochs]),
                clock=clock, done=clock >= asked.epochs, verdicts=life.verdicts(),
                free_targets=life.free_targets(), facts=facts,
                seeds=Seeds(**{name: getattr(life, name).clone() for name in Seeds.__dataclass_fields__}),
                settling=life.gates.min_training + life.gates.min_holding + 1)
