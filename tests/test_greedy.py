"""Preview-greedy: it plants the better of two, waits below its threshold, keeps what pays and prunes what does not."""

import dataclasses

import pytest
import torch
from experiments.orchard import BLUEPRINTS, FAMILY, WORTH, Orchard
from torch import Tensor

from esper.leyline import Contribution, EsperError
from esper.leyline.codec import from_dict, to_dict
from esper.simic.proof.baselines import Tuned, play_greedy, tune_greedy
from esper.simic.proof.evaluator import Evaluator
from esper.tamiyo import Greedy, GreedyConfig, Wait
from esper.tamiyo.greedy import cost
from esper.tolaria import EnvConfig, Episodes, PreviewConfig, play

LONG = dataclasses.replace(FAMILY, horizons=(16,))


class Shown(Orchard):
    """Previews are a table [S, K]: of drops in loss, or what each is worth."""

    table: Tensor | None = None

    def _preview(self) -> None:
        value = WORTH[self.scenarios.kind] if self.table is None else self.table.expand(self.rows, -1, -1)
        self.candidates = Contribution(value.clone(), torch.zeros_like(value), torch.ones_like(value).bool())


def promised(**drops: float) -> Tensor:
    """In both slots, but half as much in the second."""
    return torch.tensor([[share * drops.get(name, 0.0) for name in BLUEPRINTS] for share in (1.0, 0.5)])


def grown(table: Tensor | None, config: GreedyConfig, price: float = 0.0, rows: int = 6) -> Episodes:
    env = Shown(EnvConfig(LONG, previews=PreviewConfig()), rows)
    env.table = table
    drawn = LONG.scenarios(rows)
    return play(env, Greedy(config), dataclasses.replace(drawn, price=torch.full_like(drawn.price, price)))


def births(done: Episodes) -> set[tuple[int, str | None]]:
    return {(d.slot, d.blueprint) for d in done.decisions() if d.op == "GERMINATE"}


def test_it_plants_the_better_of_two_and_waits_below_its_threshold() -> None:
    table = promised(norm=0.05, glu=0.2)
    assert births(grown(table, GreedyConfig(1.0, floor=0.1))) == {(0, "glu")}
    assert births(grown(table, GreedyConfig(1.0, floor=0.1), price=1e-3)) == set(), "it costs more than it promises"
    assert births(grown(table, GreedyConfig(0.25, floor=0.1), price=2e-3)) == {(0, "norm")}, "the smaller one promises more for its price"
    assert births(grown(table, GreedyConfig(2.1, floor=0.1))) == set()
    assert births(grown(table, GreedyConfig(0.9, floor=0.1, most=2))) == {(0, "glu"), (1, "glu")}
    assert births(grown(table, GreedyConfig(1.1, floor=0.1, most=2))) == {(0, "glu")}, "the second slot promises half as much"


def test_the_first_epoch_is_watched() -> None:
    done = grown(promised(glu=0.2), GreedyConfig(0.1))
    assert {d.epoch for d in done.decisions() if d.op == "GERMINATE"} == {1}


def test_it_keeps_what_pays_and_prunes_what_does_not() -> None:
    """Low rank is worth 0.15 in the first kind and does harm in the others, whatever a preview said."""
    done = grown(promised(low_rank=0.5), GreedyConfig(0.1), rows=24)
    kind = done.scenarios.kind
    kept, pruned = ({d.scenario for d in done.decisions() if d.op == op} for op in ("FOSSILIZE", "PRUNE"))
    assert kept == set((kind == 0).nonzero().flatten().tolist())
    assert pruned == set((kind > 0).nonzero().flatten().tolist())
    assert len(births(done)) == 1, "once in every slot"
    dear = grown(promised(low_rank=0.5), GreedyConfig(0.1), price=0.01, rows=24)
    assert "FOSSILIZE" not in {d.op for d in dear.decisions()}


def test_what_it_costs_by_hand() -> None:
    env = Shown(EnvConfig(LONG), 2)
    drawn = LONG.scenarios(2)
    env.reset(dataclasses.replace(drawn, price=torch.tensor([0.0, 1e-3]), flop_price=torch.tensor([0.1, 0.0])))
    env.step(Wait()(env.view()))
    view = env.view()
    assert view.facts is not None
    host, each = view.facts.host.flops, torch.tensor([[[100.0, 50.0]], [[100.0, 50.0]]])
    torch.testing.assert_close(cost(view, view.facts, each)[:, 0], torch.tensor([0.1 * 50 / host * 15 / 16, 0.1]))


def test_who_sees_no_preview_waits_and_impossible_settings_are_refused() -> None:
    drawn = FAMILY.scenarios(3)
    assert play(Orchard(FAMILY, 3), Greedy(GreedyConfig(0.1)), drawn).decisions() == []
    with pytest.raises(EsperError, match="one to each"):
        play(Orchard(FAMILY, 3), Greedy(*[GreedyConfig(0.1)] * 2), drawn)
    for wrong in ({"floor": 0.0}, {"most": 0}, {"every": 0}, {"steps": 0}):
        with pytest.raises(EsperError, match="preview-greedy needs"):
            GreedyConfig(0.1, **wrong)
    assert from_dict(GreedyConfig, to_dict(GreedyConfig(0.5)), "a file") == GreedyConfig(0.5)


def test_it_is_tuned_on_several_families_at_once_and_pays_for_its_previews() -> None:
    """Where previews tell what seeds are worth, it gains more than the first settings that are tried."""
    other = dataclasses.replace(FAMILY, name="another", horizons=(12,))
    evaluators = [Evaluator(family, make=Shown) for family in (FAMILY, other)]
    best, used = tune_greedy(evaluators, 240, 64, lambda *told: None)
    assert 240 <= used < 420
    drawn = FAMILY.scenarios(96, "validation")
    bare = evaluators[0].play(Wait(), drawn).utility()
    tuned = Tuned("orchard", "", {}, greedy=best)
    assert float((play_greedy(evaluators[0], tuned, drawn).utility() - bare).mean()) > 0.08
    real = play_greedy(Evaluator(FAMILY, make=Orchard), tuned, drawn)
    assert bool((real.spent > 0.05).all()), "real previews cost FLOPs"
    with pytest.raises(EsperError, match="tune them again"):
        play_greedy(evaluators[0], dataclasses.replace(tuned, greedy=None), drawn)
