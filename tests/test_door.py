"""The door: a user's own model, optimizer and loop. Attached and waiting, nothing changes; what grows pays its way in and out."""

import copy
import functools
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.door.ranks import Ranks
from esper.leyline import ActionSpec, EsperError, SeedStage, View

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(240, 12, generator=GENERATOR), torch.randint(3, (240,), generator=GENERATOR)
X = X + F.one_hot(Y, 12) * 2
PICTURES = torch.randn(240, 3, 8, 8, generator=GENERATOR) + Y.view(-1, 1, 1, 1)
TOKENS = torch.randint(9, (240, 6), generator=GENERATOR)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + F.relu(self.map(self.norm(h)))


class Picture(nn.Module):
    """Batch norms, dropout, and a global random draw in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        stages = [nn.Sequential(nn.Conv2d(a, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for a in (3, 8, 8)]
        self.stages, self.drop, self.head = nn.ModuleList(stages), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(self.drop(x.mean((2, 3))))


class Speaker(nn.Module):
    """Blocks that take keywords and return a tuple, as in libraries of transformers."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1), nn.LayerNorm(8)

        def forward(self, h: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
            n = self.norm(h)
            return h + scale * self.attention(n, n, n, need_weights=False)[0], None

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 8), nn.ModuleList(Speaker.Layer() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, scale=0.5)[0]
        return self.head(h.mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "blocks": (lambda: nn.Sequential(nn.Linear(12, 8), Block(8), Block(8), Block(8), nn.Linear(8, 3)), X),
    "picture": (Picture, PICTURES), "speaker": (Speaker, TOKENS)}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=5e-3), "fused": functools.partial(torch.optim.AdamW, lr=5e-3, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=5e-2, momentum=0.9)}
STEPS = 6
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 100), "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.99**s),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=200),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1)}


class Script:
    """A policy that does what it is told at the end of epoch 0, 1, ...: (op, slot, blueprint)."""

    def __init__(self, **actions: tuple[str, int, str]) -> None:
        self.actions = {int(epoch.removeprefix("e")): action for epoch, action in actions.items()}

    def __call__(self, view: View) -> Tensor:
        spec: ActionSpec = view.spec
        op, slot, blueprint = self.actions.get(int(view.clock) - 1, ("WAIT", 0, "noop"))
        more = {"blueprint": blueprint} if op == "GERMINATE" else {}
        return torch.tensor([spec.action(op, slot=slot, **more)])


GROW = Script(e1=("GERMINATE", 1, "norm"), e7=("FOSSILIZE", 1, ""))


class Loop:
    """A user's training loop, which knows nothing of Esper but two lines."""

    def __init__(self, kind: str = "blocks", optimizer: str = "adamw", scheduler: str = "cosine", controller: Any = None, **options: Any) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        build, self.x = MODELS[kind]
        self.model = build()
        half = list(self.model.parameters())
        groups = [{"params": half[::2], "weight_decay": 0.1}, {"params": half[1::2]}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.growing: Any = None if controller is None else esper.attach(
            self.model, self.optimizer, example=self.x[:4], controller=controller, schedulers=[self.scheduler], **{"epochs": 20} | options)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(240)[: STEPS * 20].split(20):  # from the global random state
            yield self.x[chosen], Y[chosen]

    def evaluate(self) -> Tensor:
        self.model.eval()
        torch.rand(3), random.random(), np.random.rand()  # a careless user
        with torch.no_grad():
            return (self.model(self.x).argmax(1) == Y).double()

    def epoch(self) -> Any:
        self.model.train()
        for x, y in self.batches():
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if not isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        return None if self.growing is None else self.growing.end_epoch(self.evaluate)

    def host(self) -> dict[str, Any]:
        """All that belongs to the model, whoever else the optimizer trains."""
        own = {f"{name} {key}": value for name, p in self.model.named_parameters() for key, value in self.optimizer.state[p].items()}
        return {**self.model.state_dict(), **own, "rng": torch.get_rng_state(), "python": repr(random.getstate()),
                "numpy": repr(np.random.get_state()), "grads": repr([None if p.grad is None else p.grad.sum() for p in self.model.parameters()])}

    def state(self) -> dict[str, Any]:
        optimizer = self.optimizer.state_dict()
        flat = {f"{n}.{k}": v for n, each in optimizer["state"].items() for k, v in each.items()}
        return {**self.model.state_dict(), **flat, "groups": repr(optimizer["param_groups"]), "mode": repr([m.training for m in self.model.modules()]),
                "rng": torch.get_rng_state(), "python": repr(random.getstate()), "numpy": repr(np.random.get_state()),
                "scheduler": repr({k: v for k, v in self.scheduler.state_dict().items() if not callable(v)})}


def same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]) if isinstance(value, Tensor) else value == two[name], name


