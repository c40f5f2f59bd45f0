"""`esper.depths`: what a model of another depth has and costs, beside that model."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from tests.test_shallow import Deep, Mixed


def flops(model: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops()


def test_it_tells_what_models_of_these_depths_are() -> None:
    x, y = torch.randn(10, 6), torch.arange(10) % 3
    table = esper.depths(Deep(4), example=(x, y), steps=1000)
    assert [depth.blocks for depth in table] == [1, 2, 4, 8, 16]
    assert [depth.blocks for depth in table if depth.yours] == [4]
    whole = flops(Deep(4), x)
    for depth in table:
        real = Deep(depth.blocks)
        assert depth.params == sum(p.numel() for p in real.parameters())
        assert depth.steps == round(1000 * whole / flops(real, x))
        assert depth.targets == pytest.approx(1000 * whole / flops(real, x) * 10 / depth.params)


def test_stages_scale_together_and_the_first_block_of_a_list_stays() -> None:
    table = esper.depths(Mixed(5), example=torch.randn(4, 6), steps=100)
    assert [depth.blocks for depth in table] == [2, 4, 8, 16, 32]
    assert [depth.params for depth in table[:4]] == [sum(p.numel() for p in Mixed(n + 1).parameters()) for n in (1, 2, 4, 8)]


@pytest.mark.parametrize(("steps", "blocks"), [(1, 1), (200, 1), (500, 2), (1000, 4), (5000, 8), (100_000, 16)])
def test_the_deepest_that_sees_twenty_for_each_parameter_is_best(steps: int, blocks: int) -> None:
    table = esper.depths(Deep(4), example=torch.randn(10, 6), steps=steps)
    assert table.best.blocks == blocks
    enough = [depth.blocks for depth in table if depth.targets >= 20]
    assert blocks == max(enough, default=1)
    shown = [line for line in str(table).splitlines() if "take this one" in line]
    assert len(shown) == 1
    assert shown[0].split()[0] == str(blocks)


class Named(Deep):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids)


@pytest.mark.parametrize(("example", "targets", "each"), [
    (torch.randn(10, 6), None, 10), ((torch.randn(10, 6), torch.zeros(10, 5).long()), None, 50),
    ((torch.randn(10, 6), torch.zeros(10, 5)), None, 10), ({"input_ids": torch.randn(10, 6), "labels": torch.zeros(10, 7).long()}, None, 70),
    ({"input_ids": torch.randn(10, 6)}, None, 10), (torch.randn(10, 6), 640, 640)])
def test_targets_are_the_labels_of_a_batch(example: Any, targets: int | None, each: int) -> None:
    (yours,) = (depth for depth in esper.depths(Named(4), example=example, steps=50, targets=targets) if depth.yours)
    assert yours.targets == pytest.approx(50 * each / yours.params)


def test_nothing_is_trained_or_drawn() -> None:
    model = Deep(4).train()
    before = [value.clone() for value in model.state_dict().values()]
    drawn = torch.get_rng_state()
    esper.depths(model, example=torch.randn(10, 6, generator=torch.Generator()), steps=50)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("options", "sentence"), [
    ({"steps": 0}, "steps is a whole number of at least 1"), ({"steps": 9, "targets": 0}, "a batch has at least one target; got 0"),
    ({"steps": 9, "blocks": ["first"]}, "'first' is no submodule that runs once")])
def test_what_cannot_be_meant_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(esper.EsperError, match=sentence):
        esper.depths(Deep(4), example=torch.randn(10, 6), **options)
