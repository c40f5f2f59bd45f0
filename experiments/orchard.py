"""An environment with known answers: lifecycle, gates, masks, views and costs are real, training and scores are a table.

Which seed is worth growing depends on the hidden kind, and the training loss tells the kind after the first epoch.

Legend: N rows, S slots, K blueprints.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from esper.kasmina import Host, blueprints_for
from esper.leyline import SCORES, Contribution, SeedStage, View
from esper.leyline.keys import mix, uniform
from esper.tamiyo import Planned
from esper.tolaria import Evidence, Family, Kind, MorphogeneticEnv, Scenarios, Scores

FAMILY = Family("orchard", "digits", Host("mlp", inputs=(64,), widths=(16, 16)), (Kind("dry"), Kind("wet"), Kind("stony")),
                prices=(0.0, 1e-4), horizons=(10,))
BLUEPRINTS = blueprints_for("mlp")
TOLD = 0.4
"""By which the training losses of two kinds differ."""


def _table() -> Tensor:
    """[kinds, S, K]: what a seed adds to the score. Most do harm."""
    worth = torch.full((3, 2, len(BLUEPRINTS)), -0.03)
    worth[..., BLUEPRINTS.index("noop")] = 0.0
    for kind, slot, name, value in ((0, 0, "low_rank", 0.15), (0, 1, "norm", 0.06), (1, 1, "glu", 0.15), (1, 0, "norm", 0.04)):
        worth[kind, slot, BLUEPRINTS.index(name)] = value
    return worth


WORTH = _table()


class Orchard(MorphogeneticEnv):
    """Nothing trains. Pass it as `make` wherever environments are made."""

    def train(self) -> Tensor:
        self.population.life.healthy |= self.population.life.planted
        return 1 + TOLD * self.scenarios.kind.float()

    def evaluate(self, samples: Iterator[tuple[Tensor, Tensor]]) -> Evidence:
        life = self.population.life
        slots = torch.arange(self.spec.slots)
        each = WORTH[self.scenarios.kind[:, None], slots, life.blueprint.clamp(min=0)] * life.planted  # [N, S]
        fossil, error = life.at(SeedStage.FOSSILIZED), torch.full(each.shape, 0.01)
        bare = 0.5 + 0.1 * uniform(mix(self.scenarios.key, 31), 1)[:, 0].float()

        def scores(alpha: Tensor) -> Scores:
            right = bare + (alpha * each).sum(1)
            return Scores(1 - right, right, right.clone())

        on = life.planted & (life.alpha > 0)
        contribution = Contribution(torch.where(on, life.alpha * each, 0.0), error, on)
        preview = Contribution(torch.where(life.incubating, life.target * each, 0.0), error, life.incubating)
        on_off_kept = (scores(life.alpha * kept) for kept in (torch.tensor(1.0), torch.tensor(0.0), fossil))
        return Evidence(*on_off_kept, contribution, preview)


def _params(env: MorphogeneticEnv) -> Tensor:
    return torch.tensor([[float(p.cost.params) for p in slot] for slot in env.population.prototypes])


def net(scenarios: Scenarios, env: MorphogeneticEnv) -> Tensor:
    """[N, S, K]: worth less price."""
    return WORTH[scenarios.kind] - scenarios.price[:, None, None] * _params(env)


def optimum(scenarios: Scenarios, env: MorphogeneticEnv) -> Tensor:
    """[N]: the best utility there is."""
    return net(scenarios, env).amax(2).sum(1)


class Gardener:
    """Decides as well as one can, from what every policy may see: it reads the kind off the training loss."""

    def __init__(self, env: MorphogeneticEnv) -> None:
        self.params = _params(env)

    def __call__(self, view: View) -> Tensor:
        assert view.facts is not None
        loss = view.facts.scores[:, SCORES.index("train_loss")]
        kind = ((loss.nan_to_num(1.0) - 1) / TOLD).round().long()
        best = (WORTH[kind] - view.price[:, None, None] * self.params).max(2)
        known = (view.clock > 0)[:, None] & (best.values > 0)
        return Planned(torch.where(known, 0, -1), best.indices)(view)
