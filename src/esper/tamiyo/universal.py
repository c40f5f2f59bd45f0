"""Eyes that mean the same everywhere: what a controller sees of any host on any task, without statistics of
its own. Scores are shares of the way from chance to perfect, effects are points and standard errors, costs
are points and shares of the host.

Legend: N rows, S slots, K blueprints.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline import Contribution, LifecycleOp, SeedStage
from esper.leyline.views import SCORES, Facts, Field, ObservationSpec, View

DESCRIPTOR = 10  # numbers that describe a blueprint at a slot's shape
LOSSES = [name.endswith("loss") for name in SCORES]
_EFFECT = ("effect", "sure")  # in points; and in standard errors
UNIVERSAL = ObservationSpec(
    row=(
        *map(Field, ("progress", "epochs_left", "horizon", "free_slots", "price", "flop_price", "measured")),
        Field("shares", len(SCORES), known_by="measured"), Field("gap", known_by="measured"),
        Field("moving"), Field("slopes", len(SCORES), known_by="moving"),
        *map(Field, ("size", "flops", "spent", "cost", "told")),
        *(Field(name, known_by="told") for name in ("samples", "samples_per_parameter")),
        *map(Field, ("parameters", "outputs", "extent", "slots"))),
    slot=(
        Field("stage", len(SeedStage)),
        *map(Field, ("dwell", "position", "germinations", "planted", "alpha", "fading", "healthy")),
        Field("verdicts", len(LifecycleOp)), Field("descriptor", DESCRIPTOR),
        *map(Field, ("size", "flops", "cost", "contributes")),
        *(Field(name, known_by="contributes") for name in (*_EFFECT, "net")), Field("previewed"),
        *(Field(f"preview_{name}", known_by="previewed") for name in (*_EFFECT, "net"))),
    candidate=(
        Field("descriptor", DESCRIPTOR),
        *map(Field, ("free", "size", "flops", "cost", "compute", "previewed")),
        *(Field(f"drop_{name}", known_by="previewed") for name in _EFFECT)))
"""What a controller for many data sets and hosts sees. No field is scaled by running statistics."""


def row(view: View, facts: Facts) -> dict[str, Tensor]:
    left, one = (view.horizon - view.clock).clamp(min=0), torch.ones(len(view.clock))
    shares, before = (_shares(facts, scores) for scores in (facts.scores, facts.before))
    size, flops = (facts.costs[..., place].sum(1) / most for place, most in enumerate(_host(facts)))
    price, about = _price(view, facts), facts.about
    samples = torch.zeros_like(one) if about.samples is None else about.samples.float()
    parameters = max(facts.host.params, 1)
    return {
        "progress": view.clock / view.horizon.clamp(min=1), "epochs_left": _log(left),
        "horizon": _log(view.horizon),
        "free_slots": (view.seeds.stage == SeedStage.DORMANT).float().mean(1),
        "price": _points(price), "flop_price": _points(view.flop_price.float()),
        "measured": shares.isfinite().all(1), "shares": shares, "gap": shares[:, 3] - shares[:, 0],
        "moving": (shares - before).isfinite().all(1),
        "slopes": ((shares - before) / (1 - before).clamp(min=0.02)).clamp(-1, 1),
        "size": size.log1p(), "flops": flops.log1p(), "spent": facts.spent.log1p(),
        "cost": _points(price * size + view.flop_price * facts.spent),
        "told": one * (about.samples is not None), "samples": samples.clamp(min=1).log10() / 4,
        "samples_per_parameter": (samples.clamp(min=1) / parameters).log10() / 2,
        "parameters": one * math.log10(parameters) / 6,
        "outputs": one * math.log2(max(about.outputs, 1)) / 6,
        "extent": one * math.log2(max(about.extent, 1)) / 8, "slots": one * view.seeds.stage.shape[1] / 8}


def slot(view: View, facts: Facts) -> dict[str, Tensor]:
    seeds, slots = view.seeds, view.seeds.stage.shape[1]
    planted = ((seeds.stage >= SeedStage.TRAINING) & (seeds.stage <= SeedStage.FOSSILIZED)).float()
    size, flops = (facts.costs[..., place] / most for place, most in enumerate(_host(facts)))
    chosen = facts.descriptors[torch.arange(slots), seeds.blueprint.clamp(min=0)]  # [N, S, D]
    cost = _price(view, facts)[:, None] * size
    return {
        "stage": F.one_hot(seeds.stage, len(SeedStage)), "dwell": _log(seeds.dwell),
        "position": torch.linspace(0, 1, slots).expand_as(size), "germinations": _log(seeds.germinations),
        "planted": planted, "alpha": seeds.alpha, "fading": seeds.fading, "healthy": seeds.healthy,
        "verdicts": view.verdicts, "descriptor": chosen * planted[..., None], "size": size.log1p(),
        "flops": flops.log1p(), "cost": _points(cost), "contributes": facts.contribution.known,
        "previewed": facts.preview.known,
        **_effects("", facts.contribution), **_effects("preview_", facts.preview),
        "net": _points(facts.contribution.value - cost), "preview_net": _points(facts.preview.value - cost)}


def candidate(view: View, facts: Facts) -> dict[str, Tensor]:
    shape = (len(view.clock), *facts.descriptors.shape[:2])
    size, flops = (facts.prices[..., place] / most for place, most in enumerate(_host(facts)))
    left = ((view.horizon - view.clock) / view.horizon.clamp(min=1)).clamp(min=0)
    nothing = torch.zeros(shape)
    seen = facts.candidates or Contribution(nothing, nothing, nothing > 0)
    chance = facts.about.chance[0]  # losses have no unit that all tasks share
    relative = Contribution(seen.value / chance, seen.standard_error / chance, seen.known)
    return {
        "descriptor": facts.descriptors.expand(*shape, -1),
        "free": view.verdicts[..., LifecycleOp.GERMINATE, None].expand(shape),
        "size": size.log1p().expand(shape), "flops": flops.log1p().expand(shape),
        "cost": _points(_price(view, facts)[:, None, None] * size),
        "compute": _points((view.flop_price * left)[:, None, None] * flops), "previewed": seen.known,
        **_effects("drop_", relative)}


def _effects(prefix: str, told: Contribution) -> dict[str, Tensor]:
    sure = told.value / told.standard_error.clamp(min=1e-6)
    return {f"{prefix}effect": _points(told.value), f"{prefix}sure": (sure / 3).tanh()}


def _shares(facts: Facts, scores: Tensor) -> Tensor:
    """[N, SCORES]: of the way from chance to perfect, 1 is perfect; far below chance counts as -1."""
    chance = dict(zip(SCORES, (*facts.about.chance, facts.about.chance[0]), strict=True))
    each = [(1 - column / chance[name]) if loss else (column - chance[name]) / (1 - chance[name])
            for name, loss, column in zip(SCORES, LOSSES, scores.unbind(1), strict=True)]
    return torch.stack(each, 1).clamp(-1, 1)


def _host(facts: Facts) -> tuple[int, int]:
    return max(facts.host.params, 1), max(facts.host.flops, 1)


def _price(view: View, facts: Facts) -> Tensor:
    """[N]: what as many parameters as the host has would cost, in score."""
    return view.price.float() * facts.host.params


def _points(score: Tensor) -> Tensor:
    """A difference of scores in points, about -1.5 to 1.5: linear near none, logarithmic beyond one."""
    return (100 * score).asinh() / 3


def _log(count: Tensor) -> Tensor:
    """Counts of epochs, about 0 to 1."""
    return torch.log1p(count.float()) / math.log(31)
