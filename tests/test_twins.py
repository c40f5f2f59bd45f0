"""Numerical twins: the population against plain PyTorch modules, in float64."""

import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from esper.kasmina import BLUEPRINTS, HOSTS, INCUBATION, Host, OptimConfig, Population
from esper.kasmina.blending import Gather, GatherAll
from esper.kasmina.blueprints import Blueprint, SeedKind
from esper.kasmina.packing import MULTIPLE
from esper.leyline import LifecycleOp, SeedStage, SlotShape, Style, Transition
from tests.reference import PlainHost, batch, known_contributions, small_hosts, wait
from tests.workshop import random_actions

ROWS = 24
FEW = 12
"""Beside a loop, which takes as long as it has rows."""


def grown(kind: str, device: str = "cpu", epochs: int = 12, rows: int = ROWS, stages: int = 3, **options: object) -> Population:
    """A population with a random topology in every row, after a few steps of training."""
    generator = torch.Generator().manual_seed(5)
    shape = small_hosts()[kind] | {"widths": small_hosts()[kind]["widths"][:stages]}
    population = Population(Host(kind, **shape), rows, dtype=torch.float64, device=device, **options)
    for _ in range(epochs):
        population.begin_epoch(random_actions(population, generator))
        population.train_step(*batch(population, 4, generator))
        population.end_epoch(known_contributions(population))
    return population


def edges(moves: list[Transition]) -> set[tuple[SeedStage, SeedStage]]:
    return {(move.source, move.target) for move in moves}


@pytest.mark.parametrize("kind", HOSTS)
def test_forward_equals_extracted_modules(kind: str, device: str) -> None:
    population = grown(kind, device)
    assert len({tuple(r) for r in population.life.blueprint.tolist()}) >= 20
    assert int((population.life.alpha > 0).sum()) > ROWS / 2
    x, _ = batch(population, 6, torch.Generator().manual_seed(1))
    logits = population.forward(x)
    for row in range(ROWS):
        torch.testing.assert_close(population.extract(row)(x[:, row]).detach(), logits[:, row], rtol=0, atol=1e-10)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("incubation", INCUBATION)
