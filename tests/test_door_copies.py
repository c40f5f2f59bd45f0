"""The blueprint `copy`: models grow deeper by their own blocks, and what is delivered is of their own class."""

import copy
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from esper.door.copies import Repeat
from esper.leyline import EsperError, SeedStage
from tests.test_door import (
    MODELS,
    TOKENS,
    Block,
    Loop,
    Picture,
    Script,
    Speaker,
    X,
    Y,
    growing_with_nan,
    incubating,
)

GROW = Script(e1=("GERMINATE", 1, "copy"), e7=("FOSSILIZE", 1, ""))
"""The first stage of `picture` changes the shape, so that its slot 1 is behind `stages.2`."""


def grown(kind: str = "blocks", epochs: int = 9, **options: Any) -> Loop:
    loop = Loop(kind, controller=GROW, blueprints=["copy"], **options)
    for _ in range(epochs):
        loop.epoch()
    return loop


def of_esper(net: nn.Module) -> list[str]:
    return [type(each).__name__ for each in net.modules() if type(each).__module__.startswith("esper")]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_delivered_as_its_own_class_with_one_more_block(kind: str) -> None:
    loop = grown(kind, **incubating(Loop(kind)))
    growing = loop.growing
    (slot,) = growing.grafts
    assert int(growing.life.stage[0, slot]) == SeedStage.FOSSILIZED
    path, seed = growing.places[slot].path, growing.grafts[slot].seed
    assert growing.params == sum(p.numel() for p in loop.model.get_submodule(path).parameters())
    loop.model.eval()
    with torch.no_grad():
        wanted = loop.model(loop.x)
        net = growing.deliver().eval()
        assert torch.equal(net(loop.x), wanted)
        assert not torch.equal(loop.model(loop.x), wanted), "the model itself is let go"
    assert type(net) is type(loop.model)
    assert not of_esper(net)
    assert not any(module._forward_hooks or module._forward_hooks_with_kwargs for module in net.modules())
    owner, _, number = path.rpartition(".")
    blocks = net.get_submodule(owner)
    assert len(blocks) == len(loop.model.get_submodule(owner)) + 1  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(blocks[int(number) + 1].parameters(), seed.parameters(), strict=True))  # type: ignore[index]


@pytest.mark.parametrize("kind", MODELS)
def test_a_copy_is_born_as_the_block_in_front_and_follows_its_modes_and_groups(kind: str) -> None:
    loop = Loop(kind, controller=GROW, blueprints=["copy"])
    growing = loop.growing
    for _ in range(2):
        loop.epoch()
    ((slot, graft),) = growing.grafts.items()
    front = dict(loop.model.get_submodule(growing.places[slot].path).named_parameters())
    born = dict(graft.seed.named_parameters())
    assert front.keys() == born.keys()
    assert all(torch.equal(front[name], born[name]) and front[name] is not born[name] for name in born)
    for _ in range(2):
        loop.epoch()  # it is blended in now
    group_of = {id(p): number for number, group in enumerate(loop.optimizer.param_groups) for p in group["params"]}
    assert [group_of[id(born[name])] for name in born] == [group_of[id(front[name])] for name in front]
    assert len({group_of[id(p)] for p in front.values()}) == 2, "weights and biases lie in two groups"
    for mode in (True, False):
        loop.model.train(mode)(loop.x)
        assert all(module.training is mode for module in graft.modules())


def test_running_statistics_of_a_copy_learn_are_kept_and_are_put_back(tmp_path: Path) -> None:
    whole = grown("picture", 5)
    norm = next(m for m in whole.growing.grafts[1].seed.modules() if isinstance(m, nn.BatchNorm2d))
    front = next(m for m in whole.model.stages[2].modules() if isinstance(m, nn.BatchNorm2d))
    assert not torch.equal(norm.running_mean, front.running_mean)
    whole.growing.save(tmp_path / "growth")
    state = copy.deepcopy([whole.model.state_dict(), whole.optimizer.state_dict(), whole.scheduler.state_dict(), torch.get_rng_state()])
    again = Loop("picture", controller=GROW, blueprints=["copy"])
    again.growing.load(tmp_path / "growth")
    for part, kept in zip((again.model, again.optimizer, again.scheduler), state, strict=False):
        part.load_state_dict(kept)
    outcomes = []
    for loop in (whole, again):
        torch.set_rng_state(state[3])
        for _ in range(4):
            loop.epoch()
        outcomes.append({**loop.model.state_dict(), **{f"seed {name}": value for name, value in loop.growing.grafts[1].state_dict().items()}})
    counted = {name for name in outcomes[0] if name.endswith("num_batches_tracked")}  # read by nobody
    assert all(torch.equal(value, outcomes[1][name]) for name, value in outcomes[0].items() if name not in counted)
    kept = copy.deepcopy(whole.growing.grafts[1].state_dict())
    assert growing_with_nan_weights(whole).startswith("ROLLBACK")
    assert all(torch.equal(value, kept[name]) for name, value in whole.growing.grafts[1].state_dict().items() if name not in
               {f"seed.{each}" for each in ("1.num_batches_tracked",)})


