"""`esper.start_shallow`: blocks that sleep, wake and learn, beside the same by hand."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from tests.models import Blocks, Speaker

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(32) % 3


class Deep(Blocks):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(copy.deepcopy(self.blocks[0]) for _ in range(blocks))
        for block in self.blocks:
            block.map.reset_parameters()


def deep(blocks: int = 4, kind: Callable[..., nn.Module] = Deep) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind(blocks).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(X.double()), Y)
    loss.backward()
    optimizer.step()
    return loss.item()


def start(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8, **options: Any) -> Any:
    return esper.start_shallow(model, optimizer, example=X.double(), steps=steps, **options)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_it_trains_what_a_shallow_model_that_grows_by_hand_would() -> None:
    model, optimizer = deep()
    keys, pending = list(model.state_dict()), torch.get_rng_state()
    shallow = start(model, optimizer, doublings=(0.25, 0.5))
    assert torch.equal(torch.get_rng_state(), pending)
    assert shallow.awake == ["blocks.0"]
    hand, _ = deep()
    hand.blocks = hand.blocks[:1]
    others = torch.optim.AdamW(hand.parameters(), lr=1e-2)
    for count in range(1, 9):
        assert step(model, optimizer) == step(hand, others)
        if count in (2, 4):
            fresh = [copy.deepcopy(block) for block in hand.blocks]
            hand.blocks = nn.ModuleList(each for pair in zip(hand.blocks, fresh, strict=True) for each in pair)
            others.param_groups[0]["params"].extend(p for block in fresh for p in block.parameters())
        assert len(shallow.awake) == len(hand.blocks)
    assert same(model, hand)
    assert list(model.state_dict()) == keys
    assert not optimizer._optimizer_step_post_hooks
    assert not any("forward" in vars(module) for module in model.modules())


def test_statistics_of_batch_norms_come_along_and_sleeping_blocks_get_no_gradients() -> None:
    model, optimizer = deep()
    shallow = start(model, optimizer)
    for _ in range(3):
        step(model, optimizer)
    front, block = model.blocks[0], model.blocks[1]
    assert all(p.grad is None and p not in optimizer.state for p in block.parameters())
    assert not front.norm.running_mean.equal(block.norm.running_mean)
    shallow.deepen()
    assert same(front, block)
    assert not same(front, model.blocks[2])
    with pytest.raises(esper.EsperError, match="all blocks are awake already"):
        shallow.deepen()


def test_what_it_costs_is_counted_and_buys_steps() -> None:
    """Per sample: 6 x 8 in front, 8 x 8 a block, 8 x 3 behind."""
    whole, half = 48 + 4 * 64 + 24, 48 + 2 * 64 + 24
    model, optimizer = deep()
    shallow = start(model, optimizer, 1000, doublings=(0.3,))
    assert shallow.flops == pytest.approx((0.3 * half + 0.7 * whole) / whole)
    assert (shallow.steps, shallow.wakes) == (1000, [300])
    model, optimizer = deep()
    more = start(model, optimizer, 1000, doublings=(0.3,), same_flops=True)
    assert more.steps == round(1000 / shallow.flops)
    assert more.wakes == [round(0.3 * more.steps)]


def test_a_training_that_was_stopped_goes_on_bit_for_bit() -> None:
    whole, optimizer = deep()
    start(whole, optimizer, doublings=(0.25, 0.75))
    for _ in range(8):
        step(whole, optimizer)
    for stop in (1, 2, 5, 6, 7):
        model, optimizer = deep()
        shallow = start(model, optimizer, doublings=(0.25, 0.75))
        for _ in range(stop):
            step(model, optimizer)
        kept = copy.deepcopy((shallow.state_dict(), model.state_dict(), optimizer.state_dict()))
        model, optimizer = deep()
        shallow = start(model, optimizer, doublings=(0.25, 0.75))
        for part, state in zip((shallow, model, optimizer), kept, strict=True):
            part.load_state_dict(state)
        assert shallow.done == min(stop, 6)
        for _ in range(8 - stop):
            step(model, optimizer)
        assert same(model, whole)
        with pytest.raises(esper.EsperError, match="has begun already"):
            shallow.load_state_dict(kept[0])


class Mixed(nn.Module):
    """Two stages of another width, each with a first block that changes it, and a layer alone."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.stages = nn.Sequential(*(nn.Sequential(Widen(c // 2, c), *(Widen(c, c) for _ in range(blocks - 1))) for c in (8, 16)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.first(x)))