@pytest.mark.parametrize(("kind", "optimizer", "scheduler"), [
    ("blocks", "adamw", "cosine"), ("blocks", "fused", "one cycle"), ("blocks", "sgd", "plateau"), ("picture", "adamw", "lambda"),
    ("picture", "fused", "cosine"), ("picture", "sgd", "one cycle"), ("speaker", "adamw", "plateau"), ("speaker", "fused", "lambda"),
    ("speaker", "sgd", "cosine")])
def test_attached_and_waiting_nothing_changes(kind: str, optimizer: str, scheduler: str) -> None:
    plain, attached = Loop(kind, optimizer, scheduler), None
    for _ in range(4):
        plain.epoch()
    before = plain.state()
    attached = Loop(kind, optimizer, scheduler, controller="wait")
    for _ in range(4):
        attached.epoch()
        attached.model.train()
    plain.model.train()
    same(plain.state() | {"mode": ""}, attached.state() | {"mode": ""})
    assert before["groups"] == attached.state()["groups"]


def incubating(loop: Loop) -> dict[str, Any]:
    """Options under which seeds learn behind the model."""
    return {"loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            "data": [(loop.x[i : i + 20], Y[i : i + 20]) for i in range(0, 240, 20)]}


@pytest.mark.parametrize("kind", MODELS)
def test_an_incubating_seed_learns_and_leaves_the_training_alone(kind: str) -> None:
    plain = Loop(kind)
    for _ in range(2):
        plain.epoch()
    wanted = plain.host()
    grown = Loop(kind, controller=Script(e0=("GERMINATE", 1, "norm")), **incubating(plain))
    for _ in range(2):  # the seed incubates in the second epoch
        grown.epoch()
    growing = grown.growing
    same(wanted, grown.host())
    seed = growing.grafts[1].seed
    assert any(float(p.detach().abs().max()) > 0 for p in seed.parameters()), "it learned"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_seed_that_is_kept_is_delivered(kind: str, optimizer: str) -> None:
    loop = Loop(kind, optimizer, "one cycle", controller=GROW, **incubating(Loop(kind)))
    keys, growing = set(loop.model.state_dict()), loop.growing
    groups, host = len(loop.optimizer.param_groups), sum(p.numel() for p in loop.model.parameters())
    for _ in range(9):
        report = loop.epoch()
        assert set(loop.model.state_dict()) == keys
    assert len(loop.optimizer.param_groups) == groups
    assert int(growing.life.stage[0, 1]) == SeedStage.FOSSILIZED
    assert report.params == growing.params > 0
    assert set(report.contributions) == {growing.places[1].path}
    own = list(growing.grafts[1].seed.parameters())
    trained = {id(p) for group in loop.optimizer.param_groups for p in group["params"]}
    assert all(id(p) in trained and loop.optimizer.state[p] for p in own)
    loop.model.eval()
    wanted = loop.model(loop.x).detach()
    net = growing.deliver().eval()
    torch.testing.assert_close(net(loop.x).detach(), wanted, rtol=0, atol=1e-6)
    assert sum(p.numel() for p in net.parameters()) == host + sum(p.numel() for p in own)
    assert not torch.equal(loop.model(loop.x), wanted), "the model itself is let go"
    assert sum(len(group["params"]) for group in loop.optimizer.param_groups) == len(list(loop.model.parameters()))
    with pytest.raises(EsperError, match="was delivered"):
        growing.end_epoch(loop.evaluate)


def test_contributions_are_paired_differences() -> None:
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "mlp_small"), e1=("GERMINATE", 2, "norm")), **incubating(Loop()))
    for _ in range(6):
        report = loop.epoch()
    growing = loop.growing
    assert set(report.contributions) == {"1", "3"}
    assert bool(growing.gains.known[0, [0, 2]].all())
    # By hand: the same model with one seed switched off.
    loop.epoch()
    graft, whole = growing.active[0], loop.evaluate()
    alpha = float(graft.alpha)
    graft.alpha.fill_(0.0)
    without = loop.evaluate()
    graft.alpha.fill_(alpha)
    report = growing.history[-1]
    difference = whole - without
    assert report.contributions["1"] == pytest.approx(float(difference.mean()), abs=1e-6)
    assert float(growing.gains.standard_error[0, 0]) == pytest.approx(float(difference.std() / math.sqrt(240)), abs=1e-6)