def growing_with_nan_weights(loop: Loop) -> str:
    """A step that breaks a copy that was kept."""
    loop.model.train()
    loop.model(loop.x)  # its statistics go on
    with torch.no_grad():
        next(loop.growing.grafts[1].seed.parameters()).fill_(torch.nan)
    return str(growing_with_nan(loop).decision)


def test_a_pruned_copy_leaves_no_trace() -> None:
    loop = Loop("speaker", controller=Script(e0=("GERMINATE", 0, "copy"), e4=("PRUNE", 0, "")), blueprints=["copy"])
    counts = []
    for _ in range(8):
        loop.epoch()
        counts.append(sum(len(group["params"]) for group in loop.optimizer.param_groups))
    bare = len(list(loop.model.parameters()))
    assert max(counts) == bare + len(list(loop.model.layers[0].parameters()))
    assert counts[-1] == bare == len(loop.optimizer.state)
    assert len(loop.growing.deliver().layers) == 3


def test_a_compiled_model_grows_alike() -> None:
    torch._dynamo.reset()
    eager, compiled = Loop("speaker", controller=GROW, blueprints=["copy"]), Loop("speaker")
    for drop in (m for loop in (eager, compiled) for m in loop.model.modules() if isinstance(m, nn.MultiheadAttention)):
        drop.dropout = 0.0  # of which compiled models draw otherwise
    net = torch.compile(compiled.model, backend="eager")
    compiled.growing = esper.attach(net, compiled.optimizer, example=TOKENS[:4], controller=GROW, epochs=20, blueprints=["copy"])
    state = torch.get_rng_state()
    for loop in (eager, compiled):
        torch.set_rng_state(state)
        loop.model = net if loop is compiled else loop.model
        for _ in range(9):
            loop.epoch()
    a, b = (loop.growing.deliver() for loop in (eager, compiled))
    assert len(a.layers) == len(b.layers) == 4
    torch.testing.assert_close(a(TOKENS), b(TOKENS))


class Causal(nn.Module):
    """PyTorch's encoder layers take a fast path, which rounds otherwise, where no hook bars it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return x


def test_encoder_layers_of_pytorch_become_layers_whatever_path_they_take() -> None:
    torch.manual_seed(0)
    model, x = Causal(), torch.randn(16, 64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    growing = esper.attach(model, optimizer, example=x, slots=["layers.1"], epochs=12, blueprints=["copy"],
                           controller={"layers.1": "copy"})
    for _ in range(12):
        for _ in range(3):
            optimizer.zero_grad()
            model.train()(x).square().mean().backward()
            optimizer.step()
        growing.end_epoch(lambda: -model.eval()(x).square().mean().item())
    net = growing.deliver()
    assert not of_esper(net)
    assert len(net.layers) == 3


class Counted(nn.Module):
    """Knows how many blocks it has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(12, 12) for _ in range(2)), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            x = torch.tanh(self.blocks[number](x))
        return self.head(x)


def test_other_seeds_stay_where_they_grew_when_copies_become_blocks() -> None:
    actions = {"e0": ("GERMINATE", 0, "copy"), "e1": ("GERMINATE", 2, "mlp_small"), "e7": ("FOSSILIZE", 0, ""), "e8": ("FOSSILIZE", 2, "")}
    loop = Loop("blocks", controller=Script(**actions), blueprints=["copy", "mlp_small"])
    for _ in range(11):
        loop.epoch()
    loop.model.eval()
    with torch.no_grad():
        wanted = loop.model(X)
        net = loop.growing.deliver().eval()
        assert torch.equal(net(X), wanted)
    assert [type(each).__name__ for each in net] == ["Linear", "Block", "Block", "Block", "Grafted", "Linear"]