class Widen(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.way, self.map = nn.Linear(before, after) if before != after else nn.Identity(), nn.Linear(before, after)

    def forward(self, h: Tensor) -> Tensor:
        return self.way(h) + torch.relu(self.map(h))


def test_blocks_are_found_in_stages_in_tuples_and_by_name() -> None:
    model, optimizer = deep(4, Mixed)
    shallow = start(model, optimizer)
    assert shallow.stacks == [[f"stages.{stage}.{n}" for n in (1, 2, 3)] for stage in (0, 1)]
    assert shallow.awake == ["stages.0.1", "stages.0.3", "stages.1.1", "stages.1.3"]
    speaker = Speaker(9, 8)
    tokens = torch.arange(12).view(3, 4) % 9
    shallow = esper.start_shallow(speaker, torch.optim.SGD(speaker.parameters(), 0.1), example=tokens, steps=4)
    kept = copy.deepcopy(speaker)
    out = speaker(tokens)
    assert torch.equal(out, kept(tokens))
    for parameter in speaker.layers[1].parameters():
        parameter.data.fill_(torch.nan)
    assert torch.equal(speaker(tokens), out)
    model, optimizer = deep()
    assert start(model, optimizer, blocks=["blocks.1", "blocks.2"]).awake == ["blocks.1"]


def test_compiled_models_wake_too() -> None:
    (eager, one), (model, two) = deep(), deep()
    start(eager, one)
    start(model, two)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(8):
        assert step(compiled, two) == pytest.approx(step(eager, one), abs=1e-12)


class Two(Deep):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x)


@pytest.mark.parametrize(("build", "options", "sentence"), [
    (Two, {}, "no blocks were found that could sleep"),
    (lambda n: nn.Linear(6, 3), {}, "no blocks were found that could sleep"),
    (Deep, {"blocks": ["blocks.9"]}, "the model has no submodule 'blocks.9'"),
    (Deep, {"blocks": ["first", "head"]}, "'first' is no submodule that runs once and gives back the shape it gets"),
    (Deep, {"blocks": "blocks.1"}, "no blocks were found that could sleep"),
    (Deep, {"steps": 0}, "steps is a whole number of at least 1; got 0"),
    (Deep, {"steps": 2.5}, "steps is a whole number of at least 1; got 2.5"),
    (Deep, {"doublings": ()}, r"rising shares of the training between 0 and 1; got \(\)"),
    (Deep, {"doublings": (0.5, 0.2)}, "rising shares"), (Deep, {"doublings": (0.5, 1.0)}, "rising shares"),
    (Deep, {"doublings": (float("nan"),)}, "rising shares")])
def test_what_cannot_be_meant_is_one_sentence_and_changes_nothing(build: Any, options: dict[str, Any], sentence: str) -> None:
    model, optimizer = deep(4, build)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(esper.EsperError, match=sentence):
        start(model, optimizer, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer._optimizer_step_post_hooks
    assert not any("forward" in vars(module) for module in model.modules())


def test_neither_a_model_nor_an_optimizer_is_one_sentence() -> None:
    model, _ = deep()
    with pytest.raises(esper.EsperError, match=r"takes an nn.Module and the torch optimizer that trains it"):
        start(model, "AdamW")  # type: ignore[arg-type]


RANK = """
import os, sys, torch, torch.distributed as dist
from torch import nn
import esper
from tests.test_shallow import X, deep, start, step
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
model, optimizer = deep()
try:
    start(nn.parallel.DistributedDataParallel(model), optimizer)
except esper.EsperError as error:
    assert "find_unused_parameters=True" in str(error)
net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
shallow = start(net, optimizer)
part = slice(rank, None, 2)
for _ in range(8):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(X.double()[part]), torch.arange(32)[part] % 3).backward()
    optimizer.step()
assert len(shallow.awake) == 4
torch.save(list(model.parameters()), f"{folder}/{rank}.pt")
sys.stdout.flush()
os._exit(0)     # gloo's threads may still be at work, and would be complained about
"""


def test_two_ranks_wake_together(tmp_path: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for rank in ranks:
        _, told = rank.communicate(timeout=120)
        assert rank.returncode == 0, told
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_models_of_hugging_face_keep_their_configuration_and_generate() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokens = torch.randint(50, (8, 16))
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=6, n_head=2, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"input_ids": tokens, "labels": tokens}
    shallow = esper.start_shallow(model, optimizer, example=batch, steps=4)
    assert shallow.awake == ["transformer.h.0", "transformer.h.2", "transformer.h.4"]
    for _ in range(4):
        optimizer.zero_grad()
        model.train()(**batch).loss.backward()
        optimizer.step()
    assert len(shallow.awake) == model.config.n_layer == 6
    said = [model.eval().generate(tokens[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*said)
