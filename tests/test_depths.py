"""`esper.depths`: what a model of another depth has and costs, beside that model."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from tests.models import Block, Blocks


class Deep(Blocks):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(blocks))


class Widen(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.way, self.map = nn.Linear(before, after) if before != after else nn.Identity(), nn.Linear(before, after)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.way(h) + torch.relu(self.map(h))


class Mixed(nn.Module):
    """Two stages of another width, each with a first block that changes it, and a layer alone."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.stages = nn.Sequential(*(nn.Sequential(Widen(c // 2, c), *(Widen(c, c) for _ in range(blocks - 1))) for c in (8, 16)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.first(x)))


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
    ({"input_ids": torch.randn(10, 6)}, None, 10), (torch.randn(10, 6), 640, 640),
    ((torch.randn(10, 6), torch.tensor([1, -100] * 5)), None, 5)])
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


class Twice(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(x)


@pytest.mark.parametrize(("model", "sentence"), [
    (Twice(2), "no repeated blocks were found"), (nn.Linear(6, 3), "no repeated blocks were found"),
    (nn.Linear(5, 3), "the model does not run on the example"), (Deep(4).requires_grad_(False), "this model trains nothing")])
def test_models_without_blocks_are_one_sentence(model: nn.Module, sentence: str) -> None:
    with pytest.raises(esper.EsperError, match=sentence):
        esper.depths(model, example=torch.randn(10, 6), steps=9)


@pytest.mark.parametrize(("options", "sentence"), [
    ({"steps": 0}, "steps is a whole number of at least 1"), ({"steps": 9, "targets": 0}, "a batch has at least one target; got 0"),
    ({"steps": 9, "blocks": ["first"]}, "'first' is no submodule that runs once"),
    ({"steps": 9, "blocks": "blocks.9"}, "the model has no submodule 'blocks.9'"), ({"steps": 9, "blocks": []}, "no repeated blocks were found")])
def test_what_cannot_be_meant_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(esper.EsperError, match=sentence):
        esper.depths(Deep(4), example=torch.randn(10, 6), **options)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.narrow(torch.relu(self.wide(self.norm(h))))


def trained(blocks: int, steps: int, seed: int) -> float:
    """Loss of a residual net on new samples of a smooth function."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*(Residual() for _ in range(blocks))), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def loss(samples: int) -> torch.Tensor:
        x = torch.randn(samples, 8)
        return nn.functional.mse_loss(model(x), torch.sin(2 * x[:, :1] * x[:, 1:2]) + x[:, 2:3].abs() * x[:, 3:4])

    for _ in range(steps):
        optimizer.zero_grad()
        loss(64).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return loss(4000).item()


def test_the_depth_it_names_is_better_for_the_same_flops() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*(Residual() for _ in range(8))), nn.Linear(16, 1))
    best = esper.depths(model, example=torch.randn(64, 8), steps=100).best
    assert best.blocks < 8
    for seed in range(2):
        assert trained(best.blocks, best.steps, seed) < 0.8 * trained(8, 100, seed)