@pytest.mark.parametrize(("names", "slot"), [(("stem", "0", "1", "head"), "0"), (("1", "2", "3", "head"), "3")])
def test_containers_with_names_of_their_own_keep_the_copy_beside_its_block(names: tuple[str, ...], slot: str) -> None:
    net = nn.Sequential(OrderedDict((name, Block(12) if name != "head" else nn.Linear(12, 3)) for name in names))
    wanted, better = kept_copy(net, slot)
    assert torch.equal(better(X), wanted)
    assert "Repeat" in of_esper(better)


@dataclass
class Answer:
    logits: Tensor


class Speaking(Counted):
    """What it returns can be compared by nobody else."""

    def forward(self, x: Tensor) -> Any:
        return Answer(super().forward(x))


class Settled(nn.Module):
    """A configuration that cannot count one more block, as classes of settings often are."""

    def __init__(self) -> None:
        super().__init__()
        self.config = NamedTuple("Settings", [("num_hidden_layers", int)])(2)
        self.layers, self.head = nn.ModuleList(Block(12) for _ in range(2)), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Saved(Settled):
    """Builds itself from its configuration, otherwise than it grew: every second block is another one."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config or SimpleNamespace(num_hidden_layers=2, layer_types=["a", "b"])
        self.layers = nn.ModuleList(Block(12) if each == "a" else nn.Sequential(nn.LayerNorm(12)) for each in self.config.layer_types)
        if self.config.num_hidden_layers > 2:
            self.layers[2] = nn.Identity()

    def save_pretrained(self) -> None:
        raise NotImplementedError


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Saved(SimpleNamespace(num_hidden_layers=1, layer_types=["a"]))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_configurations_around_a_block_count_it() -> None:
    torch.manual_seed(0)
    wanted, better = kept_copy(Around(), "inner.layers.0")
    assert torch.equal(better(X), wanted)
    assert not of_esper(better)
    assert better.inner.config == SimpleNamespace(num_hidden_layers=2, layer_types=["a", "a"])


@pytest.mark.parametrize(("build", "slot"), [(Speaking, "blocks.0"), (Settled, "layers.0"), (Saved, "layers.0")])
def test_in_doubt_a_copy_stays_beside_its_block(build: Any, slot: str) -> None:
    torch.manual_seed(0)
    net = build()
    wanted, better = kept_copy(net, slot)
    got = better(X)
    assert torch.equal(getattr(got, "logits", got), wanted)
    assert "Repeat" in of_esper(better)


def kept_copy(model: nn.Module, slot: str, **options: Any) -> tuple[Tensor, nn.Module]:
    """What a model gives once it kept a copy behind this slot, and what is delivered."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    growing = esper.attach(model, optimizer, example=X[:4], slots=[slot], controller={slot: "copy"}, blueprints=["copy"], epochs=9, **options)

    def logits() -> Tensor:
        out = model(X)
        return getattr(out, "logits", out)

    for _ in range(9):
        optimizer.zero_grad()
        F.cross_entropy(logits(), Y).backward()
        optimizer.step()
        growing.end_epoch(lambda: -float(F.cross_entropy(logits(), Y)))
    assert list(growing.kept) == [slot]
    return logits().detach(), growing.deliver()


def test_where_one_more_block_would_give_something_else_the_copy_stays_beside_it() -> None:
    torch.manual_seed(0)
    wanted, net = kept_copy(Counted(), "blocks.0")
    assert torch.equal(net(X), wanted)
    assert len(net.blocks) == 2
    assert "Repeat" in of_esper(net)


