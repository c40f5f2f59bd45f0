"""From a view to numbers: every field of the observation, and running statistics to scale them.

Legend: N rows, S slots, K blueprints, D numbers of a descriptor.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline import TEMPOS, AlphaCurve, Contribution, EsperError, LifecycleOp, SeedStage, Style
from esper.leyline.views import SCORES, Facts, Field, Observation, ObservationSpec, View
from esper.tamiyo import universal
from esper.tamiyo.universal import DESCRIPTOR, UNIVERSAL

EPOCHS = 32  # that are told apart; later ones are as the last
_SIZES = (Field("size", scaled=True), Field("flops", scaled=True))
OBSERVATION = ObservationSpec(
    row=(
        Field("epoch", EPOCHS), *map(Field, ("progress", "epochs_left", "horizon", "free_slots")),
        Field("price", scaled=True), Field("flop_price", scaled=True),
        Field("measured"), Field("scores", len(SCORES), True, "measured", "epoch"),
        Field("gap", 1, True, "measured", "epoch"),
        Field("moving"), Field("slopes", len(SCORES), True, "moving", "epoch"),
        *_SIZES, Field("spent", scaled=True), Field("cost", scaled=True)),
    slot=(
        Field("stage", len(SeedStage)),
        *map(Field, ("dwell", "position", "germinations", "planted", "alpha", "target", "ramp_left",
                     "ramp_direction", "fading", "healthy", "tempo")),
        Field("style", len(Style)), Field("curve", len(AlphaCurve)), Field("verdicts", len(LifecycleOp)),
        Field("descriptor", DESCRIPTOR), *_SIZES, Field("cost", scaled=True),
        Field("contributes"), Field("contribution", 1, True, "contributes"),
        Field("contribution_error", 1, True, "contributes"),
        Field("previewed"), Field("preview", 1, True, "previewed"),
        Field("preview_error", 1, True, "previewed")),
    candidate=(
        Field("descriptor", DESCRIPTOR), Field("free"), *_SIZES, Field("cost", scaled=True),
        Field("previewed"), Field("drop", 1, True, "previewed"), Field("drop_error", 1, True, "previewed")))
"""What Tamiyo sees by default."""


def observe(view: View, spec: ObservationSpec = OBSERVATION) -> Observation:
    """float32 observations of all rows, as the spec names them, one of `EYES`; not scaled yet."""
    if view.facts is None:
        raise EsperError("this view has no facts: nothing measures here, so there is nothing to observe")
    makers = next(eyes.makers for eyes in EYES.values() if eyes.spec == spec)
    parts = zip(vars(spec).values(), makers, strict=True)
    return Observation(*(_joined(fields, values(view, view.facts)) for fields, values in parts))


def _joined(fields: tuple[Field, ...], values: dict[str, Tensor]) -> Tensor:
    """Columns in the order of the spec; what was not measured is zero."""
    assert set(values) == {field.name for field in fields}
    columns = []
    for field in fields:
        value = values[field.name].float()
        value = value.unsqueeze(-1) if field.width == 1 else value
        known = values[field.known_by].bool().unsqueeze(-1) if field.known_by else None
        columns.append(value if known is None else torch.where(known, value, 0.0))
    return torch.cat(columns, -1)


def _row(view: View, facts: Facts) -> dict[str, Tensor]:
    left, scores = (view.horizon - view.clock).clamp(min=0), facts.scores
    size, flops = _shares(facts, *(each.sum(1) for each in facts.costs.unbind(-1)))
    return {
        "epoch": F.one_hot(view.clock.clamp(max=EPOCHS - 1), EPOCHS), "horizon": _log(view.horizon),
        "progress": view.clock / view.horizon.clamp(min=1), "epochs_left": _log(left),
        "free_slots": (view.seeds.stage == SeedStage.DORMANT).float().mean(1),
        "price": _price(view, facts), "flop_price": view.flop_price,
        "measured": scores.isfinite().all(1), "scores": scores, "gap": scores[:, 0] - scores[:, 3],
        "moving": (scores - facts.before).isfinite().all(1), "slopes": scores - facts.before,
        "size": size, "flops": flops, "spent": facts.spent,
        "cost": _price(view, facts) * size + view.flop_price * facts.spent}


def _slot(view: View, facts: Facts) -> dict[str, Tensor]:
    seeds, slots = view.seeds, view.seeds.stage.shape[1]
    planted = ((seeds.stage >= SeedStage.TRAINING) & (seeds.stage <= SeedStage.FOSSILIZED)).float()
    size, flops = _shares(facts, *facts.costs.unbind(-1))
    ramping, left = seeds.stage == SeedStage.BLENDING, seeds.ramp_length - seeds.ramp_at
    chosen = facts.descriptors[torch.arange(slots), seeds.blueprint.clamp(min=0)]  # [N, S, D]
    evidence = {"contribution": facts.contribution, "preview": facts.preview}
    return {
        "stage": F.one_hot(seeds.stage, len(SeedStage)), "dwell": _log(seeds.dwell),
        "germinations": _log(seeds.germinations), "position": torch.linspace(0, 1, slots).expand_as(size),
        "planted": planted, "alpha": seeds.alpha, "target": seeds.target * planted,
        "ramp_left": torch.where(ramping, left.clamp(min=0) / max(TEMPOS), 0.0),
        "ramp_direction": torch.where(ramping, (seeds.target - seeds.ramp_from).sign(), 0.0),
        "fading": seeds.fading, "healthy": seeds.healthy, "tempo": seeds.tempo / max(TEMPOS) * planted,
        "style": F.one_hot(seeds.style, len(Style)) * planted[..., None],
        "curve": F.one_hot(seeds.curve, len(AlphaCurve)) * ramping[..., None], "verdicts": view.verdicts,
        "descriptor": chosen * planted[..., None], "size": size, "flops": flops,
        "cost": _price(view, facts)[:, None] * size,
        "contributes": facts.contribution.known, "previewed": facts.preview.known,
        **{name: part.value for name, part in evidence.items()},
        **{f"{name}_error": part.standard_error for name, part in evidence.items()}}


def _candidate(view: View, facts: Facts) -> dict[str, Tensor]:
    shape = (len(view.clock), *facts.descriptors.shape[:2])
    (size, flops), nothing = _shares(facts, *facts.prices.unbind(-1)), torch.zeros(shape)
    seen = facts.candidates or Contribution(nothing, nothing, nothing > 0)
    return {
        "descriptor": facts.descriptors.expand(*shape, -1),
        "free": view.verdicts[..., LifecycleOp.GERMINATE, None].expand(shape), "size": size.expand(shape),
        "flops": flops.expand(shape), "cost": _price(view, facts)[:, None, None] * size,
        "previewed": seen.known, "drop": seen.value, "drop_error": seen.standard_error}


class Eyes(NamedTuple):
    """A way to see: the fields, and what makes each part of them."""

    spec: ObservationSpec
    makers: tuple[Callable[[View, Facts], dict[str, Tensor]], ...]


EYES = {"family": Eyes(OBSERVATION, (_row, _slot, _candidate)),
        "universal": Eyes(UNIVERSAL, (universal.row, universal.slot, universal.candidate))}
"""By name: for hosts of one family, scaled by what these show; and for any host on any task."""


def _shares(facts: Facts, params: Tensor, flops: Tensor) -> tuple[Tensor, Tensor]:
    """Of what the host has."""
    return params / max(facts.host.params, 1), flops / max(facts.host.flops, 1)


def _price(view: View, facts: Facts) -> Tensor:
    """[N]: what as many parameters as the host has would cost, in score."""
    return view.price.float() * facts.host.params


def _log(count: Tensor) -> Tensor:
    """Counts of epochs, about 0 to 1."""
    return torch.log1p(count.float()) / math.log(31)


class Normaliser:
    """Running mean and spread of the scaled fields; flags and shares pass through, what was not measured is
    zero. Fields that are kept by another have statistics for each of its C values; a value that was never met
    is taken for the last one below it that was, in the one-hot too."""

    def __init__(self, spec: ObservationSpec, device: torch.device | str = "cpu", limit: float = 5.0) -> None:
        """Scaled values are cut at +-limit."""
        self.spec, self.limit = spec, limit
        self.stats: list[Tensor] = []
        self.to(device)
        self.stats = [torch.zeros(3, part.values, len(part.scaled), dtype=torch.float64, device=device)
                      for part in self.parts]  # [3, C, columns] each: count, mean, sum of squares

    def to(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.parts = [_Columns.of(part, self.device) for part in vars(self.spec).values()]
        self.stats = [stat.to(device) for stat in self.stats]

    def update(self, observation: Observation, rows: Tensor | None = None) -> list[Tensor]:
        """Count the rows [...] (bool, None is all) of a raw observation; the others may hold anything. What
        was counted can be folded in elsewhere as well."""
        kept = Observation(*(values if rows is None else values[rows] for values in observation))
        if not bool(torch.stack([values.isfinite().all() for values in kept]).all()):
            self._refuse(kept)  # one number that is none would stay in the statistics for ever
        counted = []
        for part, values in zip(self.parts, kept, strict=True):
            flat = values.reshape(-1, values.shape[-1]).double()
            known, one_hot = part.known(flat), part.one_hot(flat)
            count = part.sums(known.double(), one_hot)
            mean = part.sums(flat * known, one_hot) / count.clamp(min=1)
            counted.append(torch.stack([count, mean, part.sums(
                ((flat - part.at(mean, one_hot)) * known) ** 2, one_hot)]))
        self.fold(counted)
        return counted

    def fold(self, counted: Sequence[Tensor]) -> None:
        """Add statistics [3, C, columns] of each part: count, mean and sum of squares."""
        for stat, (count, mean, square) in zip(self.stats, counted, strict=True):
            total = (stat[0] + count).clamp(min=1)
            shift = mean - stat[1]
            stat[2] += square + shift**2 * stat[0] * count / total
            stat[1] += shift * count / total
            stat[0] += count

    def _refuse(self, kept: Observation) -> None:
        for part, values in kept._asdict().items():
            names = [field.name for field in getattr(self.spec, part) for _ in range(field.width)]
            for name, column in zip(names, values.unbind(-1), strict=True):
                if not bool(column.isfinite().all()):
                    raise EsperError(f"the {part} field {name!r} of an observation is not finite; "
                                     "nothing of it was counted")

    def __call__(self, observation: Observation) -> Observation:
        return Observation(*map(self._scaled, self.parts, self.stats, observation))

    def _scaled(self, part: "_Columns", stat: Tensor, values: Tensor) -> Tensor:
        spread = (stat[2] / stat[0].clamp(min=1)).sqrt()
        ready = (stat[0] > 1) & (spread > 1e-8)
        order = torch.arange(part.values, device=values.device)[:, None]
        met = torch.where(ready, order, 0).cummax(0).values  # [C, columns] the last value below that was met
        mean = torch.where(ready, stat[1], 0.0).gather(0, met).to(values.dtype)
        scale = torch.where(ready, spread, 1.0).gather(0, met).to(values.dtype)
        if (one_hot := part.one_hot(values)) is not None:
            last = torch.where((stat[0] > 1)[:, part.by].any(1), order[:, 0], 0).cummax(0).values
            place = torch.where(last > 0, last, order[:, 0])  # before the first that was met, itself
            one_hot = one_hot @ F.one_hot(place, part.values).to(one_hot.dtype)
            before, behind = values[..., : part.start], values[..., part.start + part.values :]
            values = torch.cat([before, one_hot, behind], -1)
        normal = ((values - part.at(mean, one_hot)) / part.at(scale, one_hot)).clamp(-self.limit, self.limit)
        return torch.where(part.scaled, normal * part.known(values), values)

    def tensors(self) -> dict[str, Tensor]:
        return {name: stat.cpu() for name, stat in zip(Observation._fields, self.stats, strict=True)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for stat, name in zip(self.stats, Observation._fields, strict=True):
            stat.copy_(tensors[name])


class _Columns(NamedTuple):
    """What is known of every column of a part."""

    scaled: Tensor  # [columns] bool
    flag: Tensor  # [columns] the column that says whether it was measured, or -1
    by: Tensor  # [columns] bool: statistics are kept for each value of the one-hot
    start: int  # its first column
    values: int  # C, 1 where there is none

    @classmethod
    def of(cls, fields: tuple[Field, ...], device: torch.device) -> "_Columns":
        each = [field for field in fields for _ in range(field.width)]
        starts = {field.name: each.index(field) for field in reversed(each)} | {"": -1}
        key = next((field.by for field in fields if field.by), "")
        told = ([f.scaled for f in each], [starts[f.known_by] for f in each], [bool(f.by) for f in each])
        scaled, flag, by = torch.tensor(told, dtype=torch.int64, device=device)
        start, values = (starts[key], sum(f.name == key for f in each)) if key else (0, 1)
        return cls(scaled.bool(), flag, by.bool(), start, values)

    def known(self, values: Tensor) -> Tensor:
        return (values[..., self.flag.clamp(min=0)] > 0) | (self.flag < 0)

    def one_hot(self, values: Tensor) -> Tensor | None:
        return values[..., self.start : self.start + self.values] if self.values > 1 else None

    def sums(self, values: Tensor, one_hot: Tensor | None) -> Tensor:
        """[C, columns] of values [n, columns]: for each value of the one-hot, or all in the first place."""
        whole = F.pad(values.sum(0)[None], (0, 0, 0, self.values - 1))
        return whole if one_hot is None else torch.where(self.by, one_hot.T @ values, whole)

    def at(self, table: Tensor, one_hot: Tensor | None) -> Tensor:
        """Of a table [C, columns], what each sample's columns belong to."""
        return table[0] if one_hot is None else torch.where(self.by, one_hot @ table, table[0])
