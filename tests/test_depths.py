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
    assert [depth.stacks for depth in table.every] == [{"blocks": n} for n in range(1, 17)]
    assert (table.yours.blocks, table.yours.steps, table.targets) == (4, 1000, 10)
    whole = flops(Deep(4), x)
    for depth in table.every:
        real = Deep(depth.blocks)
        assert depth.params == sum(p.numel() for p in real.parameters())
        assert depth.steps == round(1000 * whole / flops(real, x))
        assert depth.targets == pytest.approx(1000 * whole / flops(real, x) * 10 / depth.params)


def test_stages_scale_together_and_the_first_block_of_a_list_stays() -> None:
    x = torch.randn(4, 6)
    table = esper.depths(Mixed(5), example=x, steps=100)
    assert [list(depth.stacks.values()) for depth in table.every] == [[n, n] for n in range(1, 21)]
    for depth in table.every:
        real = Mixed(depth.blocks // 2)
        assert depth.params == sum(p.numel() for p in real.parameters())
        assert depth.steps == round(100 * flops(Mixed(5), x) / flops(real, x))


def test_one_block_can_become_several() -> None:
    table = esper.depths(Deep(1), example=torch.randn(10, 6), steps=1000)
    assert [depth.blocks for depth in table.every] == [1, 2, 3, 4]
    assert table.yours.blocks == 1


def table_of(model: nn.Module, **options: Any) -> Any:
    return esper.depths(model, example=torch.randn(10, 6), **{"steps": 1000} | options)


def test_what_only_seems_to_be_a_block_of_its_own_is_counted_once() -> None:
    """A teacher that nobody registered, blocks under two names, and weights that all of them share."""
    plain, odd, shared = Deep(4), Deep(4), Deep(4)
    odd.body, odd.teacher = nn.Sequential(*odd.blocks), [Deep(3)]  # type: ignore[assignment]
    odd.register_forward_hook(lambda module, args, output: output + module.teacher[0](*args))
    one, other = table_of(plain), table_of(odd)
    assert [depth.params for depth in one.every] == [depth.params for depth in other.every]
    more = flops(Deep(3), torch.randn(10, 6))
    whole, least = flops(plain, torch.randn(10, 6)), flops(Deep(1), torch.randn(10, 6))
    assert other.every[0].steps == round(1000 * (whole + more) / (least + more))
    for block in shared.blocks:
        block.map = shared.blocks[0].map
    assert [depth.params for depth in table_of(shared).every] == [shared_size(n) for n in range(1, 17)]


def shared_size(blocks: int) -> int:
    net = Deep(blocks)
    for block in net.blocks:
        block.map = net.blocks[0].map
    return sum(p.numel() for p in net.parameters())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.lstm(h)[0]


@pytest.mark.parametrize(("steps", "blocks"), [(1, 1), (1000, 1), (3000, 2), (20_000, 4), (100_000, 8), (1_000_000, 16)])
def test_the_deepest_that_sees_enough_for_each_parameter_is_best(steps: int, blocks: int) -> None:
    table = esper.depths(Deep(4), example=torch.randn(10, 6), steps=steps)
    assert table.best.blocks == blocks
    assert [depth.enough for depth in table.every] == [80 * depth.blocks for depth in table.every]
    enough = [depth.blocks for depth in table.every if depth.targets >= depth.enough]
    assert blocks == max(enough, default=1)
    shown = [line for line in str(table).splitlines() if line.endswith(("best", "best, or deeper"))]
    assert len(shown) == 1
    assert shown[0].split()[0] == str(blocks)
    assert ("or deeper" in shown[0]) == (blocks == 16)
    assert all(len(line) <= 80 for line in str(table).splitlines())


@pytest.mark.parametrize(("make", "example", "width"), [
    (lambda: nn.TransformerEncoderLayer(24, 2, 48, batch_first=True), torch.randn(5, 7, 24), 24),
    (lambda: nn.TransformerEncoderLayer(24, 2, 48), torch.randn(7, 5, 24), 24),
    (lambda: nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()), torch.randn(5, 12, 9, 9), 12),
    (lambda: nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)), torch.randn(5, 9, 9, 12), 12),
    (lambda: nn.Sequential(nn.Conv1d(12, 12, 3, padding=1), nn.ReLU()), torch.randn(5, 12, 40), 12)])
def test_a_narrow_block_asks_for_more(make: Any, example: torch.Tensor, width: int) -> None:
    """Wherever its channels are."""
    table = esper.depths(nn.Sequential(make(), make(), make()), example=example, steps=10)
    assert [depth.enough for depth in table.every[:3]] == pytest.approx([640 / width, 1280 / width, 1920 / width])


