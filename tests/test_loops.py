"""The door in loops of every kind: accumulated, scaled, clipped and half-precision gradients, compiled models, broken batches, killed processes."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experiments import kill_grow
from torch import Tensor, nn

import esper
from esper.kasmina.foreign import grow_behind
from esper.leyline import EsperError
from tests.test_door import GROW, MODELS, Loop, Script, X, Y, incubating, same


def live(kind: str = "blocks", epochs: int = 4, **options: Any) -> tuple[Loop, Any]:
    """A loop in which one seed is live and another incubates."""
    name = "mlp_small" if kind == "blocks" else "norm"
    script = Script(**{f"e{epoch}": ("GERMINATE", slot, name) for epoch, slot in ((0, 0), (3, 2))})
    loop = Loop(kind, controller=script, **incubating(Loop(kind)) | options)
    for _ in range(epochs):
        loop.epoch()
    assert list(loop.growing.active) == [0]
    return loop, loop.growing


def reference(loop: Loop) -> tuple[nn.Module, Any]:
    """The same network with its live seed as a plain part of it, and that part."""
    growing = loop.growing
    path, graft = growing.places[0].path, copy.deepcopy(growing.active[0])
    plain = copy.deepcopy(loop.model)
    for module in plain.modules():
        module._forward_hooks.clear()
    return grow_behind(plain, {path: graft}), graft.seed


def gradients(model: nn.Module, seed: nn.Module) -> list[Tensor]:
    assert all(p.grad is not None for p in seed.parameters())
    return [p.grad.clone() for p in seed.parameters() if p.grad is not None]


@pytest.mark.parametrize("how", ["accumulated", "bf16", "fp16 scaled", "clipped"])
def test_gradients_of_seeds_are_those_of_a_plain_network(how: str) -> None:
    loop, growing = live()
    plain, part = reference(loop)
    seed, x, y = growing.grafts[0].seed, loop.x[:60], Y[:60]
    dtype = {"bf16": torch.bfloat16, "fp16 scaled": torch.float16}.get(how)

    def loss(net: nn.Module, chosen: slice) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return F.cross_entropy(net(x[chosen]).float(), y[chosen])

    loop.model.zero_grad()
    if how == "accumulated":
        for start in (0, 20, 40):
            (loss(loop.model, slice(start, start + 20)) / 3).backward()
        loss(plain, slice(0, 60)).backward()
    elif how == "fp16 scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        scaler.scale(loss(loop.model, slice(0, 60))).backward()
        scaler.unscale_(loop.optimizer)
        (128.0 * loss(plain, slice(0, 60))).backward()
        for parameter in part.parameters():
            parameter.grad /= 128.0
    else:
        factor = 50.0 if how == "clipped" else 1.0
        (factor * loss(loop.model, slice(0, 60))).backward()
        (factor * loss(plain, slice(0, 60))).backward()
    found, wanted = gradients(loop.model, seed), gradients(plain, part)
    torch.testing.assert_close(found, wanted, rtol=1e-4 if how == "accumulated" else 0, atol=1e-7)
    assert max(float(grad.abs().max()) for grad in found) > 1e-4
    if how == "clipped":  # by its own norm, and the host by its own
        host = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in wanted))
        whole = math.sqrt(sum(float(grad.square().sum()) for grad in host))
        assert norm > 1
        seen: list[list[Tensor]] = []
        loop.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(loop.model, seed)))
        loop.optimizer.step()
        torch.testing.assert_close(seen[0], [grad / norm for grad in wanted], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close([p.grad for p in loop.model.parameters() if p.grad is not None], [grad * 0.1 / whole for grad in host], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", MODELS)
def test_measuring_live_and_incubating_seeds_leaves_the_training_alone(kind: str) -> None:
    """Weights, buffers, all optimizer states, gradients and random states are as before end_epoch."""
    loop, growing = live(kind)
    loop.model.train()
    for x, y in loop.batches():
        loop.optimizer.zero_grad()
        F.cross_entropy(loop.model(x), y).backward()
        loop.optimizer.step()
    F.cross_entropy(loop.model(loop.x[:20]), Y[:20]).backward()  # half way through an accumulation
    live_seed = growing.grafts[0].seed
    calls: list[list[int]] = []

    def careless() -> Tensor:
        calls.append(sorted(growing.active))
        loop.model.train()
        loop.model(loop.x)  # moves batch norms
        return loop.evaluate()

    def states() -> dict[str, Any]:
        mode = {"mode": repr([module.training for module in loop.model.modules()])}
        seeds = {f"seed {name}": value.clone() for name, value in live_seed.state_dict().items()}
        grads = {f"seed grad {number}": p.grad.clone() for number, p in enumerate(live_seed.parameters()) if p.grad is not None}
        known = {f"{number}.{key}": value for number, p in enumerate(live_seed.parameters()) for key, value in loop.optimizer.state[p].items()}
        return copy.deepcopy({**loop.host(), **mode, **seeds, **grads, **known})

    before = states()
    growing.end_epoch(careless)
    assert calls == [[0], [], [0, 2]], "as it is, without the live seed, with the incubating one"
    same(before, states())
    assert any(name.startswith("seed grad") for name in before)


@pytest.mark.parametrize("eps", [None, 1e-4])
def test_half_precision_weights(eps: float | None) -> None:
    """An epsilon of 1e-8 is 0 in float16: what has no gradient yet becomes 0 / 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).half()
    x = X.half()
    data = [(x[i : i + 40], Y[i : i + 40]) for i in range(0, 240, 40)]
    options = {"example": x[:4], "slots": ["0"], "controller": Script(e0=("GERMINATE", 0, "mlp_small")), "data": data,
               "loss": lambda net, batch: F.cross_entropy(net(batch[0]).float(), batch[1])}
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(EsperError, match="eps=1e-08 of AdamW is 0 in float16"):
        esper.attach(model, plain, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=eps is None, **{} if eps is None else {"eps": eps})
    growing = esper.attach(model, optimizer, **options)
    for _ in range(6):
        for a, b in data:
            optimizer.zero_grad()
            F.cross_entropy(model(a).float(), b).backward()
            optimizer.step()
        report = growing.end_epoch(lambda: -float(F.cross_entropy(model(x).float(), Y)))
        assert not report.decision.startswith("ROLLBACK")
    assert growing.joined == [0]
    assert all(bool(p.isfinite().all()) and p.dtype is torch.float16 for p in growing.grafts[0].seed.parameters())