class Odd(nn.Module):
    """Frozen parts, a buffer that no state dict holds, one that counts, and something of the last pass."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.shift, self.drop = nn.Linear(12, 12), nn.Parameter(torch.zeros(12), requires_grad=False), nn.Dropout(0.1)
        self.register_buffer("mask", (torch.rand(12) > 0.5).float(), persistent=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.last = torch.zeros(())

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        self.last = self.map(h) * self.mask
        return h + self.drop(torch.relu(self.last)) + self.shift


def odd(seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(Odd(), Odd(), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    model(X)  # blocks know a pass now
    loss = {"loss": lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), "data": [(X, Y)]}
    return model, optimizer, esper.attach(model, optimizer, example=X[:4], slots=["0", "1"], blueprints=["copy"], controller={"1": "copy"},
                                          epochs=12, shadow_steps=2, **loss | options)


def epochs(model: nn.Module, optimizer: torch.optim.Optimizer, growing: Any, number: int) -> None:
    for _ in range(number):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        model.eval()
        score = -float(F.cross_entropy(model(X), Y).detach())
        growing.end_epoch(lambda score=score: score)  # users may validate before, and leave the model so


def test_a_copy_of_a_block_with_frozen_parts_and_odd_buffers_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer, growing = odd(0)
    epochs(model, optimizer, growing, 4)
    graft = growing.grafts[1]
    assert torch.equal(graft.seed.mask, model[1].mask)
    assert int(graft.seed.passes) > 0
    assert growing.params == 12 * 12 + 12 == growing.kind(1).cost.params, "what is frozen is not counted"
    assert not any(graft.seed.shift is p for group in optimizer.param_groups for p in group["params"])
    growing.save(tmp_path / "growth")
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
    masks = [block.mask.clone() for block in model[:2]]
    epochs(model, optimizer, growing, 5)
    again, other, regrown = odd(1)
    regrown.load(tmp_path / "growth")
    again.load_state_dict(kept[0])
    other.load_state_dict(kept[1])
    for block, mask in zip(again, masks, strict=False):
        block.mask.copy_(mask)
    torch.set_rng_state(kept[2])
    epochs(again, other, regrown, 5)
    assert torch.equal(growing.deliver().eval()(X), regrown.deliver().eval()(X))


def test_modes_are_those_of_the_block_in_front_in_every_part() -> None:
    model, optimizer, growing = odd(0)
    epochs(model, optimizer, growing, 2)
    graft = growing.grafts[1]
    model.train()
    model[1].drop.eval()
    model(X)
    growing.active[1] = graft
    for mode in (False, True):
        model.train(mode)
        model[1].drop.eval()
        model(X)
        assert [m.training for m in graft.seed.modules()] == [m.training for m in model[1].modules()]
        assert graft.training is mode


def test_blocks_that_are_frozen_whole_can_be_copied_and_learn_nothing() -> None:
    model, optimizer, growing = odd(0)
    model[1].requires_grad_(False)
    epochs(model, optimizer, growing, 3)
    assert growing.params == 0
    assert not growing.deliver()[1].map.weight.requires_grad


def test_what_the_optimizer_does_not_train_it_does_not_train_in_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(12), Block(12), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "norm" not in name], 1e-2)
    growing = esper.attach(model, optimizer, example=X[:4], controller={"1": "copy"}, blueprints=["copy"], epochs=9)
    epochs(model, optimizer, growing, 6)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert [name for name, p in growing.grafts[1].seed.named_parameters() if id(p) in trained] == ["map.weight", "map.bias"]


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Named(12) for _ in range(2)), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(h=x)
        return self.head(x)


class Named(Block):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


def test_other_seeds_do_not_mind_what_their_submodule_is_called_with() -> None:
    torch.manual_seed(0)
    model = ByName()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    growing = esper.attach(model, optimizer, example=X[:4], controller={"blocks.0": "mlp_small"}, epochs=9)
    epochs(model, optimizer, growing, 9)
    wanted = model(X)
    assert growing.params > 0
    assert torch.equal(growing.deliver().eval()(X), wanted)


def test_other_seeds_join_one_group_whatever_their_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 12)) for _ in range(2)), nn.Linear(12, 3))
    parts = [[p for p in model.parameters() if (p.dim() == 2) is wide] for wide in (True, False)]
    optimizer = torch.optim.AdamW([{"params": part} for part in parts], 1e-2)
    growing = esper.attach(model, optimizer, example=X[:4], slots=["1"], controller={"1": "mlp_small"}, epochs=9)
    epochs(model, optimizer, growing, 6)
    assert [len(group["params"]) - len(part) for group, part in zip(optimizer.param_groups, parts, strict=True)] == [4, 0]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_nested_batches_blend_each_sample() -> None:
    nested = torch.nested.as_nested_tensor([torch.randn(2, 12), torch.randn(3, 12)])
    mix = Repeat(nn.Linear(12, 12), 0.25)
    for sample, out in zip(nested.unbind(), mix(nested).unbind(), strict=True):
        torch.testing.assert_close(out, mix(sample))


class Narrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.by_name, self.in_place, self.last = nn.Linear(12, 8), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(8, 3)
        self.several = Sum()

    def forward(self, x: Tensor) -> Tensor:
        h = self.by_name(input=self.first(x))
        return self.last(self.in_place(self.several(h, other=h)))


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()  # which nobody can copy

    def forward(self, h: Tensor, other: Tensor) -> Tensor:
        return h + other


@pytest.mark.parametrize(("options", "sentence"), [
    ({"slots": ["first"]}, r"turns \[4, 12\] into \[4, 8\]"), ({"slots": ["by_name"]}, "turns keywords alone"), ({"slots": ["in_place"]}, "changes its input in place"),
    ({"slots": ["several"]}, "cannot be copied"), ({"blueprints": ["noop"]}, "nothing fits"),
    ({"blueprints": ["copies"]}, "no blueprint 'copies' .* copy"), ({"blueprints": "copy"}, "a list of names"), ({"blueprints": []}, "nothing fits")])
def test_what_cannot_be_copied_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    model = Narrowing()
    with pytest.raises(EsperError, match=sentence) as told:
        esper.attach(model, torch.optim.AdamW(model.parameters()), example=X[:4], **{"blueprints": ["copy"]} | options)
    assert "\n" not in str(told.value)
    assert not any(module._forward_hooks for module in model.modules())


def test_slots_that_were_found_and_cannot_be_copied_are_left_out() -> None:
    model = Picture()
    growing = esper.attach(model, torch.optim.AdamW(model.parameters()), example=MODELS["picture"][1][:4], blueprints=["copy"])
    assert [place.path for place in growing.places] == ["stages.1", "stages.2"]
    assert growing.spec.blueprints == ("noop", "copy")
    assert growing.prototypes[0][1].cost.flops == 2 * 8 * 8 * 9 * 64


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, 1 + (before != after), 1), nn.Conv2d(after, after, 3, 1, 1)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.skip(x) + self.second(torch.relu(self.first(x))))


class Stage(nn.Module):
    """As in libraries of residual nets: the first of its blocks may change the shape."""

    def __init__(self, before: int, after: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(Residual(before, after), *(Residual(after, after) for _ in range(depth - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Staged(nn.Module):
    """A residual net of three stages: lists of blocks, or of stages that hold some."""

    def __init__(self, nested: bool, *depths: int) -> None:
        super().__init__()
        widths = (4, 4, 8, 16)
        stages = [Stage(*sizes, depth) for *sizes, depth in zip(widths, widths[1:], depths, strict=False)]
        self.stem, self.head = nn.Conv2d(1, 4, 3, 1, 1), nn.Linear(16, 3)
        if nested:
            self.stages = nn.ModuleList(stages)
        else:
            self.layer1, self.layer2, self.layer3 = (stage.layers for stage in stages)
        self.nested = nested

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages if self.nested else (self.layer1, self.layer2, self.layer3):
            x = stage(x)
        return self.head(x.mean((2, 3)))


def deepening(model: nn.Module, x: Tensor, slot: str, epochs: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    return esper.attach(model, optimizer, example=x, blueprints=["copy"], controller={slot: "copy"}, epochs=epochs)


def rounds(growing: Any, x: Tensor, epochs: int) -> Iterator[Any]:
    """Reports of epochs of one step."""
    for _ in range(epochs):
        growing.optimizer.zero_grad()
        growing.model(x).square().mean().backward()
        growing.optimizer.step()
        yield growing.end_epoch(lambda: -float(growing.model(x).square().mean()))


def test_a_configuration_whose_stages_have_no_number_is_left_alone() -> None:
    torch.manual_seed(0)
    model, x = Staged(False, 2, 2, 2), torch.randn(8, 1, 8, 8)
    model.config = SimpleNamespace(depths=[2, 2, 2])  # type: ignore[assignment]
    growing = deepening(model, x, "layer3.1", 9)
    list(rounds(growing, x, 9))
    better = growing.deliver()
    assert len(better.layer3) == 3  # type: ignore[arg-type]
    assert better.config.depths == [2, 2, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize(("nested", "depths", "slots"), [
    (False, (2, 2, 2), "layer1.0 layer1.1 layer2.1 layer3.1"),
    (True, (2, 2, 2), "stages.0.layers.0 stages.0.layers.1 stages.1.layers.1 stages.2.layers.1"),
    (True, (1, 2, 3), "stages.0.layers.0 stages.1.layers.1 stages.2.layers.1 stages.2.layers.2")])
def test_blocks_are_found_inside_stages(nested: bool, depths: tuple[int, ...], slots: str) -> None:
    torch.manual_seed(0)
    model, x = Staged(nested, *depths), torch.randn(8, 1, 8, 8)
    *_, last = slots.split()
    growing = deepening(model, x, last, 9)
    assert [place.path for place in growing.places] == slots.split()
    list(rounds(growing, x, 9))
    better = growing.deliver()
    home, number = last.rpartition(".")[0], int(last.rpartition(".")[2])
    assert not of_esper(better)
    assert len(better.get_submodule(home)) == number + 2, "one more block in the last stage"  # type: ignore[arg-type]


class Skip(nn.Module):
    """Something with a residual connection."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Gated(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), Skip(nn.Conv2d(width, width, 1)), nn.ReLU())