def test_stages_ask_together() -> None:
    table = esper.depths(Mixed(5), example=torch.randn(4, 6), steps=100)
    assert table.yours.enough == pytest.approx(640 * (5 / 8 + 5 / 16))


class Named(Deep):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids)


@pytest.mark.parametrize(("example", "targets", "each"), [
    (torch.randn(10, 6), None, 10), ((torch.randn(10, 6), torch.zeros(10, 5).long()), None, 50),
    ((torch.randn(10, 6), torch.zeros(10, 5)), None, 10), ({"input_ids": torch.randn(10, 6), "labels": torch.zeros(10, 7).long()}, None, 70),
    ({"input_ids": torch.randn(10, 6)}, 320, 320), (torch.randn(10, 6), 640, 640),
    ((torch.randn(10, 6), torch.tensor([1, -100] * 5)), None, 5)])
def test_targets_are_the_labels_of_a_batch(example: Any, targets: int | None, each: int) -> None:
    yours = esper.depths(Named(4), example=example, steps=50, targets=targets).yours
    assert yours.targets == pytest.approx(50 * each / yours.params)


class Counting(Deep):
    """Draws and counts in evaluation mode, too."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x + torch.randn_like(x))


def test_nothing_is_trained_drawn_or_left_behind() -> None:
    model, example = Counting(4).train(), torch.randn(10, 6)
    before = [value.clone() for value in model.state_dict().values()]
    drawn = torch.get_rng_state()
    esper.depths(model, example=example, steps=50)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert all(module.training and not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


class Twice(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(x)


FROZEN = Deep(4)
FROZEN.blocks.requires_grad_(False)


@pytest.mark.parametrize(("model", "sentence"), [
    (Twice(2), "no repeated blocks were found"), (nn.Linear(6, 3), "no repeated blocks were found"),
    (nn.Linear(5, 3), "the model does not run on the example"), (FROZEN, "blocks.0 is frozen; depths is for models that learn from scratch"),
    (nn.Sequential(nn.ModuleList([Recurrent(), Recurrent()])[0], Recurrent()), "PyTorch counts no FLOPs in these blocks"),
    (Deep, "depths takes an nn.Module; got a type")])
def test_models_it_cannot_tell_of_are_one_sentence(model: Any, sentence: str) -> None:
    with pytest.raises(esper.EsperError, match=sentence):
        table_of(model)


@pytest.mark.parametrize(("options", "sentence"), [
    ({"steps": 0}, "steps is a whole number of at least 1"), ({"steps": 2.5}, "steps is a whole number"),
    ({"targets": 0}, "a step has at least one target; got 0"), ({"targets": "640"}, "a step has at least one target; got '640'"),
    ({"blocks": ["first"]}, "'first' is no block"), ({"blocks": "blocks.9"}, "the model has no submodule 'blocks.9'"),
    ({"blocks": []}, "no repeated blocks were found"), ({"blocks": ["blocks.0", "blocks.0.map"]}, "'blocks.0.map' is no block")])
def test_what_cannot_be_meant_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(esper.EsperError, match=sentence):
        table_of(Deep(4), **options)


@pytest.mark.parametrize(("example", "sentence"), [
    ({"input_ids": torch.randn(10, 6)}, "the example has no labels; say with targets="), (None, "the model does not run on the example"),
    (3, "the model does not run on the example"), ((torch.randn(10, 6), torch.full((10,), -100)), "a step has at least one target; got 0")])
def test_examples_that_tell_too_little_are_one_sentence(example: Any, sentence: str) -> None:
    with pytest.raises(esper.EsperError, match=sentence):
        esper.depths(Named(4), example=example, steps=9)


def test_models_of_hugging_face_are_what_their_configurations_build() -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(50, (4, 8))
    sizes = {"vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}

    def speaker(layers: int) -> nn.Module:
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_layer=layers))

    def seeing(layers: int) -> nn.Module:
        return transformers.ResNetForImageClassification(transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[layers, layers], layer_type="basic", num_labels=2))

    pictures = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    for build, example in ((speaker, {"input_ids": tokens, "labels": tokens}), (seeing, pictures)):
        table = esper.depths(build(3), example=example, steps=500)
        for layers in (2, 3, 6):
            (depth,) = (each for each in table.every if set(each.stacks.values()) == {layers})
            assert depth.params == sum(p.numel() for p in build(layers).parameters())


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