class Changing(nn.Module):
    """A model that becomes wider, or flat, while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.form = nn.Identity(), "as it was"
        self.inner, self.head = nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.head({"as it was": lambda: self.first(h), "wider": lambda: self.first(torch.cat([h, h], 1))[:, :8],
                          "flat": lambda: self.first(h.unsqueeze(1)).squeeze(1)}[self.form]())


@pytest.mark.parametrize("form", ["wider", "flat"])
def test_a_model_that_changes_its_shapes_is_told_so(form: str) -> None:
    model = Changing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    growing = esper.attach(model, optimizer, example=X[:4], slots=["first"], controller=Script(e0=("GERMINATE", 0, "mlp_small")))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()

    for _ in range(3):
        step()
        growing.end_epoch(lambda: 0.5)
    step()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"], growing.grafts[0].state_dict()])
    model.form = form
    for call in (step, lambda: growing.end_epoch(lambda: float(model(X).mean()))):
        with pytest.raises(EsperError, match="first gave 8 channels in 2 dimensions when attached, and now a shape of") as told:
            call()
        assert "\n" not in str(told.value)
    torch.testing.assert_close([model.state_dict(), optimizer.state_dict()["state"], growing.grafts[0].state_dict()], before, rtol=0, atol=0)
    model.form = "as it was"
    step()
    assert growing.end_epoch(lambda: 0.5).params > 0, "and the training goes on"


def test_a_loss_that_is_no_number() -> None:
    options = incubating(Loop())
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "norm")), **options | {"loss": lambda net, batch: options["loss"](net, batch) * math.nan})
    loop.epoch()
    with pytest.raises(EsperError, match="is not a number, on every batch"):
        loop.epoch()
    plain = Loop()
    for _ in range(2):
        plain.epoch()
    same(plain.host(), loop.host())
    sometimes = iter([math.inf, math.nan, *[1.0] * 1000])
    loop = Loop(controller=Script(e0=("GERMINATE", 0, "norm")), **options | {"loss": lambda net, batch: options["loss"](net, batch) * next(sometimes)})
    for _ in range(3):
        loop.epoch()
    assert all(bool(p.isfinite().all()) for p in loop.growing.grafts[0].parameters()), "single batches are left out"

    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(EsperError, match="the loss is nan in epoch 0"):
        esper.grow(model, [(X, Y)], [(X, Y)], lambda net, batch: net(batch[0]).sum() * math.nan, epochs=2, slots=["0"])
    same(before, model.state_dict())


def test_a_model_compiled_by_aot_autograd_waits_and_grows() -> None:
    """Dynamo and AOT autograd, without the code generator: its C++ would take longer than this suite has."""
    state = torch.get_rng_state()

    def trained(controller: Any) -> Loop:
        torch._dynamo.reset()
        loop = Loop()
        net = torch.compile(loop.model, backend="aot_eager")
        if controller is not None:
            loop.growing = esper.attach(net, loop.optimizer, example=loop.x[:4], controller=controller, schedulers=[loop.scheduler], epochs=20)
        torch.set_rng_state(state)
        loop.model = net
        for _ in range(9 if controller is GROW else 3):
            loop.epoch()
        return loop

    same(trained(None).state() | {"mode": ""}, trained("wait").state() | {"mode": ""})
    growing = trained(GROW).growing
    assert growing.history[-1].params > 0
    with torch.no_grad():
        wanted = growing.model.eval()(X)
        torch.testing.assert_close(growing.deliver().eval()(X), wanted, rtol=0, atol=1e-5)


def test_killed_twice_it_grows_as_if_it_had_not_been(tmp_path: Path) -> None:
    found = kill_grow.measure(tmp_path, kills=2, epochs=12)
    assert found["kills"] == 2
    assert found["grown parameters"] > 0
    assert found["same file"]