def test_a_pruned_seed_leaves_no_trace() -> None:
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "mlp_small"), e4=("PRUNE", 0, "")))
    counts = []
    for _ in range(7):
        loop.epoch()
        counts.append(sum(len(group["params"]) for group in loop.optimizer.param_groups))
    growing, bare = loop.growing, len(list(loop.model.parameters()))
    assert max(counts) == bare + 4
    assert counts[-1] == bare == len(loop.optimizer.state)
    assert not growing.grafts
    assert growing.params == 0


@pytest.mark.parametrize(("budget", "most"), [(0, 0), (100, 100), ("+20%", None), ("5 %", None), (None, math.inf)])
def test_a_budget_is_never_exceeded(budget: Any, most: float | None) -> None:
    loop = Loop(controller="random", budget=budget, epochs=24)
    growing = loop.growing
    host = growing.cost.params
    most = most if most is not None else host * float(str(budget).rstrip("% ")) / 100
    grown = [loop.epoch().params for _ in range(24)]
    assert max(grown) <= most
    assert (max(grown) > 0) == (most >= 16), "a norm has 16 parameters"


@pytest.mark.parametrize("more", [0, 100])
def test_targets_leave_room_for_so_many_parameters(more: int) -> None:
    host = Loop(controller="wait").growing.cost.params
    loop = Loop(controller="random", targets=20 * (host + more), epochs=24)
    grown = [loop.epoch().params for _ in range(24)]
    assert max(grown) <= more
    assert (max(grown) > 0) == (more > 0)
    with pytest.raises(EsperError, match="targets are the labels that all epochs show"):
        Loop(controller="wait", targets=-5)


def test_growth_that_breaks_training_is_taken_back() -> None:
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "mlp_small"), e9=("GERMINATE", 2, "norm")))
    growing = loop.growing
    for _ in range(4):
        loop.epoch()
    good = copy.deepcopy(growing.good)
    with torch.no_grad():
        next(iter(growing.grafts[0].seed.parameters())).fill_(math.nan)
    report = growing_with_nan(loop)
    assert report.decision.startswith("ROLLBACK")
    assert not growing.grafts
    for name, value in loop.model.state_dict().items():
        assert torch.equal(value, good.model[name]), name
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())
    for _ in range(8):
        report = loop.epoch()
    assert math.isfinite(report.score)
    assert 2 in growing.grafts, "it may grow again"


def growing_with_nan(loop: Loop) -> Any:
    """An epoch whose score is NaN, as users compute it from a loss."""
    loop.model.train()
    x, y = next(iter(loop.batches()))
    loop.optimizer.zero_grad()
    F.cross_entropy(loop.model(x), y).backward()
    loop.optimizer.step()
    return loop.growing.end_epoch(lambda: -float(F.cross_entropy(loop.model(loop.x), Y)))


def test_a_model_that_diverges_by_itself_is_not_our_doing() -> None:
    loop = Loop(controller="wait")
    with torch.no_grad():
        loop.model[0].weight.fill_(math.nan)
    before = loop.model.state_dict()
    report = growing_with_nan(loop)
    assert report.decision == "WAIT"
    assert math.isnan(report.score)
    assert loop.model.state_dict().keys() == before.keys()


def test_a_saved_growth_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def states(loop: Loop) -> dict[str, Any]:
        return copy.deepcopy({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict(),
                              "scheduler": loop.scheduler.state_dict(), "rng": torch.get_rng_state()})

    script = Script(e0=("GERMINATE", 0, "mlp_small"), e2=("GERMINATE", 2, "norm"), e7=("FOSSILIZE", 0, ""))
    options = incubating(Loop())
    whole = Loop(controller=script, **options)
    for _ in range(5):
        whole.epoch()
    whole.growing.save(tmp_path / "growth.safetensors")
    kept = states(whole)
    for _ in range(5):
        whole.epoch()
    again = Loop(controller=script, **options)
    again.growing.load(tmp_path / "growth.safetensors")
    again.model.load_state_dict(kept["model"])
    again.optimizer.load_state_dict(kept["optimizer"])
    again.scheduler.load_state_dict(kept["scheduler"])
    torch.set_rng_state(kept["rng"])
    for _ in range(5):
        again.epoch()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    for slot, graft in whole.growing.grafts.items():
        for name, value in graft.state_dict().items():
            assert torch.equal(value, again.growing.grafts[slot].state_dict()[name])
    assert [r.decision for r in whole.growing.history[5:]] == [r.decision for r in again.growing.history]
    other = Loop("speaker", controller="wait").growing
    with pytest.raises(EsperError, match="other slots"):
        other.load(tmp_path / "growth.safetensors")