class Pair(nn.Module):
    """A list that holds the parts of a block is no list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Skip(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8), nn.ReLU())]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for mix, turn in self.layers:  # type: ignore[misc]
            x = turn(mix(x))
        return x


class Lone(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def mixed(width: int) -> nn.Sequential:
    return nn.Sequential(Skip(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GELU())), nn.Conv2d(width, width, 1), nn.GELU())


SERIES, IMAGES = torch.randn(4, 6, 8), torch.randn(4, 3, 8, 8)


@pytest.mark.parametrize(("model", "example", "slots"), [
    (nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), nn.Linear(8, 3)), SERIES,
     "1.layers.0 1.layers.1"),
    (nn.Sequential(nn.Linear(8, 8), Lone(), nn.Linear(8, 3)), SERIES, "1.layers.0"),
    (nn.Sequential(nn.Linear(8, 8), Pair(), nn.Linear(8, 3)), SERIES, "1"),
    (nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.GELU(), mixed(8), mixed(8), nn.Flatten(), nn.Linear(128, 3)), IMAGES, "2 3"),
    (nn.Sequential(nn.Conv2d(3, 8, 3), Gated(8), Gated(8), Gated(8), nn.Flatten(), nn.Linear(288, 3)), IMAGES, "1 2 3"),
    (nn.Sequential(nn.Conv2d(3, 4, 1), Skip(nn.Sequential(Gated(4), Gated(4))), Skip(nn.Sequential(Gated(4), Gated(4))), nn.Conv2d(4, 3, 1)),
     IMAGES, "1 2")], ids=["an encoder", "a list of one", "lists of parts", "blocks without a class", "blocks that are lists", "blocks in blocks"])
def test_what_stands_beside_others_of_its_class_is_a_block(model: nn.Module, example: Tensor, slots: str) -> None:
    growing = esper.attach(model, torch.optim.SGD(model.parameters(), 0.05), example=example, blueprints=["copy"], controller="wait")
    assert [place.path for place in growing.places] == slots.split()


def test_reports_say_how_many_more_flops_training_took() -> None:
    model, x = Staged(False, 2, 2, 2), torch.randn(8, 1, 8, 8)
    growing = deepening(model, x, "layer3.1", 10)

    def forward(net: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            net(x)
        return counter.get_total_flops()

    bare = forward(model)
    told = [report.flops for report in rounds(growing, x, 10)]
    more = forward(growing.deliver()) / bare - 1
    assert told == pytest.approx([more * epoch / 10 for epoch in range(10)]), "it is planted after the first epoch"


def test_a_copy_costs_what_its_block_costs_and_budgets_know_it() -> None:
    loop = Loop("speaker", controller="heuristic", blueprints=["copy"], budget="+15%", epochs=30)
    sizes = {loop.epoch().params for _ in range(24)}
    assert sizes == {0}, "a layer is more than that"
    assert any("would exceed the budget" in report.decision for report in loop.growing.history)


def test_growing_deeper_helps_a_model_that_is_too_shallow() -> None:
    """One narrow hidden layer hardly finds two rings."""

    def accuracy(seed: int, **options: Any) -> float:
        torch.manual_seed(seed)
        x = torch.randn(1200, 2)
        y = ((x.norm(dim=1) > 0.8) ^ (x.norm(dim=1) > 1.5)).long()
        model = nn.Sequential(nn.Linear(2, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
        growing = esper.attach(model, optimizer, example=x[:4], slots=["1"], epochs=24, **options)
        for _ in range(24):
            for chosen in torch.randperm(1000).split(50):
                optimizer.zero_grad()
                F.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
            growing.end_epoch(lambda: -float(F.cross_entropy(model(x[1000:]), y[1000:])))
        return float((growing.deliver()(x[1000:]).argmax(1) == y[1000:]).double().mean())

    gains = [accuracy(seed, controller={"1": "copy"}, blueprints=["copy"]) - accuracy(seed, controller="wait") for seed in range(3)]
    assert sum(gains) / 3 > 0.05


SPEAKS = """
import sys, torch
from transformers import GPT2LMHeadModel
net = GPT2LMHeadModel.from_pretrained(sys.argv[1]).eval()
ids, wanted = torch.load(sys.argv[2])
with torch.no_grad():
    assert torch.equal(net(input_ids=ids).logits, wanted)