@pytest.mark.parametrize("kind", HOSTS)
def test_training_equals_a_loop_of_modules(kind: str, incubation: str, optim: str, device: str) -> None:
    config = OptimConfig(optim, lr=0.02, weight_decay=0.01, host_clip=0.5, seed_clip=0.3)
    population = Population(Host(kind, **small_hosts()[kind]), FEW, dtype=torch.float64, device=device, incubation=incubation,
                            optim=config, seed=2)
    choices, generator = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    plain = [PlainHost(population, row) for row in range(FEW)]
    faded = replaced = 0
    last = torch.full((FEW, 3), -1)
    for epoch in range(20):
        population.begin_epoch(random_actions(population, choices))
        now, life = population.life.blueprint, population.life
        replaced += int(((now >= 0) & (last >= 0) & (now != last)).sum())
        last = torch.where(now >= 0, now, last)
        faded += int((life.fading & (life.ramp_at == life.ramp_length)).sum())
        for host in plain:
            host.follow()
        for _ in range(1 if device == "cpu" or epoch % 3 else 3):  # on CUDA the third step is a replayed graph
            x, y = batch(population, 5, generator)
            losses = population.train_step(x, y)
            expected = [host.step(x[:, row], y[:, row]) for row, host in enumerate(plain)]
            torch.testing.assert_close(losses.cpu(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)
        population.end_epoch(known_contributions(population))
    for row, host in enumerate(plain):
        mine = [*population.extract(row).stages.parameters(), *population.extract(row).head.parameters()]
        for a, b in zip(mine, [*host.stages.parameters(), *host.head.parameters()], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
        for slot in population.life.planted[row].nonzero().flatten().tolist():
            seed = population.graft(row, slot).to(device)
            for a, b in zip(seed.parameters(), host.seeds[slot].parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
    taken = edges(population.life.drain_transitions())
    s = SeedStage
    for edge in [(s.DORMANT, s.GERMINATED), (s.TRAINING, s.BLENDING), (s.TRAINING, s.PRUNED), (s.RESETTING, s.DORMANT),
                 (s.HOLDING, s.FOSSILIZED)]:
        assert edge in taken
    assert faded > 0
    assert replaced > 0


@pytest.mark.parametrize("kind", HOSTS)
def test_probed_rows_equal_a_forward_of_their_own(kind: str, device: str) -> None:
    """Rows that branch off where they differ, against the same rows run from the input."""
    population = grown(kind, device)
    x, _ = batch(population, 4, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    env = torch.randint(ROWS, (60,), generator=generator)
    alpha = population.life.alpha[env]
    switched = torch.rand(60, 3, generator=generator) < 0.4
    alpha = torch.where(switched, torch.randint(2, (60, 3), generator=generator) * 0.7, alpha)
    before = population.snapshot(torch.arange(ROWS))
    logits = population.probe(env, alpha)(x)
    wanted = population.forward(x[:, env.to(device)], env, alpha)
    torch.testing.assert_close(logits[:, :ROWS], population.forward(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(logits[:, ROWS:], wanted, rtol=0, atol=1e-10)
    assert float((wanted - population.forward(x)[:, env.to(device)]).abs().max()) > 1e-3
    for name, tensor in population.snapshot(torch.arange(ROWS)).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("kind", HOSTS)
def test_shadow_steps_train_incubating_seeds_alone(kind: str, device: str) -> None:
    """A shadow step gives a seed what a whole step gives it, and leaves the rest."""
    def run(whole: bool) -> Population:
        population = Population(Host(kind, **small_hosts()[kind]), 6, dtype=torch.float64, device=device)
        generator = torch.Generator().manual_seed(0)
        actions = torch.tensor([[int(LifecycleOp.GERMINATE), 1, 1 + row % 3, row % 3, 0, 2, 0, 0] for row in range(6)])
        population.begin_epoch(actions)
        population.set_lr(torch.tensor([0.0, 0.01, 0.01, 0.01]).repeat(6, 1))
        for _ in range(4):
            (population.train_step if whole else population.shadow_step)(*batch(population, 4, generator))
        return population

    alone, whole = run(False), run(True)
    born = Population(Host(kind, **small_hosts()[kind]), 6, dtype=torch.float64, device=device)
    assert torch.equal(alone.tensors()["bank.0.weights"], born.tensors()["bank.0.weights"])
    torch.testing.assert_close(alone.tensors()["bank.2.weights"], whole.tensors()["bank.2.weights"], rtol=0, atol=1e-10)
    assert float(alone.tensors()["bank.2.second"].amax(1).min()) > 0


@pytest.mark.parametrize("kind", HOSTS)
def test_padded_groups_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where groups are padded."""
    plain = grown(kind)
    monkeypatch.setitem(MULTIPLE, "cpu", 8)
    padded = grown(kind)
    theirs = padded.tensors()
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", HOSTS)
def test_a_row_alone_equals_the_row_in_a_crowd(kind: str, device: str) -> None:
    crowd = Population(Host(kind, **small_hosts()[kind]), 64, dtype=torch.float64, device=device)
    alone = Population(crowd.host, 1, dtype=torch.float64, device=device)
    alone.reset(torch.tensor([0]), crowd.keys[17:18])
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        actions = random_actions(crowd, generator)
        crowd.begin_epoch(actions)
        alone.begin_epoch(actions[17:18])
        x, y = batch(crowd, 4, generator)
        crowd.train_step(x, y)
        alone.train_step(x[:, 17:18], y[:, 17:18])
        crowd.end_epoch(known_contributions(crowd))
        alone.end_epoch(known_contributions(alone))
    mine, theirs = alone.snapshot(torch.tensor([0])), crowd.snapshot(torch.tensor([17]))
    assert bool(alone.life.planted.any())
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", HOSTS)
def test_counterfactual_rows_equal_edited_modules(kind: str, device: str) -> None:
    population = grown(kind, device)
    x, _ = batch(population, 4, torch.Generator().manual_seed(1))
    env = torch.randint(ROWS, (40,), generator=torch.Generator().manual_seed(2))
    off = torch.randint(3, (40,), generator=torch.Generator().manual_seed(3))
    alpha = population.life.alpha[env]
    alpha[torch.arange(40), off] = 0
    before = population.snapshot(torch.arange(ROWS))
    logits = population.forward(x[:, env.to(device)], env, alpha)
    for i, (row, slot) in enumerate(zip(env.tolist(), off.tolist(), strict=True)):
        net = population.extract(row)
        net.grafts[slot] = torch.nn.Identity()
        torch.testing.assert_close(net(x[:, row]).detach(), logits[:, i], rtol=0, atol=1e-10)
    for name, tensor in population.snapshot(torch.arange(ROWS)).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("kind", HOSTS)
def test_preview_of_an_incubating_seed(kind: str) -> None:
    population = grown(kind, epochs=5)
    row, slot = population.life.incubating.nonzero()[0].tolist()
    x, _ = batch(population, 4, torch.Generator().manual_seed(1))
    alpha = population.life.alpha[[row]]
    alpha[0, slot] = 0.7
    net = population.extract(row)
    net.grafts[slot] = population.graft(row, slot)
    net.grafts[slot].alpha.fill_(0.7)
    preview = population.forward(x[:, [row]], torch.tensor([row]), alpha)
    torch.testing.assert_close(preview[:, 0], net(x[:, row]).detach(), rtol=0, atol=1e-7)
    assert not torch.equal(preview[:, 0], population.forward(x)[:, row])


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # the compiler itself trips over warnings that are errors
@pytest.mark.parametrize(("kind", "stages"), [(kind, 2 if kind == "conv1d" else 1) for kind in HOSTS])  # compilers are slow
def test_compiled_equals_eager(kind: str, stages: int, device: str) -> None:
    eager = grown(kind, device, rows=8, epochs=6, stages=stages)
    graphs = counters["stats"]["unique_graphs"]
    compiled = grown(kind, device, rows=8, epochs=6, stages=stages, compile=True)
    assert len(compiled.life.blueprint.unique(dim=0)) > 3
    assert counters["stats"]["unique_graphs"] - graphs == stages  # one per stage, whatever the topology
    for name, tensor in eager.snapshot(torch.arange(8)).items():
        torch.testing.assert_close(tensor, compiled.snapshot(torch.arange(8))[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", HOSTS)
def test_bfloat16_stays_near(kind: str, device: str) -> None:
    population = grown(kind, device)
    rough = Population(population.host, ROWS, dtype=torch.float64, compute_dtype=torch.bfloat16, device=device)
    rough.restore(torch.arange(ROWS), population.snapshot(torch.arange(ROWS)))
    x, y = batch(population, 6, torch.Generator().manual_seed(1))
    exact, near = population.forward(x), rough.forward(x).double()
    assert 0 < float((near - exact).norm() / exact.norm()) < 2e-2
    torch.testing.assert_close(wait(rough).train_step(x, y).double(), wait(population).train_step(x, y), rtol=2e-2, atol=2e-2)


def planted(blueprints: tuple[str, ...], styles: torch.Tensor, alpha: float, dtype: torch.dtype, kind: str = "mlp") -> Population:
    """One row per blueprint, with it in every slot."""
    host = Host(kind, **small_hosts()[kind])
    population = Population(host, len(blueprints), dtype=dtype, optim=OptimConfig(lr=0.05))
    seeds = torch.tensor([population.spec.blueprints.index(name) for name in blueprints])[:, None].expand(-1, 3)
    population.install(torch.arange(len(seeds)), seeds, styles[:, None].expand(-1, 3), torch.full(seeds.shape, alpha))
    return population


def trained(population: Population, plain: Sequence[PlainHost] = ()) -> Population:
    """A few steps, for newborn seeds compute nothing; beside plain modules, if there are any."""
    generator = torch.Generator().manual_seed(0)
    wait(population)
    for host in plain:
        host.follow()
    for _ in range(5):
        x, y = batch(population, 6, generator)
        losses = population.train_step(x, y)
        for row, host in enumerate(plain):
            assert float(losses[row]) == pytest.approx(host.step(x[:, row], y[:, row]), abs=1e-8)
    return population


@pytest.mark.parametrize("mine", [
    lambda shape: nn.Sequential(nn.LayerNorm(shape.channels), (act := nn.ReLU()), nn.Linear(shape.channels, shape.channels), act),
    lambda shape: nn.Sequential(nn.LayerNorm(shape.channels, eps=0.1), nn.Linear(shape.channels, shape.channels)),
    lambda shape: nn.Linear(shape.channels, shape.channels),
], ids=["the same norm", "another eps", "no norm"])
def test_seeds_that_begin_alike_or_not_share_a_slot(mine: Callable[[SlotShape], nn.Module],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """With a norm that all of them begin with, or one that begins otherwise beside those that do."""
    monkeypatch.setitem(BLUEPRINTS, ("mlp", "mine"), Blueprint("mine", mine, ("mlp",), SeedKind.DENSE))
    names = ("norm", "low_rank", "glu", "mlp_small", "mlp_heavy", "mine", "mine")
    population = planted(names, torch.full((7,), int(Style.ADD)), 0.3, torch.float64)
    trained(population, [PlainHost(population, row) for row in range(7)])
    x, _ = batch(population, 6, torch.Generator().manual_seed(1))
    logits = population.forward(x)
    for row in range(7):
        torch.testing.assert_close(population.extract(row)(x[:, row]).detach(), logits[:, row], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["mlp", "conv1d", "cnn"])
@pytest.mark.parametrize("styles", [[Style.ADD] * 4, [Style.ADD, Style.MULTIPLY, Style.GATE, Style.ADD]], ids=["sums", "all styles"])
def test_one_blueprint_in_every_row_is_not_copied(kind: str, styles: list[Style], monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is the whole slot needs no gathering; several groups do."""
    gathered: list[int] = []
    for function in (Gather, GatherAll):
        apply = function.apply
        monkeypatch.setattr(function, "apply", lambda h, rows, apply=apply: (gathered.append(rows.total), apply(h, rows))[1])
    seeds = [name for name in Population(Host(kind), 1).spec.blueprints if name != "noop"][:2]
    population = planted((seeds[1],) * 4, torch.tensor([int(s) for s in styles]), 0.3, torch.float64, kind)
    trained(population, [PlainHost(population, row) for row in range(4)])
    x, _ = batch(population, 6, torch.Generator().manual_seed(1))
    logits = population.forward(x)
    assert not gathered
    for row in range(4):
        torch.testing.assert_close(population.extract(row)(x[:, row]).detach(), logits[:, row], rtol=0, atol=1e-10)
    trained(planted((*seeds, *seeds), torch.tensor([int(s) for s in styles]), 0.3, torch.float64, kind))
    assert gathered


def test_a_layer_norm_of_an_extent_is_not_taken_for_one_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(shape: SlotShape) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(shape.extent[0]), nn.Linear(shape.extent[0], shape.extent[0]))

    monkeypatch.setitem(BLUEPRINTS, ("conv1d", "mine"), Blueprint("mine", build, ("conv1d",), SeedKind.MIXER))
    population = trained(planted(("mine",) * 3, torch.full((3,), int(Style.ADD)), 0.3, torch.float64, "conv1d"))
    x, _ = batch(population, 6, torch.Generator().manual_seed(1))
    for row in range(3):
        torch.testing.assert_close(population.extract(row)(x[:, row]).detach(), population.forward(x)[:, row], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_row_computes_does_not_depend_on_its_neighbours_style(dtype: torch.dtype) -> None:
    """Not even in the last bit: plain sums take another way when nothing else is in the slot."""
    names = ("norm", "glu", "mlp_heavy", "mlp_heavy")
    styles = torch.full((4,), int(Style.ADD))
    sums = trained(planted(names, styles, 0.3, dtype))
    x, _ = batch(sums, 7, torch.Generator().manual_seed(1))
    mixed = trained(planted(names, styles.index_fill(0, torch.tensor([3]), int(Style.MULTIPLY)), 0.3, dtype))
    assert torch.equal(sums.forward(x)[:, :3], mixed.forward(x)[:, :3])
    assert not torch.equal(sums.forward(x)[:, 3], mixed.forward(x)[:, 3])