def test_gradients_of_seeds_follow_the_loop() -> None:
    """Accumulated over steps, cleared by `model.zero_grad`, clipped apart from the model's."""
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "mlp_heavy")))
    growing = loop.growing
    for _ in range(3):
        loop.epoch()
    seed = growing.grafts[0].seed
    loop.model.zero_grad()
    for x, y in loop.batches():
        (1e4 * F.cross_entropy(loop.model(x), y)).backward()
    assert max(float(p.grad.abs().max()) for p in seed.parameters() if p.grad is not None) > 1
    seen: list[float] = []
    loop.optimizer.register_step_pre_hook(lambda *_: seen.append(math.sqrt(sum(float(p.grad.square().sum()) for p in seed.parameters()))))
    loop.optimizer.step()
    assert seen[0] <= 1.001
    assert all(p.grad is None for p in seed.parameters())


def test_a_compiled_model_grows_alike() -> None:
    eager = Loop(controller=GROW)
    compiled = Loop()
    torch._dynamo.reset()
    net = torch.compile(compiled.model, backend="eager")
    compiled.growing = esper.attach(net, compiled.optimizer, example=compiled.x[:4], controller=GROW, epochs=20)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for loop in (eager, compiled):
        torch.set_rng_state(state)
        loop.model = net if loop is compiled else loop.model
        for _ in range(9):
            loop.epoch()
    for a, b in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert eager.growing.history[-1].params == compiled.growing.history[-1].params > 0


@pytest.mark.parametrize(("kind", "paths"), [
    ("blocks", ["1", "2", "3"]), ("picture", ["stages.0", "stages.1", "stages.2"]), ("speaker", ["layers.0", "layers.1", "layers.2"])])
def test_slots_are_found(kind: str, paths: list[str]) -> None:
    growing = Loop(kind, controller="wait").growing
    assert [place.path for place in growing.places] == paths


class Stack(nn.Module):
    """A network that is the one part of its class, as in beginners' tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.flatten(x))
        return out


def test_slots_are_found_in_a_network_that_is_one_part_of_its_class() -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    growing = esper.attach(model, optimizer, example=X[:4])
    assert [place.path for place in growing.places] == ["layers.0", "layers.2"], "all but the head"
    growing.close()
    with pytest.raises(EsperError, match="no blocks to copy were found"):  # a layer is no block that could stand twice
        esper.attach(model, optimizer, example=X[:4], blueprints=["copy"])


def test_the_heuristic_helps_a_model_that_is_too_small() -> None:
    """Two rings that no linear map can part, and a host that is nothing else."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 2, generator=generator)
    y = (x.norm(dim=1) > 1.2).long()

    def accuracy(controller: str) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = [(x[i : i + 40], y[i : i + 40]) for i in range(0, 400, 40)]
        growing = esper.attach(model, optimizer, example=x[:4], slots=["0", "1"], controller=controller, epochs=24,
                               loss=lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), data=data)
        for _ in range(24):
            for a, b in data:
                optimizer.zero_grad()
                F.cross_entropy(model(a), b).backward()
                optimizer.step()
            growing.end_epoch(lambda: (model(x).argmax(1) == y).double())
        return float((growing.deliver()(x).argmax(1) == y).double().mean())

    assert accuracy("heuristic") > accuracy("wait") + 0.15