assert "esper" not in sys.modules
"""


def test_a_language_model_of_hugging_face_is_one_of_them_with_another_layer(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(50, (4, 16))
    net = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    with pytest.raises(EsperError, match="use_cache=False"):
        esper.attach(net, optimizer, example={"input_ids": ids}, blueprints=["copy"])
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    growing = esper.attach(net, optimizer, example=batch, blueprints=["copy"], controller={"transformer.h.0": "copy"}, epochs=9)
    for _ in range(9):
        net.train()
        for _ in range(3):
            optimizer.zero_grad()
            net(**batch).loss.backward()
            optimizer.step()
        growing.end_epoch(lambda: -float(net.eval()(**batch).loss.detach()))
    with torch.no_grad():
        wanted = net.eval()(**batch).logits
    better = growing.deliver().eval()
    assert type(better) is type(net)
    assert not of_esper(better)
    assert better.config.n_layer == 3
    assert net.config.n_layer == 2
    assert [block.attn.layer_idx for block in better.transformer.h] == [0, 1, 2]
    with torch.no_grad():
        cached, plain = (better.generate(ids[:, :4], max_new_tokens=8, do_sample=False, use_cache=use, pad_token_id=0) for use in (True, False))
    assert torch.equal(cached, plain)
    better.save_pretrained(tmp_path / "better")
    torch.save((ids, wanted), tmp_path / "wanted.pt")
    subprocess.run([sys.executable, "-c", SPEAKS, str(tmp_path / "better"), str(tmp_path / "wanted.pt")], check=True, capture_output=True)


@pytest.mark.parametrize(("name", "more"), [("ResNet", {"embedding_size": 4, "layer_type": "basic"}),
                                            ("ConvNext", {"patch_size": 1, "num_stages": 2, "depths": (1, 2)})])
def test_a_stage_of_hugging_face_has_another_block(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(hf, f"{name}ForImageClassification")
    net = kind(kind.config_class(**{"hidden_sizes": [4, 8], "depths": [1, 2]} | more))
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4) % 2}
    optimizer, slot = torch.optim.AdamW(net.parameters(), 1e-3), f"{name.lower()}.encoder.stages.1.layers.1"
    growing = esper.attach(net, optimizer, example=batch, blueprints=["copy"], controller={slot: "copy"}, epochs=9)
    assert slot in [place.path for place in growing.places]
    for _ in range(9):
        optimizer.zero_grad()
        net.train()(**batch).loss.backward()
        optimizer.step()
        growing.end_epoch(lambda: -float(net.eval()(**batch).loss.detach()))
    with torch.no_grad():
        wanted = net.eval()(**batch).logits
    better = growing.deliver().eval()
    assert not of_esper(better)
    assert better.config.depths == [1, 3]
    assert list(net.config.depths) == [1, 2]
    better.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(kind.from_pretrained(tmp_path).eval()(**batch).logits, wanted)


def test_a_copy_without_a_place_in_a_cache_refuses_one() -> None:
    class Cache:
        def get_seq_length(self) -> int:
            return 0

    with pytest.raises(EsperError, match="use_cache=False"):
        Repeat(Speaker.Layer(), 1.0)(torch.zeros(1, 2, 8), past=Cache())
