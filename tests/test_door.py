"""The door: a user's own model, optimizer and loop. Attached and waiting, nothing changes; what grows pays its way in and out."""

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
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
        self.growing = None if controller is None else esper.attach(
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
    assert growing is not None
    same(wanted, grown.host())
    seed = growing.grafts[1].seed
    assert any(float(p.detach().abs().max()) > 0 for p in seed.parameters()), "it learned"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_seed_that_is_kept_is_delivered(kind: str, optimizer: str) -> None:
    loop = Loop(kind, optimizer, "one cycle", controller=GROW, **incubating(Loop(kind)))
    keys, growing = set(loop.model.state_dict()), loop.growing
    assert growing is not None
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
    assert growing is not None
    assert set(report.contributions) == {"1", "3"}
    assert bool(growing._gains.known[0, [0, 2]].all())
    # By hand: the same model with one seed switched off.
    loop.epoch()
    graft, whole = growing._active[0], loop.evaluate()
    alpha = float(graft.alpha)
    graft.alpha.fill_(0.0)
    without = loop.evaluate()
    graft.alpha.fill_(alpha)
    report = growing.history[-1]
    difference = whole - without
    assert report.contributions["1"] == pytest.approx(float(difference.mean()), abs=1e-6)
    assert float(growing._gains.standard_error[0, 0]) == pytest.approx(float(difference.std() / math.sqrt(240)), abs=1e-6)


def test_a_pruned_seed_leaves_no_trace() -> None:
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "mlp_small"), e4=("PRUNE", 0, "")))
    counts = []
    for _ in range(7):
        loop.epoch()
        counts.append(sum(len(group["params"]) for group in loop.optimizer.param_groups))
    growing, bare = loop.growing, len(list(loop.model.parameters()))
    assert growing is not None
    assert max(counts) == bare + 4
    assert counts[-1] == bare == len(loop.optimizer.state)
    assert not growing.grafts
    assert growing.params == 0


@pytest.mark.parametrize(("budget", "most"), [(0, 0), (100, 100), ("+20%", None), ("5 %", None), (None, math.inf)])
def test_a_budget_is_never_exceeded(budget: Any, most: float | None) -> None:
    loop = Loop(controller="random", budget=budget, epochs=24)
    growing = loop.growing
    assert growing is not None
    host = growing.cost.params
    most = most if most is not None else host * float(str(budget).rstrip("% ")) / 100
    grown = [loop.epoch().params for _ in range(24)]
    assert max(grown) <= most
    assert (max(grown) > 0) == (most >= 16), "a norm has 16 parameters"


def test_growth_that_breaks_training_is_taken_back() -> None:
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "mlp_small"), e9=("GERMINATE", 2, "norm")))
    growing = loop.growing
    assert growing is not None
    for _ in range(4):
        loop.epoch()
    good = copy.deepcopy(growing._good)
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
    assert loop.growing is not None
    return loop.growing.end_epoch(lambda: -float(F.cross_entropy(loop.model(loop.x), Y)))


def test_a_model_that_diverges_by_itself_is_not_our_doing() -> None:
    loop = Loop(controller="wait")
    with torch.no_grad():
        loop.model[0].weight.fill_(math.nan)  # type: ignore[index]
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
    assert whole.growing is not None
    whole.growing.save(tmp_path / "growth.safetensors")
    kept = states(whole)
    for _ in range(5):
        whole.epoch()
    again = Loop(controller=script, **options)
    assert again.growing is not None
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
    assert other is not None
    with pytest.raises(EsperError, match="other slots"):
        other.load(tmp_path / "growth.safetensors")


def test_gradients_of_seeds_follow_the_loop() -> None:
    """Accumulated over steps, cleared by `model.zero_grad`, clipped apart from the model's."""
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "mlp_heavy")))
    growing = loop.growing
    assert growing is not None
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
    assert eager.growing is not None
    for a, b in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert eager.growing.history[-1].params == compiled.growing.history[-1].params > 0


@pytest.mark.parametrize(("kind", "paths"), [
    ("blocks", ["1", "2", "3"]), ("picture", ["stages.0", "stages.1", "stages.2"]), ("speaker", ["layers.0", "layers.1", "layers.2"])])
def test_slots_are_found(kind: str, paths: list[str]) -> None:
    growing = Loop(kind, controller="wait").growing
    assert growing is not None
    assert [place.path for place in growing.places] == paths


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
    ({"controller": "tamiyo-small"}, "no controller 'tamiyo-small' for models of your own; choose from heuristic"), ({"controller": 3}, "not a int"),
    ({"budget": "much"}, "means nothing"), ({"budget": -1}, "at least 0"), ({"price": -1.0}, "at least 0"), ({"colour": 1}, "colour"),
    ({"loss": lambda m, b: b}, "loss and data belong together"), ({"example": torch.zeros(2, 5)}, "does not run on the example"),
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
    assert growing is not None
    with pytest.raises(EsperError, match="took no step"):
        growing.end_epoch(loop.evaluate)
    loop.epoch()
    with pytest.raises(EsperError, match="one number that has a gradient"):
        loop.epoch()
    for score, sentence in (("good", "returned a str"), ([], "returned no number")):
        other = Loop(controller="wait")
        assert other.growing is not None
        other.optimizer.step()
        with pytest.raises(EsperError, match=sentence):
            other.growing.end_epoch(lambda score=score: score)
    empty = Loop(controller=Script(e0=("GERMINATE", 0, "norm")), **incubating(Loop()) | {"data": iter(())})
    assert empty.growing is not None
    empty.epoch()
    with pytest.raises(EsperError, match="data yields no batches"):
        empty.epoch()