@pytest.mark.parametrize(("change", "sentence"), [
    ({"slots": ["nowhere"]}, "no submodule 'nowhere'"), ({"slots": []}, "no slots were found"), ({"epochs": 0}, "epochs and shadow_steps"),
    ({"controller": "tamiyo-small"}, "pass loss=, data= and objective="), ({"controller": 3}, "not a int"),
    ({"budget": "much"}, "means nothing"), ({"budget": -1}, "at least 0"), ({"price": -1.0}, "at least 0"), ({"colour": 1}, "colour"),
    ({"loss": lambda m, b: b}, "loss and data belong together"), ({"example": torch.zeros(2, 5)}, "does not run on the example"),
    ({"schedulers": 3}, "schedulers is a list"), ({"schedulers": [3]}, "schedulers is a list"), ({"layouts": {"1": "CBL"}}, "BCL or BTC"),
])
def test_what_cannot_be_is_one_sentence_and_leaves_the_model_alone(change: dict[str, Any], sentence: str) -> None:
    loop = Loop()
    before, hooks = loop.state(), [len(m._forward_hooks) for m in loop.model.modules()]
    with pytest.raises(EsperError, match=sentence) as told:
        esper.attach(loop.model, loop.optimizer, **{"example": X[:4]} | change)
    assert "\n" not in str(told.value)
    same(before, loop.state())
    assert hooks == [len(m._forward_hooks) for m in loop.model.modules()]


def test_what_users_forget_is_one_sentence() -> None:
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "norm")), loss=lambda m, b: m(b[0]), data=[(X, Y)])
    growing = loop.growing
    with pytest.raises(EsperError, match="took no step"):
        growing.end_epoch(loop.evaluate)
    loop.epoch()
    with pytest.raises(EsperError, match="one number that has a gradient"):
        loop.epoch()
    for score, sentence in (("good", "returned a str"), ([], "returned no number")):
        other = Loop(controller="wait")
        other.optimizer.step()
        with pytest.raises(EsperError, match=sentence):
            other.growing.end_epoch(lambda score=score: score)
    empty = Loop(controller=Script(e0=("GERMINATE", 0, "norm")), **incubating(Loop()) | {"data": iter(())})
    empty.epoch()
    with pytest.raises(EsperError, match="data yields no batches"):
        empty.epoch()


class Parts(nn.Module):
    """A block whose parts have further names and forms, as code of users has."""

    class Several(nn.Module):
        def __init__(self, form: Any) -> None:
            super().__init__()
            self.map, self.form = nn.Linear(8, 8), form

        def forward(self, h: Tensor) -> Any:
            return self.form([self.map(h), 1])

    def __init__(self, form: Any = list) -> None:
        super().__init__()
        self.first, self.several, self.inner, self.head = nn.Linear(12, 8), Parts.Several(form), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3)
        self.alias = self.inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.several(self.first(x))
        assert type(out) in (list, Pair)
        return self.head(self.alias(out[0]))


class Pair(NamedTuple):
    h: Tensor
    other: int


def grown_alone(model: nn.Module, slots: list[str], blueprint: str = "mlp_small", epochs: int = 9, x: Tensor = X, **options: Any) -> tuple[Any, Any]:
    """A model that keeps a seed in each slot."""
    actions = {f"e{slot}": ("GERMINATE", slot, blueprint) for slot in range(len(slots))} | {f"e{6 + slot}": ("FOSSILIZE", slot, "") for slot in range(len(slots))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    growing = esper.attach(model, optimizer, example=x[:4], slots=slots, controller=Script(**actions), **options)
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), Y).backward()
        optimizer.step()
        growing.end_epoch(lambda: 0.5)
    return growing, optimizer


@pytest.mark.parametrize("form", [list, Pair._make])
def test_nested_slots_and_modules_with_two_names_are_delivered(form: Any) -> None:
    model = Parts(form)
    growing, _ = grown_alone(model, ["several", "inner.0", "inner"], epochs=12)
    assert (growing.life.stage == SeedStage.FOSSILIZED).all()
    wanted = model(X)
    assert torch.equal(growing.deliver()(X), wanted)


def test_the_fast_path_of_transformers_does_not_pass_seeds_by() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(48, 3))
    growing, _ = grown_alone(model, ["1.linear2", "1.norm1"], x=TOKENS)
    assert growing.params > 0
    with torch.no_grad():
        wanted = model.eval()(TOKENS)
        torch.testing.assert_close(growing.deliver().eval()(TOKENS), wanted, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_encoders_that_leave_padding_out_when_they_evaluate() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(self.embed(x), src_key_padding_mask=x.cumsum(1) > 24)[:, 0])

    model = Padded()
    growing, _ = grown_alone(model, ["encoder.layers.1"], "block", x=TOKENS)
    wanted = model.train()(TOKENS).detach()
    for net in (model, growing.deliver()):
        with torch.no_grad():
            if net is not model:
                torch.testing.assert_close(net.eval()(TOKENS), wanted, rtol=0, atol=1e-5)
            assert net.eval()(TOKENS).shape == (240, 3)


def test_what_fails_inside_end_epoch_can_be_tried_again() -> None:
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "norm")))
    growing, calls = loop.growing, iter((0.5, None, 0.5, 0.5, 0.5, 0.5))
    for _ in range(4):
        loop.epoch()
    loop.optimizer.step()
    with pytest.raises(EsperError, match="NoneType"):
        growing.end_epoch(lambda: next(calls))
    assert 0 in growing.active, "its seed is in the model still"
    assert growing.end_epoch(lambda: next(calls)).contributions == {"1": 0.0}
    lengths = iter((10, 1))
    loop.optimizer.step()
    with pytest.raises(EsperError, match="always score all"):
        growing.end_epoch(lambda: torch.rand(next(lengths)))
    growing.policy = lambda view: torch.tensor([[99, 99, 99]])
    with pytest.raises(EsperError):
        loop.epoch()
    growing.policy = Script()
    assert loop.epoch().decision == "WAIT"

    def train() -> float:
        loop.optimizer.step()
        return 0.5

    before = copy.deepcopy(loop.model.state_dict())
    loop.model.zero_grad()
    loop.optimizer.step()
    with pytest.raises(EsperError, match="inside evaluate"):
        growing.end_epoch(train)
    same(before, loop.model.state_dict())


def test_beyond_the_last_epoch_ramps_go_on() -> None:
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "norm")), epochs=3)
    for _ in range(7):
        loop.epoch()
    assert float(loop.growing.life.alpha[0, 0]) == float(loop.growing.grafts[0].alpha) == 1


def test_a_rollback_after_load_goes_to_what_was_loaded(tmp_path: Path) -> None:
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "mlp_small")))
    for _ in range(4):
        loop.epoch()
    loop.growing.save(tmp_path / "growth")
    again = Loop(controller="wait")
    growing = again.growing
    growing.load(tmp_path / "growth")
    again.model.load_state_dict(loop.model.state_dict())
    again.optimizer.load_state_dict(loop.optimizer.state_dict())
    with torch.no_grad():
        next(iter(growing.grafts[0].seed.parameters())).fill_(math.nan)
    assert growing_with_nan(again).decision.startswith("ROLLBACK")
    same(loop.model.state_dict(), again.model.state_dict())
    with pytest.raises(EsperError, match="right after attach"):
        growing.load(tmp_path / "growth")
    narrow = nn.Sequential(nn.Linear(12, 6), Block(6), Block(6), Block(6), nn.Linear(6, 3))
    other = esper.attach(narrow, torch.optim.SGD(narrow.parameters()), example=X[:4])
    with pytest.raises(EsperError, match="other slots, widths"):
        other.load(tmp_path / "growth")
    assert not bool(other.life.planted.any())


def test_an_accuracy_does_not_hide_a_broken_seed() -> None:
    loop, outside = Loop(), nn.Parameter(torch.ones(1))
    loop.optimizer.param_groups[0]["params"].append(outside)  # of a loss, say
    growing = loop.growing = esper.attach(loop.model, loop.optimizer, example=X[:4], controller=Script(e0=("GERMINATE", 0, "mlp_small")))
    for _ in range(4):
        loop.epoch()
    with torch.no_grad():
        next(iter(growing.grafts[0].seed.parameters())).fill_(math.nan)
        outside.fill_(math.nan)
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    report = loop.epoch()
    assert math.isfinite(report.score)
    assert report.decision.startswith("ROLLBACK")
    assert all(bool(p.isfinite().all()) for p in [*loop.model.parameters(), outside])
    assert len(loop.optimizer.param_groups) == 3, "what users added since stays"
    assert math.isfinite(loop.epoch().score)


def test_a_loader_with_a_generator_of_its_own_draws_as_before() -> None:
    def order(attached: bool) -> list[int]:
        data = torch.utils.data.DataLoader(list(range(40)), 5, shuffle=True, generator=torch.Generator().manual_seed(1))
        loop = Loop(controller=Script(e0=("GERMINATE", 0, "norm")) if attached else None,
                    **{"data": data, "loss": lambda model, batch: F.cross_entropy(model(X[batch]), Y[batch])} if attached else {})
        for _ in range(3):
            seen = torch.cat(list(data)).tolist()
            loop.epoch()
        return seen

    assert order(True) == order(False)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling_and_skipped_steps(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), torch.amp.GradScaler("cpu")
    growing = esper.attach(model, optimizer, example=X[:4], slots=["0"], controller=Script(e0=("GERMINATE", 0, "mlp_small")))

    def step(factor: float = 1.0) -> None:
        model.zero_grad()
        scaler.scale(factor * F.cross_entropy(model(X), Y)).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()
        growing.end_epoch(lambda: 0.5)
    bias = growing.grafts[0].seed[-1].bias
    before = bias.detach().clone()
    step()
    assert float((bias.detach() - before).norm()) > 1e-4, "clipped by its true norm"
    step(math.inf)
    for _ in range(3):
        step()
    assert scaler.get_scale() == 2**15, "one step was skipped, and no more"


def test_models_may_be_moved_copied_and_pickled_while_attached() -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    growing = esper.attach(model, optimizer, example=X[:4], slots=["0"], controller=Script(e0=("GERMINATE", 0, "norm")))
    model.double()
    for _ in range(4):
        F.cross_entropy(model(X.double()), Y).backward()
        optimizer.step()
        growing.end_epoch(lambda: 0.5)
    assert growing.grafts[0].alpha.dtype is torch.float64
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert other(X.double()).shape == (240, 3)
    with pytest.raises(EsperError, match="attached already"):
        esper.attach(model, optimizer, example=X[:4].double(), slots=["0"])
    growing.deliver()
    for again in (growing.deliver, lambda: growing.save("nowhere")):
        with pytest.raises(EsperError, match="was delivered"):
            again()
    assert not model[0]._forward_hooks


@pytest.mark.parametrize(("name", "sentence"), [("LBFGS", "LBFGS cannot train"), ("SparseAdam", "SparseAdam cannot train")])
def test_optimizers_that_cannot_take_in_parameters(name: str, sentence: str) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3))
    with pytest.raises(EsperError, match=sentence):
        esper.attach(model, getattr(torch.optim, name)(model.parameters()), example=X[:4])


def test_sequences_of_another_length_and_recurrent_layers() -> None:
    series = nn.Sequential(nn.Conv1d(3, 8, 3), nn.Conv1d(8, 3, 3))
    assert "mixer" not in esper.attach(series, torch.optim.SGD(series.parameters()), example=torch.randn(2, 3, 9), slots=["0"]).spec.blueprints

    class Recurrent(Speaker):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.recurrent(self.embed(x))[0].mean(1))

    growing, _ = grown_alone(Recurrent(), ["recurrent"], x=TOKENS, blueprint="block", epochs=4)
    assert growing.places[0].shape.tokens == 6
    assert growing.host(torch.randint(9, (2, 17))).shape == (2, 3)


RANK = """
import os, sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
import esper

rank, world, folder = int(sys.argv[1]), 2, sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
x, y = torch.randn(2, 60, 4), torch.randint(3, (2, 60))     # every rank has data of its own
net = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
mine = [(x[rank, i : i + 20], y[rank, i : i + 20]) for i in (0, 20, 40)]


class Script:
    def __call__(self, view):
        told = {1: ("GERMINATE", 0, "mlp_small"), 2: ("GERMINATE", 2, "norm"), 3: ("GERMINATE", 1, "copy"), 6: ("PRUNE", 2, ""), 7: ("FOSSILIZE", 0, "")}
        op, slot, kind = told.get(int(view.clock), ("WAIT", 0, ""))
        return torch.tensor([view.spec.action(op, slot=slot, **({"blueprint": kind} if kind else {}))])


growing = esper.attach(net, optimizer, example=x[0, :4], slots=["1", "2", "3"], blueprints=["norm", "mlp_small", "copy"], controller=Script(),
                       epochs=12, shadow_steps=4, previews=3, flops=30.0, loss=lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), data=mine)
for epoch in range(9):
    for a, b in mine:
        optimizer.zero_grad()
        F.cross_entropy(net(a), b).backward()
        optimizer.step()
    growing.end_epoch(lambda: (model(x[rank]).argmax(1) == y[rank]).double())
    flat = torch.cat([p.detach().flatten() for p in [*model.parameters(), *(p for g in growing.grafts.values() for p in g.parameters())]])
    both = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(both, flat)
    assert torch.equal(*both), f"epoch {epoch}: ranks differ by {float((both[0] - both[1]).abs().max())}"
print([report.decision for report in growing.history], len(flat), len({r.score for r in growing.history}) > 1, flush=True)
dist.barrier()
os._exit(0)     # gloo's threads may still be at work, and would be complained about
"""


def test_two_ranks_stay_equal_through_births_blends_and_prunes(tmp_path: Path) -> None:
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], env=env, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for rank in range(2)]
    said = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said[0][1][-2000:] + said[1][1][-2000:]
    assert said[0][0] == said[1][0]
    for word in ("GERMINATE mlp_small", "GERMINATE norm", "GERMINATE copy", "PRUNE", "FOSSILIZE"):
        assert word in said[0][0]


def joined(**options: Any) -> tuple[Loop, Any]:
    """A loop whose optimizer has just been given a seed."""
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "mlp_small")), **options)
    while not loop.growing.joined:
        loop.epoch()
    return loop, loop.growing


def test_a_seed_that_joined_since_leaves_the_optimizer_when_growth_is_taken_back() -> None:
    """It broke in the first epoch of its ramp: the last good epoch knows it, but not in the optimizer."""
    loop, growing = joined()
    assert not growing.good.joined
    with torch.no_grad():
        next(iter(growing.grafts[0].seed.parameters())).fill_(math.nan)
    assert growing_with_nan(loop).decision.startswith("ROLLBACK")
    loop.optimizer.state_dict()
    assert len(loop.optimizer.state) == len(list(loop.model.parameters()))


@pytest.mark.parametrize("form", ["keyword", "position"])
def test_seeds_are_clipped_behind_a_closure(form: str) -> None:
    """Lightning computes gradients inside `optimizer.step`."""
    loop, growing = joined(optimizer="sgd")
    for group in loop.optimizer.param_groups:
        group |= {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    own = list(growing.grafts[0].seed.parameters())
    before = [p.detach().clone() for p in own]

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = 1e4 * F.cross_entropy(loop.model(loop.x), Y)
        loss.backward()
        return loss

    loss: Any = loop.optimizer.step(closure) if form == "position" else loop.optimizer.step(closure=closure)
    assert float(loss.detach()) > 0
    moved = math.sqrt(sum(float((a.detach() - b).square().sum()) for a, b in zip(own, before, strict=True)))
    assert moved == pytest.approx(1.0, rel=1e-3)


def test_an_evaluation_that_draws_sees_the_same_draws_with_and_without_a_seed() -> None:
    """As a loader that shuffles does: samples then come in the same order."""
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "norm")))
    orders: list[Tensor] = []

    def shuffled() -> Tensor:
        orders.append(torch.randperm(240))
        return loop.evaluate()[orders[-1]]

    for _ in range(4):
        orders.clear()
        for x, y in loop.batches():
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.model(x), y).backward()
            loop.optimizer.step()
        loop.growing.end_epoch(shuffled)
    assert len(orders) == 2
    assert torch.equal(*orders)


def test_gradients_are_kept_from_evaluations_that_make_some() -> None:
    loop, growing = joined()
    loop.optimizer.step()
    F.cross_entropy(loop.model(loop.x), Y).backward()
    parameters = [*loop.model.parameters(), *growing.grafts[0].seed.parameters()]
    before = [p.grad.clone() for p in parameters if p.grad is not None]

    def attacked() -> Tensor:
        with torch.enable_grad():
            F.cross_entropy(loop.model(loop.x), Y).backward()
        return loop.evaluate()

    growing.end_epoch(attacked)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, parameters, strict=True) if p.grad is not None)
    assert len(before) == len(parameters) == sum(p.grad is not None for p in parameters)


def test_ranks_are_known_in_compiled_models_and_speak_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL knows no tensors on the CPU."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    seen: list[str] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, *_: seen.append(tensor.device.type))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, *_: seen.append(tensor.device.type))
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(2, 2, device="meta")
    ranks = Ranks(nn.Sequential(wrapped))  # as torch.compile holds it
    assert ranks.several
    with pytest.raises((RuntimeError, NotImplementedError)):  # nothing can be read there
        ranks.all_true(True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        ranks.agree([torch.ones(2)])
    assert seen == ["meta", "meta"]
